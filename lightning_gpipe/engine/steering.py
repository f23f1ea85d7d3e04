"""Leads the backward of every stage through the same calls of the backbone, in the same order.

The last stage alone has the graph behind the backbone's output, so it alone knows which calls a
loss reaches. It tells the others, and they differentiate a loss whose graph leads to just these.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_gpipe.comm.groups import Groups
from lightning_gpipe.engine.autograd import (
    NO_GRADIENT,
    Behind,
    CallNode,
    CatchGradients,
    ExitNode,
    LayerForwards,
    RunBackward,
    SteerNode,
    no_values,
)

_GRAD: Any = Tensor.grad


class Stranger(Tensor):
    """A tensor that requires a gradient and is no parameter of the module; no stage has all of it.

    A pipeline makes it of the user's tensor, which is used like any other but for its gradient.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @property
    def grad(self) -> Any:
        """Refused: this stage has a part of it at most."""
        raise RuntimeError(_refusal(self))

    @grad.setter
    def grad(self, value: Any) -> None:
        _GRAD.__set__(self, value)

    @grad.deleter
    def grad(self) -> None:
        _GRAD.__delete__(self)


def _refusal(stranger: Tensor) -> str:
    return (
        f"A tensor of shape {tuple(stranger.shape)} requires a gradient and is no parameter of the"
        " module, so each stage would have a part of its gradient. Make it an nn.Parameter of the"
        " module, outside the backbone: then all parts are summed. If its gradient isn't wanted,"
        " detach it."
    )


class Steering:
    """The calls of the backbone in autograd's graph of one rank.

    Args:
        groups: The process groups.
        parameters: The module's parameters by ``id``, whose gradients all stages sum.
    """

    def __init__(self, groups: Groups, parameters: frozenset[int]) -> None:
        self._groups = groups
        #: When the layers ran in this step.
        self.forwards = LayerForwards()
        self._tokens: dict[int, weakref.ref[Tensor]] = {}
        self._announced: deque[int] = deque()
        self._is_first = True
        self._anchor = torch.zeros((), device=groups.device, requires_grad=True)
        self._known_leaves = parameters | {id(self._anchor)}

    @property
    def is_through(self) -> bool:
        """Whether the running backward has reached all calls that it will."""
        return not self._announced

    def begin_step(self) -> None:
        """Forget the forwards of the step before."""
        self.forwards.clear()
        self._tokens = {n: known for n, known in self._tokens.items() if known() is not None}

    def join(
        self,
        number: int,
        inputs: Sequence[Tensor],
        outputs: list[Tensor],
        run_backward: RunBackward,
        catch: CatchGradients,
    ) -> tuple[Tensor, ...]:
        """Make a call a part of the user's graph.

        Args:
            number: Counts the calls; the same on every stage.
            inputs: The tensors of its input.
            outputs: Those of its output that want a gradient, without a graph.
            run_backward: Runs the backward and returns the gradients of the inputs that want one,
                on the first stage; on others nothing.
            catch: Gets the outputs' gradients before that.

        Returns:
            The outputs, with a graph.
        """
        sources, tokens = [tensor for tensor in inputs if tensor.requires_grad], []
        behind = Behind.of(sources)
        self._estrange(behind)
        problem = self._problem(behind)
        if problem is not None:
            raise RuntimeError(problem)
        if not self._groups.is_first:
            # the input's gradient arises on the first stage; only the order matters here
            found = (self._token(number) for number in sorted(behind.calls))
            sources = tokens = [token for token in found if token is not None]
        token: Tensor = CallNode.apply(number, run_backward, tokens, self._anchor, *sources)
        self._tokens[number] = weakref.ref(token)
        joined: tuple[Tensor, ...] = ExitNode.apply(catch, token, outputs)
        return joined

    def steer(self, loss: Tensor) -> Tensor:
        """Prepare a backward. Collective over the pipeline.

        Args:
            loss: The user's loss, a scalar, the same on every stage.

        Returns:
            What to call ``backward`` on: on the last stage the loss, on others its value with a
            graph that leads to the same calls of the backbone.

        Raises:
            RuntimeError: If the loss wants no gradient.
        """
        groups = self._groups
        problem, numbers = None, list[int]()
        behind = Behind.of([loss])
        self._estrange(behind)
        if groups.is_last:
            problem = self._problem(behind) if loss.requires_grad else NO_GRADIENT
            problem = no_values("The loss", [loss]) or problem
            numbers = sorted(behind.calls, reverse=True)
        problem, numbers = groups.pipeline.broadcast(
            "backward", (problem, numbers), source=groups.stages - 1
        )
        if problem is not None:
            raise RuntimeError(problem)
        self._announced.extend(numbers)
        self._is_first = True
        if groups.is_last:
            return loss
        tokens = list(map(self._token, numbers))
        missing = [n for n, token in zip(numbers, tokens, strict=True) if token is None]
        if missing:
            raise RuntimeError(
                f"The last stage differentiates call {missing[0]} of the backbone, of which stage"
                f" {groups.stage} has dropped the output: the step must do the same on every"
                " rank."
            )
        steered: Tensor = SteerNode.apply(loss.detach(), self._anchor, *tokens)
        return steered

    def _token(self, number: int) -> Tensor | None:
        """What leads to a call; None: the graphs behind it are gone."""
        known = self._tokens.get(number)
        return known() if known is not None else None

    def _estrange(self, behind: Behind) -> None:
        """Let nobody read a part of a gradient, on any stage."""
        if self._groups.stages > 1:
            for leaf in behind.leaves:
                if type(leaf) is Tensor and id(leaf) not in self._known_leaves:
                    leaf.__class__ = Stranger

    def _problem(self, behind: Behind) -> str | None:
        """What is wrong with what a loss or the backbone's input depends on."""
        if (problem := self.forwards.problem(behind)) is not None:
            return problem
        if self._groups.stages > 1:
            for leaf in behind.leaves:
                if id(leaf) not in self._known_leaves and type(leaf) is not Stranger:
                    return _refusal(leaf)
        return None

    def reach(self, number: int) -> bool:
        """Note that the backward has reached a call.

        Returns:
            Whether it is the first one of this backward.

        Raises:
            RuntimeError: If it is not the one that comes next.
        """
        if not self._announced or self._announced[0] != number:
            raise RuntimeError(
                "A backward reached the backbone without the strategy knowing of it. In manual"
                " optimization call self.manual_backward(loss), not loss.backward()."
            )
        self._announced.popleft()
        is_first, self._is_first = self._is_first, False
        return is_first

    def finish(self) -> None:
        """Check that a backward reached all calls that :meth:`steer` announced."""
        if self._announced:
            left = list(self._announced)
            self._announced.clear()
            raise RuntimeError(
                f"The backward did not reach calls {left} of the backbone on stage"
                f" {self._groups.stage}: a LightningModule.backward override must call"
                " loss.backward(*args, **kwargs) on the loss that it gets."
            )
