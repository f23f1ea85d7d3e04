"""Layers may draw from any generator: neither the cut nor the recompute may show."""

from __future__ import annotations

import random
import warnings
from array import array
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_gpipe.engine.randomness import _have_moved, seed_global
from lightning_gpipe.schedule.checkpoint import CHECKPOINT_MODES, Checkpoint
from tests.in_process import InProcess, check_cuts_and_modes, inputs

WIDTH = 4


class Noise(nn.Module):
    """Scales its output by a number that it draws."""

    def __init__(self, draw: Callable[[Noise], float], since: int = 0) -> None:
        super().__init__()
        self.draw, self.since, self.calls = draw, since, 0
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.generator = torch.Generator().manual_seed(5)
        self.held: dict[str, Any] = {"torch": torch.Generator().manual_seed(6)}
        self.deep = SimpleNamespace(rng=random.Random(10))
        self.listed = [random.Random(7), np.random.default_rng(8), np.random.RandomState(9)]

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.linear(x) * (1 + (self.draw(self) if self.calls > self.since else 0))


DRAWS: dict[str, Callable[[Noise], float]] = {
    "torch": lambda noise: float(torch.rand(())),
    "Python's": lambda noise: random.random(),
    "NumPy's": lambda noise: float(np.random.rand()),
    "an attribute": lambda noise: float(torch.rand((), generator=noise.generator)),
    "in a dict": lambda noise: float(torch.rand((), generator=noise.held["torch"])),
    "its own Random": lambda noise: noise.listed[0].random(),
    "its own NumPy generator": lambda noise: float(noise.listed[1].random()),
    "its own RandomState": lambda noise: float(noise.listed[2].random_sample()),
    "of an object": lambda noise: noise.deep.rng.random(),
}


def layers_of(draw: str, since: int = 0) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Noise(DRAWS[draw], since) for _ in range(4))).double()


@pytest.mark.parametrize("draw", DRAWS)
def test_random_numbers_of_layers_do_not_depend_on_cut_or_mode(draw: str) -> None:
    check_cuts_and_modes(layers_of(draw), inputs(4))


@pytest.mark.parametrize("draw", DRAWS)
def test_micro_batches_layers_and_steps_draw_different_numbers(draw: str) -> None:
    drawn: list[float] = []
    layers = layers_of(draw)

    def note(noise: Noise) -> float:
        drawn.append(DRAWS[draw](noise))
        return drawn[-1]

    for layer in layers:
        layer.draw = note  # type: ignore[assignment]
    pipeline = InProcess(layers, (2, 2), 4, "never")
    for step, value in enumerate(inputs(4)):
        pipeline.step(value, step)
    assert len(set(drawn)) == len(drawn) == 4 * 4 * 4


def seed_all() -> None:
    random.seed(3)
    np.random.seed(3)
    torch.manual_seed(3)


@pytest.mark.parametrize("draw", DRAWS)
def test_the_code_outside_sees_one_stream(draw: str) -> None:
    layers = layers_of(draw)
    seed_all()
    first = [DRAWS[draw](layers[0]) for _ in range(2)]  # type: ignore[arg-type]
    layers = layers_of(draw)
    pipeline = InProcess(layers, (2, 2), 4, "always")
    seed_all()
    second = [DRAWS[draw](layers[0])]  # type: ignore[arg-type]
    pipeline.step(inputs(4)[0])
    second.append(DRAWS[draw](layers[0]))  # type: ignore[arg-type]
    assert first == second


@pytest.mark.filterwarnings("ignore:.*has begun to draw")
@pytest.mark.parametrize("draw", ["Python's", "NumPy's"])
def test_the_code_outside_sees_one_stream_whoever_begins_to_draw(draw: str) -> None:
    layers = layers_of(draw, since=10 * 2)
    pipeline = InProcess(layers, (2, 2), 2, "never")
    first, second = [], []
    for step in range(20):
        seed_all()
        first.append(DRAWS[draw](layers[0]))  # type: ignore[arg-type]
        seed_all()
        pipeline.step(inputs(4)[0], step)
        second.append(DRAWS[draw](layers[0]))  # type: ignore[arg-type]
    assert first == second


