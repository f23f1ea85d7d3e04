"""Code of the user's that looks at the whole model: a plain Trainer's numbers, or an error."""

from __future__ import annotations

import copy
import weakref
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.optim.swa_utils import AveragedModel
from torch.utils.tensorboard._convert_np import make_np

from lightning_gpipe import GPipeStrategy
from tests import models
from tests.models import WIDTH
from tests.ranks import RankError, run_ranks
from tests.training import train, trainer

STEPS = 4


def backbone() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


class Snapshot(models.Module):
    """A teacher that is copied in a hook."""

    teacher: Any = None
    step = 0

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.step:
            self.__dict__["teacher"] = copy.deepcopy(self.backbone).requires_grad_(False)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        loss = super().loss(x, y)
        return loss if self.teacher is None else loss + (self(x) - self.teacher(x)).square().mean()


class LateSnapshot(Snapshot):
    step = 2


class Pickled(Snapshot):
    """The same by a file."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            import io

            file = io.BytesIO()
            torch.save(self.backbone, file)
            file.seek(0)
            self.__dict__["teacher"] = torch.load(file, weights_only=False).requires_grad_(False)


class Averaged(Snapshot):
    """An average of one's own."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.__dict__["teacher"] = AveragedModel(self.backbone).requires_grad_(False)
        elif batch_idx > 1:
            self.teacher.update_parameters(self.backbone)


class Before(Snapshot):
    """A copy from before the run."""

    def build(self) -> None:
        super().build()
        self.__dict__["teacher"] = copy.deepcopy(self.backbone).requires_grad_(False).double()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        pass


class Manual(models.Around):
    """Gradients are replaced between two backwards."""

    def __init__(self, optimizer: str = "sgd") -> None:
        super().__init__(optimizer)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(*batch))
        for p in self.parameters():
            if p.grad is not None:
                p.grad = p.grad * 0.5
        self.manual_backward(self.loss(*batch).square())
        optimizer.step()


class Clamped(models.Shared):
    """Hooks on parameters, in the backbone, outside it and shared."""

    def build(self) -> None:
        super().build()
        for parameter in self.parameters():
            parameter.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))


class Counted(models.Around):
    """An optimizer that steps in the backward, as soon as a gradient is there."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            for parameter in self.parameters():
                parameter.register_post_accumulate_grad_hook(self.clip)

    @staticmethod
    @torch.no_grad()
    def clip(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.sub_(parameter.grad.div(parameter.grad.norm().clamp(min=0.1)), alpha=0.01)


class TotalNorm(models.Around):
    """Clips by PyTorch's functions, with the gradients in a list."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        gradients = [p.grad for p in self.parameters() if p.grad is not None]
        total = nn.utils.get_total_norm(gradients)
        nn.utils.clip_grads_with_norm_(self.parameters(), 0.1, total)


class LargestNorm(models.Around):
    """Clips by the largest gradient, which PyTorch's functions call "inf", too."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        largest: Any = "inf"
        total = nn.utils.clip_grad_norm_(self.parameters(), 1e-3, largest)
        strategy = self.trainer.strategy
        if isinstance(strategy, GPipeStrategy):
            clipped = strategy.grad_norm(self.parameters(), largest)
            torch.testing.assert_close(clipped, total.clamp(max=1e-3), rtol=1e-3, atol=0)


class ScalesGradients(models.Around):
    """Scales gradients by what Lightning's function says of each, accumulated or not."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norms = grad_norm(self, 3)
        for name, parameter in self.named_parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(norms["grad_3.0_norm_total"] / norms[f"grad_3.0_norm/{name}"])


