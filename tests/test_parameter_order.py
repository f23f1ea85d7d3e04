"""Parameter groups made of sets, whose order differs between processes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor

from lightning_gpipe import GPipeStrategy
from tests import models
from tests.ranks import RankError, run_ranks
from tests.training import trainer

States = dict[str, dict[str, Tensor]]


class Ordered(models.Around):
    """Two groups, with the parameters in the module's order."""

    def order(self, parameters: list[Any]) -> list[Any]:
        return parameters

    def configure_optimizers(self) -> Any:
        weights = [(name, p) for name, p in self.named_parameters() if name.endswith("weight")]
        others = [(name, p) for name, p in self.named_parameters() if not name.endswith("weight")]
        groups = [
            {"params": self.order(weights), "weight_decay": 0.1},
            {"params": self.order(others), "lr": 0.02},
        ]
        return torch.optim.AdamW(groups, lr=0.01)


class Unordered(Ordered):
    """On every other rank they come in the opposite order."""

    def order(self, parameters: list[Any]) -> list[Any]:
        return parameters[::-1] if self.trainer.global_rank % 2 else parameters


class Other(models.Around):
    """On every other rank a group lacks a parameter."""

    def configure_optimizers(self) -> Any:
        parameters = [*self.parameters()]
        return torch.optim.AdamW(parameters[self.trainer.global_rank % 2 :])


def states_of(module: L.LightningModule, optimizer: Any, state: dict[str, Any]) -> States:
    """An optimizer's state dict by the names of parameters."""
    names = {parameter: name for name, parameter in module.named_parameters()}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    given = [name for group in optimizer.param_groups for name in group["param_names"]]
    assert given == [names[p] for p in parameters]
    return {names[parameters[i]]: entries for i, entries in state["state"].items()}


def fit(
    stages: int, replicas: int, shard: bool, folder: Path, kind: type[models.Module] = Unordered
) -> tuple[dict[str, Tensor], States]:
    """Train in two runs, of which the second resumes; the weights and the optimizer's state."""
    path, module = folder / "saved.ckpt", models.Module()
    for steps in (2, 4):
        torch.manual_seed(5)
        module = kind()
        strategy = GPipeStrategy(2, stages=stages, shard_optimizer_state=shard)
        run = trainer(max_steps=steps, devices=stages * replicas, strategy=strategy)
        run.fit(module, ckpt_path=str(path) if steps == 4 else None)
        run.save_checkpoint(path)
    saved = torch.load(path, weights_only=True)
    optimizer = module.optimizers(use_pl_optimizer=False)
    return module.state_dict(), states_of(module, optimizer, saved["optimizer_states"][0])


@pytest.mark.parametrize(
    ("stages", "replicas", "shard"), [(2, 1, False), (1, 2, True), (2, 2, True), (1, 2, False)]
)
def test_checkpoints_and_shards_are_right(
    stages: int, replicas: int, shard: bool, tmp_path: Path
) -> None:
    found = run_ranks(fit, stages * replicas, stages, replicas, shard, tmp_path)[0]
    (folder := tmp_path / "expected").mkdir()
    kind = Ordered if replicas > 1 else Unordered
    expected = run_ranks(fit, replicas, 1, replicas, False, folder, kind)[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


class NamedBySet(models.Around):
    """Has heads whose order differs between processes."""

    def build(self) -> None:
        super().build()
        names = ["age", "height"][:: -1 if os.environ["LOCAL_RANK"] == "1" else 1]
        self.heads = torch.nn.ModuleDict({name: torch.nn.Linear(1, 1) for name in names})


@pytest.mark.parametrize("stages", [1, 2])
def test_modules_built_in_another_order_are_refused(stages: int, tmp_path: Path) -> None:
    message = r"'heads.height.weight' where it has 'heads.age.weight' on rank 0.*sorted\(names\)"
    with pytest.raises(RankError, match=message):
        run_ranks(fit, 2, stages, 2 // stages, False, tmp_path, NamedBySet)


def refused(folder: Path) -> None:
    fit(2, 1, False, folder, Other)


def test_other_groups_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="parameter groups of AdamW are other ones on rank 1"):
        run_ranks(refused, 2, tmp_path)
