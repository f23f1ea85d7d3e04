"""``torch.utils.checkpoint`` around the backbone or its blocks, which the pipeline makes needless.

It re-materializes their activations itself, and a checkpoint would call them once more in the
backward, where no forward of all stages can run. So they are called without. A function of which
it isn't seen that it leads to them runs without the checkpoint's hooks as far as they are called,
and is refused where it would be repeated.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any, Protocol
from weakref import WeakSet

import torch.utils.checkpoint
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointFunction


class HasParts(Protocol):
    """Who knows what belongs to a pipeline."""

    def is_part(self, value: Any) -> bool:
        """Whether a value is a part of it, or stands for one."""


_top: Callable[[bool], Any] = getattr(  # noqa: B009
    torch._C._autograd, "_top_saved_tensors_default_hooks"
)
_pop: Callable[[], None] = getattr(  # noqa: B009
    torch._C._autograd, "_pop_saved_tensors_default_hooks"
)
_push: Callable[[Any, Any], None] = getattr(  # noqa: B009
    torch._C._autograd, "_push_saved_tensors_default_hooks"
)
_REENTRANT = CheckpointFunction.forward.__code__
_TEXT = (
    "The backbone is called inside torch.utils.checkpoint, by a function that it would call once"
    " more in the backward. Give torch.utils.checkpoint the backbone or a block of it, which is"
    ' called without then; or call the function without: GPipeStrategy(checkpoint="always")'
    " re-materializes all layers of the backbone. What a layer does inside may use"
    " torch.utils.checkpoint."
)


def refuse_repeats() -> None:
    """Refuse a call of the backbone, or of a block, by which a checkpoint repeats a forward.

    Raises:
        RuntimeError: If the running call is one.
    """
    hooks, repeats = list[Any](), False
    try:
        while _top(True) is not None:  # others' may lie over them
            repeats |= _name_of_hooks().startswith("_recomputation_hook")
            hooks.append(_top(True))
            _pop()
    finally:
        _push_all(hooks)
    if repeats:
        raise RuntimeError(_TEXT)


def refuse_checkpointed() -> None:
    """Refuse calls of the backbone inside a reentrant checkpoint, which would repeat them.

    Raises:
        RuntimeError: If the running call is one.
    """
    if torch.is_grad_enabled():
        return
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not _REENTRANT:
        frame = frame.f_back
    if frame is not None:
        raise RuntimeError(_TEXT)


@contextmanager
def unchecked() -> Iterator[None]:
    """Let the backbone, called inside, keep tensors for the backward as if no checkpoint ran.

    Raises:
        RuntimeError: If the call is one by which a checkpoint repeats a forward.
    """
    refuse_repeats()
    hooks = list[Any]()
    while _name_of_hooks().startswith("_checkpoint_hook"):
        hooks.append(_top(True))
        _pop()
    try:
        yield
    finally:
        _push_all(hooks)


def _push_all(hooks: Sequence[Any]) -> None:
    """Put hooks back that were taken away from the top."""
    for pack, unpack in reversed(hooks):
        _push(pack, unpack)


def _name_of_hooks() -> str:
    """Which of a checkpoint's hooks for saved tensors are in force; empty: another's, or none."""
    hooks = _top(True)
    if hooks is None or getattr(hooks[0], "__module__", "") != torch.utils.checkpoint.__name__:
        return ""
    return str(hooks[0].__qualname__)


#: How what is replaced begins.
_REPLACED = "CheckpointFunction", "_checkpoint_without_reentrant_generator"
_own: dict[str, Any] = {}  # what stood there before
_pipelines: WeakSet[HasParts] = WeakSet()  # one that isn't ended would else live on


def _leads_to_part(function: Any, given: Any) -> bool:
    """Whether a function of a checkpoint's, or what it is given, is a part of a pipeline."""
    values = tree_leaves([*_named(function), given])
    return any(pipeline.is_part(value) for pipeline in [*_pipelines] for value in values)


class _Direct(CheckpointFunction):
    """In the place of a reentrant checkpoint: calls what leads to a pipeline without."""

    @classmethod
    def apply(cls, function: Any, preserve: bool, *args: Any) -> Any:
        if _leads_to_part(function, args):
            return function(*args)
        own = _own.get("CheckpointFunction", CheckpointFunction)  # kept beyond a run, perhaps
        return own.apply(function, preserve, *args)


def _directly(checkpointed: Callable[..., Iterator[None]]) -> Callable[..., Iterator[None]]:
    """The same for another one, which is a generator around the function's call."""

    def generator(function: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
        if _leads_to_part(function, (args, kwargs)):
            yield
        else:
            yield from checkpointed(function, *args, **kwargs)

    return generator


def call_directly(pipeline: HasParts) -> None:
    """Let checkpoints around what is a part of a pipeline do nothing, until :func:`stop`.

    Args:
        pipeline: Tells what is one.
    """
    _pipelines.add(pipeline)
    if _own:
        return
    functions = vars(torch.utils.checkpoint)
    for name in [name for name in functions if name.startswith(_REPLACED)]:
        _own[name] = own = functions[name]
        functions[name] = _Direct if name == "CheckpointFunction" else _directly(own)


def stop(pipeline: HasParts) -> None:
    """Undo :func:`call_directly`."""
    _pipelines.discard(pipeline)
    if not _pipelines:
        vars(torch.utils.checkpoint).update(_own)
        _own.clear()


def _named(function: Any) -> Sequence[Any]:
    """What a function is, is bound to, and refers to."""
    found = [function, getattr(function, "__self__", None)]
    if isinstance(function, partial):
        found += [*_named(function.func), *function.args, *function.keywords.values()]
    found += getattr(function, "__defaults__", None) or ()
    found += (getattr(function, "__kwdefaults__", None) or {}).values()
    for cell in getattr(function, "__closure__", None) or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # it is empty yet
            continue
    return found
