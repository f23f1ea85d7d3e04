"""Layers may share objects, containers and globals; on several stages each has its own copy.

What an early layer left there a later one didn't find, and went on with what it had before: the
weights were silently others.
"""

from __future__ import annotations

import argparse
from types import SimpleNamespace
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_gpipe import GPipeStrategy
from lightning_gpipe.model.layer_state import shared_places
from lightning_gpipe.model.places import has_changed
from tests import models
from tests.models import WIDTH
from tests.ranks import RankError, run_ranks
from tests.training import train, trainer

LAYERS = 4
kept: dict[str, Any] = {}
tables: dict[int, Tensor] = {}
skip: Tensor | None = None


class Context:
    """What layers share."""

    def __init__(self) -> None:
        self.skip: Tensor | None = None
        self.table: Tensor | None = None
        self.settings = {"scale": 0.5}
        self.counted = 0

    def count(self, up: bool) -> int:
        self.counted += up
        return self.counted


class Part(nn.Module):
    """A layer that shares something.

    Args:
        index: Its place.
        shared: What it shares with the others.
    """

    def __init__(self, index: int, shared: Any) -> None:
        super().__init__()
        self.linear, self.index, self.shared = nn.Linear(WIDTH, WIDTH), index, shared

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == LAYERS - 1

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class ByAttribute(Part):
    def forward(self, x: Tensor) -> Tensor:
        if self.is_first:
            self.shared.skip = x
        out = super().forward(x)
        return out if not self.is_last or self.shared.skip is None else out + self.shared.skip


class ByItem(Part):
    def forward(self, x: Tensor) -> Tensor:
        if self.is_first:
            self.shared.settings["skip"] = x
        out = super().forward(x)
        return out + self.shared.settings.get("skip", 0) if self.is_last else out


class Popped(ByItem):
    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out + self.shared.settings.pop("skip") if self.is_last else out


class InPlace(Part):
    """Changes a tensor, which the others read."""

    def __init__(self, index: int, shared: Any) -> None:
        super().__init__(index, shared)
        if not hasattr(shared, "scale"):
            shared.scale = torch.ones(())
        self.scale = shared.scale

    def forward(self, x: Tensor) -> Tensor:
        if self.is_first:
            self.scale.mul_(0.5)
        return super().forward(x) * self.scale.item()


class ByGlobal(Part):
    def forward(self, x: Tensor) -> Tensor:
        if self.is_first:
            kept["skip"] = x
        out = super().forward(x)
        return out + kept.get("skip", 0) if self.is_last else out


class SetsGlobal(Part):
    def forward(self, x: Tensor) -> Tensor:
        global skip
        if self.is_first:
            skip = x
        out = super().forward(x)
        return out + skip if self.is_last and skip is not None else out


class ByClass(Part):
    of_all: dict[str, Tensor] = {}  # noqa: RUF012

    def forward(self, x: Tensor) -> Tensor:
        if self.is_first:
            self.of_all["skip"] = x
        out = super().forward(x)
        return out + self.of_all.get("skip", 0) if self.is_last else out


class SetsClass(Part):
    left: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.is_first:
            SetsClass.left = x
        out = super().forward(x)
        return out + self.left if self.is_last and self.left is not None else out


class Namespace:
    skip: Tensor | None = None


class ByNamespace(Part):
    """A class keeps it."""

    def forward(self, x: Tensor) -> Tensor:
        if self.is_first:
            Namespace.skip = x
        out = super().forward(x)
        return out + Namespace.skip if self.is_last and Namespace.skip is not None else out


class Slotted:
    __slots__ = ("skip",)

    def __init__(self) -> None:
        self.skip: Tensor | None = None


class BySlot(Part):
    def __init__(self, index: int, shared: Any) -> None:
        super().__init__(index, shared)
        if not hasattr(shared, "slotted"):
            shared.slotted = Slotted()
        self.shared = shared.slotted

    def forward(self, x: Tensor) -> Tensor:
        if self.is_first:
            self.shared.skip = x
        out = super().forward(x)
        return out + self.shared.skip if self.is_last and self.shared.skip is not None else out


