"""Warnings of attributes that the next micro-batch's step reads."""

from __future__ import annotations

import warnings
from collections import deque
from typing import Any, ClassVar, TypeVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from lightning_gpipe import GPipeStrategy
from tests import models
from tests.ranks import run_ranks
from tests.training import trainer

SIZE = 6
STEPS = 0


class Mean:
    """A running mean."""

    def __init__(self) -> None:
        self.value = 0.0

    def update(self, value: Tensor) -> float:
        self.value = 0.9 * self.value + 0.1 * float(value)
        return self.value


class Memory(nn.Linear):
    """Adds what it gave before."""

    def __init__(self) -> None:
        super().__init__(models.WIDTH, models.WIDTH)
        self.before: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = super().forward(x)
        if self.before is not None:
            found = found + self.before
        self.before = found.detach()
        return found


class Shows(nn.Linear):
    """Keeps what it gave, for others to see."""

    def forward(self, x: Tensor) -> Tensor:
        self.shown: Tensor = super().forward(x)
        return self.shown


class Keeps(models.Module):
    """What all of them share."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        out = self(x)
        return functional.mse_loss(out, y) * self.factor(x, out)

    def factor(self, x: Tensor, out: Tensor) -> Any:
        raise NotImplementedError

    def train_dataloader(self) -> Any:
        rows = torch.randn(2, 24, models.WIDTH, dtype=torch.float64, device="cpu")
        return DataLoader(TensorDataset(*rows), batch_size=SIZE)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


Kind = TypeVar("Kind", bound=Keeps)


class State(Keeps):
    """Carries the backbone's output."""

    state: Tensor | None = None

    def factor(self, x: Tensor, out: Tensor) -> Any:
        before, self.state = self.state, out.detach()
        return 1 if before is None else before.mean()


class Bank(Keeps):
    """Changes a tensor in place."""

    def build(self) -> None:
        super().build()
        self.bank = torch.zeros(4, models.WIDTH, dtype=torch.float64)

    def factor(self, x: Tensor, out: Tensor) -> Any:
        factor = 1 + self.bank.mean()
        self.bank[:1] += x[:1].to(self.bank)
        return factor


class Deleted(Keeps):
    """Takes an attribute away, and sets it anew."""

    def factor(self, x: Tensor, out: Tensor) -> Any:
        before = self.last if hasattr(self, "last") else 1.0
        if before != 1.0:
            del self.last
        self.last = float(x.mean())
        return before


class InDict(Keeps):
    def build(self) -> None:
        super().build()
        self.kept = {"mean": 0.0}

    def factor(self, x: Tensor, out: Tensor) -> Any:
        self.kept["mean"] = 0.9 * self.kept["mean"] + float(x.mean())
        return 1 + self.kept["mean"]


class InQueue(Keeps):
    def build(self) -> None:
        super().build()
        self.queue: deque[float] = deque(maxlen=1)

    def factor(self, x: Tensor, out: Tensor) -> Any:
        self.queue.append(float(x.mean()))
        return self.queue[0]


class InLists(Keeps):
    def build(self) -> None:
        super().build()
        self.weights = {"loss": {"w": [1.0]}}

    def factor(self, x: Tensor, out: Tensor) -> Any:
        self.weights["loss"]["w"][0] *= 0.95
        return self.weights["loss"]["w"][0]


