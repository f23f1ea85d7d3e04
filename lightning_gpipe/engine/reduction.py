"""How losses are reduced: whether those of micro-batches average to that of the mini-batch."""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

from lightning_gpipe.comm.looks import is_due
from lightning_gpipe.engine.node_shapes import is_of_one_sample, shape_of, sums_samples
from lightning_gpipe.engine.running import Outcome, Running
from lightning_gpipe.engine.step_graph import Samples, look_of, made_of
from lightning_gpipe.tensors.graph import next_of, nodes_of

_SUM = 2  # as losses note their reductions
_GRAPHS = 64  # that are looked at as soon as they come; more may be others every time
#: Operations between scalars through which a sum stays one, by the names of their nodes.
_THROUGH = (
    *("Add", "Sub", "Rsub", "Neg", "Mul", "ToCopy", "View", "Squeeze", "Unsqueeze", "Clone"),
)
#: Operations that put scalars together, and add them up.
_TOGETHER = ("Cat", "Mean", "Select", "Squeeze", "Stack", "Sum", "Unbind", "Unsqueeze", "View")
#: Operations that aren't linear, between scalars or of all samples.
_CURVED = {
    *("Abs", "Acos", "Clamp", "ClampMax", "ClampMin", "Cos", "Exp", "Expm1", "LogSigmoid"),
    *("Log", "Log10", "Log1P", "Log2", "Maximum", "Minimum", "Pow", "Reciprocal", "Relu"),
    *("Rsqrt", "Sigmoid", "Softplus", "Sqrt", "Tanh"),
    *("Amax", "Amin", "Dist", "LinalgVectorNorm", "Logsumexp", "Max", "Min", "Norm", "Prod"),
    *("Std", "Var"),
    # of several reduced terms that were stacked
    *("Cummax", "Cummin", "Cumprod", "Kthvalue", "LogSoftmax", "Median", "Softmax", "Sort", "Topk"),
}


@dataclass(slots=True)
class _Seen:
    """What the graph of a micro-batch's loss shows.

    Args:
        counts: The numbers that means and quotients divide by.
        shares: Those that sums over samples are divided by, for each element of a sample.
    """

    counts: list[float] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)


@dataclass(slots=True)
class Reductions:
    """Warns of a loss that is a sum, a mean over different numbers of elements, or no mean.

    It looks at the graphs of losses, so it knows reductions of PyTorch's own losses, and sums and
    quotients that are written out: of all that have another graph than those before, and of those
    of some mini-batches, since numbers may have changed.

    Args:
        root: The leaf behind which the graph of the backbone's output is.
        is_told: Whether nothing is to be looked at, any more.
        mixer: The function that computes a loss of samples together; see :class:`.Outcome`.
    """

    root: Tensor
    is_told: bool
    mixer: str | None = None
    _has_sum: bool = False
    _curve: str = ""  # the operation that makes it no mean
    _seen: dict[int, _Seen] = field(default_factory=dict)  # by micro-batch
    _count: int = 0  # of mini-batches
    _looks: bool = False  # at this one
    _graph: int = 0  # that of its first loss
    _graphs: set[int] = field(default_factory=set)  # that were looked at

    def look(self, running: Running, outcome: Outcome) -> None:
        """Look at a micro-batch's loss, before its backward.

        Args:
            running: Its mini-batch.
            outcome: What the step returned for it.
        """
        loss, m = outcome.loss, running.m
        if self.is_told or loss is None or loss.grad_fn is None or len(running.sizes) == 1:
            return
        if not self._is_looked_at(m, loss.grad_fn):
            return
        self._seen[m] = seen = _Seen()
        samples = running.sizes[m]
        brings = partial(self._brings, Samples.of(samples, running.given[m]))
        of_samples = made_of(brings, loss.grad_fn)
        late = _of_scalars(of_samples)
        for node, sums in _reductions(loss.grad_fn, samples, seen, late):
            if sums and node in of_samples:
                self._has_sum = True
        if _adds_each_sample(loss.grad_fn, samples, of_samples, late):
            self._has_sum = True
        if samples > 1 and not self._curve:
            self._curve = _curved(loss.grad_fn, samples, of_samples, late)

    def _brings(self, data: Samples, node: Any) -> bool:
        """Whether a node of a loss's graph brings samples in: as the backbone's output, or data."""
        return getattr(node, "variable", None) is self.root or data.come_in(node)

    def _is_looked_at(self, m: int, node: Any) -> bool:
        """Whether the losses of this mini-batch are looked at, of which one is at hand."""
        if m == 0:
            self._count += 1
            self._graph = look_of(node)
            is_new = self._graph not in self._graphs and len(self._graphs) < _GRAPHS
            self._looks = is_new or is_due(self._count)
        return self._looks

    def warn(self, running: Running) -> None:
        """Warn once, at the end of a mini-batch, where all losses were looked at."""
        seen = [self._seen[m] for m in sorted(self._seen)]
        self._seen.clear()
        if self.is_told or not seen or len(seen) < len(running.sizes):
            return
        self._graphs.add(self._graph)
        if (problem := self._problem(seen, running)) is not None:
            self.is_told = True
            warnings.warn(problem, stacklevel=2)

    def _problem(self, seen: Sequence[_Seen], running: Running) -> str | None:
        """Why the mean of the micro-batches' losses may not be the mini-batch's loss."""
        is_weighted = running.weighting.is_given
        if not is_weighted and (self._has_sum or _are_shares(seen, running.sizes)):
            return (
                "The loss seems to be a sum over samples. With step='micro-batch' it becomes the"
                f" mean of the {len(seen)} micro-batches' losses, which is 1/{len(seen)} of the"
                " mini-batch's sum, and so do the gradients. Return a mean; if it is one, but of"
                " what was averaged over the batch before, use GPipeStrategy(step='mini-batch')."
            )
        is_other = not is_weighted and _differ([each.counts for each in seen], running.sizes)
        if is_other and not self._curve:
            return (
                "The loss is a mean over different numbers of elements in different micro-batches,"
                " such as tokens that aren't padding, or over different weights, and each"
                ' micro-batch counts by its samples. Return {"loss": loss, "weight": the number of'
                " elements, or the sum of their weights} from the step, so that the mini-batch's"
                " loss is the mean over all of them. If it adds up several means over numbers of"
                " their own, or compares samples, use GPipeStrategy(step='mini-batch')."
            )
        if self._curve or self.mixer is not None:
            name = self._curve or self.mixer
            by = f"'{name}' computes it" if name else "it is computed"
            return (
                f"The loss isn't a mean over samples: {by} of several samples together. With"
                f" step='micro-batch' it becomes the mean of the {len(seen)} micro-batches'"
                " losses, which isn't the mini-batch's, and neither are the gradients, nor what"
                " is logged of samples together. Compute"
                " what is of all samples of the data, such as weights of classes or advantages"
                " less their mean, in on_after_batch_transfer, which sees the mini-batch; for"
                " anything else use GPipeStrategy(step='mini-batch')."
            )
        return None


