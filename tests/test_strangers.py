"""Losses and inputs that depend on what the pipeline doesn't know: explained errors."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_gpipe import GPipeStrategy
from tests import models
from tests.models import WIDTH
from tests.ranks import RankError, run_ranks
from tests.test_whole_model import expected
from tests.training import train


class Hooked(models.Module):
    """Uses in the loss what a hook has kept of the backbone's forward."""

    def build(self) -> None:
        super().build()
        self.__dict__["kept"] = torch.zeros(())  # on stages without the layer, too
        self.backbone[-1].register_forward_hook(self.keep)

    def keep(self, layer: nn.Module, inputs: Any, output: Tensor) -> None:
        self.__dict__["kept"] = output

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return super().loss(x, y) + self.kept.square().mean()


class HookedFirst(Hooked):
    """The hook is the first layer's, so not every stage has it."""

    def build(self) -> None:
        models.Module.build(self)
        self.__dict__["kept"] = torch.zeros(())
        self.backbone[0].register_forward_hook(self.keep)


class HookedInDict(models.Module):
    """The hook keeps it in a dict, which has nothing on other stages."""

    def build(self) -> None:
        super().build()
        self.found: dict[str, Tensor] = {}
        self.backbone[0].register_forward_hook(self.keep)

    def keep(self, layer: nn.Module, inputs: Any, output: Tensor) -> None:
        self.found["first"] = output.detach()

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return super().loss(x, y) + self.found["first"].square().mean()


class Adding(HookedFirst):
    """The hook adds to what was there."""

    def keep(self, layer: nn.Module, inputs: Any, output: Tensor) -> None:
        self.kept.add_(output.detach().square().mean())


class Later(HookedFirst):
    """The loss takes it from the second step on."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        loss = models.Module.loss(self, x, y)
        return loss + self.kept.square().mean() if self.global_step else loss


class Circular(HookedFirst):
    """The hook keeps a dict that contains itself, too."""

    def keep(self, layer: nn.Module, inputs: Any, output: Tensor) -> None:
        super().keep(layer, inputs, output)
        circle: dict[str, Any] = {}
        self.__dict__["circle"] = circle | {"circle": circle}
        circle["circle"] = circle


class Gated(nn.Linear):
    """Keeps a part of the loss, as mixtures of experts do."""

    def forward(self, x: Tensor) -> Tensor:
        output = super().forward(x)
        self.balance = output.square().mean()
        return output


class Balanced(models.Module):
    """Adds what the layers keep to the loss."""

    def build(self) -> None:
        self.backbone = nn.Sequential(*(Gated(WIDTH, WIDTH) for _ in range(6)))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return super().loss(x, y) + sum(0.1 * layer.balance for layer in self.backbone)


class BalancedLater(Balanced):
    """The layers say that they will keep one."""

    def build(self) -> None:
        super().build()
        for layer in self.backbone:
            layer.balance = None


class Logged(Hooked):
    """Uses it without a graph; the loss doesn't depend on it."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        loss = models.Module.loss(self, x, y)
        if self.trainer.global_rank == self.trainer.world_size - 1:
            assert self.kept.detach().isfinite().all()
        return loss


class InputGradient(models.Around):
    """The batch requires a gradient, of which nobody asks."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch[0].requires_grad_(), batch[1])


class Beside(InputGradient):
    """It goes by the backbone, too."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return super().loss(x, y) + (self(x) * x).mean()


class ReadsGradient(InputGradient):
    """Reads the gradient of the batch."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        batch[0].grad.sum()


class PreActivated(models.Around):
    """A first layer that works in place, as in residual networks."""

    def build(self) -> None:
        super().build()
        self.backbone.insert(0, nn.LeakyReLU(0.3, inplace=True))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.before(x)
        assert h.shape == x.shape
        loss = nn.functional.mse_loss(self.after(self.backbone(h)), y)
        assert len(h) == len(x)
        return loss


class Same(PreActivated):
    """Gives the backbone a tensor that stays from step to step."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        if not hasattr(self, "same"):
            self.__dict__["same"] = x.abs()
        return nn.functional.mse_loss(self.backbone(self.same.abs_()), y)


