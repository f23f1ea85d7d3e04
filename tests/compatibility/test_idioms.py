"""What people write in their modules and callbacks."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
import torchmetrics
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from lightning_gpipe import GPipeStrategy
from tests import models
from tests.compatibility.rows import STAGES, Module, Refused, Row, Rows, Shown, check
from tests.compatibility.test_features import Manual
from tests.ranks import RankError, run_ranks
from tests.training import trainer


class Recurrence(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.cells = kind(models.WIDTH, models.WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.cells(x.unsqueeze(1))[0].squeeze(1)
        return output


class Recurrent(Module):
    def build(self) -> None:
        super().build()
        self.backbone = nn.Sequential(*(Recurrence(k) for k in (nn.LSTM, nn.GRU, nn.RNN, nn.LSTM)))


class Instances(Module):
    def build(self) -> None:
        super().build()
        norm = nn.InstanceNorm1d(2, track_running_stats=True)
        self.backbone.append(nn.Unflatten(1, (2, -1)))
        self.backbone.append(norm)
        self.backbone.append(nn.Flatten())


class Tracked(Module):
    """A metric of which there is a copy for each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.tracker = torchmetrics.MetricTracker(torchmetrics.MeanMetric(), maximize=False)

    def on_validation_epoch_start(self) -> None:
        self.tracker.increment()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.tracker.update(self.loss(*batch))

    def on_validation_epoch_end(self) -> None:
        best: Any = self.tracker.best_metric()
        self.log("best", best)


class Late(Module):
    """A metric that is made when the fit has begun."""

    def on_fit_start(self) -> None:
        self.late = torchmetrics.SumMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.late.update(loss.detach())
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("late", self.late.compute())
        self.late.reset()


