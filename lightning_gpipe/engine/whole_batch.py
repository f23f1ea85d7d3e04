"""Runs one stage's actions, and joins them to the graph of the user's step.

Every stage runs the user's step. Where the step calls the backbone, :meth:`Engine.forward` runs the
forward actions and returns the last stage's output, on every stage. The backward actions run when
autograd reaches the call; see :mod:`lightning_gpipe.engine.autograd`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, TypeAlias
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from lightning_gpipe.comm.groups import Groups
from lightning_gpipe.comm.p2p import Receiver, Sender
from lightning_gpipe.engine.autograd import CallNode, ExitNode, SteerNode, calls_behind
from lightning_gpipe.engine.stage import ForwardContext, MicroBatch, Stage
from lightning_gpipe.model.run_layer import RunLayer
from lightning_gpipe.schedule.actions import Action, Checkpoint, Program, kept_graphs
from lightning_gpipe.schedule.check import validate
from lightning_gpipe.schedule.gpipe import fill_drain, forward_only
from lightning_gpipe.tensors.microbatch import Merge, Split
from lightning_gpipe.tensors.tree import Tree

ExpectLast: TypeAlias = Callable[[], Tensor | None]


@dataclass(slots=True)
class Call:
    """One call of the backbone, from its forward to its backward.

    Args:
        number: Counts the calls; the same on every stage.
        setting: The step's random numbers and autocast.
        split: How the input was split.
        program: What this stage does.
        micro_batches: Its records.
        versions: The parameters' versions in the forward.
        inputs: First stage: the input's tensors that want a gradient, and whether each was split.
        merge: Last stage: how the output was merged.
        wanted: Output leaves that want a gradient.
        output_gradients: Their gradients, as far as they arose on this stage.
    """

    number: int
    setting: ForwardContext
    split: Split
    program: Program
    micro_batches: dict[int, MicroBatch] = field(default_factory=dict)
    versions: list[int] = field(default_factory=list)
    inputs: tuple[list[Tensor], list[bool]] = field(default_factory=lambda: ([], []))
    merge: Merge | None = None
    wanted: list[int] = field(default_factory=list)
    output_gradients: Sequence[Tensor | None] | None = None

    def catch(self, gradients: Sequence[Tensor | None]) -> None:
        """Keep the output's gradients for the backward."""
        self.output_gradients = gradients


