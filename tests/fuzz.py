"""Random pipelines, good and bad: equal weights, or a clear refusal, and nothing else.

    python -m tests.fuzz --count 300 --seed 1

Every configuration follows from its seed, which is printed with what went wrong.
"""

from __future__ import annotations

import argparse
import random
import re
import secrets
import time
import warnings
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_gpipe import GPipeStrategy
from tests.ranks import RankError, run_ranks
from tests.training import trainer

WIDTH = 4
LIMIT_S = 30.0
STRUCTURES = ("tensor", "tuple", "dict", "nested", "transposed", "mixed")
KINDS = (
    *("linear", "linear", "in place", "identity"),
    *("dropout", "batch norm", "repeat", "spectral norm", "counter"),
)


@dataclass
class Configuration:
    """What is tried.

    Args:
        seed: All else follows from it.
    """

    seed: int
    stages: int = 1
    replicas: int = 1
    chunks: int = 1
    samples: int = 1
    layers: list[tuple[str, str, bool]] = field(default_factory=list)
    dtype: torch.dtype = torch.float64
    arguments: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    optimizer: str = "SGD"
    around: bool = False
    calls: int = 1
    reads_all: bool = True  # whether the loss reads the outputs of calls before the last
    ties: bool = False  # whether the first and the last layer share a weight
    drops: bool = False  # whether the step draws random numbers
    refusal: str | None = None

    @classmethod
    def random(cls, seed: int) -> Configuration:
        """Draw one."""
        draw = random.Random(seed)
        made = cls(seed)
        made.stages, made.replicas = draw.choice(
            [(1, 1), (2, 1), (2, 1), (3, 1), (3, 1), (4, 1), (4, 1), (1, 2), (2, 2), (2, 2), (1, 3)]
        )
        made.chunks, made.samples = draw.randint(1, 6), draw.randint(1, 9)
        count = draw.randint(made.stages, made.stages + 5)
        plain = draw.random() < 0.6  # nothing that sees micro-batches: equal to a plain Trainer
        kinds = KINDS[:4] if plain else KINDS
        made.layers = [
            (draw.choice(kinds), draw.choice(STRUCTURES), draw.random() < 0.1) for _ in range(count)
        ]
        made.layers.append(("linear", "tensor", False))
        made.dtype = draw.choice([torch.float64, torch.float64, torch.float32])
        made.arguments = {
            "checkpoint": draw.choice(["always", "except_last", "never"]),
            "balance": draw.choice(["flops", "params", "list", "function"]),
            "deferred_batch_norm": draw.random() < 0.8,
            "shard_optimizer_state": seed % 2 == 1,
        }
        is_micro = draw.random() < 0.5
        if is_micro:
            made.arguments["step"] = "micro-batch"
            made.arguments["schedule"] = draw.choice(["auto", "fill_drain", "1f1b", "searched"])
        virtual = draw.choice([1, 1, 2])
        if virtual * made.stages <= len(made.layers):
            made.arguments["virtual_stages"] = virtual
            if virtual > 1 and made.arguments.get("schedule") == "1f1b":
                made.arguments["schedule"] = "interleaved"
        if draw.random() < 0.3:
            made.arguments["checkpoint"] = draw.choice(["auto", 1, 2, 0.5])
            made.arguments["memory_limit"] = "1GB"
        parts = made.stages * made.arguments.get("virtual_stages", 1)
        if made.arguments["balance"] == "list":
            cuts = sorted(draw.sample(range(1, len(made.layers)), parts - 1))
            edges = pairwise([0, *cuts, len(made.layers)])
            made.arguments["balance"] = [after - before for before, after in edges]
        elif made.arguments["balance"] == "function":
            made.arguments["balance"] = cost
        made.options = {
            "accumulate_grad_batches": draw.choice([1, 1, 2]),
            "gradient_clip_val": draw.choice([None, None, 0.05]),
        }
        made.optimizer = draw.choice(["SGD", "AdamW"])
        made.around = draw.random() < 0.4
        made.calls, made.reads_all = draw.choice([1, 1, 1, 2, 3]), draw.random() < 0.5
        made.calls = 1 if is_micro else made.calls
        made.ties, made.drops = draw.random() < 0.2, not plain and draw.random() < 0.3
        smallest = made.samples // min(made.chunks, made.samples)
        if any(kind == "batch norm" for kind, _, _ in made.layers) and smallest == 1:
            made.refusal = "(one|1) value per channel"
        if draw.random() < 0.2:
            made.spoil(draw)
        return made

    def spoil(self, draw: random.Random) -> None:
        """Make it a bad one."""
        ways: list[tuple[dict[str, Any], str]] = [
            ({"chunks": 0}, "chunks must be"),
            ({"checkpoint": "sometimes"}, "checkpoint must be one of"),
            ({"balance": [1] * (len(self.layers) + 1)}, "add up to"),
            ({"balance": [len(self.layers)] * self.stages + [1]}, "add up to"),
            ({"balance": "luck"}, "balance must be one of"),
            ({"backbone": "spine"}, "no such submodule"),
            ({"backbone": "head"}, "must be an nn.Sequential"),
            ({"stages": 5}, "can't be divided into pipelines"),
            ({"micro_batches": 3}, "unexpected keyword"),
        ]
        if self.stages > 1:
            ways.append(({"layers": 1}, "fewer than"))
            ways.append(({"optimizer": "LBFGS"}, "LBFGS needs all parameters"))
        change, self.refusal = draw.choice(ways)
        if "layers" in change:
            self.layers = [("linear", "tensor", False), ("linear", "tensor", False)]
            self.stages, self.replicas = 3, 1
            self.arguments["balance"] = "flops"
        elif "optimizer" in change:
            self.optimizer, self.around = "LBFGS", False
            self.options = {}
        else:
            self.arguments.update(change)

    @property
    def sees_micro_batches(self) -> bool:
        """Whether its weights depend on M, so that only other numbers of stages can be equal."""
        return self.drops or any(kind in KINDS[4:] for kind, _, _ in self.layers)


