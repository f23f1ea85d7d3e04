"""A module as a pipeline: cuts it, takes over the backbone's call, gives the module back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_gpipe.comm.groups import Groups
from lightning_gpipe.engine.stage import Stage
from lightning_gpipe.engine.whole_batch import Engine
from lightning_gpipe.gradients.consistency import ConsistencyCheck
from lightning_gpipe.gradients.data_parallel import DataParallel, DataParallelOptions
from lightning_gpipe.gradients.shared import SharedParameters
from lightning_gpipe.model.backbone import find_backbone, refuse_compiled
from lightning_gpipe.model.blocks import runner
from lightning_gpipe.model.parameters import Slot, layers_of, materialize, outside_to, to_meta
from lightning_gpipe.model.partition import Partition
from lightning_gpipe.model.redirect import Redirect, not_alone
from lightning_gpipe.plan.balance import check_layers, decide_partition, known_flops
from lightning_gpipe.plan.report import OUTSIDE_LIMIT, outside_share, partition_table
from lightning_gpipe.plan.settings import Settings
from lightning_gpipe.state.placement import (
    PartialStateDict,
    Placement,
    share_outside,
    share_over_replicas,
)


class Pipeline:
    """One rank's part of the pipeline that a module became.

    Where the balance needs no input of the backbone the module is cut at once, else when the
    backbone is first called: its input is not the batch, so nothing else tells its shape. Until
    then the backbone stays in host memory.

    Args:
        module: The user's module.
        settings: What the user chose.
        chunks: M.
        groups: The process groups.
        replica_options: How replicas communicate.
        devices: The name of every stage's device, for the table.
        optimizers: Returns the optimizers that work in this run.
        on_cut: Called when the module has been cut. Collective over all ranks.
        inform: Prints a text on rank 0.
        warn: Warns on rank 0.

    Raises:
        ValueError: If the module can't become a pipeline, with what to change.
    """

    def __init__(
        self,
        module: nn.Module,
        settings: Settings,
        chunks: int,
        groups: Groups,
        data_parallel_options: DataParallelOptions,
        devices: Sequence[str],
        optimizers: Callable[[], Sequence[Optimizer]],
        on_cut: Callable[[Partition], object],
        inform: Callable[[str], object],
        warn: Callable[[str], object],
    ) -> None:
        self.partition: Partition | None = None
        self.module = module
        self._settings = settings
        self._chunks = chunks
        self._groups = groups
        self._data_parallel_options = data_parallel_options
        self._devices = devices
        self._optimizers = optimizers
        self._on_cut, self._inform, self._warn = on_cut, inform, warn
        self._placement: Placement | None = None
        self._engine: Engine | None = None
        self._data_parallel: DataParallel | None = None
        self._shared: SharedParameters | None = None
        self._consistency: ConsistencyCheck | None = None
        self._partial = PartialStateDict(warn)
        self._hooks: list[RemovableHandle] = []
        self._step: tuple[int, ...] = (0,)
        self._forwards: dict[nn.Module, Any] = {}
        self._empty: list[Slot] = []
        lazy = [name for name, p in module.named_parameters() if is_lazy(p)]
        if lazy:
            raise ValueError(
                f"{lazy[0]} has no shape yet: run one batch through the model before the Trainer"
                " does."
            )
        flops = known_flops(module) if settings.backbone is None else None
        self.backbone = find_backbone(module, settings.backbone, flops)
        self._backbone = module.get_submodule(self.backbone)
        refuse_compiled(self._backbone, self.backbone)
        self._layers = layers_of(self._backbone)
        self._run_layer = runner(self._backbone)
        check_layers(len(self._layers), groups.stages, settings, self.backbone)
        self._seed = groups.decide("seed", torch.initial_seed)
        self._redirect(self._backbone, self._forward)
        for layer in self._layers:
            self._redirect(layer, not_alone)

    # ------------------------------------------------------------------ life

    def to_device(self) -> None:
        """Move to the device what is outside the backbone, and cut it if that needs no input."""
        groups = self._groups
        share_outside(self.module, self._backbone, groups, groups.device)
        whole = groups.decide(
            "state", lambda: not any(p.is_meta for p in self._backbone.parameters())
        )
        if not whole:
            raise RuntimeError(
                "Rank 0 holds a part of the model only, because an earlier run was interrupted:"
                " build the module anew, and give the Trainer a checkpoint to go on from."
            )
        self._empty = materialize(self._backbone)
        if not self._settings.needs_input:
            self._cut(None)

    def adopt_optimizers(self) -> None:
        """Let the optimizers hold the state of this stage's parameters alone, on its device."""
        if self._placement is None:  # the backbone is in host memory still
            return
        self._placement.drop_optimizer_state(self._optimizers())
        for optimizer in self._optimizers():
            _state_to(optimizer, self._groups.device)

    def close(self, restore: bool) -> None:
        """Give the module back.

        Args:
            restore: Whether to bring all weights to the host memory of every rank, and all
                optimizer state to rank 0's. Collective then.
        """
        for module in list(self._forwards):
            self._direct(module)
        for hook in self._hooks:
            hook.remove()
        if self._engine is not None:
            if restore:
                self._engine.flush()
            self._engine.close()
        if self._data_parallel is not None:
            self._data_parallel.close()
        if self._placement is None:
            outside_to(self.module, self._backbone, torch.device("cpu"))
        elif restore:
            self._restore(self._placement)
        if self._placement is None or restore:
            to_meta(self._empty)

    def _restore(self, placement: Placement) -> None:
        states = [self.optimizer_state_dict(optimizer) for optimizer in self._optimizers()]
        outside_to(self.module, self._backbone, torch.device("cpu"))
        placement.restore()
        for optimizer, state in zip(self._optimizers(), states, strict=True):
            if self._groups.is_first and self._groups.replica == 0:
                optimizer.load_state_dict(state)
            _state_to(optimizer, torch.device("cpu"))

    # ------------------------------------------------------------------ steps

    def begin_step(self, *step: int) -> None:
        """Tell which step comes; see :meth:`Engine.begin_step`."""
        self._step = step
        if self._engine is not None:
            self._engine.begin_step(*step)

    @contextmanager
    def backward(self, loss: Tensor, retain: bool, synchronize: bool) -> Iterator[Tensor]:
        """Run a backward inside this context. Collective.

        Args:
            loss: The user's loss.
            retain: Whether the graph is needed once more.
            synchronize: Whether gradients become equal on all ranks that hold a parameter; else
                they accumulate until a backward for which they do.

        Yields:
            The loss to differentiate on this stage.
        """
        consistency, data_parallel, shared = self._consistency, self._data_parallel, self._shared
        if self._engine is None or not consistency or not data_parallel or not shared:
            # the backbone was not called yet: all stages compute the same
            if self._groups.replicas > 1:
                raise RuntimeError(
                    "The first backward came before the first call of the backbone, when the"
                    " module isn't cut yet. Give GPipeStrategy(balance='params'), or a list of"
                    " layers per stage, to have it cut before the first step."
                )
            yield loss
            return
        shared.before_backward()
        expect_last = data_parallel.expect_last if synchronize else None
        yield self._engine.steer(loss, retain, expect_last)
        self._engine.finish_backward()
        if synchronize:
            data_parallel.finish()
            shared.synchronize()
            consistency.check(loss)

    @contextmanager
    def as_written(self) -> Iterator[None]:
        """Let the backbone and its layers be called as without a pipeline."""
        redirections = {module: module.__dict__["forward"] for module in self._forwards}
        originals = dict(self._forwards)
        for module in redirections:
            self._direct(module)
        try:
            yield
        finally:
            for module, redirection in redirections.items():
                module.__dict__["forward"] = redirection
            self._forwards = originals

    def _forward(self, input: Any) -> Any:  # named as nn.Sequential's
        if self._engine is None:
            self._cut(input)
        if self._engine is None:
            raise RuntimeError("The backbone was not cut.")
        return self._engine.forward(input)

    # ------------------------------------------------------------------ state

    def owner(self, parameter: Tensor) -> int | None:
        """The stage that holds a parameter; None: all do."""
        return self._placement.owner(parameter) if self._placement is not None else None

    def state_dict(self) -> dict[str, Any]:
        """See :meth:`Placement.gather`; only replica 0's is whole."""
        with self._partial.silent():
            state: dict[str, Any] = self.module.state_dict()
        if self._placement is None or self._groups.replica:
            return state
        return self._placement.gather(state)

    def optimizer_state_dict(self, optimizer: Optimizer) -> dict[str, Any]:
        """See :meth:`lightning_gpipe.state.placement.Placement.optimizer_state_dict`.

        That of an optimizer of an earlier run is whole on rank 0 already.
        """
        spread = any(optimizer is found for found in self._optimizers())
        if self._placement is None or self._groups.replica or not spread:
            return optimizer.state_dict()
        return self._placement.optimizer_state_dict(optimizer)

    def own_optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """See :meth:`lightning_gpipe.state.placement.Placement.own_optimizer_state`."""
        return (
            self._placement.own_optimizer_state(optimizer, state)
            if self._placement is not None
            else state
        )

    # ------------------------------------------------------------------ the cut

    def _cut(self, value: Any) -> None:
        """Cut the module into stages. Collective.

        Args:
            value: The backbone's input, where the balance needs it.
        """
        # this may run in a user's evaluation step: the tensors made here must be ordinary ones all
        # the same
        with torch.inference_mode(False), torch.no_grad(), torch.autocast("cpu", enabled=False):
            settings, groups = self._settings, self._groups
            for layer in self._layers:
                self._direct(layer)
            partition = groups.decide(
                "partition",
                lambda: decide_partition(
                    self._layers, self._run_layer, groups.stages, settings, value, self._warn
                ),
            )
            self.partition = partition
            outside = outside_share(self.module, self._backbone)
            table = partition_table(
                partition,
                self.backbone,
                self._layers,
                self._devices,
                self._chunks,
                settings.checkpoint,
                outside,
                groups.replicas,
            )
            self._inform(f"\n{table}")  # a progress bar may stand on the line
            self._warn_of_time_first()
            if outside > OUTSIDE_LIMIT and groups.stages > 1:
                self._warn(
                    f"{outside:.0%} of the parameters are outside the backbone '{self.backbone}'."
                    " Every stage holds and computes them: move what you can into the backbone, or"
                    " name another one with GPipeStrategy(backbone=...)."
                )
            placement = Placement(
                self.module, self.backbone, partition, groups.pipeline, groups.device
            )
            placement.cut()
            share_over_replicas([*placement.own, *placement.shared], groups)
            self._placement = placement
            self.adopt_optimizers()
            own = partition.stages[groups.stage]
            here = [self._layers[i] for i in own]
            for layer in self._layers:
                if layer not in here:
                    self._redirect(layer, not_alone)
            stage = Stage(
                {i: self._layers[i] for i in own},
                self._run_layer,
                groups.device,
                settings.deferred_batch_norm,
                groups.siblings,
            )
            self._engine = Engine(stage, groups, self._chunks, settings.checkpoint, self._seed)
            self._engine.begin_step(*self._step)
            options = self._data_parallel_options
            self._data_parallel = DataParallel(placement.own, groups, options)
            self._shared = SharedParameters(
                placement.replicated, placement.own, groups, options.broadcast_buffers
            )
            self._consistency = ConsistencyCheck(placement.replicated, groups)
            if groups.stages > 1:
                self._hooks.append(self._backbone.register_state_dict_post_hook(self._partial))
            self._on_cut(partition)

    def _warn_of_time_first(self) -> None:
        for name, module in self._backbone.named_modules():
            if getattr(module, "batch_first", True) is False:
                self._warn(
                    f"'{self.backbone}.{name}' ({type(module).__name__}) has batch_first=False, but"
                    " micro-batches are cut along dimension 0: it must be the batch, or the layer"
                    " sees slices of time. Build it with batch_first=True."
                )
                return

    def _redirect(self, module: nn.Module, target: Callable[..., Any]) -> None:
        # a forward of the instance's own: torch.compile sets one, and users do
        previous = module.__dict__.get("forward")
        self._forwards.setdefault(module, None if isinstance(previous, Redirect) else previous)
        module.__dict__["forward"] = Redirect(target)

    def _direct(self, module: nn.Module) -> None:
        """Take a redirection back."""
        module.__dict__.pop("forward", None)
        original = self._forwards.pop(module, None)
        if original is not None:
            module.__dict__["forward"] = original


def _state_to(optimizer: Optimizer, device: torch.device) -> None:
    """Move an optimizer's state; step counters only where a fused kernel reads them."""
    for group in optimizer.param_groups:
        on_device = group.get("fused") or group.get("capturable")
        for parameter in group["params"]:
            state = optimizer.state.get(parameter)
            if isinstance(state, dict):
                state.update(
                    {
                        key: value.to(device)
                        for key, value in state.items()
                        if isinstance(value, Tensor) and (key != "step" or on_device)
                    }
                )
