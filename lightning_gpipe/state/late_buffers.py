"""Buffers that layers have made after the module was cut: their stage alone has them."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from lightning_gpipe.comm.messages import ObjectChannel
from lightning_gpipe.state.placement import Placement


def share_late_buffers(module: nn.Module, placement: Placement, channel: ObjectChannel) -> None:
    """Give every stage the buffers that layers of others have made. Collective.

    Args:
        module: The user's module.
        placement: Which stage holds what.
        channel: The pipeline's object channel.
    """
    found = channel.gather([*_late(module, placement)])
    for stage, late in enumerate(found):
        for name, key, value, is_saved in late if stage != channel.index else ():
            part = module.get_submodule(name)
            part._buffers[key] = value
            if not is_saved:
                part._non_persistent_buffers_set.add(key)


def _late(module: nn.Module, placement: Placement) -> Iterator[tuple[str, str, Tensor, bool]]:
    """Those of this stage's layers.

    Returns:
        For each the name of the module that has it, its name there, its value in host memory, and
        whether state dicts have it.
    """
    known = {(id(part), key) for slot in placement.slots for part, key in slot.places}
    for layer, stage in placement.layers.items():
        if stage != placement.stage:
            continue
        for name, part in module.get_submodule(layer).named_modules(prefix=layer):
            for key, buffer in part._buffers.items():
                if buffer is not None and (id(part), key) not in known:
                    is_saved = key not in part._non_persistent_buffers_set
                    yield name, key, buffer.detach().cpu(), is_saved
