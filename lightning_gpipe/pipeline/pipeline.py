"""A module that is cut into stages: one rank's part of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_gpipe.comm.groups import Groups
from lightning_gpipe.engine.executor import BeforeLast
from lightning_gpipe.engine.per_micro_batch import PerMicroBatch
from lightning_gpipe.engine.rank import Rank
from lightning_gpipe.engine.shared_state import SharedState
from lightning_gpipe.engine.stopwatch import Stopwatch
from lightning_gpipe.engine.trial import Trial
from lightning_gpipe.engine.whole_batch import WholeBatch
from lightning_gpipe.gradients.consistency import ConsistencyCheck
from lightning_gpipe.gradients.data_parallel import DataParallel, DataParallelOptions
from lightning_gpipe.gradients.hooks import ParameterHooks
from lightning_gpipe.gradients.norm import ModelGradients
from lightning_gpipe.gradients.shared import SharedParameters
from lightning_gpipe.model.lazy import LazyModule
from lightning_gpipe.model.parameters import outside_to
from lightning_gpipe.model.partition import Partition
from lightning_gpipe.model.run_layer import RunLayer
from lightning_gpipe.model.structure import Structure
from lightning_gpipe.pipeline.lending import Lending
from lightning_gpipe.pipeline.measuring import Measuring
from lightning_gpipe.pipeline.outside_memory import OutsideMemory
from lightning_gpipe.plan.model_memory import ExpectedMemory
from lightning_gpipe.plan.per_sample import PerSample
from lightning_gpipe.plan.settings import Settings
from lightning_gpipe.state.gather import (
    PartialStateDict,
    StageTensors,
)
from lightning_gpipe.state.kept_in_layers import share_kept
from lightning_gpipe.state.optimizer_shards import OptimizerShards
from lightning_gpipe.state.optimizers import (
    adopt,
    gather_optimizer,
    hold,
    own_part,
    state_to,
    without_state,
)
from lightning_gpipe.state.placement import Owners, Placement
from lightning_gpipe.tensors.tree import Tree

HOST = torch.device("cpu")
#: Which stage holds what of a module, and which replica of optimizers' state.
Parts: TypeAlias = tuple[Placement, OptimizerShards]


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a pipeline needs to know beside the module.

    Args:
        settings: What the user chose.
        chunks: M.
        groups: The process groups.
        data_parallel: How replicas communicate.
        devices: The name of every stage's device, for the table.
        optimizers: Returns the optimizers that work in this run.
        is_fitting: Whether there will be training steps.
        on_cut: Called when the module has been cut. Collective over all ranks.
        on_settled: Called when it is known who holds what outside the backbone.
        inform: Prints a text on rank 0; others that follow say the same in fewer words.
        warn: Warns on rank 0.
        trial: Whether all stages go on when one fails.
        watch: Measures what this rank's stages do.
    """

    settings: Settings
    chunks: int
    groups: Groups
    data_parallel: DataParallelOptions
    devices: Sequence[str]
    optimizers: Callable[[], Sequence[Optimizer]]
    is_fitting: bool
    on_cut: Callable[[Partition], object]
    on_settled: Callable[[Owners], object]
    inform: Callable[..., object]
    warn: Callable[[str], object]
    trial: Trial
    watch: Stopwatch

    def cut_by(self, sample: Any) -> Surroundings:
        """The same, with nothing that goes by the backbone's input where there is none."""
        return self if sample is not None else replace(self, settings=self.settings.without_input())


