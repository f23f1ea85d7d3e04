"""The paper's models as LightningModules without values, and how they are planned."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import lightning as L
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn

from examples.models.amoebanet import amoebanet_d
from examples.models.transformer import transformer
from lightning_gpipe import GPipeStrategy
from lightning_gpipe.plan.plans import Plan

IMAGES, SIDE = 128, 224  # a mini-batch of Table 1
TEXTS, LENGTH, VOCABULARY = 32, 1024, 32_000
CHUNKS = 32  # M, where the paper doesn't tell it


class Model(L.LightningModule, ABC):
    """Layers on the meta device, and RMSProp: 12 bytes a parameter."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.RMSprop(self.parameters())

    @abstractmethod
    def given(self) -> Any:
        """A mini-batch without values, as the layers get it."""

    @property
    def size(self) -> int:
        return sum(p.numel() for p in self.parameters())


class AmoebaNet(Model):
    """AmoebaNet-D (L, D)."""

    def __init__(self, cells: int, width: int, side: int = SIDE) -> None:
        with torch.device("meta"):
            super().__init__(amoebanet_d(cells, width, 1000))
        self.side = side

    def given(self) -> Tensor:
        return torch.empty(IMAGES, 3, self.side, self.side, device="meta")


class Beside(nn.Module):
    """A layer of a Transformer; the tokens that follow are handed on beside its states."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, given: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        states, following = given
        return self.layer(states), following


class Loss(nn.Module):
    """The last layer, and each text's loss: no stage keeps logits between micro-batches."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head

    def forward(self, given: tuple[Tensor, Tensor]) -> Tensor:
        states, following = given
        logits = self.head(states).flatten(0, 1)
        losses = nn.functional.cross_entropy(logits, following.flatten(), reduction="none")
        return losses.view_as(following).mean(1)


class Transformer(Model):
    """Transformer-L; the loss is computed in its last layer, as the paper's last cell does."""

    def __init__(self, layers: int, texts: int = TEXTS, length: int = LENGTH, **sizes: int) -> None:
        with torch.device("meta"):
            *first, head = transformer(layers, **{"vocabulary": VOCABULARY, **sizes})
        super().__init__([*map(Beside, first), Loss(head)])
        self.texts, self.length = texts, length

    def given(self) -> tuple[Tensor, Tensor]:
        tokens = torch.zeros(self.texts, self.length, dtype=torch.long, device="meta")
        return tokens, tokens


def plans(
    model: Model,
    stages: Sequence[int],
    chunks: int,
    checkpoint: Any = "always",
    memory: int | None = None,
    is_mixed: bool = False,
    **strategy: Any,
) -> dict[int, Plan]:
    """Plan a model for several numbers of stages.

    Args:
        model: The model.
        stages: The K.
        chunks: M.
        checkpoint: What is re-materialized.
        memory: Bytes of a device.
        is_mixed: Whether activations are of bfloat16, as on TPUs, and not of float32.
        strategy: Arguments of the strategy; without them schedule and step are the paper's.

    Returns:
        The plan of each K.
    """
    made = GPipeStrategy(**{"step": "micro-batch", "schedule": "fill_drain", **strategy})
    if is_mixed:
        made.precision_plugin = MixedPrecision("bf16-mixed", "cpu")
    found = made.plan(
        model,
        input=model.given(),
        devices=max(stages),
        stages=stages,
        chunks=[chunks],
        virtual_stages=[1],
        checkpoint=[checkpoint],
        memory=memory,
        device="cpu",
    )
    return {int(plan.settings.stages): plan for plan in found.all}
