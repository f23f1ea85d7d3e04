"""What a step holds outside the backbone is planned, and looking at it leaves no trace."""

from __future__ import annotations

import functools
import threading
import weakref
from typing import Any

import lightning as L
import pytest
import torch
import torchmetrics
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_gpipe import GPipeStrategy
from lightning_gpipe.plan.plans import Plan
from tests.expected_memory import Watch
from tests.ranks import run_ranks
from tests.training import train, trainer

SAMPLES, WIDTH, CLASSES = 16, 8, 500
UNKNOWN = "Not counted: what the step computes outside the backbone."


class Meter:
    """Keeps a mean, as many a user's own class does."""

    def __init__(self) -> None:
        self.count, self.values = 0, list[Tensor]()

    def update(self, value: Tensor) -> None:
        self.count += 1
        self.values.append(value.detach())
        self.last = value.detach()


class Watched(L.LightningModule):
    """A head with many classes, and objects that note what they see."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding = nn.Linear(4, WIDTH)
        self.backbone = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
        self.head = nn.Linear(WIDTH, CLASSES)
        self.meters = {"loss": [Meter()]}
        self.gone = [weakref.proxy(Meter())]
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(CLASSES)
        self.seen = 0

    def step(self, batch: Any) -> Tensor:
        hidden = nn.functional.dropout(self.embedding(batch[0]), 0.1)
        logits = self.head(self.backbone(hidden))
        self.accuracy.update(logits.detach(), batch[1])
        return nn.functional.cross_entropy(logits, batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen += 1
        loss = self.step(batch)
        print("a loss")
        self.meters["loss"][0].update(loss)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(2)
        x = torch.randn(2 * SAMPLES, 4, generator=generator)
        return DataLoader(TensorDataset(x, torch.arange(2 * SAMPLES)), SAMPLES)


class Functional(Watched):
    """The head has no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Identity()

    def step(self, batch: Any) -> Tensor:
        hidden = self.backbone(self.embedding(batch[0]))
        return nn.functional.linear(hidden, self.embedding.weight.T).square().mean()


class ReadsLoss(Watched):
    def step(self, batch: Any) -> Tensor:
        loss = super().step(batch)
        return loss if loss.item() < 100 else loss / 2


class CallsTwice(Watched):
    def step(self, batch: Any) -> Tensor:
        return super().step(batch) + self.backbone(self.embedding(batch[0])).square().mean()


class AsksTrainer(Watched):
    def step(self, batch: Any) -> Tensor:
        return super().step(batch) * (1 + 0 * self.trainer.current_epoch)


class Manual(Watched):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.step(batch)
        raise AssertionError(f"ran on {loss}")


class Adversarial(Manual):
    """Steps one optimizer before it calls the backbone, and toggles both as users do."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        first, second = self.optimizers()
        with self.toggled_optimizer(first), first.toggle_model():
            assert first.param_groups[0]["lr"] == 0.5
            first.zero_grad()
            self.manual_backward(self.head.weight.square().mean())
            self.clip_gradients(first, 1.0)
            first.step()
        self.lr_schedulers()[0].step()
        self.toggle_optimizer(second)
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        rest = [*self.backbone.parameters(), *self.embedding.parameters()]
        sgd = torch.optim.SGD(self.head.parameters(), lr=0.5, momentum=0.9)
        return [sgd, torch.optim.Adam(rest)]


class AsksOptimizer(Manual):
    """Asks for the only optimizer."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.optimizers().zero_grad()
        return super().training_step(batch, batch_idx)


def plan(
    module: L.LightningModule,
    step: Any = "mini-batch",
    stages: int = 2,
    devices: int = 2,
    device: str = "cpu",
    checkpoint: Any = "always",
    **options: Any,
) -> Plan:
    batch = next(iter(module.train_dataloader()))
    strategy = GPipeStrategy(4, step=step)
    (found,) = (
        trainer(strategy=strategy, devices=devices, **options)
        .strategy.plan(
            *(module, batch),
            devices=devices,
            stages=[stages],
            virtual_stages=[1],
            checkpoint=[checkpoint],
            device=device,
        )
        .all
    )
    return found


#: Others plan for the CPU where there is no GPU, with a warning.
CAN_PLAN = torch.__version__ >= "2.10" and torch.backends.cuda.is_built()
GPUS = pytest.param(
    "cuda", marks=pytest.mark.skipif(not CAN_PLAN, reason="PyTorch plans for the CPU instead")
)


