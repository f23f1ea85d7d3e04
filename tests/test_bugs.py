"""Faults that were found by use: the symptom, and why it came about."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.utils import prune
from torch.utils._pytree import register_dataclass
from torch.utils.data import DataLoader

from lightning_gpipe import GPipeStrategy
from tests import models
from tests.models import WIDTH
from tests.ranks import RankError, run_ranks
from tests.training import train


class LargeInPlace(models.Module):
    """Weights differed from run to run: the output was changed while it was being broadcast."""

    def build(self) -> None:
        self.backbone = nn.Sequential(nn.Linear(WIDTH, 300), nn.Tanh(), nn.Linear(300, 300))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        x.add_(1)
        out = self.backbone(input=x.repeat(64, 1))  # the keyword was refused
        return out.mul_(3.0).square().mean()


class OutputHook(models.Module):
    """A hook on the output got None: other stages walked the graph behind the output."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        out = self.backbone(x)
        out.register_hook(lambda gradient: gradient * 0.5)
        return nn.functional.mse_loss(out, y)


class Norm(nn.Module):
    """Batch norm by the function, which moves its buffers without a trace."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("variance", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.batch_norm(x, self.mean, self.variance, training=self.training)


class FunctionalNorm(models.Module):
    """A recompute moved the statistics of custom norms again."""

    def build(self) -> None:
        self.backbone = nn.Sequential(nn.Linear(WIDTH, WIDTH), Norm(), nn.Linear(WIDTH, WIDTH))


class Switching(models.Module):
    """A recompute ran in the mode of the moment, not in that of its forward."""

    def build(self) -> None:
        self.backbone = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh())

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        out = self.backbone(x)
        self.backbone.eval()
        with torch.no_grad():
            target = self.backbone(x)
        return nn.functional.mse_loss(out, target + y)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.backbone.train()


class Renormalising(models.Module):
    """An embedding that renormalises in its forward was taken for an optimizer's step."""

    def build(self) -> None:
        embedding = nn.Embedding(5, WIDTH, max_norm=1.0)
        self.backbone = nn.Sequential(embedding, nn.Linear(WIDTH, WIDTH), nn.Tanh())

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.backbone((x[:, 0].abs() * 2).long() % 5), y)


