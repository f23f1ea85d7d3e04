"""Values of a step that another stage computes: everything but the values, until it tells them.

Every stage runs the user's step. What stands before the backbone is computed on the first stage,
what stands behind it on the last; elsewhere the same code runs over tensors on the meta device at
no cost. Such a :class:`RemoteTensor` has a shape, a type and a device, and refuses to be read. What
is left of them after the step, in a list, a log or an attribute, gets its value from the stage that
has it, and is an ordinary tensor's equal from then on. See
:mod:`lightning_gpipe.model.step_trace` for what runs the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from lightning_gpipe.model.refused import Refused
from lightning_gpipe.tensors import strides

#: The stages that have a value.
Where: TypeAlias = frozenset[int]
_ORIGIN = "_gpipe_origin"


class Number(NamedTuple):
    """What tells a value from others of a mini-batch, alike on every stage.

    Args:
        micro_batch: The micro-batch whose step made it.
        call: The number of the function call in that step.
        output: Its place among the results of that call.
    """

    micro_batch: int
    call: int
    output: int


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a value comes from.

    Args:
        number: Tells it from others.
        where: The stages that have it.
        is_mean: Whether it is known to be a mean over samples, if it is a scalar.
    """

    number: Number
    where: Where
    is_mean: bool = False


class NotHere(Refused):
    """A step reads a value that another stage has."""


