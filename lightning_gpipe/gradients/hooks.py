"""Hooks on parameters, such as those that scale a gradient or step an optimizer in the backward.

Autograd would call them for every micro-batch, on every stage with what that stage added. They are
taken off for the length of a backward, and called at its end with the gradient of the mini-batch.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_gpipe.comm.groups import Groups
from lightning_gpipe.model.parameters import Slot, parameters_of
from lightning_gpipe.tensors.random_state import DrawsNoted


class ParameterHooks:
    """Calls hooks on parameters once per backward.

    Args:
        own: What this stage alone holds.
        replicated: What every stage holds.
        groups: The process groups.
    """

    def __init__(self, own: Sequence[Slot], replicated: Sequence[Slot], groups: Groups) -> None:
        self._own, self._replicated = parameters_of(own), parameters_of(replicated)
        self._groups = groups

    @contextmanager
    def postponed(self, sum_up: Callable[[], object]) -> Iterator[bool]:
        """Run a backward, and what makes its gradients whole, inside this context.

        Args:
            sum_up: Sums what earlier backwards left unsummed over the stages. Collective.

        Yields:
            Whether hooks wait for gradients that are summed over stages: they must be then.

        Raises:
            RuntimeError: If there are hooks, and replicas.
        """
        own = [p for p in self._own if _has_hooks(p)]
        replicated = [p for p in self._replicated if _has_hooks(p)]
        if not own and not replicated:
            yield False
            return
        if self._groups.replicas > 1:
            raise RuntimeError(
                f"A parameter of shape {tuple((own + replicated)[0].shape)} has a hook"
                " (register_hook or register_post_accumulate_grad_hook), and gradients are averaged"
                " over replicas: change the average in the hook on_before_optimizer_step instead,"
                " or use as many devices as stages."
            )
        if replicated:
            sum_up()
        held = [_Held.take(p) for p in (*own, *replicated)]
        try:
            yield bool(replicated)
        finally:
            for hooks in held:
                hooks.put_back()
        noted = DrawsNoted(self._groups.device)
        for hooks in held:
            hooks.run()
        if self._groups.stages > 1 and noted.has_drawn():
            raise RuntimeError(
                "A hook on a parameter draws random numbers, and each stage calls the hooks of its"
                " own parameters: the weights would depend on the number of stages. Use one stage,"
                " or let each hook draw from a torch.Generator of its own."
            )


@dataclass(frozen=True, slots=True)
class _Held:
    """The hooks of a parameter, and its gradient of the backwards before."""

    parameter: nn.Parameter
    before: dict[int, Callable[[Tensor], Tensor | None]] | None
    after: dict[int, Callable[[Tensor], Any]] | None
    gradient: Tensor | None

    @classmethod
    def take(cls, parameter: nn.Parameter) -> _Held:
        """Take a parameter's hooks and gradient off it."""
        hooks: Any = parameter
        held = cls(
            parameter, hooks._backward_hooks, hooks._post_accumulate_grad_hooks, parameter.grad
        )
        hooks._backward_hooks = None
        hooks._post_accumulate_grad_hooks = OrderedDict()  # None would leave the hooks there
        parameter.grad = None
        return held

    def put_back(self) -> None:
        """Give the parameter its hooks back."""
        hooks: Any = self.parameter
        hooks._backward_hooks, hooks._post_accumulate_grad_hooks = self.before, self.after

    @torch.no_grad()
    def run(self) -> None:
        """Call the hooks with this backward's gradient, and add it to those before."""
        parameter, gradient = self.parameter, self.parameter.grad
        if gradient is None:  # the loss didn't reach it
            parameter.grad = self.gradient
            return
        for before in list((self.before or {}).values()):
            changed = before(gradient)
            gradient = gradient if changed is None else changed
        parameter.grad = gradient if self.gradient is None else self.gradient.add_(gradient)
        for after in list((self.after or {}).values()):
            after(parameter)


def _has_hooks(parameter: nn.Parameter) -> bool:
    hooks: Any = parameter
    return bool(hooks._backward_hooks or hooks._post_accumulate_grad_hooks)
