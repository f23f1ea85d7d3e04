"""Meeting all processes in the default process group, and leaving it after an error."""

from __future__ import annotations

import gc
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from torch._C._distributed_c10d import PrefixStore

from lightning_gpipe.failure.screen import say
from lightning_gpipe.strategy import _lightning
from lightning_gpipe.strategy.children import are_started_elsewhere

_GLOO, _NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
_LEAVE_S = 3.0
_SOON_S = 30.0  # until it is told that others are waited for
#: Where the processes met before an error.
_met: list[Any] = []
#: Ports where no one has told the processes to meet, and the descriptors of what keeps them.
_found: dict[str, int] = {}


def check_meeting(environment: Any, nodes: int, backend: str | None, device: torch.device) -> None:
    """Check what tells processes how to meet, before any starts.

    Args:
        environment: Lightning's cluster environment.
        nodes: The number of nodes.
        backend: The backend's name, or those of several devices; None: the device's own.
        device: This process's device.

    Raises:
        ValueError: With what to do instead.
    """
    for part in (backend or "").lower().split(","):
        kind, _, name = part.rpartition(":")
        if name and not dist.is_backend_available(name):
            there = [each for each in dist.Backend.backend_list if dist.is_backend_available(each)]
            raise ValueError(
                f"process_group_backend={backend!r} is no backend of this PyTorch, which has"
                f" {', '.join(there)}. Leave it out to have the device's own."
            )
        if name == "nccl" and (kind or device.type) == "cpu":
            raise ValueError(
                f"process_group_backend={backend!r} is for GPUs, and the Trainer has CPUs: leave it"
                " out, or give Trainer(accelerator='gpu')."
            )
    if not isinstance(environment, LightningEnvironment):
        return
    port = os.environ.get("MASTER_PORT")
    if port is not None and not (port.isdecimal() and 0 < int(port) < 1 << 16):
        raise ValueError(
            f"MASTER_PORT={port!r} is no port: set it to a number from 1 to 65535, the same on"
            " every node, or on one node unset it."
        )
    node = environment.node_rank()
    if not node < nodes:
        variable = "GROUP_RANK" if "GROUP_RANK" in os.environ else "NODE_RANK"
        raise ValueError(
            f"{variable}={node} names one of {node + 1} nodes or more, and the Trainer has"
            f" num_nodes={nodes}: unset it, or give Trainer(num_nodes=...)."
        )


def keep_port(environment: Any) -> None:
    """Keep the port where the processes will meet from other programs, while they start.

    Lightning finds a free one, which anyone may have taken when the first process listens there.
    The socket that keeps it never listens: beside such a one, others that ask may, on Linux. One
    that was found before isn't taken again: this process may have met itself there since, and its
    store still have what those of an earlier run have left.

    Args:
        environment: Lightning's cluster environment.
    """
    if dist.is_initialized():
        os.environ.pop("MASTER_PORT", None)  # where this process's own group has met
    before = os.environ.get("MASTER_PORT")
    if before in _found:
        del os.environ["MASTER_PORT"]
        environment._main_port = -1  # its own note of it
        os.close(_found.pop(before))
    is_given = "MASTER_PORT" in os.environ
    port = environment.main_port
    keeper = socket.socket()
    if sys.platform == "linux" and environment.node_rank() == 0:
        with suppress(OSError):  # if it is taken, who listens there says so
            keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            keeper.bind(("", port))
    kept = keeper.detach()  # it is open until this process ends, or meets elsewhere
    if not is_given:
        _found[str(port)] = kept


def join_world(
    environment: Any, backend: str, timeout: timedelta, device: torch.device
) -> Callable[[], None]:
    """Make the default process group, unless there is one. Collective over all processes.

    A group of this process alone can't be joined by others, so it goes before they come. Who is
    forked, or another strategy, would take such a group for one of all: the run that has made it
    leaves it at its end.

    Args:
        environment: Lightning's cluster environment.
        backend: The backend's name.
        timeout: How long a process waits for another.
        device: This rank's device.

    Returns:
        To be called at the end of the run.

    Raises:
        RuntimeError: If there is one of another number of processes.
    """
    before = os.environ.get("MASTER_PORT")
    found, wanted = dist.get_world_size() if dist.is_initialized() else 0, environment.world_size()
    if found == 1 < wanted:
        dist.destroy_process_group()
    elif found not in (0, wanted):
        raise RuntimeError(
            f"This process is one of {found} in a process group of torch.distributed, and this"
            f" Trainer has {wanted} process{'es' * (wanted > 1)}. Where an earlier Trainer has made"
            " the group, call torch.distributed.destroy_process_group() in each process between the"
            " two."
        )
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
    is_alone = wanted == 1 and not environment.creates_processes_externally
    return partial(_leave_alone, before) if is_alone and not found else lambda: None


