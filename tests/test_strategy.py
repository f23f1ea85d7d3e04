"""Arguments, refusals and what the strategy prints."""

from __future__ import annotations

import importlib
import re
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

import lightning_gpipe
from lightning_gpipe import GPipeStrategy
from lightning_gpipe.strategy.world import Layout
from tests import models
from tests.ranks import RankError, run_ranks
from tests.scripts import run as run_script
from tests.training import train


def test_registered_under_its_name() -> None:
    strategy = L.Trainer(accelerator="cpu", devices=1, strategy="gpipe", logger=False).strategy
    assert isinstance(strategy, GPipeStrategy)
    assert (strategy.stages, strategy.chunks, strategy.replicas, strategy.is_distributed) == (
        1,
        4,
        1,
        False,
    )
    importlib.reload(lightning_gpipe)  # a second import registers nothing twice


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"chunks": 0}, "chunks must be 'auto' or a whole number from 1, got chunks=0"),
        ({"chunks": 2.5}, "chunks must be"),
        ({"chunks": True}, "chunks must be"),
        ({"stages": -1}, "stages must be"),
        ({"checkpoint": "sometimes"}, "checkpoint must be one of 'always', 'except_last', 'never'"),
        ({"balance": "size"}, "balance must be one of 'flops', 'params'"),
        ({"balance": []}, "at least one layer"),
        ({"balance": [2, 0]}, "at least one layer"),
        ({"balance": 3}, "balance must be"),
        ({"start_method": "thread"}, "start_method must be one of .auto.*popen.*fork"),
        ({"timeout": 1800}, r"timeout must be a datetime.timedelta .* got timeout=1800\."),
        ({"timeout": timedelta(0)}, "timeout must be a datetime.timedelta above zero"),
        ({"timeout": timedelta.max}, "at most 36500 days"),
        ({"backbone": ""}, "backbone must be None or the dotted name of a submodule"),
        ({"backbone": nn.Sequential(nn.Tanh())}, "dotted name of a .*, got a Sequential\\."),
        ({"deferred_batch_norm": "False"}, "deferred_batch_norm must be True or False, got .*'Fal"),
        ({"shard_optimizer_state": None}, "shard_optimizer_state must be True or False"),
        ({"save_distributed_checkpoint": "no"}, "save_distributed_checkpoint must be True or"),
        ({"broadcast_buffers": "no"}, "broadcast_buffers must be True or False"),
        ({"gradient_as_bucket_view": "no"}, "gradient_as_bucket_view must be True or False"),
        ({"bucket_cap_mb": "25"}, "bucket_cap_mb must be None or a number of MiB, got .*'25'"),
        ({"bucket_cap_mb": -1}, "bucket_cap_mb must be None or a number of MiB"),
        ({"bucket_cap_mb": 10**30}, "bucket_cap_mb must be None or a number of MiB"),
        ({"ddp_comm_hook": "fp16"}, "ddp_comm_hook must be None or a function, got .*'fp16'"),
        ({"ddp_comm_wrapper": 1}, "ddp_comm_wrapper must be None or a function"),
        ({"process_group_backend": 1}, "process_group_backend must be None or .*name.*=1"),
        ({"process_group_backend": ""}, "process_group_backend must be None or .*name"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        GPipeStrategy(**arguments)


def test_unknown_arguments() -> None:
    with pytest.raises(TypeError, match="micro_batches"):
        GPipeStrategy(micro_batches=3)  # type: ignore[call-arg]


class Adrift(models.Module):
    """No nn.Sequential at all."""

    def build(self) -> None:
        self.backbone = nn.Linear(6, 6)


class Two(models.Module):
    """Two candidates."""

    def build(self) -> None:
        self.features = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        self.classifier = nn.Sequential(nn.Linear(6, 30), nn.Tanh(), nn.Linear(30, 6))

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x))


class Lbfgs(models.Module):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class Prodigy(torch.optim.SGD):
    """Stands in for the optimizer of this name, which isn't installed."""


class Whole(models.Module):
    def configure_optimizers(self) -> Any:
        return Prodigy(self.parameters(), lr=1.0)


class CompiledWhole(models.Module):
    def build(self) -> None:
        super().build()
        self.backbone.compile(backend="eager")


class CompiledWrapped(models.Module):
    def build(self) -> None:
        super().build()
        self.backbone = torch.compile(self.backbone, backend="eager")


class CompiledLayers(models.Module):
    def build(self) -> None:
        super().build()
        layers = [torch.compile(layer, backend="eager") for layer in self.backbone]
        self.backbone = nn.Sequential(*layers)


