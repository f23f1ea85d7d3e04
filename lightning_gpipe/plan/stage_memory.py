"""What each stage will hold in a training step, in bytes: pure functions of what its layers hold.

The facts of :mod:`lightning_gpipe.plan.memory` are combined along a schedule: each rank's program
is followed from action to action, with what the engine holds between them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from lightning_gpipe.plan.memory import Boundary, HeldTensor, LayerMemory
from lightning_gpipe.schedule.actions import Action, Schedule, kept_graphs

#: Micro-batches that a stage prepares to receive before it comes to them; of small ones all.
_AHEAD, _SMALL = 2, 1 << 16
#: Bytes up to which what is sent is copied to memory that is used again and again, and those from
#: which on it stays where it is while some micro-batches are under way.
_COPIED, _LARGE, _UNDER_WAY = 1 << 20, 1 << 21, 3


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
        ends: The mini-batch's output with its gradient, the buffers' copies, and the like.
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
        """Bytes that stay from step to step: weights, gradients and the optimizers' state."""
        return self.weights + self.gradients + (self.optimizer or 0)

    @property
    def of_micro_batches(self) -> int:
        """Bytes that come and go within a step."""
        return self.inputs + self.activations + self.messages + self.ends

    @property
    def total(self) -> int:
        """All bytes, without the optimizers' state where it isn't known."""
        return self.kept + self.of_micro_batches


def stage_memories(
    layers: Sequence[LayerMemory],
    sizes: Sequence[int],
    schedule: Schedule,
    is_whole_batch: bool,
    outside: Mapping[int, Iterable[HeldTensor]],
    sharing: int = 1,
) -> tuple[StageMemory, ...]:
    """What each stage holds.

    What the user's code computes outside the backbone isn't counted, nor what it keeps of the
    backbone's input on other stages than the first; neither are the buckets in which replicas
    average gradients.

    Args:
        layers: What each layer holds.
        sizes: The number of layers of each virtual stage.
        schedule: Of a training step, with its virtual stages on the same ranks.
        is_whole_batch: Whether the user's step runs over the whole mini-batch: then every stage
            gets the backbone's whole output.
        outside: Parameters and buffers that a rank holds besides its layers'.
        sharing: Replicas that share out a stage's optimizer state.
    """
    bounds = pairwise([0, *accumulate(sizes)])
    parts = [_Part.of(layers[start:end]) for start, end in bounds]
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
        peak = _Walk(parts, schedule, rank, is_whole_batch).peak()
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


