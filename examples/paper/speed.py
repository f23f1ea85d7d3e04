"""Tables 2 and 3, the bubble, and what each part of the design brings, in simulated time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from examples.paper import published
from examples.paper.models import CHUNKS, AmoebaNet, Model, Transformer, plans
from examples.paper.tables import GIB, Table, beside
from lightning_gpipe.model.partition import Partition
from lightning_gpipe.model.run_layer import run_layer
from lightning_gpipe.plan.balance import Balancing
from lightning_gpipe.plan.chunks import micro_batch_of
from lightning_gpipe.plan.memory import layer_memories
from lightning_gpipe.plan.plans import Plan
from lightning_gpipe.plan.schedules import Schedules
from lightning_gpipe.plan.settings import Settings
from lightning_gpipe.schedule.costs import Costs
from lightning_gpipe.schedule.simulate import Simulation, simulate
from lightning_gpipe.tensors.tree import Tree

#: Operations that a device does in a second, of float32: 40 % of what a P100 does at most.
RATE = 0.4 * 9.5e12
#: Bytes a second between devices: over PCIe through the host's memory, and over NVLink.
SLOW, FAST = 6e9, 80e9


def even(layers: int, stages: int) -> list[int]:
    """As many layers for each stage as for the others."""
    return [layers * (k + 1) // stages - layers * k // stages for k in range(stages)]


@dataclass
class Timed:
    """A model whose steps are replayed in simulated time, by counted operations.

    Args:
        model: The model.
    """

    model: Model

    @cached_property
    def balancing(self) -> Balancing:
        layers = [*self.model.layers]
        return Balancing(layers, run_layer, self.model.given(), measure=list, warn=print)

    @cached_property
    def boundaries(self) -> list[int]:
        """Bytes that a micro-batch hands on behind each layer, if M is :data:`CHUNKS`."""
        batch = Tree.of(self.model.given(), "The input")
        given = micro_batch_of(batch, CHUNKS, self.model.layers, run_layer).value()
        return [m.output.nbytes for m in layer_memories([*self.model.layers], run_layer, given)]

    def settings(self, stages: int, chunks: int, **others: object) -> Settings:
        paper = {"step": "micro-batch", "schedule": "fill_drain", **others}
        recompute, balance = paper.pop("checkpoint", "always"), paper.pop("balance", "flops")
        return Settings(chunks, stages, None, balance, recompute, True, **paper)  # type: ignore

    def partition(self, settings: Settings) -> Partition:
        return self.balancing.partition(int(settings.stages), settings)

    def costs(self, partition: Partition, chunks: int) -> Costs:
        """Operations of each stage for one of M micro-batches."""
        flops = self.balancing.flops()
        parts = [[flops[i] for i in layers] for layers in partition.parts]
        return Costs.of(
            *(
                [sum(getattr(flop, kind) for flop in part) / chunks for part in parts]
                for kind in ("forward", "backward", "recompute")
            )
        )

    def run(
        self, stages: int, chunks: int, bandwidth: float | None = None, **others: object
    ) -> Simulation:
        """Replay a step.

        Args:
            stages: K.
            chunks: M.
            bandwidth: Bytes a second between devices, every message as long as the longest; None:
                messages take no time.
            others: What is chosen otherwise than the paper chose.
        """
        settings = self.settings(stages, chunks, **others)
        partition = self.partition(settings)
        costs = self.costs(partition, chunks)
        if bandwidth is not None:
            costs = replace(costs, message=self.message(partition, bandwidth) * RATE)
        schedule = Schedules(settings, tuple(range(stages)), 1, costs).make(chunks)
        return simulate(schedule, costs)

    def message(self, partition: Partition, bandwidth: float) -> float:
        """Seconds of the longest message of one of :data:`CHUNKS` micro-batches."""
        return max(self.boundaries[p[-1]] for p in partition.parts[:-1]) / bandwidth

    def late(self, stages: int, chunks: int) -> Simulation:
        """Replay a step in which a recompute begins when the gradient has come."""
        partition = self.partition(self.settings(stages, chunks))
        costs = self.costs(partition, chunks)
        both = [b + r for b, r in zip(costs.backward, costs.recompute, strict=True)]
        settings = self.settings(stages, chunks, checkpoint="never")
        schedule = Schedules(settings, tuple(range(stages)), 1, costs).make(chunks)
        return simulate(schedule, replace(costs, backward=tuple(both)))


def models() -> dict[str, Timed]:
    """The models of Table 2."""
    return {
        "AmoebaNet-D (18, 256)": Timed(AmoebaNet(18, 256)),
        "Transformer-48": Timed(Transformer(48)),
    }


def throughputs(model: Timed) -> dict[int, list[float]]:
    """By M and K, of K=2 and M=1."""
    one = model.run(2, 1).length
    return {
        m: [one / model.run(k, m).length for k in published.STAGES] for m in published.MICRO_BATCHES
    }


def fast(
    found: dict[str, Timed], emulated: dict[str, dict[int, list[float]]] | None = None
) -> Table:
    """Table 2: simulated; and emulated, if that is given."""
    rows = []
    for name, model in found.items():
        simulated = throughputs(model)
        for m in published.MICRO_BATCHES:
            row: list[object] = [name, m]
            for i, theirs in enumerate(published.FAST[name][m]):
                row += [theirs, beside(simulated[m][i], theirs)]
                row += [beside(emulated[name][m][i], theirs)] if emulated else []
            rows.append(row)
    return Table(["", "M", *_columns(["emulated"] if emulated else [])], rows)


def slow(found: dict[str, Timed]) -> Table:
    """Table 3, with messages that take their time, and without."""
    rows = []
    for name, model in found.items():
        row: list[object] = [name]
        ones = [model.run(2, CHUNKS, bandwidth).length for bandwidth in (SLOW, None)]
        for k, theirs in zip(published.STAGES, published.SLOW[name], strict=True):
            lengths = [model.run(k, CHUNKS, bandwidth).length for bandwidth in (SLOW, None)]
            slow, fast = (one / length for one, length in zip(ones, lengths, strict=True))
            row += [theirs, beside(slow, theirs), f"{fast:.2f}"]
        rows.append(row)
    return Table(["", *_columns(["no messages"])], rows)


def _columns(others: Sequence[str]) -> list[str]:
    kinds = ["simulated", *others]
    return [text for k in published.STAGES for text in (f"K={k}: paper", *kinds)]


def messages(found: dict[str, Timed]) -> Table:
    """What messages cost, and how busy the busiest link is."""
    rows = []
    for name, model in found.items():
        for k in published.STAGES:
            partition = model.partition(model.settings(k, CHUNKS))
            costs = model.costs(partition, CHUNKS)
            slowest = max(map(sum, zip(*(costs.times[op] for op in "FRB"), strict=True)))
            free = model.run(k, CHUNKS).length
            cells: list[object] = [name, k]
            for bandwidth in (SLOW, FAST):
                seconds = model.message(partition, bandwidth)
                cells += [
                    f"{1e3 * seconds:.2f}",
                    f"{model.run(k, CHUNKS, bandwidth).length / free - 1:.2%}",
                    f"{2 * seconds * RATE / slowest:.1%}",
                ]
            rows.append(cells)
    each = ["ms of a message", "longer step", "link busy"]
    header = ["", "K", *(f"{n}, {b / 1e9:.0f} GB/s" for b in (SLOW, FAST) for n in each)]
    return Table(header, rows)


def bubbles(found: dict[str, Timed]) -> Table:
    """Idle time of the devices."""
    rows = []
    for k in published.STAGES:
        for m in (*published.MICRO_BATCHES[:-1], 4 * k):
            simulated = (f"{model.run(k, m).bubble:.1%}" for model in found.values())
            kept = (f"{model.run(k, m, checkpoint='never').bubble:.1%}" for model in found.values())
            rows.append([k, m, f"{(k - 1) / (m + k - 1):.1%}", *kept, *simulated])
    names = [f"{n}, {what}" for what in ("kept", "recomputed") for n in found]
    return Table(["K", "M", "(K-1)/(M+K-1)", *names], rows)


def recomputes(found: dict[str, Timed]) -> Table:
    """What recomputes add to a step, counted, and what they take of its time."""
    rows = []
    for name, model in found.items():
        flops = model.balancing.flops()
        again = sum(f.recompute for f in flops)
        share = again / sum(f.forward + f.recompute + f.backward for f in flops)
        cells: list[object] = [name, f"{share:.1%}"]
        for k in published.STAGES:
            with_them = model.run(k, CHUNKS).length
            cells.append(f"{1 - model.run(k, CHUNKS, checkpoint='never').length / with_them:.1%}")
        rows.append(cells)
    steps = [f"of a step, K={k}" for k in published.STAGES]
    return Table(["", "of the operations", *steps], rows)


def components(found: dict[str, Timed], stages: int = 8) -> Table:
    """What is lost when a part of the design is taken away."""
    rows = []
    for name, model in found.items():
        layers = len(model.model.layers)
        variants: list[tuple[str, int, dict[str, object]]] = [
            ("all of the paper's", CHUNKS, {}),
            ("one micro-batch: no pipelining", 1, {}),
            ("no recompute", CHUNKS, {"checkpoint": "never"}),
            ("recompute when the gradient has come", CHUNKS, {}),
            ("cut by numbers of parameters", CHUNKS, {"balance": "params"}),
            ("cut by numbers of layers", CHUNKS, {"balance": even(layers, stages)}),
            ("1F1B in place of fill-drain", CHUNKS, {"schedule": "1f1b"}),
            ("searched schedule", CHUNKS, {"schedule": "searched"}),
        ]
        whole = model.run(stages, CHUNKS).length
        for what, m, chosen in variants:
            is_late = what.startswith("recompute when")
            run = model.late(stages, m) if is_late else model.run(stages, m, **chosen)
            mode = chosen.get("checkpoint", "always")
            others = {key: value for key, value in chosen.items() if key != "checkpoint"}
            plan = plans(model.model, [stages], m, mode, **others)[stages]
            speed, most = f"{whole / run.length:.2f}", f"{plan.most / GIB:.2f}"
            idle, held = f"{run.bubble:.1%}", f"{activations_of_fullest(plan):.2f}"
            rows.append([name, what, speed, idle, most, held])
    header = ["", "", "throughput", "idle", "fullest device, GiB", "its activations"]
    return Table(header, rows)


def activations_of_fullest(plan: Plan) -> float:
    """GiB."""
    fullest = max(plan.stages, key=lambda stage: stage.memory.total)
    return fullest.memory.of_micro_batches / GIB
