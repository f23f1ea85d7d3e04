"""A model may call its backbone, or blocks of it, inside torch.utils.checkpoint."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from lightning_gpipe import GPipeStrategy
from lightning_gpipe.model.loop import Loop
from lightning_gpipe.model.loop_notes import INPUT
from lightning_gpipe.model.promise import Promise, Promised
from tests import models
from tests.ranks import RankError, run_ranks
from tests.training import train, trainer

FUNCTIONS = {k: v for k, v in vars(torch.utils.checkpoint).items() if k != "__warningregistry__"}
GPU = torch.device("cuda", 1)
CALLED: dict[str, Callable[..., Any]] = {
    "sequential": lambda module, hidden, reentrant: checkpoint_sequential(
        module.backbone, 2, hidden, use_reentrant=reentrant
    ),
    "slice": lambda module, hidden, reentrant: module.backbone[1:](
        checkpoint(module.backbone[:1], hidden, use_reentrant=reentrant)
    ),
    "whole": lambda module, hidden, reentrant: checkpoint(
        module.backbone, hidden, use_reentrant=reentrant
    ),
    "loop": lambda module, hidden, reentrant: loop(
        lambda layer, h: checkpoint(layer, h, use_reentrant=reentrant), module, hidden
    ),
    "calls": lambda module, hidden, reentrant: loop(
        lambda layer, h: checkpoint(layer.__call__, h, use_reentrant=reentrant), module, hidden
    ),
    "closures": lambda module, hidden, reentrant: loop(
        lambda layer, h: checkpoint(around(layer), h, use_reentrant=reentrant), module, hidden
    ),
    "partial": lambda module, hidden, reentrant: loop(
        lambda layer, h: checkpoint(partial(call, layer), h, use_reentrant=reentrant),
        module,
        hidden,
    ),
}


def loop(call: Callable[[Any, Tensor], Tensor], module: Any, hidden: Tensor) -> Tensor:
    for layer in module.backbone:
        hidden = call(layer, hidden)
    return hidden


def around(layer: Any) -> Callable[[Tensor], Tensor]:
    def forward(hidden: Tensor) -> Tensor:
        made: Tensor = layer(hidden)
        return made

    return forward


def call(layer: Any, hidden: Tensor) -> Tensor:
    made: Tensor = layer(hidden)
    return made


class Module(models.Around):
    """Calls its backbone as a user does who wants to save memory by hand."""

    def __init__(self, how: str, reentrant: bool) -> None:
        super().__init__("sgd")
        self.how, self.reentrant = how, reentrant

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.before(x)
        if self.how in ("method", "nested", "saved"):
            hidden = checkpoint(self.body, hidden, use_reentrant=self.reentrant)
        else:
            hidden = CALLED[self.how](self, hidden, self.reentrant)
        out: Tensor = self.after(hidden)
        return out

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])

    def body(self, hidden: Tensor) -> Tensor:
        if self.how == "nested":
            made: Tensor = checkpoint(self.backbone, hidden, use_reentrant=False)
        elif self.how == "saved":
            with torch.autograd.graph.save_on_cpu():
                made = self.backbone(hidden)
        else:
            made = self.backbone(hidden)
        return made * made


class Residual(Module):
    """Has a loop that adds residuals, normalizes before each block, and saves memory in both."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.before(x)
        for layer in self.backbone:

            def one(hidden: Tensor, layer: Any = layer) -> Tensor:
                made: Tensor = hidden + layer(nn.functional.layer_norm(hidden, (models.WIDTH,)))
                return made

            hidden = checkpoint(one, hidden, use_reentrant=self.reentrant)
        out: Tensor = self.after(hidden)
        return out


class Whole(Module):
    """Hands a dictionary on."""

    def build(self) -> None:
        super().build()
        self.backbone = nn.Sequential(*(OfDictionary() for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        state = {"hidden": self.before(x), "x": x}
        for layer in self.backbone:
            state = checkpoint(layer, state, use_reentrant=self.reentrant)
        out: Tensor = self.after(state["hidden"])
        return out


class OfDictionary(nn.Linear):
    def __init__(self) -> None:
        super().__init__(models.WIDTH, models.WIDTH)

    def forward(self, state: Any) -> Any:
        return state | {"hidden": super().forward(state["hidden"]).tanh() + state["x"]}


def fit(stages: int, how: str, reentrant: bool, step: Any, kind: Any = Module) -> Any:
    torch.manual_seed(3)
    module = kind(how, reentrant)

    def options() -> dict[str, Any]:
        strategy = {"strategy": GPipeStrategy(chunks=2, step=step)} if stages else {}
        return {"max_steps": 3, "devices": stages or 1, **strategy}

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "None of the inputs have requires_grad=True")
        state = train(module, **options())
        outputs = trainer(**options()).predict(module, module.train_dataloader())
    found = {k: v for k, v in vars(torch.utils.checkpoint).items() if k != "__warningregistry__"}
    assert found == FUNCTIONS
    return state, outputs if stages < 2 or torch.distributed.get_rank() == 0 else None


def fits(stages: int, step: str) -> dict[str, Any]:
    found = {
        f"{how} {reentrant}": fit(stages, how, reentrant, step)
        for how in CALLED
        for reentrant in (False, True)
    }
    more = {
        f"{kind.__name__} {reentrant}": fit(stages, "", reentrant, step, kind)
        for kind in (Residual, Whole)
        for reentrant in (False, True)
    }
    return found | more


@pytest.mark.parametrize("step", ["mini-batch", "micro-batch"])
@pytest.mark.parametrize("stages", [1, 2])
def test_it_trains_as_without(stages: int, step: str) -> None:
    plain = fit(0, "whole", False, step)
    kinds = {kind.__name__: fit(0, "", False, step, kind) for kind in (Residual, Whole)}
    for how, found in run_ranks(fits, stages, stages, step)[0].items():
        expected = kinds.get(how.partition(" ")[0], plain)
        torch.testing.assert_close(found, expected, atol=1e-10, rtol=0, msg=how)


@pytest.mark.parametrize(
    ("how", "reentrant"),
    [("method", False), ("method", True), ("nested", False), ("nested", True), ("saved", False)],
)
@pytest.mark.parametrize("stages", [1, 2])
def test_what_would_be_repeated_is_refused(stages: int, how: str, reentrant: bool) -> None:
    problem = r"inside torch\.utils\.checkpoint, by a function that it would call once more"
    with pytest.raises(RankError, match=problem):
        run_ranks(fit, stages, stages, how, reentrant, "mini-batch")


def test_a_promise_of_a_gpu_tells_its_device() -> None:
    promise = Promise.of(Promised(Loop.begin(None, (torch.ones(2),), {}), INPUT, GPU))  # type: ignore[arg-type]
    assert (promise.device, promise.get_device(), promise.is_cuda) == (GPU, 1, True)
