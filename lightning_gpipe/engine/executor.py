"""Runs a rank's program: any actions in any order, over the stages that the rank holds.

An action takes its input from where its stage is linked to, and hands its result on. What a stage
is linked to, another rank, another stage of this rank, or the user's step at the first and the last
stage, looks alike from here: a :class:`Source` or a :class:`Sink`. So a step mode brings a program
and the two ends of a mini-batch; everything between them happens here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, TypeAlias

import torch
from torch import Tensor

from lightning_gpipe.engine.context import ForwardContext
from lightning_gpipe.engine.rank_plan import RankPlan
from lightning_gpipe.engine.stage import Stage, StageCall
from lightning_gpipe.engine.stopwatch import Stopwatch, span
from lightning_gpipe.engine.trial import Trial
from lightning_gpipe.schedule.actions import Action
from lightning_gpipe.tensors.random_state import RandomState, own_preserved, preserved
from lightning_gpipe.tensors.tree import Tree

#: Called with a stage before its last backward; may return a scalar to run it from as well.
BeforeLast: TypeAlias = Callable[[int], Tensor | None]


class Source(Protocol):
    """Where activations or gradients come from.

    Args:
        gives_memory: Whether nobody else uses the memory of what is taken, so layers may change it.
    """

    gives_memory: ClassVar[bool]

    def expect(self, order: Iterable[int], training: bool) -> None:
        """Announce which micro-batches will be taken next, in this order."""

    def post(self, m: int) -> None:
        """Prepare to receive what was announced, up to this micro-batch; other ranks' alone."""

    def take(self, m: int) -> tuple[Tree, list[bool]]:
        """A micro-batch's tensors, and for each leaf whether it wants a gradient."""


class Sink(Protocol):
    """Where activations or gradients go."""

    def send(self, m: int, tree: Tree, requires_grad: Sequence[bool], training: bool) -> None:
        """Hand on a micro-batch's tensors, and for each leaf whether it wants a gradient."""


@dataclass(frozen=True, slots=True)
class Links:
    """What a stage is linked to; None at the ends of the pipeline, where the mini-batch is.

    Args:
        activations_in: Feeds its forwards.
        activations_out: Takes their results.
        gradients_in: Feeds its backwards.
        gradients_out: Takes their results.
    """

    activations_in: Source | None = None
    activations_out: Sink | None = None
    gradients_in: Source | None = None
    gradients_out: Sink | None = None


class InputSide(Source, Sink, Protocol):
    """The end of a mini-batch at the first stage: gives its input, takes the input's gradient."""


class OutputSide(Source, Sink, Protocol):
    """The end of a mini-batch at the last stage: takes its output, gives the output's gradient."""


class AtHand:
    """A source of what is here before it is taken."""

    __slots__ = ()
    gives_memory: ClassVar[bool] = False  # it is the user's, or in the graph of who made it

    def expect(self, order: Iterable[int], training: bool) -> None:
        """Do nothing."""

    def post(self, m: int) -> None:
        """Do nothing."""


@dataclass(slots=True)
class Local(AtHand):
    """A link between two stages of one rank."""

    _held: dict[int, tuple[Tree, list[bool]]] = field(default_factory=dict)

    def take(self, m: int) -> tuple[Tree, list[bool]]:
        """See :meth:`Source.take`."""
        return self._held.pop(m)

    def send(self, m: int, tree: Tree, requires_grad: Sequence[bool], training: bool) -> None:
        """See :meth:`Sink.send`."""
        self._held[m] = tree, list(requires_grad)


@dataclass
class MiniBatch:
    """One mini-batch on this rank, from its first action to its last.

    Args:
        plan: What this rank does with it.
        input_side: What feeds F on the first stage, and takes the input's gradient of its B.
        output_side: What takes F's output on the last stage, and feeds its B.
        calls: What each stage of this rank knows of it.
        waiting: For each stage the micro-batches whose backwards are to come, and of which it isn't
            known yet whether they get a gradient.
    """

    plan: RankPlan
    input_side: InputSide
    output_side: OutputSide
    calls: dict[int, StageCall]
    waiting: dict[int, deque[int]] = field(default_factory=dict)

    @property
    def is_released(self) -> bool:
        """Whether nothing is left of its forwards."""
        return not any(call.micro_batches for call in self.calls.values())