class Position(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.linspace(0, 1, x.shape[1], device=x.device) * torch.tensor(0.1)


class DefaultType(models.Module):
    """A recompute made new tensors of another type than the forward."""

    def build(self) -> None:
        self.backbone = nn.Sequential(
            nn.Linear(WIDTH, WIDTH), Position(), nn.Linear(WIDTH, WIDTH), Position()
        )


class Mixed(nn.Module):
    def forward(self, value: Any) -> Any:
        mask, h = value if isinstance(value, tuple) else (value > 0, value)
        return mask, torch.where(mask, h * 2, h.sin())  # the mask's odd length comes first


class Inference(models.Module):
    """Parts of a message were not aligned where inference mode hid that they were views."""

    def build(self) -> None:
        self.backbone = nn.Sequential(Mixed(), Mixed(), Mixed(), nn.Identity())
        self.head = nn.Linear(WIDTH, WIDTH)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.inference_mode():
            h = self.backbone(x[:, :5])[1]
        return nn.functional.mse_loss(self.head(nn.functional.pad(h.clone(), (0, 1))), y)


class Scaled(nn.Module):
    """Gives a module of its own other parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        given = {name: 1.5 * p for name, p in self.linear.named_parameters()}
        return torch.func.functional_call(self.linear, given, (x,))


class SubstitutedInside(models.Module):
    """May give other modules what it likes: the teacher, and what a layer has."""

    def build(self) -> None:
        self.backbone = nn.Sequential(Scaled(), nn.Tanh(), Scaled(), nn.Tanh())
        self.head = nn.Linear(WIDTH, WIDTH)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        own = dict(self.backbone.named_parameters())
        out = torch.func.functional_call(self.backbone, own, (x,))
        given = {name: 0.5 * p for name, p in self.head.named_parameters()}
        return nn.functional.mse_loss(torch.func.functional_call(self.head, given, (out,)), y)


def weights(kind: type[models.Module], state: Any, stages: int, mode: str) -> dict[str, Tensor]:
    module = kind("sgd")
    module.load_state_dict(state)
    strategy = GPipeStrategy(4 if kind is not Switching else 1, checkpoint=mode)  # type: ignore[arg-type]
    precision = "64-true" if kind is DefaultType else None
    return train(module, max_steps=6, devices=stages, strategy=strategy, precision=precision)


@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize(
    "kind",
    [
        SubstitutedInside,
        LargeInPlace,
        OutputHook,
        FunctionalNorm,
        Switching,
        Renormalising,
        DefaultType,
        Inference,
    ],
)
def test_equal_to_a_plain_trainer_or_between_modes(kind: type[models.Module], stages: int) -> None:
    torch.manual_seed(0)
    module = kind("sgd")
    initial = copy.deepcopy(module.state_dict())
    if kind is FunctionalNorm:  # sees micro-batches: compare the modes
        expected = run_ranks(weights, 1, kind, initial, 1, "never")[0]
    else:
        precision = "64-true" if kind is DefaultType else None
        expected = train(module, max_steps=6, devices=1, precision=precision)
    for mode in ("always", "except_last", "never"):
        state = run_ranks(weights, stages, kind, initial, stages, mode)[0]
        torch.testing.assert_close(state, expected, rtol=0, atol=1e-10)


class ChangedInput(models.Module):
    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        loss = nn.functional.mse_loss(self.backbone(x), y)
        x.zero_()
        return loss


class SharedCounter(models.Module):
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.count.add_(1)
            return x

    def build(self) -> None:
        counting = self.Counting()
        self.backbone = nn.Sequential(counting, nn.Linear(WIDTH, WIDTH), nn.Tanh(), counting)


class Penalty(models.Module):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        self.manual_backward(self.loss(*batch), create_graph=True)


class OneValue(models.Module):
    """A value per micro-batch was taken for a value per sample."""

    class Aux(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return x, x.square().mean().reshape(1)

    def build(self) -> None:
        self.backbone = nn.Sequential(nn.Linear(WIDTH, WIDTH), self.Aux())

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        out, extra = self.backbone(x)
        return nn.functional.mse_loss(out, y) + extra.sum()


class Metadata(models.Module):
    """An error that spoke of metadata was taken for one about the meta device."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        raise RuntimeError("bad metadata in the file")


class LayerByLayer(models.Module):
    """Nothing was cut, without a word, where the step never called the backbone."""

    def forward(self, x: Tensor) -> Tensor:
        for i in range(len(self.backbone)):
            x = self.backbone.get_submodule(str(i))(x)
        return x


class Keeping(models.Module):
    """A split backward added the gradients that tensors of a layer keep twice."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
            self.kept: list[Tensor] = []

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.first(x)
            if hidden.requires_grad:
                hidden.retain_grad()
                self.kept.append(hidden)
            return self.second(hidden.tanh())  # type: ignore[no-any-return]

    def build(self) -> None:
        self.found: dict[str, list[Tensor | None]] = {}
        self.backbone = nn.Sequential(nn.Linear(WIDTH, WIDTH), self.Layer(), self.Layer())

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for name, layer in self.backbone.named_children():
            if getattr(layer, "kept", None):
                self.found[name] = [hidden.grad for hidden in layer.kept]


def kept(schedule: str) -> dict[str, Any]:
    torch.manual_seed(0)
    module = Keeping("sgd")
    options: dict[str, Any] = {"step": "micro-batch", "schedule": schedule}
    strategy = GPipeStrategy(4, checkpoint="never", **options)
    train(module, max_steps=1, devices=2, strategy=strategy)
    return module.found


def test_gradients_that_layers_keep_are_the_same_for_every_schedule() -> None:
    expected, found = (run_ranks(kept, 2, name) for name in ("fill_drain", "searched"))
    assert sum(map(len, expected)) == 2
    torch.testing.assert_close(found, expected)


class Conditioned(models.Module):
    """Sets a tensor with a graph on a layer: torch's error didn't say what was wrong."""

    class Layer(nn.Linear):
        scale: Tensor | float = 1.0

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.scale

    def build(self) -> None:
        self.backbone = nn.Sequential(self.Layer(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.condition = nn.Parameter(torch.ones(WIDTH))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        self.backbone[0].scale = self.condition.exp()
        return nn.functional.mse_loss(self.backbone(x), y)


class Substituted(models.Module):
    """Calls the backbone with other parameters: stages ran it with their own, silently."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        given = {name: 1.5 * p for name, p in self.backbone.named_parameters()}
        return nn.functional.mse_loss(torch.func.functional_call(self.backbone, given, (x,)), y)


class SubstitutedInAll(Substituted):
    """The same, of the module."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        given = {name: 1.5 * p for name, p in self.named_parameters()}
        return nn.functional.mse_loss(torch.func.functional_call(self, given, (x,)), y)


class Transformed(models.Module):
    """Calls the backbone sample by sample."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(torch.vmap(self.backbone)(x), y)


class Tangent(models.Module):
    """Uses a directional derivative, if there is one."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        with forward_ad.dual_level():
            dual = self.backbone(forward_ad.make_dual(x, torch.ones_like(x)))
            out, tangent = forward_ad.unpack_dual(dual)
        loss = nn.functional.mse_loss(out, y)
        return loss if tangent is None else loss + tangent.square().mean()


def run(kind: type[models.Module]) -> None:
    strategy = GPipeStrategy(4, checkpoint="always")
    train(kind(), max_steps=4, devices=2, strategy=strategy)


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        (Conditioned, "sets on a layer: hand it to the backbone with its input"),
        (Substituted, "functional_call gives the backbone other parameters"),
        (SubstitutedInAll, "functional_call gives the backbone other parameters"),
        (Transformed, "inside a function transform"),
        (Tangent, "inside a function transform"),
        (ChangedInput, "input was changed in place"),
        (SharedCounter, "The buffer backbone.0.count is used by layers of several stages"),
        (Penalty, "create_graph=True"),
        (OneValue, "no batch dimension and differs"),
        (LayerByLayer, "call the backbone as a whole"),
        (Metadata, "RuntimeError: bad metadata in the file"),
    ],
)
def test_refused(kind: type[models.Module], problem: str) -> None:
    with pytest.raises(RankError, match=problem):
        run_ranks(run, 2, kind, timeout_s=30)


class Full(L.Callback):
    def on_train_batch_end(self, run: L.Trainer, *_: Any) -> None:
        if run.global_step == 2 and run.global_rank == 0:
            raise OSError("the disk is full")


def fail_with_a_checkpoint(folder: str) -> None:
    callbacks = [Full(), OnExceptionCheckpoint(folder)]
    strategy = GPipeStrategy(4)
    options: dict[str, Any] = {"enable_checkpointing": True, "callbacks": callbacks}
    train(models.Module(), max_steps=4, devices=2, strategy=strategy, **options)


def test_a_checkpoint_on_an_exception_does_not_hang(tmp_path: Any) -> None:
    """Gathering the weights waited for stages that had failed, and the error was never seen."""
    with pytest.raises(RankError, match="the disk is full"):
        run_ranks(fail_with_a_checkpoint, 2, str(tmp_path), timeout_s=30)
    assert not list(tmp_path.iterdir())


class Edges(nn.Module):
    """Adds up neighbours, as layers for graphs do."""

    def forward(self, x: Tensor) -> Tensor:
        return x + x[torch.full((len(x),), 7)]


def test_indices_of_the_mini_batch_are_explained() -> None:
    module = models.Module()
    module.backbone.append(Edges())
    batches = DataLoader(module.train_dataloader().dataset, batch_size=8)
    with pytest.raises(IndexError) as found:
        train(module, batches, devices=1, strategy=GPipeStrategy(4), max_steps=1)
    assert "indices of rows of the mini-batch" in "".join(found.value.__notes__)


class SparseTable(models.Module):
    """Clipping by the norm failed: that of a sparse gradient can't be of another type."""

    def build(self) -> None:
        table = nn.Embedding(5, WIDTH, sparse=True)
        self.backbone = nn.Sequential(table, nn.Linear(WIDTH, WIDTH), nn.Tanh())

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.backbone((x[:, 0].abs() * 2).long() % 5), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def clipped(state: Any, stages: int) -> dict[str, Tensor]:
    module = SparseTable()
    module.load_state_dict(state)
    strategy = GPipeStrategy(2)
    return train(module, max_steps=3, devices=stages, strategy=strategy, gradient_clip_val=0.01)


@pytest.mark.parametrize("stages", [1, 2])
def test_sparse_gradients_in_the_backbone_are_clipped(stages: int) -> None:
    module = SparseTable()
    initial = copy.deepcopy(module.state_dict())
    module.backbone[0].sparse = False  # old versions of PyTorch can't clip such gradients
    expected = train(module, max_steps=3, devices=1, gradient_clip_val=0.01)
    state = run_ranks(clipped, stages, initial, stages)[0]
    torch.testing.assert_close(state, expected, rtol=0, atol=1e-10)


class HookedWeights(models.Module):
    """A weight that a hook computes before each forward kept the graph of those to be moved."""

    def build(self) -> None:
        super().build()
        self.double()
        nn.utils.weight_norm(self.backbone[0])
        prune.l1_unstructured(self.backbone[2], "weight", 0.4)


def hooked(state: Any, stages: int) -> tuple[dict[str, Tensor], Tensor]:
    module = HookedWeights()
    module.load_state_dict(state)
    for _ in range(2):
        strategy: Any = GPipeStrategy(2) if stages else "auto"
        train(module, max_steps=3, devices=stages or 1, strategy=strategy)
    out = module(torch.ones(1, WIDTH, dtype=torch.float64))
    return module.state_dict(), out.detach()


@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_weights_that_hooks_compute_are_moved(stages: int) -> None:
    initial = copy.deepcopy(HookedWeights().state_dict())
    expected = hooked(initial, 0)
    for found in run_ranks(hooked, stages, initial, stages):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


class Annealing(models.Module):
    """Other ranks had the first number, after the run and in the next one, whose cut differs."""

    class Layer(nn.Linear):
        scale = 1.0
        is_used = False

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                self.scale = max(0.1, self.scale * 0.9)
                self.is_used = True
            return super().forward(x) * self.scale

    class Extra(nn.Linear):
        def __init__(self) -> None:
            super().__init__(WIDTH, WIDTH)
            self.seen = {"calls": 0}

        def forward(self, x: Tensor) -> Tensor:
            self.seen["calls"] += self.training
            return super().forward(x) / (1 + self.seen["calls"])

        def get_extra_state(self) -> Any:
            return dict(self.seen)

        def set_extra_state(self, state: Any) -> None:
            self.seen = dict(state)

    def build(self) -> None:
        layers = (self.Layer(WIDTH, WIDTH), self.Extra(), self.Layer(WIDTH, WIDTH), self.Extra())
        self.backbone = nn.Sequential(*layers)


def annealed(state: Any, stages: int) -> tuple[Tensor, list[Any], dict[str, Any]]:
    torch.manual_seed(0)
    module = Annealing("sgd")
    module.load_state_dict(state)
    for balance in ([1, 3], [3, 1]):
        options: dict[str, Any] = {}
        if stages:
            options["strategy"] = GPipeStrategy(1, balance=balance if stages > 1 else [4])
        train(module, max_steps=3, devices=stages or 1, **options)
    module.eval()
    out = module.backbone(torch.ones(2, WIDTH, dtype=torch.float64))
    kept = [(vars(m).get("scale"), vars(m).get("is_used")) for m in module.backbone]
    return out.detach(), kept, module.state_dict()


@pytest.mark.parametrize("stages", [1, 2])
def test_what_layers_keep_outlives_a_run_on_every_rank(stages: int) -> None:
    torch.manual_seed(0)
    initial = copy.deepcopy(Annealing("sgd").state_dict())
    expected = annealed(initial, 0)
    assert expected[1][0] == (pytest.approx(0.9**6), True)
    for found in run_ranks(annealed, stages, initial, stages):
        torch.testing.assert_close(found[0], expected[0], rtol=0, atol=1e-10)
        assert found[1] == expected[1]
        torch.testing.assert_close(found[2], expected[2], rtol=0, atol=1e-10)


class ClipsEveryBatch(models.Around):
    """Of what is outside the backbone the norm was that of the first stage's part."""

    def build(self) -> None:
        super().build()
        self.norms: list[Tensor] = []

    def on_after_backward(self) -> None:
        parameters = list(self.parameters())
        strategy = self.trainer.strategy
        self.norms.append(nn.utils.clip_grad_norm_(parameters[2:], 0.02))
        self.clip_gradients(self.trainer.optimizers[0], 0.01, "norm")
        if isinstance(strategy, GPipeStrategy):
            self.norms.append(strategy.grad_norm(parameters))
        else:
            gradients = [p.grad for p in parameters if p.grad is not None]
            self.norms.append(nn.utils.get_total_norm(gradients))

    def configure_gradient_clipping(self, *_: Any, **__: Any) -> None:
        pass


def clipped_every_batch(
    state: Any, stages: int, step: str
) -> tuple[dict[str, Tensor], list[Tensor]]:
    module = ClipsEveryBatch("sgd")
    module.load_state_dict(state)
    options: dict[str, Any] = {"max_steps": 3, "accumulate_grad_batches": 3}
    if stages:
        options["strategy"] = GPipeStrategy(2, step=step)  # type: ignore[arg-type]
    return train(module, devices=stages or 1, **options), module.norms


@pytest.mark.parametrize(
    ("stages", "step"), [(2, "mini-batch"), (3, "mini-batch"), (3, "micro-batch")]
)
def test_norms_between_accumulated_batches_are_the_whole_models(stages: int, step: str) -> None:
    torch.manual_seed(0)
    initial = copy.deepcopy(ClipsEveryBatch("sgd").state_dict())
    expected = clipped_every_batch(initial, 0, step)
    found = run_ranks(clipped_every_batch, stages, initial, stages, step)
    torch.testing.assert_close(found[0], expected, rtol=0, atol=1e-10)
    for _, norms in found[1:]:
        torch.testing.assert_close(norms, found[0][1], rtol=0, atol=0)


@dataclass
class Hidden:
    """What goes from layer to layer."""

    state: Tensor
    total: Tensor


register_dataclass(Hidden)


class Adds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Hidden) -> Hidden:
        state = self.layer(hidden.state).tanh()
        return Hidden(state, hidden.total + state.square().mean(1))


