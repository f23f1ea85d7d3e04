"""A module before it is cut into stages, and the cut."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_gpipe.engine.batchnorm import DeferredBatchNorm
from lightning_gpipe.engine.per_micro_batch import PerMicroBatch
from lightning_gpipe.engine.rank import Rank
from lightning_gpipe.engine.stage import Stage
from lightning_gpipe.engine.whole_batch import WholeBatch
from lightning_gpipe.gradients.consistency import ConsistencyCheck
from lightning_gpipe.gradients.data_parallel import DataParallel
from lightning_gpipe.gradients.hooks import ParameterHooks
from lightning_gpipe.model.backbone import find_backbone, refuse_compiled
from lightning_gpipe.model.loop import is_loop
from lightning_gpipe.model.parameters import layers_of, outside_to
from lightning_gpipe.model.partition import Partition
from lightning_gpipe.model.redirect import Redirections, not_alone
from lightning_gpipe.model.run_layer import RunLayer
from lightning_gpipe.model.structure import Structure
from lightning_gpipe.pipeline.building import Building
from lightning_gpipe.pipeline.measuring import Measuring
from lightning_gpipe.pipeline.outside_memory import OutsideMemory
from lightning_gpipe.pipeline.pipeline import HOST, Pipeline, Surroundings, shared_parameters
from lightning_gpipe.pipeline.settling import begin_to_watch
from lightning_gpipe.plan.balance import check_layers, decide_partition, known_flops
from lightning_gpipe.plan.chunks import decide_chunks, micro_batches
from lightning_gpipe.plan.per_sample import PerSample
from lightning_gpipe.plan.report import OUTSIDE_LIMIT, outside_share, partition_table
from lightning_gpipe.plan.schedules import Schedules
from lightning_gpipe.schedule.costs import Costs
from lightning_gpipe.state.gather import (
    PartialStateDict,
    StageTensors,
    share_over_replicas,
)
from lightning_gpipe.state.optimizers import adopt
from lightning_gpipe.state.placement import Placement


@dataclass(frozen=True, slots=True)
class Uncut:
    """A module whose backbone waits for its first input, on every stage whole.

    Args:
        module: The user's module.
        surroundings: Groups, settings and so on.
        redirections: The forwards that the pipeline takes over.
        backbone: Dotted name of the backbone.
        body: The backbone.
        layers: Its layers.
        seed: Of the layers' random numbers; the same on every rank.
        building: What each rank builds by itself.
        held: Which layers each stage holds since an earlier run; None: nothing is cut.
    """

    module: nn.Module
    surroundings: Surroundings
    redirections: Redirections
    backbone: str
    body: nn.Module
    layers: tuple[nn.Module, ...]
    seed: int
    building: Building
    held: Partition | None

    @classmethod
    def of(cls, module: nn.Module, around: Surroundings, redirections: Redirections) -> Uncut:
        """Find the backbone of a module. Collective over all ranks.

        Raises:
            ValueError: If it can't become a pipeline, with what to change.
        """
        lazy = [name for name, p in module.named_parameters() if is_lazy(p)]
        if lazy:
            raise ValueError(
                f"{lazy[0]} has no shape yet: run one batch through the model before the Trainer"
                " does."
            )
        chosen = around.settings.backbone
        backbone = find_backbone(module, chosen, known_flops(module) if chosen is None else None)
        body = module.get_submodule(backbone)
        refuse_compiled(module, backbone)
        layers = tuple(layers_of(body))
        check_layers(len(layers), around.groups.stages, around.settings, backbone)
        redirections.take_over(body)
        groups = around.groups
        seed = groups.decide("seed", torch.initial_seed)
        building = Building.of(module, backbone, layers, groups, seed)
        held = building.held(groups.stages, around.settings.virtual_stages)
        return cls(module, around, redirections, backbone, body, layers, seed, building, held)

    @property
    def needs_input(self) -> bool:
        """Whether it takes an input of the backbone to cut it."""
        return self.held is None and self.surroundings.settings.needs_input

    def build(self) -> None:
        """Give values to what stays whole on this rank, and has none."""
        self.building.build_outside()
        if self.surroundings.groups.stages == 1:
            self.building.build_all()

    @property
    def parts(self) -> None:
        """Nobody holds a part."""

    def adopt_optimizers(self) -> None:
        """Do nothing: the backbone is in host memory still, and so is the optimizers' state."""

    def begin_step(self, *step: int, training: bool) -> None:
        """Do nothing: there is no engine yet."""

    @contextmanager
    def backward(self, loss: Tensor, retain: bool, synchronize: bool) -> Iterator[Tensor]:
        """See :meth:`PipelinedModule.backward`. All stages compute the same."""
        if self.surroundings.groups.replicas > 1:
            raise RuntimeError(
                "The first backward came before the first call of the backbone, when the module"
                " isn't cut yet. Give GPipeStrategy(balance='params'), or a list of layers per"
                " stage, to have it cut before the first step."
            )
        yield loss

    def owner(self, parameter: Tensor) -> int | None:
        """All stages hold all."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """The module's own."""
        state: dict[str, Any] = self.module.state_dict()
        return state

    def optimizer_state_dict(self, optimizer: Optimizer) -> dict[str, Any]:
        """The optimizer's own."""
        return optimizer.state_dict()

    def own_optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """All of it."""
        return state

    def close(self, restore: bool) -> None:
        """Bring what is outside the backbone back to host memory."""
        outside_to(self.module, self.body, HOST)

    def cut(self, sample: Any, run_layer: RunLayer) -> Pipeline:
        """Cut the module into stages. Collective over all ranks.

        Args:
            sample: The backbone's input, where the balance needs it.
            run_layer: Runs one of its layers.
        """
        # this may run in a user's evaluation step: the tensors made here must be ordinary ones all
        # the same
        with torch.inference_mode(False), torch.no_grad(), torch.autocast("cpu", enabled=False):
            around, groups = self.surroundings, self.surroundings.groups
            for layer in self.layers:
                self.redirections.remove(layer)
            partition, chunks = groups.decide("partition", lambda: self._decide(sample, run_layer))
            is_list = isinstance(self.body, nn.ModuleList) or is_loop(run_layer)
            self._tell(partition, micro_batches(chunks, sample), is_list, sample is None)
            placement = Placement.of(self.module, self.backbone, partition, groups.stage)
            tensors = StageTensors(placement, groups.pipeline, groups.device)
            self.building.build_own(placement, groups.device)
            tensors.cut(lambda slot: slot.names[0] not in self.building.names)
            share_over_replicas([*placement.own, *placement.shared], groups)
            adopt(around.optimizers(), placement, groups.device)
            own = {
                part: {i: self.layers[i] for i in partition.parts[part]}
                for part in range(groups.stage, len(partition.parts), groups.stages)
            }
            here = [layer for layers in own.values() for layer in layers.values()]
            for layer in self.layers:
                if layer not in here:
                    self.redirections.add(layer, not_alone)
            return self._assembled(replace(around, chunks=chunks), partition, tensors, own)

    def _decide(self, sample: Any, run_layer: RunLayer) -> tuple[Partition, int]:
        """Choose the layers of each stage, and M."""
        around = self.surroundings
        settings, stages = around.settings, around.groups.stages
        partition = self.held or decide_partition(
            self.layers, run_layer, stages, settings, sample, around.warn
        )
        chunks = decide_chunks(around.chunks, settings, self.body, sample, around.warn)
        return partition, chunks

    def _assembled(
        self,
        around: Surroundings,
        partition: Partition,
        tensors: StageTensors,
        own: dict[int, dict[int, nn.Module]],
    ) -> Pipeline:
        groups, placement = around.groups, tensors.placement
        settings, options = around.settings, around.data_parallel
        deferred = settings.deferred_batch_norm
        stages = {
            part: Stage(layers, groups.device, deferred, groups.siblings)
            for part, layers in own.items()
        }
        rank = Rank.of(stages, groups, around.trial)
        last_used = {  # whose backward comes last, of those that use it
            part: [slot for slot in placement.own if min(slot.parts) == part] for part in own
        }
        known = frozenset(placement.parameters)
        steps = measuring = None
        if settings.step == "micro-batch":
            costs = Costs.of([max(share, 1e-3) for share in partition.part_shares])
            schedules = Schedules(settings, rank.placement, groups.replicas, costs)
            inside = {id(module) for module in self.body.modules()}
            outside = [m for m in self.module.modules() if id(m) not in inside]
            batch_norm = DeferredBatchNorm(outside, deferred, groups.siblings)
            steps = PerMicroBatch(
                rank, schedules.make, self.seed, placement.holders, known, batch_norm
            )
            begin_to_watch(steps, placement, groups)
            measuring = Measuring(rank, schedules, groups)
        engine = WholeBatch(rank, around.chunks, settings.checkpoint, self.seed, known)
        is_told = (
            *(steps is not None, groups.stages == 1),
            outside_share(self.module, self.body) > OUTSIDE_LIMIT,
        )
        partial = PartialStateDict(around.warn)
        hooks: list[RemovableHandle] = []
        if groups.stages > 1:
            hooks.append(self.body.register_state_dict_post_hook(partial))
        return Pipeline(
            self.module,
            self.body,
            around,
            partition,
            tensors,
            PerSample(self.layers, around.chunks, self.redirections.suspended),
            rank,
            engine,
            steps,
            measuring,
            {
                part: DataParallel(slots, groups, options)
                for part, slots in reversed(last_used.items())
            },
            shared_parameters(placement, groups, options),
            None,
            ParameterHooks(placement.own, placement.replicated, groups),
            Structure.of(self.module, self.backbone, groups.stages == groups.replicas == 1),
            ConsistencyCheck(placement.replicated, groups),
            partial,
            tuple(hooks),
            OutsideMemory(engine, placement, around.warn, any(is_told)),
            self.building.lazy if self.building.keeps_parts and groups.stages > 1 else None,
        )

    def _tell(self, partition: Partition, chunks: int, is_list: bool, at_most: bool) -> None:
        """Print the partition, and warn of what may surprise."""
        around, groups = self.surroundings, self.surroundings.groups
        outside = outside_share(self.module, self.body)
        table = partition_table(
            partition,
            self.backbone,
            self.layers,
            is_list,
            around.devices,
            chunks,
            around.settings,
            outside,
            groups.replicas,
            at_most,
        )
        around.inform(f"\n{table}")  # a progress bar may stand on the line
        for name, module in self.body.named_modules():
            if getattr(module, "batch_first", True) is False:
                around.warn(
                    f"'{self.backbone}.{name}' ({type(module).__name__}) has batch_first=False, but"
                    " micro-batches are cut along dimension 0: it must be the batch, or the layer"
                    " sees slices of time. Build it with batch_first=True."
                )
                break
        is_replicated = around.settings.step == "mini-batch"
        if outside > OUTSIDE_LIMIT and groups.stages > 1 and is_replicated:
            around.warn(
                f"{outside:.0%} of the parameters are outside the backbone '{self.backbone}'."
                " Every stage holds and computes them: with GPipeStrategy(step='micro-batch') the"
                " first or the last stage alone does, if the loss is a mean over samples or tokens."
                " Or move what you can into the backbone, or name another one with"
                " GPipeStrategy(backbone=...)."
            )
