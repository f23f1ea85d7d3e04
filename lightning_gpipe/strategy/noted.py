"""A function that a step has run, with what it takes to run it again."""

from __future__ import annotations

from typing import NamedTuple

import torch

from lightning_gpipe.model.ran import Ran

#: Half precision.
LOW = {torch.float16, torch.bfloat16}
_RECURRENT = {"gru", "lstm", "rnn_relu", "rnn_tanh"}


class Noted(NamedTuple):
    """A function that a step has run.

    Args:
        ran: The function.
        is_here: Whether this stage has what it was given.
        has_grad: Whether gradients were enabled.
        autocast: Whether autocast was, and its type.
        default: The default type.
    """

    ran: Ran
    is_here: bool
    has_grad: bool
    autocast: tuple[bool, torch.dtype]
    default: torch.dtype

    def rounds_to_half(self, samples: int) -> bool:
        """Whether it makes something of all samples in half precision, or is computed by that.

        Args:
            samples: How many there are.
        """
        ran, (enabled, dtype) = self.ran, self.autocast
        if enabled and dtype in LOW and ran.name in _RECURRENT:
            return True  # inside, whatever the type of what it has made
        most = max((tensor.numel() for tensor in ran.given), default=0)
        low = [t for t in ran.made if t.dtype in LOW and t.numel() * samples <= most]
        return any(not t.ndim or len(t) != samples for t in low)

    @classmethod
    def now(cls, ran: Ran, is_here: bool, device: torch.device) -> Noted:
        """A function that has just run."""
        enabled = torch.is_autocast_enabled(device.type)
        autocast = enabled, torch.get_autocast_dtype(device.type)
        return cls(ran, is_here, torch.is_grad_enabled(), autocast, torch.get_default_dtype())
