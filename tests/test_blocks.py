"""Blocks with extra arguments, in place of an ``nn.ModuleList``."""

from __future__ import annotations

import copy
import pickle
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_gpipe import Blocks, GPipeStrategy
from lightning_gpipe.model import dry_runs
from lightning_gpipe.model.backbone import find_backbone
from lightning_gpipe.model.places import Place
from lightning_gpipe.model.watched import WatchedPlace
from tests import models
from tests.ranks import RankError, run_ranks
from tests.training import train


class Context:
    """What blocks may hold together."""

    depth = 0.0


class Block(nn.Module):
    """Looks at a mask for each sample, at positions that all share, and at a second input."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear = nn.Linear(models.WIDTH, models.WIDTH)
        self.kind = kind
        self.as_tuple = False
        self.gain = 1.0
        self.widens = 1

    def forward(
        self, hidden: Tensor, mask: Tensor, *, positions: Tensor, other: Any, scale: float
    ) -> Any:
        gain = self.gain + getattr(self, "context", Context()).depth
        if self.widens > 1:
            gain /= float(hidden[0, 0]) ** 2  # can't run without data, nor on zeros
        mixed = self.linear(hidden) + positions * other * scale * gain
        hidden = (hidden + torch.where(mask, mixed, 0.0).tanh()).repeat(1, self.widens)
        return (hidden, None) if self.as_tuple else hidden


class Encoder(models.Module):
    """Calls its blocks one after another, as models of Hugging Face do."""

    cut = True
    as_tuple = False

    def build(self) -> None:
        blocks = nn.ModuleList(Block(kind) for kind in ("near", "far", "near", "far"))
        for block in blocks:
            block.as_tuple = self.as_tuple
        self.before = nn.Linear(models.WIDTH, models.WIDTH)
        self.blocks = Blocks(blocks, self.as_tuple) if self.cut else blocks
        self.head = nn.Sequential(nn.Linear(models.WIDTH, 4), nn.Linear(4, models.WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        hidden, masks = x, {"near": x > 0, "far": x > -1}
        shared = {
            "positions": torch.arange(models.WIDTH, dtype=x.dtype).unsqueeze(0),
            "other": self.before(x),
        }
        for i, block in enumerate(self.blocks[:4]):
            hidden = self.call(i, block, hidden, masks[block.kind], shared)
        return self.head(hidden)

    def call(self, i: int, block: Any, hidden: Any, mask: Tensor, shared: Any) -> Any:
        output = block(hidden, mask, scale=i / 2, **shared)
        return output[0] if self.as_tuple else output


class Tuples(Encoder):
    as_tuple = True


class Listed(Encoder):
    """Keeps its blocks in an ``nn.ModuleList`` that nobody marked."""

    cut = False


class ListedTuples(Listed):
    as_tuple = True


class Looped(Encoder):
    """Calls an ``nn.Sequential`` layer by layer, and as a whole."""

    def build(self) -> None:
        self.before = nn.Linear(models.WIDTH, models.WIDTH)
        self.head = nn.Linear(models.WIDTH, models.WIDTH)
        self.blocks = nn.Sequential(
            *(nn.Linear(models.WIDTH, models.WIDTH), nn.Tanh()),
            *(nn.Linear(models.WIDTH, 9), nn.Tanh(), nn.Linear(9, models.WIDTH)),
        )
        for i, layer in enumerate(self.blocks):
            layer.kind = ("near", "far", "near", "far", "last")[i]

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.before(x)
        for layer in self.blocks:
            hidden = layer(hidden)
        return self.head(self.blocks(hidden))


class Nested(Looped):
    """Looks into layers that are containers."""

    def build(self) -> None:
        super().build()
        layers = list(self.blocks)
        self.blocks = nn.Sequential(nn.Sequential(*layers[:2]), *layers[2:])
        for block, kind in zip(self.blocks, ("near", "far", "near", "far"), strict=True):
            block.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        assert len(self.blocks[0]) == len([part for block in self.blocks[:1] for part in block])
        assert self.blocks[0][0].weight.shape == (models.WIDTH, models.WIDTH)
        return super().forward(x)


class Stateful(nn.Linear):
    """Returns a state beside the hidden one, or perhaps a tensor."""

    gives: bool | None = None

    def forward(self, hidden: Tensor, state: Any = None) -> Any:
        hidden = super().forward(hidden if state is None else hidden + state[0]).tanh()
        if self.gives is not None:
            return hidden, hidden.sum(1) if self.gives else None
        return hidden, (hidden * 2, hidden.sum(1))


class States(Looped):
    """Unpacks what its blocks return, and uses the first element."""

    def build(self) -> None:
        super().build()
        self.blocks = nn.ModuleList(Stateful(models.WIDTH, models.WIDTH) for _ in range(4))
        for block, kind in zip(self.blocks, ("near", "far", "near", "far"), strict=True):
            block.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.before(x)
        for block in self.blocks:
            hidden, _ = block(hidden)
        return self.head(hidden)


class ReadStates(States):
    """Uses what its blocks return besides."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.before(x)
        for block in self.blocks:
            hidden, (_, last) = block(hidden)
        return self.head(hidden) + last.sum()


