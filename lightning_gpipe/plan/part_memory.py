"""What a virtual stage holds of a micro-batch: what its layers hold, put together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_gpipe.plan.memory import Boundary, HeldTensor, LayerMemory


@dataclass(frozen=True, slots=True)
class PartMemory:
    """What a virtual stage holds of one micro-batch.

    Args:
        tensors: Its layers' parameters and buffers.
        input: What it is given.
        output: What it returns.
        beside_graph: Bytes of that which the graph doesn't hold.
        graph: What autograd saves.
        backward: The most that a backward holds, the graph included, without the output's gradient.
        forward: The most that a forward holds that saves nothing, with a copy of its input.
        first_half: The most that lives in the first half of a split backward besides the graph,
            without the output's gradient.
        arriving: What a split backward keeps besides the graph.
        behind: What of the graph it lets go of after its first half.
    """

    tensors: tuple[HeldTensor, ...]
    input: Boundary
    output: Boundary
    beside_graph: int
    graph: int
    backward: int
    forward: int
    first_half: int
    arriving: int
    behind: int

    @classmethod
    def of(cls, layers: Sequence[LayerMemory]) -> PartMemory:
        """What layers hold that one stage has."""
        saved: dict[int, int] = {}
        graph = backward = 0
        for layer in layers:  # a backward has let go of the graphs of the layers behind it
            graph += sum(size - saved.get(number, 0) for number, size in layer.saved.items())
            saved |= layer.saved
            more = layer.last_backward if layer is layers[-1] else layer.backward
            backward = max(backward, graph + more)
        first_half = arriving = 0
        behind: dict[int, int] = {}
        for layer in reversed(layers):
            first_half = max(first_half, arriving + layer.first_half)
            if not arriving:
                behind |= dict(list(layer.saved.items())[len(layer.saved) - layer.behind :])
            arriving += layer.arriving
        inside = [layer.input.nbytes * (i > 0) + layer.forward for i, layer in enumerate(layers)]
        return cls(
            tuple(tensor for layer in layers for tensor in layer.tensors),
            layers[0].input,
            layers[-1].output,
            layers[-1].output.nbytes - layers[-1].output_saved,
            graph,
            backward,
            layers[0].input.nbytes + max(inside),
            first_half,
            arriving,
            sum(behind.values()),
        )

    @property
    def second_half(self) -> int:
        """What a backward keeps between its halves, less the graph that it lets go of.

        Where no input wants a gradient, it isn't split: all is done in the second half.
        """
        return self.arriving - self.behind if self.input.gradient else self.output.gradient
