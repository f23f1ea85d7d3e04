"""What steps of micro-batches return, put together as the whole batch's; what loggers are told."""

from __future__ import annotations

import pickle
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor, nn

from lightning_gpipe import GPipeStrategy
from lightning_gpipe.strategy.loggers import LoggedSettings
from lightning_gpipe.strategy.merging import Argument, merge
from tests.models import Around
from tests.training import trainer

SIZES, WEIGHTS = [2, 2], [2.0, 2.0]


def merged(*values: Any) -> Any:
    return merge(values, SIZES, WEIGHTS, "The step's result")


def test_arrays_are_put_together() -> None:
    rows = np.arange(12.0).reshape(4, 3)
    np.testing.assert_equal(merged(rows[:2], rows[2:]), rows)
    np.testing.assert_equal(merged(np.ones(3), np.ones(3)), np.ones(3))
    with pytest.raises(
        ValueError, match=r"can't be merged: .* arrays of shapes \[\(3,\), \(3,\)\]"
    ):
        merged(np.ones(3), np.zeros(3))


def test_a_list_of_as_many_tensors_as_rows_is_refused() -> None:
    """It may have a tensor for each sample, or a row."""
    with pytest.raises(ValueError, match="lists of 2 tensors with 2 rows each"):
        merged([*torch.ones(2, 2)], [*torch.ones(2, 2)])
    assert len(merged([*torch.ones(2, 3)], [*torch.ones(2, 3)])) == 4
    (one,) = merge([[torch.ones(1, 3)]] * 2, [1, 1], [1.0, 1.0], "The step's result")
    assert one.shape == (2, 3)


def test_other_batches_tell_lists_of_fixed_length_from_those_per_sample() -> None:
    fixed: dict[str, int] = {}

    def together(sizes: list[int], *values: Any) -> Any:
        return merge(values, sizes, list(map(float, sizes)), "It", fixed=fixed)

    pair = [torch.ones(2, 3), torch.ones(2)]
    names = {"names": ["cat", "dog"], "means": [torch.tensor(1.0), torch.tensor(3.0)]}
    assert together([2, 2], names["names"], names["names"]) == ["cat", "dog"] * 2  # not known yet
    for sizes in [4, 4], [3, 3], [2, 2], [2, 1]:
        parts = [[torch.ones(size, 3), torch.ones(size)] for size in sizes]
        found = together(sizes, *([*part, names] for part in parts))
        assert [*map(len, found[:2])] == [sum(sizes)] * 2
        assert found[2] == names
    with pytest.raises(ValueError, match=r"It can't.*\(a tuple isn't\)"):
        merge([pair, pair], [2, 2], [1.0, 1.0], "It")
    assert together([2, 3], [1, 2], [3, 4, 5]) == [1, 2, 3, 4, 5]


def test_a_logger_without_hyperparameters_is_told_in_silence() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        LoggedSettings().tell([DummyLogger()], {"chunks": 2})


def test_a_number_that_the_step_was_given_is_no_count() -> None:
    """Though it is as many as the samples of a micro-batch."""
    assert merged(Argument(2), Argument(2)) == 2
    assert type(merged(Argument(2), Argument(2))) is int
    assert merged(2, 2) == 4
    assert merged(Argument(1) + 1, Argument(1) + 1) == 4
    assert type(pickle.loads(pickle.dumps(Argument(2)))) is int


def test_a_mean_over_nothing_is_told_of() -> None:
    class Nothing(Around):
        def loss(self, x: Tensor, y: Tensor) -> Tensor:
            mask = x[:, 0] > 0.4
            return nn.functional.mse_loss(self(x)[mask], y[mask])

    with pytest.warns(UserWarning, match="The loss of micro-batch . is NaN or infinite"):
        trainer(max_steps=2, strategy=GPipeStrategy(8, step="micro-batch")).fit(Nothing("sgd"))


def test_a_loss_of_which_small_micro_batches_leave_nothing_is_told_of() -> None:
    class Trimmed(Around):
        def loss(self, x: Tensor, y: Tensor) -> Tensor:
            errors = (self(x) - y).square().mean(1)
            return errors.sort().values[1:-1].mean()

    samples = len(Around().train_dataloader().dataset)
    chunks = samples // 2
    with pytest.warns(UserWarning, match="loss of every micro-batch is NaN.*a trimmed mean"):
        trainer(max_steps=2, strategy=GPipeStrategy(chunks, step="micro-batch")).fit(Trimmed("sgd"))


def test_other_batches_tell_numbers_from_counts_of_samples() -> None:
    fixed: dict[str, int] = {}

    def together(sizes: list[int], *values: int) -> Any:
        return merge(values, sizes, list(map(float, sizes)), "It", fixed=fixed)

    assert together([2, 2], 2, 2) == 4  # a count, as far as is known
    assert together([2, 2], 1, 1) == 1
    assert together([2, 2], 2, 2) == 2
    assert together([2, 2], 2, 3) == 5