@dataclass(frozen=True, slots=True)
class Pipeline:
    """One rank's part of a module that is cut.

    Args:
        module: The user's module.
        body: Its backbone.
        surroundings: Groups, settings and so on.
        partition: Which layers each stage has.
        tensors: What this stage holds.
        shards: Which replica keeps the optimizer state of which parameter.
        per_sample: Tells which tensors of the backbone's input are split.
        rank: The stages of this rank.
        engine: Runs its micro-batches where every stage has the whole mini-batch.
        steps: Runs them where the user's step runs once per micro-batch; None: it doesn't.
        measuring: Measures the first mini-batches that it runs; None as for ``steps``.
        data_parallel: For each virtual stage, in the order of their last backwards, what averages
            its gradients over the replicas; and for what stands on either side of the backbone.
        shared: Sums the gradients of what every stage holds.
        shared_state: Watches what layers of several stages share beside parameters.
        on_ends: Sums those of what the first and the last stage hold; None: they hold nothing.
        parameter_hooks: Calls the user's hooks on parameters once per backward.
        structure: Notices layers and parameters that change.
        consistency: Compares what must be the same on every stage.
        partial: Warns of the state dict of one stage.
        hooks: To remove at the end.
        outside_memory: Warns if much of a step's memory is outside the backbone.
        lazy: The module, if no rank has ever held all of it; then each keeps its part; else None.
        lending: Lends what not every stage holds outside the backbone; None: every stage does.
        memory: What each stage is expected to hold in training; None: not known.
    """

    module: nn.Module
    body: nn.Module
    surroundings: Surroundings
    partition: Partition
    tensors: StageTensors
    shards: OptimizerShards
    per_sample: PerSample
    rank: Rank
    engine: WholeBatch
    steps: PerMicroBatch | None
    measuring: Measuring | None
    data_parallel: Mapping[int, DataParallel]
    shared: SharedParameters
    shared_state: SharedState
    on_ends: SharedParameters | None
    parameter_hooks: ParameterHooks
    structure: Structure
    consistency: ConsistencyCheck
    partial: PartialStateDict
    hooks: tuple[RemovableHandle, ...]
    outside_memory: OutsideMemory
    lazy: LazyModule | None
    lending: Lending | None = None
    memory: ExpectedMemory | None = None

    @property
    def placement(self) -> Placement:
        """Which stage holds what."""
        return self.tensors.placement

    @property
    def parts(self) -> Parts | None:
        """See :attr:`PipelinedModule.parts`."""
        return (self.placement, self.shards) if self.lazy is not None else None

    def announce(self) -> None:
        """Tell that the module is cut. Collective over all ranks."""
        with torch.inference_mode(False), torch.no_grad(), torch.autocast("cpu", enabled=False):
            self.surroundings.on_cut(self.partition)

    def adopt_optimizers(self) -> None:
        """See :meth:`PipelinedModule.adopt_optimizers`."""
        optimizers = self.surroundings.optimizers()
        adopt(optimizers, self.placement, self.shards, self.tensors.device)

    def begin_step(self, *step: int, training: bool) -> None:
        """See :meth:`PipelinedModule.begin_step`."""
        self.structure.check(self.surroundings.optimizers())
        if self.lending is not None:
            self.lending.forget()
        if training:
            self.shared.before_step()
        self.engine.begin_step(*step)

    def forward(self, input: Any, run_layer: RunLayer) -> Any:
        """See :meth:`WholeBatch.forward`. Collective over the pipeline."""
        batch, whole = Tree.of(input, "The backbone's input"), frozenset[int]()
        if self.surroundings.chunks > 1:
            whole = self.per_sample.whole(batch, run_layer)
        outline = partial(self.per_sample.outline, batch, run_layer)
        try:
            output = self.engine.forward(batch, run_layer, whole, outline, input)
        except StopIteration as error:
            raise RuntimeError(
                "A layer of the backbone raised StopIteration, which would end the epoch on this"
                " stage alone: catch it in the layer."
            ) from error
        self.shared_state.check()
        return output

    @contextmanager
    def backward(self, loss: Tensor, retain: bool, synchronize: bool) -> Iterator[Tensor]:
        """See :meth:`PipelinedModule.backward`."""
        with self.parameter_hooks.postponed(self._sum_up) as need_sums:
            self.shared.before_backward()
            self.outside_memory.tell(loss)
            expect_last = partial(_expect_last, self.data_parallel) if synchronize else None
            with self.surroundings.trial.shared():
                yield self.engine.steer(loss, retain, expect_last)
                self.engine.finish_backward()
            self.synchronize(synchronize, need_sums)
        if synchronize:
            self.consistency.check(loss)

    def synchronize(self, average: bool, sum_up: bool) -> None:
        """Make gradients whole after a backward. Collective.

        Args:
            average: Whether gradients become equal on all ranks that hold a parameter.
            sum_up: Whether they become equal on all stages of a pipeline at least.
        """
        if average:
            for data_parallel in self.data_parallel.values():
                data_parallel.finish()
        for shared in self._summed() if average or sum_up else ():
            shared.synchronize()

    @contextmanager
    def stepping(self, synchronize: bool) -> Iterator[tuple[BeforeLast, bool]]:
        """Run steps with their backwards inside this context. Collective over the pipeline.

        It gives what to call before the last backward of each virtual stage, and of either side;
        and whether gradients must become equal on all stages.

        Args:
            synchronize: See :meth:`PipelinedModule.backward`.
        """
        with self.parameter_hooks.postponed(self._sum_up) as need_sums:
            for shared in self._summed():
                shared.before_backward()
            before_last = partial(_expect_last, self.data_parallel)
            yield before_last if synchronize else _expect_nothing, need_sums

    def _sum_up(self) -> None:
        for shared in self._summed():
            shared.sum_up()

    def _summed(self) -> list[SharedParameters]:
        return [self.shared] if self.on_ends is None else [self.shared, self.on_ends]

    def gradients(self) -> ModelGradients:
        """See :meth:`PipelinedModule.gradients`."""
        return ModelGradients(self.placement.owner, self._sums)

    def _sums(self) -> dict[int, Tensor]:
        return {key: s for shared in self._summed() for key, s in shared.summed().items()}

    def state_dict(self, is_alone: bool) -> dict[str, Any]:
        """See :meth:`PipelinedModule.state_dict`; replica 0 gathers."""
        with self.partial.silent():
            state: dict[str, Any] = self.module.state_dict()
        is_alone = is_alone or self.surroundings.groups.replica > 0 or self._saves_parts
        return state if is_alone else self.tensors.gather(state)

    def writes(self) -> Callable[[str], bool]:
        """See :meth:`PipelinedModule.writes`."""
        return self.placement.writes(self.surroundings.groups.replica)

    @property
    def _saves_parts(self) -> bool:
        return self.surroundings.settings.save_distributed_checkpoint

    def optimizer_state_dict(self, optimizer: Optimizer) -> dict[str, Any]:
        """See :meth:`PipelinedModule.optimizer_state_dict`.

        That of an optimizer of an earlier run is whole on rank 0 already.
        """
        groups, state = self.surroundings.groups, optimizer.state_dict()
        if not any(optimizer is found for found in self.surroundings.optimizers()):
            is_saved = groups.is_first_of_all or not self._saves_parts
            return state if is_saved else without_state(state)
        if self._saves_parts:
            return self.own_optimizer_state(optimizer, state)
        return self._gathered(optimizer)

    def _gathered(self, optimizer: Optimizer) -> dict[str, Any]:
        return gather_optimizer(optimizer, self.placement, self.shards, self.surroundings.groups)

    def own_optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """See :meth:`PipelinedModule.own_optimizer_state`."""
        return own_part(optimizer, self.placement, self.shards, state)

    def close(self, restore: bool) -> None:
        """See :meth:`PipelinedModule.close`."""
        for hook in self.hooks:
            hook.remove()
        self.shards.close()
        if self.lending is not None:
            self.lending.close()
        if self.steps is not None:
            self.steps.close()
        if restore:
            self.rank.links.flush()
        self.rank.executor.close()
        for average in self.data_parallel.values():
            average.close()
        if restore:
            self._restore()

    def _restore(self) -> None:
        """Bring weights and optimizers' state back to the host, the weights first. Collective."""
        optimizers, groups = self.surroundings.optimizers(), self.surroundings.groups
        self.tensors.restore(is_whole=self.lazy is None)
        if self.lazy is None and groups.stages > 1:
            share_kept(self.module, self.placement, groups.pipeline)
        outside_to(self.module, self.body, HOST)  # also what modules such as metrics move along
        if groups.stages == 1:
            self.body.to(HOST)  # also what the user added
        if self.lazy is not None:
            self.lazy.kept = self.partition
            for optimizer in optimizers:
                state_to(optimizer, HOST)
            return
        states = [self._gathered(optimizer) for optimizer in optimizers]
        for optimizer, state in zip(optimizers, states, strict=True):
            if groups.is_first and groups.replica == 0:
                hold(optimizer, state)
            state_to(optimizer, HOST)


def shared_parameters(
    placement: Placement, groups: Groups, options: DataParallelOptions
) -> SharedParameters:
    """What sums the gradients of what every stage holds."""
    return SharedParameters(
        placement.replicated,
        placement.own,
        placement.shared_buffers,
        groups,
        options.broadcast_buffers,
    )


def on_ends(
    placement: Placement, groups: Groups, before: SharedParameters
) -> SharedParameters | None:
    """What sums the gradients of what the first and the last stage hold.

    Args:
        placement: Which stage holds what.
        groups: The process groups.
        before: What has summed them so far.
    """
    if not placement.on_ends or groups.ends is None:
        return None
    ends = SharedParameters(placement.on_ends, [], [], replace(groups, pipeline=groups.ends), False)
    ends.take_over(before)
    return ends


def _expect_last(data_parallel: Mapping[int, DataParallel], part: int) -> Tensor | None:
    return data_parallel[part].expect_last() if part in data_parallel else None


def _expect_nothing(_: int) -> None:
    return None
