"""A step mode: the user's step runs once per micro-batch, each part of it where its data is.

The step runs on every rank of the pipeline, when the rank's program comes to the forward of its
first stage (on the last rank: of the last stage). Where the step calls the backbone, that forward
runs. What stands before the backbone is computed on the first rank, what stands behind it on the
last; elsewhere the step goes on with tensors without values, see
:mod:`lightning_gpipe.model.step_trace`. The last rank differentiates each loss at once, up to the
backbone's output, so of the code behind the backbone no more than one micro-batch is held.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_gpipe.comm.looks import is_due
from lightning_gpipe.engine.batchnorm import DeferredBatchNorm
from lightning_gpipe.engine.context import ForwardContext
from lightning_gpipe.engine.ends import OutputOutlines
from lightning_gpipe.engine.executor import BeforeLast, MiniBatch
from lightning_gpipe.engine.kept import KeptValues
from lightning_gpipe.engine.outside import Outside
from lightning_gpipe.engine.overwritten import Overwrites
from lightning_gpipe.engine.randomness import StepSeeds
from lightning_gpipe.engine.rank import Rank
from lightning_gpipe.engine.reduction import Reductions
from lightning_gpipe.engine.running import Running, Step
from lightning_gpipe.engine.step_plans import MakeSchedule, StepPlans
from lightning_gpipe.engine.stopwatch import span
from lightning_gpipe.engine.telling import agree_on_weights, share_weights, tell, tell_ahead
from lightning_gpipe.engine.uncompiled import Uncompiled
from lightning_gpipe.engine.weighting import Weighting
from lightning_gpipe.model.program import of_any_loop
from lightning_gpipe.model.remote import NotHere, Where, outline_of
from lightning_gpipe.model.run_layer import RunLayer
from lightning_gpipe.model.step_trace import StepTrace
from lightning_gpipe.schedule.actions import Action
from lightning_gpipe.tensors.tree import Tree, tree_tensors

NO_CALL = (
    "The training step doesn't call the backbone, so there is nothing to run in stages. It is"
    " called whole, or in a loop over it, `for layer in self.backbone`."
)
_NOT_ALWAYS = (
    "The step doesn't call the backbone for micro-batch {m}, but for other micro-batches or"
    " mini-batches: with step='micro-batch' it calls it once for each. Use"
    " GPipeStrategy(step='mini-batch')."
)
_KEPT_OUTPUT = (
    "The backbone's input is computed from what the backbone gave for another micro-batch, as a"
    " state that the step carries from batch to batch is: the first stage hasn't its values, and on"
    " one device it would come from the mini-batch before. Use GPipeStrategy(step='mini-batch')."
)


@dataclass(frozen=True, slots=True)
class _Call:
    """How the backbone is called in a kind of step.

    Args:
        context: What surrounds the call.
        trains: Whether gradients are enabled around it.
    """

    context: ForwardContext
    trains: bool


class PerMicroBatch:
    """Runs a user's step for each micro-batch of a mini-batch, as a pipeline.

    Args:
        rank: The stages of this rank.
        schedule: Makes the schedule.
        seed: Of the random numbers; the same on every rank.
        holders: The stages that hold a parameter or buffer; None: every stage.
        parameters: The module's parameters by ``id``.
        batch_norm: Batch norm outside the backbone.
        modules: All parts of the user's module.
    """

    def __init__(
        self,
        rank: Rank,
        schedule: MakeSchedule,
        seed: int,
        holders: Callable[[Tensor], Where | None],
        parameters: frozenset[int],
        batch_norm: DeferredBatchNorm,
        modules: Sequence[nn.Module],
    ) -> None:
        groups = rank.groups
        self._rank, self._groups = rank, groups
        self._seeds = StepSeeds(groups.device, (seed & (2**63 - 1), groups.replica))
        self._anchor = rank.last if groups.is_last and groups.stages > 1 else groups.stage
        #: The backwards of what stands outside the backbone.
        self.outside = Outside(groups.device, parameters, groups.stages == 1)
        is_silent = not groups.is_last or groups.replica > 0
        self._reductions = Reductions(self.outside.root, is_silent)
        self._batch_norm, self._modules = batch_norm, modules
        self._uncompiled = Uncompiled()
        self._overwrites = Overwrites()
        self._calls: dict[str, _Call | None] = {}
        self._outlines = OutputOutlines()
        self._plans = StepPlans(rank, schedule, modules)
        self._running: Running | None = None
        self._counts: Counter[str] = Counter()  # of mini-batches
        self.trace = StepTrace(groups.stage, groups.device, holders, self._seeds)

    @property
    def is_running(self) -> bool:
        """Whether a step runs."""
        return self._running is not None

    def close(self) -> None:
        """Let go of the modules."""
        self._batch_norm.remove()

    def make_new_schedules(self) -> None:
        """Make schedules anew from now on."""
        self._plans.clear()

    def run(
        self,
        kind: str,
        key: tuple[int, ...],
        sizes: Sequence[int],
        given: Sequence[Sequence[Tensor]],
        step: Step,
        before_last: BeforeLast | None = None,
        scale: float = 1.0,
    ) -> Weighting:
        """Run a mini-batch, with its backwards if it trains. Collective over the pipeline.

        Args:
            kind: Tells kinds of steps apart, such as training and validation.
            key: Numbers that tell steps apart; the same on every stage.
            sizes: Samples in each micro-batch.
            given: The tensors in each micro-batch: where their shapes are the same, so are the
                output's.
            step: Runs the user's step for a micro-batch.
            before_last: Called before the last backward of each stage, of :data:`BEFORE` and of
                :data:`AFTER`; may return a scalar to run it from as well. None: it doesn't train.
            scale: What the losses are multiplied by.

        Returns:
            How much each micro-batch's loss counts. Gradients are still to be multiplied by its
            factor.
        """
        names = [f"{kind} {[tuple(t.shape) for t in tensors]}" for tensors in given]
        plan = self._plans.of(names, self._outlines, before_last is not None)
        weighting = Weighting(sizes, scale)
        agree = partial(agree_on_weights, self._groups)
        running = Running(kind, sizes, given, names, step, plan, before_last, weighting, agree)
        self._running, self._seeds.step = running, key
        self.outside.forwards.clear()
        self._counts[kind] += 1
        self._rank.executor.watch.section += 1
        self._rank.links.allow(plan.leads)
        self._batch_norm.begin(sizes)
        try:
            with self._rank.executor.preserved_generators(), span("gpipe_step"):
                self._run(running)
        finally:
            self._running = None
        share_weights(running, self._groups)
        self._reductions.warn(running)
        tell(running, self.trace, self._groups)
        return weighting

    def _run(self, running: Running) -> None:
        if self._calls.get(running.kind) is None:  # nothing is known of how it calls the backbone
            self._run_step(running, 0)
            self._calls.setdefault(running.kind, None)
        if self._calls[running.kind] is None:
            self._run_without_backbone(running)
            return
        program = running.plan.program
        last = {action.stage: action for action in program if action.op in ("B", "W")}
        forwards = len(running.plan.forwards)
        for action in program:
            if action.op == "F":
                self._forward(running, action)
                forwards -= 1
                if not forwards and running.batch is not None:
                    self._rank.executor.end_forward(running.batch)
                    tell_ahead(running, self.trace, self._groups)
            elif running.batch is not None:
                self._backward(running, running.batch, action, last[action.stage])

    def _forward(self, running: Running, action: Action) -> None:
        is_chained = action.micro_batch in running.plan.chained
        if action.stage == (self._rank.stages[0] if is_chained else self._anchor):
            self._run_step(running, action.micro_batch)
            return
        if is_chained:
            return  # it ran with the one before
        call = self._calls[running.kind]
        if call is None:
            raise RuntimeError("The backbone's call isn't known.")
        noted = self.outside.forwards
        with call.context.restored(), torch.set_grad_enabled(call.trains), noted:
            self._rank.executor.do(action, self._begin(running, call.context))

    def _backward(self, running: Running, batch: MiniBatch, action: Action, last: Action) -> None:
        also = running.before(action.stage) if action is last else None
        self._rank.executor.do(action, batch, also=also)
        if action.stage == 0 and action.op in ("B", "I"):
            watch = self._rank.executor.watch
            watch.begin_outside()
            self.outside.backward_before(running, action.micro_batch)
            watch.end_outside(action)

    def _run_without_backbone(self, running: Running) -> None:
        """Run steps that don't call the backbone."""
        if running.before_last is not None:
            raise RuntimeError(NO_CALL)
        for m in range(len(running.sizes)):
            self._run_step(running, m)
        if self._calls[running.kind] is not None:
            raise RuntimeError(_NOT_ALWAYS.format(m=0))

    def _run_step(self, running: Running, m: int) -> None:
        """Run the user's step for a micro-batch."""
        if m in running.outcomes:
            return
        running.m, running.has_called, watch = m, False, self._rank.executor.watch
        self.trace.begin(m)
        watch.begin_outside()
        with self._batch_norm.micro_batch(recompute=False), self.trace, self._uncompiled:
            running.outcomes[m] = outcome = running.step(m)
        self._overwrites.forget()
        if m == len(running.sizes) - 1:
            with self.trace:
                self._batch_norm.finish()
        if not running.has_called and self._calls.get(running.kind) is not None:
            raise RuntimeError(_NOT_ALWAYS.format(m=m))
        if outcome.weight is not None and self.trace.is_here(outcome.weight):
            running.weighting.give(m, outcome.weight)
        if running.before_last is not None and running.has_called:
            if self._groups.is_last:
                self._reductions.look(running, outcome)
                self.outside.differentiate(running, m, outcome)
            watch.end_outside(Action(self._anchor, "F", running.m))
        if outcome.look is not None and (mixer := outcome.look()) is not None:
            self._reductions.mixer = mixer

    def call(self, value: Any, run_layer: RunLayer) -> Any:
        """Run the backbone for the micro-batch whose step runs."""
        running = self._running
        if running is None:
            raise RuntimeError("No step runs.")
        if running.has_called:
            raise RuntimeError(
                "The step calls the backbone twice, which step='micro-batch' can't do: use"
                " GPipeStrategy(step='mini-batch'), or make the other call in a hook, such as"
                " on_validation_epoch_end, which has the whole model to call."
            )
        running.has_called, watch = True, self._rank.executor.watch
        watch.end_outside(Action(self._anchor, "F", running.m))
        with self.trace.suspended(), self._uncompiled.suspended():
            given = Tree.of(outline_of(value), "The backbone's input")
            output, leaves = self._call(running, given, run_layer)
        watch.begin_outside()
        where = frozenset({self._groups.stages - 1})
        self.trace.arrive(tree_tensors(value), leaves, where)
        self._seeds.behind_backbone(running.m)
        if running.batch is not None:
            self._overwrites.mark(running.batch, given, value)
        return output

    def _call(self, running: Running, given: Tree, run_layer: RunLayer) -> tuple[Any, list[Tensor]]:
        """Run this rank's part; returns the output, and those of its leaves that are tensors."""
        groups, m = self._groups, running.m
        call = self._calls.get(running.kind) if m else None
        if call is None:  # the other micro-batches' steps do as the first one's
            key, run = self._seeds.of_layers, of_any_loop(run_layer)
            context = ForwardContext.current(key, groups.device, run)
            call = self._calls[running.kind] = _Call(context, torch.is_grad_enabled())
        batch = self._begin(running, call.context)
        if groups.is_first:
            if any(tensor.is_meta for tensor in given.tensors()):
                raise NotHere(_KEPT_OUTPUT)
            running.source.give(m, given)
        name = running.names[m]
        is_looked_at = m == 0 and is_due(self._counts[running.kind])
        kept = KeptValues(self._modules) if is_looked_at else None
        with self.outside.forwards:
            for stage in self._rank.stages if m in running.plan.chained else [self._anchor]:
                self._rank.executor.do(Action(stage, "F", m), batch)
        if kept is not None:
            self.trace.keep(kept.tensors(given.tensors()))
        made = running.target.output(m) if groups.is_last else None
        if name not in self._outlines:
            found = self._outlines.of(made) if made is not None else None
            found = groups.pipeline.broadcast("outline", found, source=groups.stages - 1)
            self._outlines.learn(name, found)
        if made is not None:
            tree, flags = made
            self._outlines.check(name, made)
            leaves = self.outside.with_graph(running, m, tree, flags)
        else:
            tree = self._outlines[name]
            leaves = self.trace.remotes(tree.leaves, frozenset({groups.stages - 1}))
        return tree.with_leaves(leaves).value(), [t for t in leaves if isinstance(t, Tensor)]

    def _begin(self, running: Running, context: ForwardContext) -> MiniBatch:
        """The mini-batch on this rank's stages, begun with the first of their forwards."""
        if running.batch is None:
            executor = self._rank.executor
            context = replace(context, key=self._seeds.of_layers)
            running.batch = executor.begin(
                running.plan, context, running.sizes, running.source, running.target
            )
            executor.announce(running.plan.program, running.batch)
        return running.batch
