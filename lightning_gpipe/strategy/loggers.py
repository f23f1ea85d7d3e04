"""Lets loggers know how a model is trained."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn


def log_picture(loggers: Iterable[Logger], name: str, pixels: Any, step: int) -> None:
    """Give a picture to the loggers that take some.

    Args:
        loggers: The Trainer's.
        name: The picture's.
        pixels: An array ``[height, width, 3]`` of bytes.
        step: The step that it belongs to.
    """
    for logger in loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.experiment.add_image(name, pixels, step, dataformats="HWC")
        elif isinstance(logger, WandbLogger):
            logger.log_image(name, [pixels], step=step)


class LoggedSettings:
    """The pipeline's settings, told once: in each logger, beside hyperparameters, and on screen."""

    def __init__(self) -> None:
        self._known: list[tuple[Logger, dict[str, Any]]] = []
        self._printed: set[str] = set()

    def print(self, text: str, *shorter: str) -> None:
        """Print a text on rank 0, unless an earlier run has printed the same.

        Args:
            text: The text.
            shorter: What need not be printed after it.
        """
        if text not in self._printed:
            self._printed.update((text, *shorter))
            rank_zero_info(text)

    def tell(self, loggers: Iterable[Logger], settings: dict[str, Any]) -> None:
        """Log settings, unless a logger knows them already, from a fit before a test for instance.

        Args:
            loggers: The Trainer's.
            settings: How the pipeline is cut and run.
        """
        for logger in loggers:
            if any(found is logger and told == settings for found, told in self._known):
                continue
            self._known.append((logger, settings))
            # TensorBoard would write a point of its hp_metric, unless there are no metrics
            no_metrics: tuple[dict[str, float], ...] = (
                ({},) if isinstance(logger, TensorBoardLogger) else ()
            )
            found = getattr(logger, "hparams", {})
            known = found if isinstance(found, Mapping) else {}  # DummyLogger's is a function
            try:
                logger.log_hyperparams({**known, "gpipe": settings}, *no_metrics)
            except Exception as error:  # MLflow's can't be changed within a run
                rank_zero_warn(
                    f"{type(logger).__name__} did not take the settings of the pipeline: {error}"
                )
