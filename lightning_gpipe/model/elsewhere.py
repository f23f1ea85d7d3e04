"""Parameters and buffers that another stage holds: everything but their values.

They are on the meta device, and PyTorch lets code compute with such tensors: a real tensor is
changed in place by one without effect, an output comes out as uninitialised memory. So they are of
a class of their own, which lets names, shapes, optimizers and copies work, and refuses to be read.

What is computed of them alone, such as an average of two that the same stage holds, stays there; a
tensor that is written to is written to by the stage that holds it.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from types import FrameType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_gpipe.model.arithmetic import DIVIDE, MULTIPLY
from lightning_gpipe.model.refused import Refused
from lightning_gpipe.model.remote import METADATA, tensors_given, tensors_in
from lightning_gpipe.tensors import strides

#: The attribute that says who holds a tensor.
HOLDER = "_gpipe_holder"


class HeldElsewhere(Refused):
    """A step reads the values of a tensor that another stage holds."""


_NORMS_OF_GRADIENTS = (
    "For norms of gradients use Lightning's grad_norm(module, 2), or"
    " trainer.strategy.grad_norm(parameters); for clipping trainer.strategy.clip_grad_norm_."
)
_ONE_BY_ONE = (
    "A hook gets the values of all stages by trainer.strategy.gathered(parameters), on every rank."
    " Or let it skip those with p.is_meta, and print what it finds on every rank: loggers are rank"
    " 0's, which has its own stage's alone."
)
_USED = (
    "A weight of the backbone that the step uses itself must stand outside the backbone, too"
    " (self.head.weight = self.backbone[0].weight): then every stage holds it. A layer that uses"
    " another's weight must register it (self.weight = other.weight)."
)
_TERM = "For an L1 or L2 term over all weights use the optimizer's weight_decay."
_COPIED = (
    "For an average of the weights use Lightning's EMAWeightAveraging; let each layer hold the"
    " teacher's copy of itself where a teacher follows the model. Make copies of the module before"
    " the Trainer runs, and save it after that, or with trainer.save_checkpoint on every rank."
)
_SET = "Set weights before the Trainer runs."
_AFTER_ERROR = "After a run that an error has ended, build the module anew, and load a checkpoint."
_REDUCTIONS = re.compile(
    r"^((linalg_)?(vector_|matrix_)?norm|(nan)?(sum|mean)|abs|square|pow|std|var|a?max|a?min"
    r"|isfinite|isnan|any)$"
)
_LEAVING = {"cpu", "numpy", "__array__", "item", "tolist", "to", "histc", "TensorBoard"}
_AVERAGING = re.compile(r"^(clone|copy_?|_foreach_\w+|lerp_?|detach|add_?|mul_?|sub_?)$")


def _remedies(what: str, of_gradient: bool) -> tuple[str, ...]:
    """What to do instead.

    Args:
        what: Who reads a tensor: a function's name, as far as it is known.
        of_gradient: Whether it is a gradient.
    """
    if of_gradient:
        return _NORMS_OF_GRADIENTS, _ONE_BY_ONE
    if what in _LEAVING:
        return _ONE_BY_ONE, _COPIED, _AFTER_ERROR
    if _RANDOM.search(what):
        return (_SET,)
    if _REDUCTIONS.search(what):
        return _TERM, _ONE_BY_ONE
    if _AVERAGING.search(what):
        return _COPIED, _USED, _SET
    return _USED, _COPIED, _AFTER_ERROR


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds a tensor.

    Args:
        name: Its dotted name.
        stage: The stage that holds it.
        rank: That stage's rank.
        here: The stage that doesn't.
        here_rank: Its rank.
    """

    name: str
    stage: int
    rank: int
    here: int
    here_rank: int

    def refusal(self, what: str) -> HeldElsewhere:
        """The error for whoever reads the tensor, such as a function of a name."""
        return HeldElsewhere(
            f"'{what}' reads '{self.name}', which stage {self.stage} (rank {self.rank}) holds;"
            f" stage {self.here} (rank {self.here_rank}) has its name and shape, and no values."
            f" {' '.join(_remedies(what, self.name.endswith('.grad')))}"
        )