class Residual(PreActivated):
    """Uses what it has changed."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.before(x)
        return nn.functional.mse_loss(h + self.backbone(h), y)


class Entry(nn.Linear):
    """Puts what it computes into the dictionary that it is given."""

    def forward(self, found: dict[str, Any]) -> Any:
        found["h"] = super().forward(found["h"]).tanh()
        found.setdefault("norms", []).append(found["h"].norm(dim=1))
        return found


class InDictionary(models.Around):
    """Goes on with the dictionary that it has given the backbone, or with what that returns."""

    is_returned = False

    def build(self) -> None:
        super().build()
        self.backbone = nn.Sequential(*(Entry(WIDTH, WIDTH) for _ in range(4)))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        found = {"h": self.before(x), "y": y}
        made = self.backbone(found)
        used = made if self.is_returned else found
        return nn.functional.mse_loss(self.after(used["h"]), found["y"]) + self.more(used)

    def more(self, used: dict[str, Any]) -> Tensor:
        return used["h"].mean()


class IntoTuple(nn.Linear):
    """Puts another tuple into the dictionary that it is given."""

    def forward(self, found: dict[str, Any]) -> Any:
        hidden, labels = found["pair"]
        found["pair"] = super().forward(hidden).tanh(), labels
        return found


class TupleInDictionary(models.Around):
    """Goes on with a tuple in whose place another one would be."""

    def build(self) -> None:
        super().build()
        self.backbone = nn.Sequential(*(IntoTuple(WIDTH, WIDTH) for _ in range(4)))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        found = {"pair": (self.before(x), y)}
        self.backbone(found)
        hidden, labels = found["pair"]
        return nn.functional.mse_loss(self.after(hidden), labels)


class NormsInDictionary(InDictionary):
    """The same, of what wasn't there."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        found = {"h": self.before(x)}
        made = self.backbone(found)
        return nn.functional.mse_loss(self.after(made["h"]), y) + self.more(found)

    def more(self, used: dict[str, Any]) -> Tensor:
        return sum(norm.mean() for norm in used["norms"])  # type: ignore[return-value]


class Returned(InDictionary):
    is_returned = True

    def more(self, used: dict[str, Any]) -> Tensor:
        return sum(norm.mean() for norm in used["norms"])  # type: ignore[return-value]


class Perturbed(models.Around):
    """Trains with a perturbation, behind the backbone."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        delta = x.new_zeros(1, WIDTH, requires_grad=True)
        return nn.functional.mse_loss(self(x) + delta, y)


class ReadsPerturbation(Perturbed):
    """The last stage alone has its gradient."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        self.delta = [x.new_zeros(1, WIDTH, requires_grad=True)]
        return nn.functional.mse_loss(self(x) + self.delta[0], y)

    def on_after_backward(self) -> None:
        if self.delta[0].grad is not None:
            self.delta[0].grad.zero_()


class Penalized(models.Around):
    """A penalty on the gradient of what stands outside the backbone."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        real = y.clone().requires_grad_()
        scores = self.after(real).square().sum()
        (gradient,) = torch.autograd.grad(scores, real, create_graph=True)
        return nn.functional.mse_loss(self(x), y) + (gradient.norm(dim=1) - 1).square().mean()


class PenalizedMix(models.Around):
    """A penalty on the gradient of what the backbone's output was mixed into."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.backbone(self.before(x))
        mixed = 0.3 * h + 0.7 * y
        (gradient,) = torch.autograd.grad(
            self.after(mixed).square().sum(), mixed, create_graph=True
        )
        penalty = (gradient.norm(dim=1) - 1).square().mean()
        return nn.functional.mse_loss(self.after(h), y) + penalty


