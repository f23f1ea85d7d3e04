"""What the strategy prints about the pipeline it made."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from lightning_gpipe.model.parameters import layers_of, parameter_count
from lightning_gpipe.model.partition import Partition
from lightning_gpipe.plan.model_memory import human_bytes, scaled
from lightning_gpipe.plan.schedules import Schedules
from lightning_gpipe.plan.settings import Settings
from lightning_gpipe.plan.stage_memory import StageMemory
from lightning_gpipe.schedule.costs import Costs
from lightning_gpipe.schedule.simulate import simulate

#: Share of the parameters outside the backbone above which the strategy warns.
OUTSIDE_LIMIT = 0.2


def partition_table(
    partition: Partition,
    backbone: str,
    layers: Sequence[nn.Module],
    is_list: bool,
    devices: Sequence[str],
    chunks: int,
    settings: Settings,
    outside: float,
    replicas: int,
    at_most: bool = False,
    memories: Sequence[StageMemory] | None = None,
    samples: int | None = None,
) -> str:
    """The partition as a table, one row a stage, and what to expect of it.

    Args:
        partition: Which layers each stage has.
        backbone: Its dotted name.
        layers: Its layers.
        is_list: Whether the model calls them in a loop.
        devices: The device of each stage.
        chunks: M.
        settings: What the user chose.
        outside: Share of the module's parameters outside the backbone, 0 to 1.
        replicas: D.
        at_most: Whether there may be fewer micro-batches, because no batch was seen yet.
        memories: What each stage is expected to hold in training; None: not known; empty: there
            will be no training.
        samples: In a micro-batch, as far as it is known.
    """
    header = ["Stage", "Device", "Layers", "Parameters", f"Share of {partition.unit}"]
    header += ["Memory"] if memories is None or memories else []
    rows: list[list[str]] = []
    for k, (parts, share) in enumerate(zip(partition.stages, partition.shares, strict=True)):
        own = [layers[i] for part in parts for i in part]
        kinds = list(dict.fromkeys(type(layer).__name__ for layer in own))
        shown = ", ".join(kinds[:3]) + (", …" if len(kinds) > 3 else "")
        which, count = f"{layer_numbers(parts)} ({shown})", human(parameter_count(own))
        row = [str(k), devices[k], which, count, f"{share:.1%}"]
        memory = ["?"] if memories is None else [_memory(memories[k])] if memories else []
        rows.append([*row, *memory])
    stages, virtual = partition.count, partition.virtual_stages
    bubble = expected_bubble(partition, chunks, settings, replicas)
    return "\n".join(
        [
            f"GPipe: {len(layers)} {'blocks' if is_list else 'layers'} of '{backbone}'"
            f" on {stages} stage{'s' * (stages > 1)}"
            f"{f' x {virtual} virtual stages' * (virtual > 1)}"
            f"{f' x {replicas} replicas' * (replicas > 1)},"
            f" {'up to ' * at_most}{chunks} micro-batch{'es' * (chunks > 1)},"
            f" checkpoint={settings.checkpoint}"
            f"{', step=micro-batch' * (settings.step == 'micro-batch')}",
            *table_lines(header, rows),
            f"Expected bubble {bubble:.1%} of the time;"
            f" {outside:.1%} of the parameters are outside the backbone, on"
            f" {'every stage' if settings.step == 'mini-batch' else 'the stages that need them'}",
            *_memory_note(memories, settings, samples),
        ]
    )


def table_lines(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Cells as lines: the header, a rule, a line a row, a rule."""
    widths = [max(len(row[c]) for row in (header, *rows)) for c in range(len(header))]
    rule = "-" * (sum(widths) + 3 * (len(widths) - 1))
    lines = [
        " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in (header, *rows)
    ]
    return [lines[0], rule, *lines[1:], rule]


def layer_numbers(parts: Sequence[range]) -> str:
    """Which layers a stage has, as "0-3, 8"."""
    return ", ".join(f"{p[0]}" if len(p) == 1 else f"{p[0]}-{p[-1]}" for p in parts)


def _memory(memory: StageMemory) -> str:
    """What a stage holds: what stays, and what comes and goes."""
    return f"{human_bytes(memory.kept)} + {human_bytes(memory.of_micro_batches)}"


def _memory_note(
    memories: Sequence[StageMemory] | None, settings: Settings, samples: int | None
) -> list[str]:
    """What the column of memory counts."""
    if not memories:
        return []
    state = "parameters, gradients and optimizer state"
    if any(memory.optimizer is None for memory in memories):
        state = "parameters and gradients, without the optimizer's state, which isn't known"
    where = "outside the backbone" + ", and what is held there" * (settings.step != "mini-batch")
    each = "" if samples is None else f" of {samples} sample{'s' * (samples > 1)}"
    return [
        f"Memory: {state} + micro-batches{each} at their peak, without what the step computes"
        f" {where}"
    ]


def outside_share(module: nn.Module, backbone: nn.Module) -> float:
    """Share of a module's parameters that are outside its backbone, 0 to 1."""
    total = parameter_count([module])
    return (total - parameter_count(layers_of(backbone))) / total if total else 0.0


def human(count: int) -> str:
    """A count as people write it: 950, 1.2 K, 25.6 M."""
    return scaled(count, ["", "K", "M", "B"]).rstrip()


def expected_bubble(
    partition: Partition, chunks: int, settings: Settings, replicas: int = 1
) -> float:
    """Expected share of idle time, 0 to 1; see :data:`BACKWARD_RATIO`."""
    shares = partition.part_shares
    if not sum(shares):
        return 0.0
    schedule = Schedules.unmeasured(settings, partition, replicas).make(chunks)
    return simulate(schedule, Costs.of(shares)).bubble
