"""Notices layers and parameters that change after a module was cut."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_gpipe.model.parameters import trained_by


@dataclass(frozen=True, slots=True)
class Structure:
    """The layers and parameters that a module has when it is cut.

    Args:
        entries: Dotted names with the registers that modules keep of their parameters and
            submodules, and what these hold.
        parameters: The module's parameters by ``id``; None where new ones do no harm.
    """

    entries: tuple[tuple[str, dict[str, Any], tuple[Any, ...]], ...]
    parameters: frozenset[int] | None

    @classmethod
    def of(cls, module: nn.Module, backbone: str, is_alone: bool) -> Structure:
        """The structure of a module.

        Args:
            module: The user's module.
            backbone: Dotted name of its backbone.
            is_alone: Whether one rank holds all of it: then only the layers must stay.
        """
        body = module.get_submodule(backbone)
        registers = [(backbone, body._modules)]
        if not is_alone:
            registers += _registers(module, backbone)
        entries = tuple((name, register, tuple(register.values())) for name, register in registers)
        known = frozenset(id(p) for p in module.parameters())
        return cls(entries, None if is_alone else known)

    def check(self, optimizers: Iterable[Optimizer] = ()) -> None:
        """Check that nothing was added, removed or replaced.

        Args:
            optimizers: Those of the run, which may train what the module had and nothing else.

        Raises:
            RuntimeError: With what to do instead.
        """
        for name, register, before in self.entries:
            now = tuple(register.values())
            if len(now) != len(before) or any(a is not b for a, b in zip(now, before, strict=True)):
                raise _changed(f"Parameters or layers of '{name}' were added, removed or replaced")
        if self.parameters is None:
            return
        for optimizer in optimizers:
            for parameter in trained_by(optimizer):
                if isinstance(parameter, Tensor) and id(parameter) not in self.parameters:
                    raise _changed(
                        f"{type(optimizer).__name__} has a parameter of shape"
                        f" {tuple(parameter.shape)} that was made"
                    )


def _registers(module: nn.Module, backbone: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Where the parts of a backbone, and the parameters outside it, are registered."""
    for name, part in module.named_modules():
        is_inside = name == backbone or name.startswith(f"{backbone}.")
        if is_inside or part._parameters:
            yield name or "the module", part._parameters
        if is_inside and name != backbone:
            yield name, part._modules


def _changed(what: str) -> RuntimeError:
    return RuntimeError(
        f"{what} after the module was cut into stages, and stages train what it had then. Build the"
        " module in its constructor or in configure_model, or change it between two runs of the"
        " Trainer. To set the values of a parameter, copy into it under torch.no_grad():"
        " weight.copy_(values)."
    )
