"""What stages log with different values, and what layers have kept of a micro-batch."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchmetrics import SumMetric

from lightning_gpipe import GPipeStrategy
from lightning_gpipe.engine.kept import KeptValues
from lightning_gpipe.model.places import FEW
from tests.models import WIDTH, Around
from tests.ranks import run_ranks
from tests.training import trainer


class Logs(Around):
    """Logs what is the same everywhere, and times."""

    def build(self) -> None:
        super().build()
        self.kept = torch.zeros(())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        hidden = self.backbone(self.before(x))
        self.hook(hidden)
        loss = nn.functional.mse_loss(self.after(hidden), y)
        self.log("loss", loss)
        self.log("nothing", loss * torch.nan)
        self.log("seconds", time.perf_counter())
        return loss

    def hook(self, hidden: Tensor) -> None:
        pass

    def on_after_backward(self) -> None:
        self.log("kept", self.kept)


class Kept(Logs):
    """Keeps the norm of a gradient."""

    def hook(self, hidden: Tensor) -> None:
        hidden.register_hook(self.keep)

    def keep(self, gradient: Tensor) -> None:
        self.kept = gradient.norm()


class KeptByHead(Kept):
    """The same, by a module's hook."""

    def build(self) -> None:
        super().build()
        self.after.register_full_backward_hook(lambda _, __, given: self.keep(given[0]))

    def hook(self, hidden: Tensor) -> None:
        pass


class Balanced(nn.Linear):
    """Keeps how evenly its output is spread, which several micro-batches don't average to."""

    def __init__(self, keep: Callable[[Tensor], Any]) -> None:
        super().__init__(WIDTH, WIDTH)
        self.keep, self.balance, self.share = keep, 0.0, 0.25

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.balance = self.keep(y.softmax(-1).mean(0).square().sum())
        return y


class LogsKept(Around):
    """Logs what a layer keeps."""

    keep = staticmethod(torch.detach)
    place = 0

    def build(self) -> None:
        super().build()
        self.backbone.insert(self.place, Balanced(self.keep))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("kept", self.value())
        self.log("share", self.backbone[self.place].share)
        return loss

    def value(self) -> Any:
        return self.backbone[self.place].balance


class LogsNumber(LogsKept):
    keep = staticmethod(Tensor.item)


class LogsLast(LogsKept):
    place = 6


class LogsComputed(LogsKept):
    keep = staticmethod(torch.clone)

    def value(self) -> Any:
        return 2 * super().value()


class LogsFromHook(LogsKept):
    """A hook keeps it in the module."""

    def build(self) -> None:
        super().build()
        self.last = torch.zeros(1, 1)
        self.backbone[1].register_forward_hook(lambda _, __, y: setattr(self, "last", y.detach()))

    def value(self) -> Any:
        return self.last[0, 0]


def told(kind: type[Around], step: Any, stages: int, chunks: int = 3) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        strategy = GPipeStrategy(chunks, step=step)
        trainer(max_epochs=1, devices=stages, strategy=strategy).fit(kind())
    return [str(w.message) for w in caught if " log" in str(w.message)]


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("kind", [LogsKept, LogsNumber, LogsLast, LogsComputed, LogsFromHook])
def test_what_layers_have_kept_is_told_of_once(kind: type[LogsKept], stages: int) -> None:
    ranks = run_ranks(told, stages, kind, "mini-batch", stages)
    texts = [text for rank in ranks for text in rank]
    found = [text for text in texts if "logs 'kept', which a layer or a hook has kept" in text]
    assert len(found) == 1
    assert all("different values of 'kept'" in text for text in texts if text not in found)


@pytest.mark.parametrize("step", ["mini-batch", "micro-batch"])
def test_nothing_is_told_where_nothing_is_cut(step: str) -> None:
    assert told(LogsKept, step, 1, chunks=1) == []
    assert told(LogsLater, step, 1, chunks=1) == []


class LogsLater(Around):
    """A hook logs what the step has set, and what a metric has of the mini-batch."""

    def build(self) -> None:
        super().build()
        self.total, self.counted = SumMetric(), 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.last, self.number, self.kept = self.keep(loss), loss.detach() * 2, {"loss": loss}
        self.total.update(torch.ones(len(batch[0])))
        self.counted += len(batch[0])
        return loss

    keep = staticmethod(torch.detach)

    def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
        self.log("kept", self.last)
        self.log("in a dict", self.kept["loss"])
        self.log("of the mini-batch", outputs["loss"])
        self.log("metric", self.total.compute())
        self.log("counted", self.counted)


