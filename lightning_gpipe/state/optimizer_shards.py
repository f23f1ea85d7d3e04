"""Optimizer state that the replicas of a stage share out: ZeRO, stage 1 (Rajbhandari et al. 2020).

Every replica has the whole average gradient. Each keeps the optimizer state of some of the stage's
parameters, steps these alone, and then gives the others the new values. The user's optimizers stay
what they are. While one steps, gradients of the parameters that other replicas step are taken away:
an optimizer passes over a parameter without a gradient, and makes no state for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_gpipe.comm.messages import ObjectChannel
from lightning_gpipe.model.parameters import trained_by
from lightning_gpipe.state.placement import Placement


class OptimizerShards:
    """Which replica of a stage keeps the optimizer state of a parameter, and steps it.

    Args:
        channel: The object channel between the replicas; None: each keeps and steps all.
    """

    def __init__(self, channel: ObjectChannel | None) -> None:
        self._channel = channel
        self._keepers: dict[Tensor, int] = {}
        self._placement: Placement | None = None
        self._taken: dict[Optimizer, list[tuple[Tensor, Tensor]]] = {}
        self._hooks: dict[Optimizer, tuple[RemovableHandle, RemovableHandle]] = {}

    @property
    def count(self) -> int:
        """Over how many replicas the state is shared out."""
        return 1 if self._channel is None else len(self._channel.ranks)

    def keeper(self, parameter: Tensor) -> int:
        """The replica that keeps the state of a parameter; 0 where all do."""
        return self._keepers.get(parameter, 0)

    def keeps(self, parameter: Tensor) -> bool:
        """Whether this replica keeps the state of a parameter that its stage holds."""
        if self._channel is None or parameter not in self._keepers:
            return True
        return self._keepers[parameter] == self._channel.index

    def attach(self, optimizers: Sequence[Optimizer]) -> None:
        """Take part in the steps of optimizers from now on.

        Before the first one begins, since that one may cut the module, and makes the state.
        """
        for optimizer in optimizers if self._channel is not None else ():
            if optimizer not in self._hooks:
                self._hooks[optimizer] = (
                    optimizer.register_step_pre_hook(self._before_step),
                    _first_of_all(optimizer.register_step_post_hook(self._after_step)),
                )

    def share_out(self, optimizers: Sequence[Optimizer], placement: Placement) -> None:
        """Share out the state of optimizers.

        What is shared out already stays where it is, until the stage holds other parameters. Then
        all is shared out anew, and state moves. Collective over the replicas.

        Args:
            optimizers: Those of the run.
            placement: Which parameters this stage holds.
        """
        if self._channel is None:
            return
        self._placement, before = placement, self._keepers
        if not all(map(placement.is_here, before)):
            self._keepers = {}
        for optimizer in optimizers:
            parameters = self._parameters(optimizer)
            self._assign(parameters)
            _move(optimizer, parameters, before, self._keepers, self._channel)
        self.attach(optimizers)

    def close(self) -> None:
        """Let the optimizers step as they did before."""
        for hook in (hook for hooks in self._hooks.values() for hook in hooks):
            hook.remove()
        self._hooks.clear()

    def _assign(self, parameters: Sequence[Tensor]) -> None:
        """Decide who keeps the state of an optimizer's parameters; the same on all replicas.

        The largest first, each to the replica that has least of this optimizer; those that aren't
        trained for the moment after the others.
        """
        new = [parameter for parameter in parameters if parameter not in self._keepers]
        if not new:
            return
        sizes, totals = [0] * self.count, [0] * self.count
        for loads, known in ((sizes, parameters), (totals, self._keepers)):
            for parameter in known:
                if parameter in self._keepers:
                    loads[self._keepers[parameter]] += parameter.nbytes
        for parameter in sorted(new, key=lambda p: (not p.requires_grad, -p.nbytes)):
            least = min(range(self.count), key=lambda replica: (sizes[replica], totals[replica]))
            self._keepers[parameter] = least
            sizes[least] += parameter.nbytes
            totals[least] += parameter.nbytes

    def _parameters(self, optimizer: Optimizer) -> list[Tensor]:
        """What this stage holds of an optimizer's parameters, once the module is cut."""
        if self._placement is None:
            return []
        return [p for p in trained_by(optimizer) if self._placement.is_here(p)]

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Take gradients away, after the closure that computes them if there is one."""
        return after_closure(args, kwargs, partial(self._take, optimizer))

    def _take(self, optimizer: Optimizer) -> None:
        taken, parameters = [], self._parameters(optimizer)
        self._assign(parameters)  # those of groups that were added
        for parameter in parameters:
            if parameter.grad is not None and not self.keeps(parameter):
                taken.append((parameter, parameter.grad))
                parameter.grad = None
        self._taken[optimizer] = taken

    @torch.no_grad()
    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Give gradients back, and each other the new values. Collective over the replicas."""
        for parameter, gradient in self._taken.pop(optimizer, ()):
            parameter.grad = gradient
        channel, parameters = self._channel, self._parameters(optimizer)
        if channel is None:
            return
        has_gradient = [p.grad is not None for p in parameters]
        stepped = torch.tensor(has_gradient, dtype=torch.uint8, device="cpu")
        stepped = channel.all_reduce(stepped, dist.ReduceOp.MAX)
        moved = [
            p for p, is_stepped in zip(parameters, stepped.tolist(), strict=True) if is_stepped
        ]
        for replica in range(self.count):
            channel.share([p for p in moved if self.keeper(p) == replica], source=replica)


def after_closure(
    args: tuple[Any, ...], kwargs: dict[str, Any], act: Callable[[], None]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Act in a step of an optimizer after its closure, which computes gradients; else at once.

    Args:
        args: What the step is called with, the optimizer first.
        kwargs: The same.
        act: What is called.

    Returns:
        What the step is called with instead; None: it has no closure.
    """
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if not callable(closure):
        act()
        return None

    def closure_and_act() -> Any:
        result = closure()
        act()
        return result

    if "closure" in kwargs:
        return args, {**kwargs, "closure": closure_and_act}
    return (args[0], closure_and_act, *args[2:]), kwargs


def _move(
    optimizer: Optimizer,
    parameters: Sequence[Tensor],
    before: Mapping[Tensor, int],
    after: Mapping[Tensor, int],
    channel: ObjectChannel,
) -> None:
    """Move an optimizer's state from those that kept it to those that do now."""
    for parameter in parameters:
        keeper = after[parameter]
        source = before.get(parameter, keeper)
        if source == channel.index != keeper:
            channel.send("optimizer state", optimizer.state.pop(parameter, None), to=keeper)
        elif keeper == channel.index != source:
            state = channel.receive("optimizer state", source)
            if state is not None:
                optimizer.state[parameter] = state


def _first_of_all(hook: RemovableHandle) -> RemovableHandle:
    """Have a hook called before the user's, which may read what it brings."""
    hooks = hook.hooks_dict_ref()
    if hooks is not None:
        hooks.move_to_end(hook.id, last=False)
    return hook