class Penalty(models.Module):
    """An L1 term over weights that other stages hold."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return sum((p.abs().sum() for p in self.parameters()), super().loss(x, y))


class LayerByLayer(models.Module):
    def forward(self, x: Tensor) -> Tensor:
        self.backbone(x)
        for i in range(len(self.backbone)):
            x = self.backbone.get_submodule(str(i))(x)
        return x


class Direct(models.Module):
    """Manual optimization that goes around the strategy."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        self.loss(*batch).backward()


class Stepping(Direct):
    """An optimizer step between forward and backward."""

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        loss = self.loss(*batch)
        with torch.no_grad():
            for p in self.parameters():
                p.add_(1)
        self.manual_backward(loss)


class Lazy(models.Module):
    def build(self) -> None:
        self.backbone = nn.Sequential(nn.LazyLinear(6), nn.Tanh())


def refused(
    kind: type[models.Module], stages: int, arguments: dict[str, Any], options: dict[str, Any]
) -> str:
    try:
        train(
            kind(), devices=stages, max_steps=2, strategy=GPipeStrategy(2, **arguments), **options
        )
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


@pytest.mark.parametrize(
    ("kind", "arguments", "options", "problem"),
    [
        (Adrift, {}, {}, "has no backbone"),
        (Two, {}, {}, "'classifier': 90% of the parameters"),
        (
            Two,
            {"backbone": "classify"},
            {},
            "no such submodule. Its nn.Sequential: 'features', 'classifier'",
        ),
        (models.Around, {"backbone": "before"}, {}, "must be an nn.Sequential.* an nn.ModuleList"),
        (models.Module, {"balance": [1, 2]}, {}, "give 2 numbers that add up to 6"),
        (
            models.Module,
            {"balance": [1, 2, 3]},
            {},
            "makes 3 stages of 6 layers, but there are 2 stages",
        ),
        (Lbfgs, {}, {}, "LBFGS needs all parameters of the model in one process"),
        (Whole, {}, {}, "Prodigy needs all parameters"),
        (CompiledWhole, {}, {}, "is compiled as a whole.*compile its layers"),
        (CompiledWrapped, {}, {}, "is compiled as a whole.*compile its layers"),
        (CompiledLayers, {"balance": "params"}, {}, "accepted"),
        (Lazy, {}, {}, "has no shape yet"),
        (models.Module, {}, {"sync_batchnorm": True}, "sync_batchnorm"),
        (Penalty, {}, {}, "reads .*, which stage . .rank .. holds.* weight_decay"),
        (LayerByLayer, {}, {}, "call the backbone as a whole"),
        (Direct, {}, {}, "manual_backward"),
        (Stepping, {}, {}, "between the forward and the backward"),
    ],
)
def test_refusals_name_the_remedy(
    kind: type[models.Module], arguments: dict[str, Any], options: dict[str, Any], problem: str
) -> None:

    try:
        messages = run_ranks(refused, 2, kind, 2, arguments, options, timeout_s=30)
    except RankError as error:  # one rank may lose its peer before it gets to its own error
        messages = [str(error)]
    assert any(re.search(problem, message) for message in messages), messages


def test_processes_that_make_no_whole_pipelines_are_not_started() -> None:
    with pytest.raises(ValueError, match=r"2 processes can't be divided .* of stages=3"):
        L.Trainer(accelerator="cpu", devices=2, strategy=GPipeStrategy(stages=3))


