"""Plans tell what runs will find, and leave no trace."""

from __future__ import annotations

import math
import time
from functools import partial
from typing import Any
from unittest.mock import patch

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_gpipe import GPipeStrategy
from lightning_gpipe.model.alike import signature
from lightning_gpipe.model.run_layer import run_layer
from lightning_gpipe.plan import cost, memory
from lightning_gpipe.plan.planner import Planner
from lightning_gpipe.plan.plans import Plan, Plans
from lightning_gpipe.plan.settings import Settings
from lightning_gpipe.schedule.costs import Costs
from lightning_gpipe.schedule.gpipe import fill_drain
from lightning_gpipe.schedule.simulate import simulate
from lightning_gpipe.tensors.tree import Tree
from tests import expected_memory, step_models
from tests.ranks import run_ranks
from tests.training import train


def plans(module: Any = None, strategy: GPipeStrategy | None = None, **options: Any) -> Plans:
    module = expected_memory.Transformer() if module is None else module
    batch = next(iter(module.train_dataloader()))
    return (strategy or GPipeStrategy()).plan(module, batch, **{"devices": 2, **options})


def one(**options: Any) -> Plan:
    """The only layout that is compared."""
    options = {"stages": 2, "chunks": 4, "virtual_stages": 1, "checkpoint": "always", **options}
    listed = ("stages", "chunks", "virtual_stages", "checkpoint")
    given = {name: [value] if name in listed else value for name, value in options.items()}
    (plan,) = plans(**given).all
    return plan


LAYOUTS: list[tuple[str, dict[str, Any]]] = [
    ("Transformer", {"checkpoint": "except_last", "step": "mini-batch"}),
    ("ConvNet", {"checkpoint": 2, "step": "micro-batch", "schedule": "1f1b"}),
    ("Transformer", {"checkpoint": "never", "step": "micro-batch", "virtual_stages": 2}),
]


def found_in_runs() -> list[Any]:
    found = []
    for name, options in LAYOUTS:
        strategy = GPipeStrategy(4, stages=2, **options)

        class Watch(L.Callback):
            def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
                self.expected = trainer.strategy._run.pipeline._state.memory

        module, watch = expected_memory.MODELS[name](), Watch()
        train(module, max_epochs=1, devices=2, strategy=strategy, callbacks=[watch])
        assert strategy.partition is not None
        found.append((strategy.partition.sizes, watch.expected.most))
    return found


def test_a_plan_is_what_a_run_finds() -> None:
    (found, _) = run_ranks(found_in_runs, 2)
    for (name, options), (sizes, memories) in zip(LAYOUTS, found, strict=True):
        strategy = GPipeStrategy(4, stages=2, **options)
        checkpoint = [options["checkpoint"]]
        module = expected_memory.MODELS[name]()
        virtual = [options.get("virtual_stages", 1)]
        given = {"checkpoint": checkpoint, "virtual_stages": virtual, "device": "cpu"}
        (plan,) = plans(module, strategy, **given).all
        # a run doesn't know before its first step what that computes outside the backbone
        batch = next(iter(module.train_dataloader()))
        x = module.embedding(batch[0])
        (without,) = strategy.plan(module, input=x, devices=2, **given).all
        assert [s.memory.of_micro_batches for s in without.stages] == [
            m.of_micro_batches for m in memories
        ], name
        planned = [stage.memory for stage in plan.stages]
        kept = [p.kept - m.kept for p, m in zip(planned, memories, strict=True)]
        if options["step"] == "mini-batch":
            assert kept == [0, 0]
        else:  # a run doesn't know before its first step who will hold what is outside
            inside = {id(p) for p in module.backbone.parameters()}
            outside = [p for p in module.parameters() if id(p) not in inside]
            weights = sum(p.nbytes for p in outside)  # as much for gradients and each of two states
            assert kept == [4 * weights + 4 * len(outside), 0]  # and its steps, counted by tensor
        parts = sorted((part for stage in plan.stages for part in stage.layers), key=min)
        assert tuple(map(len, parts)) == sizes