class ClipsParts(models.Around):
    """Clips layers one by one, of which a stage has none or all."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for i, layer in enumerate(self.backbone):
            if isinstance(layer, nn.Linear):
                nn.utils.clip_grad_value_(layer.parameters(), 0.001 * (i + 1))


class NoOptimizer(models.Module):
    def configure_optimizers(self) -> None:  # type: ignore[override]
        return None


class Complex(models.Module):
    """Complex parameters, with clipping."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex128))

        def forward(self, x: Tensor) -> Tensor:
            return (x.to(torch.complex128) @ self.weight).abs()

    def build(self) -> None:
        self.backbone = nn.Sequential(self.Layer(), nn.Linear(WIDTH, WIDTH), self.Layer())


class Head(models.Module):
    """A tied head that reads a weight of the first stage."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(self.backbone(x), self.backbone[0].weight)


class TiedHead(models.Module):
    """The remedy: the weight stands outside the backbone, too."""

    def build(self) -> None:
        super().build()
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = self.backbone[0].weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x))


EQUAL: dict[str, tuple[type[models.Module], dict[str, Any]]] = {
    "clipping of parts by value": (ClipsParts, {}),
    "a copy made before the backbone's first call": (Snapshot, {}),
    "a copy made before the run": (Before, {}),
    "a gradient replaced between two backwards": (Manual, {}),
    "hooks on parameters": (Clamped, {}),
    "hooks on parameters, accumulated": (Clamped, {"accumulate_grad_batches": 2}),
    "hooks after accumulation": (Counted, {}),
    "hooks after accumulation, accumulated": (Counted, {"accumulate_grad_batches": 2}),
    "clipping by PyTorch's functions": (TotalNorm, {}),
    "clipping by the largest gradient": (LargestNorm, {}),
    "gradients scaled by their norms": (ScalesGradients, {}),
    "gradients scaled by their norms, accumulated": (
        ScalesGradients,
        {"accumulate_grad_batches": 2},
    ),
    "no optimizer": (NoOptimizer, {}),
    "complex parameters, clipped": (Complex, {"gradient_clip_val": 0.1}),
    "a tied head": (TiedHead, {}),
}
ALONE: dict[str, tuple[type[models.Module], dict[str, Any]]] = {
    "a copy made in the run": (LateSnapshot, {}),
    "a copy through a file": (Pickled, {}),
    "an average of one's own": (Averaged, {}),
    "a head that reads a weight of the backbone": (Head, {}),
}


def weights(kind: type[models.Module], state: Any, options: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    module = kind("sgd")
    module.load_state_dict(state)
    strategy = GPipeStrategy(3, checkpoint="always")
    devices = torch.distributed.get_world_size()
    return train(module, max_steps=STEPS, devices=devices, strategy=strategy, **options)


def expected(kind: type[models.Module], options: dict[str, Any]) -> tuple[Any, Any]:
    torch.manual_seed(0)
    module = kind("sgd")
    state = copy.deepcopy(module.state_dict())
    return state, train(module, devices=1, **{"max_steps": STEPS, **options})


@pytest.mark.filterwarnings("ignore:.*configure_optimizers.*returned.*None")
@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("what", EQUAL)
def test_equal_to_a_plain_trainer(what: str, stages: int) -> None:
    kind, options = EQUAL[what]
    state, plain = expected(kind, options)
    found = run_ranks(weights, stages, kind, state, options)[0]
    torch.testing.assert_close(found, plain, rtol=0, atol=1e-10)


@pytest.mark.parametrize("what", ALONE)
def test_one_stage_is_plain(what: str) -> None:
    kind, options = ALONE[what]
    state, plain = expected(kind, options)
    found = run_ranks(weights, 1, kind, state, options)[0]
    torch.testing.assert_close(found, plain, rtol=0, atol=1e-10)


class Changes(models.Around):
    """Changes itself before the third batch."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self.change()

    def change(self) -> None:
        """A subclass's; without one nothing is refused, and the test fails."""


class Appends(Changes):
    def change(self) -> None:
        self.backbone.append(nn.Tanh())


class Replaces(Changes):
    def change(self) -> None:
        self.backbone[2] = nn.Linear(WIDTH, WIDTH).double()