class Auxiliary(States):
    """Adds up what some of its blocks return besides, where that is a tensor."""

    def build(self) -> None:
        super().build()
        for i, block in enumerate(self.blocks):
            block.gives = i % 2 == 1

    def forward(self, x: Tensor) -> Tensor:
        hidden, sums = self.before(x), x.new_zeros(())
        for block in self.blocks:
            hidden, more = block(hidden)
            sums = self.added(sums, more)
        return self.head(hidden) + sums

    def added(self, sums: Tensor, more: Any) -> Tensor:
        return sums if more is None else sums + more.sum()


class Typed(Auxiliary):
    def added(self, sums: Tensor, more: Any) -> Tensor:
        return sums + more.sum() if isinstance(more, Tensor) else sums


class HandedStates(States):
    """Hands on what its blocks return besides."""

    def forward(self, x: Tensor) -> Tensor:
        hidden, state = self.before(x), None
        for block in self.blocks:
            hidden, state = block(hidden, state)
        return self.head(hidden)


class FirstStates(States):
    """Hands what its first block returns besides to all others."""

    def forward(self, x: Tensor) -> Tensor:
        hidden, state = self.blocks[0](self.before(x))
        for block in self.blocks[1:]:
            hidden, _ = block(hidden, state)
        return self.head(hidden)


class Sliced(Looped):
    """Calls some of its layers alone."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.blocks[:2](x)


class Square(Encoder):
    """As many samples as positions."""

    samples = models.WIDTH


class Keywords(Encoder):
    """Names all arguments."""

    def call(self, i: int, block: Any, hidden: Any, mask: Tensor, shared: Any) -> Any:
        return block(scale=i / 2, hidden=hidden, mask=mask, **shared)


class Twice(Encoder):
    """Two passes in a step, with other arguments."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return super().loss(x, y) + super().loss(x + 1, y)


class Settings(Encoder):
    """Tells blocks apart by their class, and sets an attribute of theirs."""

    def call(self, i: int, block: Any, hidden: Any, mask: Tensor, shared: Any) -> Any:
        assert isinstance(block, Block)
        block.gain = 1 + i / 4
        return super().call(i, block, hidden, mask, shared)


class Shapes(Encoder):
    """Reads the shape and the type of what blocks return, which are those of their input."""

    def call(self, i: int, block: Any, hidden: Any, mask: Tensor, shared: Any) -> Any:
        scale = hidden.shape[-1] / hidden.size(1) * hidden.dim() * (1 + hidden.dtype.itemsize)
        return block(hidden, mask, scale=scale, **shared)


class Widens(Encoder):
    """Reads a shape that isn't known yet."""

    def build(self) -> None:
        super().build()
        self.blocks[0].widens = 2

    def call(self, i: int, block: Any, hidden: Any, mask: Tensor, shared: Any) -> Any:
        return super().call(i, block, hidden, mask, {**shared, "other": hidden.shape[1]})


class HalfFrozen(Encoder):
    """Runs the first blocks without autograd."""

    def call(self, i: int, block: Any, hidden: Any, mask: Tensor, shared: Any) -> Any:
        with torch.set_grad_enabled(i > 1):
            return super().call(i, block, hidden, mask, shared)


class HalfCast(Encoder):
    """Runs the last blocks in another precision."""

    def call(self, i: int, block: Any, hidden: Any, mask: Tensor, shared: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16, enabled=i > 1):
            return super().call(i, block, hidden, mask, shared)


