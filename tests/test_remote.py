"""Values of a step that another stage computes."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_gpipe.model.remote import NotHere, Origin, RemoteTensor, origin_of
from lightning_gpipe.model.step_trace import StepTrace

FIRST, LAST = frozenset({0}), frozenset({1})
CPU = torch.device("cpu")


class Model(nn.Module):
    """An embedding before a backbone, a head behind it, and places for what is left."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.backbone = nn.Linear(4, 4)
        self.head = nn.Linear(4, 7)
        self.losses: list[Tensor] = []
        self.total = torch.zeros(())
        self.average = torch.zeros(())


class Stage:
    """One of two stages, which run the same step one after the other."""

    def __init__(self, index: int, model: Model) -> None:
        self.index, self.model = index, copy.deepcopy(model)
        held = {id(self.model.embed.weight): FIRST}
        held |= {id(p): LAST for p in self.model.head.parameters()}
        self.trace = StepTrace(index, CPU, lambda t: held.get(id(t)), lambda m, call: None)

    def call(self, hidden: Tensor, crossing: dict[str, Tensor]) -> Tensor:
        """The backbone in the step: the first stage gives its input, the last has its output."""
        if self.index == 0:
            crossing["hidden"] = hidden.detach()
            meta = torch.empty(hidden.shape, device="meta", requires_grad=True)
            output: Tensor = self.trace.remote(meta, 0, LAST)
        else:
            output = self.model.backbone(crossing["hidden"])
        self.trace.arrive([hidden], [output], LAST)
        return output

    def run(self, step: Callable[..., Any], m: int, crossing: dict[str, Tensor]) -> Any:
        self.trace.begin(m)
        with self.trace:
            return step(self.model, lambda h: self.outside(h, crossing), torch.tensor([1, 2, 3]))

    def outside(self, hidden: Tensor, crossing: dict[str, Tensor]) -> Tensor:
        with torch._C.DisableTorchFunction():
            return self.call(hidden, crossing)


def both(step: Callable[..., Any], micro_batches: int = 2) -> tuple[list[Stage], list[list[Any]]]:
    """Run a step on two stages, and let the last one tell the first what is left."""
    torch.manual_seed(0)
    model = Model()
    stages, results = [Stage(0, model), Stage(1, model)], [[], []]  # type: ignore[var-annotated]
    for m in range(micro_batches):
        crossing: dict[str, Tensor] = {}
        for stage in stages:
            results[stage.index].append(stage.run(step, m, crossing))
    first, last = stages
    assert first.trace.mark == last.trace.mark, "the same functions in the same order"
    told = {**first.trace.values.left(), **last.trace.values.left()}
    for stage in stages:
        stage.trace.values.tell(told)
    for stage in stages:
        stage.trace.forget()
    return stages, results


def step(model: Model, backbone: Any, x: Tensor) -> dict[str, Any]:
    hidden = model.embed(x) * 2
    positions = torch.arange(3, device=hidden.device)
    assert positions.device == CPU
    logits = model.head(backbone(hidden + 0))
    assert logits.shape == (3, 7)
    assert logits.requires_grad
    assert not logits.is_meta
    loss = functional.cross_entropy(logits, x)
    model.losses.append(loss.detach())
    model.total += loss.detach()
    model.average = 0.9 * model.average + 0.1 * loss.detach()
    return {
        "loss": loss,
        "best": logits.argmax(-1).to(CPU),
        "in host memory": logits.sum(0).cpu(),
        "by name": logits.sum(1).to("cpu"),
        "norm": hidden.norm(),
        "rows": positions,
    }


def test_what_is_left_is_told() -> None:
    (first, last), (found, expected) = both(step)
    for ours, theirs in zip(found, expected, strict=True):
        for name in ours:
            assert torch.equal(ours[name], theirs[name]) or name == "norm"
    assert isinstance(expected[0]["norm"], RemoteTensor), "the first stage's"
    assert expected[0]["norm"].item() == found[0]["norm"].item()
    assert isinstance(found[0]["loss"], RemoteTensor)
    assert not isinstance(expected[0]["loss"], RemoteTensor)
    mean, wanted = torch.stack(first.model.losses).mean(), torch.stack(last.model.losses).mean()
    assert type(mean) is Tensor
    assert torch.equal(mean, wanted)
    assert float(first.model.total) == float(last.model.total) > 0
    assert torch.equal(first.model.average + 0, last.model.average + 0)


