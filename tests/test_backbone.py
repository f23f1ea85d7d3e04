"""Which part of a module is cut, and remedies that lead somewhere for modules without one."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import lightning as L
import numpy
import pytest
import torch
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy

from lightning_gpipe import Blocks, GPipeStrategy
from lightning_gpipe.model.backbone import find_backbone, refuse_compiled
from lightning_gpipe.plan.balance import check_layers
from lightning_gpipe.plan.settings import Settings
from tests import models
from tests.ranks import run_ranks
from tests.training import train


def layers(count: int = 2, width: int = 4) -> list[nn.Module]:
    return [nn.Linear(width, width) for _ in range(count)]


class Block(nn.Module):
    """A block of a GPT."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.mlp = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 4))


def module(**parts: nn.Module) -> nn.Module:
    made = nn.Module()
    for name, part in parts.items():
        setattr(made, name, part)
    return made


def gpt(**parts: nn.Module) -> nn.Module:
    return module(
        embed=nn.Embedding(9, 4), blocks=nn.ModuleList(Block() for _ in range(3)), **parts
    )


def resnet() -> nn.Module:
    stages = {f"layer{i}": nn.Sequential(*layers()) for i in (1, 2, 3)}
    return module(net=module(conv=nn.Conv2d(3, 4, 3), **stages, fc=nn.Linear(4, 2)))


@pytest.mark.parametrize(
    ("build", "remedy"),
    [
        (
            resnet,
            "nn.Sequential(self.net.conv, *self.net.layer1, *self.net.layer2, *self.net.layer3,"
            " self.net.fc)`, with nn.Flatten(1)",
        ),
        (
            lambda: module(
                features=nn.Sequential(*layers()),
                classifier=nn.Sequential(*layers(2, 8)),
                accuracy=MulticlassAccuracy(3),
                loss=nn.CrossEntropyLoss(),
            ),
            "`self.backbone = nn.Sequential(*self.features, *self.classifier)`",
        ),
        (  # one has the name that would be given: it isn't to be deleted with the rest
            lambda: module(backbone=nn.Sequential(*layers()), neck=nn.Sequential(*layers())),
            "`self.body = nn.Sequential(*self.backbone, *self.neck)`",
        ),
        (
            lambda: module(down=nn.Sequential(*layers()), up=nn.Sequential(*layers())),
            "as in a U-Net, let the layers hand tuples on",
        ),
        (lambda: module(one=nn.Linear(2, 2)), "`self.backbone = nn.Sequential(*blocks)`"),
        (  # a teacher that isn't a copy
            lambda: module(
                teacher=nn.Sequential(*layers(4)).requires_grad_(False),
                student=nn.Sequential(*layers()),
            ),
            "GPipeStrategy(backbone='student')",
        ),
    ],
)
def test_the_remedy_is_for_this_model(build: Callable[[], nn.Module], remedy: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        find_backbone(build(), None)
    assert remedy in str(caught.value)


class OwnDict(nn.ModuleDict):
    def forward(self, x: Tensor) -> Tensor:
        for name in self:
            x = self[name](x)
        return x


class Own(nn.Sequential):
    """Gives its layers in its own way."""

    def __iter__(self) -> Any:
        return reversed(list(super().__iter__()))

    def forward(self, x: Tensor) -> Tensor:
        return x


def redirected() -> nn.Module:
    made = nn.Sequential(*layers())
    made.forward = lambda x: x  # type: ignore[method-assign]
    return made


@pytest.mark.parametrize(
    ("part", "problem"),
    [
        (Own(*layers()), "must be an nn.Sequential that keeps nn.Sequential.forward"),
        (redirected(), "must be an nn.Sequential that keeps nn.Sequential.forward"),
        (OwnDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)}), "is a OwnDict, which GPipe"),
        (nn.Linear(2, 2), "is a Linear, which GPipe can't cut"),
        (nn.Sequential(), "has no layers"),
    ],
)
def test_a_name_that_cannot_be_cut(part: nn.Module, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        find_backbone(module(body=part), "body")


def test_a_wrong_name_is_told_what_there_is() -> None:
    with pytest.raises(ValueError, match=r"no such submodule\. Its nn\.ModuleList: 'blocks'"):
        find_backbone(gpt(), "block")
    with pytest.raises(ValueError, match="It has neither an nn"):
        find_backbone(module(body=nn.Linear(2, 2)), "backbone")


class Kept(models.Module):
    """A network whose parts were put into one sequence, and which was kept."""

    def build(self) -> None:
        self.net = nn.Module()
        self.net.first = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        self.net.second = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        self.net.last = nn.Linear(6, 6)
        self.backbone = nn.Sequential(*self.net.first, *self.net.second, self.net.last)


def test_a_sequence_of_a_model_s_parts_is_taken() -> None:
    assert find_backbone(Kept(), None) == "backbone"
    parts = nn.Sequential(*layers()), nn.Sequential(*layers())
    inside = module(a=parts[0], b=nn.Sequential(*parts), c=nn.Sequential(*layers()))
    with pytest.raises(ValueError, match="several") as error:
        find_backbone(inside, None)
    assert [key for key in "abc" if f"'{key}': " in str(error.value)] == ["b", "c"]


class Deleted(Kept):
    def build(self) -> None:
        super().build()
        del self.net


def kept(kind: type[Kept], devices: int) -> tuple[dict[str, Tensor], str]:
    torch.manual_seed(1)
    strategy = GPipeStrategy(2) if devices > 1 else "auto"
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        state = train(kind(), devices=devices, strategy=strategy, max_steps=3)
    return state, " ".join(str(warning.message) for warning in told)


def test_a_sequence_of_a_model_s_parts_trains_and_tells_that_they_are_kept() -> None:
    ((plain, _),) = run_ranks(kept, 1, Kept, 1)
    found = run_ranks(kept, 2, Kept, 2)
    for state, _ in found:
        torch.testing.assert_close(state, plain, rtol=0, atol=1e-10)
    assert "100% of the parameters of the backbone 'backbone' are in" in found[0][1]
    assert "such as 'net.first.0'. Every stage holds these" in found[0][1]
    assert all("another name" not in told for _, told in run_ranks(kept, 2, Deleted, 2))


def test_names_of_backbones() -> None:
    inner = nn.Sequential(*layers())
    assert find_backbone(module(body=nn.Sequential(nn.Linear(2, 2), inner)), "body.1") == "body.1"
    assert find_backbone(module(first=inner, second=inner), None) == "first"
    assert find_backbone(module(first=inner, second=inner), "second") == "second"
    same = nn.Linear(4, 4)
    assert find_backbone(module(body=nn.Sequential(same, same)), None) == "body"
    assert find_backbone(module(body=nn.Sequential(L.LightningModule(), same)), None) == "body"
    assert find_backbone(gpt(more=Blocks(layers())), None) == "more"
    assert find_backbone(gpt(), None) == "blocks"
    assert (
        find_backbone(gpt(head=nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 9))), None) == "blocks"
    )
    layer = nn.TransformerEncoderLayer(4, 2, 8)
    encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    assert find_backbone(module(encoder=encoder), None) == "encoder.layers"
    assert find_backbone(module(body=nn.ModuleList(layers())), "body") == "body"