class Skipped(Encoder):
    """Drops a block now and then, as LayerDrop does."""

    def call(self, i: int, block: Any, hidden: Any, mask: Tensor, shared: Any) -> Any:
        return hidden if i == 2 else super().call(i, block, hidden, mask, shared)


class Bundled(Encoder):
    """Hands tuples on."""

    def call(self, i: int, block: Any, hidden: Any, mask: Tensor, shared: Any) -> Any:
        return block((hidden,), scale=i / 2)


class Early(Encoder):
    """Takes the output of a block that isn't the last."""

    def call(self, i: int, block: Any, hidden: Any, mask: Tensor, shared: Any) -> Any:
        return hidden if i == 3 else super().call(i, block, hidden, mask, shared)


class EarlyByIndex(Early):
    def forward(self, x: Tensor) -> Tensor:
        hidden = x
        for i in range(3):
            hidden = self.blocks[i](hidden, x > 0)
        return self.head(hidden)


class Backwards(Early):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.blocks[1](x, x > 0)
        return self.head(self.blocks[0](hidden, x > 0))


class Between(Encoder):
    """Changes what a block returns."""

    def call(self, i: int, block: Any, hidden: Any, mask: Tensor, shared: Any) -> Any:
        return super().call(i, block, hidden, mask, shared) * 2


class Jumps(Encoder):
    """Hands a block's output to one further on, as U-Nets do."""

    def call(self, i: int, block: Any, hidden: Any, mask: Tensor, shared: Any) -> Any:
        if i == 1:
            self.kept = hidden
        if i == 3:
            shared = {**shared, "other": self.kept}
        return super().call(i, block, hidden, mask, shared)


class Checkpointed(Encoder):
    """Recomputes its blocks by itself, which the pipeline does anyway."""

    def call(self, i: int, block: Any, hidden: Any, mask: Tensor, shared: Any) -> Any:
        return checkpoint(block, hidden, mask, scale=1.0, use_reentrant=False, **shared)


class Cached(Encoder):
    """Gives its blocks what is no tensor."""

    def call(self, i: int, block: Any, hidden: Any, mask: Tensor, shared: Any) -> Any:
        return block(hidden, mask, scale=object(), **shared)


class Accumulates(Encoder):
    """Changes what it hands to a block after the call."""

    def call(self, i: int, block: Any, hidden: Any, mask: Tensor, shared: Any) -> Any:
        output = super().call(i, block, hidden, mask, shared)
        shared["positions"].mul_(2)
        return output


class Filling(Block):
    def forward(self, hidden: Tensor, mask: Tensor, *, found: list[Tensor], **more: Any) -> Any:
        found.append(hidden.mean())
        return super().forward(hidden, mask, **more)


class Fills(Encoder):
    """Gives its blocks a list, into which they put something."""

    def build(self) -> None:
        super().build()
        for block in self.blocks:
            block.__class__ = Filling

    def call(self, i: int, block: Any, hidden: Any, mask: Tensor, shared: Any) -> Any:
        return super().call(i, block, hidden, mask, {**shared, "found": []})


class SetsBack(Encoder):
    """Sets an attribute for a call."""

    def call(self, i: int, block: Any, hidden: Any, mask: Tensor, shared: Any) -> Any:
        block.gain = 1.0 + i
        output = super().call(i, block, hidden, mask, shared)
        block.gain = 1.0
        return output


class Sets(Encoder):
    """Sets an attribute for all calls to come."""

    def call(self, i: int, block: Any, hidden: Any, mask: Tensor, shared: Any) -> Any:
        block.gain = 1.0 + i
        return super().call(i, block, hidden, mask, shared)


class Deepens(Encoder):
    """Changes an object that all blocks hold before each call."""

    def build(self) -> None:
        super().build()
        self.context = Context()
        for block in self.blocks:
            block.context = self.context

    def call(self, i: int, block: Any, hidden: Any, mask: Tensor, shared: Any) -> Any:
        self.context.depth = float(i)
        return super().call(i, block, hidden, mask, shared)