class Executor:
    """Runs actions over the stages of one rank.

    Args:
        stages: The stages of this rank by their index.
        links: What each of them is linked to.
        watch: Measures actions, on the device where the stages are.
        trial: Whether a stage goes on that fails.
        in_order: Whether receives are posted where they stand among all messages.
    """

    def __init__(
        self,
        stages: Mapping[int, Stage],
        links: Mapping[int, Links],
        watch: Stopwatch,
        trial: Trial,
        in_order: bool,
    ) -> None:
        self._stages = dict(stages)
        self._links = dict(links)
        self.watch = watch
        self._trial = trial
        self._in_order = in_order
        self._generators = [g for stage in self._stages.values() for g in stage.generators]

    @property
    def unsplit(self) -> list[int]:
        """The stages of which a backward couldn't be split."""
        return [index for index, stage in self._stages.items() if stage.cannot_split]

    def close(self) -> None:
        """Let go of the layers."""
        for stage in self._stages.values():
            stage.close()

    def begin(
        self,
        plan: RankPlan,
        context: ForwardContext,
        sizes: Sequence[int],
        input_side: InputSide,
        output_side: OutputSide,
    ) -> MiniBatch:
        """Begin a mini-batch; collective over the replicas where SyncBatchNorm trains.

        Args:
            plan: All that this rank will do with it.
            context: What surrounds the forwards; must be in force.
            sizes: Samples in each micro-batch.
            input_side: The mini-batch at the first stage.
            output_side: The mini-batch at the last stage.
        """
        self.watch.samples = sum(sizes)
        calls = {}
        for index, stage in self._stages.items():
            is_once = all((index, m) in plan.kept for m in range(len(sizes)))
            calls[index] = stage.begin(context, sizes, is_once)
        return MiniBatch(plan, input_side, output_side, calls)

    def graphs(self, batch: MiniBatch) -> list[Any]:
        """Where the graphs of the micro-batches begin whose activations are kept."""
        records = (m for call in batch.calls.values() for m in call.micro_batches.values())
        return [edge.node for record in records for edge in record.roots or ()]

    def end_forward(self, batch: MiniBatch) -> None:
        """Tell that all micro-batches of a mini-batch are forwarded."""
        for index, stage in self._stages.items():
            stage.end_forward(batch.calls[index])

    def changed_stage(self, batch: MiniBatch) -> int | None:
        """A stage of which a parameter was changed since the forwards."""
        changed = (i for i, stage in self._stages.items() if stage.has_changed(batch.calls[i]))
        return next(changed, None)

    def run(
        self,
        actions: Sequence[Action],
        batch: MiniBatch,
        retain: bool = False,
        before_last: BeforeLast | None = None,
    ) -> None:
        """Run actions of a mini-batch, one after another.

        Args:
            actions: A part of the program with which the mini-batch began.
            batch: The mini-batch.
            retain: Whether its graphs are needed once more.
            before_last: Called before each stage's last backward.
        """
        self.watch.section += 1
        self.announce(actions, batch)
        last = {action.stage: action for action in actions}
        layers_run = any(action.op in ("F", "R") for action in actions)
        are_seeded = any(call.seeding.is_any for call in batch.calls.values())
        with self.preserved_generators(are_seeded) if layers_run else nullcontext():
            for action in actions:
                is_last = before_last is not None and action is last[action.stage]
                also = before_last(action.stage) if before_last and is_last else None
                self.do(action, batch, retain, also)

    def preserved_generators(self, with_global: bool = True) -> AbstractContextManager[RandomState]:
        """Put torch's random generators back at the end.

        Args:
            with_global: Whether Python's and NumPy's are among those that are seeded.
        """
        return preserved(self.watch.device, with_global)

    def announce(self, actions: Sequence[Action], batch: MiniBatch) -> None:
        """Tell in which order a mini-batch's actions come, before the first of them."""
        for index in self._stages:
            order = [m for stage, op, m in actions if op == "F" and stage == index]
            if order:
                self._activations_in(index, batch).expect(order, torch.is_grad_enabled())
            backwards = (m for stage, op, m in actions if op in ("B", "I") and stage == index)
            batch.waiting[index] = deque(backwards)
            self._expect_gradients(index, batch)

    def do(
        self, action: Action, batch: MiniBatch, retain: bool = False, also: Tensor | None = None
    ) -> None:
        """Run one of the actions that were announced.

        Args:
            action: The action.
            batch: The mini-batch.
            retain: Whether its graphs are needed once more.
            also: A scalar to run a backward from as well.
        """
        try:
            if self._in_order:
                self._post_receives(action, batch)
            own = own_preserved(self._generators) if self._generators else nullcontext()
            with own, span("gpipe", action):
                self.watch.start()
                match action.op:
                    case "F":
                        self._forward(action, batch)
                        self._expect_gradients(action.stage, batch)
                    case "R":
                        self._recompute(action, batch, retain)
                    case "B":
                        self._backward(action, batch, retain, also)
                    case "I":
                        self._backward(action, batch)
                    case "W":
                        self._backward_weights(action, batch)
                self.watch.done(action)
        except RuntimeError:
            self._trial.end()
            raise

    def _forward(self, action: Action, batch: MiniBatch) -> None:
        index, _, m = action
        call = batch.calls[index]
        source = self._activations_in(index, batch)
        inputs, flags = source.take(m)
        inputs = self._trial.take(inputs)
        outputs: Tree | None = None
        if not self._trial.has_failed:
            with self._trial.attempt():
                self.watch.begin()
                keep = (index, m) in batch.plan.kept
                outputs = self._stages[index].forward(
                    call, m, inputs, flags, keep, source.gives_memory
                )
                self.watch.end()
                flags = call.micro_batches[m].output_requires_grad
        if outputs is None:
            outputs, flags = self._trial.failed(), [False]
        sink = self._links[index].activations_out or batch.output_side
        sink.send(m, outputs, flags, torch.is_grad_enabled())

    def _recompute(self, action: Action, batch: MiniBatch, retain: bool) -> None:
        if not self._trial.has_failed:
            with self._trial.attempt():
                self.watch.begin()
                stage, call = self._stages[action.stage], batch.calls[action.stage]
                stage.recompute(call, action.micro_batch, keep_input=retain)
                self.watch.end()

    def _backward(
        self,
        action: Action,
        batch: MiniBatch,
        retain: bool = False,
        also: Tensor | None = None,
    ) -> None:
        index, _, m = action
        call, sink = batch.calls[index], self._links[index].gradients_out or batch.input_side
        is_waited_for = any(call.micro_batches[m].input_requires_grad)

        def hand_on(gradients: Sequence[Tensor | None]) -> None:
            nonlocal is_waited_for
            is_waited_for = False
            sink.send(m, Tree.of_gradients(gradients), [False] * len(gradients), training=True)

        gradients: Sequence[Tensor | None] = []
        if call.micro_batches[m].needs_backward:
            gradients = self._trial.take(self._gradients_in(index, batch).take(m)[0]).leaves
        if not self._trial.has_failed:
            with self._trial.attempt():
                self.watch.begin()
                if action.op == "B":
                    self._stages[index].backward(call, m, gradients, retain, hand_on, also)
                else:
                    self._stages[index].backward_input(call, m, gradients, hand_on)
                self.watch.end()
        if self._trial.has_failed and is_waited_for:
            sink.send(m, self._trial.failed(), [False], training=True)
        if action.op == "B" and not retain:
            del call.micro_batches[m]

    def _backward_weights(self, action: Action, batch: MiniBatch) -> None:
        call = batch.calls[action.stage]
        if not self._trial.has_failed:
            with self._trial.attempt():
                self.watch.begin()
                self._stages[action.stage].backward_weights(call, action.micro_batch)
                self.watch.end()
        del call.micro_batches[action.micro_batch]

    def _expect_gradients(self, stage: int, batch: MiniBatch) -> None:
        """Announce a stage's backwards of which it is known whether they get a gradient."""
        order, waiting = [], batch.waiting[stage]
        while waiting and (record := batch.calls[stage].micro_batches.get(waiting[0])):
            m = waiting.popleft()
            if record.needs_backward:
                order.append(m)
        if order:
            self._gradients_in(stage, batch).expect(order, training=True)

    def _post_receives(self, action: Action, batch: MiniBatch) -> None:
        """Post the receives of what arrives during an action."""
        for stage, op, m in batch.plan.receives.get(action, ()):
            if op == "F":
                self._activations_in(stage + 1, batch).post(m)
            elif batch.calls[stage - 1].micro_batches[m].needs_backward:
                self._gradients_in(stage - 1, batch).post(m)

    def _activations_in(self, stage: int, batch: MiniBatch) -> Source:
        return self._links[stage].activations_in or batch.input_side

    def _gradients_in(self, stage: int, batch: MiniBatch) -> Source:
        return self._links[stage].gradients_in or batch.output_side
