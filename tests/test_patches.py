"""What is replaced of Lightning and torch during a run, and put back at its end."""

from __future__ import annotations

import ast
import inspect
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ThroughputMonitor
from lightning.pytorch.loggers import CSVLogger

import lightning_gpipe
from lightning_gpipe import GPipeStrategy
from lightning_gpipe.strategy import patches
from tests import models
from tests.ranks import run_ranks
from tests.training import trainer

PACKAGE = Path(lightning_gpipe.__file__).parent
KINDS = (patches.Target, patches.Function)
TARGETS = [value for value in vars(patches).values() if isinstance(value, KINDS)]
ON_OBJECTS = [target for target in TARGETS if not target.of_instances]


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_a_target_exists_in_the_installed_version(target: Any) -> None:
    assert target.reason
    if target.of_instances:
        owner = target.resolve()
        if not hasattr(owner, target.name):  # an attribute that the constructor makes
            assert f"self.{target.name}" in inspect.getsource(owner.__init__)
    else:
        assert callable(target.current()) or inspect.ismodule(target.current())


@pytest.mark.parametrize("target", ON_OBJECTS, ids=lambda target: target.name)
def test_a_target_is_restored_after_an_error_too(target: Any) -> None:
    before = target.current()
    with suppress(KeyError), target.replaced(print):
        assert target.current() is print
        raise KeyError
    assert target.current() is before


def test_a_missing_target_is_an_error() -> None:
    for target in (
        patches.Target("torch.nn.Module", "gone", "it is needed"),
        patches.Function("torch.nn.utils.clip_grad", "gone", "it is needed"),
        patches.Function("torch.nn.utils.clip_grad", "Tensor", "it is needed"),
    ):
        with pytest.raises(AttributeError, match="because it is needed: install the versions"):
            target.replaced(None).__enter__()


class Looks(L.Callback):
    """Notes what is replaced while the Trainer runs."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}

    def on_train_batch_end(self, *_: Any) -> None:
        self.found = {target.name: target.current() for target in ON_OBJECTS}


class Fails(L.Callback):
    def on_train_batch_end(self, *_: Any) -> None:
        raise OSError("the disk is full")


def looks(stages: int, folder: str, fails: bool, step: Any) -> tuple[list[str], list[str]]:
    """Train, and return the names of what was replaced, and of what isn't restored."""
    before = {target.name: target.current() for target in ON_OBJECTS}
    look, throughput = Looks(), ThroughputMonitor(batch_size_fn=len, window_size=2)
    run = trainer(
        devices=stages,
        strategy=GPipeStrategy(2, step=step),
        max_steps=2,
        callbacks=[look, throughput, *([Fails()] if fails else [])],
        logger=CSVLogger(folder),
        log_every_n_steps=1,
    )
    own = set(vars(run.precision_plugin))
    with suppress(OSError):
        run.fit(models.Module())
    changed = [name for name, value in look.found.items() if value is not before[name]]
    left = [target.name for target in ON_OBJECTS if target.current() is not before[target.name]]
    left += set(vars(run.precision_plugin)) - own
    return changed, left


@pytest.mark.parametrize("step", ["mini-batch", "micro-batch"])
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("stages", [1, 2])
def test_a_run_replaces_and_restores(stages: int, fails: bool, step: Any, tmp_path: Path) -> None:
    clips = {"_get_total_norm", "grad_norm", "_group_tensors_by_device_and_dtype"}
    only_with = {
        1: {*clips, "dataloader", "_get_default_group", "load_state_dict"},
        2: {"backward"},
    }[stages]
    only_with |= {"_make_closure"} if step == "mini-batch" else {"backward"}
    for changed, left in run_ranks(looks, stages, stages, str(tmp_path), fails, step):
        assert set(changed) == {target.name for target in ON_OBJECTS} - only_with
        assert left == []


def test_nothing_is_replaced_elsewhere() -> None:
    """Attributes of other people's classes are set in one module alone."""
    # the loader passes on writes to what it wraps; a look stands in the user's classes for a step
    allowed = {"patches.py", "loader.py", "step_attributes.py"}
    for path in (PACKAGE / "strategy").glob("*.py"):
        if path.name in allowed:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func)
            is_rank = called == "setattr" and ast.unparse(node.args[0]) == "rank_zero_only"
            assert called not in ("setattr", "delattr") or is_rank, f"{path.name}:{node.lineno}"


def test_the_total_norm_is_replaced_however_it_was_imported() -> None:
    from torch.nn.utils import get_total_norm
    from torch.nn.utils.clip_grad import _get_total_norm, clip_grad_norm_

    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    with patches.TOTAL_NORM.replaced(lambda *_, **__: torch.tensor(20.0)):
        for function in (
            get_total_norm,
            _get_total_norm,
            torch.nn.utils.get_total_norm,
            torch.nn.utils.clip_grad._get_total_norm,
        ):
            assert function([parameter.grad]) == 20
        assert clip_grad_norm_([parameter], 10.0) == 20
    torch.testing.assert_close(parameter.grad, torch.full((2,), 0.5))


def test_so_is_a_function_without_a_closure() -> None:
    from lightning.pytorch.utilities import grad_norm

    module = torch.nn.Linear(2, 2)
    with patches.GRAD_NORM.replaced(lambda *args, **options: (args, options)):
        assert grad_norm(module, 2, group_separator=".") == ((module, 2), {"group_separator": "."})
        with patches.GRAD_NORM.replaced(len):
            assert grad_norm("four") == 4
        assert grad_norm(3) == ((3,), {})
    assert grad_norm(module, 2) == {}
