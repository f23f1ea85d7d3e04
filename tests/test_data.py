"""One reader per pipeline."""

from __future__ import annotations

import copy
import inspect
import os
import pickle
import random
from collections.abc import Iterator
from typing import Any

import lightning as L
import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.distributed import get_rank
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from lightning_gpipe import GPipeStrategy
from lightning_gpipe.comm.generators import SharedGenerators
from lightning_gpipe.strategy.loader import PipelineLoader
from lightning_gpipe.strategy.world import Layout
from tests.ranks import RankError, run_ranks
from tests.training import trainer


class Augmented(Dataset[Any]):
    """Random inputs from every generator, unseeded; the label is a function of the input."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        seed = int.from_bytes(os.urandom(4), "little")
        x = torch.randn(6) + random.random() + float(numpy.random.rand()) + seed % 7
        return (
            x,
            x.sum(),
            {"worker": get_worker_info().id, "name": f"sample {index}", "pid": os.getpid()},
        )


class Stream(IterableDataset[Any]):
    """A stream of unknown length."""

    def __iter__(self) -> Iterator[Any]:
        for _ in range(random.randrange(9, 30)):
            x = torch.randn(6)
            yield x, x.sum(), {}


class Recording(L.LightningModule):
    """Keeps what its steps see."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1))
        self.seen: list[Any] = []

    def _step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        x, y, extra = batch
        torch.testing.assert_close(x.sum(1), y)
        self.seen.append(
            (
                self.trainer.state.stage,
                dataloader_idx,
                x.clone(),
                extra,
                torch.rand(1),
                random.random(),
            )
        )
        return nn.functional.mse_loss(self.backbone(x).squeeze(1), y)

    training_step = validation_step = test_step = predict_step = _step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def copies() -> None:
    """Copy a loader, and a Trainer that holds it, in the middle of a run."""

    class Copies(L.Callback):
        def on_train_batch_end(self, run: L.Trainer, *_: Any) -> None:
            found = run.train_dataloader
            for other in (
                copy.copy(found),
                copy.deepcopy(found),
                pickle.loads(pickle.dumps(found)),
            ):
                assert type(other) is DataLoader
                assert other.batch_size == 4

    module = Recording()
    loader = DataLoader(Augmented(), batch_size=4, num_workers=1)
    trainer(devices=2, strategy=GPipeStrategy(2), max_steps=1, callbacks=[Copies()]).fit(
        module, loader
    )


def test_a_loader_is_copied_without_its_pipeline() -> None:
    run_ranks(copies, 2)


class Shard(IterableDataset[Any]):
    """Shares its samples out by rank, as if every rank read data."""

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        share = get_rank() * (worker.num_workers if worker else 1) + (worker.id if worker else 0)
        shares = torch.distributed.get_world_size() * (worker.num_workers if worker else 1)
        for i in range(share, 24, shares):
            yield torch.full((6,), float(i)), torch.tensor(6.0 * i), {}


class KeepsItsPlace(DataLoader[Any]):
    def state_dict(self) -> dict[str, int]:
        return {"read": 3}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.state = state


def test_a_loader_that_keeps_its_place_is_known_by_its_methods() -> None:
    """From Python 3.12 on, isinstance looks for a protocol's methods without ``__getattr__``."""
    made = KeepsItsPlace([1, 2]), DataLoader([1, 2])
    layout, settings = Layout(0, 1, 1, 1), GPipeStrategy(2)._settings
    keeping, other = (PipelineLoader(loader, SharedGenerators, layout, settings) for loader in made)
    for name in ("state_dict", "load_state_dict"):
        assert callable(inspect.getattr_static(keeping, name))
        assert not hasattr(other, name)
    keeping.load_state_dict({"read": 2})
    assert (keeping.state_dict(), made[0].state) == ({"read": 3}, {"read": 2})


def read_shards(stages: int, workers: int) -> list[float]:
    before = get_rank(), torch.distributed.get_world_size()
    module = Recording()
    context = "fork" if workers else None  # others know of no process group, as ever
    loader: Any = DataLoader(
        Shard(), batch_size=3, num_workers=workers, multiprocessing_context=context
    )
    run = trainer(
        devices=torch.distributed.get_world_size(),
        strategy=GPipeStrategy(2, stages=stages),
        max_epochs=1,
    )
    run.fit(module, loader)
    after = get_rank(), torch.distributed.get_world_size()
    assert after == before
    return [float(x) for _, _, batch, _, _, _ in module.seen for x in batch[:, 0]]