class Renews(Changes):
    def change(self) -> None:
        self.backbone[0].weight = nn.Parameter(torch.zeros(WIDTH, WIDTH, dtype=torch.float64))


class RenewsOutside(Changes):
    def change(self) -> None:
        self.before.weight = nn.Parameter(torch.zeros(WIDTH, WIDTH, dtype=torch.float64))


class Prunes(Changes):
    def change(self) -> None:
        prune.l1_unstructured(self.backbone[0], "weight", 0.5)


class PrunesBetweenEpochs(models.Around):
    def on_train_epoch_end(self) -> None:
        prune.l1_unstructured(self.backbone[0], "weight", 0.5)


class Histograms(models.Around):
    """As a logger does with ``add_histogram``."""

    def on_train_epoch_end(self) -> None:
        for _, parameter in self.named_parameters():
            parameter.detach().cpu().numpy()


class Written(models.Around):
    """Which draws a number for a tensor on the meta device, with NumPy's generator."""

    def on_train_epoch_end(self) -> None:
        for _, parameter in self.named_parameters():
            make_np(parameter)


class WrittenGradients(models.Around):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in self.parameters():
            make_np(parameter.grad)


class Adds(Changes):
    def change(self) -> None:
        self.extra = nn.Parameter(torch.zeros(WIDTH))
        self.optimizers().optimizer.add_param_group({"params": [self.extra]})


class Gradients(models.Around):
    """A decision by the gradients of one stage."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norms = [p.grad.norm() for p in self.parameters() if p.grad is not None]
        if torch.stack(norms).norm() > 1:
            optimizer.zero_grad()


class Finite(models.Around):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        gradients = [p.grad for p in self.parameters() if p.grad is not None]
        if any(not gradient.isfinite().all() for gradient in gradients):
            optimizer.zero_grad()


class LateTeacher(models.Around):
    """An average outside the backbone that starts between two checks of the losses, in buffers."""

    def build(self) -> None:
        super().build()
        self.register_buffer("average", torch.zeros(WIDTH, WIDTH))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self.average.lerp_(self.backbone[0].weight.detach(), 0.001)
            self.average.lerp_(self.backbone[4].weight.detach(), 0.001)


class LogsNorm(models.Around):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        for i in (0, 4):
            self.log(f"norm {i}", self.backbone[i].weight.norm())
        return super().training_step(batch, batch_idx)


class Validates(Head):
    """Reads a weight in validation alone."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.backbone(x), y)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        for weight in (self.backbone[0].weight, self.backbone[4].weight):
            self.log("val", nn.functional.linear(self(batch[0]), weight).mean())

    val_dataloader = models.Module.train_dataloader


