"""What a backbone may be given and may return, and what is explained where it may not."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_gpipe import GPipeStrategy
from lightning_gpipe.tensors.microbatch import Split
from lightning_gpipe.tensors.tree import Tree
from tests import models
from tests.ranks import run_ranks
from tests.training import train

Pair = namedtuple("Pair", "x text")


@dataclass(frozen=True)
class Case:
    """How a module's input becomes the backbone's, a layer's, and what becomes of the output."""

    given: Callable[[Any, Tensor], Any]
    read: Callable[[Any], Tensor] = lambda value: value
    returned: Callable[[Any, Tensor], Any] = lambda value, hidden: hidden
    samples: int = 8


def first(value: Any) -> Tensor:
    return value[0]


def beside(value: Any, hidden: Tensor) -> Any:
    return (hidden, *value[1:])


CASES = {
    "dict": Case(lambda m, x: {"x": x, "n": None}, lambda v: v["x"], lambda v, h: {**v, "x": h}),
    "named tuple": Case(lambda m, x: Pair(x, "t"), first, lambda v, h: Pair(h, v.text)),
    "constants": Case(lambda m, x: (x, None, True, "s", 3, 0.5), first, beside),
    "constants with NaN": Case(
        lambda m, x: (x, torch.tensor([[float("nan"), 1.0]], dtype=x.dtype)), first, beside
    ),
    "lists of other lengths": Case(lambda m, x: [x, [x[:2], [x]]], first, lambda v, h: [h, v[1]]),
    "empty containers": Case(lambda m, x: (x, [], {}, ((),)), first, beside),
    "complex": Case(lambda m, x: torch.complex(x, x), lambda v: v.real if v.is_complex() else v),
    "half": Case(lambda m, x: x.half(), lambda v: v.double()),
    "integers": Case(lambda m, x: (3 * x).long(), lambda v: v.double()),
    "expanded": Case(lambda m, x: x[:1].expand(8, 6)),
    "expanded beside, wants a gradient": Case(
        lambda m, x: (x, m.image[:, :1].expand(8, 6)), first, beside
    ),
    "not contiguous": Case(lambda m, x: x.T.contiguous().T),
    "wants a gradient": Case(lambda m, x: m.image * x),
    "twice the same": Case(
        lambda m, x: (m.image * x,) * 2, lambda v: v[0] * v[1], lambda v, h: (h, v[1])
    ),
    "a parameter": Case(lambda m, x: m.image),
    "a parameter beside": Case(
        lambda m, x: (m.image, x), lambda v: v[1] + v[0].mean(0), lambda v, h: (v[0], h)
    ),
    "one sample": Case(lambda m, x: x[:1]),
}


class Layer(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        self.linear = nn.Linear(models.WIDTH, models.WIDTH)

    def forward(self, value: Any) -> Any:
        return self.case.returned(value, self.linear(self.case.read(value)).tanh())


class Given(models.Module):
    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__("sgd")

    def build(self) -> None:
        self.case = CASES[self.name]
        self.image = nn.Parameter(torch.linspace(-1, 1, 48).view(8, 6))
        self.backbone = nn.Sequential(*(Layer(self.case) for _ in range(3)))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        output = self.backbone(self.case.given(self, x))
        leaves = Tree.of(output, "The output").tensors()
        return sum((leaf.double().square().mean() for leaf in leaves), torch.zeros(()).double())


def trained(stages: int) -> dict[str, dict[str, Tensor]]:
    """Train all of them, one after another."""
    found = {}
    for name in CASES:
        L.seed_everything(1, verbose=False)
        options = {"devices": stages, "strategy": GPipeStrategy(3)} if stages else {"devices": 1}
        found[name] = train(Given(name), max_steps=2, **options)
    return found


@pytest.mark.parametrize("stages", [1, 2])
def test_inputs_of_all_kinds_train_as_before(stages: int) -> None:
    plain, found = trained(0), run_ranks(trained, stages, stages)[0]
    for name, state in plain.items():
        torch.testing.assert_close(
            found[name], state, atol=1e-10, rtol=0, msg=lambda text, name=name: f"{name}: {text}"
        )


@dataclass
class Plain:
    x: Tensor


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: torch.eye(3).to_sparse(), "holds a sparse_coo tensor.* give a dense one"),
        (lambda: torch.eye(3).to_sparse_csr(), "holds a sparse_csr tensor"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "holds a nested"),
        (lambda: Plain(torch.ones(2)), r"test_inputs.Plain.*register_dataclass"),
        (lambda: (i for i in range(2)), "holds a builtins.generator"),
        (lambda: {1, 2}, "holds a builtins.set"),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_cannot_be_split_is_named(make: Callable[[], Any], problem: str) -> None:
    with pytest.raises(TypeError, match=problem):
        Tree.of((torch.ones(3), make()), "The backbone's input")


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (torch.ones(0, 3), "0 samples"),
        (torch.ones(()), r"at least one tensor of shape \[batch, ...\]"),
        (None, r"at least one tensor of shape \[batch, ...\]"),
        ([], "no tensor with a batch dimension"),
        ("text", "no tensor with a batch dimension"),
    ],
)
def test_what_has_no_samples_is_explained(value: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        Split.plan(Tree.of(value, "The backbone's input"), 2)