class FromHook(Keeps):
    """Adds to a tensor that a hook has made."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.total = torch.zeros((), dtype=torch.float64)

    def factor(self, x: Tensor, out: Tensor) -> Any:
        self.total += out.detach().mean()
        return 1 + self.total


class InObject(Keeps):
    def build(self) -> None:
        super().build()
        self.mean = Mean()

    def factor(self, x: Tensor, out: Tensor) -> Any:
        return self.mean.update(x.mean())


class InClass(Keeps):
    steps: ClassVar[int] = 0

    def factor(self, x: Tensor, out: Tensor) -> Any:
        type(self).steps += 1
        return 1 / self.steps


class InGlobals(Keeps):
    def factor(self, x: Tensor, out: Tensor) -> Any:
        global STEPS
        STEPS += 1
        return 1 / STEPS


class InModule(Keeps):
    def build(self) -> None:
        super().build()
        self.memory = Memory()

    def factor(self, x: Tensor, out: Tensor) -> Any:
        return self.memory(out).mean()


class InProperty(Keeps):
    """Has a property that stands before what is kept under its name."""

    @property
    def mean(self) -> float:
        return 0.5 * vars(self).get("mean", 0.0)

    @mean.setter
    def mean(self, value: float) -> None:
        vars(self)["mean"] = value

    def factor(self, x: Tensor, out: Tensor) -> Any:
        self.mean = self.mean + float(x.mean())
        assert self.mean == 0.5 * vars(self)["mean"]
        return 1 + self.mean


class InBoth(InModule):
    """Has a module of a class that is in the backbone, too."""

    def build(self) -> None:
        super().build()
        self.backbone.append(Memory())


class Harmless(Keeps):
    """Sets what it reads, reads what stays, and keeps for others what it doesn't read."""

    def build(self) -> None:
        super().build()
        self.positions: Tensor | None = None
        self.ones = torch.ones(3, device="cpu")
        self.all: list[Tensor] = []
        self.by_number: dict[int, float] = {}
        self.parts: dict[str, Tensor] = {}
        self.shows = nn.ModuleList(Shows(models.WIDTH, models.WIDTH) for _ in range(2))

    def factor(self, x: Tensor, out: Tensor) -> Any:
        self.out, self.samples, self.twos = out, len(x), torch.full((3,), 2.0, device="cpu")
        self.ones = self.ones / self.ones
        self.all.append(out.detach())
        self.by_number[len(self.by_number)] = float(x.mean())
        if self.positions is None or len(self.positions) != len(x):
            self.positions = torch.arange(len(x), device="cpu")
        for layer in self.shows:
            out = layer(out)
        shown = sum(layer.shown.mean() for layer in self.shows)
        self.parts["mean"], self.parts["shown"] = out.mean(), shown
        return self.out.mean() + sum(self.parts.values()) + self.samples * self.twos.sum()


class Compiled(Keeps):
    """Counts, and has a compiled function, and compiled layers."""

    def build(self) -> None:
        super().build()
        self.backbone[0] = torch.compile(self.backbone[0], backend=self.compiled)
        self.steps = 0
        self.times = 0
        self.twice = torch.compile(self.head, backend=self.compiled)

    def compiled(self, graph: Any, inputs: Any) -> Any:
        self.times += 1
        return graph.forward

    def head(self, x: Tensor) -> Tensor:
        return x * 2

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        self.steps += 1
        return functional.mse_loss(self.twice(self(x)), y)


def fitted(kind: type[Kind], stages: int, chunks: int) -> Kind:
    """A module after a run, of a plain Trainer if there are no stages."""
    options: dict[str, Any] = {"devices": 1}
    if stages:
        strategy = GPipeStrategy(chunks, stages=stages, step="micro-batch")
        options = {"devices": stages, "strategy": strategy}
    torch.manual_seed(5)
    module = kind()
    torch.manual_seed(6)
    trainer(max_epochs=2, **options).fit(module)
    return module


def told(kind: type[Keeps], stages: int, chunks: int = 3) -> list[str]:
    """What a run tells of attributes."""
    before = dict(vars(kind))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        fitted(kind, stages, chunks)
    now = dict(vars(kind))
    assert {**now, "steps": 0} == {**before, "steps": 0}
    texts = [str(each.message) for each in found]
    return [text for text in texts if "The step changes the" in text]


KEPT = [
    (State, "state"),
    (Bank, "bank"),
    (Deleted, "last"),
    (InDict, "kept['mean']"),
    (InQueue, "queue[0]"),
    (InLists, "weights['loss']['w'][0]"),
    (FromHook, "total"),
    (InObject, "mean.value"),
    (InClass, "InClass.steps"),
    (InGlobals, "STEPS"),
    (InModule, "memory.before"),
    (InProperty, "mean"),
]


