"""Values of a step that another stage computes: everything but the values, until it tells them.

Every stage runs the user's step. What stands before the backbone is computed on the first stage,
what stands behind it on the last; elsewhere the same code runs over tensors on the meta device at
no cost. Such a :class:`RemoteTensor` has a shape, a type and a device, and refuses to be read. What
is left of them after the step, in a list, a log or an attribute, gets its value from the stage that
has it, and is an ordinary tensor's equal from then on.

Stages agree on what is meant by the number of the call: they run the same functions in the same
order. :class:`StepTrace` counts them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map

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
    """

    number: Number
    where: Where


class NotHere(RuntimeError):
    """A step reads a value that another stage has."""


class RemoteTensor(Tensor):
    """A tensor of which this stage knows all but the values, until they are told."""

    _gpipe_value: Tensor | None
    _gpipe_device: torch.device

    @classmethod
    def like(cls, meta: Tensor, device: torch.device, origin: Origin) -> RemoteTensor:
        """A remote tensor.

        Args:
            meta: A tensor on the meta device, of its shape and type.
            device: Where its values will be.
            origin: Where it comes from.
        """
        with torch._C.DisableTorchFunctionSubclass():
            made = Tensor._make_subclass(cls, meta.detach(), meta.requires_grad)
        made._gpipe_value, made._gpipe_device = None, device
        made.__dict__[_ORIGIN] = origin
        return made

    def tell(self, value: Tensor) -> None:
        """Give it its values."""
        self._gpipe_value = value.to(self._gpipe_device)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(t._gpipe_value is None for t in _remote((args, kwargs))):
            if is_metadata(func):
                return read_metadata(func, args, kwargs)
            raise NotHere(_refusal(_name(func), next(_unknown((args, kwargs)))))
        args, kwargs = tree_map(_told, (args, kwargs))
        return func(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._known("__reduce_ex__").__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self._known("__deepcopy__").__deepcopy__(memo)

    def _known(self, what: str) -> Tensor:
        if self._gpipe_value is None:
            raise NotHere(_refusal(what, self))
        return self._gpipe_value


def origin_of(tensor: Tensor) -> Origin | None:
    """Where a value comes from that not every stage has; None: every stage has it."""
    return tensor.__dict__.get(_ORIGIN)


class StepTrace(TorchFunctionMode):
    """Runs the functions that a user's step calls, as far as their arguments are here.

    Args:
        here: This rank's stage.
        holders: The stages that hold a parameter or buffer; None: every stage.
    """

    def __init__(self, here: int, holders: Callable[[Tensor], Where | None]) -> None:
        super().__init__()
        self._here, self._holders = here, holders
        self._micro_batch, self.calls = 0, list[str]()
        self._made: dict[Number, weakref.ref[Tensor]] = {}

    def begin(self, micro_batch: int) -> None:
        """Begin the step of a micro-batch."""
        self._micro_batch, self.calls = micro_batch, []

    def arrive(self, name: str, results: Iterable[Tensor], where: Where) -> None:
        """Number tensors that something else than a function has made, such as the backbone.

        Args:
            name: What has made them.
            results: The tensors: remote ones where they aren't here.
            where: The stages that have them.
        """
        self.calls.append(name)
        for i, tensor in enumerate(results):
            self._note(tensor, Origin(self._number(i), where))

    def next_origin(self, output: int, where: Where) -> Origin:
        """The origin that :meth:`arrive` is about to give."""
        return Origin(Number(self._micro_batch, len(self.calls) + 1, output), where)

    def left(self) -> dict[Number, Tensor]:
        """What is left of the values that this stage tells the others, by their numbers."""
        found = {}
        for number, made in self._made.items():
            tensor = made()
            origin = origin_of(tensor) if tensor is not None else None
            if tensor is None or origin is None or origin.number != number:
                continue
            if min(origin.where) == self._here and not isinstance(tensor, RemoteTensor):
                found[number] = tensor.detach()
        return found

    def tell(self, values: Mapping[Number, Tensor]) -> None:
        """Give remote tensors that are left the values that other stages have told."""
        for number, value in values.items():
            made = self._made.get(number)
            tensor = made() if made is not None else None
            origin = origin_of(tensor) if tensor is not None else None
            if tensor is None or origin is None or origin.number != number:
                continue
            if isinstance(tensor, RemoteTensor):
                tensor.tell(value)
            else:  # an ordinary one, changed in place by a remote one
                with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
                    tensor.copy_(value)

    def forget(self) -> None:
        """Let go of a mini-batch; what was told is everywhere."""
        for made in self._made.values():
            tensor = made()
            if tensor is not None:
                tensor.__dict__.pop(_ORIGIN, None)
        self._made.clear()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if is_metadata(func):
            return read_metadata(func, args, kwargs)
        name = _name(func)
        self.calls.append(name)
        tensors = list(_tensors((args, kwargs)))
        places = [where for where in map(self._where, tensors) if where is not None]
        if not places:
            args, kwargs = tree_map(_told, (args, kwargs))
            return func(*args, **kwargs)
        where = frozenset.intersection(*places)
        if not where:
            raise NotHere(_apart(name, tensors, self._where))
        if self._here in where:
            args, kwargs = tree_map(_told, (args, kwargs))
            result = func(*args, **kwargs)
        else:
            result = self._remotely(func, name, args, kwargs, where)
        for i, tensor in enumerate(_tensors(result)):
            self._note(tensor, Origin(self._number(i), where))
        return result

    def _where(self, tensor: Tensor) -> Where | None:
        """The stages that have a tensor's values; None: all."""
        if isinstance(tensor, RemoteTensor) and tensor._gpipe_value is not None:
            return None
        origin = origin_of(tensor)
        return origin.where if origin is not None else self._holders(tensor)

    def _number(self, output: int) -> Number:
        return Number(self._micro_batch, len(self.calls), output)

    def _note(self, tensor: Tensor, origin: Origin) -> None:
        tensor.__dict__[_ORIGIN] = origin
        self._made[origin.number] = weakref.ref(tensor)

    def _remotely(
        self,
        func: Any,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        where: Where,
    ) -> Any:
        """Run a function on the meta device."""
        device = next((d for d in _devices(args, kwargs) if d.type != "meta"), None)
        inputs = list(_tensors((args, kwargs)))
        to = device or _device_of(inputs[0])
        wants = torch.is_grad_enabled() and any(t.requires_grad for t in inputs)
        meta_args, meta_kwargs = tree_map(_on_meta, (args, kwargs))
        try:
            with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
                result = func(*meta_args, **meta_kwargs)
        except NotHere:
            raise
        except Exception as error:
            raise NotHere(_refusal(name, inputs[0])) from error
        if writes(name):
            first = args[0] if args else next(iter(kwargs.values()))
            return first  # noted by the caller: its value is another one from now on
        leaves = tree_flatten(result)[0]
        if not leaves or any(not isinstance(leaf, Tensor) or not leaf.is_meta for leaf in leaves):
            raise NotHere(_refusal(name, inputs[0]))
        keeps = name not in _WITHOUT_GRADIENT

        def wrap(leaf: Tensor) -> Tensor:
            floats = leaf.is_floating_point() or leaf.is_complex()
            leaf.requires_grad_(wants and keeps and floats)
            return RemoteTensor.like(leaf, to, Origin(self._number(0), where))

        return tree_map(wrap, result)


#: What may be asked of a tensor without its values.
_METADATA = {
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
_WITHOUT_GRADIENT = {"detach", "detach_"}
_WRITING_OPERATORS = {
    "__setitem__",
    *(f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")),
    *(f"__i{name}__" for name in ("and", "or", "xor", "lshift", "rshift", "matmul")),
}


def writes(name: str) -> bool:
    """Whether a function changes its first argument."""
    return name in _WRITING_OPERATORS or (name.endswith("_") and not name.endswith("__"))


def is_metadata(func: Any) -> bool:
    """Whether a function asks a tensor for something else than its values."""
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        return getattr(getattr(func, "__self__", None), "__name__", "") not in _COMPUTED
    return name in _METADATA


def read_metadata(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Ask a tensor for what isn't its values."""
    tensor = args[0] if args else None
    if isinstance(tensor, RemoteTensor):
        if tensor._gpipe_value is not None:
            return func(tensor._gpipe_value, *args[1:], **kwargs)
        attribute = getattr(getattr(func, "__self__", None), "__name__", "")
        device = tensor._gpipe_device
        if attribute in ("device", "is_meta", "is_cuda", "is_cpu"):
            return {
                "device": device,
                "is_meta": False,
                "is_cuda": device.type == "cuda",
                "is_cpu": device.type == "cpu",
            }[attribute]
        if _name(func) == "get_device":
            return device.index if device.index is not None else -1
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _name(func: Any) -> str:
    return str(getattr(func, "__name__", func))


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in arguments or results."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in cast(Iterable[Any], value):
            yield from _tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)


def _remote(value: Any) -> Iterator[RemoteTensor]:
    return (t for t in _tensors(value) if isinstance(t, RemoteTensor))


def _unknown(value: Any) -> Iterator[RemoteTensor]:
    return (t for t in _remote(value) if t._gpipe_value is None)


def _told(leaf: Any) -> Any:
    """What a remote tensor stands for, if it was told."""
    if isinstance(leaf, RemoteTensor) and leaf._gpipe_value is not None:
        return leaf._gpipe_value
    return leaf


def _device_of(tensor: Tensor) -> torch.device:
    return tensor._gpipe_device if isinstance(tensor, RemoteTensor) else tensor.device


def _devices(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.device]:
    """Devices among arguments."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.device):
            yield value


def _on_meta(leaf: Any) -> Any:
    """An argument as a function on the meta device gets it."""
    if isinstance(leaf, torch.device):
        return torch.device("meta")
    if not isinstance(leaf, Tensor):
        return leaf
    with torch._C.DisableTorchFunctionSubclass():
        if leaf.is_meta:
            return leaf.detach().as_subclass(Tensor)
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")


def _refusal(what: str, tensor: Tensor) -> str:
    origin = origin_of(tensor)
    stages = sorted(origin.where) if origin is not None else []
    return (
        f"'{what}' reads a value of the step that stage {stages[0] if stages else '?'} has: with"
        " step='micro-batch' every stage has the values of its own part of the step alone. Do it"
        " after the step, in on_train_batch_end or another hook, where they are told, or use"
        " GPipeStrategy(step='mini-batch')."
    )


def _apart(what: str, tensors: Iterable[Tensor], where: Callable[[Tensor], Where | None]) -> str:
    places = [sorted(found) for found in map(where, tensors) if found is not None]
    return (
        f"'{what}' takes values of which stages {places} each have one: with step='micro-batch' no"
        " stage has both. Use GPipeStrategy(step='mini-batch')."
    )
