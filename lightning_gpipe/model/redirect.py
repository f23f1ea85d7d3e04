"""Takes the place of modules' forwards."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import MethodType
from typing import Any

import torch
from torch import nn

from lightning_gpipe.model.blocks import listening, loops_over_itself
from lightning_gpipe.model.checkpointing import call_directly, stop
from lightning_gpipe.model.listener import Listening
from lightning_gpipe.model.promise import Unknown, is_promise
from lightning_gpipe.model.stand_in import StandIn, StandIns

_IS_READING: ContextVar[bool] = ContextVar("is_reading", default=False)


class Redirect:
    """Stands in for a method of a module, or another object; copies of it have their own again.

    Args:
        module: The module.
        original: The instance's own that it had; None: its class's.
        target: What is called instead.
        name: The method.
    """

    def __init__(
        self,
        module: object,
        original: Any,
        target: Callable[..., Any],
        name: str = "forward",
    ) -> None:
        self._module, self.original, self._target = module, original, target
        self._name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the target."""
        return self._target(*args, **kwargs)

    def release(self) -> None:
        """Call from now on what a call of the module did before."""
        self._target = self._own()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._own(), memo)

    def __reduce__(self) -> Any:
        return copy.copy, (self._own(),)

    def _own(self) -> Any:
        """What a call of the module did before."""
        if self.original is not None:
            return self.original
        return MethodType(getattr(type(self._module), self._name), self._module)


class Redirections:
    """The forwards that are redirected, and those that they had before.

    What a model's loop over a backbone calls is redirected, too.

    Args:
        is_alone: Whether one rank has all layers, which the model may call by themselves, too.
    """

    def __init__(self, is_alone: bool) -> None:
        self._is_alone = is_alone
        self._targets: dict[nn.Module, Callable[..., Any]] = {}
        self._redirects: dict[nn.Module, Redirect] = {}
        self._taken_over: list[tuple[Listening, type[nn.Module]]] = []

    def is_part(self, value: Any) -> bool:
        """Whether a call of it goes elsewhere, or it stands for what comes of that."""
        kinds = type(value).__mro__
        if is_promise(value) or not {StandIn, StandIns, Unknown}.isdisjoint(kinds):
            return True
        if nn.Module not in kinds:
            return False
        parts = value._modules.values()  # of a slice of a backbone
        return value in self._targets or any(StandIn in type(part).__mro__ for part in parts)

    def take_over(self, backbone: nn.Module) -> None:
        """Listen to loops over a backbone's layers, too, until :meth:`end`."""
        call_directly(self)
        kind: Any = type(backbone)
        if (taken := listening(kind)) is not None:
            backbone.__class__ = taken
            self._taken_over += [(backbone, kind)] if isinstance(backbone, Listening) else []

    def end(self) -> None:
        """Take all back, and let backbones be what they were."""
        stop(self)
        self.clear()
        for backbone, kind in self._taken_over:
            backbone.give_back(kind)
        self._taken_over.clear()

    def add(self, module: nn.Module, target: Callable[..., Any]) -> None:
        """Let calls of a module go to a function, until :meth:`remove`."""
        self._targets[module] = target
        if isinstance(module, Listening):
            module.attach(target, self.suspended, self._is_alone)
        if loops_over_itself(module):
            return  # it has no forward, or that is a loop
        # a forward of the instance's own: torch.compile sets one, and users do
        previous = module.__dict__.get("forward")
        original = previous.original if isinstance(previous, Redirect) else previous
        redirect = self._redirects[module] = Redirect(module, original, target)
        module.__dict__["forward"] = redirect

    def remove(self, module: nn.Module) -> None:
        """Let calls of a module go to its own forward again, also those of who kept the other."""
        self._take_off(module)
        redirect = self._redirects.pop(module, None)
        if redirect is not None:
            redirect.release()

    def _take_off(self, module: nn.Module) -> None:
        if self._targets.pop(module, None) is None:
            return
        if isinstance(module, Listening):
            module.detach()
        redirect = module.__dict__.get("forward")
        if isinstance(redirect, Redirect):
            del module.__dict__["forward"]
            if redirect.original is not None:
                module.__dict__["forward"] = redirect.original

    def clear(self) -> None:
        """Take all back."""
        for module in list(self._targets):
            self.remove(module)

    @contextmanager
    def suspended(self, *modules: nn.Module) -> Iterator[None]:
        """Let modules be called as if nothing were redirected: these, or all."""
        targets = {m: to for m, to in self._targets.items() if not modules or m in modules}
        for module in targets:
            self._take_off(module)
        try:
            yield
        finally:
            for module, target in targets.items():
                self.add(module, target)


def is_redirected(module: nn.Module) -> bool:
    """Whether calls of a module, or loops over it, go to something else."""
    listens = isinstance(module, Listening) and module.is_attached
    return listens or isinstance(module.__dict__.get("forward"), Redirect)


def not_alone(*args: Any, **kwargs: Any) -> Any:
    """The forward of a layer that another stage holds."""
    raise RuntimeError(
        "A layer of the backbone was called by itself, and the layers are on several stages: call"
        " the backbone as a whole, or all of its layers in a loop, `for layer in self.backbone`."
    )


@contextmanager
def reading_data() -> Iterator[None]:
    """Refuse calls of the backbone inside: the other stages wait for the data."""
    token = _IS_READING.set(True)
    try:
        yield
    finally:
        _IS_READING.reset(token)


def refuse_reading() -> None:
    """Refuse a call of the backbone by what reads the data.

    Raises:
        RuntimeError: If the running call is one.
    """
    if _IS_READING.get():
        raise RuntimeError(
            "A data loader calls the backbone, and data are read on the first stage alone, which"
            " hasn't all of its layers. Call the model in a hook, such as on_train_epoch_start,"
            " which runs on every stage, and let the loader read what the hook has stored; or let"
            " the loader call a copy that isn't the backbone."
        )


def is_transforming() -> bool:
    """Whether a function transform runs: one of ``torch.func``, or forward-mode differentiation."""
    in_forward_mode: int = getattr(torch.autograd.forward_ad, "_current_level", -1)
    return in_forward_mode >= 0 or torch._C._functorch.peek_interpreter_stack() is not None


def refuse_transforms() -> None:
    """Refuse calls of the backbone inside a function transform, which no other stage would see.

    Raises:
        RuntimeError: If the running call is one.
    """
    if is_transforming():
        raise RuntimeError(
            "The backbone is called inside a function transform (vmap, grad, vjp, jvp and the like"
            " of torch.func, or torch.autograd.forward_ad), which goes no further than a stage."
            " Transform what stands behind the backbone alone, or call a copy that isn't the"
            " backbone (self.other = copy.deepcopy(self.backbone))."
        )
