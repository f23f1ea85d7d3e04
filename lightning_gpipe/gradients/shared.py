"""What every stage holds: the modules outside the backbone, and what stages share.

Each stage computes a part of the gradients of these parameters: the last one through the code
behind the backbone, the first one through the code before it, a stage that shares a weight through
its layers. The sum is the gradient, and its average over the replicas. So are buffers kept equal:
over stages and replicas everybody takes over the first one's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_gpipe.comm.groups import Groups
from lightning_gpipe.comm.messages import ObjectChannel
from lightning_gpipe.gradients.data_parallel import refuse_sparse
from lightning_gpipe.model.parameters import Slot, parameters_of


class SharedParameters:
    """Keeps replicated parameters and buffers equal on all stages and replicas.

    Args:
        slots: The replicated parameters and buffers, in the same order on every stage.
        own: The parameters and buffers that this stage alone holds.
        shared_buffers: Buffers that layers of several virtual stages use, on whichever stage.
        groups: The process groups.
        broadcast_buffers: Whether replicas take over the first one's buffers.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        own: Sequence[Slot],
        shared_buffers: Sequence[Slot],
        groups: Groups,
        broadcast_buffers: bool,
    ) -> None:
        self._parameters = parameters_of(slots)
        self._outside = [slot for slot in slots if not slot.is_parameter and slot.is_outside]
        self._shared = list(shared_buffers)
        self._versions = [slot.tensor._version for slot in self._shared]
        self._groups = groups
        #: buffers, and among whom they become equal
        self._broadcasts: list[tuple[list[Slot], ObjectChannel]] = []
        if groups.stages > 1:
            self._broadcasts.append((self._outside, groups.pipeline))
        if groups.replicas > 1 and broadcast_buffers:
            held = [*self._outside, *(slot for slot in own if not slot.is_parameter)]
            self._broadcasts.append((held, groups.siblings))
        self._is_whole = True  # gradients are the same on all stages, also where the user set them
        self._has_shared = True  # buffers, since the step began

    def take_over(self, other: SharedParameters) -> None:
        """Go on from where another one is that has summed the same gradients so far."""
        self._is_whole = other._is_whole

    def before_backward(self) -> None:
        """Leave gradients that are summed already to the first stage, to be summed once."""
        if self._is_whole and not self._groups.is_first:
            for parameter in self._parameters:
                parameter.grad = None
        self._is_whole = False

    def sum_up(self) -> None:
        """Sum gradients that accumulated unsummed. Collective, if there are any."""
        if not self._is_whole:
            self.synchronize()

    @torch.no_grad()
    def summed(self) -> Mapping[int, Tensor]:
        """Sums of gradients that accumulated unsummed, which stay as they are. Collective.

        Returns:
            By the ``id`` of their parameters; none, if gradients are summed already.
        """
        channel = self._groups.pipeline
        if self._is_whole or channel.is_alone or not self._parameters:
            return {}
        own = [p.grad is not None for p in self._parameters]
        news = torch.tensor(own, dtype=torch.uint8, device="cpu")
        anywhere = channel.all_reduce(news, dist.ReduceOp.MAX).bool().tolist()
        sums = {}
        for p in (p for p, has in zip(self._parameters, anywhere, strict=True) if has):
            refuse_sparse(p)
            own_part = torch.zeros_like(p) if p.grad is None else p.grad.clone()
            sums[id(p)] = channel.all_reduce(own_part)
        return sums

    def synchronize(self) -> None:
        """Sum gradients over stages, average them over replicas, share buffers. Collective.

        A gradient that is missing on some stages counts as zeros there; on all, it stays missing.
        """
        groups = self._groups
        if groups.stages == groups.replicas == 1:
            self._refuse_moved(self._moved())
            return
        if self._parameters or self._shared:
            self._synchronize_gradients()
        self._is_whole, self._has_shared = True, True
        self._share_buffers()

    def before_step(self) -> None:
        """Share buffers that hooks have moved since the last optimizer step. Collective.

        As DistributedDataParallel does: not while gradients accumulate.
        """
        if self._is_whole and self._groups.replicas > 1:
            self._share_buffers()
        self._has_shared = False

    def after_step(self) -> None:
        """Share buffers that a step without a backward has moved, in the same way. Collective."""
        if self._is_whole and not self._has_shared and self._groups.replicas > 1:
            self._share_buffers()

    @torch.no_grad()
    def _share_buffers(self) -> None:
        """Give all ranks the first one's buffers. Collective."""
        for slots, channel in self._broadcasts:
            channel.share([slot.tensor for slot in slots])

    @torch.no_grad()
    def _synchronize_gradients(self) -> None:
        groups = self._groups
        own = [*(p.grad is not None for p in self._parameters), *self._moved()]
        news = torch.tensor(own, dtype=torch.uint8, device="cpu")
        for channel in (groups.pipeline, groups.siblings):
            news = channel.all_reduce(news, dist.ReduceOp.MAX)
        anywhere = news.bool().tolist()
        self._refuse_moved(anywhere[len(self._parameters) :])
        wanted = [p for p, has in zip(self._parameters, anywhere, strict=False) if has]
        for dtype in dict.fromkeys(p.dtype for p in wanted):
            self._sum([p for p in wanted if p.dtype == dtype])

    def _moved(self) -> list[bool]:
        """For each buffer that layers of several stages share whether this stage changed it."""
        pairs = zip(self._shared, self._versions, strict=True)
        return [slot.tensor._version != version for slot, version in pairs]

    def _refuse_moved(self, moved: Sequence[bool]) -> None:
        if any(moved):
            name = self._shared[moved.index(True)].names[0]
            raise RuntimeError(
                f"The buffer {name} is used by layers of several stages, and one changed it: each"
                " stage would have its own. Give each layer a buffer of its own, or choose a"
                " `balance` that keeps its users on one stage."
            )

    def _sum(self, parameters: list[nn.Parameter]) -> None:
        for parameter in parameters:
            refuse_sparse(parameter)
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [p.grad for p in parameters if p.grad is not None]
        flat = self._groups.pipeline.all_reduce(torch.cat([g.reshape(-1) for g in gradients]))
        flat = self._groups.siblings.all_reduce(flat)
        if self._groups.replicas > 1:
            flat.div_(self._groups.replicas)
        parts = flat.split([gradient.numel() for gradient in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view(gradient.shape))