class RemoteTensor(Tensor):
    """A tensor of which this stage knows all but the values, until they are told."""

    _gpipe_value: Tensor | None
    _gpipe_device: torch.device

    @classmethod
    def like(
        cls, meta: Tensor, device: torch.device, origin: Origin, requires_grad: bool
    ) -> RemoteTensor:
        """A remote tensor.

        Args:
            meta: A tensor on the meta device, of its shape and type.
            device: Where its values will be.
            origin: Where it comes from.
            requires_grad: Whether it wants a gradient, if its type can have one.
        """
        with torch._C.DisableTorchFunctionSubclass():
            floats = meta.is_floating_point() or meta.is_complex()
            made = Tensor._make_subclass(cls, meta.detach(), requires_grad and floats)
        made._gpipe_value, made._gpipe_device = None, device
        made.__dict__[_ORIGIN] = origin
        return made

    def tell(self, value: Tensor) -> None:
        """Give it its values."""
        self._gpipe_value = value.to(self._gpipe_device)

    def forget(self) -> None:
        """Let it have other values than it was told, which aren't known."""
        self._gpipe_value = None

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if args and type(args[0]) is cls and is_metadata(func):
            return read_metadata(func, args, kwargs)
        if any(t._gpipe_value is None for t in remote_in((args, kwargs))):
            if is_metadata(func):
                return read_metadata(func, args, kwargs)
            raise NotHere(refusal(name_of(func), next(unknown_in((args, kwargs)))))
        args, kwargs = tree_map(told, (args, kwargs))
        return func(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._known("__reduce_ex__").__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self._known("__deepcopy__").__deepcopy__(memo)

    def _known(self, what: str) -> Tensor:
        if self._gpipe_value is None:
            raise NotHere(refusal(what, self))
        return self._gpipe_value


def origin_of(tensor: Tensor) -> Origin | None:
    """Where a value comes from that not every stage has; None: every stage has it."""
    return tensor.__dict__.get(_ORIGIN)


def set_origin(tensor: Tensor, origin: Origin | None) -> None:
    """Say where a value comes from; None: every stage has it."""
    if origin is None:
        tensor.__dict__.pop(_ORIGIN, None)
    else:
        tensor.__dict__[_ORIGIN] = origin


def outline_of(value: Any) -> Any:
    """A value with plain tensors on the meta device for the remote ones in it."""
    known: dict[int, Tensor] = {}

    def plain(leaf: Any) -> Any:
        if not isinstance(leaf, RemoteTensor) or leaf._gpipe_value is not None:
            return told(leaf)
        if id(leaf) not in known:
            with torch._C.DisableTorchFunctionSubclass():
                known[id(leaf)] = leaf.detach().as_subclass(Tensor)
            known[id(leaf)].requires_grad_(leaf.requires_grad)
        return known[id(leaf)]

    return tree_map(plain, value)


#: What may be asked of a tensor without its values.
METADATA = {
    "__len__",
    "dim",
    "element_size",
    "get_device",
    "has_names",
    "is_complex",
    "is_conj",
    "is_contiguous",
    "is_floating_point",
    "is_inference",
    "is_neg",
    "is_pinned",
    "is_same_size",
    "is_shared",
    "is_signed",
    "ndimension",
    "nelement",
    "numel",
    "register_hook",
    "requires_grad_",
    "retain_grad",
    "size",
    "storage_offset",
    "stride",
}
#: Attributes whose value is a tensor that is computed.
_COMPUTED = {"T", "H", "mT", "mH", "real", "imag", "data"}


def is_metadata(func: Any) -> bool:
    """Whether a function asks a tensor for something else than its values."""
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        return getattr(getattr(func, "__self__", None), "__name__", "") not in _COMPUTED
    return name in METADATA


def read_metadata(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Ask a tensor for what isn't its values."""
    tensor = args[0] if args else None
    if isinstance(tensor, RemoteTensor):
        if tensor._gpipe_value is not None:
            return func(tensor._gpipe_value, *args[1:], **kwargs)
        name = func.__name__
        if name == "__get__":
            name = getattr(func.__self__, "__name__", "")  # properties have none
        if name in _OF_DEVICE:
            return _OF_DEVICE[name](tensor._gpipe_device)
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


#: What a device tells of the tensors on it.
_OF_DEVICE: dict[str, Callable[[torch.device], Any]] = {
    "device": lambda device: device,
    "get_device": lambda device: -1 if device.index is None else device.index,
    "is_cpu": lambda device: device.type == "cpu",
    "is_cuda": lambda device: device.type == "cuda",
    "is_meta": lambda device: False,
}


def name_of(func: Any) -> str:
    """The name of a function, or of the attribute that it sets."""
    name = str(getattr(func, "__name__", func))
    return f"{func.__self__.__name__} =" if name == "__set__" else name


def destination(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device | None:
    """The device to which a function moves its first argument; None: it does something else."""
    if name == "cpu":
        return torch.device("cpu")
    given = args[1] if len(args) > 1 else kwargs.get("device")
    if name != "to" or len(args) > 2 or not isinstance(given, (str, torch.device)):
        return None
    return torch.device(given) if kwargs.keys() <= {"device", "non_blocking"} else None


#: Types of arguments that hold no tensors.
CONSTANTS = {type(None), bool, int, float, str}


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in arguments or results."""
    if issubclass(type(value), Tensor):
        return [value]
    found: list[Tensor] = []
    _gather((value,), found)
    return found


def tensors_given(args: Iterable[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors in the arguments of a function."""
    found: list[Tensor] = []
    _gather(args, found)
    if kwargs:
        _gather(kwargs.values(), found)
    return found


def _gather(values: Iterable[Any], found: list[Tensor]) -> None:
    for value in values:
        kind = type(value)
        if kind is Tensor or kind is RemoteTensor:
            found.append(value)
        elif kind in CONSTANTS:
            continue
        elif issubclass(kind, Tensor):  # of what it is a stand-in doesn't tell
            found.append(value)
        elif issubclass(kind, (list, tuple)):
            _gather(value, found)
        elif issubclass(kind, dict):
            _gather(value.values(), found)


def remote_in(value: Any) -> Iterator[RemoteTensor]:
    """The remote tensors in arguments or results."""
    return (t for t in tensors_in(value) if isinstance(t, RemoteTensor))


def unknown_in(value: Any) -> Iterator[RemoteTensor]:
    """Those of them whose values were not told."""
    return (t for t in remote_in(value) if t._gpipe_value is None)


def told(leaf: Any) -> Any:
    """What a remote tensor stands for, if it was told."""
    if type(leaf) is RemoteTensor and leaf._gpipe_value is not None:
        return leaf._gpipe_value
    return leaf


def device_of(tensor: Tensor) -> torch.device:
    """Where a tensor is, or where its values will be."""
    return tensor._gpipe_device if type(tensor) is RemoteTensor else tensor.device


def first_device(values: Iterable[Any], default: torch.device) -> torch.device:
    """The first device among values on which tensors have values."""
    for value in values:
        if isinstance(value, torch.device) and value.type != "meta":
            return value
    return default


def wants_gradient(tensors: Iterable[Tensor]) -> bool:
    """Whether any tensor requires a gradient."""
    with torch._C.DisableTorchFunctionSubclass():
        return any(told(tensor).requires_grad for tensor in tensors)


def on_meta(leaf: Any) -> Any:
    """An argument as a function on the meta device gets it."""
    if isinstance(leaf, torch.device):
        return torch.device("meta")
    if not isinstance(leaf, Tensor):
        return leaf
    with torch._C.DisableTorchFunctionSubclass():
        if leaf.is_meta:
            return leaf.detach().as_subclass(Tensor)
        return strides.empty_like(leaf, "meta")


#: What to do instead of reading a value, by what reads it.
_ADVICE = {
    "grad": (
        " Gradients through the backbone, such as those of its input for a penalty or a force, are"
        " supported by neither."
    ),
    "__getitem__": (
        " A mask can choose elements if it is computed of the batch alone. Where one of the"
        " backbone's output does, keep their number: give cross_entropy targets of -100 there, or"
        " multiply by the mask, and return {'loss': loss, 'weight': mask.sum()}."
    ),
    "_nested_tensor_from_mask_left_aligned": (
        " Build nn.TransformerEncoder with enable_nested_tensor=False."
    ),
}


def refusal(what: str, tensor: Tensor, where: Where | None = None) -> str:
    """What to tell who reads a value that another stage has.

    Args:
        what: What reads it.
        tensor: The value.
        where: The stages that have all that is read; None: those that have the value.
    """
    origin = origin_of(tensor)
    if where is None:
        where = origin.where if origin is not None else frozenset()
    return (
        f"'{what}' reads a value of the step that stage {min(where, default='?')} has: with"
        " step='micro-batch' every stage has the values of its own part of the step alone. Do it"
        " after the step, in on_train_batch_end or another hook, where they are told, or use"
        f" GPipeStrategy(step='mini-batch').{_ADVICE.get(what, '')}"
    )
