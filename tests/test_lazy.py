"""Modules that each process builds a part of."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
import torchmetrics
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.distributions import Independent, Normal
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_gpipe import GPipeStrategy
from lightning_gpipe.cli import main
from lightning_gpipe.model.lazy import LazyModule, children_first, tensors_on_meta
from lightning_gpipe.model.recording import Recording
from tests import models
from tests.ranks import RankError, run_ranks
from tests.training import trainer


class Computed(nn.Module):
    """Values that don't come from reset_parameters: a table, a random parameter, an attribute."""

    def __init__(self) -> None:
        super().__init__()
        table = torch.zeros(models.WIDTH, models.WIDTH)
        steps = torch.arange(models.WIDTH).unsqueeze(1) / torch.tensor(7.0)
        table[:, 0::2] = torch.sin(steps * torch.tensor([1.0, 2.0, 3.0]))
        self.register_buffer("table", table)
        self.scale = nn.Parameter(torch.randn(models.WIDTH) * 0.02 + 1)
        self.shift = torch.full((models.WIDTH,), 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.table + torch.eye(models.WIDTH, dtype=x.dtype)) * self.scale + self.shift


def by_data() -> nn.Module:
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Embedding(9, 4, padding_idx=0))
    for parameter in layers.parameters():
        parameter.data.normal_(0, 0.3)
    nn.init.orthogonal_(layers[0].weight)
    nn.init.trunc_normal_(layers[1].weight, std=2.0)
    with torch.no_grad():
        layers[0].weight.t()[1:3].uniform_(2, 3)
    layers[1].bias.data = torch.ones(4)
    return layers


def recurrent() -> nn.Module:
    return nn.Sequential(nn.LSTM(4, 4), nn.MultiheadAttention(4, 2), nn.BatchNorm1d(3))


def parametrized() -> nn.Module:
    weighted = nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))
    return nn.Sequential(weighted, nn.utils.parametrizations.spectral_norm(nn.Linear(5, 3)))


def with_generator() -> nn.Module:
    layer = nn.Linear(3, 5)
    generator = torch.Generator().manual_seed(5)
    nn.init.normal_(layer.weight, generator=generator)
    nn.init.uniform_(layer.bias, generator=generator)
    return layer


def tied() -> nn.Module:
    layers = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5, bias=False))
    layers[1].weight = layers[0].weight
    return layers


def loaded() -> nn.Module:
    layer = nn.Linear(2, 2)
    layer.load_state_dict({"weight": torch.tensor([[1.0, 2.0], [3.0, 4.0]]), "bias": torch.ones(2)})
    return layer


def gpt() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    small = {"n_layer": 2, "n_embd": 8, "n_head": 2, "vocab_size": 11, "bos_token_id": 1}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**small, eos_token_id=1))


def resnet() -> nn.Module:
    return pytest.importorskip("torchvision").models.resnet18(num_classes=3)


CONSTRUCTORS = (
    *(Computed, by_data, recurrent, parametrized, with_generator, tied, loaded, gpt, resnet),
)


@pytest.mark.parametrize("construct", CONSTRUCTORS)
def test_recorded_values_are_those_of_an_ordinary_run(construct: Callable[[], nn.Module]) -> None:
    torch.manual_seed(3)
    expected, following = construct(), torch.rand(3)
    root = nn.Module()
    torch.manual_seed(3)
    with LazyModule.of(root).recording(root, torch.device("cpu")):
        root.layers = construct()
    torch.testing.assert_close(torch.rand(3), following, rtol=0, atol=0)
    assert next(tensors_on_meta(root.modules()), None) is not None
    values = LazyModule.of(root).values(children_first(root), 0, "it")
    names = {**dict(expected.named_parameters()), **dict(expected.named_buffers())}
    for name, tensor in (*root.layers.named_parameters(), *root.layers.named_buffers()):
        value = values[id(tensor)] if tensor.is_meta else tensor
        torch.testing.assert_close(value, names[name].detach(), rtol=0, atol=0, msg=name)
        assert value.stride() == names[name].stride()
        assert value.dtype == names[name].dtype


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_default_type_is_that_of_the_constructor(dtype: torch.dtype) -> None:
    def construct() -> nn.Parameter:
        return nn.Parameter(torch.randn(4) * torch.linspace(1, 2, 4) + torch.ones(4) / 3)

    root = nn.Module()
    torch.set_default_dtype(dtype)
    try:
        torch.manual_seed(3)
        expected = construct()
        torch.manual_seed(3)
        with LazyModule.of(root).recording(root, torch.device("cpu")):
            root.weight = construct()
    finally:
        torch.set_default_dtype(torch.float32)
    (value,) = LazyModule.of(root).values(children_first(root), 0, "it").values()
    torch.testing.assert_close(value, expected.detach(), rtol=0, atol=0)


