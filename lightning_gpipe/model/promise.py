"""What stands for a hidden state, and what blocks return beside it, while a model's loop runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeGuard

import torch
from torch import Tensor

# As PyTorch's documentation imports it: no public name leads to it.
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._pytree import tree_flatten, tree_unflatten

#: What a model must be like.
CONDITION = (
    "Blocks are for models that call them in order, and hand the hidden state from one to"
    " the next; build the backbone as an nn.Sequential"
    " otherwise. If the blocks return tuples, give Blocks(..., as_tuple=True). If"
    " this list isn't the one to cut, such as that of embeddings or heads, name another:"
    " GPipeStrategy(backbone='...')."
)


_COLLECT = torch.stack, torch.cat


class Unknown:
    """Stands for what a block returns beside its hidden state, and no promise can stand for."""

    __slots__ = ()

    why: ClassVar[str] = (
        "What a block returns beside its hidden state was used, which isn't known before the"
        " last block is called, and isn't known to be a tensor with a row for each sample. Such"
        " a tensor, [batch, …], may be used as a hidden state may; what else there is, such as"
        " the state of an LSTM, can be given to later blocks, which may add to it and hand it"
        f" on. {CONDITION}"
    )

    def refuse(self, *_: Any, **__: Any) -> Any:
        """Tell why it can't be used."""
        raise RuntimeError(type(self).why)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what Python, copies and the like ask for
            raise AttributeError(name)
        return self.refuse()

    @classmethod
    def __torch_function__(cls, func: Any, *_: Any, **__: Any) -> Any:
        """Tell why it can't be used; what a model collects may be used by nobody."""
        stand_in = object.__new__(cls)  # of what it doesn't need to know
        return stand_in if func in _COLLECT else stand_in.refuse()

    def __setattr__(self, name: str, value: Any) -> None:
        if name in type(self).__slots__:
            object.__setattr__(self, name, value)
        else:
            self.refuse()

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # for isinstance, whose answer isn't known either
        return self.refuse()

    __hash__ = None  # type: ignore[assignment]
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = refuse
    __iter__ = __getitem__ = __len__ = __bool__ = __float__ = __int__ = __contains__ = refuse
    __setitem__ = __or__ = __ror__ = refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = refuse
    __truediv__ = __rtruediv__ = __matmul__ = __rmatmul__ = __neg__ = __abs__ = refuse


class Beside(Unknown):
    """The same, of one block: later ones may be given it.

    Args:
        value: What it stands for.
        of: Tells the pass of the loop to which that belongs.
    """

    __slots__ = ("of", "value")

    def __init__(self, value: Any, of: object) -> None:
        self.value, self.of = value, of


