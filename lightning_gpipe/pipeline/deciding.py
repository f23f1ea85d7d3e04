"""Decides how a module is cut: the layers of each stage, and the number of micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from lightning_gpipe.engine.context import ForwardContext
from lightning_gpipe.model.on_meta import UntraceableLayer
from lightning_gpipe.model.partition import Partition
from lightning_gpipe.model.program import unskipped
from lightning_gpipe.pipeline.pipeline import Surroundings
from lightning_gpipe.plan.balance import Balancing
from lightning_gpipe.plan.chunks import decide_chunks, more_chunks
from lightning_gpipe.plan.cost import LayerCost
from lightning_gpipe.plan.fitting import Fitted, Fitting, check_limit, usable_memory
from lightning_gpipe.plan.model_memory import ModelMemory, human_bytes
from lightning_gpipe.plan.settings import Settings
from lightning_gpipe.plan.timing import layer_times


def decide(
    module: nn.Module,
    body: nn.Module,
    layers: Sequence[nn.Module],
    around: Surroundings,
    sample: Any,
    context: ForwardContext,
    held: Partition | None = None,
) -> Fitted:
    """Choose the layers of each stage, M, and what is re-materialized. Local.

    Args:
        module: The user's module.
        body: Its backbone.
        layers: The backbone's.
        around: Groups, settings and so on.
        sample: The backbone's input; None: not known.
        context: What surrounds the call of the backbone.
        held: Which layers each stage holds since an earlier run; None: nothing is cut.

    Raises:
        ValueError: If no cut was found that stays within the limit of memory.
    """
    settings, groups, run_layer = around.settings, around.groups, unskipped(context.run_layer)
    chunks = decide_chunks(around.chunks, settings, body, sample, around.warn)
    if held is not None:
        return Fitted(held, chunks, settings.recomputing, None)
    is_known = sample is not None and around.is_fitting
    # a validation may come first
    is_validation = around.is_fitting and not module.training

    def measure() -> list[LayerCost]:
        with context.restored():
            return layer_times(
                *(layers, run_layer, sample, chunks, groups.device),
                trains=around.is_fitting,
                training=is_validation,
            )

    def memory_of(chunks: int) -> ModelMemory | None:
        if not is_known:
            return None
        # without gradients the input doesn't tell whether it wants one
        is_detached = is_validation or settings.step == "micro-batch"
        try:
            with context.restored():
                return ModelMemory.of(
                    *(module, body, layers, run_layer, sample, chunks, around.optimizers()),
                    *(groups.device, is_detached),
                )
        except UntraceableLayer as error:
            if _depends_on_memory(settings):
                around.warn(
                    "Nothing is chosen by memory, and memory_limit isn't kept: what stages will"
                    f" hold isn't known, because {error}."
                )
            return None

    within, choices = settings, [chunks]
    if settings.limit is None and "auto" in (settings.chunks, settings.checkpoint):
        within = replace(settings, memory_limit=usable_memory(groups.device))
    if settings.chunks == "auto" and within.limit is not None and is_known:
        choices = more_chunks(chunks, body, sample)
    balancing = Balancing(layers, run_layer, sample, measure, around.warn)
    fitting = Fitting(balancing, memory_of, sample, groups.stages, groups.replicas)
    fitted = fitting.fit(within, choices)
    if fitted.memory is not None and within.limit is not None and not fitted.fits(within.limit):
        if settings.limit is not None:
            check_limit(fitted.memory.most, settings.limit)
        around.warn(
            f"A stage is expected to hold {human_bytes(fitted.memory.highest)}, and"
            f" {human_bytes(within.limit)} of the memory of {groups.device} can be filled, though"
            " micro-batches are as small, and as many of them are re-materialized, as may be: use"
            " more stages."
        )
    return fitted


def _depends_on_memory(settings: Settings) -> bool:
    by_memory = settings.balance == "memory" or settings.checkpoint == "auto"
    return by_memory or settings.limit is not None
