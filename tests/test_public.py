"""Public names, arguments and commands don't change unseen: who changes one changes it here."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
from lightning.pytorch.strategies import ParallelStrategy

import lightning_gpipe
from lightning_gpipe import Blocks, GPipeStrategy, PipelineMonitor, cli
from lightning_gpipe.plan.plans import Depth, Plan, PlannedStage, Plans
from lightning_gpipe.plan.stage_memory import StageMemory

ARGUMENTS: dict[Callable[..., Any], str] = {
    GPipeStrategy: "chunks='auto' stages='auto' backbone=None balance='flops'"
    " checkpoint='except_last' deferred_batch_norm=True virtual_stages=1 step='mini-batch'"
    " schedule='auto' save_distributed_checkpoint=False shard_optimizer_state=False"
    " memory_limit=None process_group_backend=None timeout=datetime.timedelta(seconds=1800)"
    " start_method='auto' bucket_cap_mb=None gradient_as_bucket_view=False broadcast_buffers=True"
    " ddp_comm_hook=None ddp_comm_state=None ddp_comm_wrapper=None accelerator=None"
    " parallel_devices=None cluster_environment=None checkpoint_io=None precision_plugin=None",
    GPipeStrategy.plan: "self module batch=None input=None devices memory=None stages=None"
    " chunks=None virtual_stages=None checkpoint=None optimizers=None device=None flops=None"
    " measured=False",
    PipelineMonitor: "every_n_steps=None timeline=() picture=True folder=None table=True",
    Blocks: "blocks as_tuple=None",
}
#: What there is, and may be more than is documented.
NAMES: dict[type, str] = {
    GPipeStrategy: "chunks clip_grad_norm_ grad_norm is_last partition plan replicas"
    " restore_module stage stages",
    Plans: "all best",
    Plan: "backbone bubble counts_step depth fits is_measured length length_per_batch micro_batches"
    " most replicas samples seconds sent settings stages",
    PlannedStage: "layers memory parameters share",
    Depth: "block is_exact most",
    StageMemory: "activations ends gradients inputs kept messages of_micro_batches optimizer total"
    " weights",
}
COMMANDS = {
    "consolidate": "--overwrite",
    "shard": "--overwrite",
    "merge-traces": "--overwrite",
    "plan": "--backbone --checkpoint --chunks --data --device --devices --flops --measured --memory"
    " --model --no-data --stages --step --virtual-stages",
}


def test_the_package_has_these_names() -> None:
    expected = ["Blocks", "GPipeStrategy", "PipelineMonitor", "__version__"]
    assert sorted(lightning_gpipe.__all__) == expected


@pytest.mark.parametrize("function", ARGUMENTS, ids=lambda f: f.__qualname__)
def test_arguments_and_their_defaults_stay(function: Callable[..., Any]) -> None:
    parameters = inspect.signature(function).parameters.values()
    found = [p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in parameters]
    assert " ".join(found) == ARGUMENTS[function]


@pytest.mark.parametrize("kind", NAMES, ids=lambda kind: kind.__name__)
def test_what_objects_offer_stays(kind: type) -> None:
    assert set(NAMES[kind].split()) <= {*dir(kind)}
    assert kind is not GPipeStrategy or issubclass(kind, ParallelStrategy)


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_and_their_options_stay(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([command, "--help"])
    assert ended.value.code == 0
    found = set(re.findall(r"(--[a-z-]+)", capsys.readouterr().out.split("options:")[1]))
    assert found - {"--help"} == set(COMMANDS[command].split())