@pytest.mark.parametrize(("kind", "name"), KEPT)
def test_what_the_next_step_reads_is_told(kind: type[Keeps], name: str) -> None:
    (text,) = told(kind, 1)
    assert f"The step changes the attribute '{name}'." in text


@pytest.mark.parametrize("kind", [State, InObject, InModule, Bank, FromHook])
def test_told_once_by_the_stages(kind: type[Keeps]) -> None:
    first, second = run_ranks(told, 2, kind, 2)
    assert [len(first), len(second)] == [1, 0]


@pytest.mark.parametrize("stages", [1, 2])
def test_nothing_is_told_of_others(stages: int) -> None:
    assert not any(run_ranks(told, stages, Harmless, stages))


@pytest.mark.parametrize("chunks", [1, 5])
def test_micro_batches_of_other_sizes_are_not_looked_at(chunks: int) -> None:
    assert told(Harmless, 1, chunks) == []


def test_classes_of_the_backbone_are_left_alone() -> None:
    assert told(InBoth, 1) == []


def compiled(stages: int) -> tuple[dict[str, Any], int, list[str]]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        module = fitted(Compiled, stages, 3)
    return module.state_dict(), module.times, [str(each.message) for each in found]


@pytest.mark.parametrize("stages", [1, 2])
def test_what_is_compiled_outside_the_backbone_runs_as_it_is_written(stages: int) -> None:
    expected, times, _ = compiled(0)
    assert times == 2
    for rank, (state, times, texts) in enumerate(run_ranks(compiled, stages, stages)):
        torch.testing.assert_close(state, expected)
        assert times > 0 or rank > 0, "the layer"
        assert not [text for text in texts if "Dynamo" in text]
        assert any("attribute 'steps'" in text for text in texts) == (rank == 0)


class Feeds(Keeps):
    """Gives the backbone what it gave before."""

    state: Tensor | None = None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        out = self(x if self.state is None else x + self.state)
        self.state = out.detach()
        return functional.mse_loss(out, y)


def weights(stages: int, chunks: int) -> dict[str, Any]:
    return fitted(Feeds, stages, chunks).state_dict()


def test_fed_back_by_whole_mini_batches() -> None:
    torch.testing.assert_close(run_ranks(weights, 2, 2, 1)[0], weights(0, 0))


def test_fed_back_by_micro_batches_is_refused() -> None:
    with pytest.raises(Exception, match="from what the backbone gave for another micro-batch"):
        run_ranks(weights, 2, 2, 3)


class AddsUp(Keeps):
    """Adds up in place what stages have, and uses the sums."""

    def build(self) -> None:
        super().build()
        self.stem = nn.Linear(models.WIDTH, models.WIDTH)
        self.total: Any = 0
        self.either: Any = 0
        self.other = torch.zeros(())
        self.average: Any = 0
        self.count = 0
        self.seen: list[list[float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        hidden = self.stem(x)
        loss = functional.mse_loss(self(hidden), y)
        self.total += loss.detach() * len(x)
        self.count += len(x)
        self.average = self.total / self.count
        some = hidden.mean() if batch_idx % 2 else loss  # of the first stage, or of the last
        self.either += some.detach() * len(x)
        if batch_idx < 2:
            self.other = self.other + some.detach() * len(x)
        else:
            self.other.add_(some.detach() * len(x))
        self.twice = 2 * self.other
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.seen.append([*map(float, (self.total, self.average, self.either))])
        self.seen[-1] += [*map(float, (self.other, self.twice))]


def sums(stages: int, chunks: int) -> list[list[float]]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The step changes the attribute")
        return fitted(AddsUp, stages, chunks).seen


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_what_is_added_up_in_place_is_the_same_on_all_stages(stages: int, chunks: int) -> None:
    expected = sums(0, 0)
    for found in run_ranks(sums, stages, stages, chunks):
        torch.testing.assert_close(found, expected)