def test_the_other_lightning_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its Trainer refuses the strategy, and shows it."""
    assert repr(GPipeStrategy(8, stages=2)) == "GPipeStrategy(chunks=8, stages=2)"
    monkeypatch.setitem(sys.modules, "pytorch_lightning", sys)
    assert "for lightning.Trainer, not for pytorch_lightning.Trainer" in repr(GPipeStrategy(8))


def test_one_device_for_several_stages() -> None:
    with pytest.raises(ValueError, match=r"1 process can't .* stages=2.* devices='auto' means one"):
        Layout(0, 1, 2, 1).check()


@pytest.mark.parametrize("name", ["replicas", "stage", "is_last", "is_distributed"])
def test_a_place_before_there_are_devices(name: str) -> None:
    with pytest.raises(RuntimeError, match="no devices yet: the Trainer sets them"):
        getattr(GPipeStrategy(8), name)


def test_fewer_layers_than_stages() -> None:
    messages = run_ranks(refused, 3, Two, 3, {"backbone": "features"}, {})
    assert all("2 layers, fewer than 3 stages" in message for message in messages)


def chosen(kind: type[models.Module], stages: int, arguments: dict[str, Any]) -> Any:
    seen: dict[str, Any] = {}

    class Watch(L.Callback):
        def on_train_batch_end(self, run: L.Trainer, module: Any, *_: Any) -> None:
            here = {n: p for n, p in module.named_parameters() if not p.is_meta}
            seen.update(
                sizes=run.strategy.partition.sizes,
                unit=run.strategy.partition.unit,
                own=sum(p.numel() for p in here.values()),
                state=sum(len(s) for s in run.optimizers[0].state.values()),
                grads=[n for n, p in here.items() if p.grad is not None],
            )

    strategy = GPipeStrategy(2, **arguments)
    train(kind(), devices=stages, max_steps=1, strategy=strategy, callbacks=[Watch()])
    return seen


def cost(layer: nn.Module, value: Tensor) -> float:
    if not value.is_meta or value.shape != (8, 6):
        raise AssertionError(f"expected the shape of the mini-batch, got {value.shape}")
    return 10.0 if isinstance(layer, nn.Tanh) else 1.0


@pytest.mark.parametrize(
    ("arguments", "sizes", "unit"),
    [
        ({"balance": [1, 5]}, (1, 5), "params"),
        ({"balance": "params"}, (4, 2), "params"),
        ({"balance": cost}, (3, 3), "cost"),
        ({}, (3, 3), "flops"),
    ],
)
def test_each_stage_holds_its_layers_alone(
    arguments: dict[str, Any], sizes: Any, unit: str
) -> None:
    ranks = run_ranks(chosen, 2, models.Module, 2, arguments)
    for rank, seen in enumerate(ranks):
        layers = range(sizes[0]) if rank == 0 else range(sizes[0], 6)
        linear = [i for i in layers if i % 2 == 0]
        assert seen["unit"] == unit
        assert seen["sizes"] == sizes
        assert seen["own"] == 42 * len(linear)
        assert seen["grads"] == [f"backbone.{i}.{n}" for i in linear for n in ("weight", "bias")]
        assert seen["state"] == 3 * 2 * len(linear)


class Example(Two):
    """Several candidates, one of which clearly is the model."""

    def build(self) -> None:
        super().build()
        self.classifier = nn.Sequential(*(nn.Linear(6, 6) for _ in range(40)))
        self.example_input_array = torch.zeros(2, 6)


def test_the_clear_candidate_is_taken() -> None:
    assert run_ranks(chosen, 2, Example, 2, {})[0]["sizes"] == (20, 20)


SCRIPT = """
import warnings
warnings.simplefilter("ignore")
import sys
import lightning as L
import lightning_gpipe
from tests.models import Around

def main():
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy="gpipe", max_epochs=1, logger=False,
                        enable_checkpointing=False)
    trainer.fit(Around())
    print(f"rank {trainer.global_rank} ends")

if __name__ == "__main__":
    main()
"""


def test_a_script_through_lightnings_launcher(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    code, screen = run_script([sys.executable, str(script)], timeout=150, cwd=tmp_path)
    assert code == 0, screen
    for rank in range(2):
        assert f"rank {rank} ends" in screen
    assert screen.count("GPipe: 6 layers of 'backbone' on 2 stages, 8 micro-batches") == 1
    assert "40.0% of the parameters are outside the backbone" in screen
    assert screen.count("Every stage holds") == 0, "warnings are off in this script"
    assert "nn.Sequential" not in screen


ONE_THEN_TWO = SCRIPT.replace(
    "def main():",
    """def main():
    L.Trainer(accelerator="cpu", devices=1, strategy="gpipe", max_epochs=1, logger=False,
              enable_checkpointing=False).fit(Around())""",
)


def test_a_script_with_a_smaller_run_before_is_refused(tmp_path: Path) -> None:
    """The second process, which starts at the script's top, waited for a world that never came."""
    script = tmp_path / "train.py"
    script.write_text(ONE_THEN_TWO)
    code, screen = run_script([sys.executable, str(script)], timeout=100, cwd=tmp_path)
    assert code != 0
    assert "This process was started as rank 1 of another run" in screen


class CountsValidations(models.Module):
    def on_train_start(self) -> None:
        self.validations = 0
        if self.global_rank:
            self.trainer._last_val_time = float("inf")  # its clock says that no time is up

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.loss(*batch)

    def val_dataloader(self) -> Any:
        return self.train_dataloader()

    def on_validation_end(self) -> None:
        self.validations += 1
        if self.global_rank:
            self.trainer._last_val_time = float("inf")


def validated_by_time(step: Any) -> int:
    module = CountsValidations()
    interval = {"val_check_interval": timedelta(microseconds=1), "check_val_every_n_epoch": None}
    strategy = GPipeStrategy(2, step=step)
    train(module, max_steps=3, devices=2, strategy=strategy, num_sanity_val_steps=0, **interval)
    return module.validations


@pytest.mark.parametrize("step", ["mini-batch", "micro-batch"])
def test_all_ranks_validate_when_the_time_is_up_on_one(step: str) -> None:
    assert run_ranks(validated_by_time, 2, step) == [3, 3]
