"""What Lightning's own callbacks need where a stage holds a part of the model.

Their attributes that aren't public are reached into here alone. What is changed is undone at the
end of the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

from lightning.pytorch.callbacks import (
    Callback,
    ModelCheckpoint,
    ModelSummary,
    StochasticWeightAveraging,
    ThroughputMonitor,
    WeightAveraging,
)
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_gpipe.comm.groups import Groups
from lightning_gpipe.model.parameters import loading_in_part, trained_by
from lightning_gpipe.pipeline.module import PipelinedModule
from lightning_gpipe.state.averages import AveragedCopy
from lightning_gpipe.strategy import patches, saving
from lightning_gpipe.strategy.summary import forward_on_meta


@contextmanager
def adapted(
    callbacks: Sequence[object],
    pipeline: PipelinedModule,
    groups: Groups,
    can_gather: Callable[[], bool],
    has_saved: Callable[[], bool],
    averages: bool,
    is_sharded: bool,
) -> Iterator[list[AveragedCopy]]:
    """Let callbacks work on a pipeline, until the end of the run. Collective over all ranks.

    Args:
        callbacks: The Trainer's, set up.
        pipeline: The module's, not cut yet.
        groups: The process groups.
        can_gather: Tells whether the other stages can be waited for.
        has_saved: Tells whether all ranks have saved on an exception.
        averages: Whether callbacks use the averages that they keep; they may be another module's.
        is_sharded: Whether every rank saves its part of them.

    Yields:
        The copies of the module that the callbacks keep.
    """
    is_alone = groups.stages * groups.replicas == 1  # copies stay what they are then
    gathers = (lambda: False) if is_sharded else can_gather
    on_meta = partial(forward_on_meta, pipeline.module, pipeline.as_written, rank_zero_warn)
    with (
        _throughput_of_pipelines(callbacks, groups.replicas, groups.stages),
        patches.FILTER_ON_OPTIMIZER.replaced(staticmethod(_not_in_optimizer)),
        patches.SAVE_ON_EXCEPTION.replaced(
            _if_possible(can_gather, has_saved, ModelCheckpoint._should_save_on_exception)
        ),
        patches.CHECK_VALIDATION.replaced(
            patches.as_method(partial(_together, patches.CHECK_VALIDATION.current()))
        ),
        patches.SUMMARY.replaced(_inside(on_meta, ModelSummary._summary)),
        (
            patches.LOAD_STATE_DICT.replaced(_inside(loading_in_part, nn.Module.load_state_dict))
            if groups.stages > 1
            else nullcontext()
        ),
        patches.LOG_GRAPH.replaced(_inside(pipeline.as_written, TensorBoardLogger.log_graph)),
    ):
        yield [
            AveragedCopy(copy, f"{prefix}{pipeline.backbone}", groups, gathers)
            for copy, prefix in (_averages(callbacks) if averages and not is_alone else ())
        ]


def _together(is_due: Callable[..., bool], loop: Any, *args: Any) -> bool:
    """Validate as soon as the time is up on one rank, where it goes by time."""
    found = is_due(loop, *args)
    if getattr(loop.trainer, "_val_check_time_interval", None) is None:
        return found
    return bool(loop.trainer.strategy.reduce_boolean_decision(found, all=False))


class ReportFirst(Callback):
    """Tells all ranks of an exception before the user's callbacks take their time over it.

    Args:
        report: Tells them.
    """

    def __init__(self, report: Callable[[BaseException], object]) -> None:
        self._report = report

    @override
    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._report(exception)

    def __reduce__(self) -> tuple[Any, ...]:
        """Be silent in a copy of the Trainer's callbacks: processes can't be copied."""
        return ReportFirst, (_say_nothing,)


def _say_nothing(error: BaseException) -> None:
    pass


def report_first(callbacks: list[Any], report: Callable[[BaseException], object]) -> None:
    """Let the Trainer's first callback tell all ranks of an exception."""
    forget_reports(callbacks)
    callbacks.insert(0, ReportFirst(report))


def forget_reports(callbacks: list[Any]) -> None:
    """Undo :func:`report_first`."""
    callbacks[:] = [callback for callback in callbacks if not isinstance(callback, ReportFirst)]


def copies_module(callbacks: Iterable[object]) -> bool:
    """Whether a callback makes a copy of the module before the strategy is set up."""
    kinds = WeightAveraging, StochasticWeightAveraging
    return any(isinstance(callback, kinds) for callback in callbacks)


def _averages(callbacks: Iterable[object]) -> list[tuple[nn.Module, str]]:
    """The averages of the module that Lightning's callbacks keep.

    Returns:
        Each as a module, with the prefix of the user's names in it.
    """
    found: list[tuple[nn.Module, str]] = []
    for callback in callbacks:
        if isinstance(callback, (WeightAveraging, StochasticWeightAveraging)):
            copy, is_wrapped = callback._average_model, isinstance(callback, WeightAveraging)
            if copy is not None and not any(True for _ in copy.parameters()):
                raise ValueError(
                    f"{type(callback).__name__} has copied the module before configure_model() has"
                    " built its layers, so it would average nothing: build them in the"
                    " constructor, or use EMAWeightAveraging."
                )
            if copy is not None:
                found.append((copy, "module." if is_wrapped else ""))
    return found


def _if_possible(
    can_gather: Callable[[], bool],
    has_saved: Callable[[], bool],
    should_save: Callable[..., bool],
) -> Callable[..., bool]:
    """Whether to save after an exception, where the other stages can be waited for."""

    def should_save_here(callback: ModelCheckpoint, trainer: Any) -> bool:
        if not should_save(callback, trainer):
            return False
        if not can_gather() and not has_saved():
            saving.warn_of_loss("The state at the exception")
        return can_gather()

    return should_save_here


def _inside(
    context: Callable[[], AbstractContextManager[None]], function: Callable[..., Any]
) -> Callable[..., Any]:
    """A method that runs inside a context."""

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with context():
            return function(*args, **kwargs)

    return wrapped


def _not_in_optimizer(optimizer: Optimizer, params: Iterable[Tensor]) -> list[Tensor]:
    known = set(map(id, trained_by(optimizer)))
    return [p for p in params if id(p) not in known]


@contextmanager
def _throughput_of_pipelines(
    callbacks: Iterable[object], replicas: int, stages: int
) -> Iterator[None]:
    """Let monitors of throughput take a pipeline for one device.

    They count the samples of every process, and the stages of a pipeline work on the same.

    Args:
        callbacks: The Trainer's, set up.
        replicas: D.
        stages: K.
    """
    with ExitStack() as undo:
        for callback in callbacks:
            if not isinstance(callback, ThroughputMonitor):
                continue
            for throughput in callback._throughputs.values():
                undo.enter_context(patches.THROUGHPUT_WORLD.replaced(replicas, throughput))
                if callback.available_flops is not None:
                    flops = callback.available_flops * stages
                    undo.enter_context(patches.THROUGHPUT_FLOPS.replaced(flops, throughput))
        yield