class Recurrent(models.Module):
    """Layers whose states have the batch second, and aren't used."""

    kind: Any = nn.GRU

    def build(self) -> None:
        width = models.WIDTH
        self.blocks = nn.ModuleList(self.kind(width, width, batch_first=True) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        h = x.unsqueeze(1)
        for layer in self.blocks:
            h, _ = layer(h)
        return h[:, 0]


class LongShort(Recurrent):
    kind = nn.LSTM


class ReadsLast(Recurrent):
    """Reads the last one's state."""

    def forward(self, x: Tensor) -> Tensor:
        h = x.unsqueeze(1)
        for layer in self.blocks:
            h, state = layer(h)
        return h[:, 0] + state[0]


class Evaluates(Encoder):
    """Runs blocks in evaluation mode, and sets them back."""

    def call(self, i: int, block: Any, hidden: Any, mask: Tensor, shared: Any) -> Any:
        block.eval()
        output = super().call(i, block, hidden, mask, shared)
        block.train()
        return output


def pipelined(kind: str, stages: int, balance: Any, step: Any = "mini-batch") -> Any:
    torch.manual_seed(2)
    module = globals()[kind]()
    strategy = GPipeStrategy(3, balance=balance, step=step)
    state = train(module, max_steps=5, devices=stages, strategy=strategy)
    with torch.no_grad():
        return state, [block.kind for block in module.blocks], module(torch.ones(2, 6).double())


KINDS = (
    *("Encoder", "Tuples", "Square", "Keywords", "Twice", "Settings", "Shapes"),
    *("Listed", "ListedTuples", "Looped", "Nested", "States", "HandedStates", "FirstStates"),
    *("ReadStates", "Sets", "Between", "Jumps", "Skipped", "Early", "Checkpointed"),
)


@pytest.mark.parametrize(
    ("kind", "balance"),
    [*((kind, "flops") for kind in KINDS), ("Encoder", "params"), ("Looped", "params")],
)
def test_a_model_trains_as_before(kind: str, balance: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And is an ordinary one before and after."""
    torch.manual_seed(2)
    monkeypatch.setattr(Encoder, "cut", False)
    uncut = globals()[kind]()
    assert type(uncut.blocks) in (nn.ModuleList, nn.Sequential)
    plain = train(uncut, max_steps=5)
    with torch.no_grad():
        output = uncut(torch.ones(2, 6).double())
    for stages in (1, 3):
        state, kinds, found = run_ranks(pipelined, stages, kind, stages, balance)[0]
        assert list(state) == list(plain)
        assert kinds[:4] == ["near", "far", "near", "far"]
        torch.testing.assert_close(state, plain, atol=1e-10, rtol=0)
        torch.testing.assert_close(found, output, atol=1e-10, rtol=0)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("Backwards", "The step calls layer 0 of the backbone by itself, or out of order"),
        ("Bundled", "The first block was called without a tensor as an argument by itself"),
        ("EarlyByIndex", "'mse_loss' uses .* A loop that ends before the last block"),
        (
            "Widens",
            r"Block 0 returned a hidden state of shape \[\d, 12\], not \[\d, 6\]",
        ),
        ("HalfFrozen", "Block 2 is called with other settings of autograd"),
        ("HalfCast", "Block 2 is called with other settings of autograd or autocast"),
        ("Sliced", "'mse_loss' uses the hidden state between two blocks"),
        ("Auxiliary", "'sum' uses the hidden state between two blocks"),
        ("Typed", "'sum' uses the hidden state between two blocks"),
        ("Cached", "Block 0 was given a object, which can't be split"),
        ("Accumulates", "A tensor that a block was called with was changed in place"),
        ("Fills", "Block 0 changes a list or a dictionary that it is given"),
        ("SetsBack", "Block 1 had another value of gain when it was called"),
        ("Deepens", "Block 0 had another value of context when it was called"),
        ("Evaluates", "Block 0 had another value of training when it was called"),
    ],
)
def test_what_cannot_work_is_refused(kind: str, message: str) -> None:
    with pytest.raises(RankError, match=message) as found:
        run_ranks(pipelined, 2, kind, 2, "params")
    if "name another" in str(found.value):
        assert "The blocks are those of 'blocks' (" in str(found.value)


@pytest.mark.parametrize("step", ["mini-batch", "micro-batch"])
@pytest.mark.parametrize("kind", ["Recurrent", "LongShort"])
def test_states_that_nobody_uses_need_no_batch_first(kind: str, step: str) -> None:
    torch.manual_seed(2)
    expected = train(globals()[kind](), max_steps=5)
    for stages in (1, 2):
        found = run_ranks(recurrent, stages, kind, stages, step)[0]
        torch.testing.assert_close(found, expected, atol=1e-10, rtol=0)


def recurrent(kind: str, stages: int, step: Any) -> Any:
    torch.manual_seed(2)
    strategy = GPipeStrategy(3, step=step)
    return train(globals()[kind](), max_steps=5, devices=stages, strategy=strategy)


def test_a_state_with_the_batch_elsewhere_is_refused_where_it_is_used() -> None:
    with pytest.raises(RankError, match="such as the state of an LSTM"):
        run_ranks(recurrent, 2, "ReadsLast", 2, "mini-batch")


@pytest.mark.parametrize("stages", [1, 2])
def test_tuples_are_found_out_where_the_step_runs_for_each_micro_batch(stages: int) -> None:
    torch.manual_seed(2)
    expected = train(ListedTuples(), max_steps=5)
    found = run_ranks(pipelined, stages, "ListedTuples", stages, "flops", "micro-batch")[0][0]
    torch.testing.assert_close(found, expected, atol=1e-10, rtol=0)


def test_blocks_are_a_module_list() -> None:
    layers = [nn.Linear(2, 2) for _ in range(3)]
    blocks = Blocks(layers)
    assert list(blocks) == layers
    assert blocks[1] is layers[1]
    assert len(blocks) == 3
    assert list(blocks.state_dict()) == list(nn.ModuleList(layers).state_dict())


def test_blocks_are_the_backbone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though other parts of the model could be cut, too."""
    assert find_backbone(Encoder(), None) == "blocks"
    monkeypatch.setattr(Encoder, "cut", False)
    module = Encoder()
    del module.head
    assert find_backbone(module, None) == "blocks"


class Copying(Encoder):
    """Copies its blocks within a step."""

    copy_is = (Blocks, Block)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        loss = super().loss(x, y)
        assert self.blocks[0] == next(iter(self.blocks.children()))
        assert self.blocks[0] in set(self.blocks.children())
        assert isinstance(self.blocks[:2], (nn.Sequential, list))
        for copied in (copy.deepcopy(self.blocks), pickle.loads(pickle.dumps(self.blocks))):
            assert type(copied) is self.copy_is[0]
            assert type(copied[0]) is self.copy_is[1], "a copy is an ordinary list"
            assert type(copy.deepcopy(self.blocks[0])) is self.copy_is[1]
        return loss


class CopyingLooped(Copying, Looped):
    copy_is = (nn.Sequential, nn.Linear)


@pytest.mark.parametrize("kind", ["Copying", "CopyingLooped"])
def test_a_copy_of_blocks_has_no_pipeline(kind: str) -> None:
    run_ranks(pipelined, 2, kind, 2, "params")


def test_a_buffer_that_a_part_of_a_block_gets_later_is_watched() -> None:
    module = nn.Linear(2, 2)
    watched = WatchedPlace(Place("part", module))
    before = watched.now()
    assert not watched.has_changed(*before)
    module.register_buffer("scale", torch.ones(1))
    assert watched.has_changed(*before)
    before = watched.now()
    assert not watched.has_changed(*before)
    module.scale.mul_(2)
    assert watched.has_changed(*before)


def test_a_wrong_as_tuple_is_told() -> None:
    with pytest.raises(ValueError, match=r"as_tuple must be None, True or False, got .*'False'"):
        Blocks([nn.Linear(2, 2)], as_tuple="False")  # type: ignore[arg-type]


class Alike(models.Module):
    """A loop over blocks, of which two and two do the same, that reads a shape in each round."""

    def build(self) -> None:
        layers = (nn.Linear(models.WIDTH, models.WIDTH, bias=i % 2 == 0) for i in range(6))
        self.blocks = nn.ModuleList(nn.Sequential(layer, nn.Tanh()) for layer in layers)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) * x.shape[-1] ** -0.1
        return x


def test_of_blocks_that_do_the_same_one_runs_without_data() -> None:
    torch.manual_seed(2)
    expected = train(Alike(), max_steps=2)
    torch.manual_seed(2)
    with patch.object(dry_runs, "run_as_set", wraps=dry_runs.run_as_set) as runs:
        found = train(Alike(), max_steps=2, devices=1, strategy=GPipeStrategy(3))
    torch.testing.assert_close(found, expected, atol=1e-10, rtol=0)
    assert len({id(call.args[0]) for call in runs.call_args_list}) == 2
