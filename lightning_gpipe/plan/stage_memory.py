"""What each stage will hold in a training step, in bytes: pure functions of what its layers hold.

The facts of :mod:`lightning_gpipe.plan.memory` are combined along a schedule: each rank's program
is followed from action to action, with what the engine holds between them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise

from lightning_gpipe.plan.memory import HeldTensor, LayerMemory
from lightning_gpipe.plan.part_memory import PartMemory
from lightning_gpipe.plan.step_memory import StepMemory
from lightning_gpipe.schedule.actions import Action, Schedule, kept_graphs

#: Micro-batches that a stage prepares to receive before it comes to them; of small ones all.
_AHEAD, _SMALL = 2, 1 << 16
#: Bytes up to which what is sent is copied to memory that is used again and again, and those from
#: which on it stays where it is while some micro-batches are under way.
_COPIED, _LARGE, _UNDER_WAY = 1 << 20, 1 << 21, 3
_NO_STEP = StepMemory(0, 0, 0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class StageMemory:
    """What a stage holds, in bytes, when it holds the most in a training step.

    Args:
        weights: Parameters and buffers.
        gradients: Of the parameters.
        optimizer: The optimizers' state; None: not known.
        inputs: Inputs of micro-batches that wait for a recompute or a forward, and gradients that
            wait for a backward.
        activations: What autograd saved for backwards, and what the action that runs needs.
        messages: What is under way between stages.
        ends: The mini-batch's output with its gradient, the buffers' copies, and what the step
            holds outside the backbone, where that is known.
    """

    weights: int
    gradients: int
    optimizer: int | None
    inputs: int
    activations: int
    messages: int
    ends: int

    @property
    def kept(self) -> int:
        """Bytes of weights, gradients and the optimizers' state, which stay from step to step."""
        return self.weights + self.gradients + (self.optimizer or 0)

    @property
    def of_micro_batches(self) -> int:
        """Bytes that come and go within a step."""
        return self.inputs + self.activations + self.messages + self.ends

    @property
    def total(self) -> int:
        """All bytes, without the optimizers' state where it isn't known."""
        return self.kept + self.of_micro_batches

    def with_at_least(self, nbytes: int) -> StageMemory:
        """The same, where so many bytes live at another time in the step."""
        if nbytes <= self.of_micro_batches:
            return self
        return replace(self, inputs=0, activations=0, messages=0, ends=nbytes)


def stage_memories(
    layers: Sequence[LayerMemory],
    sizes: Sequence[int],
    schedule: Schedule,
    is_whole_batch: bool,
    outside: Mapping[int, Iterable[HeldTensor]],
    step: StepMemory | None = None,
    sharing: int = 1,
) -> tuple[StageMemory, ...]:
    """What each stage holds.

    What the user's code keeps of the backbone's input on other stages than the first isn't counted,
    nor are the buckets in which replicas average gradients.

    Args:
        layers: What each layer holds.
        sizes: The number of layers of each virtual stage.
        schedule: Of a training step, with its virtual stages on the same ranks.
        is_whole_batch: Whether the user's step runs over the whole mini-batch: then every stage
            gets the backbone's whole output.
        outside: Parameters and buffers that a rank holds besides its layers'.
        step: What the user's step holds outside the backbone, of a mini-batch or, where it runs for
            each, a micro-batch; None: not known, and not counted.
        sharing: Replicas that share out a stage's optimizer state.
    """
    bounds = pairwise([0, *accumulate(sizes)])
    parts = [PartMemory.of(layers[start:end]) for start, end in bounds]
    users: dict[int, set[int]] = {}
    for part, rank in zip(parts, schedule.placement, strict=True):
        for tensor in part.tensors:
            users.setdefault(tensor.key, set()).add(rank)
    common = {t.key: t for part in parts for t in part.tensors if len(users[t.key]) > 1}
    found = []
    for rank in range(len(schedule.programs)):
        here = [part for part, at in zip(parts, schedule.placement, strict=True) if at == rank]
        own = {t.key: t for part in here for t in part.tensors}
        held = (common | {t.key: t for t in outside.get(rank, ())} | own).values()
        states = [t.optimizer for t in held if t.optimizer is not None]
        peak = _Walk(parts, schedule, rank, is_whole_batch, step or _NO_STEP).peak()
        found.append(
            StageMemory(
                sum(t.nbytes for t in held),
                sum(t.gradient for t in held),
                _largest_share(states, sharing) if len(states) == len(held) else None,
                peak.inputs,
                peak.graphs,
                peak.messages,
                peak.ends + sum(t.copy for t in own.values()),
            )
        )
    return tuple(found)


@dataclass(slots=True)
class _Holding:
    """Bytes of the micro-batches that are held at one time; see :class:`StageMemory`."""

    inputs: int = 0
    graphs: int = 0
    messages: int = 0
    ends: int = 0

    @property
    def total(self) -> int:
        return self.inputs + self.graphs + self.messages + self.ends


