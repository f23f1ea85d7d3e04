"""What ranks tell each other of steps that run once per micro-batch."""

from __future__ import annotations

import torch

from lightning_gpipe.comm.groups import Groups
from lightning_gpipe.engine.running import Running
from lightning_gpipe.model.step_trace import StepTrace

_SMALL, _FEW = 1 << 16, 256  # bytes and values that the source needn't wait for


def share_weights(running: Running, groups: Groups) -> None:
    """Let every rank know the weights that the step returned. Collective, if there are any."""
    if not running.is_weighted:
        return
    if any(outcome.weight is None for outcome in running.outcomes.values()):
        raise RuntimeError(
            "The step returned a weight for some micro-batches and none for others: return one for"
            " each, 0 where nothing counts."
        )
    last = groups.stages - 1
    own = running.weighting.weights if groups.is_last else None
    running.weighting.take_over(groups.pipeline.broadcast("weights", own, source=last))


@torch.no_grad()
def tell_ahead(running: Running, trace: StepTrace, groups: Groups) -> None:
    """Tell the last stage's values as soon as its steps have run, if nobody waits for that.

    Its backwards may take longer than those of other ranks, which can go on to the next mini-batch.
    """
    if not groups.is_last or groups.stages == 1 or running.is_weighted:
        return
    values = trace.left()
    in_host = all(groups.pipeline.is_in_host(value.device.type) for value in values.values())
    is_little = sum(value.nbytes for value in values.values()) <= _SMALL and len(values) <= _FEW
    if in_host and is_little:
        groups.pipeline.broadcast("told", (trace.mark, values), source=groups.stages - 1)
        running.has_told = True


@torch.no_grad()
def tell(running: Running, trace: StepTrace, groups: Groups) -> None:
    """Tell all ranks the values that are left of the steps. Collective."""
    if groups.stages > 1:
        last = groups.stages - 1
        for source in (last, *sorted(trace.sources - {last})):
            if source == groups.stage == last and running.has_told:
                continue
            own = (trace.mark, trace.left()) if source == groups.stage else None
            mark, values = groups.pipeline.broadcast("told", own, source=source)
            if mark != trace.mark:
                raise RuntimeError(
                    f"The step called other functions on stage {groups.stage} than on stage"
                    f" {source}: it must do the same on every rank, so nothing under"
                    " `if rank == 0`, and not use what layers or hooks keep of the forward: return"
                    " that with the backbone's output."
                )
            if source != groups.stage:
                trace.tell(values)
    trace.forget()
