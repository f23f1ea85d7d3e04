"""What both ends of a link remember of what crossed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from lightning_gpipe.comm.channel import Channel
from lightning_gpipe.comm.packet import PacketLayout, PacketLayouts
from lightning_gpipe.comm.signature import Signature, TensorType

_IN_PACKET = 1 << 20  # bytes up to which a message more costs more than a copy

#: Whether the call trains, and the micro-batch.
MessagePlace: TypeAlias = tuple[bool, int]


@dataclass(slots=True)
class Remembered:
    """What both ends of a link remember of one place.

    Args:
        layout: What travels in one packet with the header.
        signature: The last one.
        stable: Whether it was the same the last two times: then it is what the receiver expects,
            and has posted.
        is_packed: Whether all of it travels in the packet.
    """

    layout: PacketLayout
    signature: Signature | None = None
    stable: bool = False
    is_packed: bool = False

    def beside(self, channel: Channel) -> list[TensorType]:
        """What the receiver has posted ahead, besides the packet."""
        if self.signature is None or not self.stable:
            return []
        types = self.signature.tensor_types
        return [k for k in types if not (self.layout.kinds and channel.is_in_host(k))]

    @property
    def nbytes(self) -> int:
        """Bytes of what crossed last."""
        return sum(k.nbytes for k in self.signature.tensor_types) if self.signature else 0

    def update(self, signature: Signature, channel: Channel, layouts: PacketLayouts) -> None:
        """Remember what was sent; a signature that didn't change is the same object."""
        stable = signature is self.signature
        if stable != self.stable:
            kinds = tuple(k for k in signature.tensor_types if channel.is_in_host(k))
            nbytes = sum(kind.nbytes for kind in kinds)
            kinds = kinds if stable and 0 < nbytes <= _IN_PACKET else ()
            self.layout = layouts[kinds]
            self.is_packed = stable and kinds == signature.tensor_types
        self.signature, self.stable = signature, stable