HELD = "which stage . .rank .. holds; stage . .rank .. has its name and shape, and no values"
CHANGED = "after the module was cut into stages"
REFUSED: dict[str, tuple[type[models.Module], str]] = {
    "a layer is appended": (Appends, f"'backbone' were added.*{CHANGED}"),
    "a layer is replaced": (Replaces, f"'backbone' were added.*{CHANGED}"),
    "a parameter is made anew": (Renews, f"'backbone.0' were added.*{CHANGED}"),
    "a parameter outside is made anew": (RenewsOutside, f"'before' were added.*{CHANGED}"),
    "a layer is pruned": (Prunes, f"{HELD}|{CHANGED}"),
    "a layer is pruned between epochs": (PrunesBetweenEpochs, f"{HELD}|{CHANGED}"),
    "histograms of all parameters": (Histograms, f"{HELD}.*skip those with p.is_meta"),
    "histograms by TensorBoard": (Written, f"'TensorBoard' reads .* {HELD}.*p.is_meta"),
    "histograms of gradients": (WrittenGradients, f"'TensorBoard' reads .*grad', {HELD}"),
    "a parameter is added": (Adds, f"SGD has a parameter of shape .6,. that was made {CHANGED}"),
    "a copy made in the run": (LateSnapshot, HELD),
    "a copy through a file": (Pickled, "meta"),
    "an average of one's own": (Averaged, HELD),
    "a head that reads a weight of the backbone": (Head, HELD),
    "validation reads a weight of the backbone": (Validates, HELD),
    "clipping by hand": (Gradients, f"grad.*{HELD}"),
    "a decision by finite gradients": (Finite, f"grad.*{HELD}"),
    "an average in a buffer": (LateTeacher, HELD),
    "a norm that is logged": (LogsNorm, HELD),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused_with_its_remedy(what: str) -> None:
    kind, problem = REFUSED[what]
    torch.manual_seed(0)
    with pytest.raises(RankError, match=problem):
        run_ranks(weights, 2, kind, kind("sgd").state_dict(), {}, timeout_s=60)


class RemovesAtTheEnd(L.Callback):
    """Prunes after the last step."""

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        for layer in (pl_module.backbone[0], pl_module.backbone[4]):
            del layer._parameters["bias"]


def restored(state: Any) -> Any:
    module = models.Module("sgd")
    module.load_state_dict(state)
    devices = torch.distributed.get_world_size()
    options = {"callbacks": [RemovesAtTheEnd()], "strategy": GPipeStrategy(3)}
    return train(module, max_steps=STEPS, devices=devices, **options)


@pytest.mark.parametrize("stages", [1, 2])
def test_what_is_removed_at_the_end_leaves_the_other_weights(stages: int) -> None:
    state, plain = expected(models.Module, {})
    found = run_ranks(restored, stages, state)[0]
    assert set(plain) - set(found) == {"backbone.0.bias", "backbone.4.bias"}
    plain = {name: value for name, value in plain.items() if name in found}
    torch.testing.assert_close(found, plain, rtol=0, atol=1e-10)


def hooks_and_replicas() -> None:
    train(Clamped(), max_steps=1, devices=4, strategy=GPipeStrategy(2, stages=2))


def test_hooks_on_parameters_are_refused_with_replicas() -> None:
    with pytest.raises(RankError, match="change the average in the hook on_before_optimizer_step"):
        run_ranks(hooks_and_replicas, 4)


class Nesterov(models.Around):
    """Its optimizer keeps a tensor of single precision for parameters of double precision."""

    def configure_optimizers(self) -> Any:
        return torch.optim.NAdam(self.parameters(), lr=1e-3)


def saved_after_the_run(path: str, stages: int) -> None:
    options = {"devices": stages, "strategy": GPipeStrategy(1, stages=stages)} if stages else {}
    run = trainer(max_epochs=1, limit_train_batches=2, **options)
    torch.manual_seed(1)
    run.fit(Nesterov())
    run.save_checkpoint(path)


def test_what_is_saved_after_a_run_has_the_optimizers_own_types(tmp_path: Path) -> None:
    saved_after_the_run(str(tmp_path / "plain"), 0)
    run_ranks(saved_after_the_run, 2, str(tmp_path / "two"), 2)
    plain, two = (
        torch.load(tmp_path / name, weights_only=False)["optimizer_states"][0]["state"]
        for name in ("plain", "two")
    )
    assert plain[0]["mu_product"].dtype == torch.float32
    torch.testing.assert_close(two, plain, rtol=1e-10, atol=1e-10)


class Watches(models.Around):
    """Looks after the backward whether what the loss has saved still lives."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        output = self(x)
        self.output = weakref.ref(output)
        return nn.functional.mse_loss(output, y)

    def on_after_backward(self) -> None:
        self.is_held = self.output() is not None


def holds_the_loss_graph() -> bool:
    module = Watches()
    train(module, max_steps=1, devices=2, strategy=GPipeStrategy(2))
    return module.is_held


def test_no_stage_holds_the_losss_graph_in_its_backward() -> None:
    assert run_ranks(holds_the_loss_graph, 2) == [False, False]
