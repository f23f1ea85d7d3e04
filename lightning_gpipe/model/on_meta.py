"""Runs modules on the meta device: shapes and types, no values, no memory, and no trace."""

from __future__ import annotations

import logging
import warnings
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache, partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

# As PyTorch's documentation imports it: no public name leads to it.
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import grad  # itself, where a run has put another in its place
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from lightning_gpipe.model.layer_state import layer_state_kept
from lightning_gpipe.model.own_state import own_state_kept
from lightning_gpipe.model.places import refill
from lightning_gpipe.model.run_layer import RunLayer
from lightning_gpipe.tensors import strides
from lightning_gpipe.tensors.random_state import preserved
from lightning_gpipe.tensors.tree import Tree

#: Where modules keep the hooks of their calls.
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


#: Whether a layer runs without data.
_PRETENDS: ContextVar[bool] = ContextVar("pretends", default=False)
#: Whose contents are put back.
_CONTAINERS = {list, dict, set, deque, OrderedDict, defaultdict, Counter}


def is_pretending() -> bool:
    """Whether a layer runs without data, so that what it tells others isn't meant."""
    return _PRETENDS.get()


class UntraceableLayer(RuntimeError):
    """A layer can't run without data, on the meta device.

    Args:
        text: Which, and why.
        index: Its place.
    """

    def __init__(self, text: str, index: int = 0) -> None:
        super().__init__(text)
        self.index = index


class Pretended:
    """Tensors on the meta device that pass for ones of another device.

    Operations choose the kernels of that device, and save what these save for a backward.

    Args:
        device: That device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # the first backward of a process starts a thread for each device, and no fork of it can run
        # backwards then; where there are none, a fake mode would make it find some
        leaf = torch.zeros((), device="cpu", requires_grad=True)
        grad(leaf, leaf)
        self._mode = FakeTensorMode(allow_fallback_kernels=False, allow_non_fake_inputs=True)

    @property
    def mode(self) -> AbstractContextManager[None]:
        """Lets new tensors pass so, and what is done with such ones have no values."""
        return _both(self._mode, _Copies())

    def like(self, tensor: Tensor) -> Tensor:
        """A tensor of the same shape, strides and type."""
        with self._mode:
            return strides.empty_like(tensor, self.device)

    def for_backwards(self) -> Pretended:
        """This one; or the CPU's, where this machine has no such device.

        Then PyTorch chooses the device's kernels in a forward, but runs no backward.
        """
        return self if _differentiates(self.device.type) else Pretended(torch.device("cpu"))


class _Copies(TorchFunctionMode):
    """Copies tensors without values; PyTorch 2.8 to 2.14 would read memory that they haven't."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is not Tensor.__deepcopy__:
            return func(*args, **(kwargs or {}))
        tensor, known = args
        if id(tensor) not in known:
            known[id(tensor)] = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        return known[id(tensor)]


@contextmanager
def _both(mode: FakeTensorMode, other: TorchFunctionMode) -> Iterator[None]:
    with mode, other:
        yield


class Zeros:
    """Real tensors in place of those on the meta device, for layers that look at values.

    Args:
        device: Where they are.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.mode = device, nullcontext()

    def like(self, tensor: Tensor) -> Tensor:
        """A tensor of the same shape, strides and type, of zeros."""
        return strides.empty_like(tensor, self.device).zero_()


Place: TypeAlias = Pretended | Zeros


@cache
def _differentiates(kind: str) -> bool:
    """Whether backwards run on tensors without values that pass for ones of a kind of device."""
    place = Pretended(torch.device(kind))
    try:
        with place._mode:
            leaf = torch.zeros((), device=place.device, requires_grad=True)
            grad(leaf.tanh(), leaf)
    except Exception:  # no device, no driver, or a PyTorch without them
        return False
    return True


def run_on_meta(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call a module on the meta device, where nothing is computed and no memory used.

    Raises:
        UntraceableLayer: If it needs the values of its input.
    """
    return _run_without_data(module, args, kwargs, training=False)