class Recorder(Protocol):
    """Notes what a model does with hidden states that aren't known yet."""

    def apply(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Note a function in place of running it; returns a promise of its result."""

    def read(self, promised: Promised, what: str) -> Tensor:
        """Note that the ``"shape"`` or ``"dtype"`` is read; returns a tensor that has it."""


@dataclass(slots=True, eq=False)
class Promised:
    """What is known of a promise.

    Args:
        recorder: Notes what is done with it; None: the blocks have run.
        value: What it stands for, as the recorder calls it.
        device: Where it will be.
        look: A tensor on the meta device that looks as it does; None: it isn't known yet.
        is_shared: Whether another promise stands for the same memory.
        known: What it stands for, as soon as the blocks have run, if it came out.
        why_unknown: Why its block can't run without data; empty: it can.
    """

    recorder: Recorder | None
    value: Any
    device: torch.device
    look: Tensor | None = None
    is_shared: bool = False
    known: Any = None
    why_unknown: str = ""


class Promise(Tensor):
    """Stands for a hidden state until the last block is called; has no values.

    What is done with it is noted, and what is read of it.
    """

    _promised: Promised

    @classmethod
    def of(cls, promised: Promised) -> Promise:
        """The promise of a hidden state."""
        with unset_fake_temporarily(), torch._C.DisableTorchFunction():
            promise = torch.empty((), device="meta").as_subclass(cls)
        promise.__dict__["_promised"] = promised
        return promise

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"The hidden state between two blocks has no attribute '{name}': it is a tensor. Blocks"
            " may return tensors, and tuples, lists and dictionaries of them, but no other objects."
        )

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        args, kwargs, promise = with_known(args, kwargs or {})
        if promise is None:
            return func(*args, **kwargs)
        promised = promise._promised
        if promised.recorder is None:
            raise too_late(_named(func))
        if func in _OF_DEVICE:
            return _OF_DEVICE[func](promised.device)
        if func not in _KNOWN:
            try:
                return promised.recorder.apply(func, args, kwargs)
            except RuntimeError as error:
                if not promised.why_unknown:
                    raise
                raise RuntimeError(f"{promised.why_unknown}{_ONE_TENSOR} {error}") from None
        look = promised.recorder.read(promised, _KNOWN[func])
        return func(look, *args[1:], **kwargs)


def with_known(args: Any, kwargs: Any) -> tuple[Any, Any, Promise | None]:
    """Arguments with what is known by now in place of promises, and the first promise left."""
    leaves, spec = tree_flatten((args, kwargs))
    first, is_changed = None, False
    for i, leaf in enumerate(leaves):
        if is_promise(leaf):
            if leaf._promised.known is not None:
                leaves[i], is_changed = leaf._promised.known, True
            elif first is None:
                first = leaf
    if is_changed:
        args, kwargs = tree_unflatten(leaves, spec)
    return args, kwargs, first


def answered(func: Any, types: Any, args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
    """Arguments with what is known by now, and what a stand-in that is left makes of a function.

    Args:
        func: The function.
        types: Those of its arguments, as PyTorch tells them.
        args: Its arguments.
        kwargs: The same.

    Returns:
        The arguments, and the result; None: none is left.
    """
    if Promise in types:
        args, kwargs, promise = with_known(args, kwargs)
        if promise is not None:
            return args, kwargs, Promise.__torch_function__(func, types, args, kwargs)
    unknown = next((kind for kind in types if issubclass(kind, Unknown)), None)
    return args, kwargs, unknown.__torch_function__(func) if unknown is not None else None


def is_promise(value: object) -> TypeGuard[Promise]:
    """Whether something is a promise; other stand-ins don't tell."""
    return type(value) is Promise


def refusal(func: Any, because: str = "") -> RuntimeError:
    """The error for what may not be done with a promise."""
    return RuntimeError(
        f"{_named(func)} uses the hidden state between two blocks, which isn't known before the"
        " last one is called. Only what works sample by sample may stand there, such as"
        " activations, dropout, sums, products, nn.LayerNorm, and others along dimensions that"
        " aren't the batch's. Write the rest, such as batch norm, into a block, or build the blocks"
        f" as an nn.Sequential, {_IN_SEQUENCE}.{because} A loop that"
        " ends before the last block, by an index, a slice or `break`, comes to this, too: let it"
        f" go over all blocks, and `continue` for some. {CONDITION}"
    )


def too_late(what: str) -> RuntimeError:
    """The error for what uses a promise behind the loop, of a value that hasn't come out."""
    return RuntimeError(
        f"{what} uses a hidden state of a block that isn't the last one, behind the loop or in"
        " another pass of it. Where the loop itself does not use it so that is not foreseen: let"
        f" the blocks hand it on in a tuple, {_IN_SEQUENCE}."
    )


def _named(func: Any) -> str:
    name = getattr(func, "__name__", func)
    is_read = name == "__get__"  # of an attribute
    return f"'{getattr(func.__self__, '__name__', name) if is_read else name}'"


_ONE_TENSOR = (
    ", so it isn't known what it returns, and that was taken for one tensor. If it returns more,"
    " let it compute without looking at values, and build new tensors on the device of its input;"
    " or let it return one tensor."
)
_IN_SEQUENCE = "through which a tuple can take what jumps over some"
#: What may be asked of a promise, and what the device tells of it.
_OF_DEVICE: dict[Any, Callable[[torch.device], Any]] = {
    getattr(Tensor, "device").__get__: lambda device: device,  # noqa: B009
    getattr(Tensor, "is_meta").__get__: lambda device: device.type == "meta",  # noqa: B009
    getattr(Tensor, "is_cuda").__get__: lambda device: device.type == "cuda",  # noqa: B009
    Tensor.get_device: lambda device: -1 if device.type == "cpu" else device.index or 0,
}

#: What may be asked of a promise, and what is read of the hidden state then.
_KNOWN: dict[Any, str] = {
    **{getattr(Tensor, name).__get__: "shape" for name in ("shape", "ndim")},
    **dict.fromkeys((Tensor.size, Tensor.dim, Tensor.__len__), "shape"),
    **dict.fromkeys((Tensor.numel, Tensor.nelement), "shape"),
    Tensor.dtype.__get__: "dtype",  # type: ignore[attr-defined]
    Tensor.is_floating_point: "dtype",
}
