"""Layers that compute the samples of their input together are told of, others aren't."""

from __future__ import annotations

import random
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_gpipe import GPipeStrategy
from lightning_gpipe.engine.mixing import _changed
from lightning_gpipe.tensors.tree import Tree
from tests import models
from tests.models import WIDTH
from tests.ranks import run_ranks
from tests.training import train, trainer


class Layer(nn.Module):
    """Stands between two others."""

    def forward(self, x: Any) -> Any:
        return x


class Softmax(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return x * x.softmax(0)


class Earlier(Layer):
    """Uses samples before each, as experts with a capacity do."""

    def forward(self, x: Tensor) -> Tensor:
        return x.cumsum(0)


class InTraining(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return x / x.std(0) if self.training else x


class InEvaluation(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return x if self.training else x / x.std(0)


class Attention(Layer):
    batch_first = False

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 1, batch_first=self.batch_first)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x, x, x)[0]
        return x


class BatchFirst(Attention):
    batch_first = True


class Dropout(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x, 0.5).relu_() + torch.rand_like(x)


class Draws(Layer):
    """Draws from Python's generator, and from one of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.own = torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        drawn = torch.rand(x.shape, generator=self.own, dtype=x.dtype, device="cpu")
        return x + drawn + random.random()


class Fresh(Layer):
    """Draws from a generator that it makes each time, so its recompute differs, too."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (1 + random.Random().random())


class Counts(Layer):
    """Keeps what its calls have been given."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.seen, self.attribute, self.number = list[Tensor](), torch.zeros(1), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.attribute += 1
        self.number += 1
        self.seen.append(x.detach())
        self.scale.data.mul_(0.9)
        return x * self.scale + self.calls + self.attribute + self.number + len(self.seen)


class Around(models.Module):
    kind: type[nn.Module] = Layer

    def build(self) -> None:
        layers = nn.Linear(WIDTH, WIDTH), self.kind(), nn.Linear(WIDTH, WIDTH)
        self.backbone = nn.Sequential(*layers)

    def given(self, x: Tensor) -> Any:
        """What the backbone is given of a batch ``[8, WIDTH]``."""
        return x

    def forward(self, x: Tensor) -> Tensor:
        out = self.backbone(self.given(x))
        return out.reshape(-1, *x.shape).mean(0)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.loss(*batch)

    def val_dataloader(self) -> Any:
        return self.train_dataloader()


class TimeFirst(Around):
    """Slices of time for samples."""

    def given(self, x: Tensor) -> Tensor:
        return torch.stack([x, x * 2, x * 3, x * 4])


class Sequences(Around):
    """Six steps for each sample."""

    def given(self, x: Tensor) -> Tensor:
        return x[:, None] * torch.arange(1, 7, device=x.device)[:, None]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.backbone(self.given(x))
        return out.mean(1)


class OverTime(Sequences):
    """As many steps as a micro-batch has samples, which a first layer relates to each other."""

    def build(self) -> None:
        self.backbone = nn.Sequential(BatchFirst(), Softmax(), nn.Linear(WIDTH, WIDTH))

    def given(self, x: Tensor) -> Tensor:
        return super().given(x)[:, :4]


class Swaps(Layer):
    """Has time first inside."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.LSTM(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.inside(x.transpose(0, 1))[0].transpose(0, 1).contiguous()


class Frames(Around):
    """Three rows for each sample."""

    def given(self, x: Tensor) -> Tensor:
        return x.repeat_interleave(3, 0)

    def forward(self, x: Tensor) -> Tensor:
        return self.backbone(self.given(x)).reshape(len(x), 3, -1).mean(1)


class Beside(Around):
    """Gives each layer another tensor, too."""

    layer: Any
    beside: Any

    def build(self) -> None:
        self.backbone = nn.Sequential(*(self.layer(WIDTH, WIDTH) for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        out, _ = self.backbone((x, self.beside().to(x.device)))
        return torch.as_tensor(out)


class Within(nn.Linear):
    """Gives each token the sum of its document."""

    def forward(self, given: Any) -> Any:
        x, numbers = given
        same = (numbers[:, None] == numbers).to(x.dtype)
        return super().forward(same @ x), numbers


class Packed(Beside):
    """Rows are tokens of documents, of which each has its number."""

    layer, numbers = Within, (0, 0, 0, 1, 1, 1, 1, 1)

    def beside(self) -> Tensor:
        return torch.tensor(self.numbers, device="cpu")


class Rows(Packed):
    """The same without."""

    numbers = (0, 1, 2, 3, 4, 5, 6, 7)


class Reads(nn.Linear):
    def forward(self, given: Any) -> Any:
        x, table = given
        return super().forward(x) + table.mean(0), table


class Tables(Beside):
    """A large table, of twice as many rows as there are samples."""

    layer = Reads

    def beside(self) -> Tensor:
        return torch.eye(16, WIDTH, dtype=torch.float64, device="cpu")


def told(module: type[models.Module], kind: type[nn.Module], **options: Any) -> list[str]:
    """What a run tells of layers that compute rows together."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        varied = type(module.__name__, (module,), {"kind": kind})("sgd")
        train(varied, max_steps=2, strategy=GPipeStrategy(**{"chunks": 2, **options}))
    texts = [str(each.message) for each in found]
    return [text[:30] for text in texts if "computes rows of its input together" in text]


@pytest.mark.parametrize("step", ["mini-batch", "micro-batch"])
@pytest.mark.parametrize(
    ("module", "kind"),
    [
        *((Around, kind) for kind in (Softmax, Earlier, InTraining, InEvaluation, Attention)),
        *((Sequences, Attention), (Frames, Softmax)),
    ],
)
def test_a_layer_that_computes_samples_together_is_told_of_once(
    module: type[models.Module], kind: type[nn.Module], step: str
) -> None:
    assert told(module, kind, step=step) == [f"Layer 1 ({kind.__name__}) of the backbone"[:30]]


def test_the_likeliest_dimension_tells_which_layer_it_is() -> None:
    assert told(OverTime, Layer, step="micro-batch") == ["Layer 1 (Softmax) of the backb"]


@pytest.mark.parametrize("chunks", [2, 4])
def test_time_first_is_told_of_where_the_input_is_cut(chunks: int) -> None:
    assert told(TimeFirst, Attention, chunks=chunks) == ["Layer 1 (Attention) of the bac"]
    assert told(TimeFirst, Attention, step="micro-batch", chunks=chunks) == []


def test_samples_one_by_one_are_told_of() -> None:
    assert len(told(Around, Softmax, chunks=8)) == 1
    assert len(told(Packed, Layer, chunks=8)) == 1
    assert told(Rows, Layer, chunks=8) == []


def test_packed_tokens_are_told_of() -> None:
    assert told(Packed, Layer) == ["Layer 0 (Within) of the backbo"]
    assert told(Rows, Layer) == []


@pytest.mark.parametrize("step", ["mini-batch", "micro-batch"])
@pytest.mark.parametrize(
    ("module", "kind"),
    [
        *((Around, kind) for kind in (Layer, Dropout, Draws, Counts)),
        *((Frames, Dropout), (Sequences, BatchFirst), (Sequences, Swaps), (Tables, Layer)),
    ],
)
def test_layers_that_take_each_sample_by_itself_are_not_told_of(
    module: type[models.Module], kind: type[nn.Module], step: str
) -> None:
    assert told(module, kind, step=step) == []


def test_layers_that_give_something_else_each_time_are_not_told_of() -> None:
    assert told(Around, Fresh, checkpoint="never") == []


def test_batch_norm_is_not_told_of() -> None:
    norm = type("Norm", (nn.BatchNorm1d,), {"__init__": lambda s: nn.BatchNorm1d.__init__(s, 6)})
    assert told(Around, norm) == []


def test_one_micro_batch_is_not_looked_at() -> None:
    assert told(Around, Softmax, chunks=1) == []


def test_a_look_leaves_no_trace() -> None:
    found = []
    for chunks in (2, 1):
        torch.manual_seed(5)
        module = type("Module", (Around,), {"kind": Counts})("sgd")
        calls = list[int]()
        module.backbone[1].register_forward_hook(lambda *a, calls=calls: calls.append(1))
        strategy = GPipeStrategy(chunks, checkpoint="never")
        train(module, max_steps=1, strategy=strategy, num_sanity_val_steps=0)
        layer = module.backbone[1]
        counts = [len(calls), len(layer.seen), layer.number]
        found.append((*counts, float(layer.attribute), float(layer.calls), len(layer._buffers)))
    assert found == [(2, 2, 2, 2.0, 2.0, 1), (1, 1, 1, 1.0, 1.0, 1)]


def _on_stages() -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        module = type("Module", (Around,), {"kind": Softmax})("sgd")
        train(module, devices=2, max_steps=1, strategy=GPipeStrategy(2, balance=[1, 2]))
    return [str(each.message)[:30] for each in found if "rows of its input" in str(each.message)]


def test_the_stage_that_has_the_layer_tells() -> None:
    assert run_ranks(_on_stages, 2) == [[], ["Layer 1 (Softmax) of the backb"]]


def test_a_run_without_training_is_looked_at() -> None:
    module = type("Module", (Around,), {"kind": Softmax})("sgd")
    with pytest.warns(UserWarning, match="computes rows of its input together"):
        trainer(strategy=GPipeStrategy(2)).validate(module)


def test_weights_that_a_loop_uses_are_not_taken_for_samples() -> None:
    """Though they are as long as the micro-batch in one dimension, and larger than its input."""
    hidden, weight = torch.randn(2, 3), torch.randn(1, 4, 4, 2)
    given = Tree.of((hidden, weight), "The input")
    (changed,) = _changed(given, 2, along_rows=False)
    assert changed.leaves[1] is weight
    assert torch.equal(changed.leaves[0], hidden[[1, 1]])
