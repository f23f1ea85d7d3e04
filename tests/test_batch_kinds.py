"""Batches of all kinds: steps change them, tensors in them share memory; as without a pipeline."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, UserDict
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

from lightning_gpipe import GPipeStrategy
from lightning_gpipe.comm import packing
from lightning_gpipe.strategy.batches import Places, split_batch
from lightning_gpipe.strategy.merging import merge
from lightning_gpipe.tensors.number_lists import NumberLists
from tests import models
from tests.models import WIDTH
from tests.ranks import run_ranks
from tests.training import trainer


class Kind(models.Module):
    """Batches are made of ``x`` and ``y``, and taken apart by the step."""

    def made(self, x: Tensor, y: Tensor) -> Any:
        return {"x": x, "y": y}

    def taken(self, batch: Any) -> tuple[Tensor, Tensor]:
        return batch["x"], batch["y"]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = self.taken(batch)
        return functional.mse_loss(self.backbone(x), y)

    def train_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(3)
        rows = [torch.randn(8, WIDTH, generator=generator).double() for _ in range(6)]
        each = [self.made(x, y) for x, y in zip(rows[::2], rows[1::2], strict=True)]
        return DataLoader(each, batch_size=None, collate_fn=lambda batch: batch)


class Replaces(Kind):
    """Replaces an entry of the batch."""

    def taken(self, batch: Any) -> tuple[Tensor, Tensor]:
        batch["x"] = batch["x"] * 2 + 1
        return batch["x"], batch["y"]


class Pops(Kind):
    """Takes entries out of the batch, and out of a list in it."""

    def made(self, x: Tensor, y: Tensor) -> Any:
        return {"x": [x], "y": y}

    def taken(self, batch: Any) -> tuple[Tensor, Tensor]:
        return batch["x"].pop(), batch.pop("y")


class ChangesRows(Kind):
    """Changes its rows in place, before the backbone gets them."""

    def taken(self, batch: Any) -> tuple[Tensor, Tensor]:
        return batch["x"].sub_(0.5).div_(2.0), batch["y"]


class Overlaps(Kind):
    """Targets are the input, one further; the loss uses both after one was changed."""

    def made(self, x: Tensor, y: Tensor) -> Any:
        both = torch.cat([x, y], 1)
        return {"x": both[:, :WIDTH], "y": both[:, 1 : WIDTH + 1]}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch["x"], batch["y"]
        out = self.backbone(x.clone())
        y[y < 0] = 0.0
        return functional.mse_loss(out * x.sign(), y)


@dataclass
class Pair:
    """A batch that works when it is made."""

    x: Tensor
    y: Tensor
    scale: Any = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.x = self.x / 2


class Dataclass(Kind):
    """A dataclass with a field that isn't given, and code that runs once."""

    def made(self, x: Tensor, y: Tensor) -> Any:
        pair = Pair(x, y)
        pair.scale = torch.arange(8.0)[:, None]
        return pair

    def taken(self, batch: Any) -> tuple[Tensor, Tensor]:
        return batch.x * batch.scale, batch.y


class Weights(Kind):
    """A NumPy array with a number per sample."""

    def made(self, x: Tensor, y: Tensor) -> Any:
        return UserDict(x=x, y=y, w=np.arange(8.0))

    def taken(self, batch: Any) -> tuple[Tensor, Tensor]:
        return batch["x"] * torch.from_numpy(batch["w"])[:, None], batch["y"]


class Named(Tensor):
    """A tensor with an attribute."""

    factor: float


class Subclass(Kind):
    """A tensor of a class of its own."""

    def made(self, x: Tensor, y: Tensor) -> Any:
        named = x.as_subclass(Named)
        named.factor = 3.0
        return {"x": named, "y": y}

    def taken(self, batch: Any) -> tuple[Tensor, Tensor]:
        return batch["x"].as_subclass(Tensor) * getattr(batch["x"], "factor", 0.0), batch["y"]


