"""Where the pipeline joins the autograd graph of the user's step.

For autograd a call of the backbone is two nodes::

    user's code before ──> CallNode ──token──> ExitNode ──> user's code after ──> loss

``ExitNode`` catches the gradient of the output, ``CallNode`` runs the pipeline's backward and
returns the input's gradient. On the last stage a backward from the loss goes through both. On the
others the loss's gradient is nobody's business: a ``SteerNode`` gives them a loss of the same value
whose graph leads straight to the tokens of the calls that the last stage reaches. So one traversal
of autograd runs on each stage, in the same order, and calls may be chained, skipped around, or
share what stands before them. A token lives as long as the graph of its output, or of a call that
follows on it, no longer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from lightning_gpipe.model.notes import add_note
from lightning_gpipe.tensors.graph import next_of, nodes_of

_sequence_number: Callable[[], int] = getattr(torch.autograd, "_get_sequence_nr")  # noqa: B009
_run_backward: Callable[..., object] = getattr(torch.autograd.graph, "_engine_run_backward")  # noqa: B009
RunBackward: TypeAlias = Callable[[], list[Tensor | None]]
CatchGradients: TypeAlias = Callable[[Sequence[Tensor | None]], None]


def run_backward(
    roots: Sequence[GradientEdge | Tensor], gradients: Sequence[Tensor], retain: bool = False
) -> None:
    """What ``torch.autograd.backward`` does, where every root is given a gradient of its shape.

    It checks and completes what it is given in Python, once a micro-batch, while others wait.

    Args:
        roots: Where it begins: edges, or tensors of torch's own class.
        gradients: Theirs.
        retain: Whether the graph is kept.
    """
    try:
        _run_backward(
            tuple(roots),
            tuple(gradients),
            retain,
            False,
            (),
            allow_unreachable=True,
            accumulate_grad=True,
        )
    except RuntimeError as error:
        if "backward through the graph a second time" in str(error):
            add_note(error, _IN_COMMON)
        raise


_IN_COMMON = (
    "Several micro-batches go back through one graph, as that of a tensor that a step computes and"
    " sets on a layer: hand it to the backbone with its input, or compute it in the layer."
)


class CallNode(torch.autograd.Function):
    """The node whose backward runs the pipeline's."""

    @staticmethod
    def forward(
        ctx: Any,
        number: int,
        run_backward: RunBackward,
        tokens: list[Tensor],
        anchor: Tensor,
        *sources: Tensor,
    ) -> Tensor:
        ctx.gpipe_call, ctx.run_backward = number, run_backward
        ctx.tokens = tokens  # of the calls before: a node alone doesn't keep its tensor alive
        ctx.set_materialize_grads(False)
        return anchor.detach()  # its value is nobody's

    @staticmethod
    def backward(ctx: Any, _: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "create_graph=True, so a gradient penalty, is not supported through the backbone."
            )
        gradients = ctx.run_backward()
        sources = len(ctx.needs_input_grad) - 4
        return (None, None, None, None, *(gradients or [None] * sources))


class ExitNode(torch.autograd.Function):
    """The node that makes the output differentiable, and catches its gradient.

    Where the backbone's part of the graph is another, ``given`` is the input of which it is.
    """

    @staticmethod
    def forward(
        ctx: Any,
        catch: CatchGradients,
        token: Tensor,
        leaves: list[Tensor],
        given: Sequence[Tensor] | None = None,
    ) -> tuple[Tensor, ...]:
        ctx.catch, ctx.token, ctx.gpipe_given = catch, token, given
        ctx.set_materialize_grads(False)
        return tuple(
            leaf.detach() for leaf in leaves
        )  # detached: views could not be changed in place

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None, None, None]:
        ctx.catch(gradients)
        return None, None, None, None


