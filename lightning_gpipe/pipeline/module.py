"""All that a strategy sees of a pipeline: before and after the cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_gpipe.engine.context import ForwardContext
from lightning_gpipe.engine.per_micro_batch import PerMicroBatch
from lightning_gpipe.engine.running import Step
from lightning_gpipe.engine.weighting import Weighting
from lightning_gpipe.gradients.norm import ModelGradients
from lightning_gpipe.model.checkpointing import unchecked
from lightning_gpipe.model.parameters import Slot, materialize, to_meta
from lightning_gpipe.model.partition import Partition
from lightning_gpipe.model.redirect import Redirections, not_alone
from lightning_gpipe.model.run_layer import RunLayer, run_layer
from lightning_gpipe.model.step_trace import StepTrace
from lightning_gpipe.pipeline.pipeline import Parts, Pipeline, Surroundings
from lightning_gpipe.pipeline.probe import Reached, probe
from lightning_gpipe.pipeline.settling import settle
from lightning_gpipe.pipeline.uncut import Uncut
from lightning_gpipe.pipeline.weighted import WeightedGradients
from lightning_gpipe.state.gather import share_outside


class PipelinedModule:
    """One rank's part of the pipeline that a module becomes: all that a strategy sees of it.

    Where the balance needs no input of the backbone the module is cut at once, else when the
    backbone is first called: its input is not the batch, so nothing else tells its shape. Until
    then the backbone stays in host memory.

    Args:
        module: The user's module.
        surroundings: Groups, settings and so on.

    Raises:
        ValueError: If the module can't become a pipeline, with what to change.
    """

    def __init__(self, module: nn.Module, surroundings: Surroundings) -> None:
        self.module, self.groups = module, surroundings.groups
        is_alone = self.groups.stages == 1 and surroundings.settings.step == "mini-batch"
        self._redirections = Redirections(is_alone)
        try:
            uncut = Uncut.of(module, surroundings, self._redirections)
            uncut.build()
        except BaseException:
            self._redirections.end()
            raise
        self.backbone = uncut.backbone
        self._state: Uncut | Pipeline = uncut
        self._step: tuple[int, ...] = (0,)
        self._lent: list[Slot] = []
        self.is_lazy = uncut.building.keeps_parts  # no rank holds all of it, before or after
        self._is_probing = self._is_weighted = False
        self._redirections.add(uncut.body, self._forward)
        for layer in uncut.layers if surroundings.groups.stages > 1 else ():
            self._redirections.add(layer, not_alone)

    @property
    def partition(self) -> Partition | None:
        """Which layers each stage has; None until the module is cut."""
        return self._state.partition if isinstance(self._state, Pipeline) else None

    @property
    def chunks(self) -> int:
        """M, which may depend on the first batch."""
        return self._state.surroundings.chunks

    def to_device(self) -> None:
        """Move to the device what is outside the backbone, and cut it if that needs no input."""
        uncut = cast(Uncut, self._state)
        share_outside(self.module, uncut.body, self.groups, self.groups.device)
        if not self.is_lazy:
            self._lent = materialize(uncut.body)
        if not uncut.needs_input:
            self._cut(None, ForwardContext.current((), self.groups.device, run_layer))

    def adopt_optimizers(self) -> None:
        """Let optimizers hold the state that this rank keeps alone. Collective over replicas."""
        self._state.adopt_optimizers()

    def begin_step(self, *step: int, training: bool = False) -> None:
        """Tell which step comes. Collective over the replicas in training.

        Args:
            step: Numbers that tell steps apart; the same on every stage.
            training: Whether it trains.
        """
        self._step = step
        self._state.begin_step(*step, training=training)

    def end_step(self) -> None:
        """Share what a training step without a backward has moved. Collective over the replicas."""
        if isinstance(self._state, Pipeline):
            self._state.shared.after_step()

    def backward(
        self, loss: Tensor, retain: bool, synchronize: bool
    ) -> AbstractContextManager[Tensor]:
        """Run a backward inside a context that gives this stage's loss. Collective.

        Args:
            loss: The user's loss.
            retain: Whether the graph is needed once more.
            synchronize: Whether gradients become equal on all ranks that hold a parameter; else
                they accumulate until a backward for which they do.
        """
        return self._state.backward(loss, retain, synchronize)

    def probe(self, step: Callable[[], Any], given: Any) -> Any:
        """Cut the module, if that waits for an input of the backbone. Collective over all ranks.

        Args:
            step: Runs the user's step over a whole mini-batch, up to the backbone's call.
            given: The mini-batch, and what else it is given.

        Returns:
            What the step returns, if it doesn't call the backbone; else, and where the module is
            cut already, ``NotImplemented``.
        """
        if isinstance(self._state, Pipeline):
            return NotImplemented
        self._is_probing = True
        try:
            found = probe(step, given, self.module, self._state.body, self.groups.device)
        finally:
            self._is_probing = False
        if not isinstance(found, Reached):
            return found
        self._cut(found.sample, found.context)
        return NotImplemented

    def message_s(self) -> float:
        """Seconds that a boundary takes to another rank. Collective over the pipeline."""
        return self._state.rank.links.message_s() if isinstance(self._state, Pipeline) else 0.0

    def is_kept(self, value: Any) -> bool:
        """Whether layers have left a value in attributes: see :meth:`WholeBatch.is_kept`."""
        return isinstance(self._state, Pipeline) and self._state.engine.is_kept(value)

    @property
    def parts(self) -> Parts | None:
        """What each rank goes on holding after the run; None: all the same."""
        return self._state.parts

    @property
    def is_stepping(self) -> bool:
        """Whether a step runs that is run once per micro-batch."""
        return self._steps is not None and self._steps.is_running

    @property
    def step_trace(self) -> StepTrace | None:
        """What follows the values of a step that runs once per micro-batch, while it does."""
        steps = self._steps
        return steps.trace if steps and steps.is_running and not steps.trace.is_suspended else None

    @property
    def _steps(self) -> PerMicroBatch | None:
        return self._state.steps if isinstance(self._state, Pipeline) else None

    def run_steps(
        self,
        kind: str,
        key: tuple[int, ...],
        sizes: Sequence[int],
        given: Sequence[Sequence[Tensor]],
        step: Step,
    ) -> Weighting:
        """Run a mini-batch's steps without backwards: see :meth:`PerMicroBatch.run`. Collective."""
        pipeline, steps = self._stepping()
        weighting = steps.run(kind, key, sizes, given, step)
        pipeline.shared_state.check()
        if not pipeline.surroundings.is_fitting:
            self._state = settle(pipeline, steps)
        return weighting

    def train_steps(
        self,
        key: tuple[int, ...],
        sizes: Sequence[int],
        given: Sequence[Sequence[Tensor]],
        step: Step,
        scale: float,
        synchronize: bool,
    ) -> Weighting:
        """Run steps as :meth:`run_steps`, and :meth:`backward` of scaled losses. Collective."""
        pipeline, steps = self._stepping()
        with pipeline.stepping(synchronize) as (before_last, need_sums):
            before = WeightedGradients(pipeline.module, steps.outside.aside, self._is_weighted)
            weighting = steps.run("training", key, sizes, given, step, before_last, scale)
            pipeline.shared_state.check()
            before.finish(weighting)
            self._is_weighted = self._is_weighted or weighting.is_given
            self._state = settled = settle(pipeline, steps)
            if synchronize or need_sums:
                steps.outside.join_sides()
            settled.synchronize(synchronize, need_sums)
        if settled is not pipeline:
            settled.adopt_optimizers()
        if pipeline.measuring is not None:
            pipeline.measuring.end_mini_batch(steps)
        return weighting

    def check(self, loss: Tensor) -> None:
        """Compare what must be the same on every stage. Collective over the pipeline."""
        self._stepping()[0].consistency.check(loss)

    def _stepping(self) -> tuple[Pipeline, PerMicroBatch]:
        if not isinstance(self._state, Pipeline) or self._state.steps is None:
            raise RuntimeError("The module isn't cut yet.")
        return self._state, self._state.steps

    def as_written(self) -> AbstractContextManager[None]:
        """Let the backbone and its layers be called as without a pipeline."""
        return self._redirections.suspended()

    def gradients(self) -> ModelGradients:
        """Where the gradients of the whole model are."""
        return self._state.gradients()

    def state_dict(self, is_alone: bool = False) -> dict[str, Any]:
        """Whole on rank 0, or each rank's part, as where one is alone; else it is collective."""
        return self._state.state_dict(is_alone)

    def writes(self) -> Callable[[str], bool]:
        """Tells which entries of the state dict this rank writes, where all do together."""
        return self._state.writes()

    def optimizer_state_dict(self, optimizer: Optimizer) -> dict[str, Any]:
        """An optimizer's state dict, in the same way. Collective."""
        return self._state.optimizer_state_dict(optimizer)

    def own_optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """The part of a whole optimizer's state dict that this rank holds."""
        return self._state.own_optimizer_state(optimizer, state)

    def cut_unbuilt(self) -> None:
        """Cut what no rank has built, at the end of a run without a step. Collective."""
        if isinstance(self._state, Uncut) and self.is_lazy and self.groups.stages > 1:
            self._cut(None, ForwardContext.current((), self.groups.device, run_layer))

    def close(self, restore: bool) -> None:
        """Give the module back.

        Args:
            restore: Whether all ranks get the weights, and rank 0 optimizers' state. Collective.
        """
        self._redirections.end()
        self._state.close(restore)
        if restore or isinstance(self._state, Uncut):
            to_meta(self._lent)

    def _forward(self, input: Any, run_layer: RunLayer = run_layer) -> Any:
        """Run the backbone; ``input`` is named as nn.Sequential's."""
        with unchecked():
            pipeline = self._state
            if not isinstance(pipeline, Pipeline):
                context = ForwardContext.current((), self.groups.device, run_layer)
                if self._is_probing:
                    raise Reached(input, context)
                pipeline = self._cut(input, context)
            if pipeline.steps is not None and pipeline.steps.is_running:
                pipeline.shared_state.step_calls()
                return pipeline.steps.call(input, run_layer)
            return pipeline.forward(input, run_layer)

    def _cut(self, sample: Any, context: ForwardContext) -> Pipeline:
        if isinstance(self._state, Pipeline):
            return self._state
        self._state = pipeline = self._state.cut(sample, context)
        pipeline.begin_step(*self._step, training=False)
        pipeline.announce()
        return pipeline
