"""A step mode: every stage runs the user's step over the whole mini-batch.

Where the step calls the backbone, :meth:`WholeBatch.forward` runs the forward part of this rank's
program and returns the last stage's output, on every stage. The backward part runs when autograd
reaches the call; see :mod:`lightning_gpipe.engine.autograd`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_gpipe.engine.context import ForwardContext
from lightning_gpipe.engine.executor import BeforeLast, MiniBatch
from lightning_gpipe.engine.kept import KeptInStep
from lightning_gpipe.engine.overwritten import Overwrites
from lightning_gpipe.engine.rank import Rank
from lightning_gpipe.engine.rank_plan import RankPlan
from lightning_gpipe.engine.sides import BatchInput, BatchOutput
from lightning_gpipe.engine.steering import Steering
from lightning_gpipe.engine.stopwatch import span
from lightning_gpipe.model.program import is_loop
from lightning_gpipe.model.run_layer import RunLayer
from lightning_gpipe.schedule.checkpoint import Checkpoint
from lightning_gpipe.schedule.gpipe import fill_drain, forward_only
from lightning_gpipe.tensors.microbatch import GetOutline, Outline, Split, unknown
from lightning_gpipe.tensors.number_lists import NumberLists
from lightning_gpipe.tensors.tree import Tree


@dataclass(slots=True)
class Call:
    """One call of the backbone, from its forward to its backward.

    Args:
        number: Counts the calls; the same on every stage.
        batch: The micro-batches of this rank.
        input_side: The input; without its parts on other stages than the first.
        output_side: The output; without its parts on other stages than the last.
        wanted: Output leaves that want a gradient.
        gradients: Their gradients, as far as they arose on this stage.
    """

    number: int
    batch: MiniBatch
    input_side: BatchInput
    output_side: BatchOutput
    wanted: list[int] = field(default_factory=list)
    gradients: Sequence[Tensor | None] | None = None

    def catch(self, gradients: Sequence[Tensor | None]) -> None:
        """Keep the output's gradients for the backward."""
        self.gradients = gradients