def test_a_dictionary_of_blocks_is_taken_if_there_is_nothing_else() -> None:
    blocks = nn.ModuleDict({f"block{i}": nn.Linear(4, 4) for i in range(3)})
    assert find_backbone(module(net=module(blocks=blocks), head=nn.Linear(4, 2)), None) == (
        "net.blocks"
    )
    assert find_backbone(module(blocks=blocks, body=nn.Sequential(*layers())), None) == "body"
    assert find_backbone(module(blocks=blocks, body=nn.Sequential(*layers())), "blocks") == "blocks"
    unlike = nn.ModuleDict({"embed": nn.Embedding(9, 4), "head": nn.Linear(4, 9)})
    for other in (unlike, nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})):
        with pytest.raises(ValueError, match="has no backbone"):
            find_backbone(module(parts=other, body=nn.Linear(9, 9)), None)


@pytest.mark.parametrize(
    "build",
    [
        lambda: nn.Sequential(*layers()),
        lambda: nn.ModuleList(layers()),
        lambda: Blocks(layers()),
    ],
)
def test_a_frozen_copy_is_not_cut(build: Callable[[], nn.Module]) -> None:
    net, head = build(), nn.Linear(4, 2)
    frozen = copy.deepcopy(net).requires_grad_(False)
    assert find_backbone(module(key=frozen, net=net, head=head), None) == "net"
    assert find_backbone(module(net=frozen, head=head), None) == "net"


def test_the_one_called_so_is_taken_if_it_holds_the_most() -> None:
    head = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    large, small = nn.Sequential(*layers(4)), nn.Sequential(*layers())
    assert find_backbone(module(head=head, backbone=large), None) == "backbone"
    assert find_backbone(module(head=head, net=module(backbone=large)), None) == "net.backbone"
    with pytest.raises(ValueError, match="has several"):
        find_backbone(module(head=head, mybackbone=large), None)
    with pytest.raises(ValueError, match="has several"):
        find_backbone(module(neck=large, backbone=small), None)