def test_what_was_told_is_forgotten_where_another_stage_changes_it() -> None:
    (first, _), (found, _) = both(step)
    told = found[0]["loss"]
    assert told.item() > 0

    def changes(model: Model, backbone: Any, x: Tensor) -> Tensor:
        told.add_(model.head(backbone(model.embed(x))).detach().sum())
        return told

    first.run(changes, 0, {})
    with pytest.raises(RuntimeError, match="reads a value of the step that stage 1 has"):
        told.item()
    first.trace.values.tell({origin_of(told).number: torch.tensor(3.0)})  # type: ignore[union-attr]
    assert told.item() == 3


def test_what_was_told_is_an_ordinary_tensors_equal() -> None:
    _, (found, expected) = both(step)
    loss, theirs = found[0]["loss"], expected[0]["loss"].detach()
    assert loss.item() == theirs.item()
    assert f"{loss:.3f}" == f"{theirs:.3f}"
    assert bool(loss > 0)
    assert loss.numpy() == theirs.numpy()
    assert copy.deepcopy(loss).item() == theirs.item()
    again = pickle.loads(pickle.dumps(loss))
    assert type(again) is Tensor
    assert again.item() == theirs.item()
    assert (loss + torch.ones(2)).tolist() == (theirs + torch.ones(2)).tolist()


def uses_both(model: Model, backbone: Any, x: Tensor) -> Tensor:
    hidden = model.embed(x)
    return backbone(hidden) + hidden


READS: dict[str, Callable[[Model, Any, Tensor], Any]] = {
    "item": lambda model, backbone, x: backbone(model.embed(x)).sum().item(),
    "bool": lambda model, backbone, x: 1 if backbone(model.embed(x)).sum() > 0 else 2,
    "numpy": lambda model, backbone, x: backbone(model.embed(x)).detach().numpy(),
    "list": lambda model, backbone, x: backbone(model.embed(x)).tolist(),
    "nonzero": lambda model, backbone, x: backbone(model.embed(x)).nonzero(),
    "mask": lambda model, backbone, x: backbone(model.embed(x))[backbone(model.embed(x)) > 0],
    "format": lambda model, backbone, x: f"{backbone(model.embed(x)).sum():.3f}",
    "iterate": lambda model, backbone, x: [float(row) for row in backbone(model.embed(x)).sum(1)],
    "both sides": uses_both,
}


@pytest.mark.parametrize("read", READS)
def test_reading_a_value_in_the_step_is_refused(read: str) -> None:
    torch.manual_seed(0)
    model = Model()
    stage = Stage(0, model)
    with pytest.raises(NotHere, match="mini-batch"):
        stage.run(READS[read], 0, {})


def test_what_was_not_told_is_refused_after_the_step() -> None:
    value = RemoteTensor.like(
        torch.empty(2, device="meta"),
        CPU,
        Origin((0, 1, 0), LAST),  # type: ignore[arg-type]
        requires_grad=False,
    )
    assert value.shape == (2,)
    for read in (lambda: value + 1, value.tolist, lambda: pickle.dumps(value)):
        with pytest.raises(NotHere, match="stage 1 has"):
            read()


def test_a_step_that_runs_otherwise_is_noticed() -> None:
    def otherwise(model: Model, backbone: Any, x: Tensor) -> Tensor:
        output = backbone(model.embed(x))
        return output * 2 if isinstance(output, RemoteTensor) else output

    with pytest.raises(AssertionError, match="same functions"):
        both(otherwise)


def test_nothing_is_kept_of_what_is_gone() -> None:
    (first, last), results = both(step)
    assert not first.trace.values._made
    assert not last.trace.values._made
    del results
