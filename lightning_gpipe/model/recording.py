"""Records how tensors on the meta device come by their values, and computes these later.

A constructor that runs inside a :class:`Recording` takes no memory. What it would have computed is
kept as a list of operations, from which the values of any tensor follow, bit for bit those of an
ordinary run of the constructor: the recording draws all random numbers, so that the generator moves
as in an ordinary run, and remembers the generator's state at each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from lightning_gpipe.tensors.default_type import default_dtype
from lightning_gpipe.tensors.random_state import preserved
from lightning_gpipe.tensors.tree import tree_tensors

_HOST = torch.device("cpu")
#: Operations whose results have no values yet.
_WITHOUT_VALUES = {
    *("empty", "empty_like", "empty_permuted", "empty_quantized", "empty_strided"),
    *("new_empty", "new_empty_strided", "resize", "resize_"),
}
#: Operations that set all that they are given, whatever was there.
_SETTING = {
    *("bernoulli_", "cauchy_", "exponential_", "fill_", "geometric_", "log_normal_", "normal_"),
    *("random_", "uniform_", "zero_"),
}


@dataclass(frozen=True, slots=True)
class View:
    """A tensor by the storage that it shows.

    Args:
        storage: The storage's identity.
        dtype: The tensor's.
        offset: Of its first element, in elements.
        size: Its shape.
        stride: In elements.
    """

    storage: int
    dtype: torch.dtype
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> View:
        """How a tensor shows its storage."""
        storage = tensor.untyped_storage()._cdata
        size, stride = tuple(tensor.shape), tensor.stride()
        return cls(storage, tensor.dtype, int(tensor.storage_offset()), size, stride)

    def on(self, storage: torch.UntypedStorage) -> Tensor:
        """The same part of another storage."""
        empty = torch.empty(0, dtype=self.dtype, device=_HOST)
        return empty.set_(storage, self.offset, self.size, self.stride)


@dataclass(frozen=True, slots=True)
class _Operation:
    """One operation on meta tensors, which stand in its arguments as views.

    Args:
        function: What was called.
        leaves: Its arguments, flat.
        structure: Theirs.
        outputs: What came out.
        generator: State of the generator that it draws from; None: it draws nothing.
        dtype: The default one.
    """

    function: Any
    leaves: tuple[Any, ...]
    structure: Any
    outputs: tuple[View, ...]
    generator: Tensor | None
    dtype: torch.dtype

    def run(self, find: Callable[[View], Tensor]) -> list[Tensor]:
        """Run it on real tensors.

        Args:
            find: Gives the tensor in the place of a view.
        """
        leaves = [_leaf(leaf, find) for leaf in self.leaves]
        if self.generator is not None:
            for i, leaf in enumerate(leaves):
                if isinstance(leaf, torch.Generator):
                    leaves[i] = torch.Generator()
                    leaves[i].set_state(self.generator)
            torch.set_rng_state(self.generator)
        args, kwargs = tree_unflatten(leaves, self.structure)
        with default_dtype(self.dtype):
            return tree_tensors(self.function(*args, **kwargs))


class Recording(TorchDispatchMode):
    """Records the operations on meta tensors that run inside its context.

    Args:
        draws: Whether random numbers are drawn. Else what depends on any isn't known.
        copies: Whether it keeps copies of real tensors that it meets, which may change.
    """

    def __init__(self, draws: bool = True, copies: bool = True) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._draws, self._copies = draws, copies
        self._operations: list[_Operation] = []
        self._writers: dict[int, list[int]] = {}  # by storage, those that make or change it
        self._made: set[int] = set()  # storages of which every element was set
        self._random: set[int] = set()  # those that depend on numbers which weren't drawn
        self._alive: list[Any] = []  # storages, so that the identity of none is used again

    @contextmanager
    def building(self) -> Iterator[None]:
        """Record inside, where new tensors stand on the meta device and seem not to."""
        with torch.device("meta"), _SeeminglyOnHost(), self:
            yield

    def provide(self, tensor: Tensor, read: Callable[[], Tensor]) -> None:
        """Tell where the values of a tensor on the meta device are read from."""
        view, (_, structure) = View.of(tensor), tree_flatten(((), {}))
        dtype = torch.get_default_dtype()
        self._operations.append(_Operation(read, (), structure, (view,), None, dtype))
        self._made.add(view.storage)
        self._note([tensor], [], is_unknown=False, replaces=False)

    def view(self, tensor: Tensor) -> View | None:
        """A meta tensor whose values follow of what was recorded; None for others."""
        if not tensor.is_meta:
            return None
        view = View.of(tensor)
        return view if view.storage in self._made and view.storage not in self._random else None

    def values(self, views: Sequence[View]) -> list[Tensor]:
        """The values of meta tensors, in host memory of their own.

        Args:
            views: From :meth:`view`. Those that share memory do so in what comes out.
        """
        storages: dict[int, torch.UntypedStorage] = {}

        def find(view: View) -> Tensor:
            return view.on(storages[view.storage])

        with torch.no_grad(), torch._C.DisableTorchFunction(), preserved(_HOST):
            for index in self._needed(view.storage for view in views):
                operation = self._operations[index]
                for view in operation.leaves:  # what nothing has made yet: it is copied to
                    if isinstance(view, View) and view.storage not in storages:
                        storages[view.storage] = _room(view)
                for view, made in zip(operation.outputs, operation.run(find), strict=True):
                    if view.storage not in storages:
                        storages[view.storage] = _laid_out(made, view).untyped_storage()
        return [find(view) for view in views]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """See ``TorchDispatchMode``."""
        leaves, structure = tree_flatten((args, kwargs or {}))
        inputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if func is torch.ops.aten._local_scalar_dense.default:
            return self._number(func, inputs[0])
        written = written_by(func, args, kwargs or {})
        if any(t.is_meta for t in inputs) and not all(t.is_meta for t in written):
            raise RuntimeError(f"{func} writes to a tensor on the host what isn't computed yet")
        is_random = torch.Tag.nondeterministic_seeded in func.tags and _is_on_meta(leaves)
        state = _drawn(func, leaves, structure) if is_random and self._draws else None
        result = func(*_on_meta(args, inputs), **_on_meta(kwargs or {}, inputs))
        known = {t.untyped_storage()._cdata for t in inputs if t.is_meta}
        outputs = [tensor for tensor in tree_tensors(result) if tensor.is_meta]
        made = [t for t in outputs if t.untyped_storage()._cdata not in known]
        changed = [tensor for tensor in written if tensor.is_meta]
        name = func.overloadpacket.__name__
        if made or changed:
            is_unknown = (is_random and not self._draws) or not known.isdisjoint(self._random)
            views = tuple(View.of(tensor) for tensor in outputs)
            kept = tuple(self._kept(leaf) for leaf in leaves)
            dtype = torch.get_default_dtype()
            self._operations.append(_Operation(func, kept, structure, views, state, dtype))
            is_copy = func is torch.ops.aten.copy_.default and _shows_all(inputs[0])
            sets = name in _SETTING or func._overloadname.endswith("out")
            whole = [t for t in changed if sets and _shows_all(t)]
            if is_copy and self.view(inputs[1]):
                whole.append(inputs[0])
            needs = [] if name.endswith("_like") or name.startswith("new_") else [*known]
            if name not in _WITHOUT_VALUES and self._made.issuperset(needs):
                whole += made
            self._made.update(tensor.untyped_storage()._cdata for tensor in whole)
            self._note(made, changed, is_unknown, replaces=is_copy and not inputs[1].is_meta)
        return result

    def _number(self, func: Any, tensor: Tensor) -> Any:
        """The value of a tensor of one element, on which it may depend what runs next."""
        view = self.view(tensor)
        if view is not None:
            return self.values([view])[0].item()
        is_random = tensor.is_meta and tensor.untyped_storage()._cdata in self._random
        return 0 if is_random else func(tensor)  # of numbers that nobody will see

    def _note(
        self, made: Sequence[Tensor], changed: Sequence[Tensor], is_unknown: bool, replaces: bool
    ) -> None:
        """Note what the last operation has made and changed.

        Args:
            made: Tensors whose storages are new.
            changed: Tensors that it wrote to.
            is_unknown: Whether it depends on numbers that weren't drawn.
            replaces: Whether nothing is left of what was there before.
        """
        self._alive += [tensor.untyped_storage() for tensor in (*made, *changed)]
        for tensor in (*made, *changed):
            key = tensor.untyped_storage()._cdata
            if replaces:
                self._made.add(key)
                self._writers[key] = []
                self._random.discard(key)
            if is_unknown and not replaces:
                self._random.add(key)
            self._writers.setdefault(key, []).append(len(self._operations) - 1)

    def _kept(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if leaf.is_meta:
            return View.of(leaf)
        return leaf.detach().clone() if self._copies else leaf.detach()

    def _needed(self, storages: Iterable[int]) -> list[int]:
        """The operations of which the values of storages follow, in order."""
        found: set[int] = set()
        waiting, seen = list(storages), set[int]()
        while waiting:
            storage = waiting.pop()
            if storage in seen:
                continue
            seen.add(storage)
            for index in self._writers.get(storage, ()):
                if index not in found:
                    found.add(index)
                    operation = self._operations[index]
                    waiting += [v.storage for v in operation.leaves if isinstance(v, View)]
        return sorted(found)


class _SeeminglyOnHost(TorchFunctionMode):
    """Lets code that asks where a tensor stands go on as on the host.

    PyTorch's own initializers, for one, do nothing on the meta device.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func == _IS_META:
            return False
        if func == _DEVICE:
            device = func(*args)
            return _HOST if device.type == "meta" else device
        device = kwargs.get("device")
        is_for_host = device is None or torch.device(device) == _HOST
        if func in _FROM_VALUES and is_for_host:
            return func(*args, **{**kwargs, "device": _HOST}).to("meta")
        if func is Tensor.new_tensor and is_for_host:
            options = {"dtype": args[0].dtype, **kwargs, "device": _HOST}
            values = options.pop("data", *args[1:])
            return torch.tensor(values, device=options.pop("device"), **options).to("meta")
        if device is not None and is_for_host:
            kwargs["device"] = torch.device("meta")
        return func(*args, **kwargs)