def test_one_that_holds_nearly_all_is_taken() -> None:
    large, small = nn.Sequential(*layers(40)), nn.Sequential(nn.Linear(4, 2), nn.ReLU())
    assert find_backbone(module(head=small, net=large), None) == "net"
    frozen = copy.deepcopy(large).requires_grad_(False)
    with pytest.raises(ValueError, match="has several"):
        find_backbone(module(head=small, net=frozen), None)
    with pytest.raises(ValueError, match="has several"):
        find_backbone(module(head=small, net=large), None, {"": 10.0, "net": 7.0, "head": 3.0})


class Stepped(nn.Module):
    @torch.compile(backend="eager")
    def training_step(self, batch: Any, batch_idx: int) -> None: ...


def compiled(place: str) -> nn.Module:
    made = module(net=module(body=nn.Sequential(*layers())))
    if place == "module.compile()":
        made.compile(backend="eager")
    elif place == "net.compile()":
        made.net.compile(backend="eager")
    elif place == "torch.compile(net)":
        made.net = torch.compile(made.net, backend="eager")
    elif place == "body.compile()":
        made.net.body.compile(backend="eager")
    elif place == "step":
        made.training_step = torch.compile(lambda batch: batch, backend="eager")
    elif place == "decorated step":
        made = Stepped()
        made.net = module(body=nn.Sequential(*layers()))
    elif place == "Trainer.fit":
        from lightning.pytorch.utilities.compile import from_compiled

        made = models.Module()
        made = from_compiled(torch.compile(made, backend="eager"))  # type: ignore[arg-type]
    elif place == "layers":
        for i, layer in enumerate(made.net.body):
            made.net.body[i] = torch.compile(layer, backend="eager")
    return made


@pytest.mark.parametrize(
    "place",
    [
        "module.compile()",
        "net.compile()",
        "torch.compile(net)",
        "body.compile()",
        "step",
        "decorated step",
        "Trainer.fit",
    ],
)
def test_what_is_compiled_with_the_backbone_is_refused(place: str) -> None:
    made = compiled(place)
    with pytest.raises(ValueError, match="is compiled as a whole: compile its layers instead"):
        refuse_compiled(made, find_backbone(made, None))


@pytest.mark.filterwarnings("ignore:.*is deprecated")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # on Python 3.14
def test_scripts_are_refused() -> None:
    made = models.Module()
    made.scripted = nn.ModuleList([torch.jit.script(nn.ReLU())])
    with pytest.raises(ValueError, match=r"'scripted\.0' is made by torch\.jit"):
        refuse_compiled(made, find_backbone(made, None))


def test_compiled_layers_are_not_refused() -> None:
    made = compiled("layers")
    refuse_compiled(made, find_backbone(made, None))


def settings(**arguments: Any) -> Settings:
    given = {"chunks": 4, "stages": 2, "backbone": None, "balance": "flops"}
    return Settings(**{**given, "checkpoint": "always", "deferred_batch_norm": True, **arguments})


def test_numbers_may_be_numpys() -> None:
    found = settings(
        chunks=numpy.int64(8), stages=numpy.int32(2), balance=[numpy.int64(1), numpy.int64(3)]
    )
    assert (found.chunks, found.stages, found.sizes) == (8, 2, (1, 3))
    assert type(found.chunks) is int
    check_layers(4, 2, found, "body")


class Encoder(models.Module):
    """PyTorch's own encoder, with a mask for all samples and padding for each."""

    samples = 6

    def build(self) -> None:
        layer = nn.TransformerEncoderLayer(models.WIDTH, 2, 8, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        h = x[:, None] * torch.arange(1, 7, dtype=x.dtype)[:, None]
        mask = torch.ones(6, 6, dtype=torch.bool).triu(1)
        padding = (x > 1).logical_and(torch.arange(6) > 0)
        return self.encoder(h, mask, padding).mean(1)


def encoded(stages: int) -> dict[str, Tensor]:
    torch.manual_seed(2)
    made = Encoder()
    state = train(made, max_steps=3, devices=stages, strategy=GPipeStrategy(3))
    assert type(made.encoder.layers) is nn.ModuleList
    return state


def test_an_encoder_trains_as_it_is_written() -> None:
    torch.manual_seed(2)
    plain = train(Encoder(), max_steps=3)
    torch.testing.assert_close(run_ranks(encoded, 2, 2)[0], plain, atol=1e-10, rtol=0)


class OwnForward(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x


def test_a_sequence_with_a_forward_of_its_own_is_found() -> None:
    """Where that can be listened to, and others where it isn't most of the model."""
    assert find_backbone(module(net=OwnForward(*layers())), None) == "net"
    small = module(net=OwnForward(*layers()), body=nn.Sequential(*layers(), *layers()))
    assert find_backbone(small, None) == "body"
    assert find_backbone(small, "net") == "net"
    with pytest.raises(ValueError, match="'net' has a forward of its own, and can be cut if it"):
        find_backbone(module(net=Own(*layers())), None)
