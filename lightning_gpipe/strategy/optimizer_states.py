"""The state of optimizers that a checkpoint brings, for what a stage holds."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from lightning_gpipe.pipeline.module import PipelinedModule
from lightning_gpipe.state.optimizers import order_as_on_first_rank
from lightning_gpipe.state.stored import Stored


class OptimizerStates:
    """Loads the state of optimizers, at once or when it is known what this stage holds.

    Args:
        pipeline: The module's.
    """

    def __init__(self, pipeline: PipelinedModule) -> None:
        self._pipeline = pipeline
        self._waiting: tuple[Sequence[Optimizer], Sequence[dict[str, Any]]] | None = None

    def adopt(self, optimizers: Sequence[Optimizer]) -> None:
        """Let optimizers hold the state that this rank keeps alone. Collective over all ranks.

        Raises:
            ValueError: If they have other parameters than rank 0's.
        """
        order_as_on_first_rank(optimizers, self._pipeline.module, self._pipeline.groups)
        self._pipeline.adopt_optimizers()

    def load(self, optimizers: Sequence[Optimizer], states: Sequence[dict[str, Any]]) -> None:
        """Load this stage's part of the optimizers' state.

        Args:
            optimizers: Those of the run.
            states: For each the whole module's.
        """
        is_known = self._pipeline.partition is not None or not self._pipeline.is_lazy
        for optimizer, state in zip(optimizers, states, strict=False):
            if "state" in state:  # not Lightning's stand-in for no optimizer
                state = self._own(optimizer, state) if is_known else {**state, "state": {}}
            optimizer.load_state_dict(state)
        self._waiting = None if is_known else (optimizers, states)
        self._pipeline.adopt_optimizers()

    def load_waiting(self) -> None:
        """Load what has waited for the cut."""
        if self._waiting is not None:
            self.load(*self._waiting)

    def state_dict(self, optimizer: Optimizer) -> dict[str, Any]:
        """An optimizer's, with what waits for the cut on the first rank. Collective."""
        state = self._pipeline.optimizer_state_dict(optimizer)
        if self._waiting is None or not self._pipeline.groups.is_first_of_all:
            return state
        for found, loaded in zip(*self._waiting, strict=False):
            if found is optimizer and "state" in loaded:
                held = loaded["state"]
                return {**state, "state": held.whole() if isinstance(held, Stored) else held}
        return state

    def _own(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """This stage's part; copies of what is mapped from a file, which may be replaced."""
        own = self._pipeline.own_optimizer_state(optimizer, state)
        if isinstance(state["state"], Stored):
            return own
        return {**own, "state": tree_map_only(Tensor, Tensor.clone, own["state"])}


def complete(optimizers: Sequence[Optimizer]) -> None:
    """Give optimizers what a copy gets, which some that wrap another, such as Lookahead, lack."""
    hooks = "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"
    for optimizer in optimizers:
        own = vars(optimizer)
        if not own.keys() >= {*hooks, "_optimizer_state_dict_pre_hooks"}:  # no constructor ran
            Optimizer.__setstate__(optimizer, {})
        for name in hooks:
            if type(own[name]) is dict:  # nothing can refer to one weakly
                own[name] = OrderedDict(own[name])