@pytest.mark.parametrize("device", [GPUS])
def test_autocast_is_the_trainers_for_other_devices(device: str) -> None:
    def held(device: str, precision: Any, checkpoint: Any) -> int:
        found = plan(Watched(), device=device, checkpoint=checkpoint, precision=precision)
        return found.stages[0].memory.of_micro_batches

    whole = held(device, None, "never")
    for checkpoint in "always", "never":
        half = held(device, "bf16-mixed", checkpoint)
        assert half != whole
        assert half == pytest.approx(held("cpu", "bf16-mixed", checkpoint), rel=1e-3)
    assert not torch.is_autocast_enabled("cpu")
    assert not torch.is_autocast_enabled("cuda")


@pytest.mark.parametrize("device", ["cpu", GPUS])
def test_logits_are_counted(device: str) -> None:
    """Of the mini-batch on all stages; of a micro-batch on the last."""
    logits = SAMPLES * CLASSES * 4
    found = plan(Watched(), device=device)
    assert found.counts_step
    assert UNKNOWN not in str(found)
    first, last = (stage.memory.of_micro_batches for stage in found.stages)
    assert 2 * logits < first < 2.3 * logits  # and their logarithms
    assert 3 * logits < last < 3.3 * logits  # and their gradients
    first, last = (
        stage.memory.of_micro_batches
        for stage in plan(Watched(), "micro-batch", device=device).stages
    )
    assert first < 0.3 * logits
    assert 3 / 4 * logits < last < 4 / 4 * logits


def test_a_weight_that_the_step_uses_on_both_sides_is_held_there() -> None:
    module = Functional()
    found = plan(module, "micro-batch")
    layers = [[module.backbone[i] for i in stage.layers[0]] for stage in found.stages]
    held = [sum(p.nbytes for layer in each for p in layer.parameters()) for each in layers]
    weight, bias = module.embedding.weight.nbytes, module.embedding.bias.nbytes
    found_weights = [stage.memory.weights for stage in found.stages]
    assert found_weights == [held[0] + weight + bias, held[1] + weight]


