"""Random generators: their states saved and put back, and themselves seeded."""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RandomState:
    """The state of torch's generators, Python's and NumPy's.

    Args:
        host: torch's on the host.
        device: torch's on the device; None where that is the host.
        python: That of the module ``random``; None: it stays as it is.
        numpy: That of ``numpy.random``; None, too, where nobody has imported NumPy.
    """

    host: Tensor
    device: Tensor | None
    python: Any
    numpy: Any

    @classmethod
    def current(cls, device: torch.device, with_global: bool = True) -> RandomState:
        """The state now.

        Args:
            device: Where layers compute.
            with_global: Whether Python's and NumPy's are a part of it.
        """
        numpy = _numpy() if with_global else None
        return cls(
            torch.get_rng_state(),
            None if device.type == "cpu" else _module(device).get_rng_state(*_place(device)),
            random.getstate() if with_global else None,
            numpy.random.get_state() if numpy else None,
        )

    def equals(self, other: RandomState) -> bool:
        """Whether two states are the same."""
        pairs = (self.host, other.host), (self.device, other.device)
        return (
            all(a is b or (a is not None and b is not None and torch.equal(a, b)) for a, b in pairs)
            and self.python == other.python
            and _plain(self.numpy) == _plain(other.numpy)
        )

    def restore(self, device: torch.device) -> None:
        """Put the state back."""
        torch.set_rng_state(self.host)
        if self.device is not None and device.type != "cpu":
            _module(device).set_rng_state(self.device, *_place(device))
        if self.python is not None:
            random.setstate(self.python)
        numpy = _numpy()
        if self.numpy is not None and numpy is not None:
            numpy.random.set_state(self.numpy)


@contextmanager
def preserved(device: torch.device, with_global: bool = True) -> Iterator[RandomState]:
    """Put the state back at the end, whatever was drawn; gives the state at the beginning.

    Args:
        device: Where layers compute.
        with_global: Whether that of Python's and NumPy's generators is put back, too.
    """
    state = RandomState.current(device, with_global)
    try:
        yield state
    finally:
        state.restore(device)


@contextmanager
def own_preserved(generators: Iterable[Any]) -> Iterator[None]:
    """The same for generators that somebody holds."""
    put_back = kept(generators)
    try:
        yield
    finally:
        put_back()


def kept(generators: Iterable[Any]) -> Callable[[], None]:
    """Keep the states of generators, of torch, Python or NumPy.

    Returns:
        A function that puts them back.
    """
    states = [(generator, _state(generator)) for generator in generators]

    def put_back() -> None:
        for generator, state in states:
            _set_state(generator, state)

    return put_back


class DrawsNoted:
    """Tells whether code has drawn from torch's generators.

    Args:
        device: Where it computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._before = device, RandomState.current(device, with_global=False)

    def has_drawn(self) -> bool:
        """Whether anything was drawn since this was made."""
        now = RandomState.current(self._device, with_global=False)
        return not now.equals(self._before)


def seed_torch(device: torch.device, seed: int) -> None:
    """Seed torch's generators on the host and on one device.

    ``torch.manual_seed`` takes a hundred times as long: it goes through all devices.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cpu":
        return
    module = _module(device)
    generators = getattr(module, "default_generators", None)
    if generators:
        generators[device.index or 0].manual_seed(seed)
    else:  # a kind with one device
        module.manual_seed(seed)


def state_behind(generator: torch.Generator) -> Tensor:
    """A state for a generator after a call, whatever that draws; it depends on the one before."""
    state = generator.get_state().numpy().tobytes()
    seed = int.from_bytes(blake2b(state, digest_size=8).digest(), "little") >> 1
    return torch.Generator(generator.device).manual_seed(seed).get_state()


def is_generator(value: Any) -> bool:
    """Whether a value is a generator of torch, Python or NumPy that has a state.

    Not one of the common generators, which their modules' functions draw from.
    """
    kind = type(value)  # a proxy claims to be of another class
    is_one = issubclass(kind, (torch.Generator, random.Random)) or _is_of_numpy(
        kind, "Generator", "RandomState"
    )
    if not is_one or issubclass(kind, random.SystemRandom):
        return False
    modules = [random] if (numpy := _numpy()) is None else [random, numpy.random]
    common = [torch.default_generator, *(getattr(m.random, "__self__", None) for m in modules)]
    return all(value is not one for one in common)


def packed(generator: Any) -> bytes:
    """The state of a generator that somebody holds; the same bytes for the same state."""
    state = _state(generator)
    if isinstance(state, Tensor):
        state = state.numpy().tobytes()
    return pickle.dumps((type(generator).__name__, state))


def set_packed(generator: Any, packed: bytes) -> None:
    """Put a generator into the state of one of its kind; of another kind it isn't touched.

    Args:
        generator: The generator.
        packed: What :func:`packed` returned.
    """
    kind, state = pickle.loads(packed)
    if isinstance(state, bytes):
        state = torch.frombuffer(bytearray(state), dtype=torch.uint8)
    if kind == type(generator).__name__:
        _set_state(generator, state)


def seed_own(generator: Any, seed: int) -> None:
    """Seed a generator that somebody holds."""
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif isinstance(generator, random.Random):
        generator.seed(seed)
    elif _is_of_numpy(type(generator), "RandomState"):
        generator.seed(seed % 2**32)
    else:
        generator.bit_generator.state = type(generator.bit_generator)(seed).state


def _is_of_numpy(kind: type, *names: str) -> bool:
    numpy = _numpy()
    return numpy is not None and issubclass(
        kind, tuple(getattr(numpy.random, name) for name in names)
    )


def _state(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, torch.Generator) or _is_of_numpy(type(generator), "RandomState"):
        return generator.get_state()
    return generator.bit_generator.state


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, torch.Generator) or _is_of_numpy(type(generator), "RandomState"):
        generator.set_state(state)
    else:
        generator.bit_generator.state = state


def _module(device: torch.device) -> Any:
    """torch.cuda, torch.xpu, torch.mps and so on."""
    return torch.get_device_module(device)


def _place(device: torch.device) -> tuple[torch.device, ...]:
    """What a device module's functions want to know: of MPS there is one."""
    return () if device.type == "mps" else (device,)


def _plain(numpy: Any) -> Any:
    """NumPy's state as what compares by value."""
    return numpy and (numpy[1].tobytes(), numpy[0], *numpy[2:])


def _numpy() -> Any:
    """NumPy, if anybody has imported it."""
    return sys.modules.get("numpy")