class OfDataclasses(models.Module):
    """What stood before the backbone was believed to stand behind it: its tensors weren't found."""

    def build(self) -> None:
        self.before = nn.Linear(WIDTH, WIDTH)
        self.backbone = nn.Sequential(*(Adds() for _ in range(4)))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.backbone(Hidden(self.before(x), x.new_zeros(len(x))))
        return (hidden.state - y).square().mean() + hidden.total.mean()


class BeginsInPlace(models.Module):
    """The package's own look at the input passed for a use of it behind the backbone."""

    def build(self) -> None:
        layers = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
        self.backbone = nn.Sequential(nn.LeakyReLU(inplace=True), *layers)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.backbone(x * 1.0) - y).square().mean()


def by_micro_batches(kind: type[models.Module], stages: int) -> dict[str, Tensor]:
    torch.manual_seed(3)
    strategy: Any = GPipeStrategy(chunks=2, step="micro-batch") if stages else "auto"
    return train(kind(), max_steps=3, devices=max(stages, 1), strategy=strategy)


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("kind", [OfDataclasses, BeginsInPlace])
def test_inputs_of_the_backbone_in_micro_batches(kind: type[models.Module], stages: int) -> None:
    found = run_ranks(by_micro_batches, stages, kind, stages)[0]
    torch.testing.assert_close(found, run_ranks(by_micro_batches, 1, kind, 0)[0])
