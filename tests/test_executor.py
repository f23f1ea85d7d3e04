"""The executor runs any program, over as many stages as a rank holds."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from lightning_gpipe.comm.waiting import waiting
from lightning_gpipe.engine.context import ForwardContext
from lightning_gpipe.engine.executor import Executor, Links, Local
from lightning_gpipe.engine.rank_plan import RankPlan
from lightning_gpipe.engine.sides import BatchInput, BatchOutput
from lightning_gpipe.engine.stage import Stage
from lightning_gpipe.engine.stopwatch import ActionRecording, Stopwatch
from lightning_gpipe.engine.trial import Trial
from lightning_gpipe.model.run_layer import run_layer
from lightning_gpipe.schedule.actions import Action, Program, Schedule
from lightning_gpipe.schedule.checkpoint import Checkpoint
from lightning_gpipe.schedule.costs import Costs
from lightning_gpipe.schedule.gpipe import fill_drain
from lightning_gpipe.schedule.measured import Measured, durations
from lightning_gpipe.schedule.placement import rounds
from lightning_gpipe.schedule.search import search
from lightning_gpipe.schedule.simulate import simulate
from lightning_gpipe.tensors.microbatch import Split
from lightning_gpipe.tensors.tree import Tree
from tests.in_process import ALONE, InProcess
from tests.test_schedule import INTERLEAVED, random_case

HOST = torch.device("cpu")


def layer() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Dropout(0.5))


class EachByItself(BatchOutput):
    """The loss of every micro-batch by itself, so that its backward needs no other's forward."""

    def send(self, m: int, tree: Tree, requires_grad: Sequence[bool], training: bool) -> None:
        super().send(m, tree, requires_grad, training)
        self._flags.append(list(requires_grad))
        self._rows[m] = [2 * tree.leaves[0]]


def gradients_of(
    layers: nn.Sequential, x: Tensor, program: Program, micro_batches: int = 4
) -> list[Tensor]:
    """Gradients of the sum of squares, by a program of a stage per layer on one rank."""
    layers, last = copy.deepcopy(layers), len(layers) - 1
    stages = {i: Stage({i: layers[i]}, HOST, True, None) for i in range(last + 1)}
    downs, ups = [Local() for _ in range(last)], [Local() for _ in range(last)]
    links = {
        i: Links(
            downs[i - 1] if i > 0 else None,
            downs[i] if i < last else None,
            ups[i] if i < last else None,
            ups[i - 1] if i > 0 else None,
        )
        for i in range(last + 1)
    }
    executor = Executor(stages, links, Stopwatch(HOST), Trial(ALONE), in_order=False)
    batch = Tree.of(x, "The input")
    split = Split.plan(batch, micro_batches)
    source = BatchInput(batch, split, is_here=True)
    mini_batch = executor.begin(
        RankPlan(program),
        ForwardContext.current((1, 2), HOST, run_layer),
        split.sizes,
        source,
        EachByItself(split),
    )
    executor.run(program, mini_batch)
    assert mini_batch.is_released
    (gradient,) = source.gradients()
    assert gradient is not None
    return [gradient, *(p.grad for p in layers.parameters() if p.grad is not None)]


def in_one_program(checkpoint: bool) -> Program:
    """The interleaved programs of two ranks, in the order of time."""
    program: list[Action] = []
    for span in sorted(simulate(INTERLEAVED).spans, key=lambda span: span.end):
        if span.action.op == "B" and checkpoint:
            program.append(span.action._replace(op="R"))
        program.append(span.action)
    return tuple(program)


@pytest.mark.parametrize("checkpoint", [False, True])
def test_an_interleaved_program_gives_the_gradients_of_fill_and_drain(checkpoint: bool) -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(*(layer() for _ in range(4))).double()
    x = torch.randn(8, 3, dtype=torch.float64, requires_grad=True)
    state = torch.get_rng_state()
    programs = fill_drain(rounds(4), 4, "always").programs
    forwards = [action for program in programs for action in program if action.op == "F"]
    backwards = [action for program in programs[::-1] for action in program if action.op != "F"]
    expected = gradients_of(layers, x, (*forwards, *backwards))
    found = gradients_of(layers, x, in_one_program(checkpoint))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    assert len(found) == 9
    assert torch.equal(torch.get_rng_state(), state), "the code around sees one stream"


