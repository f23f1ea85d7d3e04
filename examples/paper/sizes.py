"""Table 1: how large models can be."""

from collections.abc import Callable

from torch import nn

from examples.paper import published
from examples.paper.models import CHUNKS, AmoebaNet, Model, Transformer, plans
from examples.paper.tables import GIB, Table, beside
from lightning_gpipe.plan.plans import Plan

LIMITS = {"AmoebaNet": 8 * GIB, "Transformer": 16 * GIB}
PAPERS = {"AmoebaNet": published.AMOEBANETS, "Transformer": published.TRANSFORMERS}
STEP, WIDEST = 32, 1024  # D is a multiple of it


def _layout(stages: int) -> tuple[int, int, str]:
    """K, M and what is re-materialized; naive if K is 0."""
    return (stages, CHUNKS, "always") if stages else (1, 1, "never")


def stored(model: Model, stages: int, is_mixed: bool) -> Plan:
    """The plan of a model: of K stages, or naive if K is 0."""
    k, chunks, mode = _layout(stages)
    return plans(model, [k], chunks, mode, is_mixed=is_mixed)[k]


def kept(plan: Plan) -> float:
    """GiB of the model on all devices."""
    return sum(stage.memory.kept for stage in plan.stages) / GIB


def activations(plan: Plan) -> float:
    """GiB of activations on all devices."""
    return sum(stage.memory.of_micro_batches for stage in plan.stages) / GIB


def of_paper(
    name: str, make: Callable[..., Model], rows: tuple[tuple[int, object, str, float, float], ...]
) -> Table:
    """The paper's own models, planned."""
    header = ["", name, "parameters", "paper", "model, GiB", "paper", "activations, float32"]
    header += ["bfloat16", "paper", "fullest device, float32", "bfloat16"]
    found = []
    for stages, size, parameters, model_gb, activation_gb in rows:
        arguments = size if isinstance(size, tuple) else (size,)
        model = make(*arguments)
        single, mixed = (stored(model, stages, is_mixed) for is_mixed in (False, True))
        found.append(
            [
                *(f"Pipeline-{stages}" if stages else "Naive-1", size),
                *(f"{model.size:,}", parameters),
                *(beside(kept(single), model_gb), model_gb),
                *(beside(activations(single), activation_gb),),
                *(beside(activations(mixed), activation_gb), activation_gb),
                *(f"{single.most / GIB:.2f}", f"{mixed.most / GIB:.2f}"),
            ]
        )
    return Table(header, found)


def deepest(stages: int, is_mixed: bool) -> int:
    """The largest L of a Transformer whose stages fit."""
    k, chunks, mode = _layout(stages)
    model, memory = Transformer(max(3, k)), LIMITS["Transformer"]
    plan = plans(model, [k], chunks, mode, memory, is_mixed)[k]
    return (plan.depth and plan.depth.most) or 0


def widest(cells: int, stages: int, is_mixed: bool) -> int:
    """The largest D of an AmoebaNet with so many cells whose stages fit; 0: none does."""
    k, chunks, mode = _layout(stages)
    memory, least, most = LIMITS["AmoebaNet"], 0, WIDEST // STEP + 1
    while most - least > 1:
        middle = (least + most) // 2
        width = middle * STEP
        model = AmoebaNet(cells, width)
        can = 12 * model.size <= k * memory  # or there is nothing to plan
        if can and plans(model, [k], chunks, mode, memory, is_mixed)[k].fits:
            least = middle
        else:
            most = middle
    return least * STEP


Largest = dict[str, dict[bool, list[tuple[int, object, int]]]]


def largest(is_mixed: bool) -> dict[str, list[tuple[int, object, int]]]:
    """For each kind of model and number of stages the largest model that fits: L or (L, D), size.

    L is 0 where none fits.
    """
    amoebanets: list[tuple[int, object, int]] = []
    for stages, (cells, _), *_ in published.AMOEBANETS:
        width = widest(cells, stages, is_mixed)
        amoebanets.append((stages, (cells, width), AmoebaNet(cells, width).size))
    transformers: list[tuple[int, object, int]] = []
    for stages, *_ in published.TRANSFORMERS:
        depth = deepest(stages, is_mixed)
        transformers.append((stages, depth, Transformer(depth).size if depth else 0))
    return {"AmoebaNet": amoebanets, "Transformer": transformers}


def of_largest(name: str, found: Largest) -> Table:
    """What fits, beside what the paper says."""
    header = ["", "paper", "parameters", "here, float32", "parameters", "here, bfloat16"]
    rows = []
    for row, single, mixed in zip(PAPERS[name], found[name][False], found[name][True], strict=True):
        stages, size, said, *_ = row
        scale = {"M": 1e6, "B": 1e9}[said[-1]]
        cells: list[object] = [f"Pipeline-{stages}" if stages else "Naive-1", size, said]
        for _, ours, parameters in (single, mixed):
            millions = beside(parameters / 1e6, float(said[:-1]) * scale / 1e6, 0)
            cells += [ours, f"{millions} M"] if parameters else ["none", "**0**"]
        rows.append(cells)
    return Table([*header, "parameters"], rows)


def in_billions(found: Largest) -> dict[str, list[tuple[str, float, float]]]:
    """What fits in bfloat16, for a plot."""
    result = {}
    for name, theirs in (
        ("AmoebaNet", published.AMOEBANETS),
        ("Transformer", published.TRANSFORMERS),
    ):
        result[name] = [
            (
                f"K={stages}" if stages else "naive",
                ours / 1e9,
                float(said[:-1]) * {"M": 1e-3, "B": 1}[said[-1]],
            )
            for (stages, _, said, *_), (*_, ours) in zip(theirs, found[name][True], strict=True)
        ]
    return result


def convolved(model: AmoebaNet) -> int:
    """Elements that its convolutions make of a mini-batch."""
    made: list[int] = []
    for part in model.modules():
        if isinstance(part, nn.Conv2d):
            part.register_forward_hook(lambda _, __, result: made.append(result.numel()))
    model.layers(model.given())
    return sum(made)
