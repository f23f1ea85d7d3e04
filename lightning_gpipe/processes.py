"""The processes of a pipeline, as Lightning sees them: ranks, groups, collectives."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor
from typing_extensions import override

from lightning_gpipe import _lightning
from lightning_gpipe.control import Control
from lightning_gpipe.links import Links
from lightning_gpipe.settings import Settings

_T = TypeVar("_T")


class PipelineProcesses(ParallelStrategy):
    """One process per stage, launched by Lightning, connected by process groups.

    Args:
        settings: What the user chose.
        process_group_backend: Backend for the tensors; ``None``: NCCL on GPUs, gloo on CPUs.
        timeout: How long a process waits for another before it gives up.
        options: Passed to ``ParallelStrategy``.
    """

    def __init__(
        self,
        settings: Settings,
        process_group_backend: str | None,
        timeout: timedelta,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.num_nodes = 1
        self._settings = settings
        self._process_group_backend = process_group_backend
        self._timeout = timeout
        self._links: Links | None = None

    @property
    @override
    def root_device(self) -> torch.device:
        if self.parallel_devices is None:
            raise RuntimeError("The strategy has no devices yet: the Trainer sets them.")
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        """Processes of this node."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def stages(self) -> int:
        """K, the number of stages."""
        return self.world_size if self._settings.stages == "auto" else self._settings.stages

    @property
    def chunks(self) -> int:
        """M, the number of micro-batches that a mini-batch is split into."""
        return 4 * self.stages if self._settings.chunks == "auto" else self._settings.chunks

    @property
    def replicas(self) -> int:
        """D, the number of pipelines."""
        return self.world_size // self.stages

    @property
    def stage(self) -> int:
        """The stage that this process runs."""
        return self.global_rank % self.stages

    @property
    def is_distributed(self) -> bool:
        """Whether data is shared out between replicas, in Lightning's sense of the word."""
        return self.replicas > 1

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.replicas, "rank": self.global_rank // self.stages}

    # ------------------------------------------------------------------ processes

    @override
    def _configure_launcher(self) -> None:
        if self.cluster_environment is None:
            raise RuntimeError("The strategy has no cluster environment: the Trainer sets it.")
        if not self.cluster_environment.creates_processes_externally:
            self._launcher = _lightning.ScriptLauncher(
                self.cluster_environment, self.num_processes, self.num_nodes
            )

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        self._check_world()
        _lightning.reset_seed()
        self.set_world_ranks()
        if self.cluster_environment is None:
            raise RuntimeError("The strategy has no cluster environment: the Trainer sets it.")
        device = self.root_device
        backend = self._process_group_backend or _lightning.default_backend(device)
        _lightning.init_distributed(
            self.cluster_environment,
            backend,
            timeout=self._timeout,
            device_id=device if device.type != "cpu" else None,
        )
        if self._links is None:
            self._links = self._connect(backend, device)

    def set_world_ranks(self) -> None:
        """Tell the cluster environment this process's place."""
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(
                self.node_rank * self.num_processes + self.local_rank
            )
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        setattr(rank_zero_only, "rank", self.global_rank)  # noqa: B010  (an untyped attribute)

    def _check_world(self) -> None:
        world, stages = self.world_size, self.stages
        if world % stages:
            raise ValueError(
                f"{world} processes can't be divided into pipelines of stages={stages}: choose"
                " devices x num_nodes as a multiple of stages, or stages='auto' for one pipeline of"
                f" {world} stages."
            )
        if world > stages:
            raise ValueError(
                f"{world} processes make {world // stages} replicas of {stages} stages, and this"
                f" version trains one replica: use devices={stages}, or stages='auto'."
            )

    def _connect(self, backend: str, device: torch.device) -> Links:
        """Make the groups of this process's pipeline. Collective over the world."""
        links: Links | None = None
        for first in range(0, self.world_size, self.stages):
            ranks = list(range(first, first + self.stages))
            through_host = backend == "gloo"
            lanes = 1 if through_host else 2
            kinds = ["gloo", *[backend] * (1 + 2 * lanes)]
            host, data, *others = (
                cast(dist.ProcessGroup, dist.new_group(ranks, timeout=self._timeout, backend=kind))
                for kind in kinds
            )
            if self.global_rank in ranks:
                downs, ups = tuple(others[:lanes]), tuple(others[lanes:])
                place = self.stage, tuple(ranks)
                control = Control(*place, host, host if through_host else data, device)
                links = Links(*place, device, host, data, downs, ups, through_host, control)
        if links is None:
            raise RuntimeError(
                f"Rank {self.global_rank} has no place in {self.world_size} processes."
            )
        return links

    # ------------------------------------------------------------------ collectives

    @override
    def barrier(self, name: str | None = None) -> None:
        if not _lightning.distributed_is_initialized():
            return
        if dist.get_backend() == "nccl":
            dist.barrier(device_ids=[self.root_device.index])
        else:
            dist.barrier()

    @override
    def broadcast(self, obj: _T, src: int = 0) -> _T:
        if not _lightning.distributed_is_initialized():
            return obj
        objects = [obj]
        dist.broadcast_object_list(objects, src)
        return objects[0]

    @override
    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any | None = "mean") -> Any:
        """Reduce a value over replicas: with one, every stage has the whole value already."""
        return tensor

    @override
    def all_gather(
        self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False
    ) -> Tensor:
        """Gather a value from all replicas: with one replica every stage has it already."""
        return tensor

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Agree on a decision over all processes."""
        if not _lightning.distributed_is_initialized():
            return decision
        votes = torch.tensor(int(decision), device=self.root_device)
        dist.all_reduce(votes, dist.ReduceOp.MIN if all else dist.ReduceOp.MAX)
        return bool(votes)
