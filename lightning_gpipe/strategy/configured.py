"""Makes what is planned of the configuration file that ``fit`` takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import lightning.pytorch as pl
import torch
from jsonargparse import ArgumentError, Namespace
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.utilities.combined_loader import CombinedLoader

from lightning_gpipe.failure.reason import line_of, users_error
from lightning_gpipe.strategy.gpipe import GPipeStrategy


@dataclass(frozen=True, slots=True)
class Configured:
    """What a configuration file says.

    Args:
        module: The model, without values where it can be made without.
        data: The data module; None: the model loads its data itself.
        strategy: With the precision of the trainer.
        devices: Their number on all nodes; None: not told.
    """

    module: pl.LightningModule
    data: pl.LightningDataModule | None
    strategy: GPipeStrategy
    devices: int | None

    def batch(self) -> Any:
        """The first batch of the data that the model trains on; None: there are none.

        Raises:
            ValueError: If the data can't be loaded, with what to do.
        """
        try:
            if self.data is not None:
                self.data.prepare_data()
                self.data.setup("fit")
            loader = (self.data or self.module).train_dataloader()
            if loader is None:
                return None
            first = next(iter(CombinedLoader(loader, "min_size")), None)
            if first is None:
                name = type(self.data or self.module).__name__
                raise ValueError(f"train_dataloader() of {name} gives no batch: it has no data")
            batch, *_ = first
        except Exception as error:
            if self.data is None and self.module.example_input_array is not None:
                return None
            raise ValueError(
                f"The data can't be loaded ({line_of(error)}): give the model an"
                " example_input_array, and plan with --no-data."
            ) from error
        return batch


def configured(
    file: str,
    arguments: Sequence[str],
    model: type[pl.LightningModule] | None,
    data: type[pl.LightningDataModule] | None,
    is_real: bool,
) -> Configured:
    """Read a configuration file as ``fit`` does, and make no trainer that runs.

    Args:
        file: Its path.
        arguments: What is given with it.
        model: The class of the model, where the file names none.
        data: The class of the data module, where the file names none.
        is_real: Whether the model must have values.

    Raises:
        ValueError: If the file can't be read so, or what it says can't be made.
    """
    try:
        cli = _Read(is_real, ["fit", "--config", file, *arguments], model, data)
    except Exception as error:
        if users_error(error) is not None:
            raise ValueError(f"What {file} names can't be made: {line_of(error)}.") from error
        if not isinstance(error, (ArgumentError, UnicodeDecodeError)):
            raise
        hint = (
            "Where the script names the classes, LightningCLI(Model, Data), give --model"
            " package.module:Model --data package.module:Data; for a command line with arguments"
            " of its own give package.module:function in place of the file."
            if model is None
            else "If the file names the classes itself, leave out --model and --data."
        )
        raise ValueError(
            f"{file} can't be read as `fit` of a LightningCLI reads it. {hint}\n{error}"
        ) from error
    trainer: Any = cli.trainer
    cli.model.trainer = trainer  # which configure_optimizers and hooks of batches may ask
    trainer.training = True
    if cli.datamodule is not None:
        trainer.datamodule, cli.datamodule.trainer = cli.datamodule, trainer
    strategy = cast(GPipeStrategy, trainer.strategy)
    return Configured(cli.model, cli.datamodule, strategy, cli.devices)


class _Idle(pl.Trainer):
    """A trainer that runs nothing."""

    @property
    def estimated_stepping_batches(self) -> int:
        """Some number, by which schedulers are made: no plan depends on it."""
        return self.max_steps if self.max_steps > 0 else 1000


class _Read(LightningCLI):
    """Reads the arguments of ``fit``, and doesn't fit."""

    devices: int | None

    def __init__(self, is_real: bool, arguments: Sequence[str], model: Any, data: Any) -> None:
        self._is_real = is_real
        super().__init__(
            model,
            data,
            trainer_class=_Idle,
            save_config_callback=None,
            parser_kwargs={"fit": {"exit_on_error": False}, "exit_on_error": False},
            args=list(arguments),
            load_from_checkpoint_support=False,
        )

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        return {"fit": LightningCLI.subcommands()["fit"]}

    def parse_arguments(self, parser: Any, args: Any) -> None:
        self.config = parser.parse_args(args)  # Lightning's warns that this process has others

    def before_instantiate_classes(self) -> None:
        trainer = self.config["fit"]["trainer"]
        trainer["callbacks"] = trainer["profiler"] = None  # nothing runs
        trainer["logger"] = False
        if not self._is_real:
            self.parser.add_instantiator(_on_meta, pl.LightningModule)

    def instantiate_trainer(self, **kwargs: Any) -> pl.Trainer:
        given: Namespace = self.config_init["fit"]["trainer"]
        self.devices = _number(given["devices"], given["num_nodes"])
        return super().instantiate_trainer(
            accelerator="cpu", devices=1, num_nodes=1, strategy=_strategy(given["strategy"])
        )

    def fit(self, **_: Any) -> None:
        """Nothing; the command's work is done."""


def _on_meta(made: Any, *args: Any, **kwargs: Any) -> Any:
    """Make a model without values, unless it needs some."""
    try:
        with torch.device("meta"):
            return made(*args, **kwargs)
    except Exception:  # told by the next line, if it isn't because of the missing values
        return made(*args, **kwargs)


def _strategy(given: Any) -> GPipeStrategy:
    """The strategy that the file names; without one, GPipeStrategy with its defaults."""
    found = "gpipe" if given == "auto" else given
    if isinstance(found, str) and found in StrategyRegistry:
        found = StrategyRegistry.get(found)
    if not isinstance(found, GPipeStrategy):
        name = found if isinstance(found, str) else type(found).__name__
        raise ValueError(
            f"The file's strategy is {name}, and pipelines are planned of GPipeStrategy: name it"
            " there, or add --trainer.strategy=gpipe."
        )
    return found


def _number(devices: Any, nodes: int) -> int | None:
    """How many devices there are on all nodes; None: it depends on the machine."""
    if isinstance(devices, str):
        listed = [entry for entry in devices.split(",") if entry.strip()]
        devices = listed if "," in devices else devices
        devices = int(devices) if isinstance(devices, str) and devices.isdigit() else devices
    if isinstance(devices, (list, tuple)):
        return len(devices) * nodes
    return devices * nodes if isinstance(devices, int) and devices > 0 else None
