"""DeepSpeed's pipeline engine, which has one schedule: 1F1B."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import cycle
from typing import Any

from torch import Tensor
from torch.optim import SGD

from tests.benchmarks.contestants.lightning import LR
from tests.benchmarks.turns import Contestant, Turn
from tests.benchmarks.workloads import Workload, notes


def deepspeed(workload: Workload, stages: int, chunks: int, checkpoint: str) -> Contestant:
    """Without its gradient clipping, which is on unless told otherwise."""
    return Contestant("DeepSpeed", partial(_run, workload, stages, chunks, checkpoint), stages)


def _run(workload: Workload, stages: int, chunks: int, checkpoint: str, turn: Turn) -> None:
    import deepspeed
    from deepspeed.pipe import PipelineModule

    turn.notes.append(notes)
    deepspeed.init_distributed("gloo")
    model = PipelineModule(
        layers=workload.stages(stages),  # balanced as for everybody
        num_stages=stages,
        loss_fn=workload.loss,
        partition_method="uniform",
        activation_checkpoint_interval=int(checkpoint == "always"),
    )
    x, target = workload.batch(chunks)
    config = {
        "train_batch_size": len(x),
        "train_micro_batch_size_per_gpu": len(x) // chunks,
        "gradient_accumulation_steps": chunks,
        "gradient_clipping": 0.0,
        "steps_per_print": 1 << 30,
    }
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=SGD(model.parameters(), lr=LR), config=config
    )
    data = _micro_batches(x, target, chunks)
    for steps in turn.rounds():
        for _ in range(steps):
            engine.train_batch(data_iter=data)


def _micro_batches(x: Tensor, target: Tensor, chunks: int) -> Iterator[Any]:
    return cycle([*zip(x.chunk(chunks), target.chunk(chunks), strict=True)])