@pytest.mark.parametrize(
    ("ranks", "stages", "workers"), [(2, 2, 0), (2, 2, 2), (4, 2, 0), (2, 1, 0)]
)
def test_a_stream_shared_out_by_rank_is_read_whole(ranks: int, stages: int, workers: int) -> None:
    """Ranks of one pipeline read one share, and the pipelines all."""
    seen = run_ranks(read_shards, ranks, stages, workers)
    replicas = [seen[first] for first in range(0, ranks, stages)]
    assert sorted(x for part in replicas for x in part) == list(range(24))
    assert all(seen[rank] == replicas[rank // stages] for rank in range(ranks))


def run_all(stages: int, stream: bool) -> list[Any]:
    def loader() -> Any:
        return (
            DataLoader(Stream(), batch_size=4)
            if stream
            else DataLoader(Augmented(), batch_size=5, num_workers=2)
        )

    module = Recording()
    options: dict[str, Any] = {"devices": stages, "max_epochs": 2}
    for verb in ("fit", "validate", "test", "predict"):
        run = trainer(strategy=GPipeStrategy(2), **options)
        if verb == "fit":
            run.fit(module, loader(), [loader(), loader()])
        else:
            getattr(run, verb)(
                module, loader(), **({} if verb == "predict" else {"verbose": False})
            )
    return module.seen


@pytest.mark.parametrize("stream", [False, True])
def test_every_stage_sees_what_the_first_one_read(stream: bool) -> None:
    first, *others = run_ranks(run_all, 3, 3, stream)
    stages = {str(entry[0].value if hasattr(entry[0], "value") else entry[0]) for entry in first}
    assert stages == {"train", "sanity_check", "validate", "test", "predict"}
    for other in others:
        assert len(other) == len(first)
        for ours, theirs in zip(first, other, strict=True):
            assert ours[:2] == theirs[:2]
            assert torch.equal(ours[2], theirs[2])
            torch.testing.assert_close(ours[3], theirs[3], rtol=0, atol=0) if stream else None
            assert stream or ours[3]["name"] == theirs[3]["name"]
            assert torch.equal(ours[4], theirs[4]), "user code draws the same numbers"
            assert ours[5] == theirs[5]


class Drawing(Recording):
    """Hooks draw, too."""

    def _draw(self) -> None:
        self.seen.append((torch.rand(1), random.random()))

    on_fit_start = on_train_start = on_train_epoch_start = on_train_epoch_end = _draw
    on_validation_start = on_validation_epoch_end = on_train_end = _draw


class Samples(Dataset[Any]):
    """Inputs that say which they are."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        x = torch.full((6,), float(index)) + random.random() + torch.rand(1)
        return x, x.sum(), index


def draw_in_hooks(stages: int, workers: int) -> list[Any]:
    module = Drawing()
    L.seed_everything(7, verbose=False)

    def loader() -> Any:
        return DataLoader(Samples(), batch_size=4, shuffle=True, num_workers=workers)

    strategy: Any = GPipeStrategy(2) if stages > 1 else "auto"
    run = trainer(
        devices=stages,
        strategy=strategy,
        max_epochs=2,
        reload_dataloaders_every_n_epochs=1,
        num_sanity_val_steps=0,
    )
    for epochs in (2, 4, 4):  # the last makes no step
        run.fit_loop.max_epochs = epochs
        run.fit(module, loader(), loader())
    module._draw()
    return [list(map(str, entry)) for entry in module.seen]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_shuffled_loader_and_hooks_draw_in_the_order_of_one_device(workers: int) -> None:
    [plain] = run_ranks(draw_in_hooks, 1, 1, workers)
    for seen in run_ranks(draw_in_hooks, 2, 2, workers):
        assert seen == plain


class Drawn(Dataset[Any]):
    """Inputs that are drawn in worker processes, by generators that Lightning seeds there."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        x = torch.rand(6) + random.random() + float(numpy.random.rand())
        return x, x.sum(), index


def drawn_by_workers(stages: int) -> list[Any]:
    L.seed_everything(7, workers=True, verbose=False)
    module, devices = Recording(), torch.distributed.get_world_size()
    run = trainer(devices=devices, strategy=GPipeStrategy(2, stages=stages), max_epochs=1)
    run.fit(module, DataLoader(Drawn(), batch_size=3, num_workers=2))
    return [batch for _, _, batch, _, _, _ in module.seen]


def test_workers_of_a_replica_are_seeded_alike_whatever_the_number_of_stages() -> None:
    expected = run_ranks(drawn_by_workers, 2, 1)
    assert not torch.equal(expected[0][0], expected[1][0])
    for rank, seen in enumerate(run_ranks(drawn_by_workers, 4, 2)):
        torch.testing.assert_close(seen, expected[rank // 2], rtol=0, atol=0)


class Unreadable:
    """A loader whose iterator can be made once, as Lightning does to see that it can."""

    calls = 0

    def __iter__(self) -> Iterator[Any]:
        self.calls += 1
        if self.calls > 1:
            raise OSError("the disk is gone")
        return iter([])


class Failing(Stream):
    def __iter__(self) -> Iterator[Any]:
        yield torch.zeros(6), torch.zeros(()), {}
        raise OSError("the disk is gone")


def train_on_failing_data(at_once: bool) -> str:
    loader: Any = Unreadable() if at_once else DataLoader(Failing(), batch_size=1)
    try:
        trainer(devices=2, max_epochs=1, strategy=GPipeStrategy(2)).fit(Recording(), loader)
    except Exception as error:
        # Lightning's teardown can't do without an iterator, on one device either
        first = error.__context__ if at_once else error
        return f"{type(first).__name__}: {first}"
    return "no error"


@pytest.mark.parametrize("at_once", [True, False])
def test_an_error_of_the_reader_reaches_every_stage(at_once: bool) -> None:
    first, second = run_ranks(train_on_failing_data, 2, at_once)
    assert "the disk is gone" in first
    assert "the disk is gone" in second
    assert "stage 0" in second


class Rollouts(IterableDataset[Any]):
    """Data that a model's own outputs are, as of an agent that plays."""

    def __init__(self, module: Recording) -> None:
        self.module = module

    def __iter__(self) -> Iterator[Any]:
        x = torch.ones(2, 6)
        for _ in range(4):
            with torch.no_grad():
                x = self.module.backbone(x) * torch.ones(2, 6)
            yield x[0], x[0].sum(), {}


def train_on_rollouts(step: Any) -> None:
    module = Recording()
    loader = DataLoader(Rollouts(module), batch_size=2)
    stages = torch.distributed.get_world_size()
    trainer(devices=stages, max_epochs=1, strategy=GPipeStrategy(2, step=step)).fit(module, loader)


@pytest.mark.parametrize("step", ["mini-batch", "micro-batch"])
def test_data_that_the_backbone_computes_are_refused(step: str) -> None:
    if step == "mini-batch":  # Recording looks at values
        run_ranks(train_on_rollouts, 1, step)
    with pytest.raises(RankError) as refused:
        run_ranks(train_on_rollouts, 2, step, timeout_s=30)
    assert all("A data loader calls the backbone" in text for text in refused.value.errors.values())


def call_on_one_rank(rank: int) -> None:
    module = Recording()

    class Careless(L.Callback):
        def on_train_batch_start(
            self, run: L.Trainer, module: Any, batch: Any, batch_idx: int
        ) -> None:
            if batch_idx == 1 and run.global_rank == rank:
                module.backbone(batch[0])

    trainer(devices=2, max_epochs=1, strategy=GPipeStrategy(2), callbacks=[Careless()]).fit(
        module, DataLoader(Stream(), batch_size=2)
    )


@pytest.mark.parametrize("rank", [0, 1])
def test_a_call_on_one_rank_alone_is_an_error(rank: int) -> None:
    with pytest.raises(RankError, match="on every rank alike"):
        run_ranks(call_on_one_rank, 2, rank, timeout_s=30)


class Slots:
    """A loader on which no attribute can be set."""

    __slots__ = ("batches",)

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


def trained_on(loader: Any) -> int:
    module = Recording()
    run = trainer(devices=2, strategy=GPipeStrategy(2), max_epochs=1)
    run.fit(module, loader)
    return run.global_step


@pytest.mark.parametrize(("kind", "count"), [(Slots, 2), (Slots, 0), (list, 0)])
def test_any_iterable_is_a_loader(kind: Any, count: int) -> None:
    x = torch.ones(4, 6)
    loader = kind([(x, x.sum(1), {})] * count)
    assert run_ranks(trained_on, 2, loader) == [count] * 2