@dataclass(frozen=True, slots=True)
class _Part:
    """What a virtual stage holds of one micro-batch.

    Args:
        tensors: Its layers' parameters and buffers.
        input: What it is given.
        output: What it returns.
        beside_graph: Bytes of that which the graph doesn't hold.
        graph: What autograd saves.
        backward: The most that a backward holds, the graph included, without the output's gradient.
        forward: The most that a forward holds that saves nothing, with a copy of its input.
        first_half: The most that lives in the first half of a split backward besides the graph,
            without the output's gradient.
        arriving: What a split backward keeps besides the graph.
        behind: What of the graph it lets go of after its first half.
    """

    tensors: tuple[HeldTensor, ...]
    input: Boundary
    output: Boundary
    beside_graph: int
    graph: int
    backward: int
    forward: int
    first_half: int
    arriving: int
    behind: int

    @classmethod
    def of(cls, layers: Sequence[LayerMemory]) -> _Part:
        saved: dict[int, int] = {}
        backward = 0
        for layer in layers:  # a backward has let go of the graphs of the layers behind it
            saved |= layer.saved
            more = layer.last_backward if layer is layers[-1] else layer.backward
            backward = max(backward, sum(saved.values()) + more)
        first_half = arriving = 0
        behind: dict[int, int] = {}
        for layer in reversed(layers):
            first_half = max(first_half, arriving + layer.first_half)
            if not arriving:
                behind |= dict(list(layer.saved.items())[len(layer.saved) - layer.behind :])
            arriving += layer.arriving
        inside = [layer.input.nbytes * (i > 0) + layer.forward for i, layer in enumerate(layers)]
        return cls(
            tuple(tensor for layer in layers for tensor in layer.tensors),
            layers[0].input,
            layers[-1].output,
            layers[-1].output.nbytes - layers[-1].output_saved,
            sum(saved.values()),
            backward,
            layers[0].input.nbytes + max(inside),
            first_half,
            arriving,
            sum(behind.values()),
        )


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
    """

    parts: Sequence[_Part]
    schedule: Schedule
    rank: int
    is_whole_batch: bool
    _most: _Holding = field(default_factory=_Holding)
    _own: tuple[int, ...] = ()
    _left: Counter[tuple[int, str]] = field(default_factory=Counter)
    _kept: frozenset[tuple[int, int]] = frozenset()
    _forwards: dict[int, dict[int, int]] = field(default_factory=dict)
    _backwards: Counter[int] = field(default_factory=Counter)

    def peak(self) -> _Holding:
        """What is held at the time when it is the most."""
        program, last = self.schedule.programs[self.rank], len(self.parts) - 1
        self._kept = kept = frozenset(kept_graphs(program))
        self._own = tuple(sorted({action.stage for action in program}))
        ops = ((a.stage, "F" if a.op == "F" else "B") for a in program if a.op not in ("R", "W"))
        self._left = Counter(ops)
        first_part, last_part = self.parts[0], self.parts[last]
        count = 1 + max((action.micro_batch for action in program), default=-1)
        is_first = self.schedule.placement[0] == self.rank
        is_last = self.schedule.placement[last] == self.rank
        now = _Holding()
        if self.is_whole_batch and is_first:
            now.inputs += count * first_part.input.nbytes
        forwards = sum(action.op == "F" for action in program)
        for action in program:
            part, stage = self.parts[action.stage], action.stage
            is_kept, is_user_input = (stage, action.micro_batch) in kept, stage == 0
            now.messages = self._messages(action)
            match action.op:
                case "F":
                    forwards -= 1
                    if is_user_input and not self.is_whole_batch:
                        now.inputs += part.input.nbytes
                    given = 0 if is_user_input else part.input.nbytes
                    self._note(now, given + (part.graph if is_kept else part.forward))
                    if self._is_local(stage, -1):
                        now.inputs -= part.input.nbytes
                    if stage == last and not self.is_whole_batch:  # the loss is differentiated
                        output = part.beside_graph if is_kept else part.output.nbytes
                        left = part.graph if is_kept else given
                        self._note(now, left + output + part.output.gradient)
                    if is_kept:
                        now.graphs += part.graph
                        self._drop_own(now, part, stage)
                    elif not is_user_input:
                        now.inputs += part.input.nbytes
                    if stage == last:
                        bytes_out = part.output
                        now.ends += bytes_out.nbytes if self.is_whole_batch else bytes_out.gradient
                    elif self._is_local(stage, 1):
                        now.inputs += part.output.nbytes
                    if not forwards and self.is_whole_batch:
                        self._share_output(now, count, last_part.output, is_last)
                case "R":
                    self._note(now, part.graph)
                    now.graphs += part.graph
                    if not is_user_input:
                        now.inputs -= part.input.nbytes
                    else:
                        self._drop_own(now, part, stage)
                case "B" | "I":
                    if stage == last and not self.is_whole_batch:
                        now.ends -= part.output.gradient
                    if self._is_local(stage, 1):
                        now.inputs -= part.output.gradient
                    is_of_mini_batch = stage == last and self.is_whole_batch
                    given = 0 if is_of_mini_batch else part.output.gradient
                    if action.op == "B":
                        self._note(now, given + part.backward - part.graph)
                    elif part.input.gradient:
                        self._note(now, given + part.first_half)
                    now.graphs -= part.graph if action.op == "B" else -_second_half(part)
                    if self._is_local(stage, -1) or (is_user_input and self.is_whole_batch):
                        now.inputs += part.input.gradient
                    if is_user_input and not self.is_whole_batch and part.input.gradient:
                        now.inputs -= part.input.nbytes
                case "W":
                    largest = max((tensor.gradient for tensor in part.tensors), default=0)
                    whole = part.backward - part.graph
                    self._note(now, largest if part.input.gradient else whole)
                    now.graphs -= part.graph + _second_half(part)
        if self.is_whole_batch and is_first:  # the gradient of the mini-batch's input
            now.messages = 0
            self._note(now, count * first_part.input.gradient * (count > 1))
        return self._most

    def _drop_own(self, now: _Holding, part: _Part, stage: int) -> None:
        """Let go of a micro-batch's input that the user's step gave, if nobody waits for it."""
        if stage == 0 and not self.is_whole_batch and not part.input.gradient:
            now.inputs -= part.input.nbytes

    def _share_output(self, now: _Holding, count: int, output: Boundary, is_last: bool) -> None:
        """Put the output together on the last rank; every rank gets it, until the loss is through.

        On the last rank the loss's backward lets go of it, and leaves its gradient.
        """
        whole = count * output.nbytes
        if not is_last:
            now.ends += whole
            return
        gradient = count * output.gradient
        self._note(now, max(whole * (count > 1), gradient))  # it is merged; the loss's backward
        now.ends += gradient - whole

    def _messages(self, action: Action) -> int:
        """Bytes of what is awaited from other ranks, or sent to them, during an action."""
        kind = "F" if action.op == "F" else "B"
        if action.op in ("F", "B", "I"):
            self._left[action.stage, kind] -= 1
            self._send(action.stage, action.micro_batch, kind)
        held = 0
        for stage in self._own:
            part, forwards = self.parts[stage], self._left[stage, "F"]
            if stage and not self._is_local(stage, -1):
                held += _ahead(part.input.nbytes, forwards)
                held += _under_way(
                    part.input.gradient, [part.input.gradient] * self._backwards[stage]
                )
            is_fed = stage + 1 < len(self.parts) and not self._is_local(stage, 1)
            if is_fed:
                sent = self._forwards.get(stage, {})
                held += _under_way(part.output.nbytes, [*sent.values()])
            if is_fed and not (self.is_whole_batch and forwards):
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

    def _note(self, now: _Holding, more: int) -> None:
        """Note what is held while an action needs more."""
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


def _second_half(part: _Part) -> int:
    """What a backward keeps between its halves, less the graph that it lets go of.

    Where no input wants a gradient, it isn't split: all is done in the second half.
    """
    return part.arriving - part.behind if part.input.gradient else part.output.gradient