class ByArray(Part):
    def __init__(self, index: int, shared: Any) -> None:
        super().__init__(index, shared)
        if not hasattr(shared, "array"):
            shared.array = np.ones(1)
        self.array = shared.array

    def forward(self, x: Tensor) -> Tensor:
        if self.is_first:
            self.array += 1
        return super().forward(x) * float(self.array[0])


class ByHiddenModule(Part):
    """A module that is registered nowhere keeps it."""

    def __init__(self, index: int, shared: Any) -> None:
        super().__init__(index, shared)
        if not hasattr(shared, "hidden"):
            shared.hidden = nn.Module()
            shared.hidden.skip = None
        self.hidden = [shared.hidden]

    def forward(self, x: Tensor) -> Tensor:
        if self.is_first:
            self.hidden[0].skip = x  # type: ignore[assignment]
        out = super().forward(x)
        return (
            out + self.hidden[0].skip if self.is_last and self.hidden[0].skip is not None else out
        )


class BySlope(Part):
    """All use one activation of PyTorch's, which the first layer changes."""

    def __init__(self, index: int, shared: Any) -> None:
        super().__init__(index, shared)
        if not hasattr(shared, "relu"):
            shared.relu = nn.LeakyReLU()
        self.relu = shared.relu

    def forward(self, x: Tensor) -> Tensor:
        if self.is_first:
            self.relu.negative_slope += 0.1
        return self.relu(self.linear(x))  # type: ignore[no-any-return]


class Reaches(Part):
    """Reaches an object through a bound method."""

    def __init__(self, index: int, shared: Any) -> None:
        super().__init__(index, shared)
        self.counts, self.shared = shared.count, None

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.counts(self.is_first)


class ByProperty(Part):
    """Names a global in a property."""

    @property
    def skipped(self) -> Any:
        return kept.get("skip", 0)

    @skipped.setter
    def skipped(self, value: Any) -> None:
        kept["skip"] = value

    def forward(self, x: Tensor) -> Tensor:
        if self.is_first:
            self.skipped = x
        out = super().forward(x)
        return out + self.skipped if self.is_last else out


class FarEntry(Part):
    """An entry far behind in a list."""

    def __init__(self, index: int, shared: Any) -> None:
        super().__init__(index, shared)
        if not hasattr(shared, "long"):
            shared.long = [0] * 300
        self.long = shared.long

    def forward(self, x: Tensor) -> Tensor:
        if self.is_first:
            self.long[200] += 1
        return super().forward(x) * (1 + self.long[200])


class ByModule(Part):
    """A module of its own, without weights, keeps it."""

    def __init__(self, index: int, shared: Any) -> None:
        super().__init__(index, shared)
        if not hasattr(shared, "keeper"):
            shared.keeper = self._Keeper()
        self.keeper = shared.keeper

    class _Keeper(nn.Module):
        skip: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.is_first:
            self.keeper.skip = x
        out = super().forward(x)
        return out + self.keeper.skip if self.is_last and self.keeper.skip is not None else out


class Table(Part):
    """Each stage makes it when it needs it."""

    def forward(self, x: Tensor) -> Tensor:
        if self.shared.table is None:
            self.shared.table = torch.linspace(0, 1, WIDTH, dtype=x.dtype)
        return super().forward(x) + self.shared.table


def table(width: int) -> Tensor:
    if width not in tables:
        tables[width] = torch.linspace(0, 1, width, dtype=torch.float64)
    return tables[width]