class _Elsewhere:
    """What parameters and other tensors that another stage holds have in common."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__get__" and sys._getframe(1).f_globals.get("__name__") == _TENSORBOARD:
            raise holder_of(args).refusal("TensorBoard")
        if name in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                result = func(*args, **kwargs)
            return _marked(result, holder_of(args)) if isinstance(result, Tensor) else result
        if name == "__set__":
            return _set(func, *args)
        return _compute(func, name, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        tensor = cast(Tensor, self)
        copied = elsewhere(tensor, holder_of(tensor))
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Be saved as an ordinary tensor on the meta device."""
        tensor = cast(Tensor, self)
        holder = holder_of(tensor)
        warnings.warn(
            f"What stage {holder.stage} (rank {holder.rank}) holds is saved without values. While"
            " the Trainer runs, trainer.save_checkpoint(path) on every rank saves the whole model;"
            " after it torch.save does, unless the layers were built on the meta device (then call"
            " trainer.strategy.restore_module() before).",
            stacklevel=2,
        )
        with torch._C.DisableTorchFunctionSubclass():
            plain = strides.empty_like(tensor, "meta")
            if isinstance(tensor, nn.Parameter):
                plain = nn.Parameter(plain, tensor.requires_grad)
            return plain.__reduce_ex__(protocol)


class TensorElsewhere(_Elsewhere, Tensor):
    """A buffer that another stage holds, or what was computed of its tensors."""


class ParameterElsewhere(_Elsewhere, nn.Parameter):
    """A parameter that another stage holds."""

    @property
    def grad(self) -> Any:
        """Its gradient, which the same stage holds; nothing for those who step optimizers."""
        if not self.requires_grad or _steps_optimizers(sys._getframe(1)):
            return None
        holder = holder_of(self)
        return elsewhere(self.detach(), replace(holder, name=f"{holder.name}.grad"))

    @grad.setter
    def grad(self, value: Any) -> None:
        """Leave it to the stage that holds it."""

    @grad.deleter
    def grad(self) -> None:
        """The same."""


def elsewhere(tensor: Tensor, holder: Holder) -> Tensor:
    """A tensor of the same shape that stands for one that another stage holds.

    Args:
        tensor: A parameter or another tensor, on any device.
        holder: Who holds it.
    """
    with torch._C.DisableTorchFunctionSubclass():
        meta = strides.empty_like(tensor, "meta")
        kind = ParameterElsewhere if isinstance(tensor, nn.Parameter) else TensorElsewhere
        made: Tensor = Tensor._make_subclass(kind, meta, tensor.requires_grad)
    made.__dict__[HOLDER] = holder
    return made


def is_elsewhere(tensor: object) -> bool:
    """Whether another stage holds a tensor."""
    return isinstance(tensor, _Elsewhere)


def holder_of(value: Any) -> Holder:
    """Who holds a tensor that isn't here.

    Raises:
        TypeError: If it is.
    """
    for tensor in tensors_in(value):
        if isinstance(tensor, _Elsewhere):
            return cast(Holder, tensor.__dict__[HOLDER])
    raise TypeError("The tensor is held by this stage.")


#: Where TensorBoard asks for the device of what it writes: on meta it draws a number instead.
_TENSORBOARD = "torch.utils.tensorboard._convert_np"
#: Packages that skip parameters without a gradient, or know of stages.
_LIBRARIES = {"torch", "lightning", "lightning_gpipe"}
#: Modules of theirs that reduce gradients to a number, which would be one stage's.
_NORMS = {"lightning.pytorch.utilities.grads"}
#: Methods of optimizers that work parameter by parameter. Others may look at all, as SAM's do.
_STEPS = {"step", "zero_grad", "_init_group"}
#: What may be asked of a tensor without its values.
_METADATA = METADATA | {
    *("__get__", "__repr__", "_has_compatible_shallow_copy_type", "_is_view", "_use_count"),
    *("data_ptr", "is_distributed", "is_set_to", "register_post_accumulate_grad_hook"),
}
#: Draws numbers: on the stage that holds the tensor alone, so that the generators drift apart.
_RANDOM = re.compile(
    r"rand|normal(?!ize)|uniform|bernoulli|dropout|cauchy|exponential|geometric|orthogonal"
)
#: Makes a tensor of the same shape.
_LIKE = {"empty_like", "full_like", "ones_like", "zeros_like"}
#: What may scale a tensor of no dimensions, which else can't be told from a loss or a metric.
_SCALING = MULTIPLY | DIVIDE


