"""Splitting and merging."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from lightning_gpipe.model.run_layer import run_layer
from lightning_gpipe.plan.per_sample import PerSample
from lightning_gpipe.tensors.microbatch import Merge, Split
from lightning_gpipe.tensors.tree import Tree

Pair = namedtuple("Pair", "first second")


def tree(value: Any) -> Tree:
    return Tree.of(value, "The value")


@pytest.mark.parametrize(
    ("samples", "chunks", "sizes"),
    [(10, 4, (3, 3, 2, 2)), (2, 8, (1, 1)), (8, 4, (2, 2, 2, 2)), (5, 1, (5,)), (1, 3, (1,))],
)
def test_sizes(samples: int, chunks: int, sizes: tuple[int, ...]) -> None:
    x = torch.arange(samples)
    split = Split.plan(tree(x), chunks)
    assert split.sizes == sizes
    parts = [part.value() for part in split.scatter(tree(x))]
    assert torch.equal(torch.cat(parts), x)
    assert sizes == tuple(len(part) for part in torch.tensor_split(x, min(chunks, samples)))


def test_what_is_not_the_batch_goes_whole() -> None:
    x, mask = torch.randn(6, 2), torch.ones(4, 4)
    batch = tree({"x": x, "mask": mask, "none": None, "scale": 2.0, "zero": torch.tensor(0.0)})
    split = Split.plan(batch, 3)
    first, *_ = split.scatter(batch)
    value = first.value()
    assert torch.equal(value["x"], x[:2])
    assert value["mask"] is mask
    assert value["none"] is None
    assert value["scale"] == 2.0
    merged, merge = Merge.merge(split.scatter(batch), split, batch)
    assert torch.equal(merged.value()["x"], x)
    assert torch.equal(merged.value()["mask"], mask), "a whole tensor comes out whole"
    rows = merge.scatter_gradients(
        [torch.ones_like(t) if isinstance(t, torch.Tensor) else None for t in batch.leaves], 3
    )
    assert [row[batch.leaves.index(None)] for row in rows] == [None] * 3


@pytest.mark.parametrize(
    "value",
    [
        (torch.zeros(4), [torch.ones(4, 2), None]),
        {"a": torch.zeros(4), "b": (torch.ones(4), True)},
        OrderedDict(b=torch.zeros(4), a=torch.ones(4)),
        Pair(torch.zeros(4), "text"),
        torch.zeros(4, 1),
    ],
)
def test_structures_come_back(value: Any) -> None:
    batch = tree(value)
    split = Split.plan(batch, 3)
    merged, _ = Merge.merge(split.scatter(batch), split, batch)
    assert type(merged.value()) is type(value)
    assert merged.spec == batch.spec
    for ours, theirs in zip(merged.leaves, batch.leaves, strict=True):
        assert torch.equal(ours, theirs) if isinstance(theirs, torch.Tensor) else ours == theirs


def test_several_rows_per_sample_are_merged() -> None:
    batch = tree(torch.arange(10.0))
    split = Split.plan(batch, 4)
    parts = [tree(part.value().repeat_interleave(3)) for part in split.scatter(batch)]
    merged, merge = Merge.merge(parts, split, batch)
    assert torch.equal(merged.value(), torch.arange(10.0).repeat_interleave(3))
    rows = merge.scatter_gradients([torch.arange(30.0)], 4)
    assert [len(row[0]) for row in rows if row[0] is not None] == [9, 9, 6, 6]


def test_a_table_in_host_memory_beside_what_is_computed_elsewhere() -> None:
    """On the meta device, on which nothing can be compared."""
    table = torch.ones(3)
    batch = tree((torch.ones(4, 3, device="meta"), table))
    split = Split.plan(batch, 2)
    parts = [tree((part.value()[0] * 2, table)) for part in split.scatter(batch)]
    merged, _ = Merge.merge(parts, split, batch)
    hidden, same = merged.value()
    assert (hidden.device.type, hidden.shape) == ("meta", (4, 3))
    assert same is table


def test_equal_rows_are_not_mistaken_for_a_whole_tensor() -> None:
    batch = tree(torch.zeros(4))
    split = Split.plan(batch, 2)
    parts = [tree(torch.ones(2, dtype=torch.bool)) for _ in range(2)]
    merged, _ = Merge.merge(parts, split, batch)
    assert merged.value().shape == (4,)


class Returns(nn.Module):
    """Returns its input, and something else."""

    def __init__(self, extra: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.extra = extra

    def forward(self, x: torch.Tensor) -> Any:
        return x, self.extra(x)


def merged_with_outline(extra: Callable[[torch.Tensor], Any]) -> Any:
    layer, batch = Returns(extra), tree(torch.arange(16.0).view(8, 2))
    split = Split.plan(batch, 2)
    parts = [tree(layer(part.value())) for part in split.scatter(batch)]
    told = PerSample([layer], 2, nullcontext)
    outline = partial(told.outline, batch, run_layer, split)
    return Merge.merge(parts, split, batch, outline)[0].value()[1]


def test_a_constant_beside_the_batch_comes_out_once() -> None:
    for table in (torch.randn(8, 3), torch.randn(4, 3), torch.tensor(2.0)):
        assert torch.equal(merged_with_outline(lambda x, t=table: t), table)
        assert torch.equal(merged_with_outline(lambda x, t=table: (x, t.exp())[1]), table.exp())
    assert merged_with_outline(lambda x: 8) == 8
    assert merged_with_outline(lambda x: x.new_zeros(())) == 0


def test_rows_per_sample_are_merged_though_all_micro_batches_have_one_size() -> None:
    rows = merged_with_outline(lambda x: x.repeat_interleave(2, 0))
    assert torch.equal(rows, torch.arange(16.0).view(8, 2).repeat_interleave(2, 0))


@pytest.mark.parametrize(
    ("extra", "error"),
    [
        (lambda x: len(x), "a number that depends on the size of the micro-batch"),
        (lambda x: float(x.numel()), "a number that depends on the size of the micro-batch"),
        (lambda x: torch.tensor(len(x)), "without dimensions that is computed of a micro-batch"),
        (lambda x: x.new_tensor(float(len(x))) * 2, "without dimensions that is computed"),
        (lambda x: torch.ones_like(x).sum(), "without dimensions that is computed"),
        (lambda x: (x > -1).sum(), "without dimensions that is computed"),
        (lambda x: torch.empty(()).fill_(len(x)), "without dimensions that is computed"),
        (lambda x: torch.tensor(1.0 if x[0, 0] > -1 else 0.0), "isn't known whether"),
        (lambda x: 2.0 if x[0, 0] > -1 else 0.0, "isn't known whether"),
        (lambda x: torch.cat([x, x, x[:1], x[:1], x[:1], x[:1]]), "can't be merged along"),
        (lambda x: x.T @ x, "no batch dimension and differs"),
        (lambda x: x.new_zeros(8, 3) + x[0, 0], "no batch dimension and differs"),
    ],
)
def test_what_depends_on_the_micro_batch_as_a_whole_is_refused(
    extra: Callable[[torch.Tensor], Any], error: str
) -> None:
    with pytest.raises(ValueError, match=error):
        merged_with_outline(extra)


def test_micro_batches_of_other_shapes_are_refused_with_the_remedy() -> None:
    batch = tree(torch.zeros(4))
    split = Split.plan(batch, 2)
    with pytest.raises(ValueError, match=r"more than the number of samples: shapes \[\(2, 3\), "):
        Merge.merge([tree(torch.zeros(2, 3)), tree(torch.zeros(2, 4))], split, batch)


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (torch.tensor(1.0), "no tensor with a batch dimension"),
        ({"none": None}, "no tensor with a batch dimension"),
        (torch.zeros(0, 3), "0 samples"),
    ],
)
def test_batches_that_cannot_be_split(value: Any, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        Split.plan(tree(value), 2)


def test_outputs_that_cannot_be_merged() -> None:
    batch = tree(torch.zeros(4))
    split = Split.plan(batch, 2)
    with pytest.raises(ValueError, match="no batch dimension and differs"):
        Merge.merge([tree(torch.tensor(float(m))) for m in range(2)], split, batch)
    with pytest.raises(ValueError, match="different structures"):
        Merge.merge([tree(torch.zeros(2)), tree((torch.zeros(2),))], split, batch)


def test_leaves_of_unknown_types_are_refused() -> None:
    with pytest.raises(TypeError, match=r"The value holds a tests\.test_microbatch\.Odd"):
        tree([Odd()])


class Odd:
    """Might hold tensors that nobody sees."""