class Balances(models.Around):
    """Weighs two losses by the gradients of the layer behind the backbone, as a VQGAN does."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.backbone(self.before(x))
        first, second = nn.functional.mse_loss(self.after(h), y), self.after(h).abs().mean()
        norms = [
            torch.autograd.grad(loss, [self.after.weight, h], retain_graph=True)
            for loss in (first, second)
        ]
        weights = [a.norm() / b.norm() for a, b in zip(*norms, strict=True)]
        return first + sum(weights).detach() * second


class AsksBefore(models.Around):
    """Asks for the gradient of what stands before the backbone."""

    def asked(self) -> Any:
        return self.before.weight

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        loss = super().loss(x, y)
        torch.autograd.grad(loss, self.asked(), retain_graph=True, allow_unused=True)
        return loss


class AsksPastSkip(AsksBefore, models.Skip):
    """The same, where a second way leads there beside the backbone."""


class Differentiates(models.Skip):
    """Runs a backward of its own."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        loss = super().loss(x, y)
        loss.backward(retain_graph=True)
        return loss


class AsksTied(AsksBefore):
    """Asks for that of a weight that the backbone has, too."""

    def build(self) -> None:
        super().build()
        self.after.weight = self.backbone[0].weight

    def asked(self) -> Any:
        return self.after.weight


class AsksEverywhere(AsksBefore):
    """Asks for that of a weight that is used on both sides of the backbone."""

    def build(self) -> None:
        super().build()
        self.after.weight = self.before.weight


class AsksLayer(AsksBefore):
    """Asks for that of a weight of the backbone."""

    def asked(self) -> Any:
        return self.backbone[0].weight


class Averaged(models.Around):
    """Averages what stands behind the backbone by hand, from the second mini-batch on."""

    def build(self) -> None:
        super().build()
        self.teacher = copy.deepcopy(self.after)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        for p, q in zip(self.teacher.parameters(), self.after.parameters(), strict=True):
            p.data = 0.9 * p.data + 0.1 * q.data
        h = self.backbone(self.before(x))
        return nn.functional.mse_loss(self.after(h), self.teacher(h.detach()))


class Adversarial(models.Around):
    """The remedy: the perturbation is a parameter."""

    def build(self) -> None:
        super().build()
        self.delta = nn.Parameter(torch.zeros(WIDTH))
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        x, y = batch
        optimizer = self.optimizers()
        optimizer.zero_grad()
        with torch.no_grad():
            self.delta.zero_()
        self.manual_backward(self.loss(x + self.delta, y + self.delta))
        step = self.delta.grad.sign() * 0.1
        with torch.no_grad():
            self.delta.copy_(step)
        optimizer.zero_grad()
        self.manual_backward(self.loss(x + self.delta, y))
        optimizer.step()


