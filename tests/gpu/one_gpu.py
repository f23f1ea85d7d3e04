"""Every process trains on the first GPU, whatever their number.

NCCL refuses two ranks on one GPU of one host. Told that each process is a host of its own, it sends
over sockets what it would send between hosts.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import torch
from lightning.pytorch.accelerators import CUDAAccelerator
from torch.utils._pytree import tree_map_only

from lightning_gpipe import GPipeStrategy
from tests import ranks


class OneGPU(CUDAAccelerator):
    """Lets all processes of a node use its first GPU."""

    @staticmethod
    def parse_devices(devices: Any) -> list[int]:
        return [0] * int(devices)

    @staticmethod
    def get_parallel_devices(devices: list[int]) -> list[torch.device]:
        return [torch.device("cuda", index) for index in devices]

    def setup_device(self, device: torch.device) -> None:
        super().setup_device(device)
        os.environ.update(NCCL_HOSTID=f"process-{os.getpid()}", NCCL_SOCKET_IFNAME="lo")


def take_over(backend: str) -> OneGPU:
    """Let pipelines talk over a backend, and results of ranks come back in host memory.

    Args:
        backend: Of the process groups: gloo or nccl.

    Returns:
        The accelerator for Trainers.
    """
    made, call = GPipeStrategy.__init__, ranks._call

    @functools.wraps(made)
    def make(self: Any, *args: Any, **options: Any) -> None:
        made(self, *args, **{"process_group_backend": backend, **options})

    def in_host_memory(*args: Any) -> Any:
        answer = call(*args)
        value = tree_map_only(torch.Tensor, torch.Tensor.cpu, answer.value)
        return ranks._Answer(value, answer.error, answer.in_world)

    GPipeStrategy.__init__ = make  # type: ignore[method-assign]
    ranks._call = in_host_memory
    return OneGPU()
