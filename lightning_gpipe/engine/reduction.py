"""How losses are reduced: whether those of micro-batches average to that of the mini-batch."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from lightning_gpipe.engine.running import Outcome, Running

_SUM = 2  # as losses note their reductions
#: Operations between scalars through which a sum stays one, by the names of their nodes.
_THROUGH = (
    *("Add", "Sub", "Rsub", "Neg", "Mul", "ToCopy", "View", "Squeeze", "Unsqueeze", "Clone"),
)
#: Operations that aren't linear, between scalars or of all samples.
_CURVED = {
    *("Abs", "Acos", "Clamp", "ClampMax", "ClampMin", "Cos", "Exp", "Expm1", "LogSigmoid"),
    *("Log", "Log10", "Log1P", "Log2", "Maximum", "Minimum", "Pow", "Reciprocal", "Relu"),
    *("Rsqrt", "Sigmoid", "Softplus", "Sqrt", "Tanh"),
    *("Amax", "Amin", "Dist", "LinalgVectorNorm", "Logsumexp", "Max", "Min", "Norm", "Prod"),
    *("Std", "Var"),
}


@dataclass(slots=True)
class Reductions:
    """Warns of a loss that is a sum, a mean over different numbers of elements, or no mean.

    It looks at the graphs of the first mini-batch's losses, so it knows reductions of PyTorch's own
    losses, and sums and quotients that are written out.

    Args:
        root: The leaf behind which the graph of the backbone's output is.
        is_told: Whether nothing is to be looked at, any more.
    """

    root: Tensor
    is_told: bool
    _has_sum: bool = False
    _curve: str = ""  # the operation that makes it no mean
    _counts: dict[int, list[float]] = field(default_factory=dict)

    def look(self, m: int, samples: int, outcome: Outcome) -> None:
        """Look at a micro-batch's loss, before its backward.

        Args:
            m: The micro-batch.
            samples: How many it has.
            outcome: What the step returned for it.
        """
        loss = outcome.loss
        if self.is_told or loss is None or loss.grad_fn is None:
            return
        counts, of_output = list[float](), _made_of(self.root, loss.grad_fn)
        for node, of_samples in _reductions(loss.grad_fn, samples, counts.append):
            if of_samples and node in of_output:
                self._has_sum = True
        self._counts[m] = counts
        if samples > 1 and not self._curve:
            self._curve = _curved(loss.grad_fn, samples, of_output)

    def warn(self, running: Running) -> None:
        """Warn once, at the end of a mini-batch, where all losses were looked at."""
        if self.is_told or len(self._counts) < len(running.sizes):
            return
        self.is_told = True
        counts = [self._counts[m] for m in range(len(running.sizes))]
        self._counts.clear()
        if running.weighting.is_given or len(counts) == 1:
            return
        if self._has_sum:
            warnings.warn(
                "The loss seems to be a sum over samples. With step='micro-batch' it becomes the"
                f" mean of the {len(counts)} micro-batches' losses, which is 1/{len(counts)} of the"
                " mini-batch's sum, and so do the gradients. Return a mean, or use"
                " GPipeStrategy(step='mini-batch').",
                stacklevel=2,
            )
        elif self._curve:
            warnings.warn(
                f"The loss isn't a mean over samples: '{self._curve}' computes it of several"
                " samples together. With step='micro-batch' it becomes the mean of the"
                f" {len(counts)} micro-batches' losses, which isn't the mini-batch's, and neither"
                " are the gradients. Use GPipeStrategy(step='mini-batch').",
                stacklevel=2,
            )
        elif _differ(counts, running.sizes):
            warnings.warn(
                "The loss is a mean over different numbers of elements in different micro-batches,"
                " such as tokens that aren't padding, or over different weights, and each"
                ' micro-batch counts by its samples. Return {"loss": loss, "weight": the number of'
                " elements, or the sum of their weights} from the step, so that the mini-batch's"
                " loss is the mean over all of them.",
                stacklevel=2,
            )


def _made_of(leaf: Tensor, node: Any) -> set[Any]:
    """Those of a loss's nodes that compute with a leaf.

    Args:
        leaf: The leaf.
        node: The loss's.
    """
    users, seen, left, found = dict[Any, list[Any]](), {node}, [node], list[Any]()
    while left:
        node = left.pop()
        if getattr(node, "variable", None) is leaf:
            found.append(node)
        for following, _ in node.next_functions:
            if following is not None:
                users.setdefault(following, []).append(node)
                if following not in seen:
                    seen.add(following)
                    left.append(following)
    theirs = {*found}
    while found:
        fresh = {user for user in users.get(found.pop(), ()) if user not in theirs}
        theirs |= fresh
        found += fresh
    return theirs


def _curved(node: Any, samples: int, of_output: Collection[Any]) -> str:
    """The name of an operation that isn't linear in what was reduced over samples, or pairs them.

    Args:
        node: The loss's.
        samples: How many there are.
        of_output: The nodes that compute with the backbone's output.
    """
    for each in of_output:
        if _pairs(each, samples, of_output):
            return "matmul"
        if _mixes(each, samples):
            return str(each.name().partition("Backward")[0].lower())
    for scalar in _scalars(node, of_output, (*_THROUGH, "Div")):
        name = scalar.name().partition("Backward")[0]
        theirs = [following in of_output for following, _ in scalar.next_functions]
        is_quotient = name == "Div" and len(theirs) == 2 and theirs[1]
        is_product = name == "Mul" and sum(theirs) == 2
        if is_quotient or is_product or (name in _CURVED and any(theirs)):
            reductions = [
                node
                for node in _scalars(scalar, of_output, ("",))
                if _sums_samples(node, samples) and not _is_of_one_sample(node, of_output)
            ]
            if reductions:
                return str(name.lower())
    return ""


def _pairs(node: Any, samples: int, of_output: Collection[Any]) -> bool:
    """Whether a product of matrices is one of each sample with each, or sums products up."""
    is_product = node.name().startswith(("MmBackward", "BmmBackward"))
    if not is_product or not all(n in of_output for n, _ in node.next_functions):
        return False
    left, right = _shape_of(node, "self"), _shape_of(node, "mat2")
    if not left or not right or math.prod(left[:-2]) > 1:
        return False
    is_of_pairs = left[-2] % samples == 0 and left[-2] == right[-1]
    return (is_of_pairs or left[-1] == samples) and not _is_of_one_sample(node, of_output)


def _mixes(node: Any, samples: int) -> bool:
    """Whether an operation puts samples beside others, or compares them."""
    name = node.name()
    if name.startswith(("RollBackward", "FlipBackward")):  # 0 dimensions roll all as one
        return not node._saved_dims or 0 in _signed(node._saved_dims)
    if name.startswith(("CdistBackward", "EuclideanDistBackward")):
        left, right = _shape_of(node, "x1"), _shape_of(node, "x2")
        return len(left) == len(right) == 2 and left[0] == right[0] and left[0] % samples == 0
    return bool(name.startswith("PdistBackward"))


def _is_of_one_sample(node: Any, of_output: Collection[Any]) -> bool:
    """Whether a node computes with a row of the output, as in a loop over the samples."""
    left, seen = [node], {node}
    while left:
        node = left.pop()
        if node.name().startswith(("Select", "Unbind")) and node._saved_dim == 0:
            return True
        fresh = {n for n, _ in node.next_functions if n in of_output and n not in seen}
        seen |= fresh
        left += fresh
    return False


def _scalars(node: Any, among: Collection[Any], through: tuple[str, ...]) -> Iterator[Any]:
    """A node and those behind it that make scalars.

    Args:
        node: The node.
        among: Those that are looked at.
        through: How the names of operations begin behind which others are looked for.
    """
    left, seen = [node], {node}
    while left:
        node = left.pop()
        yield node
        if node.name().startswith(through):
            for following, _ in node.next_functions:
                if following in among and following not in seen and _is_scalar(following):
                    seen.add(following)
                    left.append(following)


def _reductions(
    node: Any, samples: int, count: Callable[[float], None]
) -> Sequence[tuple[Any, bool]]:
    """The nodes that make scalars of a loss's elements, and whether they sum samples up.

    Args:
        node: The loss's.
        samples: How many there are.
        count: Takes the number that a mean or a quotient divides by.
    """
    found, left, seen = [], [node], {node}
    while left:
        node = left.pop()
        name, reduction = node.name(), getattr(node, "_saved_reduction", None)
        if reduction is not None:
            found.append((node, reduction == _SUM))
            total = getattr(node, "_saved_total_weight", None)
            if reduction != _SUM and total is not None:
                count(float(total))
        elif name.startswith(("SumBackward", "DotBackward")):
            found.append((node, _sums_samples(node, samples)))
        elif name.startswith("Div"):
            divisor, divided = _factor(node), node.next_functions[0][0]
            is_sum = divided is not None and divided.name().startswith("SumBackward")
            by_weights = is_sum and _sums_samples(divided, samples) and math.isfinite(divisor)
            if by_weights or divisor.is_integer():
                count(divisor)
        elif name.startswith(_THROUGH) and not _is_share(name, node, samples):
            for following, _ in node.next_functions:
                if following is not None and following not in seen and _is_scalar(following):
                    seen.add(following)
                    left.append(following)
    return found


def _sums_samples(node: Any, samples: int) -> bool:
    """Whether the first dimension of what is summed up, or reduced, seems to be the samples'."""
    shape = _shape_of(node) or _shape_of(node, "tensor")  # the other factor of a product
    dims = getattr(node, "_saved_dim", None)
    dims = [dims] if isinstance(dims, int) else dims
    sums_first = not dims or any(d % max(len(shape), 1) == 0 for d in _signed(dims))
    if samples < 2 or not shape or not sums_first:
        return False
    # samples by tokens, and no square of features
    is_flat = len(shape) > 1 and shape[0] % samples == 0 and shape[0] != shape[1]
    return bool(is_flat or shape[0] == samples)