class WholeBatch:
    """The pipeline as one rank's step sees it.

    Args:
        rank: The stages of this rank.
        chunks: M.
        checkpoint: Which micro-batches are re-materialized.
        seed: Seed of the layers' random numbers; the same on every rank.
        parameters: The module's parameters by ``id``.
        modules: All parts of the user's module.
    """

    def __init__(
        self,
        rank: Rank,
        chunks: int,
        checkpoint: Checkpoint,
        seed: int,
        parameters: frozenset[int],
        modules: Sequence[nn.Module],
    ) -> None:
        groups = rank.groups
        self._placement = rank.placement
        self._plans: dict[tuple[bool, int], RankPlan] = {}
        self._groups = groups
        self._control = groups.pipeline
        self._chunks = chunks
        self._checkpoint = checkpoint
        self._seed = seed & (2**63 - 1)
        self._step: tuple[int, ...] = (0,)
        self._calls_in_step = 0
        self._calls = 0
        self._retain = False
        self._before_last: BeforeLast | None = None
        self._links, self._trial, self._executor = rank.links, rank.trial, rank.executor
        self._steering = Steering(groups, parameters)
        self._overwrites, self._lists = Overwrites(), NumberLists()
        self._kept = KeptInStep(modules, self._steering.forwards)
        self._last: Callable[[], MiniBatch | None] = lambda: None

    @property
    def kept_graphs(self) -> list[Any]:
        """Where the graphs begin that the last call keeps of this rank's layers."""
        batch = self._last()
        return self._executor.graphs(batch) if batch is not None else []

    def begin_step(self, *step: int) -> None:
        """Tell which step comes, for the layers' random numbers.

        Args:
            step: Numbers that tell steps apart; the same on every stage.
        """
        self._step = step
        self._calls_in_step = 0
        self._steering.begin_step()
        self._overwrites.forget()
        self._kept.begin_step(step[0], self._chunks * self._groups.stages)

    def is_kept(self, value: Any) -> bool:
        """Whether layers have left a value in attributes in this step, as far as was looked."""
        return self._kept.has(value)

    # ------------------------------------------------------------------ forward

    def forward(
        self,
        batch: Tree,
        run_layer: RunLayer,
        whole: Collection[int] = (),
        outline: Callable[[Split], Outline | None] | None = None,
        given: Any = None,
    ) -> Any:
        """Run the backbone. Collective over the pipeline.

        Args:
            batch: The input, a pytree of tensors ``[batch, …]``, the same on every stage.
            run_layer: Runs one of the layers.
            whole: Leaves of the input that are not split, however long they are.
            outline: Tells what comes out for other sizes of a micro-batch, if it can be known.
            given: The input as the user has given it.

        Returns:
            The last stage's output of all micro-batches, on every stage.
        """
        split = Split.plan(batch, self._chunks, whole)
        if len(split.sizes) > 1 and not is_loop(run_layer):
            self._lists.check(batch.value(), sum(split.sizes))
        call = self._begin(batch, split, run_layer)
        looked_at = self._kept.running(batch.tensors())
        with looked_at, span("gpipe_forward"), self._steering.forwards:
            self._executor.run(call.batch.plan.forwards, call.batch)
        self._trial.compare()
        output = self._share_output(call, batch, partial(outline, split) if outline else unknown)
        self._executor.end_forward(call.batch)
        if not call.wanted:
            self._overwrites.mark(call.batch, batch, given)
            return output.value()
        leaves = list(output.leaves)
        joined = self._steering.join(
            call.number,
            batch.tensors(),
            [leaves[i] for i in call.wanted],
            partial(self._backward, call),
            call.catch,
        )
        for i, leaf in zip(call.wanted, joined, strict=True):
            leaves[i] = leaf
        self._overwrites.mark(call.batch, batch, given)
        return output.with_leaves(leaves).value()

    def _plan(self, split: Split) -> RankPlan:
        """What this rank does in a call."""
        count, trains = len(split.sizes), torch.is_grad_enabled()
        if (trains, count) not in self._plans:
            if trains:
                schedule = fill_drain(self._placement, count, self._checkpoint)
            else:
                schedule = forward_only(self._placement, count)
            self._plans[trains, count] = RankPlan.of(schedule, self._groups.stage)
        return self._plans[trains, count]

    def _begin(self, batch: Tree, split: Split, run_layer: RunLayer) -> Call:
        """Begin a call, which must be the same one on every stage."""
        self._calls += 1
        self._calls_in_step += 1
        key = (self._seed, self._groups.replica, *self._step, self._calls_in_step)
        self._check_call(key)
        plan = self._plan(split)
        device = self._groups.device
        context = ForwardContext.current(key, device, run_layer, plan.recomputes)
        context = replace(context, splits=True)
        self._links.allow(plan.leads)
        source, target = BatchInput(batch, split, self._groups.is_first), BatchOutput(split)
        mini_batch = self._executor.begin(plan, context, split.sizes, source, target)
        if torch.is_grad_enabled():
            self._last = weakref.ref(mini_batch)
        return Call(self._calls, mini_batch, source, target)

    def _check_call(self, key: tuple[int, ...]) -> None:
        """Check that every stage is at the same call of the same step."""
        first = self._control.broadcast("call", key, source=0)
        if first != key:
            raise RuntimeError(
                f"Stage {self._groups.stage} (rank {self._groups.ranks[self._groups.stage]}) is at"
                f" call {key[-1]} of step {key[2:-1]}, stage 0 at call {first[-1]} of step"
                f" {first[2:-1]}. Call the backbone on every rank alike, never under `if rank =="
                " 0`."
            )

    def _share_output(self, call: Call, batch: Tree, outline: GetOutline) -> Tree:
        """Merge the last stage's outputs and give them to every stage."""
        shared = call.output_side.merge(batch, outline) if self._groups.is_last else None
        output: Tree
        output, call.wanted = self._control.broadcast(
            "output", shared, source=self._groups.stages - 1
        )
        return output

    # ------------------------------------------------------------------ backward

    def steer(self, loss: Tensor, retain: bool, before_last: BeforeLast | None = None) -> Tensor:
        """Prepare a backward. Collective over the pipeline.

        Args:
            loss: The user's loss, a scalar, the same on every stage.
            retain: Whether the graph will be needed once more.
            before_last: Called with each virtual stage of this rank before its last micro-batch's
                backward; may return a scalar to run it from as well.

        Returns:
            What to call ``backward`` on; see :meth:`Steering.steer`.

        Raises:
            RuntimeError: If the loss wants no gradient.
        """
        self._overwrites.forget()
        self._retain, self._before_last = retain, before_last
        return self._steering.steer(loss)

    def finish_backward(self) -> None:
        """Check that a backward ran all that :meth:`steer` announced."""
        self._steering.finish()

    def _backward(self, call: Call) -> list[Tensor | None]:
        """Run a call's backward actions. Returns the input's gradients, on the first stage."""
        is_first = self._steering.reach(call.number)
        if call.batch.is_released:
            raise RuntimeError(
                "A second backward through the same call of the backbone: pass retain_graph=True to"
                " the first one."
            )
        changed = self._executor.changed_stage(call.batch)
        if changed is not None:
            raise RuntimeError(
                f"A parameter of stage {changed} was changed between the forward and the"
                " backward of the backbone, so the recomputed activations would be wrong. Step the"
                " optimizer after the backward."
            )
        gradients = self._output_gradients(call, is_chained=not is_first)
        if self._groups.is_last:
            call.output_side.set_gradients(call.wanted, gradients)
        before_last = self._before_last if self._steering.is_through else None
        with span("gpipe_backward"):
            self._executor.run(call.batch.plan.backwards, call.batch, self._retain, before_last)
        if self._trial.has_failed:  # other calls may follow, for which other stages wait
            return []
        return call.input_side.gradients() if self._groups.is_first else []

    def _output_gradients(self, call: Call, is_chained: bool) -> list[Tensor | None]:
        """The output's gradients, complete on the last stage.

        Where calls are chained, a part of the output's gradient arises on the first stage: it goes
        to the last one.
        """
        gradients = list(call.gradients or [None] * len(call.wanted))
        call.gradients = None
        groups = self._groups
        if not is_chained or groups.stages == 1:
            return gradients
        if groups.is_first:
            self._control.send("chained gradients", gradients, to=groups.stages - 1)
        elif groups.is_last:
            for i, part in enumerate(self._control.receive("chained gradients", source=0)):
                own = gradients[i]
                gradients[i] = part if own is None else own if part is None else own + part
        return gradients