class Spare(Watched):
    """Holds a layer and a table that no step uses, and shares a weight with the backbone."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(WIDTH, 100)
        self.register_buffer("table", torch.ones(1000))
        self.register_buffer("scale", torch.ones(4))
        # whose backwards use weights that stand before the call
        self.between, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.between.weight = self.backbone[3].weight

    def step(self, batch: Any) -> Tensor:
        hidden = self.between(self.norm(self.embedding(batch[0] * self.scale)))
        return self.head(self.backbone(hidden)).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


def kept_in_run(step: Any) -> tuple[int, int]:
    watch, strategy = Watch(), GPipeStrategy(4, stages=3, step=step)
    train(Spare(), max_epochs=1, devices=3, strategy=strategy, callbacks=[watch])
    return watch.kept


@pytest.mark.parametrize("step", ["mini-batch", "micro-batch"])
def test_what_no_step_uses_is_held_everywhere(step: Any) -> None:
    """As buffers and weights that layers have, too, are; the rest where it is needed."""
    found = [s.memory for s in plan(Spare(), step, stages=3, devices=3).stages]
    planned = [(m.weights + m.gradients, m.optimizer) for m in found]
    assert planned == run_ranks(kept_in_run, 3, step)


@pytest.mark.parametrize(
    "kind", [ReadsLoss, CallsTwice, AsksTrainer, Manual, Adversarial, AsksOptimizer]
)
def test_a_step_that_needs_more_is_planned_without(kind: type[Watched]) -> None:
    found = plan(kind())
    assert not found.counts_step
    assert UNKNOWN in str(found)
    assert max(stage.memory.of_micro_batches for stage in found.stages) < SAMPLES * CLASSES * 4


def test_optimizers_of_a_planned_step_step_nothing() -> None:
    module = Adversarial()
    before = [p.clone() for p in module.parameters()]
    module.head.weight.grad = gradient = torch.ones_like(module.head.weight)
    plan(module)
    assert all(map(torch.equal, module.parameters(), before))
    assert module.head.weight.grad is gradient
    assert "optimizers" not in vars(module)


def facts(module: Watched) -> Any:
    meter = module.meters["loss"][0]
    values = [float(each) for each in meter.values]
    state = {name: torch.as_tensor(s).tolist() for name, s in module.accuracy.metric_state.items()}
    return module.seen, meter.count, values, set(vars(meter)), state


def test_objects_of_the_module_stay_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    module = Watched()
    before = facts(module)
    assert plan(module).counts_step
    assert facts(module) == before
    assert "a loss" not in capsys.readouterr().out


@functools.lru_cache
def table(width: int, device: torch.device) -> Tensor:
    return torch.linspace(0.5, 1, width, device=device)


TABLES: dict[torch.device, Tensor] = {}


class ReadsTables(nn.Module):
    """A layer with tables that nobody holds."""

    def forward(self, x: Tensor) -> Tensor:
        if x.device not in TABLES:
            TABLES[x.device] = torch.linspace(1, 2, WIDTH, device=x.device)
        return x * table(WIDTH, x.device) * TABLES[x.device]


class Tables(Watched):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(*(nn.Linear(WIDTH, WIDTH), ReadsTables(), nn.Tanh()))

    def step(self, batch: Any) -> Tensor:
        logits = self.head(self.backbone(self.embedding(batch[0])))
        loss = nn.functional.cross_entropy(logits, batch[1])
        return loss + table(CLASSES, loss.device).sum() * self.head.weight.square().mean()


def forget_tables() -> None:
    table.cache_clear()
    TABLES.clear()


@pytest.mark.parametrize("step", ["mini-batch", "micro-batch"])
def test_tables_in_caches_have_values(step: Any) -> None:
    """After a plan, in a run, and in a run of a plain Trainer after a plan."""
    states = []
    for order in ("plain", "pipeline", "plan and plain", "plan and pipeline"):
        forget_tables()
        module = Tables()
        module.double()
        if "plan" in order.split():
            assert plan(module, step, stages=1).counts_step
            assert not TABLES
        strategy = "auto" if "plain" in order else GPipeStrategy(1, step=step)
        x, y = module.train_dataloader().dataset.tensors
        data = DataLoader(TensorDataset(x.double(), y), SAMPLES)
        torch.manual_seed(3)
        states.append(train(module, data, devices=1, max_epochs=1, strategy=strategy))
    for state in states:
        torch.testing.assert_close(state, states[0], rtol=0, atol=1e-10)


class Cached(nn.Module):
    """A layer that keeps a table where nobody looks."""

    def forward(self, x: Tensor) -> Tensor:
        return x * HIDDEN(x)


def hidden_table() -> Any:
    kept = threading.local()

    def read(x: Tensor) -> Tensor:
        if not hasattr(kept, x.device.type):
            setattr(kept, x.device.type, torch.ones(WIDTH, device=x.device))
        table: Tensor = getattr(kept, x.device.type)
        return table

    return read


HIDDEN = hidden_table()


@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.parametrize("step", ["mini-batch", "micro-batch"])
def test_an_output_without_values_is_refused(step: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "HIDDEN", hidden_table())
    module = Watched()
    module.backbone = nn.Sequential(nn.Linear(WIDTH, WIDTH), Cached(), nn.Tanh())
    with pytest.raises(RuntimeError, match="of the backbone has no values"):
        train(module, devices=1, max_epochs=1, strategy=GPipeStrategy(4, step=step))


class CachedBehind(Watched):
    def step(self, batch: Any) -> Tensor:
        hidden = self.backbone(self.embedding(batch[0]))
        return (hidden * HIDDEN(hidden)).square().mean()


@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.parametrize("step", ["mini-batch", "micro-batch"])
def test_a_loss_without_values_is_refused(step: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "HIDDEN", hidden_table())
    module = CachedBehind()
    assert plan(module, step).counts_step
    with pytest.raises(RuntimeError, match="The loss has no values"):
        train(module, devices=1, max_epochs=1, strategy=GPipeStrategy(4, step=step))


class OwnBatch:
    """A batch that is no list or dict."""

    def __init__(self) -> None:
        self.x, self.y = torch.ones(SAMPLES, 4), torch.arange(SAMPLES)


class ChangesBatch(Watched):
    def step(self, batch: Any) -> Tensor:
        batch.y = batch.y + 1
        batch.x = batch.x * 2
        return super().step((batch.x, batch.y))


def test_a_batch_stays_as_it_is() -> None:
    batch = OwnBatch()
    GPipeStrategy(4).plan(ChangesBatch(), batch, devices=2, stages=[2])
    assert torch.equal(batch.x, torch.ones(SAMPLES, 4))
    assert torch.equal(batch.y, torch.arange(SAMPLES))


class ChangesShadow(Watched):
    """Changes a tensor in place that only a dict holds."""

    def __init__(self) -> None:
        super().__init__()
        self.shadow = {"a": torch.ones(WIDTH)}

    def step(self, batch: Any) -> Tensor:
        loss = super().step(batch)
        self.shadow["a"].mul_(0.9)
        return loss


def test_tensors_in_containers_stay_as_they_are() -> None:
    module = ChangesShadow()
    assert not plan(module).counts_step
    assert torch.equal(module.shadow["a"], torch.ones(WIDTH))