class SteerNode(torch.autograd.Function):
    """A loss of the same value whose graph leads to the given tokens."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, *tokens: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        return loss.detach().clone()

    @staticmethod
    def backward(ctx: Any, _: Tensor | None) -> tuple[None, ...]:
        return (None,) * len(ctx.needs_input_grad)


NO_GRADIENT = (
    "The loss wants no gradient: it depends neither on the backbone's output nor on any parameter"
    " that requires one. Was it detached, or computed under torch.no_grad()?"
)


def no_values(name: str, tensors: Iterable[Tensor]) -> str | None:
    """What to say of tensors without values; None: all have some.

    Args:
        name: What they are.
        tensors: What was computed.
    """
    if not any(isinstance(tensor, FakeTensor) or tensor.is_meta for tensor in tensors):
        return None
    return (
        f"{name} has no values. Before the first step the layers run once without values, to see"
        " what they compute, and a table or cache outside the module has kept a tensor of that."
        " Keep it in the module, as a buffer, or fill it before the Trainer runs."
    )


@dataclass(frozen=True, slots=True)
class Behind:
    """What tensors depend on.

    Args:
        calls: Numbers of calls of the backbone.
        leaves: Tensors that want a gradient and were not computed, such as parameters.
        nodes: When the nodes of the graph were made, as numbers that grow.
    """

    calls: set[int]
    leaves: list[Tensor]
    nodes: list[int]

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> Behind:
        """What tensors depend on, up to the calls of the backbone and what these depend on."""
        behind = cls(set(), [], [])
        for node in nodes_of(t.grad_fn for t in tensors if t.grad_fn is not None):
            number, leaf = getattr(node, "gpipe_call", None), getattr(node, "variable", None)
            if number is not None:
                behind.calls.add(number)
            elif leaf is not None:
                behind.leaves.append(leaf)
            else:
                behind.nodes.append(node._sequence_nr())
        behind.leaves.extend(t for t in tensors if t.is_leaf and t.requires_grad)
        return behind


def leads_through(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor | GradientEdge], body: nn.Module
) -> bool:
    """Whether gradients of inputs come through the backbone, or may not come at all.

    Args:
        outputs: What is differentiated.
        inputs: By what.
        body: The backbone.
    """
    nodes = set(nodes_of((t.grad_fn for t in outputs if t.grad_fn is not None), _outside))
    calls = [node for node in nodes if hasattr(node, "gpipe_call")]
    given = [getattr(node, "gpipe_given", None) for node in nodes]
    if not calls and all(tensors is None for tensors in given):
        return False
    before = [get_gradient_edge(tensor).node for tensors in given for tensor in tensors or ()]
    inside = set(nodes_of([*calls, *before]))
    own = set(map(id, body.parameters()))
    for wanted in inputs:
        if isinstance(wanted, Tensor):
            if id(wanted) in own or not wanted.requires_grad:
                return True
            wanted = get_gradient_edge(wanted)
        if wanted.node not in nodes - inside:
            return True
    return False


def _outside(node: Any) -> list[Any]:
    """The nodes to which a node leads without the backbone."""
    return [] if hasattr(node, "gpipe_call") else next_of(node)


class LayerForwards:
    """When the layers ran in a step: what was made then is none of the user's graph.

    They run inside it as a context.
    """

    def __init__(self) -> None:
        self._times: list[tuple[int, int]] = []
        self._start = 0

    def __enter__(self) -> None:
        self._start = _sequence_number()

    def __exit__(self, *_: object) -> None:
        self._times.append((self._start, _sequence_number()))

    def clear(self) -> None:
        """Forget the step before."""
        self._times.clear()

    def problem(self, behind: Behind) -> str | None:
        """What is wrong with a loss or the backbone's input that depends on what layers made."""
        if any(start <= n < end for n in behind.nodes for start, end in self._times):
            return (
                "The loss, or the backbone's input, depends on a tensor that a layer or a hook has"
                " kept while the backbone ran, which is one micro-batch's. Return it with the"
                " backbone's output, shape [batch, ...], and let the step use that."
            )
        return None