class GlobalTable(Part):
    """Reads a table of a global cache."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + table(WIDTH).to(x.dtype)


class ClassTable(Part):
    """Keeps a table with the class, and a flag."""

    made: Tensor | None = None
    is_warned = False

    def forward(self, x: Tensor) -> Tensor:
        if ClassTable.made is None:
            ClassTable.made = torch.linspace(0, 1, WIDTH, dtype=x.dtype)
        if not ClassTable.is_warned:
            ClassTable.is_warned = True
        return super().forward(x) + ClassTable.made


def closure_table(shared: Any) -> list[nn.Module]:
    """Layers of which functions keep a table in an outer variable."""
    made: dict[int, Tensor] = {}

    class Cached(Part):
        def forward(self, x: Tensor) -> Tensor:
            if WIDTH not in made:
                made[WIDTH] = torch.linspace(0, 1, WIDTH, dtype=x.dtype)
            return super().forward(x) + made[WIDTH]

    return [Cached(index, shared) for index in range(LAYERS)]


class Counts(Part):
    """All stages count, and nobody reads it."""

    def forward(self, x: Tensor) -> Tensor:
        self.shared.calls = getattr(self.shared, "calls", 0) + 1
        return super().forward(x)


class OnOneStage(Part):
    """The second layer reads what the first one has left."""

    def forward(self, x: Tensor) -> Tensor:
        if self.is_first:
            self.shared.skip = x
        out = super().forward(x)
        if self.index == 1:
            out, self.shared.skip = out + self.shared.skip, None
        return out


class Reads(Part):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.shared.settings["scale"]


def function_layers(shared: Any) -> list[nn.Module]:
    """Layers of which functions have an outer variable in common."""
    left: Tensor | None = None

    class Writes(Part):
        def forward(self, x: Tensor) -> Tensor:
            nonlocal left
            left = x
            return super().forward(x)

    class Adds(Part):
        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            return out if left is None else out + left

    return [Writes(0, None), Part(1, None), Part(2, None), Adds(3, None)]


REFUSED = [
    *(
        ByAttribute,
        ByItem,
        InPlace,
        ByGlobal,
        SetsGlobal,
        ByClass,
        SetsClass,
        ByModule,
        ByNamespace,
    ),
    *(BySlot, ByArray, ByHiddenModule, BySlope, Reaches, ByProperty, FarEntry),
]
HARMLESS = [Table, GlobalTable, ClassTable, closure_table, Counts, OnOneStage, Reads]


def layers_of(kind: Any) -> list[nn.Module]:
    shared = Context()
    if kind in (function_layers, closure_table):
        found: list[nn.Module] = kind(shared)
        return found
    return [kind(index, shared) for index in range(LAYERS)]


class Sharing(models.Module):
    kind: Any = None

    def build(self) -> None:
        self.backbone = nn.Sequential(*layers_of(self.kind))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.loss(*batch)


class Mixing(Part):
    """Mixes by a share that the step sets."""

    share = 0.0

    def forward(self, x: Tensor) -> Tensor:
        return (1 - self.share) * x + self.share * super().forward(x)


class SetsShare(Sharing):
    """Sets it for each micro-batch, or for each mini-batch, in the step or in a hook before."""

    kind = Mixing
    how = ""

    def set(self, share: float) -> None:
        for layer in self.backbone:
            layer.share = share  # type: ignore[assignment]

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.how == "hook":
            self.set(1 / (2 + self.global_step))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.how == "micro-batch":
            self.set(float(batch[0].mean()))
        elif self.how == "mini-batch":
            self.set(1 / (2 + self.global_step))
        return super().training_step(batch, batch_idx)


def set_share(stages: int, virtual_stages: int, how: str) -> Any:
    torch.manual_seed(0)
    module = SetsShare()
    module.how = how
    options: Any = {"step": "micro-batch", "virtual_stages": virtual_stages}
    strategy = GPipeStrategy(4, balance="params", **options)
    return train(module, max_steps=3, devices=stages, strategy=strategy)


@pytest.mark.parametrize(
    ("virtual_stages", "how"), [(1, "micro-batch"), (1, "mini-batch"), (2, "hook")]
)
def test_what_the_step_sets_in_layers(virtual_stages: int, how: str) -> None:
    found = run_ranks(set_share, 2, 2, virtual_stages, how)[0]
    expected = run_ranks(set_share, 1, 1, 1, how)[0]
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("how", ["micro-batch", "mini-batch"])
def test_what_virtual_stages_would_read_too_early_or_too_late_is_refused(how: str) -> None:
    with pytest.raises(RankError, match=r"The step sets Mixing .* layer . .* virtual_stages=1"):
        run_ranks(set_share, 2, 2, 2, how, timeout_s=30)


def sharing(kind: Any) -> L.LightningModule:
    return type("Own", (Sharing,), {"kind": staticmethod(kind)})()


def run(kind: Any, step: str, cut: list[int], validates: bool = False) -> Any:
    torch.manual_seed(0)
    strategy = GPipeStrategy(2 if step == "mini-batch" else 1, balance=cut, step=step)  # type: ignore[arg-type]
    if validates:
        module = sharing(kind)
        data = module.train_dataloader()
        trainer(devices=len(cut), strategy=strategy).validate(module, data, verbose=False)
        return None
    return train(sharing(kind), max_steps=3, devices=len(cut), strategy=strategy)


@pytest.mark.parametrize("step", ["mini-batch", "micro-batch"])
@pytest.mark.parametrize("kind", [*REFUSED, function_layers])
def test_what_another_stage_does_not_see_is_refused(kind: Any, step: str) -> None:
    with pytest.raises(RankError, match="different stages, which don't see it"):
        run_ranks(run, 2, kind, step, [2, 2], timeout_s=30)


def test_in_a_validation_too() -> None:
    with pytest.raises(RankError, match=r"Layers 0 .ByAttribute. and 3 .* share shared .of type"):
        run_ranks(run, 2, ByAttribute, "mini-batch", [2, 2], True, timeout_s=30)


def test_an_error_of_a_layer_names_what_it_may_have_missed() -> None:
    with pytest.raises(RankError, match=r"Layers of this stage share .*shared.* with layers of"):
        run_ranks(run, 2, Popped, "mini-batch", [2, 2], timeout_s=30)


@pytest.mark.parametrize("step", ["mini-batch", "micro-batch"])
@pytest.mark.parametrize("kind", HARMLESS)
def test_what_does_no_harm_trains_as_on_one_stage(kind: Any, step: str) -> None:
    expected, found = (run_ranks(run, len(cut), kind, step, cut)[0] for cut in ([4], [2, 2]))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def run_virtual(kind: Any, stages: int, virtual_stages: int) -> Any:
    torch.manual_seed(0)
    options: Any = {"step": "micro-batch", "virtual_stages": virtual_stages}
    strategy = GPipeStrategy(2, balance="params", **options)
    return train(sharing(kind), max_steps=3, devices=stages, strategy=strategy)


@pytest.mark.parametrize("kind", [Table, GlobalTable, ClassTable, closure_table])
def test_a_table_that_a_rank_makes_serves_all_its_virtual_stages(kind: Any) -> None:
    expected = run_ranks(run_virtual, 1, kind, 1, 1)[0]
    found = run_ranks(run_virtual, 2, kind, 2, 2)[0]
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", [*REFUSED, *HARMLESS, function_layers])
def test_the_places_are_found(kind: Any) -> None:
    """Those that layers of several stages have, of whatever kind; one that changes is noticed."""
    layers = layers_of(kind)
    places = shared_places(layers, [0, 0, 1, 1])
    before = [place.contents() for place in places.values()]
    nn.Sequential(*layers)(torch.randn(2, WIDTH))
    pairs = zip(places.values(), before, strict=True)
    changed = [place for place, old in pairs if has_changed(old, place.contents())]
    assert bool(changed) == (kind not in (Reads, OnOneStage)), [*places]
    assert all(set(place.layers) & {0, 1} and set(place.layers) & {2, 3} for place in changed)


def test_nothing_is_found_where_nothing_is_shared() -> None:
    layers = [Part(i, Context()) for i in range(LAYERS)]
    names = {place.name for place in shared_places(layers, range(LAYERS)).values()}
    assert not names & {"shared", "linear"}, names


@pytest.mark.parametrize(
    "value",
    [{"a": 1}, [1], {1}, SimpleNamespace(a=1), argparse.Namespace(a=1), Context(), torch.ones(2)],
    ids=lambda value: type(value).__name__,
)
def test_kinds_of_values(value: Any) -> None:
    places = shared_places([Part(0, value), Part(1, value)], [0, 1]).values()
    place = next(place for place in places if place.name == "shared")
    assert place.layers == [0, 1]
    before = place.contents()
    assert not has_changed(before, place.contents())
    match value:
        case dict():
            value["b"] = 2
        case list():
            value[0] = 2
        case set():
            value.add(2)
        case Tensor():
            value.add_(1)
        case _:
            value.a = 2
    assert has_changed(before, place.contents())
