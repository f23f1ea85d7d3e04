"""Which process runs which stage of which pipeline."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import FrameType
from typing import Any, ClassVar

import torch
from lightning.fabric.plugins import ClusterEnvironment
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.utilities import rank_zero_only
from typing_extensions import override

from lightning_gpipe.plan.settings import Settings
from lightning_gpipe.strategy import advice, saving
from lightning_gpipe.strategy.world import Layout


class PlacedStrategy(ParallelStrategy):
    """A process's place, from what the user chose and what Lightning sets.

    Args:
        settings: What the user chose.
        options: Passed to ``ParallelStrategy``.
    """

    #: Types of devices for which PyTorch has no SyncBatchNorm.
    without_sync: ClassVar = frozenset({"cpu"})

    def __init__(self, settings: Settings, **options: Any) -> None:
        super().__init__(**options)
        self.num_nodes = 1
        self._settings = settings
        self._has_warned = False
        # rank and size: torchrun's environment reads variables, which are others for loaders
        self._place: tuple[int, int] | None = None
        self._settled_chunks: int | None = None
        self._chunks_before: int | None = None  # of the checkpoint that a run goes on from

    def __repr__(self) -> str:
        chosen = (
            f"GPipeStrategy(chunks={self._settings.chunks!r}, stages={self._settings.stages!r})"
        )
        if "pytorch_lightning" not in sys.modules:
            return chosen
        return f"{chosen}, which is for lightning.Trainer, not for pytorch_lightning.Trainer"

    @property
    @override
    def root_device(self) -> torch.device:
        return self._device_of(self.local_rank)

    @property
    @override
    def world_size(self) -> int:
        size = super().world_size if self._place is None else self._place[1]
        self._warn(sys._getframe(), "trainer.world_size", size)
        return size

    @property
    @override
    def global_rank(self) -> int:
        return super().global_rank if self._place is None else self._place[0]

    @property
    def parallel_devices(self) -> Any:
        """The devices of this node."""
        found = self._parallel_devices
        self._warn(sys._getframe(), "trainer.num_devices", len(found or ()))
        return found

    @parallel_devices.setter
    def parallel_devices(self, devices: Any) -> None:
        """Set them."""
        self._parallel_devices = devices

    def _warn(self, frame: FrameType, what: str, size: int) -> None:
        """Say what a number of processes counts, if the user reads it.

        Args:
            frame: Of the property.
            what: What is read.
            size: It.
        """
        if self._has_warned or size < 2 or not advice.is_read_by_user(frame):
            return
        if (stages := self.stages) > 1:
            self._has_warned = True
            advice.warn_of_world_size(what, size, stages, self.replicas)

    @property
    def num_processes(self) -> int:
        """Processes of this node."""
        return len(self._parallel_devices or ())

    @property
    def stages(self) -> int:
        """K, the number of stages."""
        return self.num_processes if self._settings.stages == "auto" else self._settings.stages

    @property
    def chunks(self) -> int:
        """M, the number of micro-batches; what is chosen for the first batch holds from then on."""
        if self._settled_chunks is not None:
            return self._settled_chunks
        return 4 * self.stages if self._settings.chunks == "auto" else self._settings.chunks

    def settle_chunks(self, chunks: int) -> None:
        """Tell which M is used."""
        self._settled_chunks = chunks
        saving.warn_of_difference(self._chunks_before, chunks)
        self._chunks_before = None

    def go_on_from(self, checkpoint: Mapping[str, Any]) -> None:
        """Warn when a run goes on with another M, as soon as its own is known."""
        record = checkpoint.get(saving.RECORD)
        before = record.get("chunks") if isinstance(record, Mapping) else None
        if self._settings.chunks == "auto" and self._settled_chunks is None:
            self._chunks_before = before
        else:
            saving.warn_of_difference(before, self.chunks)

    @property
    def replicas(self) -> int:
        """D, the number of pipelines."""
        return self._layout.replicas

    @property
    def stage(self) -> int:
        """The stage that this process runs."""
        return self._layout.stage

    @property
    def is_last(self) -> bool:
        """Whether this process runs the last layers."""
        return self.stage == self.stages - 1

    @property
    def is_distributed(self) -> bool:
        """Whether data is shared out between replicas, in Lightning's sense of the word."""
        return self.replicas > 1

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.replicas, "rank": self._layout.replica}

    @property
    def _layout(self) -> Layout:
        settings = self._settings
        if not self.stages:
            raise RuntimeError("The strategy has no devices yet: the Trainer sets them.")
        return Layout(
            self.global_rank,
            self.world_size,
            self.stages,
            settings.virtual_stages,
            settings.step == "micro-batch",
            settings.save_distributed_checkpoint,
            settings.shard_optimizer_state,
        )

    def _device_of(self, rank: int) -> torch.device:
        if not self._parallel_devices:
            raise RuntimeError("The strategy has no devices yet: the Trainer sets them.")
        return self._parallel_devices[rank % len(self._parallel_devices)]

    def set_world_ranks(self) -> None:
        """Tell the cluster environment this process's place."""
        environment = self._environment
        environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
        environment.set_world_size(self.num_nodes * self.num_processes)
        self._place = environment.global_rank(), environment.world_size()
        setattr(rank_zero_only, "rank", self.global_rank)  # noqa: B010  (an untyped attribute)

    @property
    def _environment(self) -> ClusterEnvironment:
        if self.cluster_environment is None:
            raise RuntimeError("The strategy has no cluster environment: the Trainer sets it.")
        return self.cluster_environment
