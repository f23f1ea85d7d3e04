"""One reader per pipeline.

Only the first stage iterates over the data; the others get the same batches from it, and the state
of its random generators with each. So random augmentation, shuffling and worker seeds can't make
stages disagree, and a user's mixup on the batch draws the same numbers everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from lightning_gpipe.comm.generators import SharedGenerators
from lightning_gpipe.comm.messages import RemoteError
from lightning_gpipe.model.redirect import reading_data
from lightning_gpipe.plan.settings import Settings
from lightning_gpipe.strategy import _lightning
from lightning_gpipe.strategy.reader import world_of_replicas
from lightning_gpipe.strategy.world import Layout

#: By these Lightning knows a loader that goes on where it was.
_KEEPS_ITS_PLACE = ("state_dict", "load_state_dict")


class PipelineLoader:
    """Wraps a loader so that the first stage of a pipeline reads it for all.

    Everything else is the wrapped loader's: reads and writes of attributes go to it (Lightning sets
    ``worker_init_fn`` and the sampler's epoch), and it has a length only if the loader has one. A
    copy of it, or what is pickled, is the wrapped loader: a copy has no pipeline to read for.

    Args:
        loader: Any iterable of batches.
        shared: Returns the generators that stages share, with their channel. A loader may outlive a
            run and must not keep it: its process groups have threads.
        layout: The processes.
        settings: What the user chose.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        shared: Callable[[], SharedGenerators],
        layout: Layout,
        settings: Settings,
    ) -> None:
        if isinstance(loader, PipelineLoader):  # wrapped for an earlier run
            loader = loader.__dict__["_loader"]
        self.__dict__["_loader"] = loader
        self.__dict__["_shared"] = shared
        self.__dict__["_place"] = layout.replica, layout.replicas
        self.__dict__["_ahead"] = settings.reads_ahead
        for name in _KEEPS_ITS_PLACE:  # Python looks for a protocol's methods without __getattr__
            if hasattr(loader, name):
                self.__dict__[name] = getattr(loader, name)

    def __iter__(self) -> Iterator[Any]:
        """Iterate. Collective over the pipeline, and so is every ``next``.

        The loader's own iterator is made here, as without a pipeline: what it draws comes before
        what hooks draw until the first batch is read.
        """
        shared = self._shared()
        shared.look()
        if shared.channel.index == 0:
            batches = self._begin(shared)
            return self._read(batches, shared)
        self._receive(shared)
        if self._seen is not None:
            self._seen.clear()
        return self._received(shared)

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

    def _begin(self, shared: SharedGenerators) -> Iterator[Any]:
        with _told(shared), world_of_replicas(*self._place):
            batches: Iterator[Any] = iter(self._loader)
        _send(shared, "start")
        return batches

    def _read(self, batches: Iterator[Any], shared: SharedGenerators) -> Iterator[Any]:
        sent = 0
        while True:
            with _told(shared):
                try:
                    with world_of_replicas(*self._place):
                        batch = next(batches)
                except StopIteration:
                    break
                indices = (self._seen or [])[sent:]
                sent += len(indices)
                _send(shared, "batch", batch, indices, self._ahead)
            yield batch
        _send(shared, "end")

    def _received(self, shared: SharedGenerators) -> Iterator[Any]:
        seen = self._seen
        while True:
            what, batch, indices = self._receive(shared)
            if seen is not None:
                seen.extend(indices)
            if what == "end":
                return
            yield batch

    def _receive(self, shared: SharedGenerators) -> tuple[str, Any, list[Any]]:
        control = shared.channel
        what, value, indices, generators = control.broadcast("batch", None, source=0)
        if what == "error":
            raise RemoteError(
                f"Reading the data failed on stage 0 (rank {control.ranks[0]}): {value}"
            )
        shared.take(generators)
        return what, value, indices


def _send(
    shared: SharedGenerators,
    what: str,
    value: Any = None,
    indices: Sequence[Any] = (),
    ahead: bool = False,
) -> None:
    shared.channel.broadcast("batch", (what, value, list(indices), shared.news()), 0, ahead)


@contextmanager
def _told(shared: SharedGenerators) -> Iterator[None]:
    """Tell the other stages of an exception: they wait for a batch."""
    try:
        with nullcontext() if shared.channel.is_alone else reading_data():
            yield
    except Exception as error:
        told = f"{type(error).__name__}: {error}"
        shared.channel.broadcast("batch", ("error", told, [], None), source=0)
        raise


def _itself(loader: Iterable[Any]) -> Iterable[Any]:
    return loader
