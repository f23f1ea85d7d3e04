"""The host doesn't wait for the device once per micro-batch."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import lightning_gpipe
from lightning_gpipe import GPipeStrategy
from tests import models
from tests.ranks import run_ranks
from tests.strict import backend
from tests.training import trainer

PACKAGE = str(Path(lightning_gpipe.__file__).parent)
#: What makes the host wait for a tensor's values, if that is on a GPU.
WAITING = {
    f: f.__name__
    for f in (
        Tensor.item,
        Tensor.tolist,
        Tensor.cpu,
        Tensor.numpy,
        Tensor.__bool__,
        Tensor.__int__,
        Tensor.__float__,
        Tensor.nonzero,
        torch.nonzero,
        torch.equal,
        Tensor.equal,
        torch.allclose,
    )
}


class Waits(TorchFunctionMode):
    """Counts calls of the package that wait for floating-point values.

    Headers, sizes and flags are whole numbers in host memory on GPUs, too.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = WAITING.get(func)
        if func is Tensor.to and "cpu" in map(str, (*args[1:], *(kwargs or {}).values())):
            name = "to"
        if name and isinstance(args[0], Tensor) and args[0].is_floating_point():
            frame = sys._getframe(1)
            if frame.f_code.co_filename.startswith(PACKAGE):
                place = Path(frame.f_code.co_filename).relative_to(PACKAGE)
                self.counts[f"{place}, {frame.f_code.co_name}: {name}"] += 1
        return func(*args, **(kwargs or {}))


def count(chunks: int, recompute: Any, stages: int) -> dict[str, int]:
    """What waits in three steps on this rank, the first of which cuts the module."""
    backend.register(backend.Rules.of("group:async"))
    strategy = GPipeStrategy(
        chunks, stages=stages, checkpoint=recompute, process_group_backend=backend.NAME
    )
    run = trainer(max_steps=3, devices=stages * 2, strategy=strategy, gradient_clip_val=0.1)
    with Waits() as waits:
        run.fit(models.Around())
    return dict(waits.counts)


@pytest.mark.parametrize("recompute", ["always", "never"])
def test_no_wait_per_micro_batch(recompute: str) -> None:
    few, many = (run_ranks(count, 4, chunks, recompute, 2) for chunks in (2, 8))
    assert few == many
    inside = {name for counts in many for name in counts if name.startswith(("engine", "tensors"))}
    assert not inside


def counted() -> dict[str, int]:
    from lightning_gpipe.tensors.microbatch import _all_equal

    with Waits() as waits:
        _all_equal([torch.ones(2), torch.ones(2)])
    return dict(waits.counts)


def test_a_wait_would_be_counted() -> None:
    assert counted() == {"tensors/microbatch.py, _are_equal: equal": 1}
