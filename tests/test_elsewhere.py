"""What may be done with a parameter or buffer that another stage holds."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn

from lightning_gpipe.model.elsewhere import HeldElsewhere, Holder, elsewhere

HOLDER = Holder("backbone.3.weight", stage=1, rank=5, here=0, here_rank=4)


def parameter(name: str = HOLDER.name, stage: int = 1) -> Tensor:
    return elsewhere(nn.Parameter(torch.randn(3, 4)), Holder(name, stage, 5, 0, 4))


def buffer() -> Tensor:
    return elsewhere(torch.ones(3, 4), HOLDER)


REAL = torch.ones(3, 4)

READS: dict[str, Callable[[Tensor], Any]] = {
    "a tied head": lambda w: nn.functional.linear(torch.ones(2, 4), w),
    "a product": lambda w: torch.ones(2, 3) @ w,
    "a norm": lambda w: w.norm(),
    "a norm of the gradients": lambda w: w.grad.norm(),
    "a penalty": lambda w: w.square().sum(),
    "a sum with a loss": lambda w: torch.zeros((), requires_grad=True) + w,
    "an average of one's own": lambda w: REAL.clone().lerp_(w, 0.1),
    "the same through .data": lambda w: REAL.clone().data.mul_(0.9).add_(w.data, alpha=0.1),
    "a copy into another module": lambda w: REAL.clone().copy_(w),
    "the same for many": lambda w: torch._foreach_lerp_([REAL.clone()], [w.detach()], 0.1),
    "out=": lambda w: torch.add(w, 1, out=torch.empty(3, 4)),
    "an element": lambda w: w[0, 0],
    "a number": lambda w: w.sum().item(),
    "a comparison": lambda w: bool((w > 0).all()),
    "is it finite": lambda w: w.isfinite().all(),
    "to the host": lambda w: w.detach().cpu(),
    "as an array": lambda w: w.detach().numpy(),
    "as a list": lambda w: w.tolist(),
    "equality": lambda w: torch.equal(w, REAL),
    "stacked norms": lambda w: torch.stack([w.norm(), REAL.norm()]),
    "all in one vector": lambda w: nn.utils.parameters_to_vector([w, REAL]),
    "the total norm": lambda w: nn.utils.get_total_norm([w.grad]),
    "noise": lambda w: torch.randn_like(w),
    "a new start": lambda w: nn.init.normal_(w),
    "another start": lambda w: nn.init.xavier_uniform_(w),
    "two stages' at once": lambda w: w + parameter("backbone.5.weight", 2),
    "a gradient": lambda w: torch.autograd.grad(torch.ones((), requires_grad=True) * 2, w),
}


OF_GRADIENTS = {"a norm of the gradients", "the total norm"}


@pytest.mark.parametrize("what", READS)
def test_reading_a_parameter_is_refused(what: str) -> None:
    with pytest.raises(HeldElsewhere, match=r"backbone\.\d\.weight.*stage 1 \(rank 5\) holds"):
        READS[what](parameter())


@pytest.mark.parametrize("what", sorted({*READS} - OF_GRADIENTS))
def test_reading_a_buffer_is_refused(what: str) -> None:
    with pytest.raises(HeldElsewhere, match=r"backbone\.\d\.weight.*stage 1 \(rank 5\) holds"):
        READS[what](buffer())


def test_writing_is_left_to_the_stage_that_holds_it() -> None:
    weight, mean = parameter(), buffer()
    with torch.no_grad():
        weight.copy_(REAL)
        weight.mul_(0.9).add_(REAL, alpha=0.1)
        weight.clamp_(-1, 1)
        weight[0] = 0
        weight.data = REAL
        weight.grad = REAL
        nn.init.zeros_(weight)
        mean.lerp_(weight, 0.5)
        weight -= 1
    here = torch.ones(2)
    torch._foreach_mul_([here, mean], 3.0)
    assert here.tolist() == [3, 3]
    assert weight.is_meta
    assert mean.is_meta


def test_arithmetic_among_one_stage_s_tensors_stays_there() -> None:
    average, weight = buffer(), parameter()
    moved = average + (weight.detach() - average) / torch.tensor(3.0)
    average.copy_(moved)
    with pytest.raises(HeldElsewhere):
        moved.sum()


def test_names_shapes_and_modules_work() -> None:
    layer = nn.Linear(4, 3)
    layer.weight = parameter()
    layer.register_buffer("mean", buffer())
    weight = layer.weight
    assert isinstance(weight, nn.Parameter)
    assert weight.is_leaf
    assert weight.requires_grad
    assert (weight.shape, weight.numel(), weight.dtype) == ((3, 4), 12, torch.float32)
    assert weight.device.type == "meta"
    assert weight.is_meta
    assert weight in {weight}
    weight.requires_grad_(False)
    assert not weight.requires_grad
    assert not weight.detach().requires_grad
    assert "meta" in repr(weight)
    assert [*layer.state_dict()] == ["weight", "bias", "mean"]
    with pytest.warns(UserWarning, match="copying from a non-meta parameter"):
        layer.load_state_dict({"weight": REAL}, strict=False)
    layer.double()
    assert layer.weight.dtype == torch.float64
    assert layer.mean.is_meta
    layer.zero_grad()


def test_copies_refuse_too() -> None:
    copied = copy.deepcopy(parameter())
    with pytest.raises(HeldElsewhere, match=r"backbone\.3\.weight"):
        copied.norm()


@pytest.mark.parametrize("tensor", [parameter, buffer])
def test_a_file_has_ordinary_meta_tensors(tensor: Callable[[], Tensor]) -> None:
    file = io.BytesIO()
    value = tensor()
    with pytest.warns(UserWarning, match=r"What stage . \(rank .\) holds is saved without values"):
        torch.save({"weight": value}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)["weight"]
    assert type(loaded) is (nn.Parameter if tensor is parameter else Tensor)
    assert loaded.is_meta
    assert loaded.shape == (3, 4)


OPTIMIZERS: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    "sgd": lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9),
    "sgd foreach": lambda ps: torch.optim.SGD(ps, 0.1, foreach=True),
    "adam": lambda ps: torch.optim.Adam(ps, 0.1),
    "adamw foreach": lambda ps: torch.optim.AdamW(ps, 0.1, foreach=True),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, 0.1),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, 0.1),
    "nadam": lambda ps: torch.optim.NAdam(ps, 0.1),
    "radam": lambda ps: torch.optim.RAdam(ps, 0.1),
    "adadelta": lambda ps: torch.optim.Adadelta(ps, 0.1),
    "adamax": lambda ps: torch.optim.Adamax(ps, 0.1),
    "asgd": lambda ps: torch.optim.ASGD(ps, 0.1),
    "rprop": lambda ps: torch.optim.Rprop(ps, 0.1),
    "adafactor": lambda ps: torch.optim.Adafactor(ps, 0.1),
    "one of one's own": lambda ps: Own(ps, {}),
}


class Ascent(torch.optim.SGD):
    """An optimizer that looks at all gradients together, as sharpness-aware minimization does."""

    def ascend(self) -> Tensor:
        gradients = [p.grad for p in self.param_groups[0]["params"] if p.grad is not None]
        return torch.stack([gradient.norm() for gradient in gradients]).norm()


def lightning_norm(parameters: list[Tensor]) -> Any:
    return grad_norm(nn.ParameterList(parameters), 2)


def ascend(parameters: list[Tensor]) -> Any:
    return Ascent(parameters, 0.1).ascend()


@pytest.mark.parametrize("reduce", [lightning_norm, ascend])
def test_norms_of_one_stage_s_gradients_are_refused(reduce: Callable[[list[Tensor]], Any]) -> None:
    here = nn.Parameter(torch.ones(3, 4))
    here.grad = torch.ones(3, 4)
    text = r"reads 'backbone\.3\.weight\.grad'.*no values\. For norms of gradients"
    with pytest.raises(HeldElsewhere, match=text):
        reduce([here, parameter()])


def test_clipping_by_value_and_by_a_known_norm_work() -> None:
    here = nn.Parameter(torch.ones(3, 4))
    here.grad = torch.full((3, 4), 2.0)
    nn.utils.clip_grad_value_([here, parameter()], 1.0)
    assert here.grad.eq(1).all()
    nn.utils.clip_grads_with_norm_([here, parameter()], 1.0, torch.tensor(2.0))
    torch.testing.assert_close(here.grad, torch.full((3, 4), 0.5))


class Own(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in [p for p in group["params"] if p.grad is not None]:
                p.sub_(p.grad, alpha=0.1)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_skip_them(name: str) -> None:
    here = nn.Parameter(torch.ones(3, 4))
    alone = nn.Parameter(torch.ones(3, 4))
    mixed, plain = OPTIMIZERS[name]([parameter(), here]), OPTIMIZERS[name]([alone])
    mixed.add_param_group({"params": [parameter()]})
    for _ in range(2):
        for weight, optimizer in ((here, mixed), (alone, plain)):
            optimizer.zero_grad()
            weight.grad = torch.full((3, 4), 0.5)
            optimizer.step()
    mixed.load_state_dict(mixed.state_dict())
    copy.deepcopy(mixed)
    torch.testing.assert_close(here, alone, rtol=0, atol=0)
