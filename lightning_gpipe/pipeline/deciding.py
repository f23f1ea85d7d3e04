"""Decides how a module is cut: the layers of each stage, and the number of micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from lightning_gpipe.engine.context import ForwardContext
from lightning_gpipe.model.on_meta import UntraceableLayer
from lightning_gpipe.model.partition import Partition
from lightning_gpipe.pipeline.pipeline import Surroundings
from lightning_gpipe.plan.balance import decide_partition
from lightning_gpipe.plan.chunks import decide_chunks, micro_batches
from lightning_gpipe.plan.model_memory import ExpectedMemory, ModelMemory, partition_within
from lightning_gpipe.plan.timing import time_costs


def decide(
    module: nn.Module,
    body: nn.Module,
    layers: Sequence[nn.Module],
    around: Surroundings,
    sample: Any,
    context: ForwardContext,
    held: Partition | None = None,
) -> tuple[Partition, int, ExpectedMemory | None]:
    """Choose the layers of each stage, and M; tell what each stage will hold. Local.

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
    settings, groups, run_layer = around.settings, around.groups, context.run_layer
    chunks = decide_chunks(around.chunks, settings, body, sample, around.warn)
    if held is not None:
        return held, chunks, None
    # a validation may come first
    is_validation = around.is_fitting and not module.training

    def measure() -> list[float]:
        with context.restored():
            return time_costs(
                *(layers, run_layer, sample, chunks, groups.device),
                trains=around.is_fitting,
                training=is_validation,
                recomputes=settings.recomputes,
            )

    memory = None
    if sample is not None and around.is_fitting:
        # without gradients the input doesn't tell whether it wants one
        is_detached = is_validation or settings.step == "micro-batch"
        try:
            with context.restored():
                memory = ModelMemory.of(
                    *(module, body, layers, run_layer, sample, chunks, around.optimizers()),
                    *(groups.device, is_detached),
                )
        except UntraceableLayer as error:
            if settings.balance == "memory" or settings.limit is not None:
                around.warn(
                    "What stages will hold isn't known, so layers are shared out neither by memory"
                    f" nor within memory_limit, because {error}."
                )
    partition, expected = partition_within(
        lambda memories, limit: decide_partition(
            *(layers, run_layer, groups.stages, settings, sample, measure, around.warn),
            *(memories, limit),
        ),
        memory,
        settings,
        groups.stages,
        micro_batches(chunks, sample),
        groups.replicas,
    )
    return partition, chunks, expected