_IS_META, _DEVICE = (getattr(Tensor, name).__get__ for name in ("is_meta", "device"))
#: Functions that make tensors of Python's numbers, on the meta device without a trace of these.
_FROM_VALUES = {torch.tensor, torch.as_tensor, torch.asarray, torch.scalar_tensor}


def written_by(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that an operation changes, by its schema."""
    found = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[place] if place < len(args) else kwargs.get(argument.name)
            found += tree_tensors(given)
    return found


def _on_meta(arguments: Any, inputs: Sequence[Tensor]) -> Any:
    """Arguments for the meta device, where some of them stand."""
    if not any(tensor.is_meta for tensor in inputs) or all(t.is_meta for t in inputs):
        return arguments
    return tree_map(
        lambda leaf: leaf.to("meta") if isinstance(leaf, Tensor) and leaf.dim() else leaf, arguments
    )


def _is_on_meta(leaves: Sequence[Any]) -> bool:
    return any(
        leaf.is_meta if isinstance(leaf, Tensor) else leaf == torch.device("meta")
        for leaf in leaves
        if isinstance(leaf, (Tensor, torch.device))
    )


def _drawn(func: Any, leaves: Sequence[Any], structure: Any) -> Tensor:
    """Draw the random numbers of an operation on meta tensors, and forget them.

    Returns:
        The generator's state before.
    """
    own = next((leaf for leaf in leaves if isinstance(leaf, torch.Generator)), None)
    state = torch.get_rng_state() if own is None else own.get_state()
    real = [
        _zeros(View.of(leaf)) if isinstance(leaf, Tensor) and leaf.is_meta else _leaf(leaf, None)
        for leaf in leaves
    ]
    args, kwargs = tree_unflatten(real, structure)
    func(*args, **kwargs)
    return state


def _leaf(leaf: Any, find: Callable[[View], Tensor] | None) -> Any:
    """An argument for a run in host memory."""
    if isinstance(leaf, View) and find is not None:
        return find(leaf)
    return _HOST if isinstance(leaf, torch.device) and leaf.type == "meta" else leaf


def _shows_all(tensor: Tensor) -> bool:
    """Whether a tensor shows every element of its storage."""
    return tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()


def _zeros(view: View) -> Tensor:
    """With the same strides, of which it depends what is drawn."""
    view = replace(view, offset=0)
    return view.on(_room(view)).zero_()


def _room(view: View) -> torch.UntypedStorage:
    last = sum((n - 1) * step for n, step in zip(view.size, view.stride, strict=True))
    elements = view.offset + last + 1 if 0 not in view.size else 0
    return torch.empty(elements, dtype=view.dtype, device=_HOST).untyped_storage()


def _laid_out(made: Tensor, view: View) -> Tensor:
    """A result with the type and strides that it had on the meta device."""
    if (
        made.dtype == view.dtype
        and made.stride() == view.stride
        and made.storage_offset() == view.offset
    ):
        return made
    laid = view.on(_room(view))
    laid.copy_(made)
    return laid