@dataclass(slots=True)
class _Walk:
    """Follows a rank's program.

    Args:
        parts: What the virtual stages hold.
        schedule: The programs.
        rank: Which of them.
        is_whole_batch: See :func:`stage_memories`.
        step: See there.
    """

    parts: Sequence[PartMemory]
    schedule: Schedule
    rank: int
    is_whole_batch: bool
    step: StepMemory
    _now: _Holding = field(default_factory=_Holding)
    _most: _Holding = field(default_factory=_Holding)
    _count: int = 0
    _own: tuple[int, ...] = ()
    _links: dict[int, tuple[bool, bool]] = field(default_factory=dict)
    _left: Counter[tuple[int, str]] = field(default_factory=Counter)
    _kept: frozenset[tuple[int, int]] = frozenset()
    _forwards: dict[int, dict[int, int]] = field(default_factory=dict)
    _backwards: Counter[int] = field(default_factory=Counter)

    def peak(self) -> _Holding:
        """What is held at the time when it is the most."""
        program, now = self.schedule.programs[self.rank], self._now
        self._kept = frozenset(kept_graphs(program))
        self._own = tuple(sorted({action.stage for action in program}))
        last = len(self.parts) - 1
        for s in self._own:  # whether its input and its output cross to other ranks
            is_given, is_fed = not self._is_local(s, -1), not self._is_local(s, 1)
            self._links[s] = s > 0 and is_given, s < last and is_fed
        ops = ((a.stage, "F" if a.op == "F" else "B") for a in program if a.op not in ("R", "W"))
        self._left = Counter(ops)
        self._count = 1 + max((action.micro_batch for action in program), default=-1)
        given = self.parts[0].input
        if self.is_whole_batch:
            self._note(self.step.first)
            now.ends += self.step.before
            now.inputs += self._count * given.nbytes * self._is_first
        for action in program:
            now.messages = self._messages(action)
            match action.op:
                case "F":
                    self._forward(action)
                case "R":
                    self._recompute(action.stage)
                case "B" | "I":
                    self._backward(action)
                case "W":
                    self._weights(self.parts[action.stage])
        if self.is_whole_batch and self._is_first:  # the gradient of the mini-batch's input
            now.messages = 0
            merged = self._count * given.gradient * (self._count > 1)
            self._note(max(merged, self.step.last - self.step.left))
        return self._most

    @property
    def _is_first(self) -> bool:
        return self.schedule.placement[0] == self.rank

    @property
    def _is_last(self) -> bool:
        return self.schedule.placement[-1] == self.rank

    def _forward(self, action: Action) -> None:
        now, step, stage, part = self._now, self.step, action.stage, self.parts[action.stage]
        is_kept, is_user_input = (stage, action.micro_batch) in self._kept, stage == 0
        is_end = stage == len(self.parts) - 1
        if is_user_input and not self.is_whole_batch:
            now.inputs += part.input.nbytes + step.left * bool(part.input.gradient)
        given = 0 if is_user_input else part.input.nbytes
        self._note(given + (part.graph if is_kept else part.forward))
        if self._is_local(stage, -1):
            now.inputs -= part.input.nbytes
        if is_end and not self.is_whole_batch:  # the loss is differentiated
            output = part.beside_graph if is_kept else part.output.nbytes
            left = part.graph if is_kept else given
            behind = max(part.output.gradient, self._behind(step.differentiated))
            self._note(left + output + max(behind, self._behind(step.behind)))
        if is_kept:
            now.graphs += part.graph
            self._drop_own(part, stage)
        elif not is_user_input:
            now.inputs += part.input.nbytes
        if is_end:
            now.ends += part.output.nbytes if self.is_whole_batch else part.output.gradient
        elif self._is_local(stage, 1):
            now.inputs += part.output.nbytes
        if self.is_whole_batch and not any(self._left[own, "F"] for own in self._own):
            if not self._is_first:  # whose graph in front of the backbone nobody needs
                now.ends -= step.before
            self._share_output()

    def _recompute(self, stage: int) -> None:
        part = self.parts[stage]
        self._note(part.graph)
        self._now.graphs += part.graph
        if stage:
            self._now.inputs -= part.input.nbytes
        else:
            self._drop_own(part, stage)

    def _backward(self, action: Action) -> None:
        """A backward, or the first half of one."""
        now, step, stage, part = self._now, self.step, action.stage, self.parts[action.stage]
        is_end, is_user_input = stage == len(self.parts) - 1, stage == 0
        if is_end and not self.is_whole_batch:
            now.ends -= part.output.gradient
        if self._is_local(stage, 1):
            now.inputs -= part.output.gradient
        given = 0 if is_end and self.is_whole_batch else part.output.gradient
        if action.op == "B":
            self._note(given + part.backward - part.graph)
        elif part.input.gradient:
            self._note(given + part.first_half)
        now.graphs -= part.graph if action.op == "B" else -part.second_half
        if self._is_local(stage, -1) or (is_user_input and self.is_whole_batch):
            now.inputs += part.input.gradient
        if is_user_input and not self.is_whole_batch and part.input.gradient:
            now.inputs -= part.input.nbytes
            self._note(part.input.gradient + step.last - step.left)
            now.inputs -= step.left

    def _weights(self, part: PartMemory) -> None:
        """The second half of a backward."""
        largest = max((tensor.gradient for tensor in part.tensors), default=0)
        self._note(largest if part.input.gradient else part.backward - part.graph)
        self._now.graphs -= part.graph + part.second_half

    def _drop_own(self, part: PartMemory, stage: int) -> None:
        """Let go of a micro-batch's input that the user's step gave, if nobody waits for it."""
        if stage == 0 and not self.is_whole_batch and not part.input.gradient:
            self._now.inputs -= part.input.nbytes

    def _share_output(self) -> None:
        """Put the output together on the last rank; every rank gets it, until the loss is through.

        On the last rank the loss's backward lets go of it, and leaves its gradient. The others let
        go of their losses' graphs before.
        """
        now, step, output, count = self._now, self.step, self.parts[-1].output, self._count
        whole = count * output.nbytes
        if not self._is_last:
            self._note(whole + self._behind(step.behind))
            now.ends += (step.left - step.before) * self._is_first
            return
        gradient = count * output.gradient
        differentiated = max(gradient, self._behind(step.differentiated))
        # it is merged; the loss is computed, and its backward
        self._note(max(whole * (count > 1), self._behind(step.behind), differentiated))
        now.ends += gradient - whole + (step.left - step.before) * self._is_first

    def _behind(self, nbytes: int) -> int:
        """What lives in a step besides what lives when it calls the backbone."""
        return nbytes - self.step.before

    def _messages(self, action: Action) -> int:
        """Bytes of what is awaited from other ranks, or sent to them, during an action."""
        kind = "F" if action.op == "F" else "B"
        if action.op in ("F", "B", "I"):
            self._left[action.stage, kind] -= 1
            self._send(action.stage, action.micro_batch, kind)
        held = 0
        for stage in self._own:
            part, forwards = self.parts[stage], self._left[stage, "F"]
            is_given, is_fed = self._links[stage]
            if is_given:
                held += _ahead(part.input.nbytes, forwards)
                sent_back = min(self._backwards[stage], _UNDER_WAY)
                held += _under_way(part.input.gradient, [part.input.gradient] * sent_back)
            if is_fed:
                sent = self._forwards.get(stage, {})
                held += _under_way(part.output.nbytes, [*sent.values()])
                if not (self.is_whole_batch and kind == "F"):  # then only in the backward
                    held += _ahead(part.output.gradient, self._left[stage, "B"] - forwards)
        return held

    def _send(self, stage: int, m: int, kind: str) -> None:
        """Note what is sent, until its gradient tells that it has arrived."""
        sent, part = self._forwards.setdefault(stage, {}), self.parts[stage]
        if kind == "F":
            sent[m] = part.beside_graph if (stage, m) in self._kept else part.output.nbytes
            return
        self._backwards[stage] += 1
        for earlier in list(sent)[: list(sent).index(m) + 1 if m in sent else 0]:
            del sent[earlier]

    def _is_local(self, stage: int, step: int) -> bool:
        """Whether a neighbouring stage is on this rank."""
        other = stage + step
        return 0 <= other < len(self.parts) and self.schedule.placement[other] == self.rank

    def _note(self, more: int) -> None:
        """Note what is held while an action needs more."""
        now = self._now
        if now.total + more > self._most.total:
            self._most = _Holding(now.inputs, now.graphs + more, now.messages, now.ends)


def _largest_share(sizes: Sequence[int], count: int) -> int:
    """The most that one of several gets, if the largest goes first, each to whom has least."""
    shares = [0] * count
    for size in sorted(sizes, reverse=True):
        shares[shares.index(min(shares))] += size
    return max(shares)


def _ahead(nbytes: int, left: int) -> int:
    """Bytes of the messages for which a stage is prepared, of so many that are left."""
    return nbytes * (left if nbytes <= _SMALL else min(_AHEAD, left))


def _under_way(nbytes: int, sent: Sequence[int]) -> int:
    """Bytes of the messages that a stage has sent and still holds.

    Args:
        nbytes: Of one.
        sent: What of each that may be under way nothing else holds.
    """
    if nbytes <= _COPIED:
        return nbytes
    return sum(sent[-_UNDER_WAY:]) if nbytes >= _LARGE else 0