def _are_shares(seen: Sequence[_Seen], sizes: Sequence[int]) -> bool:
    """Whether sums are divided by the number of samples of the mini-batch."""
    pairs = zip(seen, sizes, strict=True)
    return all(sum(sizes) in each.shares and size not in each.shares for each, size in pairs)


def _of_scalars(of_samples: Collection[Any]) -> set[Any]:
    """The nodes that compute with scalars alone, as with several losses that were stacked.

    Args:
        of_samples: Nodes of a graph.
    """
    users, open_ = dict[Any, list[Any]](), dict[Any, int]()
    for node in of_samples:
        given = {following for following, _ in node.next_functions if following in of_samples}
        open_[node] = len(given) or -1
        for following in given:
            users.setdefault(following, []).append(node)
    known = {n for n in of_samples if not hasattr(n, "variable") and _has_no_dimension(n)}
    late, left = set[Any](), list(known)
    while left:
        for user in users.get(left.pop(), ()):
            open_[user] -= 1
            if not open_[user]:
                late.add(user)
                if user not in known:
                    left.append(user)
    return late


def _curved(node: Any, samples: int, of_samples: Collection[Any], late: Collection[Any]) -> str:
    """The name of an operation that isn't linear in what was reduced over samples.

    Args:
        node: The loss's.
        samples: How many there are.
        of_samples: The nodes that compute with samples.
        late: Those that compute with scalars alone.
    """
    for scalar in _scalars(node, of_samples, late, (*_THROUGH, "Div", *_TOGETHER)):
        name = scalar.name().partition("Backward")[0]
        theirs = [following in of_samples for following, _ in scalar.next_functions]
        is_quotient = name == "Div" and len(theirs) == 2 and theirs[1]
        pairs = ("Dot", "Mul", "Mv") if scalar in late else ("Mul",)  # others sum samples up
        is_product = name in pairs and sum(theirs) == 2
        if is_quotient or is_product or (name in _CURVED and any(theirs)):
            reductions = [
                node
                for node in _scalars(scalar, of_samples, late, ("",))
                if sums_samples(node, samples) and not is_of_one_sample(node, of_samples)
            ]
            if reductions:
                return str(name.lower())
    return ""


def _scalars(
    node: Any, among: Collection[Any], late: Collection[Any], through: tuple[str, ...]
) -> Iterator[Any]:
    """A node and those behind it that make scalars, or compute with scalars alone.

    Args:
        node: The node.
        among: Those that are looked at.
        late: Those that compute with scalars alone.
        through: How the names of operations begin behind which others are looked for.
    """

    def following(node: Any) -> list[Any]:
        behind = next_of(node) if node.name().startswith(through) else []
        return [n for n in behind if n in among and (n in late or _is_scalar(n))]

    return nodes_of([node], following)


