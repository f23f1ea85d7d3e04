"""The processes that run tests outlive a test that fails on purpose."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_gpipe import GPipeStrategy
from tests import models
from tests.ranks import RankError, run_ranks, stop_ranks
from tests.training import train


@pytest.fixture(autouse=True, scope="module")
def new_processes() -> None:
    """What other tests may have left in their processes, such as a group, is no matter here."""
    stop_ranks()


def place() -> tuple[int, int]:
    """The process and its rank, once all ranks have met."""
    dist.barrier()
    return os.getpid(), dist.get_rank()


def fail(ranks: list[int]) -> None:
    """Some ranks fail while the others wait for them."""
    if dist.get_rank() in ranks:
        raise ValueError(f"rank {dist.get_rank()} fails")
    dist.barrier()


class Failing(models.Module):
    def on_train_batch_end(self, *_: Any) -> None:
        if self.trainer.global_rank == 1:
            raise ValueError("the hook fails")


def fail_in_training() -> None:
    train(Failing(), max_steps=3, devices=2, strategy=GPipeStrategy(2))


def test_all_ranks_answer_and_go_on_after_an_error() -> None:
    before = run_ranks(place, 3)
    with pytest.raises(RankError, match="ValueError: rank 1 fails") as caught:
        run_ranks(fail, 3, [1])
    assert sorted(caught.value.errors) == [0, 1, 2], str(caught.value)
    heard = "Connection closed", "remote worker"  # the latter if they haven't connected yet
    assert any(text in caught.value.errors[0] for text in heard), "it hears that rank 1 has left"
    assert run_ranks(place, 3) == before


def test_processes_go_on_after_a_run_that_failed() -> None:
    before = run_ranks(place, 2)
    with pytest.raises(RankError) as caught:
        run_ranks(fail_in_training, 2)
    assert "ValueError: the hook fails" in caught.value.errors[1]
    assert 0 in caught.value.errors
    assert run_ranks(place, 2) == before


def hang(ranks: list[int]) -> None:
    if dist.get_rank() in ranks:
        torch.distributed.barrier()


def die(ranks: list[int]) -> None:
    if dist.get_rank() in ranks:
        os._exit(3)


def unpicklable() -> Any:
    return lambda: None


def test_ranks_that_hang_or_die_are_replaced() -> None:
    before = run_ranks(place, 2)
    with pytest.raises(RankError, match=r"ranks \[0\] did not end within 1 s"):
        run_ranks(hang, 2, [0], timeout_s=1)
    between = run_ranks(place, 2)
    with pytest.raises(RankError, match="Its process died") as caught:
        run_ranks(die, 2, [1])
    assert list(caught.value.errors) == [1]
    after = run_ranks(place, 2)
    assert {before[0], before[1]}.isdisjoint(between)
    assert {between[0], between[1]}.isdisjoint(after)


def test_a_result_that_can_not_be_sent_is_an_error() -> None:
    before = run_ranks(place, 2)
    with pytest.raises(RankError, match=r"pickle|get local object"):
        run_ranks(unpicklable, 2)
    assert run_ranks(place, 2) == before