class Output(OrderedDict[str, Any]):
    """As the outputs of Hugging Face's models are."""

    def update(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("it can't be updated")


class Closed(Replaces):
    """A dict that refuses to be updated."""

    def made(self, x: Tensor, y: Tensor) -> Any:
        return Output(x=x, y=y)


KINDS = (Replaces, Pops, ChangesRows, Overlaps, Dataclass, Weights, Subclass, Closed)


def weights(
    kind: type[Kind], stages: int, step: Any = "mini-batch", chunks: int = 4
) -> dict[str, Tensor]:
    """What a module has learnt; with no stages, by a plain Trainer."""
    options: dict[str, Any] = {}
    if stages:
        options = {"devices": stages, "strategy": GPipeStrategy(chunks, step=step)}
    torch.manual_seed(0)
    module = kind().double()
    run = trainer(max_epochs=1, limit_val_batches=0, **options)
    run.fit(module)
    return {name: p.detach().clone() for name, p in module.named_parameters()}


@pytest.mark.parametrize("kind", KINDS)
def test_weights_equal_a_plain_trainers(kind: type[Kind]) -> None:
    expected = weights(kind, 0)
    for stages, step in (1, "micro-batch"), (2, "micro-batch"), (2, "mini-batch"):
        for found in run_ranks(weights, stages, kind, stages, step):
            torch.testing.assert_close(found, expected)


class Sparse(Kind):
    """A sparse batch."""

    def made(self, x: Tensor, y: Tensor) -> Any:
        return {"x": x.to_sparse(), "y": y}

    def taken(self, batch: Any) -> tuple[Tensor, Tensor]:
        return batch["x"].to_dense(), batch["y"]


def test_sparse_batches() -> None:
    expected = weights(Sparse, 0)
    for found in run_ranks(weights, 2, Sparse, 2):
        torch.testing.assert_close(found, expected)
    with pytest.raises(ValueError, match=r"layout torch\.sparse_coo, which step='micro-batch'"):
        weights(Sparse, 1, "micro-batch")


class Constant(Kind):
    """An array that is no samples', and as long as they are."""

    def made(self, x: Tensor, y: Tensor) -> Any:
        return {"x": x, "y": y, "w": np.arange(8.0)}


def test_an_array_that_is_the_same_in_each_batch_is_told_of() -> None:
    with pytest.warns(UserWarning, match=r"shape \(8,\) is the same in the first two batches"):
        weights(Constant, 1, "micro-batch")


class Graph(Kind):
    """Nodes are samples, with a row and a column for each."""

    def made(self, x: Tensor, y: Tensor) -> Any:
        return {"x": x, "y": y, "edges": torch.ones(len(x), len(x), dtype=x.dtype)}

    def taken(self, batch: Any) -> tuple[Tensor, Tensor]:
        return batch["edges"] @ batch["x"], batch["y"]


def test_a_step_that_needs_all_samples_at_a_time_says_so() -> None:
    with pytest.raises(RuntimeError, match="cannot be multiplied") as caught:
        weights(Graph, 1, "micro-batch")
    (note,) = caught.value.__notes__
    assert "came with the shape (2, 8), as 2 of its 8 rows. If it relates all samples" in note


@pytest.mark.parametrize(
    ("batch", "problem"),
    [
        ((torch.zeros(4, 2), (1, 2, 3, 4)), "The batch has a tuple of 4 numbers.*or a list"),
        ({"x": torch.zeros(4, 2), "n": [torch.tensor(1.0)] * 4}, "The batch has a list of 4"),
        (
            {"x": torch.zeros(4, 2), "boxes": [{"box": torch.zeros(2, 4)}] * 4},
            "an entry per sample",
        ),
        (
            {"x": torch.zeros(4, 2), "t": [torch.zeros(n, 4) for n in range(4)]},
            "an entry per sample",
        ),
        (([torch.zeros(7)] * 4, torch.zeros(4)), "an entry per sample"),
        ([(torch.zeros(3, 8, 8), {"box": torch.zeros(n, 4)}) for n in (3, 2)], "entry per sample"),
        ([(torch.zeros(3, 8, 8), {"label": torch.tensor(1)})] * 2, "an entry per sample"),
    ],
)
def test_lists_of_samples_are_refused(batch: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        split_batch(batch, 2)


@pytest.mark.parametrize(
    "beside",
    [
        {"mask": torch.zeros(4, 7), "scale": torch.tensor(2.0)},
        torch.zeros(10, 3),  # the same for all samples, such as positions
        torch.tensor(2.0),
    ],
)
def test_a_tuple_of_a_batch_may_hold_other_things_beside_it(beside: Any) -> None:
    parts, _ = split_batch({"inputs": (torch.arange(4), beside), "y": torch.arange(4)}, 2)
    for m, part in enumerate(parts):
        rows = slice(2 * m, 2 * m + 2)
        expected = dict(beside, mask=beside["mask"][rows]) if isinstance(beside, dict) else beside
        own = {"inputs": (torch.arange(4)[rows], expected), "y": torch.arange(4)[rows]}
        torch.testing.assert_close(part, own)


def test_other_lists_are_not() -> None:
    x, names = torch.arange(4), [{"path": str(n)} for n in range(4)]
    parts, _ = split_batch((x, names, torch.Size((1, 2, 3, 4)), (2, 2)), 2)
    assert [part[1:] for part in parts] == [
        (names[2 * m : 2 * m + 2], torch.Size((1, 2, 3, 4)), (2, 2)) for m in range(2)
    ]
    places = Places()
    for samples in 4, 2:  # of a size, the last batch may have as many
        parts, _ = split_batch((torch.zeros(samples), (8, 9)), 2, places)
        assert [part[1] for part in parts] == [(8, 9), (8, 9)]


def test_a_list_of_numbers_in_the_input() -> None:
    lists = NumberLists()
    for given, samples in (
        (torch.zeros(3), 3),
        ((torch.zeros(3), torch.Size((1, 2, 3)), {"a": [torch.zeros(3)] * 3}), 3),
        (([1, 2], {"size": (4, 4)}), 3),
        (([1, 2], {"size": (4, 4)}), 2),
    ):
        lists.check(given, samples)
    for given in [1, 2, 3], ("a", "b", "c"), {"n": [torch.zeros(1)] * 3}:
        with pytest.raises(ValueError, match=r"The backbone's input has a .* of 3 numbers"):
            lists.check((torch.zeros(3), given), 3)


class Lengths(nn.Module):
    """Looks at a list with a number for each sample."""

    def forward(self, values: tuple[Tensor, list[int]]) -> Tensor:
        return torch.stack([x * n for x, n in zip(*values, strict=False)])


def test_a_list_goes_into_no_backbone() -> None:
    module = models.Around()
    module.backbone.insert(0, Lengths())
    module.forward = lambda x: module.after(module.backbone((x, [1] * len(x))))  # type: ignore[method-assign]
    with pytest.raises(ValueError, match=r"has a list of .* numbers or strings"):
        trainer(devices=1, strategy=GPipeStrategy(3), max_epochs=1).fit(module)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_refused() -> None:
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    with pytest.raises(ValueError, match="has a nested tensor, which step='micro-batch' can't"):
        split_batch({"x": nested}, 2)


def sent(value: Any) -> Any:
    """A value as another process gets it."""
    blob, tensors = packing.pack(value, True, keeps_overlaps=True)
    waiting = [packing.strides.to_bytes(tensor).clone() for tensor in tensors]
    return packing.unpack(blob, lambda length, where: waiting.pop(0))


@pytest.mark.parametrize("count", [20, 20_000])
def test_tensors_in_common_memory_have_it_in_common_on_the_other_side(count: int) -> None:
    memory = torch.arange(4.0 * count)
    whole = {
        "all": memory[:count],
        "part": memory[3:count:2],
        "bits": memory[count - 2 : count + 5].view(torch.int32),
        "apart": memory[2 * count : 3 * count],
        "matrix": memory[2 * count : 3 * count].view(4, -1).T,
        "negative": torch.view_as_complex(torch.ones(3, 2)).conj(),
        "empty": memory[:0],
    }
    found = sent(whole)
    for name, tensor in whole.items():
        assert found[name].stride() == tensor.stride()
        torch.testing.assert_close(found[name], tensor)
    found["all"][3:] = -1.0
    found["matrix"].zero_()
    assert found["part"].eq(-1).all()
    assert found["bits"][:2].view(torch.float32).eq(-1).all()
    assert found["apart"].eq(0).all()
    assert found["bits"][2].view(torch.float32) == count


@dataclass
class Result:
    """What a step returns."""

    scores: Tensor
    loss: Tensor
    name: str = "result"


def test_dataclasses_are_merged_by_field() -> None:
    parts = [Result(torch.full((2, 3), float(i)), torch.tensor(float(i))) for i in range(2)]
    found = merge(parts, [2, 2], [2.0, 2.0], "The step's result")
    assert (found.name, float(found.loss), found.scores[:, 0].tolist()) == (
        "result",
        0.5,
        [0.0, 0.0, 1.0, 1.0],
    )
    assert dataclasses.astuple(parts[0])[1] == 0


class Counts(Kind):
    """Evaluates to a count."""

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        return (self.backbone(batch["x"]) > 0).sum()

    def on_validation_batch_end(self, outputs: Any, *_: Any) -> None:
        self.counted = [*getattr(self, "counted", ()), outputs.clone()]

    def val_dataloader(self) -> Any:
        return self.train_dataloader()


def test_counts_of_evaluations_are_added() -> None:
    found = []
    for options in {}, {"strategy": GPipeStrategy(4, step="micro-batch")}:
        torch.manual_seed(0)
        module = Counts().double()
        trainer(devices=1, **options).validate(module, verbose=False)
        found.append(module.counted)
    torch.testing.assert_close(*found)


class Holds(nn.Module):
    """Uses a weight of another layer, which it doesn't register."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.held = [layer]

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.held[0].weight)


class Unregistered(Kind):
    """The memory that layers take is found without touching weights that they don't register."""

    def build(self) -> None:
        first = nn.Linear(WIDTH, WIDTH)
        self.backbone = nn.Sequential(first, nn.Tanh(), Holds(first))


def test_a_weight_that_a_layer_does_not_register_keeps_its_gradient() -> None:
    torch.testing.assert_close(weights(Unregistered, 1, "micro-batch"), weights(Unregistered, 0))


class Expanded(Kind):
    """A tensor that overlaps itself can't be written, and needn't be."""

    def made(self, x: Tensor, y: Tensor) -> Any:
        return {"x": x[:, :1].expand(-1, WIDTH), "y": y}


def test_a_tensor_that_overlaps_itself() -> None:
    torch.testing.assert_close(weights(Expanded, 1, "micro-batch"), weights(Expanded, 0))


def test_another_loader_of_as_many_samples_as_a_pair_has_tensors() -> None:
    pairs = {"a": [torch.zeros(4, 2), torch.zeros(4)], "b": [torch.zeros(2, 2), torch.zeros(2)]}
    parts, sizes = split_batch(pairs, 2)
    assert list(sizes) == [2, 2]
    assert [len(t) for t in parts[0]["a"]] == [2, 2]
    assert [len(t) for t in parts[0]["b"]] == [2, 2]


class Squeezed(Kind):
    """Takes away all dimensions of 1, the batch's too where it is one."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        rows = self.backbone(batch["x"])[:, :1].squeeze()
        return functional.binary_cross_entropy_with_logits(rows, (batch["y"][:, 0] > 0).double())


def test_a_micro_batch_of_one_sample_that_is_squeezed() -> None:
    with pytest.raises(ValueError, match="Target size") as caught:
        weights(Squeezed, 1, "micro-batch", chunks=8)
    assert any("squeeze() without a dimension" in note for note in caught.value.__notes__)


class Normalized(Kind):
    """Needs two samples."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.norm = nn.BatchNorm1d(WIDTH).double()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        rows: Tensor = self.norm(self.backbone(batch["x"]))
        return rows.square().mean()


def test_a_micro_batch_of_one_sample_that_is_normalized() -> None:
    with pytest.raises(ValueError, match="per channel") as caught:
        weights(Normalized, 1, "micro-batch", chunks=8)
    (note,) = (note for note in caught.value.__notes__ if "this micro-batch has one sample" in note)
    assert note.endswith("use fewer chunks, or larger batches.")
