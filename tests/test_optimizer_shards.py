"""Replicas that share out the optimizer state of their stage train as those that don't."""

from __future__ import annotations

import copy
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeAlias
from unittest import mock

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from torch import Tensor, nn

from lightning_gpipe import GPipeStrategy
from lightning_gpipe.comm import peers
from lightning_gpipe.comm.groups import Groups
from tests import models, step_models
from tests.ranks import RankError, run_ranks
from tests.test_manual import Gan
from tests.test_precision import Net, options_of
from tests.test_resume import Long
from tests.training import train, trainer

STEPS = 5


class Bytes(L.Callback):
    """Notes the bytes of the optimizers' state on this rank, after every step."""

    def __init__(self) -> None:
        self.noted: list[int] = []

    def on_train_batch_end(self, run: L.Trainer, *_: Any) -> None:
        states = [state for optimizer in run.optimizers for state in optimizer.state.values()]
        values = [value for state in states for value in state.values()]
        self.noted.append(sum(v.nbytes for v in values if isinstance(v, Tensor) and v.numel() > 1))


class TwoGroups(models.Shared):
    """Shared weights, two groups of parameters, a schedule."""

    def configure_optimizers(self) -> Any:
        biases = [p for name, p in self.named_parameters() if name.endswith("bias")]
        weights = [p for name, p in self.named_parameters() if name.endswith("weight")]
        groups = [{"params": weights}, {"params": biases, "weight_decay": 0.0, "lr": 0.03}]
        optimizer = torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class Averaged(models.Around):
    """Keeps an average of its weights with a hook of its optimizer, and notes its gradients."""

    def build(self) -> None:
        super().build()
        self.average = nn.Parameter(torch.zeros(models.WIDTH), requires_grad=False)
        self.gradients: list[bool] = []

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        optimizer.register_step_post_hook(self.note)
        return optimizer

    @torch.no_grad()
    def note(self, *_: Any) -> None:
        self.average.lerp_(self.before.bias + self.after.bias, 0.3)

    def on_train_batch_end(self, *_: Any) -> None:
        found = [p.grad is not None for p in self.parameters() if not p.is_meta]
        self.gradients.append(sum(found) == len(found) - 1)  # the average has none