class LogsLaterNumber(LogsLater):
    keep = staticmethod(Tensor.item)


@pytest.mark.parametrize(("kind", "stages"), [(LogsLater, 1), (LogsLaterNumber, 1), (LogsLater, 2)])
def test_what_a_step_has_kept_is_told_of_once(kind: type[LogsLater], stages: int) -> None:
    last = run_ranks(told, stages, kind, "micro-batch", stages)[-1]
    assert [text.partition(" is logged after the step, of an")[0] for text in last] == [
        "'kept'",
        "'in a dict'",
    ]


def test_what_a_step_has_kept_of_a_mini_batch_is_right() -> None:
    assert told(LogsLater, "mini-batch", 1) == []


@pytest.mark.parametrize("kind", [Kept, KeptByHead])
def test_values_of_one_stage_are_told_of_once(kind: type[Logs]) -> None:
    texts, *others = run_ranks(told, 2, kind, "mini-batch", 2)
    assert len(texts) == 1
    assert "different values of 'kept': stage 0" in texts[0]
    assert others == [[]]


@pytest.mark.parametrize(
    ("kind", "step", "stages"),
    [(Logs, "mini-batch", 2), (Kept, "mini-batch", 1), (Logs, "micro-batch", 2)],
)
def test_nothing_is_told_of_others(kind: type[Logs], step: str, stages: int) -> None:
    assert run_ranks(told, stages, kind, step, stages) == [[]] * stages


def test_thousands_of_entries_are_not_looked_through() -> None:
    module = nn.Linear(2, 2)
    few, many = [torch.zeros(1)], [torch.zeros(1) for _ in range(FEW + 1)]
    module.__dict__ |= {"few": few, "many": many}
    kept = KeptValues([module])
    few[0], many[0] = torch.ones(1), torch.ones(1)
    (found,) = kept.tensors([])
    assert found is few[0]


class LogsInLayer(nn.Linear):
    """Logs through the module that holds it."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x).tanh()
        if self.owner:
            self.owner[0].log(self.name, y.detach().abs().mean())
        return y


class OfLayers(Around):
    def build(self) -> None:
        super().build()
        self.backbone = nn.Sequential(*(LogsInLayer(WIDTH, WIDTH) for _ in range(4)))
        for i, layer in enumerate(self.backbone):
            layer.owner, layer.name = [self], f"layer {i}"


def logged(step: Any, stages: int) -> tuple[dict[str, Tensor], list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = trainer(max_epochs=1, devices=stages, strategy=GPipeStrategy(1, step=step))
        run.fit(OfLayers())
    return dict(run.callback_metrics), [str(w.message) for w in caught if " log" in str(w.message)]


def test_what_layers_log_is_right_on_one_stage() -> None:
    torch.manual_seed(1)
    (run := trainer(max_epochs=1)).fit(OfLayers())
    torch.manual_seed(1)
    found, texts = logged("mini-batch", 1)
    torch.testing.assert_close(found, dict(run.callback_metrics))
    assert not texts


@pytest.mark.parametrize("step", ["mini-batch", "micro-batch"])
def test_what_other_stages_alone_log_is_told_of(step: str) -> None:
    (first, texts), (last, others) = run_ranks(logged, 2, step, 2)
    assert "layer 0" in first
    assert "layer 3" not in first
    assert "layer 3" in last
    if step == "mini-batch":
        assert sorted(text[:28] for text in texts) == [
            "Stage 1 alone logs 'layer 2'",
            "Stage 1 alone logs 'layer 3'",
        ]
    else:
        assert ["calls self.log" in text for text in texts + others] == [True, True]


@pytest.mark.parametrize("arguments", [{"bogus": 1}, {"name": "twice"}])
def test_wrong_arguments_are_refused_where_they_are_given(arguments: dict[str, Any]) -> None:
    class Wrong(Around):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            with pytest.raises(TypeError, match="argument"):
                self.log("loss", 1.0, **arguments)
            return super().training_step(batch, batch_idx)

    trainer(max_steps=2, strategy=GPipeStrategy(2, step="micro-batch")).fit(Wrong())