class Saliency(models.Around):
    """Gradients of the input in validation."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        with torch.inference_mode(False), torch.enable_grad():
            x = batch[0].clone().requires_grad_(self.asks)
            torch.autograd.grad(self(x).sum(), self.before.weight)

    asks = False
    val_dataloader = models.Module.train_dataloader


def weights(kind: type[models.Module], state: Any, step: Any = "mini-batch") -> Any:
    module = kind("sgd")
    module.load_state_dict(state)
    devices = torch.distributed.get_world_size()
    options = {"inference_mode": False} if kind is Saliency else {}
    return train(
        module, max_steps=3, devices=devices, strategy=GPipeStrategy(3, step=step), **options
    )


@pytest.mark.parametrize(
    ("kind", "stages", "problem"),
    [
        (Hooked, 1, r"a layer or a hook has kept.*Return it with the backbone's output"),
        (HookedInDict, 2, "KeyError: 'first'.*A forward hook runs on the stage that has its layer"),
        (Balanced, 2, "(?s)AttributeError: .*Layers leave 'balance' on the stage where they run"),
        (BalancedLater, 2, "(?s)TypeError: .*Layers leave 'balance' on the stage where they run"),
        (ReadsGradient, 2, r"A tensor of shape \(.*requires a gradient and is no parameter"),
        (ReadsGradient, 3, r"A tensor of shape \(.*requires a gradient and is no parameter"),
        (
            ReadsPerturbation,
            2,
            r"A tensor of shape \(1, 6\) requires a gradient and is no parameter",
        ),
        (Residual, 1, "The backbone's first layer changes its input in place"),
        (Residual, 2, "The backbone's first layer changes its input in place"),
        *(
            (kind, stages, "layers put something into a list or a dictionary that they are given")
            for kind in (InDictionary, TupleInDictionary, NormsInDictionary)
            for stages in ((1,) if kind is NormsInDictionary else (1, 2))
        ),
        (Saliency, 1, "torch.autograd.grad through the backbone is not supported"),
        (Saliency, 2, "torch.autograd.grad through the backbone is not supported"),
        *(
            (kind, stages, "torch.autograd.grad through the backbone is not supported")
            for kind in (AsksBefore, AsksTied, AsksEverywhere, AsksLayer)
            for stages in (1, 2)
        ),
    ],
)
def test_refused_with_its_remedy(kind: type[models.Module], stages: int, problem: str) -> None:
    with pytest.raises(RankError, match=problem):
        run_ranks(weights, stages, kind, kind("sgd").state_dict())


@pytest.mark.parametrize(
    ("kind", "stages", "problem"),
    [
        (Hooked, 1, r"a layer or a hook has kept.*Return it with the backbone's output"),
        (Hooked, 2, r"a layer or a hook has kept.*Return it with the backbone's output"),
        (Residual, 1, "The backbone's first layer changes its input in place"),
        (InDictionary, 2, "layers put something into a list or a dictionary that they are given"),
        *(
            (kind, 2, "'add' takes values of another stage and what a layer or a hook has kept")
            for kind in (HookedFirst, Adding, Later, Circular)
        ),
        *(
            (kind, 2, "Layers leave 'balance' on the stage|what a layer or a hook has kept")
            for kind in (Balanced, BalancedLater)
        ),
        (Perturbed, 2, r"A tensor of shape \(1, 6\) requires a gradient and is no parameter"),
        (Averaged, 2, "'data =' reads a value of the step that stage [01] has"),
        (AsksBefore, 1, "torch.autograd.grad through the backbone is not supported"),
        (AsksPastSkip, 1, "torch.autograd.grad through the backbone is not supported"),
        (Differentiates, 1, "The step runs a backward through the backbone"),
    ],
)
def test_refused_in_steps_of_micro_batches(
    kind: type[models.Module], stages: int, problem: str
) -> None:
    with pytest.raises(RankError, match=problem):
        run_ranks(weights, stages, kind, kind("sgd").state_dict(), "micro-batch")


@pytest.mark.parametrize(
    ("kind", "stages"),
    [(Logged, 1), (Logged, 2), (Perturbed, 1), (Perturbed, 2), (Penalized, 1), (Penalized, 3)]
    + [
        (kind, stages)
        for kind in (InputGradient, Beside, PreActivated, Same, PenalizedMix, Balances)
        for stages in (1, 2, 3)
    ]
    + [(Adversarial, stages) for stages in (1, 2, 3)],
)
def test_equal_to_a_plain_trainer(kind: type[models.Module], stages: int) -> None:
    state, plain = expected(kind, {"max_steps": 3})
    found = run_ranks(weights, stages, kind, state)[0]
    torch.testing.assert_close(found, plain, rtol=0, atol=1e-10)


@pytest.mark.parametrize("step", ["mini-batch", "micro-batch"])
def test_what_layers_put_into_a_dictionary_comes_out(step: Any) -> None:
    state, plain = expected(Returned, {"max_steps": 3})
    for stages in (1, 2):
        found = run_ranks(weights, stages, Returned, state, step)[0]
        torch.testing.assert_close(found, plain, atol=1e-10, rtol=0)