class Growing(models.Around):
    """Some layers are given to the optimizer later; the replicas have two small ones first."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([*self.before.parameters(), *self.backbone[0].parameters()], 0.01)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            rest = [*self.backbone[2:].parameters(), *self.after.parameters()]
            self.optimizers().add_param_group({"params": rest, "lr": 0.003})


class Idle(models.Around):
    """A parameter that no step uses, and a first layer with one."""

    def build(self) -> None:
        super().build()
        self.backbone.insert(0, nn.PReLU())
        self.unused = nn.Parameter(torch.ones(3))


class Even(models.Around):
    """Twelve layers alike, on two stages, and two outside."""

    def build(self) -> None:
        super().build()
        self.backbone = nn.Sequential(*(nn.Linear(models.WIDTH, models.WIDTH) for _ in range(12)))


CASES: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "adamw": (models.Around, {}, {}),
    "momentum": (lambda: models.Around("sgd"), {}, {}),
    "two groups, schedule": (TwoGroups, {"max_epochs": 3, "limit_train_batches": 3}, {}),
    "clipping, accumulation": (
        models.Shared,
        {"gradient_clip_val": 0.01, "accumulate_grad_batches": 3},
        {},
    ),
    "frozen": (models.Frozen, {}, {}),
    "hooks": (Averaged, {}, {}),
    "several optimizers": (Gan, {"limit_train_batches": 3, "max_epochs": 2}, {}),
    "later groups": (Growing, {}, {}),
    "idle": (Idle, {}, {"balance": "params"}),
    "bf16-mixed": (Net, {"precision": "bf16-mixed"}, {}),
    "16-mixed": (Net, {**options_of("16-mixed"), "max_epochs": 3}, {}),
    "micro-batch": (step_models.Tied, {}, {"step": "micro-batch"}),
    "even, adamw": (Even, {}, {}),
    "even, momentum": (lambda: Even("sgd"), {}, {}),
}
#: With two stages all, with one some.
LAYOUTS = [
    *((case, 2) for case in CASES if not case.startswith("even")),
    *((case, 1) for case in ("adamw", "several optimizers", "16-mixed", "micro-batch")),
]
Trained: TypeAlias = tuple[dict[str, Tensor], Any, list[int]]


def trained(case: str, stages: int) -> tuple[Trained, Trained]:
    """Train on this rank, first with replicas that keep all.

    Returns:
        For either the weights, what the module has noted, and the bytes of the state.
    """
    build, options, chosen = CASES[case]
    results = []
    for shard in (False, True):
        torch.manual_seed(1)
        module, noted = build(), Bytes()
        strategy = GPipeStrategy(3, stages=stages, shard_optimizer_state=shard, **chosen)
        steps = {} if "max_epochs" in options else {"max_steps": STEPS}
        state = train(
            module,
            devices=dist.get_world_size(),
            strategy=strategy,
            callbacks=[noted],
            **copy.deepcopy(options),
            **steps,
        )
        told = getattr(module, "gradients", getattr(module, "scales", None))
        results.append((state, told, noted.noted))
    return results[0], results[1]


@pytest.mark.parametrize(("case", "stages"), LAYOUTS)
def test_bits_are_those_of_replicas_that_keep_all(case: str, stages: int) -> None:
    for expected, found in run_ranks(trained, 2 * stages, case, stages):
        different = [n for n, v in expected[0].items() if not torch.equal(v, found[0][n])]
        assert not different
        assert found[1] == expected[1]
        assert all(own <= whole for own, whole in zip(found[2], expected[2], strict=True))
        assert found[2][-1] < expected[2][-1]


@pytest.mark.parametrize("optimizer", ["adamw", "momentum"])
def test_every_replica_keeps_half(optimizer: str) -> None:
    ranks = run_ranks(trained, 4, f"even, {optimizer}", 2)
    print("bytes of optimizer state:", [(whole[2][-1], own[2][-1]) for whole, own in ranks])
    for whole, own in ranks:
        assert whole[2][0] > 0
        assert own[2] == pytest.approx([b / 2 for b in whole[2]], rel=0.05), "from the first step"


def test_one_replica_shares_nothing_out() -> None:
    ((expected, found),) = run_ranks(trained, 1, "adamw", 1)
    assert found[2] == expected[2]


# ---------------------------------------------------------------------- checkpoints


def fitted(
    state: dict[str, Tensor], path: Path, epochs: int, stages: int, shard: bool
) -> dict[str, Tensor]:
    """Train up to an epoch, from the checkpoint if there is one, and save; 0 stages: plain."""
    module, world = Long(), dist.get_world_size()
    module.load_state_dict(state)
    module.replicas = world // max(stages, 1)
    strategy = GPipeStrategy(4, stages=stages, shard_optimizer_state=shard) if stages else "auto"
    saving = ModelCheckpoint(
        path.parent, "saved", every_n_train_steps=16, enable_version_counter=False
    )
    run = trainer(
        devices=world,
        max_epochs=epochs,
        strategy=strategy,
        callbacks=[saving],
        enable_checkpointing=True,
    )
    run.fit(module, ckpt_path=path if path.exists() else None)
    return module.state_dict()


#: Stages, replicas and whether they share the state out, epoch by epoch.
RUNS = [
    [(2, 2, True), (0, 1, False), (2, 2, True)],
    [(0, 1, False), (1, 2, True), (2, 1, True)],
    [(1, 2, False), (2, 2, True), (1, 2, True)],
]


@pytest.mark.parametrize("runs", RUNS)
def test_checkpoints_are_ordinary(runs: list[tuple[int, int, bool]], tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = Long()
    initial = copy.deepcopy(module.state_dict())
    expected = train(module, devices=1, max_epochs=len(runs))
    for epoch, (stages, replicas, shard) in enumerate(runs, 1):
        world, path = max(stages, 1) * replicas, tmp_path / "saved.ckpt"
        state = run_ranks(fitted, world, initial, path, epoch, stages, shard)[0]
        saved = torch.load(path, weights_only=True)["optimizer_states"][0]["state"]
        assert len(saved) == len(list(module.parameters()))
        assert {len(values) for values in saved.values()} == {3}
    torch.testing.assert_close(state, expected, rtol=0, atol=1e-10)


def language(path: Path, shard: bool) -> tuple[dict[str, Tensor], list[int]]:
    """Go on with stages that all hold the embedding, until it is seen which of them need it."""
    module, noted = step_models.Tied(), Bytes()
    strategy = GPipeStrategy(
        4, stages=2, step="micro-batch", balance="params", shard_optimizer_state=shard
    )
    run = trainer(devices=4, max_epochs=2, strategy=strategy, callbacks=[noted])
    run.fit(module, ckpt_path=path)
    return module.state_dict(), noted.noted


def test_loaded_state_moves_when_stages_let_go_of_parameters(tmp_path: Path) -> None:
    run = trainer(devices=1, max_epochs=1)
    run.fit(step_models.Tied())
    run.save_checkpoint(tmp_path / "saved.ckpt")
    expected = run_ranks(language, 4, tmp_path / "saved.ckpt", False)
    for (state, own), (whole_state, whole) in zip(
        run_ranks(language, 4, tmp_path / "saved.ckpt", True), expected, strict=True
    ):
        assert all(torch.equal(value, whole_state[name]) for name, value in state.items())
        assert own[0] == own[-1] < 0.7 * whole[-1]


# ---------------------------------------------------------------------- what can't work


class Failing(models.Around):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2 and self.trainer.global_rank == 1:
            raise ArithmeticError("on purpose")


def failing(folder: Path) -> None:
    strategy = GPipeStrategy(2, stages=1, shard_optimizer_state=True)
    saving = OnExceptionCheckpoint(folder)
    train(Failing(), devices=2, strategy=strategy, callbacks=[saving], enable_checkpointing=True)


def test_nobody_waits_for_the_state_of_one_that_failed(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="on purpose"):
        run_ranks(failing, 2, tmp_path)
    assert not list(tmp_path.iterdir()), "it would lack what the other replica kept"


class Free(torch.optim.SGD):
    def eval(self) -> None: ...


class Bare(torch.optim.SGD):
    def __init__(self, params: Any) -> None:
        self.inner = torch.optim.SGD(params, lr=0.1)
        self.param_groups, self.state = self.inner.param_groups, self.inner.state
        self.defaults = self.inner.defaults


REFUSED = {
    "eval": (lambda p: Free(p, lr=0.1), r"Free\.eval\(\) changes .*shard_optimizer_state=False"),
    "constructor": (Bare, r"Bare doesn't call the constructor .*shard_optimizer_state=False"),
    "whole": (torch.optim.LBFGS, "LBFGS needs all parameters"),
}


def refused(name: str) -> None:
    class Refused(models.Around):
        def configure_optimizers(self) -> Any:
            return REFUSED[name][0](self.parameters())

    strategy = GPipeStrategy(2, stages=1, shard_optimizer_state=True)
    train(Refused(), devices=2, max_steps=1, strategy=strategy)


@pytest.mark.parametrize("name", REFUSED)
def test_optimizers_that_replicas_cannot_share_are_refused(name: str) -> None:
    with pytest.raises(RankError, match=REFUSED[name][1]):
        run_ranks(refused, 2, name)


# ---------------------------------------------------------------------- new values


def shared(source: int, bucket: int) -> list[Tensor]:
    """Give all ranks one's tensors, of every kind."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    values = torch.randn(3, 40, generator=generator)
    tensors = [
        nn.Parameter(values.clone()),
        values[0, 0].clone(),
        values.double().T,
        torch.zeros(0),
        values > 0,
        values[:, ::2],
        values[1].clone().to(torch.bfloat16),
    ]
    groups = Groups.connect(2, 1, "gloo", torch.device("cpu"), timedelta(seconds=30))
    with mock.patch.object(peers, "_BUCKET", bucket):
        groups.pipeline.share(tensors, source)
    groups.close()
    return [tensor.detach().clone() for tensor in tensors]


@pytest.mark.parametrize("bucket", [1, 500, 1 << 25])
def test_tensors_of_every_kind_are_shared(bucket: int) -> None:
    (own, taken), (alone, _) = run_ranks(shared, 2, 1, bucket), run_ranks(shared, 2, 0, bucket)
    torch.testing.assert_close(own, taken, rtol=0, atol=0)
    assert not torch.equal(own[0], alone[0])