def run_as_set(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The same as :func:`run_on_meta`, in training mode if the module is in it.

    In evaluation, where it can't run so, such as batch norm with one value per channel.
    """
    if module.training:
        try:
            return _run_without_data(module, args, kwargs, training=None)
        except UntraceableLayer:
            pass
    return run_on_meta(module, *args, **kwargs)


def run_on_zeros(module: nn.Module, device: torch.device, *args: Any, **kwargs: Any) -> Any:
    """The same as :func:`run_as_set`, with zeros on a device: it computes, and uses memory.

    Args:
        module: The module; its parameters and buffers may be on the meta device.
        device: Where it is called.
        args: What it is called with; zeros stand for tensors on the meta device.
        kwargs: The same.
    """
    return _run_without_data(module, args, kwargs, training=None, place=Zeros(device))


def _run_without_data(
    module: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    training: bool | None,
    place: Zeros | None = None,
) -> Any:
    tree = Tree.of((tuple(args), dict(kwargs)), "The example")
    value = tree.mapped(partial(_example, place=place)).value()

    def call(_: int, forward: Any, given: Any) -> Any:
        return forward(*given[0], **given[1])

    with torch.no_grad():
        return run_layer_on_meta(
            module, call, 0, value, with_hooks=True, training=training, place=place
        )


def _example(tensor: Tensor, place: Zeros | None) -> Tensor:
    """What stands for an argument: itself, where values are known and looked at."""
    if place is None or tensor.is_meta:
        made: Tensor = to_meta_leaf(tensor, place)
        return made
    return strides.copy(tensor.detach())


def run_layer_on_meta(
    module: nn.Module,
    run_layer: RunLayer,
    index: int,
    value: Any,
    tensors: Mapping[str, Tensor] | None = None,
    *,
    with_hooks: bool = False,
    training: bool | None = False,
    place: Place | None = None,
) -> Any:
    """Run a layer with tensors on the meta device, which leaves no trace in it.

    Args:
        module: The layer, on any device.
        run_layer: Runs it.
        index: Its place.
        value: Its input, on the meta device.
        tensors: What stands for its parameters and buffers; see :func:`meta_tensors`.
        with_hooks: Whether the hooks run that aren't PyTorch's own.
        training: Whether it runs in training mode; None: as its modules are set. Evaluation does
            where it can, because layers that synchronize or count do so in training.
        place: For which device the tensors pass; they all must, then.

    Raises:
        UntraceableLayer: If it needs the values of its input.
    """
    given = dict(tensors if tensors is not None else meta_tensors(module, place))

    def run() -> Any:
        return run_layer(index, module, value)

    try:
        if isinstance(module, torch.jit.ScriptModule):
            raise TypeError("a compiled script keeps its own tensors")
        with _left_as_it_was(module, with_hooks, training, place):
            named = {f"layer.{name}": tensor for name, tensor in given.items()}
            return functional_call(_Within(module), named, (run,))
    except Exception as error:
        raise UntraceableLayer(
            f"{type(module).__name__} can't run on the meta device, without data"
            f" ({type(error).__name__}: {error})",
            index,
        ) from error


class _Within(nn.Module):
    """Runs a function while other tensors stand for a layer's.

    Whatever calls the layer then, also a backward that runs its forward once more. Its own call
    runs no hooks: what counts operations by modules sees the layer alone.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def __call__(self, run: Callable[[], Any]) -> Any:
        return run()


def meta_tensors(module: nn.Module, place: Place | None = None) -> dict[str, Tensor]:
    """A module's parameters and buffers on the meta device, by name."""
    parameters = {name: graph_leaf_on_meta(p, place) for name, p in module.named_parameters()}
    return {**parameters, **{name: to_meta_leaf(b, place) for name, b in module.named_buffers()}}


def graph_leaf_on_meta(tensor: Tensor, place: Place | None = None) -> Tensor:
    """The same as :func:`to_meta_leaf`, a leaf of a graph where the tensor wants a gradient."""
    made: Tensor = to_meta_leaf(tensor, place)
    return made.requires_grad_(tensor.requires_grad)


def to_meta_leaf(leaf: Any, place: Place | None = None) -> Any:
    """A tensor of the same shape, strides and type on the meta device; other leaves as they are."""
    if not isinstance(leaf, Tensor):
        return leaf
    with torch.no_grad():
        return place.like(leaf) if place else strides.empty_like(leaf, torch.device("meta"))


@contextmanager
def _left_as_it_was(
    module: nn.Module, with_hooks: bool, training: bool | None, place: Place | None
) -> Iterator[None]:
    """Put back what a call changes: modes, hooks' traces, attributes, generators.

    Without the fused kernels of evaluation, whose operations nobody counts.
    """
    with (
        own_state_kept(module),
        layer_state_kept([module]),
        _attributes_kept(module, with_hooks, training, place),
    ):
        yield


@contextmanager
def _attributes_kept(
    module: nn.Module, with_hooks: bool, training: bool | None, place: Place | None
) -> Iterator[None]:
    kept = Attributes(module.modules())
    device = next((p.device for p in module.parameters() if not p.is_meta), torch.device("cpu"))
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    token = _PRETENDS.set(True)
    try:
        kept.prepare(with_hooks, training, place)
        with (
            preserved(device),
            torch.compiler.set_stance("force_eager"),
            warnings.catch_warnings(),
            _quiet(),
        ):
            warnings.simplefilter("ignore")  # the real calls warn
            with nullcontext() if place is None else place.mode:
                yield
    finally:
        _PRETENDS.reset(token)
        torch.backends.mha.set_fastpath_enabled(fast)
        kept.restore()


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what PyTorch prints of operations that need values: they are told of otherwise."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True  # a new level would cost a look at all loggers
    try:
        yield
    finally:
        log.disabled = before


class Attributes:
    """The attributes of modules, and what the lists, dicts and sets among them hold."""

    def __init__(self, parts: Iterable[nn.Module]) -> None:
        self._values = [(part, dict(part.__dict__)) for part in parts]
        held = (value for _, values in self._values for value in values.values())
        self._contents = [(value, value.copy()) for value in held if type(value) in _CONTAINERS]

    def prepare(self, with_hooks: bool, training: bool | None, place: Place | None) -> None:
        """Ready the modules for a call on the meta device; see :func:`run_layer_on_meta`."""
        for part, values in self._values:
            for name, value in values.items():
                if isinstance(value, Tensor):  # neither parameter nor buffer: a table, a cache
                    part.__dict__[name] = to_meta_leaf(value, place)
            if not with_hooks:
                part.__dict__.update(hooks_of_torch(part))
            if training is not None:
                part.__dict__["training"] = training
            without_replicas(part)

    def restore(self) -> None:
        """Put all back, and hold on to nothing."""
        while self._values:
            part, values = self._values.pop()
            part.__dict__.clear()
            part.__dict__.update(values)
        while self._contents:
            value, before = self._contents.pop()
            refill(value, before)


def without_replicas(part: nn.Module) -> None:
    """Let a SyncBatchNorm compute by itself, without the other processes."""
    if isinstance(part, nn.SyncBatchNorm):
        part.__dict__["forward"] = partial(_BatchNorm.forward, part)


def hooks_of_torch(part: nn.Module) -> dict[str, OrderedDict[int, Any]]:
    """The hooks of a module's calls without the user's, by the attributes that hold them."""
    return {
        name: OrderedDict((key, hook) for key, hook in value.items() if _is_of_torch(hook))
        for name, value in vars(part).items()
        if name in _HOOKS
    }


def _is_of_torch(hook: Any) -> bool:
    """Whether a hook is PyTorch's, as weight norm's, without which the module isn't whole."""
    return str(getattr(hook, "__module__", "")).startswith("torch.")
