"""What is saved is an ordinary Lightning checkpoint of the whole model."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from lightning_gpipe import GPipeStrategy
from tests import models
from tests.ranks import run_ranks
from tests.training import train, trainer

WITHOUT_THE_PACKAGE = """
import sys, warnings
warnings.simplefilter("ignore")
sys.modules["lightning_gpipe"] = None  # any import of it raises ImportError
import torch
from tests.models import Shared
from tests.training import trainer

for path in sys.argv[1:]:
    module = Shared.load_from_checkpoint(path)
    torch.save(module.state_dict(), path + ".loaded")
    run = trainer(devices=1, max_epochs=2)
    run.fit(module, ckpt_path=path)
    torch.save(module.state_dict(), path + ".resumed")
"""


def save(state: dict[str, torch.Tensor], folder: Path, stages: int) -> list[list[str]]:
    """Train an epoch; save by callback and by hand, during and after the fit."""
    module = models.Shared()
    module.load_state_dict(state)
    saving = ModelCheckpoint(folder, filename="callback")
    run = trainer(
        devices=stages,
        max_epochs=1,
        strategy=GPipeStrategy(4),
        callbacks=[saving],
        enable_checkpointing=True,
    )
    run.fit(module)
    run.save_checkpoint(folder / "after.ckpt")
    return [sorted(module.state_dict()), sorted(p.name for p in folder.iterdir())]


@pytest.mark.parametrize("stages", [1, 3])
def test_a_plain_trainer_loads_and_goes_on(stages: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = models.Shared()
    initial = copy.deepcopy(module.state_dict())
    first = copy.deepcopy(module)
    after_one = train(first, max_epochs=1, devices=1)
    after_two = train(module, max_epochs=2, devices=1)
    for names, files in run_ranks(save, stages, initial, tmp_path, stages):
        assert names == sorted(initial)
        assert files == ["after.ckpt", "callback.ckpt"]
    paths = [tmp_path / "callback.ckpt", tmp_path / "after.ckpt"]
    subprocess.run(
        [sys.executable, "-c", WITHOUT_THE_PACKAGE, *map(str, paths)],
        check=True,
        timeout=120,
        cwd=Path(__file__).parents[1],
        env={k: v for k, v in os.environ.items() if k not in ("WORLD_SIZE", "LOCAL_RANK")},
        capture_output=True,
    )
    for path in paths:
        checkpoint = torch.load(path, weights_only=True)
        assert list(checkpoint["state_dict"]) == list(initial)
        assert len(checkpoint["optimizer_states"][0]["state"]) == len(list(module.parameters()))
        loaded = torch.load(f"{path}.loaded", weights_only=True)
        torch.testing.assert_close(loaded, after_one, rtol=0, atol=1e-10)
        resumed = torch.load(f"{path}.resumed", weights_only=True)
        torch.testing.assert_close(resumed, after_two, rtol=0, atol=1e-10)


def resume(path: Path, stages: int) -> dict[str, Any]:
    module = models.Shared()
    strategy = GPipeStrategy(4, balance="params" if stages == 2 else "flops")
    trainer(devices=stages, max_epochs=2, strategy=strategy).fit(module, ckpt_path=path)
    return module.state_dict()


def resume_after_a_run(path: Path, stages: int) -> dict[str, Any]:
    """Resume a module that an earlier run left in parts on the other ranks."""
    module = models.Shared()
    trainer(devices=stages, max_steps=1, strategy=GPipeStrategy(4)).fit(module)
    trainer(devices=stages, max_epochs=2, strategy=GPipeStrategy(4)).fit(module, ckpt_path=path)
    return module.state_dict()


def test_a_module_resumes_after_another_run(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = models.Shared()
    initial = copy.deepcopy(module.state_dict())
    expected = train(module, max_epochs=2, devices=1)
    run_ranks(save, 2, initial, tmp_path, 2)
    state = run_ranks(resume_after_a_run, 2, tmp_path / "callback.ckpt", 2)[0]
    torch.testing.assert_close(state, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_a_run_resumes_with_another_number_of_stages(stages: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = models.Shared()
    initial = copy.deepcopy(module.state_dict())
    expected = train(module, max_epochs=2, devices=1)
    run_ranks(save, 3, initial, tmp_path, 3)
    state = run_ranks(resume, stages, tmp_path / "callback.ckpt", stages)[0]
    torch.testing.assert_close(state, expected, rtol=0, atol=1e-10)


def life() -> list[str]:
    """Use one module again and again, with one Trainer and with others."""
    module = models.Around()
    data = DataLoader(module.train_dataloader().dataset.tensors[0], batch_size=8)
    run = trainer(devices=2, max_epochs=1, strategy=GPipeStrategy(4))
    run.fit(module)
    devices = [str(p.device) for p in module.parameters()]
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    outputs = run.predict(module, data)
    trainer(devices=2, max_epochs=1, strategy=GPipeStrategy(2, balance=[5, 1])).fit(module)
    again = trainer(devices=2, strategy=GPipeStrategy(8)).predict(module, data)
    whole = [module(x) for x in data]
    torch.testing.assert_close(again, [y.detach() for y in whole], rtol=0, atol=1e-12)
    if any(torch.equal(p, before[name]) for name, p in module.named_parameters()):
        raise AssertionError("the second fit should have moved every weight")
    if torch.equal(outputs[0], again[0]):
        raise AssertionError("predictions should differ after the second fit")
    if "forward" in module.backbone.__dict__:
        raise AssertionError("the module should be as it was")
    return devices


def test_the_module_is_whole_again_on_every_rank() -> None:
    first, second = run_ranks(life, 2)
    assert set(first) == set(second) == {"cpu"}
