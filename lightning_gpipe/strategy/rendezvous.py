"""Meeting all processes in the default process group, and leaving it after an error."""

from __future__ import annotations

import gc
import os
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from lightning_gpipe.failure.screen import say
from lightning_gpipe.strategy import _lightning

_GLOO, _NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
_LEAVE_S = 3.0
_SOON_S = 30.0  # until it is told that other nodes are waited for
#: Where the processes met before an error.
_met: list[Any] = []


def keep_port(environment: Any) -> None:
    """Keep the port where the processes will meet from other programs, while they start.

    Lightning finds a free one, which anyone may have taken when the first process listens there.
    The socket that keeps it never listens: beside such a one, others that ask may, on Linux.

    Args:
        environment: Lightning's cluster environment.
    """
    if dist.is_initialized():
        os.environ.pop("MASTER_PORT", None)  # where this process's own group has met
    port = environment.main_port
    if sys.platform != "linux" or environment.node_rank() != 0:
        return
    with socket.socket() as keeper, suppress(OSError):  # if it is taken, who listens there says so
        keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        keeper.bind(("", port))
        keeper.detach()  # it is open until this process ends


def join_world(environment: Any, backend: str, timeout: timedelta, device: torch.device) -> None:
    """Make the default process group, unless there is one. Collective over all processes.

    Args:
        environment: Lightning's cluster environment.
        backend: The backend's name.
        timeout: How long a process waits for another.
        device: This rank's device.
    """
    if "nccl" in backend:
        # NCCL's own watchdog would end processes before ours has told them why
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")
        # messages of a group run in order, which each direction between two ranks has its own for
        os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "false")
    interface = gloo_interface()
    if interface is not None:
        os.environ[_GLOO] = interface
    again: dict[str, Any] = {}
    if _met and not dist.is_initialized():
        gc.collect()  # the groups of the run that failed, for which others may still wait
        again = {"store": PrefixStore("again", _met[-1])}
    _lightning.init_distributed(
        environment,
        backend,
        timeout=timeout,
        device_id=device if device.type != "cpu" and backend != "gloo" else None,
        **again,
    )


@contextmanager
def telling_who_waits(environment: Any, nodes: int, timeout: timedelta) -> Iterator[None]:
    """Meet inside; what is waited for is told where that takes long, once a node.

    Args:
        environment: Lightning's cluster environment.
        nodes: The number of nodes.
        timeout: How long a process waits for another.
    """
    timer = threading.Timer(_SOON_S, say, [_waiting_text(environment, nodes, timeout)])
    timer.daemon = True
    if nodes > 1 and environment.local_rank() == 0:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _waiting_text(environment: Any, nodes: int, timeout: timedelta) -> str:
    return (
        f"[rank {environment.global_rank()}] Waits for the processes of the other nodes, at"
        f" {environment.main_address}:{environment.main_port}, and gives up after {timeout}: the"
        f" Trainer has num_nodes={nodes}. Start the script on each of them with the same"
        " MASTER_ADDR and MASTER_PORT, and its own NODE_RANK."
    )


def leave_world() -> None:
    """Destroy the default process group after an error, so that the next run makes a new one.

    The processes will meet through the same store, under another name: its address is taken, and
    who comes early would find the old one there.
    """
    if not dist.is_initialized():
        return
    _met[:] = [dist.distributed_c10d._get_default_store()]
    leaving = threading.Thread(target=dist.destroy_process_group, name="gpipe-leave", daemon=True)
    leaving.start()
    leaving.join(_LEAVE_S)  # what is left of it may block


def leave_before_fork() -> None:
    """Destroy the default process group of this one process, which forks can't use.

    What else is left of groups goes, too: a fork that collects them waits for threads that it
    hasn't got. And forks meet at another port: at this one all of them would find the store of this
    process, with what those of an earlier run have left there.

    Raises:
        RuntimeError: If other processes are in it.
    """
    if dist.is_initialized() and dist.get_world_size() > 1:
        raise RuntimeError(
            f"This process is one of {dist.get_world_size()} in a process group of"
            " torch.distributed, which the processes forked from it can't use. Call"
            " torch.distributed.destroy_process_group() before the Trainer runs, or restart the"
            " notebook's kernel."
        )
    if dist.is_initialized():
        dist.destroy_process_group()
        os.environ.pop("MASTER_PORT", None)
    gc.collect()


def gloo_interface() -> str | None:
    """The network interface that gloo should use, where only NCCL has been told.

    Returns:
        None where gloo has been told, too, nobody has, or none fits.
    """
    wanted = os.environ.get(_NCCL, "")
    if not wanted or _GLOO in os.environ:
        return None
    excludes, wanted = wanted.startswith("^"), wanted.removeprefix("^")
    is_exact, names = wanted.startswith("="), wanted.removeprefix("=").split(",")
    for _, interface in socket.if_nameindex():
        matches = interface in names if is_exact else interface.startswith(tuple(names))
        if matches != excludes and not (excludes and interface == "lo"):
            return interface
    return None


def explain_connections(error: RuntimeError, environment: Any, nodes: int) -> RuntimeError:
    """What to do where processes can't connect.

    Args:
        error: PyTorch's.
        environment: Lightning's cluster environment.
        nodes: The number of nodes.
    """
    if "EADDRINUSE" in str(error):
        return RuntimeError(
            f"Another program of this machine has taken port {environment.main_port}, where the"
            " processes of this run should meet. Set MASTER_PORT to a port that is free on the"
            " first node, the same on every node; on one node unset it, to have a free one chosen."
        )
    if nodes == 1:
        return error
    return RuntimeError(
        f"The processes of this run can't connect to each other: {error}. Control messages go over"
        " gloo. Set GLOO_SOCKET_IFNAME on every node to the network interface by which the nodes"
        f" reach each other, such as eth0 (now {os.environ.get(_GLOO, 'unset')};"
        f" {_NCCL} is {os.environ.get(_NCCL, 'unset')})."
    )