class Engine:
    """The pipeline as seen from one rank.

    Args:
        stage: The layers of this rank.
        groups: The process groups.
        chunks: M.
        checkpoint: Which micro-batches are re-materialized.
        seed: Seed of the layers' random numbers; the same on every rank.
    """

    def __init__(
        self,
        stage: Stage,
        groups: Groups,
        chunks: int,
        checkpoint: Checkpoint,
        seed: int,
    ) -> None:
        validate(fill_drain(groups.stages, chunks, checkpoint))
        self.stage = stage
        self.groups = groups
        self.control = groups.pipeline
        self.chunks = chunks
        self.checkpoint = checkpoint
        self._seed = seed & (2**63 - 1)
        self._step: tuple[int, ...] = (0,)
        self._calls_in_step = 0
        self._calls = 0
        self._tokens: WeakValueDictionary[int, Tensor] = WeakValueDictionary()
        self._announced: deque[int] = deque()
        self._chained = False
        self._retain = False
        self._expect_last: ExpectLast | None = None
        self._anchor = torch.zeros((), device=groups.device, requires_grad=True)
        before, after = groups.stage - 1, groups.stage + 1
        down_in, down_out = (
            groups.channel(before, groups.activations),
            groups.channel(after, groups.activations),
        )
        up_in, up_out = (
            groups.channel(after, groups.gradients),
            groups.channel(before, groups.gradients),
        )
        self._activations_in = Receiver(down_in) if down_in else None
        self._activations_out = Sender(down_out) if down_out else None
        self._gradients_in = Receiver(up_in) if up_in else None
        self._gradients_out = Sender(up_out) if up_out else None

    def begin_step(self, *step: int) -> None:
        """Tell the engine which step comes, for the layers' random numbers.

        Args:
            step: Numbers that tell steps apart; the same on every stage.
        """
        self._step = step
        self._calls_in_step = 0

    def close(self) -> None:
        """Let go of the layers."""
        self.stage.batch_norm.remove()

    def flush(self) -> None:
        """Wait until everything sent has arrived."""
        for sender in (self._activations_out, self._gradients_out):
            if sender is not None:
                sender.flush()

    # ------------------------------------------------------------------ forward

    def forward(self, value: Any, run_layer: RunLayer) -> Any:
        """Run the backbone. Collective over the pipeline.

        Args:
            value: The input, a pytree of tensors ``[batch, …]``, the same on every stage. It is not
                changed.
            run_layer: Runs one of the layers.

        Returns:
            The last stage's output of all micro-batches, on every stage.
        """
        batch = Tree.of(value, "The backbone's input")
        split = Split.plan(batch, self.chunks)
        count, stages = len(split.sizes), self.groups.stages
        schedule = (
            fill_drain(stages, count, self.checkpoint)
            if torch.is_grad_enabled()
            else forward_only(stages, count)
        )
        self._calls += 1
        self._calls_in_step += 1
        key = (self._seed, self.groups.replica, *self._step, self._calls_in_step)
        self._check_call(key)
        call = Call(
            self._calls,
            ForwardContext.current(key, self.groups.device, self.stage.modes(), run_layer),
            split,
            schedule[self.groups.stage],
        )
        self.stage.batch_norm.begin(split.sizes)
        with self.stage.random_state(), torch.autograd.profiler.record_function("gpipe_forward"):
            outputs = self._run_forwards(call, batch)
        call.versions = self.stage.parameter_versions()
        output = self._share_output(call, batch, outputs)
        self.stage.batch_norm.finish()
        return self._join(call, batch, output)

    def _check_call(self, key: tuple[int, ...]) -> None:
        """Check that every stage is at the same call of the same step."""
        first = self.control.broadcast("call", key, source=0)
        if first != key:
            raise RuntimeError(
                f"Stage {self.groups.stage} (rank {self.groups.ranks[self.groups.stage]}) is at"
                f" call {key[-1]} of step {key[2:-1]}, stage 0 at call {first[-1]} of step"
                f" {first[2:-1]}. Call the backbone on every rank alike, never under `if rank =="
                " 0`."
            )

    def _run_forwards(self, call: Call, batch: Tree) -> list[Tree]:
        """Run a call's forward actions; returns the last stage's outputs, on the last stage."""
        forwards = [action for action in call.program if action.op == "F"]
        requires_grad = [
            isinstance(t, Tensor) and t.requires_grad and torch.is_grad_enabled()
            for t in batch.leaves
        ]
        micro_batches = call.split.scatter(batch.detached()) if self.groups.is_first else []
        if self._activations_in is not None:
            self._activations_in.expect((m for _, m in forwards), torch.is_grad_enabled())
        outputs: list[Tree] = []
        kept = kept_graphs(call.program)
        for _, m in forwards:
            if self._activations_in is not None:
                inputs, flags = self._activations_in.take(m)
            else:
                inputs, flags = micro_batches[m], list(requires_grad)
            output, record = self.stage.forward(m, inputs, flags, m in kept, call.setting)
            call.micro_batches[m] = record
            if self._activations_out is not None:
                self._activations_out.send(
                    m, output, record.output_requires_grad, torch.is_grad_enabled()
                )
            else:
                outputs.append(output)
        return outputs

    def _share_output(self, call: Call, batch: Tree, outputs: list[Tree]) -> Tree:
        """Merge the last stage's outputs and give them to every stage."""
        shared: tuple[Tree, list[int]] | None = None
        if self.groups.is_last:
            merged, call.merge = Merge.merge(outputs, call.split, batch)
            records = call.micro_batches.values()
            wanted = [
                i
                for i in range(len(merged.leaves))
                if any(r.output_requires_grad[i] for r in records)
            ]
            shared = merged, wanted
        output: tuple[Tree, list[int]] = self.control.broadcast(
            "output", shared, source=self.groups.stages - 1
        )
        call.wanted = output[1]
        return output[0]

    def _join(self, call: Call, batch: Tree, output: Tree) -> Any:
        """Make the output a part of the user's graph."""
        if not call.wanted:
            return output.value()
        if self.groups.is_first:
            pairs = [
                p
                for p in zip(batch.leaves, call.split.split_leaves, strict=True)
                if isinstance(p[0], Tensor) and p[0].requires_grad
            ]
            sources = [leaf for leaf, _ in pairs]
            call.inputs = [leaf.detach() for leaf in sources], [is_split for _, is_split in pairs]
        else:  # the input's gradient arises on the first stage; only the order matters here
            sources = [
                self._tokens[n] for n in sorted(calls_behind(batch.tensors())) if n in self._tokens
            ]
        token: Tensor = CallNode.apply(
            call.number, partial(self._backward, call), self._anchor, *sources
        )
        self._tokens[call.number] = token
        leaves = list(output.leaves)
        for i, leaf in zip(
            call.wanted,
            ExitNode.apply(call.catch, token, [leaves[i] for i in call.wanted]),
            strict=True,
        ):
            leaves[i] = leaf
        return output.with_leaves(leaves).value()

    # ------------------------------------------------------------------ backward

    def steer(self, loss: Tensor, retain: bool, expect_last: ExpectLast | None = None) -> Tensor:
        """Prepare a backward. Collective over the pipeline.

        Args:
            loss: The user's loss, a scalar, the same on every stage.
            retain: Whether the graph will be needed once more.
            expect_last: Called before the last micro-batch's backward on this stage; may return a
                scalar to run it from as well.

        Returns:
            What to call ``backward`` on: on the last stage the loss, on others its value with a
            graph that leads to the same calls of the backbone.

        Raises:
            RuntimeError: If the loss wants no gradient.
        """
        self._retain, self._expect_last = retain, expect_last
        numbers: list[int] | None = None
        if self.groups.is_last:
            numbers = sorted(calls_behind([loss]), reverse=True) if loss.requires_grad else None
        numbers = self.control.broadcast("backward", numbers, source=self.groups.stages - 1)
        if numbers is None:
            raise RuntimeError(
                "The loss wants no gradient: it depends neither on the backbone's output nor on any"
                " parameter that requires one. Was it detached, or computed under torch.no_grad()?"
            )
        self._announced.extend(numbers)
        self._chained = False
        if self.groups.is_last:
            return loss
        missing = [n for n in numbers if n not in self._tokens]
        if missing:
            raise RuntimeError(
                f"The last stage differentiates call {missing[0]} of the backbone, of which stage"
                f" {self.groups.stage} has dropped the output: the step must do the same on every"
                " rank."
            )
        steered: Tensor = SteerNode.apply(
            loss.detach(), self._anchor, *(self._tokens[n] for n in numbers)
        )
        return steered

    def finish_backward(self) -> None:
        """Check that a backward ran all that :meth:`steer` announced."""
        if self._announced:
            left = list(self._announced)
            self._announced.clear()
            raise RuntimeError(
                f"The backward did not reach calls {left} of the backbone on stage"
                f" {self.groups.stage}: a LightningModule.backward override must call"
                " loss.backward(*args, **kwargs) on the loss that it gets."
            )

    def _backward(self, call: Call) -> list[Tensor | None]:
        """Run a call's backward actions. Returns the input's gradients, on the first stage."""
        if not self._announced or self._announced[0] != call.number:
            raise RuntimeError(
                "A backward reached the backbone without the strategy knowing of it. In manual"
                " optimization call self.manual_backward(loss), not loss.backward()."
                " torch.autograd.grad through the backbone is not supported."
            )
        self._announced.popleft()
        if not call.micro_batches:
            raise RuntimeError(
                "A second backward through the same call of the backbone: pass retain_graph=True to"
                " the first one."
            )
        if call.versions != self.stage.parameter_versions():
            raise RuntimeError(
                f"A parameter of stage {self.groups.stage} was changed between the forward and the"
                " backward of the backbone, so the recomputed activations would be wrong. Step the"
                " optimizer after the backward."
            )
        rows = self._output_gradients(call)
        actions = [action for action in call.program if action.op != "F"]
        if self._gradients_in is not None:
            wanted = (m for op, m in actions if op == "B" and call.micro_batches[m].needs_backward)
            self._gradients_in.expect(wanted, training=True)
        input_gradients: dict[int, list[Tensor | None]] = {}
        with self.stage.random_state(), torch.autograd.profiler.record_function("gpipe_backward"):
            for action in actions:
                is_last = action is actions[-1] and not self._announced
                also = self._expect_last() if is_last and self._expect_last else None
                self._dispatch[action.op](self, call, action, rows, input_gradients, also)
        if not self._retain:
            call.micro_batches.clear()
        if not self.groups.is_first:
            return []
        ordered = [
            input_gradients.get(m, [None] * len(call.inputs[0]))
            for m in range(len(call.split.sizes))
        ]
        return call.split.gather_gradients(*call.inputs, ordered)

    def _output_gradients(self, call: Call) -> list[list[Tensor | None]]:
        """The last stage's gradients of every micro-batch's output.

        Where calls are chained, a part of the output's gradient arises on the first stage: it goes
        to the last one.
        """
        gradients = list(call.output_gradients or [None] * len(call.wanted))
        call.output_gradients = None
        if self._chained and self.groups.stages > 1:
            if self.groups.is_first:
                self.control.send("chained gradients", gradients, to=self.groups.stages - 1)
            elif self.groups.is_last:
                for i, part in enumerate(self.control.receive("chained gradients", source=0)):
                    own = gradients[i]
                    gradients[i] = part if own is None else own if part is None else own + part
        self._chained = True
        if call.merge is None:
            return []
        leaves: list[Tensor | None] = [None] * len(call.merge.lengths)
        for i, gradient in zip(call.wanted, gradients, strict=True):
            leaves[i] = gradient
        return call.merge.scatter_gradients(leaves, len(call.split.sizes))

    def _recompute_action(
        self, call: Call, action: Action, rows: Any, input_gradients: Any, also: Any
    ) -> None:
        self.stage.recompute(
            action.micro_batch,
            call.micro_batches[action.micro_batch],
            call.setting,
            keep_input=self._retain,
        )

    def _backward_action(
        self,
        call: Call,
        action: Action,
        rows: list[list[Tensor | None]],
        input_gradients: dict[int, list[Tensor | None]],
        also: Tensor | None,
    ) -> None:
        m = action.micro_batch
        record = call.micro_batches[m]
        gradients: Sequence[Tensor | None] = []
        if self._gradients_in is not None and record.needs_backward:
            gradients = self._gradients_in.take(m)[0].leaves
        elif record.needs_backward:
            gradients = [
                g for g, wants in zip(rows[m], record.output_requires_grad, strict=True) if wants
            ]
        upstream = self.stage.backward(record, gradients, self._retain, also)
        if not any(record.input_requires_grad):
            return
        if self._gradients_out is not None:
            tree = Tree.of(upstream, "A gradient")
            self._gradients_out.send(m, tree, [False] * len(upstream), training=True)
        else:
            input_gradients[m] = upstream

    _dispatch: ClassVar[dict[str, Callable[..., None]]] = {
        "R": _recompute_action,
        "B": _backward_action,
    }
