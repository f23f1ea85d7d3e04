"""Weights that a stage doesn't hold, lent to it where the user calls modules outside of steps.

In a hook a user may call the model, to write a sample or to look at a prediction. Then every stage
computes what stands outside the backbone, so the stages that hold it lend it to the others.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_gpipe.comm.messages import ObjectChannel
from lightning_gpipe.model.parameters import Slot, outside_modules
from lightning_gpipe.state.placement import Placement


class Lending:
    """Lends what not every stage holds, while a module that needs it is called.

    Args:
        module: The user's module.
        backbone: Its backbone, which runs in stages wherever it is called.
        placement: Which stage holds what.
        channel: The pipeline's object channel.
        is_stepping: Whether a step runs, where every stage computes its own part.
    """

    def __init__(
        self,
        module: nn.Module,
        backbone: nn.Module,
        placement: Placement,
        channel: ObjectChannel,
        is_stepping: Callable[[], bool],
    ) -> None:
        self._channel, self._is_stepping = channel, is_stepping
        self._depth = 0
        self._lent: dict[int, nn.Parameter] = {}  # by the slot's number
        self._replaced: list[tuple[nn.Module, str, nn.Parameter | None]] = []
        self._hooks: list[RemovableHandle] = []
        slots = [
            (i, slot)
            for i, slot in enumerate(placement.slots)
            if slot.is_parameter and slot.is_outside and slot.owner is not None
        ]
        for part in outside_modules(module, backbone):
            inside = {id(p) for p in part.parameters()}
            needed = [(i, slot) for i, slot in slots if id(slot.tensor) in inside]
            if needed:
                begin, end = _Hook(partial(self.begin, needed)), _Hook(self.end)
                self._hooks.append(part.register_forward_pre_hook(begin))
                self._hooks.append(part.register_forward_hook(end, always_call=True))

    def forget(self) -> None:
        """Let go of what was lent: it may change from here on."""
        self._lent.clear()

    def close(self) -> None:
        """Take the hooks off the modules."""
        for hook in self._hooks:
            hook.remove()
        self.forget()

    def begin(self, needed: list[tuple[int, Slot]]) -> None:
        """Begin a call of a module. Collective over the pipeline outside of steps."""
        self._depth += 1
        if self._depth > 1 or self._is_stepping():
            return
        for i, slot in needed:
            if slot.owner is None:
                continue
            if i not in self._lent:
                is_owner = self._channel.index == slot.owner
                own = slot.tensor.data if is_owner else None
                value: Tensor = self._channel.broadcast("lent weights", own, source=slot.owner)
                self._lent[i] = nn.Parameter(value, requires_grad=False)
            if not slot.is_on(self._channel.index):
                for module, key in slot.places:
                    self._replaced.append((module, key, module._parameters[key]))
                    module._parameters[key] = self._lent[i]

    def end(self) -> None:
        """End a call."""
        self._depth -= 1
        if not self._depth:
            for module, key, own in self._replaced:
                module._parameters[key] = own
            self._replaced.clear()


class _Hook:
    """A hook that a copy of the module doesn't have."""

    def __init__(self, act: Callable[[], None]) -> None:
        self._act = act

    def __call__(self, *_: Any) -> None:
        self._act()

    def __reduce__(self) -> Any:
        return _get_nothing, ()


def _nothing(*_: Any) -> None:
    return None


def _get_nothing() -> Any:
    return _nothing