@pytest.mark.parametrize("name", ["Language", "Tied"])
def test_what_stands_before_and_behind_the_backbone_is_held_there(name: str) -> None:
    """Of a weight that is the embedding's and the head's both stages hold one."""
    module = getattr(step_models, name)()
    strategy = GPipeStrategy(4, stages=2, step="micro-batch")
    layouts = {"virtual_stages": [1], "checkpoint": ["never"]}
    stages = plans(module, strategy, **layouts).all[0].stages
    layers = [*module.backbone]
    outside = ([module.embed, module.positions], [module.norm, module.head])
    for stage, around in zip(stages, outside, strict=True):
        held = nn.ModuleList([*around, *(layers[i] for i in stage.layers[0])])
        assert stage.memory.weights == sum(p.nbytes for p in held.parameters())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"devices": -2}, r"devices must be a whole number from 1, got devices=-2"),
        ({"devices": [0, 1]}, r"devices must be .* got devices=\[0, 1\]"),
        ({"chunks": 8}, r"chunks must be a list of what is compared, got chunks=8"),
        ({"chunks": ["auto"]}, r"chunks must be whole numbers from 1, got chunks=\['auto'\]"),
        ({"stages": [0]}, r"stages must be whole numbers"),
        ({"checkpoint": "always"}, r"checkpoint must be a list"),
        ({"checkpoint": ["sometimes"]}, r"checkpoint must be one of .* got checkpoint='sometimes'"),
        ({"memory": "16 gigs"}, r"a number above 0 with its unit, .* such as '16GB'"),
        ({"memory": "16"}, r"a number above 0 with its unit"),
        ({"flops": 0}, r"flops must be operations in a second"),
        ({"flops": math.inf}, r"flops must be operations in a second"),
        ({"flops": "1e14"}, r"flops must be operations in a second"),
        ({"measured": "no"}, r"measured must be True or False"),
        ({"device": "meta"}, r"device must be one that computes"),
        ({"device": "mps"}, r"Only a machine that has a device of this kind can tell"),
        ({"device": ["cpu"]}, r"device must be one of torch"),
        ({"optimizers": torch.optim.SGD([torch.ones(1)])}, r"optimizers must be a list of opt"),
        ({"optimizers": [None]}, r"optimizers must be a list of optimizers"),
    ],
)
def test_a_wrong_argument_is_told(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plans(**options)


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_optimizers_that_step_other_parameters_are_refused(precision: Any) -> None:
    module, strategy = expected_memory.Transformer(), GPipeStrategy()
    L.Trainer(accelerator="cpu", devices=1, strategy=strategy, precision=precision, logger=False)
    own, other = (torch.optim.AdamW(each.parameters()) for each in (module, nn.Linear(2, 2)))
    if precision == "32-true":
        plan = plans(module, strategy, optimizers=[own]).all[0]
        assert all(stage.memory.optimizer for stage in plan.stages)
        own = other
    with pytest.raises(ValueError, match="step no parameter of Transformer as a run has it"):
        plans(module, strategy, optimizers=[own])


def test_what_is_no_module_is_told() -> None:
    with pytest.raises(ValueError, match="must be an object of a LightningModule"):
        GPipeStrategy().plan(nn.Linear(1, 1), torch.ones(1, 1), devices=2)  # type: ignore[arg-type]


def test_a_module_is_left_as_it_was() -> None:
    for name in ("ConvNet", "GPT-2"):
        module = expected_memory.MODELS[name]()
        before = {key: (id(t), t.clone()) for key, t in module.state_dict(keep_vars=True).items()}
        kinds = [type(part) for part in module.modules()]
        attributes = [dict(vars(part)) for part in module.modules()]
        batch = next(iter(module.train_dataloader()))
        state = torch.get_rng_state()
        GPipeStrategy().plan(module, batch, devices=2, chunks=[2, 4])
        assert torch.equal(torch.get_rng_state(), state)
        assert [type(part) for part in module.modules()] == kinds
        assert [dict(vars(part)) for part in module.modules()] == attributes
        for key, t in module.state_dict(keep_vars=True).items():
            assert id(t) == before[key][0]
            assert torch.equal(t, before[key][1])
            assert t.grad is None


def test_more_stages_hold_fewer_weights_and_less_recompute_holds_more() -> None:
    by_stages = [one(stages=k, devices=4) for k in (1, 2, 4)]
    weights = [max(stage.memory.weights for stage in plan.stages) for plan in by_stages]
    assert weights == sorted(set(weights), reverse=True)
    assert [plan.replicas for plan in by_stages] == [4, 2, 1]
    modes = [one(checkpoint=mode) for mode in ("always", "except_last", "never")]
    held = [max(stage.memory.activations for stage in plan.stages) for plan in modes]
    assert held == sorted(held)
    assert held[0] < held[-1] / 2
    times = [plan.length for plan in modes]
    assert times == sorted(times, reverse=True)


def test_a_step_takes_what_the_simulator_says() -> None:
    """Of four layers on two stages; the input of the first wants no gradient."""
    module = nn.Sequential(nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(4))))
    settings = Settings(4, 2, None, "flops", "always", True)
    layers, x = [*module[0]], torch.ones(16, 8)
    cpu = torch.device("cpu")
    planner = Planner(module, "0", layers, run_layer, x, None, cpu, print, rate=1e6)
    plan = planner.plan(settings)
    product, out = 2 * 4 * 8 * 8, 4 * 8
    forward = [2 * (product + out)] * 2
    backward = [3 * product + 2 * out, 4 * product + 2 * out]
    simulated = simulate(fill_drain((0, 1), 4, "always"), Costs.of(forward, backward))
    assert plan.length == pytest.approx(simulated.length)
    assert plan.bubble == pytest.approx(simulated.bubble)
    assert plan.seconds == pytest.approx(simulated.length / 1e6)
    assert plan.sent == 16 * 8 * 4 * 2  # the boundary and its gradient
    assert plan.stages[0].memory.optimizer is None
    assert "the optimizer's state, which isn't known" in str(plan)


