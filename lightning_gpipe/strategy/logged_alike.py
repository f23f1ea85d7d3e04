"""What the stages log under one name, compared now and then.

Every stage logs, and what rank 0 logs is what loggers and callbacks get. Hooks behind the backbone
run on the last stage, and layers on their own: a log of what they keep shows what rank 0 has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lightning_gpipe.comm.groups import Groups
from lightning_gpipe.comm.looks import is_due
from lightning_gpipe.model.on_meta import is_pretending
from lightning_gpipe.pipeline.module import PipelinedModule
from lightning_gpipe.plan.settings import StepMode
from lightning_gpipe.strategy import patches
from lightning_gpipe.strategy.logged import call_of
from lightning_gpipe.strategy.logged_kept import BY_LAYERS, LoggedKept

_APART = 1e-3  # of the larger value: some kernels add up in any order
_SMALL = 1e-6


@contextmanager
def attached(pipeline: PipelinedModule, step: StepMode) -> Generator[LoggedAlike, None, None]:
    """Note what is logged inside this context, where steps get the whole mini-batch.

    Args:
        pipeline: The pipeline.
        step: What the user's steps are given.
    """
    stages = pipeline.groups.stages
    is_on = step == "mini-batch" and not stages == pipeline.chunks == 1
    logs = LoggedAlike(pipeline.groups, LoggedKept(pipeline.is_kept, BY_LAYERS), is_on)
    log = patches.as_method(partial(logs.log, patches.LOG.current()))
    with patches.LOG.replaced(log) if step == "mini-batch" else nullcontext():
        yield logs


class LoggedAlike:
    """Compares the tensors that all stages log, and looks for what layers have kept.

    Numbers aren't compared: times and the like are each rank's own.

    Args:
        groups: The process groups.
        kept: Looks for what layers have kept.
        is_on: Whether anything is compared.
    """

    def __init__(self, groups: Groups, kept: LoggedKept, is_on: bool) -> None:
        self._groups, self._kept, self._is_on = groups, kept, is_on
        self._compares = is_on and groups.stages > 1
        self._latest: dict[str, Tensor] = {}
        self._names: set[str] = set()  # of what else was logged, too
        self._told: set[str] = set()
        self._backwards = 0

    def log(self, log: Callable[..., None], module: Any, *args: Any, **kwargs: Any) -> None:
        """What ``self.log`` does: it is noted, too. In a run without data it does nothing."""
        if is_pretending():
            return
        if not self._is_on:
            log(module, *args, **kwargs)
            return
        name, value, _ = call_of(module, *args, **kwargs)
        self._names.add(name)
        if isinstance(value, Tensor) and value.numel() == 1 and not value.is_meta:
            self._latest[name] = value.detach().clone()
        self._kept.look(name, value)
        log(module, *args, **kwargs)

    @contextmanager
    def compared(self) -> Generator[None, None, None]:
        """Compare what was logged last, if it is time to, before the backward in this context.

        Collective over the pipeline.
        """
        self._backwards += 1
        if self._compares and is_due(self._backwards):
            self._compare()
        yield

    def _compare(self) -> None:
        own = {name: (float(value), value.dtype) for name, value in self._latest.items()}
        self._latest.clear()
        (first, names), *others = self._groups.pipeline.gather("logged", (own, self._names))
        for stage, (other, its_names) in enumerate(others, 1):
            for name in sorted(its_names - names - self._told):
                self._told.add(name)
                rank_zero_warn(
                    f"Stage {stage} alone logs {name!r}, and what stage 0 logs is shown. Hooks"
                    " behind the backbone run on the last stage, and layers on their own: compute"
                    " it in the step, of the backbone's output."
                )
            for name in sorted(first.keys() & other.keys() - self._told):
                (shown, dtype), (found, _) = first[name], other[name]
                if not _are_alike(shown, found, dtype):
                    self._told.add(name)
                    rank_zero_warn(
                        f"The stages log different values of {name!r}: stage 0 {shown:.6g}, stage"
                        f" {stage} {found:.6g}. What stage 0 logs is shown. Hooks behind the"
                        " backbone run on the last stage, and layers on their own: compute it in"
                        " the step, of the backbone's output."
                    )


def _are_alike(a: float, b: float, dtype: torch.dtype) -> bool:
    if math.isnan(a) or math.isnan(b):
        return math.isnan(a) and math.isnan(b)
    coarse = 4 * torch.finfo(dtype).eps if dtype.is_floating_point else 0.0
    return a == b or abs(a - b) <= max(max(_APART, coarse) * max(abs(a), abs(b)), _SMALL)
