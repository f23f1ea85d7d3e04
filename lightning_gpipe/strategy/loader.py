"""One reader per pipeline.

Only the first stage iterates over the data; the others get the same batches from it, and the state
of its random generators with each. So random augmentation, shuffling and worker seeds can't make
stages disagree, and a user's mixup on the batch draws the same numbers everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from lightning_gpipe.comm.generators import SharedGenerators
from lightning_gpipe.comm.messages import RemoteError
from lightning_gpipe.strategy import _lightning
from lightning_gpipe.strategy.reader import world_of_replicas


class PipelineLoader:
    """Wraps a loader so that the first stage of a pipeline reads it for all.

    Everything else is the wrapped loader's: reads and writes of attributes go to it (Lightning sets
    ``worker_init_fn`` and the sampler's epoch), and it has a length only if the loader has one. A
    copy of it, or what is pickled, is the wrapped loader: a copy has no pipeline to read for.

    Args:
        loader: Any iterable of batches.
        shared: Returns the generators that stages share, with their channel. A loader may outlive a
            run and must not keep it: its process groups have threads.
        replica: This rank's pipeline.
        replicas: D.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        shared: Callable[[], SharedGenerators],
        replica: int,
        replicas: int,
    ) -> None:
        if isinstance(loader, PipelineLoader):  # wrapped for an earlier run
            loader = loader.__dict__["_loader"]
        self.__dict__["_loader"] = loader
        self.__dict__["_shared"] = shared
        self.__dict__["_place"] = replica, replicas

    def __iter__(self) -> Iterator[Any]:
        """Iterate. Collective over the pipeline, and so is every ``next``."""
        shared = self._shared()
        control = shared.channel
        if control.index == 0:
            yield from self._read(shared)
            return
        seen = self._seen
        if seen is not None:
            seen.clear()
        while True:
            what, value, indices, generators = control.broadcast("batch", None, source=0)
            if seen is not None:
                seen.extend(indices)
            if what == "end":
                shared.take(generators)
                return
            if what == "error":
                raise RemoteError(
                    f"Reading the data failed on stage 0 (rank {control.ranks[0]}): {value}"
                )
            shared.take(generators)
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

    def _read(self, shared: SharedGenerators) -> Iterator[Any]:
        sent, control = 0, shared.channel
        try:
            with world_of_replicas(*self._place):
                batches = iter(self._loader)
            while True:
                try:
                    with world_of_replicas(*self._place):
                        batch = next(batches)
                except StopIteration:
                    break
                indices = (self._seen or [])[sent:]
                sent += len(indices)
                control.broadcast("batch", ("batch", batch, indices, shared.news()), source=0)
                yield batch
        except Exception as error:
            control.broadcast(
                "batch", ("error", f"{type(error).__name__}: {error}", [], None), source=0
            )
            raise
        control.broadcast("batch", ("end", None, [], shared.news()), source=0)


def _itself(loader: Iterable[Any]) -> Iterable[Any]:
    return loader