def test_attributes_that_are_tensors_have_their_values() -> None:
    root = nn.Module()
    with LazyModule.of(root).recording(root, torch.device("cpu")):
        root.layers = Computed()
    assert root.layers.table.is_meta
    assert root.layers.shift.tolist() == [0.5] * models.WIDTH


def test_a_real_tensor_is_not_written_to_without_values() -> None:
    root, real = nn.Module(), torch.zeros(3)
    with (
        pytest.raises(RuntimeError, match="writes to a tensor on the host"),
        LazyModule.of(root).recording(root, torch.device("cpu")),
    ):
        real.copy_(torch.ones(3))


def test_recording_takes_no_memory_of_what_is_built() -> None:
    recording = Recording(draws=False)
    with recording.building():
        layers = [nn.Linear(1 << 20, 1 << 20) for _ in range(3)]  # 12 TiB
    assert all(layer.weight.is_meta for layer in layers)


class Lazy(models.Around):
    """Its layers are built in configure_model, unless they stand on meta before."""

    how = "configure_model"

    def build(self) -> None:
        self.is_built = False
        if self.how == "plain":
            self.configure_model()
        elif self.how == "meta":
            with torch.device("meta"):
                self.configure_model()

    def configure_model(self) -> None:
        if self.is_built:
            return
        self.is_built = True
        super().build()
        self.backbone.append(nn.BatchNorm1d(models.WIDTH))
        self.backbone.append(nn.Dropout(0.2))
        self.backbone.append(nn.Linear(models.WIDTH, models.WIDTH))
        self.backbone[-1].weight = self.backbone[2].weight
        if self.how != "meta":
            self.backbone.append(Computed())
        self.double()


class InConfigureModel(Lazy):
    pass


class Plain(Lazy):
    how = "plain"


class OnMeta(Lazy):
    how = "meta"


class Hooked(Lazy):
    """A hook that is called with every module."""

    def init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.3)
            nn.init.ones_(module.bias)
        elif isinstance(module, Computed):
            nn.init.uniform_(module.scale)


class Values(nn.Module):
    """Needs values in its constructor."""

    def __init__(self) -> None:
        super().__init__()
        weight = torch.rand(models.WIDTH)
        self.scale = nn.Parameter(torch.from_numpy(weight.numpy()).double())

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class NeedsValues(InConfigureModel):
    def configure_model(self) -> None:
        if not self.is_built:
            super().configure_model()
            self.backbone.append(Values())


class PlainNeedsValues(NeedsValues):
    how = "plain"


class Viewed(InConfigureModel):
    """Its weights are initialized through views of them, and computed with."""

    def configure_model(self) -> None:
        if self.is_built:
            return
        super().configure_model()
        first, second = self.backbone[0], self.backbone[2]
        nn.init.orthogonal_(first.weight)
        with torch.no_grad():
            first.weight[0] = 0
            first.bias[1:3].fill_(1.0)
            second.weight.view(-1).mul_(2.0)
        self.register_buffer("norm", second.bias.norm().detach())
        self.table = nn.Embedding(5, models.WIDTH, padding_idx=0).double()