def _reductions(
    node: Any, samples: int, noted: _Seen, late: Collection[Any]
) -> Sequence[tuple[Any, bool]]:
    """The nodes that make scalars of a loss's elements, and whether they sum samples up.

    Args:
        node: The loss's.
        samples: How many there are.
        noted: Gets the numbers that they divide by.
        late: The nodes that compute with scalars alone.
    """
    found, left, seen = [], [node], {node}
    while left:
        node = left.pop()
        name, reduction = node.name(), getattr(node, "_saved_reduction", None)
        if reduction is not None:
            found.append((node, reduction == _SUM))
            total = getattr(node, "_saved_total_weight", None)
            if reduction != _SUM and total is not None:
                noted.counts.append(float(total))
        elif node in late and name.startswith(_TOGETHER):
            left += [n for n, _ in node.next_functions if n is not None and n not in seen]
            seen.update(n for n, _ in node.next_functions)
        elif name.startswith("MeanBackward"):
            noted.counts.append(math.prod(shape_of(node)))
        elif name.startswith(("SumBackward", "DotBackward")):
            found.append((node, sums_samples(node, samples)))
        elif name.startswith("Div"):
            divisor, divided = _factor(node), node.next_functions[0][0]
            is_sum = divided is not None and divided.name().startswith("SumBackward")
            is_sum = is_sum and divided not in late
            by_weights = is_sum and sums_samples(divided, samples) and math.isfinite(divisor)
            if by_weights or divisor.is_integer():
                noted.counts.append(divisor)
            for number in _divided(divided, samples):
                noted.shares.append(divisor / number)
        elif name.startswith(_THROUGH) and not _is_share(name, node, samples):
            for following, _ in node.next_functions:
                if following is not None and following not in seen and _is_scalar(following):
                    seen.add(following)
                    left.append(following)
    return found


def _adds_each_sample(
    node: Any, samples: int, of_samples: Collection[Any], late: Collection[Any]
) -> bool:
    """Whether a loss adds up a scalar of each sample, as in a loop over them.

    Args:
        node: The loss's.
        samples: How many there are.
        of_samples: The nodes that compute with samples.
        late: Those that compute with scalars alone.
    """
    added = ("Add", "Cat", "Neg", "Select", "Squeeze", "Stack", "Sum", "Unbind", "Unsqueeze")
    alone, left, seen = 0, [node], {node}
    while left:
        node = left.pop()
        name = node.name()
        is_factor = name.startswith("Mul") and _factor(node) >= 1  # less may be a share
        if node in late and (is_factor or name.startswith(added)):
            behind = [n for n in next_of(node) if n in of_samples and n not in seen]
            left += behind
            seen.update(behind)
        elif node not in late:
            alone += is_of_one_sample(node, of_samples)
    return alone == samples > 1


def _divided(node: Any, samples: int) -> set[float]:
    """How many elements of each sample a sum may be of; nothing: it is none over samples."""
    is_of_classes = node is not None and node.name().startswith("NllLoss")
    shape = shape_of(node, "target" if is_of_classes else "self") if node is not None else []
    is_sum = getattr(node, "_saved_reduction", None) == _SUM
    is_sum = is_sum or (node is not None and node.name().startswith("SumBackward"))
    if not is_sum or not shape or not math.prod(shape) or shape[0] % samples:
        return set()
    return {1.0, shape[0] / samples, math.prod(shape) / samples}


def _factor(node: Any) -> float:
    """By what an operation multiplies or divides a scalar; not a number: not known."""
    other = getattr(node, "_saved_other", None)
    if not isinstance(other, Tensor) or other.numel() != 1:
        return math.nan
    return float(other.detach())


def _is_share(name: str, node: Any, samples: int) -> bool:
    """Whether an operation multiplies by one over the number of samples, or of what is summed.

    Multiplied by 0, what is summed is there for its graph alone.
    """
    factor = _factor(node) if name.startswith("Mul") else 1.0
    if not factor:
        return True
    number = 1 / factor
    summed = [math.prod(shape_of(n)) for n, _ in node.next_functions if n is not None]
    # a half is in many a formula
    return number > 2 and any(math.isclose(number, count) for count in (samples, *summed))


def _is_scalar(node: Any) -> bool:
    try:
        return all(math.prod(kind.shape) == 1 for kind in getattr(node, "_input_metadata", ()))
    except RuntimeError:  # a nested tensor has no shape
        return False


def _has_no_dimension(node: Any) -> bool:
    made = getattr(node, "_input_metadata", ())
    return bool(made) and _is_scalar(node) and not any(kind.shape for kind in made)


def _differ(counts: Sequence[Sequence[float]], sizes: Sequence[int]) -> bool:
    """Whether any number isn't the same for each sample, or the same for each micro-batch."""
    if len({len(each) for each in counts}) > 1:
        return False  # other losses: nothing can be said
    for column in zip(*counts, strict=True):
        shares = [number / size for number, size in zip(column, sizes, strict=True)]
        if not (_are_equal(shares) or _are_equal(column)):
            return True
    return False


def _are_equal(numbers: Sequence[float]) -> bool:
    return all(math.isclose(number, numbers[0], rel_tol=1e-5) for number in numbers)