def split_up(program: Program) -> Program:
    """The same with every backward in two halves, the second ones at the end or as soon as not."""
    later, parts = [], []
    for action in program:
        if action.op != "B":
            parts.append(action)
            continue
        parts.append(action._replace(op="I"))
        later.append(action._replace(op="W"))
        if action.micro_batch % 2:
            parts += later
            later.clear()
    return (*parts, *later)


@pytest.mark.parametrize("checkpoint", [False, True])
def test_a_split_backward_gives_the_same_bits(checkpoint: bool) -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(*(layer() for _ in range(4))).double()
    x = torch.randn(8, 3, dtype=torch.float64, requires_grad=True)
    whole = in_one_program(checkpoint)
    expected, found = gradients_of(layers, x, whole), gradients_of(layers, x, split_up(whole))
    assert len(found) == 9
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def in_order(schedule: Schedule, costs: Costs) -> Program:
    """The programs of all ranks as one, in the order of time."""
    spans = simulate(schedule, costs).spans
    return tuple(span.action for span in sorted(spans, key=lambda span: span.end))


@pytest.mark.parametrize("number", range(0, 60, 10))
def test_fuzz_of_searched_programs(number: int) -> None:
    for case in map(random_case, range(number, number + 10)):
        placement, micro_batches, mode, costs, _ = case
        torch.manual_seed(number)
        layers = nn.Sequential(*(layer() for _ in placement)).double()
        x = torch.randn(2 * micro_batches, 3, dtype=torch.float64, requires_grad=True)
        plain = fill_drain(placement, micro_batches, mode, ascending=True)
        expected = gradients_of(layers, x, in_order(plain, costs), micro_batches)
        found = gradients_of(layers, x, in_order(search(*case), costs), micro_batches)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), case


def test_gradients_are_those_of_the_layers_called_as_written() -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(*(layer() for _ in range(4))).double().eval()
    x = torch.randn(8, 3, dtype=torch.float64, requires_grad=True)
    found = gradients_of(layers, x, in_one_program(checkpoint=True))
    layers(x).square().sum().backward()
    expected = [x.grad, *(p.grad for p in layers.parameters())]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def compute(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def test_an_action_takes_what_the_processor_does_for_it_and_no_waiting() -> None:
    watch = Stopwatch(HOST)
    recording = ActionRecording(watch)
    recording.resume()
    for m in range(3):
        watch.start()
        with waiting:
            time.sleep(0.2)  # for a message
        compute(0.02)
        watch.begin()
        compute(0.01)
        watch.end()
        watch.done(Action(0, "F", m))
    watch.start()
    watch.begin()  # and its layers fail
    watch.done(Action(0, "F", 3))
    recording.pause()
    watch.start()
    watch.begin()
    watch.end()
    watch.done(Action(0, "F", 4))
    measured = recording.take()
    assert [one.action.micro_batch for one in measured] == [0, 1, 2]
    assert 0.03 <= durations(measured)[0, "F"] < 0.2
    assert all(one.wait_s >= 0.19 for one in measured)


def test_code_that_runs_once_more_now_and_then_is_no_part_of_an_action() -> None:
    measured = []
    for m in range(4):
        action, outside_s = Action(0, "F", m), 5.0 if m == 0 else 0.3
        measured.append(Measured(action, 1, 0.0, 0.0, 0.1, 0.1, beside_s=0.02))
        for _ in range(2):
            end = outside_s / 2
            measured.append(Measured(action, 1, 0.0, 0.0, end, end, is_outside=True))
    assert durations(measured) == {(0, "F"): pytest.approx(0.42)}


@pytest.mark.parametrize(
    ("cut", "chunks", "checkpoint", "wants", "is_changed"),
    [
        ((2,), 1, "never", False, True),  # as without a pipeline
        ((2,), 1, "never", True, False),
        ((2,), 1, "always", False, False),
        ((2,), 2, "never", False, False),
        ((1, 1), 1, "never", False, False),
    ],
)
def test_layers_get_the_batch_itself_only_where_nothing_is_split(
    cut: tuple[int, ...], chunks: int, checkpoint: Checkpoint, wants: bool, is_changed: bool
) -> None:
    x = -torch.ones(4, 3, requires_grad=wants)
    layers = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(3, 3))
    output, gradients = InProcess(layers, cut, chunks, checkpoint).step(x)
    torch.testing.assert_close(output, layers(torch.zeros(4, 3)))
    torch.testing.assert_close(x.detach(), torch.zeros(4, 3) if is_changed else -torch.ones(4, 3))
    assert len(gradients) == wants