class PlainViewed(Viewed):
    how = "plain"


KINDS = {
    **{kind.__name__: kind for kind in (InConfigureModel, Plain, OnMeta, Hooked, NeedsValues)},
    "PlainNeedsValues": PlainNeedsValues,
    "Viewed": Viewed,
    "PlainViewed": PlainViewed,
}


class KeepFirst(L.Callback):
    """Keeps the values that a stage begins with."""

    def __init__(self) -> None:
        self.values: dict[str, Tensor] = {}

    def on_before_optimizer_step(self, _: Any, module: L.LightningModule, *__: Any) -> None:
        if not self.values:
            self.values = own(module)


def own(module: nn.Module) -> dict[str, Tensor]:
    """What a rank holds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = module.state_dict()
    return {name: value.detach().clone() for name, value in state.items() if not value.is_meta}


def fit(
    kind: str, stages: int | None, steps: int = 3, balance: str = "flops", **options: Any
) -> tuple[dict[str, Tensor], dict[str, Tensor], list[str]]:
    """Train, and return the weights at the first step and at the end."""
    torch.manual_seed(11)
    module, keep = KINDS[kind](), KeepFirst()
    if stages:
        options["strategy"] = GPipeStrategy(2, stages=stages, balance=balance)
        options["devices"] = stages
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer(max_steps=steps, callbacks=[keep], **options).fit(module)
    told = [str(warning.message) for warning in caught]
    return keep.values, own(module), [text for text in told if "meta device" in text]


def together(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The whole of parts that ranks hold; what several hold is the same."""
    whole: dict[str, Tensor] = {}
    for part in parts:
        for name, value in part.items():
            torch.testing.assert_close(value, whole.setdefault(name, value), rtol=0, atol=0)
    return whole


@pytest.mark.parametrize("kind", ["InConfigureModel", "OnMeta", "Hooked", "NeedsValues"])
def test_initial_weights_are_the_same_for_every_number_of_stages(kind: str) -> None:
    expected, trained, _ = run_ranks(fit, 1, kind, 1)[0]
    for stages, balance in ((2, "flops"), (3, "params"), (4, "flops")):
        found = run_ranks(fit, stages, kind, stages, 3, balance)
        begun = together([first for first, _, _ in found])
        assert begun.keys() == expected.keys()
        for name, value in begun.items():
            torch.testing.assert_close(value, expected[name], rtol=0, atol=0, msg=name)
        ended = together([last for _, last, _ in found])
        for name, value in ended.items():
            torch.testing.assert_close(value, trained[name], rtol=0, atol=1e-12, msg=name)


def test_layers_on_meta_are_initialized_by_seeds_of_their_own() -> None:
    """By hand: a layer's modules are reset after ``torch.manual_seed(seed + 1 + layer)``."""

    def reset(parts: list[nn.Module], seed: int) -> None:
        torch.manual_seed(seed)
        for part in parts:
            if hasattr(part, "reset_parameters"):
                part.reset_parameters()

    module = Plain()
    del module.backbone[-1]  # which no reset_parameters computes
    inside = {*module.backbone.modules()}
    reset([part for part in module.modules() if part not in inside], 11)
    for index in reversed(range(len(module.backbone))):  # a shared weight is the first layer's
        reset([*module.backbone[index].modules()], 11 + 1 + index)
    _equal_weights(run_ranks(fit, 2, "OnMeta", 2), own(module))


@pytest.mark.parametrize(
    ("plain", "kind"), [("Plain", "InConfigureModel"), ("PlainViewed", "Viewed")]
)
def test_a_module_is_built_as_in_an_ordinary_run(plain: str, kind: str) -> None:
    first, _, _ = fit(plain, None)
    _equal_weights(run_ranks(fit, 2, kind, 2), first)


def test_a_constructor_that_needs_values_runs_on_the_host() -> None:
    first, _, _ = fit("PlainNeedsValues", None)
    found = run_ranks(fit, 2, "NeedsValues", 2)
    assert "numpy" in "".join(found[0][2])
    _equal_weights(found, first)


