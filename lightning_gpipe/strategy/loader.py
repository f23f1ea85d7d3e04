"""One reader per pipeline.

Only the first stage iterates over the data; the others get the same batches from it, and the state
of its random generators with each. So random augmentation, shuffling and worker seeds can't make
stages disagree, and a user's mixup on the batch draws the same numbers everywhere.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from lightning_gpipe.comm.messages import ObjectChannel, RemoteError
from lightning_gpipe.strategy import _lightning


class PipelineLoader:
    """Wraps a loader so that the first stage of a pipeline reads it for all.

    Everything else is the wrapped loader's: reads and writes of attributes go to it (Lightning sets
    ``worker_init_fn`` and the sampler's epoch), and it has a length only if the loader has one. A
    copy of it, or what is pickled, is the wrapped loader: a copy has no pipeline to read for.

    Args:
        loader: Any iterable of batches.
        control: The pipeline's object channel.
    """

    def __init__(self, loader: Iterable[Any], control: ObjectChannel) -> None:
        if isinstance(loader, PipelineLoader):  # wrapped for an earlier run
            loader = loader.__dict__["_loader"]
        self.__dict__["_loader"] = loader
        self.__dict__["_control"] = control

    def __iter__(self) -> Iterator[Any]:
        """Iterate. Collective over the pipeline, and so is every ``next``."""
        control = self._control
        if control.index == 0:
            yield from self._read(control)
            return
        seen = self._seen
        if seen is not None:
            seen.clear()
        while True:
            what, value, indices, generators = control.broadcast("batch", None, source=0)
            if seen is not None:
                seen.extend(indices)
            if what == "end":
                _set_generators(generators)
                return
            if what == "error":
                raise RemoteError(
                    f"Reading the data failed on stage 0 (rank {control.ranks[0]}): {value}"
                )
            _set_generators(generators)
            yield value

    def __len__(self) -> int:
        return len(self._loader)

    def __reduce__(self) -> tuple[Any, ...]:
        return _itself, (self._loader,)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_loader"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._loader, name, value)

    @property
    def _seen(self) -> list[Any] | None:
        """The indices of the samples read, where Lightning keeps them for prediction writers."""
        sampler = getattr(self._loader, "batch_sampler", None)
        return _lightning.seen_indices(sampler)

    def _read(self, control: ObjectChannel) -> Iterator[Any]:
        sent = 0
        try:
            batches = iter(self._loader)
            while True:
                try:
                    batch = next(batches)
                except StopIteration:
                    break
                indices = (self._seen or [])[sent:]
                sent += len(indices)
                control.broadcast("batch", ("batch", batch, indices, _generators()), source=0)
                yield batch
        except Exception as error:
            control.broadcast(
                "batch", ("error", f"{type(error).__name__}: {error}", [], None), source=0
            )
            raise
        control.broadcast("batch", ("end", None, [], _generators()), source=0)


def _itself(loader: Iterable[Any]) -> Iterable[Any]:
    return loader


def _generators() -> tuple[Any, ...]:
    """State of the generators that user code draws from."""
    numpy = _numpy()
    device = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    return (
        torch.get_rng_state(),
        device,
        random.getstate(),
        numpy.random.get_state() if numpy else None,
    )


def _set_generators(states: tuple[Any, ...]) -> None:
    host, device, python, array = states
    torch.set_rng_state(host)
    if device is not None and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(device)
    random.setstate(python)
    numpy = _numpy()
    if array is not None and numpy is not None:
        numpy.random.set_state(array)


def _numpy() -> Any:
    try:
        import numpy
    except ImportError:
        return None
    return numpy