def test_the_best_comes_first_and_what_does_not_fit_last() -> None:
    found = plans(devices=4, memory="6MB", chunks=[4, 8])
    fitting = [plan.fits for plan in found.all]
    assert fitting == sorted(fitting, reverse=True)
    assert 0 < sum(fitting) < len(fitting)
    assert found.best is found.all[0]
    speeds = [plan.length_per_batch for plan in found.all if plan.fits]
    assert speeds == sorted(speeds)
    limit = 6 * 10**6
    assert all((plan.most <= limit) == plan.fits for plan in found.all)
    nothing = plans(memory="10kB")
    assert nothing.best is None
    assert "0 of" in str(nothing)
    assert "It does not fit: stage" in str(nothing.all[0])


class Unbuilt(L.LightningModule):
    """Builds its layers in configure_model."""

    def __init__(self) -> None:
        super().__init__()
        self.net: nn.Sequential | None = None

    def configure_model(self) -> None:
        if self.net is None:
            self.net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))

    def training_step(self, batch: Tensor) -> Tensor:
        return self.net(batch).sum()  # type: ignore[misc]

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters())
        return {
            "optimizer": optimizer,
            "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1),
        }


def test_an_unbuilt_module_stays_unbuilt() -> None:
    module = Unbuilt()
    found = GPipeStrategy(2).plan(module, torch.empty(4, 8, device="meta"), devices=2)
    assert module.net is None
    assert not [*module.parameters()]
    assert found.all[0].stages[0].memory.optimizer