def cost(layer: nn.Module, value: Any) -> float:
    return 1.0 + sum(p.numel() for p in layer.parameters())


def unpack(value: Any) -> Tensor:
    """The activations, out of any structure."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, dict):
        if "t" in value:
            return value["t"].T
        return value["h"] * value["scale"]
    if isinstance(value, list):
        return torch.where(value[1], value[0], value[0] * 0.5)
    first, rest = value
    if isinstance(rest, Tensor):
        return first + rest
    return first + rest["index"].unsqueeze(1).to(first.dtype) * 0.01


def pack(h: Tensor, structure: str) -> Any:
    if structure == "tuple":
        return h, h.detach().square()
    if structure == "dict":
        return {"h": h, "scale": 0.5, "nothing": None}
    if structure == "nested":
        return h, {"index": torch.arange(len(h), device=h.device) * 0 + 3, "flag": True}
    if structure == "transposed":
        return {"t": h.T}
    if structure == "mixed":
        return [h, h > 0]
    return h


class Block(nn.Module):
    def __init__(self, kind: str, structure: str, frozen: bool) -> None:
        super().__init__()
        self.kind, self.structure = kind, structure
        self.act = nn.LeakyReLU(0.3, inplace=True) if kind == "in place" else nn.Tanh()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH) if kind == "batch norm" else nn.Identity()
        self.drop = nn.Dropout(0.3) if kind == "dropout" else nn.Identity()
        if kind == "spectral norm":
            self.linear = nn.utils.spectral_norm(self.linear)
        if kind == "counter":
            self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        if frozen:
            self.requires_grad_(False)

    def forward(self, value: Any) -> Any:
        h = unpack(value)
        if self.kind == "counter" and self.training:
            self.calls += 1
            h = h * (1 + 0.01 * self.calls)
        for _ in range({"identity": 0, "repeat": 2}.get(self.kind, 1)):
            h = self.linear(self.drop(self.norm(self.act(h))))
        return pack(h, self.structure)


class Module(L.LightningModule):
    def __init__(self, made: Configuration) -> None:
        super().__init__()
        self.made = made
        self.backbone = nn.Sequential(*(Block(*layer) for layer in made.layers))
        self.head = nn.Linear(WIDTH, WIDTH) if made.around else nn.Identity()
        if made.ties:
            self.backbone[0].linear.bias = self.backbone[-1].linear.bias
        self.to(made.dtype)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        h, others = self.head(x), torch.zeros((), dtype=x.dtype)
        for call in range(self.made.calls):
            h = unpack(self.backbone(h))
            if self.made.reads_all and call < self.made.calls - 1:
                others = others + h.clone().square().mean()  # h may be changed in place
        h = self.head(h)
        if self.made.drops:
            h = nn.functional.dropout(h, 0.2, training=self.training)
        return nn.functional.mse_loss(h, y) + others

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        if self.made.optimizer == "LBFGS":
            return torch.optim.LBFGS(self.parameters())
        return getattr(torch.optim, self.made.optimizer)(self.parameters(), lr=0.02)

    def train_dataloader(self) -> Any:
        made = self.made
        generator = torch.Generator().manual_seed(made.seed)
        total = made.samples * made.replicas
        x, y = torch.randn(2, 4 * total, WIDTH, generator=generator, dtype=made.dtype)
        data = TensorDataset(x, y)
        shares = self.trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
        sampler = DistributedSampler(data, shuffle=False, **shares)
        return DataLoader(data, batch_size=total // shares["num_replicas"], sampler=sampler)

    def val_dataloader(self) -> Any:
        return self.train_dataloader()


def train(made: Configuration, stages: int | None) -> dict[str, Tensor]:
    """Train on this rank, and return the weights, and what was logged."""
    warnings.simplefilter("ignore")
    torch.manual_seed(made.seed)
    options = {**made.options, "max_epochs": 2}
    module = Module(made)
    strategy: Any = "auto"
    if stages is not None:
        arguments = {"chunks": made.chunks, "stages": stages, **made.arguments}
        parts = stages * arguments.get("virtual_stages", 1)
        if stages != made.stages and (parts > len(made.layers) or made.seed % 3):
            arguments["virtual_stages"] = 1
            if arguments.get("schedule") == "interleaved":
                arguments["schedule"] = "auto"
        if stages != made.stages and isinstance(arguments["balance"], list):
            arguments["balance"] = "params"
        strategy = GPipeStrategy(**arguments)
    devices = (stages or 1) * (made.replicas if stages else 1)
    run = trainer(devices=devices, strategy=strategy, **options)
    run.fit(module)
    return {**module.state_dict(), **run.callback_metrics}


def try_out(made: Configuration) -> str | None:
    """Returns what is wrong; None: nothing."""
    world = made.stages * made.replicas
    try:
        result = run_ranks(train, world, made, made.stages, timeout_s=LIMIT_S)[0]
    except RankError as error:
        if made.refusal is not None and re.search(made.refusal, str(error)):
            return None
        return f"should {made.refusal or 'train'}, but: {error}"
    if made.refusal is not None:
        return f"should be refused with '{made.refusal}', but was accepted"
    if made.sees_micro_batches:
        expected = run_ranks(train, made.replicas, made, 1, timeout_s=LIMIT_S)[0]
    else:
        expected = run_ranks(train, 1, made, None, timeout_s=LIMIT_S)[0]
    tolerance = 1e-10 if made.dtype == torch.float64 else 1e-4
    try:
        torch.testing.assert_close(result, expected, rtol=0, atol=tolerance)
    except AssertionError as error:
        return f"weights differ: {error}"
    return None


def fuzz(count: int, seed: int) -> list[str]:
    """Try configurations; returns what is wrong with which."""
    wrong, refused, slowest = [], 0, 0.0
    for n in range(count):
        made = Configuration.random(seed * 100_003 + n)
        start = time.monotonic()
        problem = try_out(made)
        slowest = max(slowest, time.monotonic() - start)
        refused += made.refusal is not None
        if problem is not None:
            wrong.append(f"{made}\n{problem}")
            print(wrong[-1], flush=True)
    print(
        f"seed {seed}: {count} configurations, {refused} to be refused, {len(wrong)} wrong,"
        f" slowest {slowest:.1f} s"
    )
    return wrong


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(10**6))
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    raise SystemExit(1 if fuzz(chosen.count, chosen.seed) else 0)