def drawn_late(draw: str, mode: Checkpoint) -> list[float]:
    """What layers draw that begin to draw in the last step."""
    drawn = array("d")  # in a list a recompute leaves no trace

    def note(noise: Noise) -> float:
        drawn.append(DRAWS[draw](noise))
        return drawn[-1]

    layers = nn.Sequential(*(Noise(note) for _ in range(4))).double()
    pipeline = InProcess(layers, (2, 2), 1, mode)
    for step, value in enumerate(inputs(4)):
        for layer in layers:
            layer.since = 10**6 if step < 3 else 0  # type: ignore[assignment]
        pipeline.step(value, step)
    return list(drawn)


@pytest.mark.parametrize("draw", ["Python's", "NumPy's"])
def test_a_layer_that_begins_to_draw_late_recomputes_what_it_drew(draw: str) -> None:
    with pytest.warns(UserWarning, match=r"A layer from \d to \d of the backbone has"):
        forward = drawn_late(draw, "never")
    assert len(set(forward)) == len(forward) == 4
    with pytest.warns(UserWarning, match="has begun to draw") as told:
        assert drawn_late(draw, "always") == [*forward, *forward[2:], *forward[:2]]
    assert len(told) == 2, "one of each stage"


@pytest.mark.parametrize("draw", ["Python's", "NumPy's"])
def test_who_draws_from_the_first_step_on_does_not_hide_who_begins_late(draw: str) -> None:
    found = []
    for cut in (4,), (2, 2), (1, 1, 1, 1):
        drawn: list[float] = []

        def note(noise: Noise, drawn: list[float] = drawn) -> float:
            drawn.append(DRAWS[draw](noise))
            return drawn[-1]

        never, late = 10**6, 2 * 4  # steps of micro-batches
        layers = nn.Sequential(*(Noise(note, since) for since in (0, never, never, late))).double()
        pipeline = InProcess(layers, cut, 4, "never")
        steps = inputs(4)
        for step in range(2):
            pipeline.step(steps[step], step)
        with pytest.warns(UserWarning, match=r"(?<!\w)[Ll]ayer (3|from 2 to 3) of the backbone"):
            pipeline.step(steps[2], 2)
        pipeline.step(steps[3], 3)
        found.append(sorted(drawn[-8:]))
    assert found[0] == found[1] == found[2]
    assert len(set(found[0])) == 8


@pytest.mark.parametrize("draw", ["Python's", "NumPy's"])
@pytest.mark.parametrize(("cut", "told_in"), [((2, 2), 10), ((4,), 15)])
def test_who_begins_to_draw_is_told_of_within_eight_calls(
    draw: str, cut: tuple[int, ...], told_in: int
) -> None:
    layers = layers_of(draw, since=10 * 2)
    pipeline, told = InProcess(layers, cut, 2, "never"), []
    for step in range(30):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            pipeline.step(inputs(4)[0], step)
        told += [(step, str(one.message)) for one in found]
    assert {step for step, _ in told} == {told_in}
    assert all("has begun to draw from Python's or NumPy's" in text for _, text in told)
    if len(cut) == 1:
        assert "drew in the last 8 steps" in told[0][1]


@pytest.mark.parametrize("mode", CHECKPOINT_MODES)
@pytest.mark.parametrize("cut", [(4,), (2, 2)])
def test_nothing_moves_the_generators_of_code_outside(cut: tuple[int, ...], mode: str) -> None:
    layers = layers_of("torch")
    pipeline = InProcess(layers, cut, 2, mode)  # type: ignore[arg-type]
    seed_all()
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    for step in range(20):
        pipeline.step(inputs(4)[0], step)
    now = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    assert now == before


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "draw", [random.random, random.gauss, np.random.rand, np.random.randn, np.random.randint]
)
def test_it_is_noticed_that_a_layer_draws(draw: Callable[..., Any], count: int) -> None:
    arguments = [0.0, 1.0] if draw is random.gauss else [9] if draw is np.random.randint else []
    for seed in range(100):
        seed_global(seed)
        for _ in range(count):
            draw(*arguments)
        assert _have_moved(seed)
        seed_global(seed)
        assert not _have_moved(seed)