def _shape_of(node: Any, name: str = "self") -> list[int]:
    """The shape of an operation's input, as far as its node keeps it."""
    sizes = getattr(node, f"_saved_{name}_sym_sizes", None)
    if sizes is not None:
        return [*sizes]
    try:
        kept = getattr(node, f"_saved_{name}", None)
    except RuntimeError:  # it was changed in place since, or isn't kept any more
        return []
    return [*kept.shape] if isinstance(kept, Tensor) else []


def _factor(node: Any) -> float:
    """By what an operation multiplies or divides a scalar; not a number: not known."""
    other = getattr(node, "_saved_other", None)
    return float(other) if isinstance(other, Tensor) and other.numel() == 1 else math.nan


def _is_share(name: str, node: Any, samples: int) -> bool:
    """Whether an operation multiplies by one over the number of samples, or of what is summed."""
    factor = _factor(node) if name.startswith("Mul") else 0.0
    number = 1 / factor if factor else 0.0
    summed = [math.prod(_shape_of(n)) for n, _ in node.next_functions if n is not None]
    # a half is in many a formula
    return number > 2 and any(math.isclose(number, count) for count in (samples, *summed))


def _signed(dims: Sequence[int]) -> list[int]:
    return [d - 2**64 if d >= 2**63 else d for d in dims]


def _is_scalar(node: Any) -> bool:
    try:
        return all(math.prod(kind.shape) == 1 for kind in getattr(node, "_input_metadata", ()))
    except RuntimeError:  # a nested tensor has no shape
        return False


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
