"""The command ``lightning-gpipe plan``."""

from __future__ import annotations

import importlib
import logging
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl

from lightning_gpipe.failure.reason import line_of
from lightning_gpipe.plan.settings import StepMode
from lightning_gpipe.strategy.gpipe import GPipeStrategy

if TYPE_CHECKING:
    from lightning_gpipe.strategy.configured import Configured


def plan(
    what: str,
    arguments: Sequence[str],
    model: str | None,
    data: str | None,
    no_data: bool,
    devices: int | None,
    step: StepMode | None,
    backbone: str | None,
    **options: Any,
) -> None:
    """Print which layouts of a pipeline fit, and the best of them stage by stage.

    Args:
        what: A configuration file that ``fit`` takes; or what makes the module, as
            ``package.module:function``. It returns the module, or the module and a batch; without
            a batch the module's ``example_input_array`` is taken.
        arguments: Those that ``fit`` would be given with the file.
        model: The class of the model as ``package.module:Class``, if the file names none.
        data: That of the data module.
        no_data: Whether no data is loaded, and the module's ``example_input_array`` taken.
        devices: Their number; None: that of the file.
        step: What the steps are given; None: what the file says, or a mini-batch.
        backbone: Dotted name of the backbone; None: what the file says, or it is found.
        options: Of :meth:`GPipeStrategy.plan`.

    Raises:
        SystemExit: With code 1, if nothing fits.
        ValueError: If nothing can be planned.
    """
    if what.endswith((".yaml", ".yml", ".json")):
        for name, value in (("step", step), ("backbone", backbone)):
            if value is not None:
                arguments = [*arguments, f"--trainer.strategy.init_args.{name}={value}"]
        with _quiet():
            found = _configured(what, arguments, model, data, options["measured"])
            module, strategy = found.module, found.strategy
            batch = None if no_data else found.batch()
        devices = found.devices if devices is None else devices
    elif model or data or no_data or arguments:
        given = " ".join(arguments) or "--model, --data and --no-data"
        go = "is no option of plan, and an argument of fit goes" if arguments else "these go"
        raise ValueError(f"{given}: {go} with a configuration file alone.")
    else:
        module, batch = _made(what)
        strategy = GPipeStrategy(backbone=backbone, step=step or "mini-batch")
    if devices is None:
        raise ValueError("Nothing says how many devices there are: give --devices.")
    plans = strategy.plan(module, batch, devices=devices, **options)
    print(f"{plans}\n\n{plans.all[0]}")
    if plans.best is None:
        sys.exit(1)


def _configured(
    file: str, arguments: Sequence[str], model: str | None, data: str | None, is_real: bool
) -> Configured:
    if not os.path.isfile(file):
        raise ValueError(f"There is no file {file}.")
    try:
        from lightning_gpipe.strategy.configured import configured
    except ImportError as error:
        raise ValueError(
            "Configuration files need LightningCLI: pip install 'jsonargparse[signatures]'."
        ) from error
    module_class = None if model is None else _class("--model", model, pl.LightningModule)
    data_class = None if data is None else _class("--data", data, pl.LightningDataModule)
    return configured(file, arguments, module_class, data_class, is_real)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what Lightning says of a Trainer that won't run."""
    before = logging.root.manager.disable
    logging.disable(logging.INFO)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _made(factory: str) -> tuple[pl.LightningModule, Any]:
    """The module and the batch that a function of the user's makes; None: no batch."""
    make = _imported(factory)
    if not callable(make):
        raise ValueError(
            f"{factory!r} is of type {type(make).__name__}: name a function that returns a"
            " LightningModule, alone or with a batch."
        )
    try:
        made = make()
    except Exception as error:
        empty = isinstance(error, StopIteration)
        hint = " Nothing was left to take: is the data set empty?" if empty else ""
        raise ValueError(f"{factory!r} raised an error: {line_of(error)}.{hint}") from error
    module, batch = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(module, pl.LightningModule):
        raise ValueError(
            f"{factory!r} returned a {type(made).__name__}: it must return a LightningModule of"
            " `lightning`, or a LightningModule and a batch."
        )
    return module, batch


def _class(option: str, name: str, base: type) -> Any:
    """The class that an option names."""
    found = _imported(name)
    if not (isinstance(found, type) and issubclass(found, base)):
        kind = found if isinstance(found, type) else type(found)
        what = f"the class {kind.__name__}" if found is kind else f"of type {kind.__name__}"
        raise ValueError(
            f"{option} must name a class that is a {base.__name__} of `lightning`, and {name} is"
            f" {what}. What a function makes is planned without a file: lightning-gpipe plan"
            " package.module:function."
        )
    return found


def _imported(name: str) -> Any:
    """What is found under ``package.module:name``."""
    place, _, attribute = name.partition(":")
    if not (place and attribute):
        raise ValueError(
            f"{name!r} is neither a configuration file (*.yaml) nor package.module:name of a class,"
            " or of a function that returns a LightningModule, alone or with a batch."
        )
    if place.endswith(".py") or place.startswith(".") or os.sep in place:
        raise ValueError(
            f"{name!r} names a file: name the module as `import` does, package.module:{attribute},"
            " from the folder where it is found."
        )
    if os.getcwd() not in sys.path:  # as `python -m` finds modules
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(place)
        for key in attribute.split("."):
            found = getattr(found, key)
    except Exception as error:
        raise ValueError(f"{name!r} can't be imported: {line_of(error)}.") from error
    return found
