"""Layers may read buffers that they change: neither the cut nor the recompute may show."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils import spectral_norm as old_spectral_norm

from lightning_gpipe.schedule.checkpoint import CHECKPOINT_MODES
from lightning_gpipe.tensors import strides
from tests.in_process import (
    InProcess,
    among_others,
    check_as_written,
    check_cuts_and_modes,
    inputs,
    trained,
)

WIDTH = 4


class Codebook(nn.Module):
    """Adds the nearest of some vectors, which follow their inputs by a moving average."""

    def __init__(self, how: str, since: int = 0) -> None:
        super().__init__()
        self.how, self.since = how, since
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("codes", torch.randn(5, WIDTH))
        self.register_buffer("uses", torch.zeros(100, dtype=torch.long))
        self.register_buffer("mask", torch.ones(8, 1).expand(8, 8).tril())
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        with torch.no_grad():
            nearest = torch.cdist(h, self.codes).argmin(1)
            self.calls += 1
        # a scale that depends on buffers, small and large, of integers too
        out = (
            h * self.codes[nearest] * (1 + self.uses.sum().to(h.dtype) / 100) * self.mask[7].mean()
        )
        if int(self.calls) > self.since:
            self.move(h.detach().mean(0), nearest)
        return out

    @torch.no_grad()
    def move(self, mean: Tensor, nearest: Tensor) -> None:
        moved = self.codes.lerp(mean.expand_as(self.codes), 0.3)
        uses = self.uses + nearest.bincount(minlength=100)
        if self.how == "replaced":
            self.codes, self.uses = moved, uses
        elif self.how == "in place":
            self.codes.copy_(moved)
            self.uses.copy_(uses)
        else:
            self.codes.data.copy_(moved)
            self.uses.data.copy_(uses)


class Observer(nn.Module):
    """Tells of no change, and changes one of its buffers in later steps alone, as in QAT."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("shift", torch.zeros(()))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        if self.training:
            self.scale.data.mul_(0.9).add_(0.1 * x.detach().std())
        if self.training and self.calls > 13:
            self.shift.data.add_(0.1 * x.detach().mean())
        return x * self.scale + self.shift


class Late(nn.Module):
    """Makes a table when it is first called, and reads it."""

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "table"):
            self.register_buffer("table", 2 * x.detach()[0], persistent=False)
        return x * self.table


def spectral(wrap: Callable[[nn.Module], nn.Module]) -> nn.Module:
    return nn.Sequential(wrap(nn.Linear(WIDTH, WIDTH)), nn.Tanh())


KINDS: dict[str, Callable[[], nn.Module]] = {
    "replaced": lambda: Codebook("replaced"),
    "in place": lambda: Codebook("in place"),
    "through .data": lambda: Codebook("data"),
    "in place, later": lambda: Codebook("in place", since=7),
    "replaced, later": lambda: Codebook("replaced", since=7),
    "in eval": lambda: Codebook("in place").eval(),
    "spectral norm": lambda: spectral(parametrizations.spectral_norm),
    "the old spectral norm": lambda: spectral(old_spectral_norm),
    "another in later steps": Observer,
    "made in the forward": Late,
}


#: A backward through what was changed in place after it was saved.
REFUSED_BY_PYTORCH = ("in place", "in place, later", "in eval")


@pytest.mark.filterwarnings("ignore:.*spectral_norm:FutureWarning")
@pytest.mark.filterwarnings("ignore:Layer . .Observer. .* computes rows of its input together")
@pytest.mark.parametrize("kind", KINDS)
def test_buffers_that_layers_change_do_not_depend_on_cut_or_mode(kind: str) -> None:
    # PyTorch itself refuses what a kept graph has saved and is changed later
    modes = ("always",) if kind == "in place, later" else CHECKPOINT_MODES
    check_cuts_and_modes(among_others(KINDS[kind]), inputs(), modes)


@pytest.mark.filterwarnings("ignore:.*spectral_norm:FutureWarning")
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in REFUSED_BY_PYTORCH])
def test_buffers_that_layers_change_are_a_plain_modules(kind: str) -> None:
    check_as_written(among_others(KINDS[kind]), inputs())


def test_a_buffer_that_starts_to_change_without_a_trace_is_refused() -> None:
    layers = nn.Sequential(Codebook("data", since=13), nn.Linear(WIDTH, WIDTH)).double()
    with pytest.raises(RuntimeError, match="'codes' of Codebook was changed without a trace"):
        trained(layers, (2,), 4, "always", inputs())


def test_constants_are_copied_once_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """A causal mask may be large: it must not be copied for every micro-batch."""
    layers = nn.Sequential(Codebook("in place"), nn.Linear(WIDTH, WIDTH)).double()
    pipeline = InProcess(layers, (2,), 4, "always")
    copied: list[torch.Size] = []
    original = strides.copy

    def copy(tensor: Tensor) -> Tensor:
        copied.append(tensor.shape)
        return original(tensor)

    for step, value in enumerate(inputs()[:3]):
        copied.clear()
        monkeypatch.setattr(strides, "copy", copy)
        pipeline.step(value, step)
        monkeypatch.undo()
    assert copied.count(torch.Size([8, 8])) == 1
    assert copied.count(torch.Size([5, WIDTH])) == 5