_WRITING_OPERATORS = {
    "__setitem__",
    *(f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")),
    *(f"__i{name}__" for name in ("and", "or", "xor", "lshift", "rshift", "matmul")),
}
_COMPREHENSIONS = {"<listcomp>", "<genexpr>", "<dictcomp>", "<setcomp>", "<lambda>"}


def _set(func: Callable[..., Any], tensor: Tensor, value: Any) -> None:
    """Set an attribute. Values are left to the stage that holds the tensor."""
    if isinstance(value, Tensor) and not isinstance(value, _Elsewhere):
        return
    with torch._C.DisableTorchFunctionSubclass():
        func(tensor, value)


def _compute(
    func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    holder = holder_of((args, kwargs))
    refusal = partial(holder.refusal, name)
    if _RANDOM.search(name):
        raise refusal()
    if name in _LIKE:  # needs the shape alone
        kwargs = {**kwargs, "device": "meta"}
    if writes(name):
        return _write(func, name, args, kwargs, refusal)
    inputs = tensors_given(args, kwargs)
    theirs = [t for t in inputs if isinstance(t, _Elsewhere)]
    if any(holder_of(t).stage != holder.stage for t in theirs):
        raise refusal()
    scales = name in _SCALING or any(t.dim() for t in theirs)
    for tensor in inputs:
        is_here = not isinstance(tensor, _Elsewhere)
        if is_here and (tensor.dim() or tensor.requires_grad or not scales):
            raise refusal()
    try:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
    except Exception as error:
        raise refusal() from error
    outputs, size = tensors_in(result), min(t.numel() for t in theirs)
    if not outputs or any(not t.is_meta or t.numel() < size for t in outputs):
        raise refusal()
    return _marked(result, holder)


def _steps_optimizers(frame: FrameType | None) -> bool:
    """Whether code belongs to an optimizer or a library, which skip what has no gradient."""
    while frame is not None:
        module, code = frame.f_globals.get("__name__", ""), frame.f_code
        if module.partition(".")[0] in _LIBRARIES:
            return module not in _NORMS
        first = code.co_varnames[0] if code.co_argcount else ""
        if isinstance(frame.f_locals.get(first), Optimizer) and code.co_name in _STEPS:
            return True
        if code.co_name not in _COMPREHENSIONS:
            return False
        frame = frame.f_back
    return False


@cache
def writes(name: str) -> bool:
    """Whether a function changes its first argument."""
    return name in _WRITING_OPERATORS or (name.endswith("_") and not name.endswith("__"))


def _write(
    func: Callable[..., Any],
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    refusal: Callable[[], HeldElsewhere],
) -> Any:
    """Change what is held here; the rest is changed by the stage that holds it."""
    first = args[0] if args else next(iter(kwargs.values()))  # of torch.nn.init
    if isinstance(first, _Elsewhere):
        return first
    if not isinstance(first, (list, tuple)):
        raise refusal()  # a tensor of this stage, changed by one that isn't here
    here = [i for i, t in enumerate(first) if not isinstance(t, _Elsewhere)]
    kept = [
        [arg[i] for i in here] if isinstance(arg, (list, tuple)) and len(arg) == len(first) else arg
        for arg in args
    ]
    if any(isinstance(t, _Elsewhere) for t in tensors_in((kept, kwargs))):
        raise refusal()
    return func(*kept, **kwargs) if here else None


def _marked(result: Any, holder: Holder) -> Any:
    """Mark tensors as held elsewhere."""
    if isinstance(result, _Elsewhere):
        return result
    if isinstance(result, Tensor):
        with torch._C.DisableTorchFunctionSubclass():
            made = result.as_subclass(TensorElsewhere)
        made.__dict__[HOLDER] = holder
        return made
    if type(result) in (list, tuple):
        return type(result)(_marked(item, holder) for item in result)
    return result
