"""What is told when a module is cut."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import nn

from lightning_gpipe.model.parameters import outside_modules, parameter_count
from lightning_gpipe.model.partition import Partition
from lightning_gpipe.pipeline.pipeline import Surroundings
from lightning_gpipe.plan.chunks import largest_micro_batch, micro_batches
from lightning_gpipe.plan.model_memory import ExpectedMemory
from lightning_gpipe.plan.report import OUTSIDE_LIMIT, outside_share, partition_table


def tell_cut(
    module: nn.Module,
    backbone: str,
    layers: Sequence[nn.Module],
    is_list: bool,
    around: Surroundings,
    partition: Partition,
    sample: Any,
    memory: ExpectedMemory | None,
) -> None:
    """Print the partition of a module, and warn of what may surprise.

    Args:
        module: The user's module.
        backbone: Its backbone's dotted name.
        layers: The backbone's.
        is_list: Whether the model calls them in a loop.
        around: Groups, settings and so on.
        partition: Which layers each stage has.
        sample: The backbone's input; None: not known.
        memory: What each stage is expected to hold; None: not known.
    """
    body = module.get_submodule(backbone)
    groups, chunks = around.groups, around.chunks
    outside = outside_share(module, body)
    table = partial(
        partition_table,
        *(partition, backbone, layers, is_list, around.devices),
        *(micro_batches(chunks, sample), around.settings, outside, groups.replicas),
        at_most=sample is None,
        samples=largest_micro_batch(chunks, sample) if sample is not None else None,
    )
    texts = [f"\n{table(memories=())}"]  # a progress bar may stand on the line
    if around.is_fitting:
        texts.insert(0, f"\n{table(memories=memory.most if memory is not None else None)}")
    around.inform(*texts)
    is_replicated = around.settings.step == "mini-batch"
    if groups.stages > 1:
        _warn_of_second_names(module, backbone, around)
    for name, part in (body if is_replicated else module).named_modules():
        if getattr(part, "scale_grad_by_freq", False) and chunks > 1:
            around.warn(
                f"'{name}' ({type(part).__name__}) has scale_grad_by_freq=True, and divides"
                " its gradient by how often words are in a micro-batch, not in the mini-batch."
                " Build it without, or use chunks=1."
            )
            break
    if outside > OUTSIDE_LIMIT and groups.stages > 1 and is_replicated:
        is_manual = not getattr(module, "automatic_optimization", True)
        by_step = (
            " with GPipeStrategy(step='micro-batch') the first or the last stage alone does, if the"
            " loss is a mean over samples or tokens. Or move"
        )
        around.warn(
            f"{outside:.0%} of the parameters are outside the backbone '{backbone}'."
            f" Every stage holds and computes them:{' move' if is_manual else by_step}"
            " what you can into the backbone, or name another one with GPipeStrategy(backbone=...)."
        )


def _warn_of_second_names(module: nn.Module, backbone: str, around: Surroundings) -> None:
    """Warn of a network that was kept after its layers were put into the backbone."""
    body = module.get_submodule(backbone)
    inside, outside = set(body.modules()), set(outside_modules(module, body))
    total, twice = parameter_count([body]), parameter_count(inside & outside)
    if not total or twice / total <= OUTSIDE_LIMIT:
        return
    name = next(
        name
        for name, part in module.named_modules(remove_duplicate=False)
        if part in inside & outside and not f"{name}.".startswith(f"{backbone}.")
    )
    around.warn(
        f"{twice / total:.0%} of the parameters of the backbone '{backbone}' are in modules that"
        f" have another name, too, such as '{name}'. Every stage holds these: delete the attribute,"
        " or make it a local variable, so that each stage holds its own layers alone."
    )
