"""What layers have got in the run and no slot holds: new buffers, numbers, extra state.

Their stage alone has it, so the others get it when the run ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from lightning_gpipe.comm.messages import ObjectChannel
from lightning_gpipe.model.places import OF_MODULES
from lightning_gpipe.state.placement import Placement

_PLAIN = (bool, int, float, complex, str, type(None))


@dataclass(frozen=True, slots=True)
class _Kept:
    """What a module keeps.

    Args:
        part: The module's dotted name.
        buffers: Those that it has made since the cut, by name, in host memory.
        unsaved: Names of those that state dicts leave out.
        attributes: Numbers, strings and flags.
        extra: What ``get_extra_state`` returns, in a tuple; none, if it has no such state.
    """

    part: str
    buffers: dict[str, Tensor]
    unsaved: set[str]
    attributes: dict[str, Any]
    extra: tuple[Any, ...]


def share_kept(module: nn.Module, placement: Placement, channel: ObjectChannel) -> None:
    """Give every stage what layers of others keep. Collective.

    Args:
        module: The user's module.
        placement: Which stage holds what.
        channel: The pipeline's object channel.
    """
    found = channel.gather("kept in layers", [*_kept(module, placement)])
    for stage, parts in enumerate(found):
        for kept in parts if stage != channel.index else ():
            part = module.get_submodule(kept.part)
            part._buffers.update(kept.buffers)
            part._non_persistent_buffers_set |= kept.unsaved
            part.__dict__.update(kept.attributes)
            for extra in kept.extra:
                part.set_extra_state(extra)


def _kept(module: nn.Module, placement: Placement) -> Iterator[_Kept]:
    """What this stage's layers keep."""
    known = {(id(part), key) for slot in placement.slots for part, key in slot.places}
    for layer, stage in placement.layers.items():
        if stage != placement.stage:
            continue
        for name, part in module.get_submodule(layer).named_modules(prefix=layer):
            buffers = {
                key: buffer.detach().cpu()
                for key, buffer in part._buffers.items()
                if buffer is not None and (id(part), key) not in known
            }
            attributes = {
                key: value
                for key, value in vars(part).items()
                if type(value) in _PLAIN and key not in OF_MODULES
            }
            extra = (part.get_extra_state(),) if _has_extra_state(type(part)) else ()
            if buffers or attributes or extra:
                unsaved = buffers.keys() & part._non_persistent_buffers_set
                yield _Kept(name, buffers, unsaved, attributes, extra)


def _has_extra_state(kind: type[nn.Module]) -> bool:
    """Whether state dicts have it, and can be loaded."""
    return (
        kind.get_extra_state is not nn.Module.get_extra_state
        and kind.set_extra_state is not nn.Module.set_extra_state
    )
