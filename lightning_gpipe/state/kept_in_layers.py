"""What layers keep beside tensors, such as counters and extra state: their stage alone has it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from lightning_gpipe.comm.messages import ObjectChannel
from lightning_gpipe.state.placement import Placement

_PLAIN = (bool, int, float, complex, str, type(None))
_TORCHS = frozenset(vars(nn.Module()))


@dataclass(frozen=True, slots=True)
class _Kept:
    """What a module keeps.

    Args:
        part: The module's dotted name.
        attributes: Numbers, strings and flags.
        extra: What ``get_extra_state`` returns, in a tuple; none, if it has no such state.
    """

    part: str
    attributes: dict[str, Any]
    extra: tuple[Any, ...]


def share_kept(module: nn.Module, placement: Placement, channel: ObjectChannel) -> None:
    """Give every stage what layers of others keep. Collective.

    Args:
        module: The user's module.
        placement: Which stage holds what.
        channel: The pipeline's object channel.
    """
    found = channel.gather([*_kept(module, placement)])
    for stage, parts in enumerate(found):
        for kept in parts if stage != channel.index else ():
            part = module.get_submodule(kept.part)
            vars(part).update(kept.attributes)
            for extra in kept.extra:
                part.set_extra_state(extra)


def _kept(module: nn.Module, placement: Placement) -> Iterator[_Kept]:
    """What this stage's layers keep."""
    for layer, stage in placement.layers.items():
        if stage != placement.stage:
            continue
        for name, part in module.get_submodule(layer).named_modules(prefix=layer):
            attributes = {
                key: value
                for key, value in vars(part).items()
                if type(value) in _PLAIN and key not in _TORCHS
            }
            extra = (part.get_extra_state(),) if _has_extra_state(type(part)) else ()
            if attributes or extra:
                yield _Kept(name, attributes, extra)


def _has_extra_state(kind: type[nn.Module]) -> bool:
    """Whether state dicts have it, and can be loaded."""
    return (
        kind.get_extra_state is not nn.Module.get_extra_state
        and kind.set_extra_state is not nn.Module.set_extra_state
    )
