"""What a model's loop over its blocks meets in the pipeline: stand-ins, and their promises."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

# As PyTorch's documentation imports it: no public name leads to it.
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

#: What a model must be like.
CONDITION = (
    "Blocks are for models that call all of them in order, and hand the hidden state from one to"
    " the next untouched, without torch.utils.checkpoint around them; build the backbone as an"
    " nn.Sequential otherwise. If the blocks return tuples, give Blocks(..., as_tuple=True). If"
    " this list isn't the one to cut, such as that of embeddings or heads, name another:"
    " GPipeStrategy(backbone='...')."
)


class StandIn:
    """A block as the model's loop meets it in the pipeline: of its class, with its attributes.

    Args:
        block: The block.
        call: Called with the arguments in its place.
    """

    __slots__ = ("_block", "_call")

    def __init__(self, block: Any, call: Callable[[Any, Any], Any]) -> None:
        object.__setattr__(self, "_block", block)
        object.__setattr__(self, "_call", call)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call in the block's place."""
        return self._call(args, kwargs)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # for isinstance
        return type(self._block)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._block, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._block, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._block, name)

    def __repr__(self) -> str:
        return repr(self._block)

    def __eq__(self, other: object) -> bool:
        return self._block is (other._block if isinstance(other, StandIn) else other)

    def __hash__(self) -> int:
        return hash(self._block)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return copy.copy, (self._block,)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._block, memo)


class ContainerStandIn(StandIn):
    """A block that is a container of layers itself."""

    __slots__ = ()

    def __iter__(self) -> Iterator[Any]:
        return iter(self._block)

    def __len__(self) -> int:
        return len(self._block)

    def __bool__(self) -> bool:
        return bool(self._block)

    def __getitem__(self, index: Any) -> Any:
        return self._block[index]

    def __contains__(self, item: object) -> bool:
        return item in self._block


def stand_in(block: Any, call: Callable[[Any, Any], Any]) -> StandIn:
    """What stands in for a block; iterable where the block is."""
    kind = ContainerStandIn if hasattr(type(block), "__iter__") else StandIn
    return kind(block, call)


class Unknown:
    """Stands for what a block returns beside its hidden state, in a tuple: it can't be used."""

    __slots__ = ()

    def refuse(self, *_: Any, **__: Any) -> Any:
        """Tell why it can't be used."""
        raise RuntimeError(
            "What a block returns beside its hidden state was used, which isn't known before the"
            " last block is called: such as the state of an LSTM, or a part of the loss. It can be"
            " given to the next block, which may add to it and hand it on, and it is known from the"
            f" last one. {CONDITION}"
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what Python, copies and the like ask for
            raise AttributeError(name)
        return self.refuse()

    @classmethod
    def __torch_function__(cls, *_: Any, **__: Any) -> Any:
        return cls().refuse()

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # for isinstance, whose answer isn't known either
        return self.refuse()

    __hash__ = None  # type: ignore[assignment]
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = refuse
    __iter__ = __getitem__ = __len__ = __bool__ = __float__ = __int__ = __contains__ = refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = refuse
    __truediv__ = __rtruediv__ = __matmul__ = __rmatmul__ = __neg__ = __abs__ = refuse


class Beside(Unknown):
    """The same, of one block: the next one may be given it.

    Args:
        block: Which block returns it.
        element: Its place in the tuple.
    """

    __slots__ = ("block", "element")

    def __init__(self, block: int, element: int) -> None:
        self.block, self.element = block, element


class Promise(Tensor):
    """Stands for the output of a block until the last one is called; has no values.

    Its shape and type are those that the first block is given, and what is read of them is noted.
    """

    _reads: set[str]

    @classmethod
    def of(cls, hidden: Tensor, reads: set[str]) -> Promise:
        """The promise of a hidden state.

        Args:
            hidden: What the first block is given.
            reads: Filled with what is read of the promise.
        """
        if isinstance(hidden, FakeTensor):  # of which no other class can be made
            with unset_fake_temporarily():
                one = torch.empty((), dtype=hidden.dtype, device="cpu")
                promise = one.expand(hidden.shape).as_subclass(cls)
        else:
            promise = hidden.detach().as_subclass(cls)
        promise.__dict__["_reads"] = reads
        return promise

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func not in _KNOWN:
            raise RuntimeError(
                "The hidden state between two blocks was used, which isn't known before the last"
                " one is called. Write what is done with it into a block, such as h + block(h), or"
                " build the blocks as an nn.Sequential, through which a tuple can take what jumps"
                " over some."
                f" {CONDITION}"
            )
        args[0].__dict__["_reads"].add(_KNOWN[func])
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


#: What may be asked of a promise, and what is read of the hidden state then.
_KNOWN: dict[Any, str] = {
    **{getattr(Tensor, name).__get__: "device" for name in ("device", "is_meta")},
    **{getattr(Tensor, name).__get__: "shape" for name in ("shape", "ndim")},
    Tensor.size: "shape",
    Tensor.dim: "shape",
    Tensor.dtype.__get__: "dtype",  # type: ignore[attr-defined]
    Tensor.is_floating_point: "dtype",
}
