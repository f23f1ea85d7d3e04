"""What users are told who seem to mean something else."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable
from contextlib import suppress
from inspect import signature
from pathlib import Path
from types import FrameType
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_gpipe.strategy import _lightning

_COUNTS = {getattr(pl.Trainer, name).fget.__code__ for name in ("world_size", "num_devices")}
_READERS = {*_COUNTS, pl.Trainer.device_ids.fget.__code__}  # type: ignore[attr-defined]
#: Packages that ask for the number of processes themselves, and mean it.
_OTHERS = {"lightning", "lightning_gpipe"}


def explain_one_stage() -> None:
    """Say why there is one stage, where the number of devices was not thought of."""
    rank_zero_info(
        "GPipeStrategy runs one stage, since the Trainer has one device (on a CPU, devices='auto'"
        " means one): give Trainer(devices=K) for K stages."
    )


def is_read_by_user(frame: FrameType) -> bool:
    """Whether a module or DataModule reads ``trainer.world_size``, or what counts devices.

    Args:
        frame: That of the strategy's property.
    """
    last, reader = frame, frame.f_back
    while reader is not None and reader.f_code in _READERS:
        last, reader = reader, reader.f_back
    if reader is None or last.f_code not in _COUNTS:
        return False
    return _belongs_to_others(reader) is False


#: Asks for the number of processes whenever somebody reads a loader.
_LOADER = "torch.utils.data.dataloader"


def is_called_by_user(frame: FrameType | None) -> bool:
    """Whether a module or DataModule calls a function, or another one that does.

    Args:
        frame: That of who calls it.
    """
    while frame is not None:
        if (is_others := _belongs_to_others(frame)) is not None:
            return not is_others
        frame = frame.f_back
    return False


def _belongs_to_others(frame: FrameType) -> bool | None:
    """Whether Lightning or this package runs, or else a module or DataModule; None: neither."""
    name = str(frame.f_globals.get("__name__", ""))
    if name.partition(".")[0] in _OTHERS or name == _LOADER:
        return True
    names = frame.f_code.co_varnames[:1]
    reads = frame.f_locals.get(names[0]) if names else None
    return False if isinstance(reads, (pl.LightningModule, pl.LightningDataModule)) else None


def warn_of_world_size(what: str, size: int, stages: int, replicas: int) -> None:
    """Say what the number of processes counts.

    Args:
        what: What tells it.
        size: It; of one node, perhaps.
        stages: K.
        replicas: D.
    """
    rank_zero_warn(
        f"{what} is {size} here: {stages} stages x {replicas} replicas"
        f"{' on all nodes' if size < stages * replicas else ''}."
        " The stages of a pipeline work on the same batch, so a batch size or learning rate that"
        f" goes by the number of devices is meant to use trainer.strategy.replicas ({replicas})."
        " Data that is shared out by it would be left unread in part: share it out by"
        " trainer.distributed_sampler_kwargs, which tell the replica and their number. What gathers"
        " a batch from all processes finds each sample once per stage: self.all_gather finds it"
        " once."
    )


def warn_of_collective(name: str, stages: int, replicas: int) -> None:
    """Say over what a collective call of the user's goes.

    Args:
        name: The function's.
        stages: K.
        replicas: D.
    """
    rank_zero_warn(
        f"torch.distributed.{name}() goes over all processes: {stages} stages x {replicas}"
        " replicas. The stages of a pipeline work on the same batch, so what is summed or gathered"
        " there counts each sample once per stage. self.all_gather(x) goes over replicas alone, and"
        " so does self.trainer.strategy.reduce(x, reduce_op='sum')."
    )


def refuse_notebook(start_method: str) -> None:
    """Say how processes start in a notebook.

    Raises:
        RuntimeError: Always.
    """
    raise RuntimeError(
        f"start_method={start_method!r} starts the script once more for every process, and a"
        " notebook is no script: leave start_method out, or give start_method='fork', and call no"
        " CUDA function before the Trainer does."
    )


def refuse_no_file() -> None:
    """Say how processes start where Python has read the script from no file.

    Raises:
        RuntimeError: If it hasn't.
    """
    if sys.argv[:1] in ([], [""], ["-"], ["-c"]):
        raise RuntimeError(
            "start_method='popen' starts the script once more for every process, and this one is in"
            " no file: it came from standard input or 'python -c'. Put it into a file, or use"
            ' GPipeStrategy(start_method="fork").'
        )


def refuse_in_foreign_worker(start_method: str) -> None:
    """Say how processes start in one that joblib has started.

    Args:
        start_method: How they would start, by running the script, or by ``multiprocessing``.

    Raises:
        RuntimeError: If ``multiprocessing`` doesn't know how this one was started.
    """
    own = multiprocessing.get_start_method(allow_none=True)
    if own is not None and own not in multiprocessing.get_all_start_methods():
        raise RuntimeError(
            f"start_method={start_method!r} can't start processes here: this Trainer is in a worker"
            f" process of another library ({own!r}, as joblib's), which Python can't start once"
            ' more. Use GPipeStrategy(start_method="fork"), or let each training be a script of its'
            " own."
        )


def warn_in_child() -> None:
    """Warn of what a script starts that is run once more, where it has started this process."""
    if multiprocessing.parent_process() is not None:
        rank_zero_warn(
            "start_method='popen' runs the script from its top for every other process, with all"
            " that it starts: this Trainer is in a process that multiprocessing has started, and so"
            " will be another one for each. Where several train at a time, some wait for others in"
            " vain: give GPipeStrategy(start_method='spawn')."
        )


def refuse_fork_of_autograd() -> None:
    """Say that a process can't be forked whose backwards use threads, where one has them.

    Raises:
        RuntimeError: If it has.
    """
    names = []
    for file in Path("/proc/self/task").glob("*/comm"):
        with suppress(OSError):  # a thread may end meanwhile
            names.append(file.read_text())
    if any(name.startswith("pt_autograd") for name in names):
        raise RuntimeError(
            "start_method='fork' copies this process, which has computed gradients, or planned a"
            " run, beside a GPU: PyTorch can compute none in a copy of it. Restart the notebook's"
            " kernel, and let this Trainer be the first that computes."
        )


def refuse_tuner(trainer: pl.Trainer, start_method: str) -> None:
    """Say that a Tuner would find nothing in this process.

    Raises:
        ValueError: If a Tuner has started the run. The Trainer is left without its callback.
    """
    callbacks = vars(trainer)["callbacks"]
    own = [each for each in callbacks if not _lightning.is_of_tuner(each)]
    if len(own) == len(callbacks):
        return
    vars(trainer)["callbacks"] = own
    raise ValueError(
        f"With start_method={start_method!r} a Tuner runs in processes that end with what they have"
        " found, and this one would hear nothing of it. Give the Trainer"
        " callbacks=[LearningRateFinder()] or [BatchSizeFinder()], which search at the start of"
        " fit, within the run; or let a script search, with start_method='popen'."
    )


def warn_of_no_predictions(
    predict: Callable[..., Any], arguments: tuple[Any, ...], start_method: str
) -> None:
    """Say that predictions don't come back, unless they aren't asked for.

    Args:
        predict: What the processes will run for ``Trainer.predict``.
        arguments: Its arguments.
        start_method: How they start.
    """
    given = signature(predict).bind(*arguments).arguments
    if given.get("return_predictions") is None:
        rank_zero_warn(
            f"predict returns None with start_method={start_method!r}: the predictions stay in the"
            " processes that make them. Write them to files with a BasePredictionWriter in"
            " Trainer(callbacks=...), and give predict return_predictions=False."
        )
