"""Explains errors of a step: what layers of other stages keep, which blocks are the backbone."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from traceback import extract_tb, walk_tb
from types import TracebackType

from torch import Tensor, nn

from lightning_gpipe.model.elsewhere import is_elsewhere
from lightning_gpipe.model.listener import Listening
from lightning_gpipe.model.notes import add_note
from lightning_gpipe.model.parameters import layers_of
from lightning_gpipe.model.promise import CONDITION
from lightning_gpipe.model.remote import NotHere

_RANK = re.compile(r"\b(global_|local_|get_)?rank\b")


@contextmanager
def explained(module: nn.Module) -> Iterator[None]:
    """Add to an error inside this context what a user can't see in it.

    Args:
        module: The user's, of which other stages hold layers.
    """
    try:
        yield
    except (AttributeError, TypeError) as error:
        name = _missing(module, str(error))
        if name is not None:
            add_note(
                error,
                f"Layers leave '{name}' on the stage where they run, and those of other stages have"
                " none here. Return it with the backbone's output, shape [batch, ...], and let the"
                " step use that.",
            )
        raise
    except LookupError as error:
        parts = [*module.modules()]
        if any(map(_is_elsewhere, parts)) and any(part._forward_hooks for part in parts):
            add_note(
                error,
                "A forward hook runs on the stage that has its layer, so what it keeps is missing"
                " on others. Return it with the backbone's output, shape [batch, ...], and let the"
                " step use that.",
            )
        line = extract_tb(error.__traceback__)[-1].line or ""
        if _RANK.search(line) and any(map(_is_elsewhere, module.modules())):
            add_note(
                error,
                "A rank counts the processes of all stages, and self.all_gather goes over replicas:"
                " this one's place among them is self.trainer.distributed_sampler_kwargs['rank'].",
            )
        raise
    except RuntimeError as error:
        if isinstance(error, NotHere) and _is_of_metric(error.__traceback__):
            add_note(
                error,
                "torchmetrics reads it: keep the metric as an attribute of the module, several in"
                " an nn.ModuleDict or a MetricCollection; then it is updated where the values are.",
            )
        if CONDITION in str(error):
            for name, part in module.named_modules():
                if isinstance(part, Listening) and part.is_attached:
                    kinds = dict.fromkeys(type(layer).__name__ for layer in layers_of(part))
                    add_note(error, f"The blocks are those of '{name}' ({', '.join(kinds)}).")
        raise


def _is_of_metric(traceback: TracebackType | None) -> bool:
    """Whether an error comes out of a metric."""
    frames = (frame for frame, _ in walk_tb(traceback))
    names = (frame.f_globals.get("__name__", "") for frame in frames)
    return any(name.partition(".")[0] == "torchmetrics" for name in names)


def _is_elsewhere(part: nn.Module) -> bool:
    return any(map(is_elsewhere, part.parameters()))


def _missing(module: nn.Module, message: str) -> str | None:
    """An attribute in which modules of this stage alone keep a tensor, if an error may be of it."""
    kept, apart = dict[tuple[type, str], None](), list[nn.Module]()
    for part in module.modules():
        if _is_elsewhere(part):
            apart.append(part)
        else:
            names = (name for name, value in vars(part).items() if isinstance(value, Tensor))
            kept |= {(type(part), name): None for name in names}
    for kind, name in kept:
        values = [vars(part).get(name, ...) for part in apart if type(part) is kind]
        is_absent = f"'{name}'" in message and any(value is ... for value in values)
        if is_absent or ("NoneType" in message and any(value is None for value in values)):
            return name
    return None
