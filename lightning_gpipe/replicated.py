"""What every stage of a pipeline holds: the modules outside the backbone, and what stages share.

Each stage computes a part of the gradients of these parameters: the last one through the code
behind the backbone, the first one through the code before it, a stage that shares a weight through
its layers. The sum is the gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_gpipe.links import Links


class Replicated:
    """Keeps replicated parameters and buffers equal on all stages.

    Args:
        parameters: The replicated parameters, in the same order on every stage.
        buffers: Returns the replicated floating-point buffers, in the same order on every stage.
        links: The process groups.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], buffers: Callable[[], list[Tensor]], links: Links
    ) -> None:
        self._parameters = list(parameters)
        self._buffers = buffers
        self._links = links
        self._versions = [b._version for b in buffers()]
        self._summed: dict[nn.Parameter, Tensor] = {}
        self._aside: dict[nn.Parameter, Tensor] = {}

    def before_backward(self) -> None:
        """Set aside gradients that are summed already, so that they are not summed again."""
        for parameter, gradient in self._summed.items():
            if parameter.grad is gradient:
                self._aside[parameter] = gradient
                parameter.grad = None
        self._summed = {}

    @torch.no_grad()
    def synchronize(self) -> None:
        """Sum gradients over the stages, and give all the first stage's buffers. Collective.

        A gradient that is missing on some stages counts as zeros there; on all, it stays missing.
        """
        if self._links.stages == 1:
            return
        buffers = self._buffers()
        if not self._parameters and not buffers:
            return
        moved = [b._version != version for b, version in zip(buffers, self._versions, strict=True)]
        present = [p.grad is not None for p in self._parameters]
        news = torch.tensor([*present, *moved], dtype=torch.uint8)
        dist.all_reduce(news, dist.ReduceOp.MAX, self._links.host)
        anywhere = news.bool().tolist()
        wanted = [p for p, has in zip(self._parameters, anywhere, strict=False) if has]
        for dtype in dict.fromkeys(p.dtype for p in wanted):
            self._sum([p for p in wanted if p.dtype == dtype])
        stale = [b for b, has in zip(buffers, anywhere[len(present) :], strict=True) if has]
        for dtype in dict.fromkeys(b.dtype for b in stale):
            self._broadcast([b for b in stale if b.dtype == dtype])
        self._versions = [b._version for b in buffers]
        for parameter, gradient in self._aside.items():
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        self._aside = {}
        self._summed = {p: p.grad for p in self._parameters if p.grad is not None}

    def _sum(self, parameters: list[nn.Parameter]) -> None:
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            elif parameter.grad.layout != torch.strided:
                raise RuntimeError(
                    f"A parameter of shape {tuple(parameter.shape)} outside the backbone has a"
                    f" sparse gradient, which"
                    " can't be summed over the stages: build its nn.Embedding with sparse=False."
                )
        gradients = [p.grad for p in parameters if p.grad is not None]
        flat = self._to_wire(gradients)
        dist.all_reduce(flat, dist.ReduceOp.SUM, self._links.down)
        self._from_wire(flat, gradients)

    def _broadcast(self, buffers: list[Tensor]) -> None:
        flat = self._to_wire(buffers)
        dist.broadcast(flat, self._links.ranks[0], self._links.down)
        self._from_wire(flat, buffers)

    def _to_wire(self, tensors: list[Tensor]) -> Tensor:
        flat = torch.cat([t.reshape(-1) for t in tensors])
        return flat.cpu() if self._links.through_host else flat

    def _from_wire(self, flat: Tensor, tensors: list[Tensor]) -> None:
        for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
            tensor.copy_(part.view(tensor.shape))
