"""A pipeline in one process: all stages on one rank, so that tests of layers cost little."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from lightning_gpipe.comm.messages import ObjectChannel
from lightning_gpipe.engine.context import ForwardContext
from lightning_gpipe.engine.executor import Executor, Links, Local
from lightning_gpipe.engine.rank_plan import RankPlan
from lightning_gpipe.engine.sides import BatchInput, BatchOutput
from lightning_gpipe.engine.stage import Stage
from lightning_gpipe.engine.stopwatch import Stopwatch
from lightning_gpipe.engine.trial import Trial
from lightning_gpipe.model.run_layer import run_layer
from lightning_gpipe.schedule.checkpoint import CHECKPOINT_MODES, Checkpoint
from lightning_gpipe.schedule.gpipe import fill_drain
from lightning_gpipe.schedule.placement import rounds
from lightning_gpipe.tensors.microbatch import Split
from lightning_gpipe.tensors.tree import Tree

HOST = torch.device("cpu")
ALONE = ObjectChannel("stage", 0, (0,), HOST, None)


class InProcess:
    """Layers cut into stages.

    Args:
        layers: The layers; trained where they are.
        cut: Number of layers of each stage.
        chunks: M.
        checkpoint: Which micro-batches are re-materialized.
    """

    def __init__(
        self, layers: nn.Sequential, cut: Sequence[int], chunks: int, checkpoint: Checkpoint
    ) -> None:
        bounds = [0, *accumulate(cut)]
        self.stages = {
            k: Stage({i: layers[i] for i in range(*ends)}, HOST, True, None, is_alone=len(cut) == 1)
            for k, ends in enumerate(pairwise(bounds))
        }
        count = len(self.stages)
        downs, ups = [Local() for _ in range(count - 1)], [Local() for _ in range(count - 1)]
        links = {
            k: Links(
                downs[k - 1] if k else None,
                downs[k] if k < count - 1 else None,
                ups[k] if k < count - 1 else None,
                ups[k - 1] if k else None,
            )
            for k in range(count)
        }
        self.executor = Executor(self.stages, links, Stopwatch(HOST), Trial(ALONE), in_order=False)
        self.chunks, self.checkpoint, self.calls = chunks, checkpoint, 0

    def step(self, value: Any, step: int = 0) -> tuple[Any, list[Tensor | None]]:
        """Run a call and the backward of the sum of squares of its floating-point outputs.

        Returns:
            The output, and the gradients of the input's tensors that want one.
        """
        batch = Tree.of(value, "The input")
        split = Split.plan(batch, self.chunks)
        placement = rounds(len(self.stages))
        programs = fill_drain(placement, len(split.sizes), self.checkpoint).programs
        source, target = BatchInput(batch, split, True), BatchOutput(split)
        context = ForwardContext.current((1, step), HOST, run_layer)
        whole = tuple(action for program in programs for action in program)
        running = self.executor.begin(RankPlan(whole), context, split.sizes, source, target)
        self.executor.run([a for a in whole if a.op == "F"], running)
        output, wanted = target.merge(batch)
        self.executor.end_forward(running)
        target.set_gradients(wanted, [2 * output.leaves[i] for i in wanted])
        backwards = (a for program in programs[::-1] for a in program if a.op != "F")
        self.executor.run(tuple(backwards), running)
        return output.value(), source.gradients()


def trained(
    layers: nn.Sequential,
    cut: Sequence[int],
    chunks: int,
    checkpoint: Checkpoint,
    inputs: Sequence[Any],
) -> dict[str, Tensor]:
    """Train a copy of layers for a step on each input; its parameters and buffers, and outputs."""
    layers = copy.deepcopy(layers)
    pipeline = InProcess(layers, cut, chunks, checkpoint)
    found: dict[str, Tensor] = {}
    for step, value in enumerate(inputs):
        output, _ = pipeline.step(value, step)
        for i, leaf in enumerate(Tree.of(output, "The output").tensors()):
            found[f"output {step} {i}"] = leaf.detach().clone()
        _descend(layers)
    pipeline.executor.close()
    found.update({name: t.detach().clone() for name, t in layers.state_dict().items()})
    return found


def as_written(layers: nn.Sequential, inputs: Sequence[Any]) -> dict[str, Tensor]:
    """The same without a pipeline."""
    layers = copy.deepcopy(layers)
    found: dict[str, Tensor] = {}
    for step, value in enumerate(inputs):
        tree = Tree.of(layers(value), "The output")
        loss = torch.zeros((), dtype=torch.float64)
        for i, leaf in enumerate(tree.tensors()):
            found[f"output {step} {i}"] = leaf.detach().clone()
            if leaf.requires_grad:
                loss = loss + leaf.square().sum()
        loss.backward()
        _descend(layers)
    found.update({name: t.detach().clone() for name, t in layers.state_dict().items()})
    return found


@torch.no_grad()
def _descend(layers: nn.Module) -> None:
    for parameter in layers.parameters():
        if parameter.grad is not None:
            parameter -= 0.01 * parameter.grad
            parameter.grad = None


def inputs(steps: int = 5, width: int = 4) -> list[Tensor]:
    """A mini-batch of eight samples for each step."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(8, width, generator=generator, dtype=torch.float64) for _ in range(steps)]


def among_others(make: Callable[[], nn.Module], width: int = 4) -> nn.Sequential:
    """Two such layers, a linear one behind each."""
    torch.manual_seed(0)
    layers = [make(), nn.Linear(width, width), make(), nn.Linear(width, width)]
    return nn.Sequential(*layers).double()


def check_cuts_and_modes(
    layers: nn.Sequential,
    inputs: Sequence[Any],
    modes: Sequence[Checkpoint] = CHECKPOINT_MODES,
) -> None:
    """Check that four layers end with the same bits however they are cut and re-materialized."""
    expected = None
    for cut, mode in itertools.product(((4,), (1, 3), (1, 1, 1, 1)), modes):
        found = trained(layers, cut, 4, mode, inputs)
        expected = expected or found
        assert expected.keys() == found.keys()
        different = [name for name in expected if not torch.equal(expected[name], found[name])]
        assert not different, (cut, mode, different)


def check_as_written(layers: nn.Sequential, inputs: Sequence[Any]) -> None:
    """Check that four layers end as without a pipeline, where there is one micro-batch."""
    expected = as_written(layers, inputs)
    for mode in CHECKPOINT_MODES:
        found = trained(layers, (1, 3), 1, mode, inputs)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
