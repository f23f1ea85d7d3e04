"""A search for the largest batch size over stages."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.memory import is_oom_error

from lightning_gpipe.engine.trial import Trial
from lightning_gpipe.strategy import patches


@contextmanager
def searched_over_stages(trainer: pl.Trainer, trial: Trial) -> Iterator[None]:
    """Let Lightning search inside this context.

    Memory that runs out on one stage is a try that failed on all, and all restore the state before
    the search from the one file that rank 0 writes.

    Args:
        trainer: The Trainer.
        trial: What the stages know of a try.
    """
    run = patches.TRY_BATCH_SIZE.current()

    def tried(*args: Any) -> None:
        with trial.running(is_oom_error):
            run(*args)

    name = SimpleNamespace(uuid4=lambda: trainer.strategy.broadcast(uuid.uuid4()))
    with patches.TRY_BATCH_SIZE.replaced(tried), patches.BATCH_SIZE_FILE.replaced(name):
        yield