def _equal_weights(found: list[Any], first: dict[str, Tensor]) -> None:
    """Compare what stages begin with; the statistics of batch norm have seen micro-batches."""
    begun = together([begun for begun, _, _ in found])
    assert begun.keys() == first.keys()
    for name, value in begun.items():
        if "running" not in name and "batches" not in name:
            torch.testing.assert_close(value, first[name], rtol=0, atol=0, msg=name)


class Predicting(InConfigureModel):
    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(*batch))


def again(stages: int, path: str, step: str) -> tuple[Any, ...]:
    """Train, save, predict and validate, train on, and ask for the whole module."""
    torch.manual_seed(11)
    module = Predicting()
    strategy = GPipeStrategy(2, stages=stages, step=step)  # type: ignore[arg-type]
    run = trainer(max_epochs=1, limit_train_batches=3, strategy=strategy, devices=stages)
    data = module.train_dataloader()
    run.fit(module)
    held = own(module)
    run.save_checkpoint(path)
    predicted = torch.cat(run.predict(module, data))
    (values,) = run.validate(module, data, verbose=False)
    second = trainer(
        max_epochs=1,
        limit_train_batches=3,
        strategy=GPipeStrategy(2, stages=stages, step=step),  # type: ignore[arg-type]
        devices=stages,
    )
    second.fit(module)
    second.strategy.restore_module()
    return held, predicted, values["val_loss"], own(module)


@pytest.mark.parametrize("step", ["mini-batch", "micro-batch"])
def test_after_a_run_each_rank_goes_on_with_its_part(step: str, tmp_path: Path) -> None:
    one, two = str(tmp_path / "one.ckpt"), str(tmp_path / "two.ckpt")
    held, predicted, value, ended = run_ranks(again, 1, 1, one, step)[0]
    found = run_ranks(again, 3, 3, two, step)
    for rank, (own_part, outputs, loss, whole) in enumerate(found):
        assert own_part.keys() < held.keys()
        assert ("backbone.4.weight" in own_part) == (rank == 1)
        torch.testing.assert_close(outputs, predicted, rtol=0, atol=1e-12)
        assert loss == pytest.approx(value, abs=1e-12)
        assert whole.keys() == ended.keys()
        for name, tensor in whole.items():
            torch.testing.assert_close(tensor, ended[name], rtol=0, atol=1e-12, msg=name)
    saved, expected = (torch.load(path, weights_only=False) for path in (two, one))
    for name, tensor in saved["state_dict"].items():
        torch.testing.assert_close(tensor, expected["state_dict"][name], rtol=0, atol=1e-12)
    states, others = (file["optimizer_states"][0]["state"] for file in (saved, expected))
    assert states.keys() == others.keys()
    for key, state in states.items():
        torch.testing.assert_close(state["exp_avg"], others[key]["exp_avg"], rtol=0, atol=1e-12)


