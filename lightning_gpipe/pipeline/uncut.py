"""A module before it is cut into stages, and the cut."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_gpipe.engine.batchnorm import DeferredBatchNorm
from lightning_gpipe.engine.context import ForwardContext
from lightning_gpipe.engine.per_micro_batch import PerMicroBatch
from lightning_gpipe.engine.rank import Rank
from lightning_gpipe.engine.shared_state import SharedState
from lightning_gpipe.engine.stage import Stage
from lightning_gpipe.engine.whole_batch import WholeBatch
from lightning_gpipe.gradients.consistency import ConsistencyCheck
from lightning_gpipe.gradients.data_parallel import DataParallel
from lightning_gpipe.gradients.hooks import ParameterHooks
from lightning_gpipe.gradients.norm import ModelGradients
from lightning_gpipe.model.backbone import find_backbone, refuse_compiled
from lightning_gpipe.model.blocks import loops_over_itself
from lightning_gpipe.model.encoders import encode, encoders_of
from lightning_gpipe.model.own_state import own_state_kept
from lightning_gpipe.model.parameters import check_names, layers_of, names_of, outside_to
from lightning_gpipe.model.partition import Partition
from lightning_gpipe.model.program import is_loop
from lightning_gpipe.model.redirect import Redirections, not_alone
from lightning_gpipe.model.structure import Structure
from lightning_gpipe.pipeline.building import Building
from lightning_gpipe.pipeline.deciding import decide
from lightning_gpipe.pipeline.measuring import Measuring
from lightning_gpipe.pipeline.outside_memory import OutsideMemory
from lightning_gpipe.pipeline.pipeline import HOST, Pipeline, Surroundings, shared_parameters
from lightning_gpipe.pipeline.settling import begin_to_watch
from lightning_gpipe.pipeline.telling import tell_cut
from lightning_gpipe.plan.balance import check_layers, known_flops
from lightning_gpipe.plan.per_sample import PerSample
from lightning_gpipe.plan.report import OUTSIDE_LIMIT, outside_share
from lightning_gpipe.plan.schedules import Schedules
from lightning_gpipe.state.gather import (
    PartialStateDict,
    StageTensors,
    share_over_replicas,
)
from lightning_gpipe.state.optimizer_shards import OptimizerShards
from lightning_gpipe.state.optimizers import adopt, all_of, without_state
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
        shards: Which replica will keep the optimizer state of which parameter.
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
    shards: OptimizerShards

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
        for encoder in encoders_of(module, body, around.settings.step == "micro-batch"):
            redirections.add(encoder, partial(encode, encoder))
        groups, siblings = around.groups, around.groups.siblings
        seed, names = groups.decide("seed", lambda: (torch.initial_seed(), names_of(module)))
        check_names(module, names)
        building = Building.of(module, backbone, layers, groups, seed)
        held = building.held(groups.stages, around.settings.virtual_stages)
        is_shared_out = around.settings.shard_optimizer_state and not siblings.is_alone
        return cls(
            module,
            around,
            redirections,
            backbone,
            body,
            layers,
            seed,
            building,
            held,
            OptimizerShards(siblings if is_shared_out else None),
        )

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
        """Leave state where it is, in host memory as the backbone: the first step will cut it."""
        self.shards.attach(self.surroundings.optimizers())

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

    def gradients(self) -> ModelGradients:
        """All stages hold all."""
        return ModelGradients(lambda parameter: None, dict)

    def state_dict(self, is_alone: bool) -> dict[str, Any]:
        """The module's own; on the first rank with all values, though no layer is built."""
        state: dict[str, Any] = self.module.state_dict()
        is_filled = self.surroundings.groups.is_first_of_all and not is_alone
        return self.building.filled(state) if is_filled else state

    def writes(self) -> Callable[[str], bool]:
        """All on the first rank, whose values all will start from."""
        is_first = self.surroundings.groups.is_first_of_all
        return lambda key: is_first

    def optimizer_state_dict(self, optimizer: Optimizer) -> dict[str, Any]:
        """The optimizer's own, of which the first rank's counts."""
        state: dict[str, Any] = optimizer.state_dict()
        return state if self.surroundings.groups.is_first_of_all else without_state(state)

    def own_optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """All of it."""
        return all_of(optimizer, state)

    def close(self, restore: bool) -> None:
        """Bring what is outside the backbone back to host memory."""
        self.shards.close()
        outside_to(self.module, self.body, HOST)

    def cut(self, sample: Any, context: ForwardContext) -> Pipeline:
        """Cut the module into stages. Collective over all ranks.

        Args:
            sample: The backbone's input; None: there is none, and nothing goes by it.
            context: What surrounds the call of the backbone.
        """
        # in a user's evaluation step, too, the tensors made here must be ordinary ones
        with (
            torch.inference_mode(False),
            torch.no_grad(),
            torch.autocast("cpu", enabled=False),
            own_state_kept(self.module),
        ):
            around, groups = self.surroundings.cut_by(sample), self.surroundings.groups
            for layer in self.layers:
                self.redirections.remove(layer)
            fitted = groups.decide(
                "partition",
                lambda: decide(
                    self.module, self.body, self.layers, around, sample, context, self.held
                ),
            )
            partition = fitted.partition
            settings = replace(around.settings, checkpoint=fitted.checkpoint)
            around = replace(around, settings=settings, chunks=fitted.chunks)
            is_list = loops_over_itself(self.body) or is_loop(context.run_layer)
            whole = self.module, self.backbone, self.layers, is_list
            tell_cut(*whole, around, partition, sample, fitted.memory)
            placement = Placement.of(self.module, self.backbone, partition, groups.stage)
            tensors = StageTensors(placement, groups.pipeline, groups.device)
            self.building.build_own(placement, groups.device)
            tensors.cut(lambda slot: slot.names[0] not in self.building.names)
            share_over_replicas([*placement.own, *placement.shared], groups)
            adopt(around.optimizers(), placement, self.shards, groups.device)
            own = {
                part: {i: self.layers[i] for i in partition.parts[part]}
                for part in range(groups.stage, len(partition.parts), groups.stages)
            }
            here = [layer for layers in own.values() for layer in layers.values()]
            for layer in self.layers:
                if layer not in here:
                    self.redirections.add(layer, not_alone)
            pipeline = self._assembled(around, partition, tensors, own)
            return replace(pipeline, memory=fitted.memory)

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
        shared_state = SharedState.of(self.layers, partition, groups)
        stages = {
            part: Stage(
                layers,
                groups.device,
                deferred,
                groups.siblings,
                partial(shared_state.watched, part),
                is_alone=groups.stages == 1,
            )
            for part, layers in own.items()
        }
        rank = Rank.of(stages, groups, around.trial, around.watch)
        last_used = {  # whose backward comes last, of those that use it
            part: [slot for slot in placement.own if min(slot.parts) == part] for part in own
        }
        known = frozenset(placement.parameters)
        steps, measuring, modules = None, None, [*self.module.modules()]
        if settings.step == "micro-batch":
            schedules = Schedules.unmeasured(settings, partition, groups.replicas)
            inside = {id(module) for module in self.body.modules()}
            outside = [m for m in modules if id(m) not in inside]
            batch_norm = DeferredBatchNorm(outside, deferred, groups.siblings, together=False)
            steps = PerMicroBatch(
                rank, schedules.make, self.seed, placement.holders, known, batch_norm, modules
            )
            begin_to_watch(steps, placement, groups)
            measuring = Measuring(rank, schedules, groups)
        engine = WholeBatch(rank, around.chunks, settings.recomputing, self.seed, known, modules)
        is_told = (
            *(steps is not None, groups.stages == 1),
            outside_share(self.module, self.body) > OUTSIDE_LIMIT,
        )
        partial_state = PartialStateDict(around.warn)
        hooks: list[RemovableHandle] = []
        if groups.stages > 1:
            hooks.append(self.body.register_state_dict_post_hook(partial_state))
        return Pipeline(
            self.module,
            self.body,
            around,
            partition,
            tensors,
            self.shards,
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
            shared_state,
            None,
            ParameterHooks(placement.own, placement.replicated, groups),
            Structure.of(self.module, self.backbone, groups.stages == groups.replicas == 1),
            ConsistencyCheck(placement.replicated, groups),
            partial_state,
            tuple(hooks),
            OutsideMemory(engine, placement, around.warn, any(is_told)),
            self.building.lazy if self.building.keeps_parts and groups.stages > 1 else None,
        )
