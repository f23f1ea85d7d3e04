"""The random numbers that layers draw: the same for every number of stages, and in a recompute.

Before a layer torch's generators are seeded for (call, micro-batch, layer), and so are generators
of the layer's own. Python's and NumPy's take longer to seed than many a layer to run: they are
seeded before those layers that are known to draw from them. In the first calls that is found out,
and later on looked at again.
"""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from lightning_gpipe.model.layer_state import generators_held
from lightning_gpipe.tensors.random_state import seed_own, seed_torch

_CLOSE_LOOKS = 2  # calls in which every layer is watched
_BETWEEN_LOOKS = 8  # where layers that draw hide others: so many calls more, and then each eighth
_MASK, _ALL = 2**63 - 1, 2**64 - 1
_BEGAN_LATE = (
    "{} of the backbone has begun to draw from Python's or NumPy's generator, which it didn't in"
    " the first steps. What it {} may depend on the number of stages. Draw from torch's"
    " generators, or from the first step on, for the same numbers with any number of stages."
)
_BEFORE_NOW = "drew before this step"
_IN_THIS_STEP = "draws in this step, and in later ones if it doesn't draw in the next two,"
_SINCE_LAST_LOOK = f"drew in the last {_BETWEEN_LOOKS} steps, or draws in later ones,"
# Odd, so that seeds differ, and so do their lower halves, of which a generator may make all.
_BETWEEN_LAYERS, _BETWEEN_MICRO_BATCHES = 0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9


class Seeding(NamedTuple):
    """What is done in a call about Python's and NumPy's generators.

    Args:
        before: The layers before which they are seeded.
        is_late: Whether a layer that begins to draw now does so later than in the first calls.
        looks: Whether the last micro-batch tells if a layer drew of which it isn't known.
        is_any: Whether they are seeded at all.
    """

    before: frozenset[int]
    is_late: bool
    looks: bool
    is_any: bool


class LayerRandomness:
    """Seeds what the layers of a stage draw from.

    Args:
        layers: The layers by their index in the backbone.
        device: Where they are.
        is_alone: Whether these are all layers. If so, one that begins to draw late doesn't let the
            generators of ranks differ, so it is enough to notice it some steps later.
    """

    def __init__(
        self, layers: Mapping[int, nn.Module], device: torch.device, is_alone: bool = False
    ) -> None:
        self._device, self._is_alone = device, is_alone
        self._all, self._first = frozenset(layers), min(layers, default=0)
        self._own = {
            index: [(generator, _first_seed(generator)) for generator in generators_held(layer)]
            for index, layer in layers.items()
        }
        self._draw: set[int] = set()
        self._calls: dict[tuple[bool, ...], int] = {}

    def begin(self, modes: tuple[bool, ...], is_once: bool) -> Seeding:
        """Begin a call.

        Args:
            modes: Which modules are in training: in others other layers may draw.
            is_once: Whether no micro-batch is recomputed.
        """
        calls = self._calls[modes] = self._calls.get(modes, 0) + 1
        is_late = calls > _CLOSE_LOOKS
        is_now = calls <= _BETWEEN_LOOKS or calls % _BETWEEN_LOOKS == 0
        is_close = not is_late or (is_now and len(self._draw) > 0)
        before = self._all if is_close else frozenset(self._draw)
        looks = not before and (is_now or not is_once or not self._is_alone)
        return Seeding(before, is_late, looks, bool(before) or looks or not is_once)

    @property
    def own(self) -> list[Any]:
        """The generators that layers hold."""
        return [generator for found in self._own.values() for generator, _ in found]

    def begin_micro_batch(self, call: int, m: int, is_drawn_again: bool) -> int:
        """Begin a micro-batch's forward or recompute.

        Args:
            call: A seed of the call.
            m: The micro-batch.
            is_drawn_again: Whether layers that aren't known to draw must find Python's and NumPy's
                generators as the other time, or will be looked at.

        Returns:
            A number for :meth:`seed`.
        """
        base = (call + m * _BETWEEN_MICRO_BATCHES) & _MASK
        if is_drawn_again:
            seed_global(_seed_of_layer(base, self._first))
        return base

    def seed(self, base: int, index: int, with_global: bool) -> None:
        """Seed before a layer.

        Args:
            base: What :meth:`begin_micro_batch` returned.
            index: The layer.
            with_global: Whether Python's and NumPy's generators are seeded, too.
        """
        seed = _seed_of_layer(base, index)
        seed_torch(self._device, seed)
        for number, (generator, first_seed) in enumerate(self._own[index]):
            seed_own(generator, seed_of(seed, number, first_seed))
        if with_global:
            seed_global(seed)

    def look_at_layer(self, base: int, index: int, is_late: bool) -> None:
        """Note whether a layer before which all was seeded drew from Python's or NumPy's.

        Args:
            base: What :meth:`begin_micro_batch` returned.
            index: The layer.
            is_late: See :class:`Seeding`.
        """
        if index in self._draw:
            return
        seed = _seed_of_layer(base, index)
        if _have_moved(seed):
            self._draw.add(index)
            if is_late:
                warnings.warn(_BEGAN_LATE.format(f"Layer {index}", _BEFORE_NOW), stacklevel=2)
        seed_global(seed)

    def look_at_all(self, base: int) -> None:
        """Look closely again, if a layer drew of which it wasn't known."""
        if _have_moved(_seed_of_layer(base, self._first)) and self._calls:
            self._calls.clear()  # no second word of it in this call's recompute
            last = max(self._all)
            who = f"A layer from {self._first} to {last}" if last > self._first else f"Layer {last}"
            what = _SINCE_LAST_LOOK if self._is_alone else _IN_THIS_STEP
            warnings.warn(_BEGAN_LATE.format(who, what), stacklevel=2)


