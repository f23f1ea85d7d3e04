"""A mini-batch whose steps run once per micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch import Tensor

from lightning_gpipe.engine.ends import MicroBatchInput, MicroBatchOutput
from lightning_gpipe.engine.executor import BeforeLast, MiniBatch
from lightning_gpipe.engine.rank_plan import RankPlan
from lightning_gpipe.engine.weighting import Weighting

#: The last backward before the backbone, and the last one behind it; see :data:`BeforeLast`.
BEFORE, AFTER = -1, -2


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the user's step gives for a micro-batch.

    Args:
        loss: A scalar; None in evaluation.
        weight: How much it counts; None: as much as the micro-batch has samples.
        look: Finds the function that computes samples together, so that the loss is no mean over
            them: its name, or nothing where it isn't known; None: none is known to do so.
    """

    loss: Tensor | None = None
    weight: Any = None
    look: Callable[[], str | None] | None = None


Step: TypeAlias = Callable[[int], Outcome]


@dataclass(slots=True)
class Running:
    """A mini-batch.

    Args:
        kind: The kind of step, such as training.
        sizes: Samples in each micro-batch.
        given: The tensors in each micro-batch.
        names: Tell which shapes come out of the backbone.
        step: The user's step.
        plan: What this rank does.
        before_last: Called before the last backward of each stage, and of either side; None: the
            step doesn't train.
        weighting: How much each loss counts.
        agree: Called once, before ``before_last``, with whether the steps have returned weights.
        batch: What the executor knows of it, from the first forward on.
        m: The micro-batch whose step runs.
        has_called: Whether that step has called the backbone.
        outcomes: What the steps gave.
        has_told: Whether this rank's values of it were told to the others.
    """

    kind: str
    sizes: Sequence[int]
    given: Sequence[Sequence[Tensor]]
    names: Sequence[str]
    step: Step
    plan: RankPlan
    before_last: BeforeLast | None
    weighting: Weighting
    agree: Callable[[bool], None]
    source: MicroBatchInput = field(default_factory=MicroBatchInput)
    target: MicroBatchOutput = field(default_factory=MicroBatchOutput)
    batch: MiniBatch | None = None
    m: int = 0
    has_called: bool = False
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    has_told: bool = False
    has_agreed: bool = False

    @property
    def is_weighted(self) -> bool:
        """Whether a step has returned a weight."""
        return any(outcome.weight is not None for outcome in self.outcomes.values())

    def before(self, part: int) -> Tensor | None:
        """Prepare the last backward of a stage or a side.

        Gradients whose weights are known only at the end are averaged after that.
        """
        if self.before_last is None:
            return None
        if not self.has_agreed:
            self.has_agreed = True
            self.agree(self.is_weighted)
        return None if self.is_weighted else self.before_last(part)
