"""Which stages hold what stands outside the backbone, once a step has shown who needs it.

The first mini-batch is watched. What the step uses before the backbone alone is held by the first
stage from then on, what it uses behind it by the last, what it uses on both sides by these two.
What no step has used stays on every stage.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import torch

from lightning_gpipe.comm.groups import Groups
from lightning_gpipe.engine.per_micro_batch import PerMicroBatch
from lightning_gpipe.engine.running import AFTER, BEFORE
from lightning_gpipe.gradients.consistency import ConsistencyCheck
from lightning_gpipe.gradients.data_parallel import DataParallel
from lightning_gpipe.gradients.hooks import ParameterHooks
from lightning_gpipe.model.parameters import Slot, parameters_of
from lightning_gpipe.model.step_trace import Uses
from lightning_gpipe.pipeline.lending import Lending
from lightning_gpipe.pipeline.pipeline import Pipeline, on_ends, shared_parameters
from lightning_gpipe.state.placement import Placement

#: Share of the parameters from which on it is told that no step uses them.
UNUSED_LIMIT = 0.01


def begin_to_watch(steps: PerMicroBatch, placement: Placement, groups: Groups) -> None:
    """Watch what the steps use from now on."""
    outside = [slot for slot in placement.slots if slot.is_parameter and slot.is_outside]
    steps.trace.uses = Uses(frozenset(id(slot.tensor) for slot in outside))
    if groups.stages == 1:
        steps.outside.on_both_sides = parameters_of(outside)


def settle(pipeline: Pipeline, steps: PerMicroBatch) -> Pipeline:
    """Let each stage hold what it needs. Collective over all ranks.

    Args:
        pipeline: The pipeline after its first mini-batch.
        steps: What has run it, and has watched.
    """
    groups, uses = pipeline.surroundings.groups, steps.trace.uses
    if uses is None:
        return pipeline
    steps.trace.uses = None
    slots = {slot.names[0]: slot for slot in pipeline.placement.slots if slot.is_parameter}
    sides = groups.decide("uses", lambda: {name: _sides(s, uses) for name, s in slots.items()})
    if groups.stages == 1:
        both = {id(slots[name].tensor) for name, found in sides.items() if len(found) == 2}
        steps.outside.join_sides([p for p in steps.outside.on_both_sides if id(p) not in both])
        steps.outside.on_both_sides = [p for p in steps.outside.on_both_sides if id(p) in both]
        return pipeline
    owners: dict[str, tuple[int, int | None]] = {}
    last = groups.stages - 1
    for name, found in sides.items():
        slot = slots[name]
        if slot.is_outside and not slot.parts and found:
            ends = tuple(0 if side == BEFORE else last for side in found)
            if len(ends) == 1:
                owners[name] = ends[0], None
            elif last > 1:
                owners[name] = 0, last
    _warn_of_unused(pipeline, slots, sides)
    placement = pipeline.placement.settled(owners)
    tensors = replace(pipeline.tensors, placement=placement)
    steps.trace.holders = placement.holders
    gc.collect()  # graphs of the first steps: a parameter that stands in one can't be let go of
    with torch.inference_mode(False):
        tensors.withhold()
        pipeline.surroundings.on_settled(owners)
    return _rebuilt(replace(pipeline, tensors=tensors), placement)


def _sides(slot: Slot, uses: Uses) -> tuple[int, ...]:
    """Where a parameter is used; what is used for nothing but a value of the step: behind."""
    key = id(slot.tensor)
    before, after = key in uses.before, key in uses.after
    if key in uses.seen and not before:
        after = True
    return (BEFORE,) * before + (AFTER,) * after


def _rebuilt(pipeline: Pipeline, placement: Placement) -> Pipeline:
    """The pipeline with what depends on who holds what."""
    around = pipeline.surroundings
    groups, options = around.groups, around.data_parallel
    averages = dict(pipeline.data_parallel)
    for side, stage in ((AFTER, groups.stages - 1), (BEFORE, 0)):
        outside = [slot for slot in placement.own if slot.is_outside and not slot.parts]
        if groups.stage == stage and outside:
            averages[side] = DataParallel(outside, groups, options)
    summed = [*placement.replicated, *placement.on_ends]
    shared = shared_parameters(placement, groups, options)
    shared.take_over(pipeline.shared)
    lending = Lending(
        pipeline.module,
        pipeline.body,
        placement,
        groups.pipeline,
        partial(getattr, pipeline.steps, "is_running"),
    )
    return replace(
        pipeline,
        lending=lending,
        data_parallel=averages,
        shared=shared,
        on_ends=on_ends(placement, groups, pipeline.shared),
        parameter_hooks=ParameterHooks(placement.own, summed, groups),
        consistency=ConsistencyCheck(placement.replicated, groups),
    )


def _warn_of_unused(
    pipeline: Pipeline, slots: Mapping[str, Slot], sides: Mapping[str, tuple[int, ...]]
) -> None:
    """Tell what every stage goes on holding, because no step has used it so far."""
    total = sum(slot.tensor.numel() for slot in slots.values()) or 1
    unused = [name for name, slot in slots.items() if slot.is_outside and not sides[name]]
    share = sum(slots[name].tensor.numel() for name in unused) / total
    if share > UNUSED_LIMIT:
        pipeline.surroundings.warn(
            f"The first steps of this run don't use {', '.join(map(repr, unused[:3]))}"
            f"{' …' if len(unused) > 3 else ''}, {share:.0%} of the parameters. It isn't known on"
            " which side of the backbone they belong, so every stage holds them."
        )