class Keeper(L.Callback):
    """Keeps a metric."""

    def __init__(self) -> None:
        self.total = torchmetrics.SumMetric()

    def on_train_batch_end(self, run: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.total.update(outputs["loss"])

    def on_train_epoch_end(self, run: Any, module: Any) -> None:
        module.log("kept", self.total.compute())


class Cleared(Module):
    """Throws a gradient away, after one backward that is synchronized and one that isn't."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        self.manual_backward(self.loss(*batch))
        with optimizer.toggle_model(sync_grad=False):
            self.manual_backward(self.loss(*batch))
        optimizer.zero_grad()
        self.manual_backward(self.loss(*batch))
        optimizer.step()
        optimizer.zero_grad()


class Teacher(Module):
    """A copy of the backbone that follows it slowly."""

    def build(self) -> None:
        super().build()
        self.teacher = copy.deepcopy(self.backbone).requires_grad_(False)

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            pairs = zip(self.backbone.parameters(), self.teacher.parameters(), strict=True)
            for student, teacher in pairs:
                teacher.data.mul_(0.9).add_(student.data, alpha=0.1)


class Penalised(Module):
    """Adds an L2 term in place, which does nothing where a weight has no values."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        for parameter in self.parameters():
            loss += 1e-3 * parameter.square().sum()
        return loss


class Recorded(Module):
    """Takes a loss from what a hook has kept."""

    def build(self) -> None:
        super().build()
        self.__dict__["kept"] = kept = []
        self.backbone[0].register_forward_hook(lambda layer, args, output: kept.append(output))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.kept.clear()
        loss = super().training_step(batch, batch_idx)
        return loss + sum(output.square().mean() for output in self.kept)


class Cuts(Manual):
    """Clips as on one device."""

    def clip_gradients(self, *_: Any) -> None:  # type: ignore[override]
        self.log("norm", nn.utils.clip_grad_norm_(self.parameters(), 1e-3))


class CutsByParts(Manual):
    """Clips by PyTorch's functions, imported by name, the gradients that there are here."""

    def clip_gradients(self, *_: Any) -> None:  # type: ignore[override]
        there = [p for p in self.parameters() if p.grad is not None]
        norm = get_total_norm((p.grad for p in there if p.grad is not None), 1.0)
        clip_grads_with_norm_(there, 1e-3, norm)
        self.log("norm", norm)


class Dumps(Module):
    """Writes its weights by itself."""

    def on_train_epoch_end(self) -> None:
        self.state_dict()


def dumped(folder: Path) -> None:
    assert run_ranks(_dump, STAGES) == [1, 0]


def _dump() -> int:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = trainer(devices=STAGES, strategy=GPipeStrategy(3), max_epochs=2)
        run.fit(module := Dumps())
        run.test(module, verbose=False)
        module.state_dict()
    return sum("call trainer.save_checkpoint" in str(w.message) for w in caught)


class Clipping(torch.optim.SGD):
    """Clips by itself, as LAMB does."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.param_groups[0]["max_grad_norm"] = 1.0


class Clips(Module):
    def configure_optimizers(self) -> Any:
        return Clipping(self.parameters())


class Average(L.Callback):
    """An average of one's own."""

    copied: Any = None

    def on_train_start(self, run: Any, module: Any) -> None:
        self.copied = copy.deepcopy(module)

    def on_train_batch_end(self, run: Any, module: Any, *_: Any) -> None:
        with torch.no_grad():
            for old, new in zip(self.copied.parameters(), module.parameters(), strict=True):
                old.lerp_(new, 0.1)


def averaged(folder: Path) -> None:
    """The copies of all stages together are the whole average."""
    (plain,) = run_ranks(_average, 1, 0)
    stages = run_ranks(_average, STAGES, STAGES)
    for name, value in plain.items():
        found = [stage[name] for stage in stages if not stage[name].is_meta]
        assert found
        for one in found:
            torch.testing.assert_close(one, value, atol=1e-10, rtol=0)
    assert any(value.is_meta for value in stages[0].values())


def _average(stages: int) -> dict[str, Tensor]:
    torch.manual_seed(3)
    average, pipeline = Average(), {"strategy": GPipeStrategy(3, balance="params")}
    options = {"devices": stages, **pipeline} if stages else {"devices": 1}
    run = trainer(max_epochs=1, callbacks=[average], **options)
    run.fit(Module())
    return {name: p.detach() for name, p in average.copied.named_parameters()}


def by_itself(run: L.Trainer, module: Any, folder: Path) -> Any:
    """As scripts for DDP go on, on every rank."""
    path = folder / f"{run.global_rank}.pt"
    torch.save(module.state_dict(), path)
    with torch.no_grad():
        output = module.float().double()(torch.ones(2, models.WIDTH, dtype=torch.float64))
    return torch.load(path), output, module.backbone[0].weight.device.type


def saved_later(run: L.Trainer, module: Any, folder: Path) -> Any:
    """Another run may cut the module elsewhere."""
    run.validate(module, verbose=False)
    run.save_checkpoint(folder / "later.ckpt")
    run.strategy.barrier()
    return torch.load(folder / "later.ckpt", weights_only=False)["optimizer_states"]


class Moving:
    """A cost that makes every run cut the module elsewhere."""

    runs = 0

    def __call__(self, layer: nn.Module, value: Any) -> float:
        return 1.0 if isinstance(layer, nn.Tanh) == bool(self.runs) else 100.0


class Moved(Module):
    cost = Moving()

    def build(self) -> None:
        super().build()
        linear = [nn.Linear(models.WIDTH, models.WIDTH) for _ in range(4)]
        self.backbone = nn.Sequential(*linear, *(nn.Tanh() for _ in range(4)))
        self.cost.runs = 0

    def on_validation_start(self) -> None:
        self.cost.runs += self.trainer.state.fn == "validate"

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Seen(Module):
    def on_after_backward(self) -> None:
        self.__dict__.setdefault("seen", []).append(self.after.weight.grad is not None)


def accumulated(folder: Path) -> None:
    first, last = run_ranks(_fitted, STAGES, "Seen", {"accumulate_grad_batches": 2})
    assert first == [False, True] * 2
    assert last == [True, True] * 2


class Hooked(Module):
    def __init__(self) -> None:
        super().__init__()
        seen = self.__dict__.setdefault("seen", [])
        self.backbone.register_full_backward_hook(lambda *_: seen.append("backbone"))
        self.backbone[0].register_full_backward_hook(lambda *_: seen.append("layer"))


def hooked(folder: Path) -> None:
    first, last = run_ranks(_fitted, STAGES, "Hooked", {"limit_train_batches": 1})
    assert first == ["layer"] * 3
    assert last == []


class Raw(Module):
    """Adds up over all processes."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        ones = torch.ones(())
        dist.all_reduce(ones)
        self.__dict__["seen"] = [ones.item(), len(self.all_gather(ones).view(-1))]
        return super().training_step(batch, batch_idx)


def raw(folder: Path) -> None:
    assert run_ranks(_fitted, STAGES, "Raw", {}) == [[STAGES, 1]] * STAGES


def _fitted(name: str, options: Any) -> Any:
    module = globals()[name]()
    strategy = GPipeStrategy(3)
    trainer(devices=STAGES, strategy=strategy, max_epochs=1, **options).fit(module)
    return module.seen


class Halved(Module):
    def __init__(self, alone: bool) -> None:
        super().__init__()
        self.alone = alone

    def on_save_checkpoint(self, checkpoint: Any) -> None:
        state = checkpoint["state_dict"]
        if self.trainer.is_global_zero or not self.alone:
            checkpoint["state_dict"] = {name: t.cpu().half() for name, t in state.items()}


class Saves(L.Callback):
    """Saves while the model is cut."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_epoch_end(self, run: Any, module: Any) -> None:
        run.save_checkpoint(self.path)


def halved(folder: Path) -> None:
    with pytest.raises(RankError, match="and no values"):
        run_ranks(_save, STAGES, str(folder), False)
    run_ranks(_save, STAGES, str(folder), True)
    saved = torch.load(folder / "half.ckpt")["state_dict"]
    assert {t.dtype for t in saved.values()} == {torch.float16}
    assert not any(t.is_meta for t in saved.values())


def _save(folder: str, alone: bool) -> None:
    strategy, saves = GPipeStrategy(3), Saves(f"{folder}/half.ckpt")
    run = trainer(devices=STAGES, strategy=strategy, max_epochs=1, callbacks=[saves])
    run.fit(Halved(alone))


def sized(folder: Path) -> None:
    for size, replicas in run_ranks(_sizes, STAGES):
        assert (size, replicas) == (STAGES, 1)


def _sizes() -> tuple[int, int]:
    run = trainer(devices=STAGES, strategy=GPipeStrategy(3), max_steps=1)
    run.fit(Module())
    return run.world_size, run.strategy.replicas


ROWS: Rows = {
    "recurrent layers": Row(module=Recurrent),
    "InstanceNorm": Row(module=Instances),
    "MetricTracker": Row(module=Tracked),
    "metrics outside the module": Row(
        lambda folder: {"callbacks": [Keeper()]}, Late, per_micro_batch="reads a value of the step"
    ),
    "the module after the Trainer": Row(also=by_itself),
    "saving after another run": Row(
        module=Moved, also=saved_later, strategy={"balance": Moved.cost}
    ),
    "zero_grad between backwards": Row(module=Cleared, per_micro_batch="Manual optimization"),
    "copy.deepcopy(module)": Shown(averaged),
    "a teacher that follows the backbone": Refused(
        "has its name and shape, and no values", module=Teacher, strategy={"backbone": "backbone"}
    ),
    "an L2 term over all weights": Refused("use the optimizer's weight_decay", module=Penalised),
    "forward hooks of layers": Refused(
        "have different losses", module=Recorded, strategy={"balance": "params"}
    ),
    "torch.nn.utils.clip_grad_norm_": Row(module=Cuts, per_micro_batch="Manual optimization"),
    "torch.nn.utils.get_total_norm": Row(module=CutsByParts, per_micro_batch="Manual optimization"),
    "state_dict in a hook": Shown(dumped),
    "max_grad_norm of an optimizer": Refused("give it max_grad_norm=None", module=Clips),
    "gradients during accumulation": Shown(accumulated),
    "backward hooks of the backbone": Shown(hooked),
    "trainer.world_size": Shown(sized),
    "torch.distributed": Shown(raw),
    "values in on_save_checkpoint": Shown(halved),
}


@pytest.mark.parametrize("name", ROWS)
def test_row(name: str, tmp_path: Path) -> None:
    check(__name__, ROWS, name, tmp_path)
