"""Signals that come where no training step could heed them, and what is done with others."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from lightning.pytorch.callbacks import Callback, OnExceptionCheckpoint
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.trainer.connectors import signal_connector

from lightning_gpipe import GPipeStrategy
from lightning_gpipe.strategy.signals import EndOnSigterm, SaveOnSignal
from tests.models import Module
from tests.ranks import run_ranks, start_ranks
from tests.training import trainer


class Evaluated(Module):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self.loss(*batch))

    test_step = validation_step  # type: ignore[assignment]

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0])


class Send(Callback):
    """A signal to the last rank, in the second batch."""

    def __init__(self, number: signal.Signals) -> None:
        self.number, self.batches = number, 0

    def count(self, run: Any, *_: Any) -> None:
        self.batches += 1
        if self.batches == 2 and run.global_rank == run.world_size - 1:
            os.kill(os.getpid(), self.number)

    on_validation_batch_start = on_test_batch_start = on_predict_batch_start = count


def requeue(kind: str, folder: Path) -> None:
    rank = os.environ["LOCAL_RANK"]
    places = {"SLURM_PROCID": rank, "SLURM_LOCALID": rank, "SLURM_NODEID": "0"}
    job = {"SLURM_JOB_ID": "12345", "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2"}
    send, module = Send(signal.SIGUSR1), Evaluated()
    with (
        mock.patch.dict(os.environ, {**places, **job}),
        mock.patch.object(signal_connector, "call", return_value=0) as scontrol,
    ):
        run = trainer(
            devices=2,
            strategy=GPipeStrategy(4),
            callbacks=[send],
            plugins=[SLURMEnvironment()],
            default_root_dir=folder,
        )
        getattr(run, kind)(module, module.train_dataloader())
    assert scontrol.call_count == (rank == "0")
    assert (folder / "hpc_ckpt_1.ckpt").exists()
    assert send.batches == 15, "it goes on until SLURM ends it"


@pytest.mark.parametrize("kind", ["validate", "test", "predict"])
def test_slurm_announces_the_end(kind: str, tmp_path: Path) -> None:
    run_ranks(requeue, 2, kind, tmp_path)


def interrupt(folder: Path) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background ignores it
    send, module = Send(signal.SIGINT), Evaluated()
    run = trainer(
        devices=2,
        strategy=GPipeStrategy(4),
        callbacks=[send, OnExceptionCheckpoint(folder)],
        enable_checkpointing=True,
    )
    with pytest.raises((SystemExit, KeyboardInterrupt)):
        run.validate(module, module.train_dataloader())
    assert send.batches <= 3


def test_the_first_interrupt_ends_it(tmp_path: Path) -> None:
    run_ranks(interrupt, 2, tmp_path)


class SendsLate(GPipeStrategy):
    """Sends SIGTERM to its process when the steps are over."""

    def teardown(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        super().teardown()


def terminate_late(folder: Path) -> None:
    trainer(
        devices=2,
        strategy=SendsLate(4),
        callbacks=[OnExceptionCheckpoint(folder)],
        max_steps=2,
        enable_checkpointing=True,
    ).fit(Module())
    print("it went on", flush=True)


def test_a_sigterm_behind_the_last_step_ends_the_run(tmp_path: Path) -> None:
    """Nothing comes that could heed it later."""
    for process in start_ranks(terminate_late, 2, tmp_path, tmp_path):
        process.join(60)
        assert process.exitcode not in (0, None)
    assert not any("it went on" in (tmp_path / str(rank)).read_text() for rank in range(2))


def test_a_sigterm_that_waits_is_not_passed_on() -> None:
    """Another process may have got it long before, and take it for the second one."""
    passed = list[int]()
    handler = EndOnSigterm(passed.append, lambda: False)
    handler.saving = SaveOnSignal([OnExceptionCheckpoint(".")], lambda _: None)
    in_training = SimpleNamespace(trainer=SimpleNamespace(training=True))
    handler._connectors = [in_training]  # type: ignore[list-item]
    handler(signal.SIGTERM, None)
    assert handler.saving.is_sigterm
    assert passed == []