class Saves(L.Callback):
    """Saves before the first step."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_start(self, run: L.Trainer, *_: Any) -> None:
        run.save_checkpoint(self.path)


def without_a_step(path: str, is_sharded: bool) -> tuple[int, int]:
    """Train and save, resume and save before the first step, and again where none is left."""
    for name, source, steps in ("one", None, 3), ("two", "one", 4), ("three", "one", 3):
        torch.manual_seed(11)
        strategy = GPipeStrategy(2, save_distributed_checkpoint=is_sharded)
        saves = [Saves(f"{path}/before_{name}")]
        run = trainer(max_steps=steps, strategy=strategy, devices=2, callbacks=saves)
        run.fit(Predicting(), ckpt_path=source and f"{path}/{source}")
        run.save_checkpoint(f"{path}/{name}")
    return run.global_step, sum(p.is_meta for p in run.lightning_module.parameters())


@pytest.mark.parametrize("is_sharded", [False, True])
def test_nothing_is_lost_without_a_step(is_sharded: bool, tmp_path: Path) -> None:
    found = run_ranks(without_a_step, 2, str(tmp_path), is_sharded)
    assert all(step == 3 and missing for step, missing in found)  # each has its part
    files = [tmp_path / name for name in ("one", "before_two", "three")]
    if is_sharded:
        for index, folder in enumerate(files):
            main(["consolidate", str(folder), str(tmp_path / f"{index}.ckpt")])
            files[index] = tmp_path / f"{index}.ckpt"
    expected, *others = (torch.load(path, weights_only=False) for path in files)
    for other in others:
        torch.testing.assert_close(other["state_dict"], expected["state_dict"], rtol=0, atol=0)
        torch.testing.assert_close(
            other["optimizer_states"], expected["optimizer_states"], rtol=0, atol=0
        )


def resume(kind: str, stages: int, path: str) -> dict[str, Tensor]:
    torch.manual_seed(4)  # of no use: all values come from the file
    module = KINDS[kind]()
    strategy = GPipeStrategy(2, stages=stages)
    trainer(max_epochs=2, limit_train_batches=3, strategy=strategy, devices=stages).fit(
        module, ckpt_path=path
    )
    return own(module)


def test_a_run_goes_on_from_a_file(tmp_path: Path) -> None:
    path = str(tmp_path / "it.ckpt")
    run_ranks(again, 1, 1, path, "mini-batch")
    expected = run_ranks(resume, 1, "Plain", 1, path)[0]
    for kind in ("InConfigureModel", "Hooked"):
        for name, value in together(run_ranks(resume, 2, kind, 2, path)).items():
            torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-12, msg=name)


class Uninitialized(OnMeta):
    def configure_model(self) -> None:
        if not self.is_built:
            super().configure_model()
            self.backbone.append(Computed())


class InitializesAll(OnMeta):
    def init_weights(self) -> None:
        for parameter in self.parameters():
            nn.init.ones_(parameter)


KINDS |= {"Uninitialized": Uninitialized, "InitializesAll": InitializesAll}


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        ("Uninitialized", "'scale' of Computed in 'backbone.9' .* init_weights"),
        ("InitializesAll", "InitializesAll initializes the whole module"),
    ],
)
def test_what_can_not_be_initialized_is_refused(kind: str, what: str) -> None:
    with pytest.raises(RankError, match=what):
        run_ranks(fit, 2, kind, 2)


def other_stages() -> None:
    module = InConfigureModel()
    for stages in (2, 1):
        strategy = GPipeStrategy(2, stages=stages)
        trainer(max_steps=1, strategy=strategy, devices=2).fit(module)


def test_other_stages_after_a_run_are_refused() -> None:
    with pytest.raises(RankError, match=r"one of 2 stages .* since an earlier run"):
        run_ranks(other_stages, 2)


class Replicated(InConfigureModel):
    """The same mean over all replicas, with a module that does the same in each of them."""

    def configure_model(self) -> None:
        if not self.is_built:
            self.is_built = True
            models.Around.build(self)
            self.double()

    def train_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(7)
        x, y = torch.randn(2, 24, models.WIDTH, generator=generator, dtype=torch.float64)
        data, replicas = TensorDataset(x, y), getattr(self.trainer.strategy, "replicas", 1)
        if replicas == 1:
            return DataLoader(data, batch_size=8)
        # every replica has its share of each batch, so that the gradients are the same
        sampler = DistributedSampler(data, shuffle=False, **self.trainer.distributed_sampler_kwargs)
        return DataLoader(data, batch_size=8 // replicas, sampler=sampler)


class PlainReplicated(Replicated):
    how = "plain"


KINDS |= {"Replicated": Replicated, "PlainReplicated": PlainReplicated}


def part(
    kind: str, stages: int | None, epochs: int, folder: str, ckpt_path: str | None, **options: Any
) -> dict[str, Tensor]:
    """Train up to an epoch, save after each, and return what this rank holds."""
    torch.manual_seed(11)
    module = KINDS[kind]()
    if stages:
        options = {"strategy": GPipeStrategy(2, stages=stages, **options), "devices": 4}
    saves = ModelCheckpoint(folder, "{epoch}", save_top_k=-1)
    run = trainer(max_epochs=epochs, callbacks=[saves], enable_checkpointing=True, **options)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The dirpath has changed")
        run.fit(module, ckpt_path=ckpt_path)
    if stages:
        run.save_checkpoint(f"{folder}/after.ckpt")
    return own(module)


def _parts(*arguments: Any) -> list[dict[str, Tensor]]:
    return run_ranks(_part_with, 4, *arguments)


def _part_with(options: dict[str, Any], *arguments: Any) -> dict[str, Tensor]:
    return part(*arguments, **options)


SHARDED = {"save_distributed_checkpoint": True}


def test_parts_are_saved_and_loaded_where_they_are_held(tmp_path: Path) -> None:
    expected = part("PlainReplicated", None, 4, str(tmp_path / "plain"), None)
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    _parts(SHARDED, "Replicated", 4, 1, one, None)
    shares_out = {**SHARDED, "shard_optimizer_state": True, "step": "micro-batch"}
    found = _parts(shares_out, "Replicated", 2, 2, two, f"{one}/epoch=0.ckpt")
    assert all(len(own_part) < len(expected) for own_part in found)
    # what is saved after the run comes from all ranks
    found = _parts({"virtual_stages": 1}, "Replicated", 2, 3, one, f"{two}/after.ckpt")
    together(found)
    main(["consolidate", f"{two}/after.ckpt", str(tmp_path / "whole.ckpt")])
    whole = part("PlainReplicated", None, 4, str(tmp_path / "on"), str(tmp_path / "whole.ckpt"))
    file = part("PlainReplicated", None, 4, str(tmp_path / "file"), f"{one}/after.ckpt")
    for name, value in expected.items():
        torch.testing.assert_close(whole[name], value, rtol=0, atol=1e-10, msg=name)
        torch.testing.assert_close(file[name], value, rtol=0, atol=1e-10, msg=name)


FILLED: dict[str, Callable[[Tensor], Any]] = {
    "drawn": lambda t: t.normal_(),
    "set": lambda t: nn.init.constant_(t, 3),
    "by another name": lambda t: torch.eye(4, out=t),
    "copied": lambda t: t.copy_(torch.ones(4, 4)),
    "in two steps": lambda t: t.zero_()[1:].uniform_(),
}
UNFILLED: dict[str, Callable[[Tensor], Any]] = {
    "left": lambda t: None,
    "in part": lambda t: t[1:].normal_(),
    "of itself": lambda t: t.mul_(2),
    "of another": lambda t: t.copy_(torch.empty(4, 4)),
}


class Measured(models.Around):
    """Metrics, and a layer with a table in a private attribute, built beside the layers."""

    def build(self) -> None:
        pass

    def configure_model(self) -> None:
        if not hasattr(self, "backbone"):
            super().build()
            self.backbone.append(Shifts())
            self.mean, self.all = torchmetrics.MeanMetric(), torchmetrics.CatMetric()
            self.double()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = super().training_step(batch, batch_idx)
        self.mean.update(loss.detach())
        self.all.update(loss.detach())
        self.log("mean", self.mean, on_epoch=True)
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("last", self.all.compute()[-1])


class Shifts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self._shift, self._unused = torch.linspace(0, 1, models.WIDTH), torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        return x + self._shift


def measured(stages: int) -> dict[str, Tensor]:
    torch.manual_seed(4)
    strategy: Any = GPipeStrategy(2) if stages else "auto"
    run = trainer(devices=max(stages, 1), max_epochs=1, strategy=strategy)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*can't run on the meta device")
        run.fit(Measured())
    return dict(run.callback_metrics)


def test_metrics_are_built_with_the_layers() -> None:
    expected = run_ranks(measured, 1, 0)[0]
    for found in (*run_ranks(measured, 1, 1), run_ranks(measured, 2, 2)[0]):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


class WithPrior(Measured):
    """A distribution, whose tensors stand in objects, and weights that an object knows, too."""

    def configure_model(self) -> None:
        if not hasattr(self, "backbone"):
            super().configure_model()
            self.known = SimpleNamespace(weights=[self.backbone[0].weight])
            if self.with_prior:
                zeros = torch.zeros(models.WIDTH, dtype=torch.float64)
                self.prior = Independent(Normal(zeros, zeros + 1), 1)

    with_prior = True

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = super().loss(x, y)
        return loss - self.prior.log_prob(y).mean() if self.with_prior else loss


def with_prior(stages: int, has_prior: bool) -> tuple[float, list[str]]:
    torch.manual_seed(4)
    strategy: Any = GPipeStrategy(2) if stages else "auto"
    run, module = trainer(devices=max(stages, 1), max_epochs=1, strategy=strategy), WithPrior()
    module.with_prior = has_prior
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        run.fit(module)
    return float(run.callback_metrics["mean"]), [str(each.message) for each in found]


@pytest.mark.parametrize("has_prior", [True, False])
def test_what_hides_in_objects_is_built_on_the_host(has_prior: bool) -> None:
    (found, told), (expected, _) = (
        run_ranks(with_prior, max(stages, 1), stages, has_prior)[0] for stages in (2, 0)
    )
    assert found == pytest.approx(expected, rel=1e-6)
    assert any("tensors of 'prior' of WithPrior can't be" in text for text in told) == has_prior
    assert any("can't run on the meta device" in text for text in told) == has_prior


class MeasuredOnMeta(Measured):
    def __init__(self) -> None:
        super().__init__()
        with torch.device("meta"):
            self.configure_model()

    def init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.reset_parameters()


def fit_on_meta() -> None:
    trainer(max_steps=1, strategy=GPipeStrategy(2)).fit(MeasuredOnMeta())


def test_attributes_without_values_are_refused() -> None:
    with pytest.raises(RankError, match=r"has an attribute on the meta device, '_\w+', which gets"):
        run_ranks(fit_on_meta, 1)


@pytest.mark.parametrize("name", [*FILLED, *UNFILLED])
@pytest.mark.parametrize("make", [torch.empty, torch.Tensor.new_empty, torch.empty_like])
def test_memory_that_nothing_was_written_to_has_no_known_values(make: Any, name: str) -> None:
    recording = Recording()
    with recording.building():
        made = make(4, 4) if make is torch.empty else make(torch.zeros(4, 4), *_shape(make))
        {**FILLED, **UNFILLED}[name](made)
    assert (recording.view(made) is not None) == (name in FILLED)


def _shape(make: Any) -> tuple[Any, ...]:
    return ((4, 4),) if make is torch.Tensor.new_empty else ()


class Unwritten(models.Around):
    """Moves a table to memory of its own only where it believes to have one."""

    def build(self) -> None:
        pass

    def configure_model(self) -> None:
        if not hasattr(self, "backbone"):
            super().build()
            made = torch.ones(models.WIDTH)
            table = made if made.untyped_storage().data_ptr() else torch.empty_like(made)
            self.register_buffer("table", table)
            self.double()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x * self.table)
        return out


def unwritten(stages: int) -> tuple[dict[str, Tensor], list[str]]:
    torch.manual_seed(4)
    strategy: Any = GPipeStrategy(2) if stages else "auto"
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        run, module = trainer(devices=max(stages, 1), max_steps=2, strategy=strategy), Unwritten()
        run.fit(module)
    return module.state_dict(), [str(each.message) for each in found]


def test_a_model_with_memory_that_was_not_written_is_built_on_the_host() -> None:
    (found, told), (expected, _) = run_ranks(unwritten, 2, 2)[0], run_ranks(unwritten, 1, 0)[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    assert any("values of 'table' of Unwritten can't be recorded" in text for text in told)