def _leave_alone(port: str | None) -> None:
    if not dist.is_initialized():
        return
    dist.destroy_process_group()
    os.environ.pop("MASTER_PORT", None)  # where its store may listen still
    if port is not None:
        os.environ["MASTER_PORT"] = port


@contextmanager
def telling_who_waits(
    environment: Any, nodes: int, processes: int, timeout: timedelta
) -> Iterator[None]:
    """Meet inside; what is waited for is told where that takes long, once a node.

    Processes that one of them has started are heard of when they end.

    Args:
        environment: Lightning's cluster environment.
        nodes: The number of nodes.
        processes: Of this node.
        timeout: How long a process waits for another.
    """
    is_alone = nodes == 1 and (processes == 1 or not are_started_elsewhere(environment))
    text = (_NODES if nodes > 1 else _PROCESSES).format(
        rank=environment.global_rank(),
        place=f"{environment.main_address}:{environment.main_port}",
        timeout=timeout,
        nodes=nodes,
        processes=processes,
        name=type(environment).__name__,
        variable=_STARTED_BY.get(type(environment).__name__, "its environment variables"),
    )
    timer = threading.Timer(_SOON_S, say, [text])
    timer.daemon = True
    if not is_alone and environment.local_rank() == 0:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


_NODES = (
    "[rank {rank}] Waits for the processes of the other nodes, at {place}, and gives up after"
    " {timeout}: the Trainer has num_nodes={nodes}. Start the script on each of them with the same"
    " MASTER_ADDR and MASTER_PORT, and its own NODE_RANK."
)
_PROCESSES = (
    "[rank {rank}] Waits for the other processes of this node, at {place}, and gives up after"
    " {timeout}: of {processes} the Trainer starts none, since a launcher does by {name}. If none"
    " does, unset {variable}."
)
#: By what Lightning knows that.
_STARTED_BY = {
    "LightningEnvironment": "LOCAL_RANK",
    "TorchElasticEnvironment": "TORCHELASTIC_RUN_ID",
    "SLURMEnvironment": "SLURM_NTASKS",
}


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
    _leave_alone(None)
    gc.collect()


def forget_meeting() -> None:
    """Forget where the process from which this one was forked has met others."""
    _met.clear()


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


def explain_connections(
    error: RuntimeError, environment: Any, nodes: int, timeout: timedelta
) -> RuntimeError:
    """What to do where processes can't connect.

    Args:
        error: PyTorch's.
        environment: Lightning's cluster environment.
        nodes: The number of nodes.
        timeout: How long a process waits for another.
    """
    if "EADDRINUSE" in str(error):
        return RuntimeError(
            f"Another program of this machine has taken port {environment.main_port}, where the"
            " processes of this run should meet. Set MASTER_PORT to a port that is free on the"
            " first node, the same on every node; on one node unset it, to have a free one chosen."
        )
    address, reason = environment.main_address, str(error).rstrip(".")
    if isinstance(error, dist.DistNetworkError):
        remedy = f"Where MASTER_ADDR={address} isn't this machine, unset it."
        if nodes > 1:
            remedy = (
                f"The first node's script has to run, MASTER_ADDR={address} to be an address of it"
                " that the others reach, and MASTER_PORT a port that no firewall closes."
            )
        return RuntimeError(
            f"The processes of this run can't meet at {address}:{environment.main_port}: {reason}."
            f" {remedy}"
        )
    if isinstance(error, dist.DistStoreError):
        remedy = "Where a launcher starts them, it has to start as many as the Trainer has devices."
        if nodes > 1:
            remedy = (
                f"Start the script on each of the {nodes} nodes, with the same MASTER_ADDR and"
                " MASTER_PORT, and its own NODE_RANK."
            )
        return RuntimeError(
            f"Not all processes of this run have come within {timeout}: {reason}. They need the"
            f" time to import what the script does: give GPipeStrategy a longer timeout. {remedy}"
        )
    if nodes == 1:
        return error
    return RuntimeError(
        f"The processes of this run can't connect to each other: {reason}. Control messages go over"
        " gloo. Set GLOO_SOCKET_IFNAME on every node to the network interface by which the nodes"
        f" reach each other, such as eth0 (now {os.environ.get(_GLOO, 'unset')};"
        f" {_NCCL} is {os.environ.get(_NCCL, 'unset')})."
    )