@dataclass(slots=True)
class StepSeeds:
    """Seeds what the user's step draws from, the same on every rank of a pipeline.

    Args:
        device: Where it computes.
        run: Numbers of the run.
        step: Numbers of the step.
    """

    device: torch.device
    run: tuple[int, ...]
    step: tuple[int, ...] = ()

    @property
    def of_layers(self) -> tuple[int, ...]:
        """The key of the layers' random numbers, as where the step has the whole mini-batch."""
        return (*self.run, *self.step, 1)

    def __call__(self, m: int, call: int) -> None:
        """Seed for a function call in the step of a micro-batch."""
        seed = seed_of(*self.run, *self.step, m, call)
        seed_torch(self.device, seed)
        if not call:
            seed_global(seed)

    def behind_backbone(self, m: int) -> None:
        """Seed Python's and NumPy's generators, which each rank's layers have left elsewhere."""
        seed_global(seed_of(*self.run, *self.step, m, -1))


def seed_of(*key: int) -> int:
    """A seed that depends on all numbers of a key, the same in every process.

    Python's hash of a tuple of numbers, mixed as by SplitMix64 (Steele et al. 2014). A hash of
    bytes takes ten times as long, with the processor's caches full of the layers' data.
    """
    mixed = hash(key) & _ALL
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & _ALL
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & _ALL
    return (mixed ^ mixed >> 31) >> 1


def _seed_of_layer(base: int, index: int) -> int:
    return (base + index * _BETWEEN_LAYERS) & _MASK


def seed_global(seed: int) -> None:
    """Seed Python's generator and, if anybody has imported it, NumPy's."""
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)


def _have_moved(seed: int) -> bool:
    """Whether somebody drew from Python's or NumPy's generator since they were seeded.

    Their next numbers tell; reading their states takes ten times as long.
    """
    found = _next_numbers()
    seed_global(seed)
    return found != _next_numbers()


def _next_numbers() -> tuple[Any, ...]:
    # no normal distribution: NumPy throws away numbers for it, so others may lead to the same ones
    numpy = sys.modules.get("numpy")
    return random.getrandbits(64), numpy.random.random() if numpy is not None else None


def _first_seed(generator: Any) -> int:
    """The seed that the user gave, where it is known: two layers may differ in it alone."""
    return generator.initial_seed() % 2**63 if isinstance(generator, torch.Generator) else 0