class Reads(L.LightningModule):
    """Its step reads a value before the backbone."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch * batch.max().item()).sum()


def test_a_step_that_needs_values_is_told_what_to_do() -> None:
    x = torch.ones(4, 8)
    place = r"test_planner\.py:\d+ \(training_step\)"
    message = rf"before it called the backbone 'net'.*, at .*{place}.*input="
    with pytest.raises(ValueError, match=message) as caught:
        GPipeStrategy().plan(Reads(), x, devices=2)
    assert "values" in str(caught.value)
    assert GPipeStrategy().plan(Reads(), input=x, devices=2).best is not None
    with pytest.raises(ValueError, match="no example_input_array: give a batch"):
        GPipeStrategy().plan(Reads(), devices=2)
    with pytest.raises(ValueError, match="batch and input are both given"):
        GPipeStrategy().plan(Reads(), x, input=x, devices=2)
    with pytest.raises(ValueError, match=r"Nothing can be planned: .* has 2 layers, fewer than 4"):
        GPipeStrategy().plan(Reads(), input=x, devices=4, stages=[4])
    with pytest.raises(ValueError, match=r"no number of stages in \[3\] divides 4 devices"):
        GPipeStrategy(stages=3).plan(Reads(), input=x, devices=4)


class Pair(nn.Module):
    """Hands a tensor through."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.linear, self.factor = nn.Linear(8, 8), factor

    def forward(self, value: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, mask = value
        return self.linear(x) * mask * self.factor, mask


def layers_of_all_kinds() -> dict[str, tuple[list[nn.Module], Any]]:
    shared = nn.Linear(8, 8)
    kinds = [lambda: nn.Linear(8, 8), lambda: nn.ReLU(True), nn.Flatten, nn.Identity, nn.Tanh]
    return {
        "Transformer": ([*expected_memory.Transformer().backbone], torch.randn(4, 32, 64)),
        "ConvNet": ([*expected_memory.ConvNet().backbone], torch.randn(4, 3, 24, 24)),
        "in place": ([kind() for _ in range(4) for kind in kinds], torch.randn(4, 8)),
        "tuples": ([Pair(1.0) for _ in range(4)], (torch.randn(4, 8), torch.randn(4, 8))),
        "shared": ([shared, nn.Tanh(), shared, nn.Tanh(), nn.Linear(8, 8)], torch.randn(4, 8)),
    }


@pytest.mark.parametrize("name", layers_of_all_kinds())
def test_one_layer_speaks_for_those_that_do_the_same(name: str) -> None:
    layers, x = layers_of_all_kinds()[name]

    def look() -> Any:
        return memory.layer_memories(layers, run_layer, x), cost.layer_flops(layers, run_layer, x)

    at_once = look()
    with (
        patch.object(memory, "signature", lambda *_: None),
        patch.object(cost, "signature", lambda *_: None),
    ):
        assert look() == at_once


class Placed(nn.Identity):
    """Knows its place, which it may use."""

    def __init__(self, place: int) -> None:
        super().__init__()
        self.layer_idx = place


def test_hugging_faces_layers_do_the_same_in_any_place() -> None:
    from transformers import GPT2Config
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block

    config = GPT2Config(n_embd=8, n_head=2, n_layer=2)
    for kind, alike in ((partial(GPT2Block, config), True), (Placed, False)):
        given = Tree.of(torch.ones(1, 2, 8), "The input")
        first, second = (signature(kind(i), run_layer, i, given) for i in range(2))
        assert (first == second) == alike


class Repeats(nn.Module):
    """Does as much as a number says that no other layer has to share."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times, self.linear = times, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = self.linear(x)
        return x


def test_layers_with_other_attributes_do_something_else() -> None:
    first, second, third = cost.layer_flops(
        [Repeats(1), Repeats(2), Repeats(1)], run_layer, torch.ones(4, 8, requires_grad=True)
    )
    assert first == third
    assert second.forward > 1.5 * first.forward


class Giant(L.LightningModule):
    """A decoder of 80 layers, with 83.9 billion parameters."""

    def __init__(self) -> None:
        super().__init__()
        width = 9312
        self.embedding = nn.Embedding(32000, width)
        self.blocks = nn.Sequential(
            *(nn.TransformerEncoderLayer(width, 96, 4 * width, batch_first=True) for _ in range(80))
        )
        self.head = nn.Linear(width, 32000, bias=False)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.head(self.blocks(self.embedding(batch))).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_giant_model_is_planned_in_seconds() -> None:
    begin = time.perf_counter()
    with torch.device("meta"):
        module, batch = Giant(), torch.empty(32, 1024, dtype=torch.long)
    assert round(sum(p.numel() for p in module.parameters()) / 1e8) == 839
    plans = GPipeStrategy().plan(
        module.to(torch.bfloat16), batch, devices=128, memory="15GB", device="cpu"
    )
    assert time.perf_counter() - begin < 30
    assert plans.best is None
    assert "It does not fit: stage 0 holds more than 15.0 GB" in str(plans.all[0])
    assert plans.all[0].depth is not None
    assert 40 < (plans.all[0].depth.most or 0) < 80
