"""Steps per micro-batch that compute samples together are told of, and no others."""

from __future__ import annotations

import gc
import itertools
import logging
import warnings
import weakref
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_gpipe import GPipeStrategy
from lightning_gpipe.strategy.exchange import Exchange
from lightning_gpipe.strategy.halves import halves_of
from tests.ranks import run_ranks
from tests.training import train, trainer

F = nn.functional
SAMPLES, FEATURES, TOKENS, WIDTH, CLASSES = 16, 12, 8, 16, 20


class Step(L.LightningModule):
    """Its step gets numbers ``[samples, features]``, tokens, classes and weights per sample."""

    #: Makes a loss, or what a step returns, of the module and these.
    loss: Any

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.stem = nn.Embedding(CLASSES, WIDTH), nn.Linear(FEATURES, WIDTH)
        self.body = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
        self.head, self.value = nn.Linear(WIDTH, CLASSES), nn.Linear(WIDTH, 1)
        self.attention = nn.MultiheadAttention(WIDTH, 2, dropout=0.1, batch_first=True)
        self.recurrent = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.register_buffer("count", torch.zeros(()))
        self.counts, self.generator = np.zeros(1), torch.Generator().manual_seed(0)

    def training_step(self, batch: list[Tensor], index: int) -> Any:
        return type(self).loss(self, *batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def texts_of(
    name: str, stages: int = 1, chunks: int = 4, samples: int = SAMPLES, **options: Any
) -> list[str]:
    """What a run warns of."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLES, FEATURES, generator=generator)
    tokens = torch.randint(1, CLASSES, (SAMPLES, TOKENS), generator=generator)
    y = torch.randint(0, CLASSES, (SAMPLES,), generator=generator)
    w = torch.rand(SAMPLES, generator=generator)
    data = TensorDataset(*(each[:samples] for each in (x, tokens, y, w)))
    torch.manual_seed(0)
    module = type("Kind", (Step,), {"loss": (ALONE | TOGETHER)[name]})()
    strategy = GPipeStrategy(chunks, step="micro-batch", backbone="body")
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        train(
            module,
            DataLoader(data, samples),
            strategy=strategy,
            devices=stages,
            max_epochs=3,
            **options,
        )
    texts = [str(each.message) for each in found]
    return [text for text in texts if "together" in text or "different numbers" in text]


def scores_of(m: Any, x: Tensor) -> Tensor:
    scores: Tensor = m.head(m.body(m.stem(x)))
    return scores


def padded(m: Any, x: Tensor, tokens: Tensor, y: Tensor, w: Tensor) -> Any:
    scores, mask = m.head(m.body(m.embed(tokens)))[:, :-1], tokens[:, 1:] > 3
    losses = F.cross_entropy(scores.transpose(1, 2), tokens[:, 1:], reduction="none")
    count = mask.sum()
    m.log("loss", (losses * mask).sum() / count)
    m.log("product", torch.einsum("ij,ij->", losses, mask / count))  # counts by the weight
    m.log("perplexity", ((losses * mask).sum() / count).exp())
    m.log("accuracy", ((scores.argmax(-1) == tokens[:, 1:]) & mask).sum() / count)
    return {"loss": (losses * mask).sum() / count, "weight": count}


def diffused(m: Any, x: Tensor, tokens: Tensor, y: Tensor, w: Tensor) -> Tensor:
    noise, share = torch.randn_like(x), torch.rand(len(x), 1)
    return F.mse_loss(m.body(m.stem(share * x + (1 - share) * noise))[:, :FEATURES], noise)


def masked(m: Any, x: Tensor, tokens: Tensor, y: Tensor, w: Tensor) -> Tensor:
    hidden = m.embed(tokens)
    places = torch.rand(tokens.shape).argsort(1)[:, :4, None]
    kept = hidden.gather(1, places.expand(-1, -1, WIDTH))
    return F.mse_loss(F.dropout(m.body(kept), 0.3), places.float().expand(-1, -1, WIDTH))


def preferred(m: Any, x: Tensor, tokens: Tensor, y: Tensor, w: Tensor) -> Tensor:
    both = torch.cat([tokens, tokens.flip(1)])
    scores = m.head(m.body(m.embed(both))).log_softmax(-1)
    chosen, rejected = scores.gather(2, both[..., None]).sum((1, 2)).chunk(2)
    return -F.logsigmoid(0.1 * (chosen - rejected)).mean()


def in_another_order(m: Any, x: Tensor, tokens: Tensor, y: Tensor, w: Tensor) -> Tensor:
    order = torch.randperm(len(x))
    return F.cross_entropy(scores_of(m, x[order]), y[order])


def sorted_by_length(m: Any, x: Tensor, tokens: Tensor, y: Tensor, w: Tensor) -> Tensor:
    order = w.argsort()
    return F.cross_entropy(m.head(m.body(m.embed(tokens[order])).mean(1)), y[order])


def changed_in_place(m: Any, x: Tensor, tokens: Tensor, y: Tensor, w: Tensor) -> Tensor:
    mask = torch.zeros_like(x)
    mask[:, ::2] = 1
    x = x.clone()
    x *= mask
    x[x > 2] = 2
    losses = F.cross_entropy(F.relu(scores_of(m, x) * 1, inplace=True), y, reduction="none")
    losses *= w
    return losses.mean()


def attended(m: Any, x: Tensor, tokens: Tensor, y: Tensor, w: Tensor) -> Tensor:
    hidden = m.body(m.embed(tokens))
    return F.cross_entropy(m.head(m.attention(hidden, hidden, hidden)[0].mean(1)), y)


def stable(m: Any, x: Tensor, tokens: Tensor, y: Tensor, w: Tensor) -> Tensor:
    scores = scores_of(m, x)
    scores = scores - scores.max().detach()
    return (scores.exp().sum(1).log() - scores.gather(1, y[:, None])[:, 0]).mean()


def clipped(m: Any, x: Tensor, tokens: Tensor, y: Tensor, w: Tensor) -> Tensor:
    policy = torch.distributions.Categorical(logits=scores_of(m, x))
    ratio = (policy.log_prob(y) + w).exp()
    gain = torch.min(ratio * x[:, 0], ratio.clamp(0.8, 1.2) * x[:, 0])
    return -gain.mean() - 0.01 * policy.entropy().mean()


def by_own_generator(m: Any, x: Tensor, tokens: Tensor, y: Tensor, w: Tensor) -> Tensor:
    noise = torch.randn(x.shape, generator=m.generator)
    return F.mse_loss(m.body(m.stem(x + noise))[:, :FEATURES], noise)


def by_shares(m: Any, x: Tensor, tokens: Tensor, y: Tensor, w: Tensor) -> Tensor:
    share = torch.distributions.Beta(1.5, 1.0).sample((len(x), 1))
    return F.mse_loss(m.body(m.stem(share * x))[:, :FEATURES], x)


def drawn_until_it_fits(m: Any, x: Tensor, tokens: Tensor, y: Tensor, w: Tensor) -> Tensor:
    sizes = 1 + F.softplus(m.value(m.body(m.stem(x)))[:, 0])
    return (torch.distributions.Gamma(sizes, 1.0).rsample() - torch.poisson(20 * w)).square().mean()


def chosen_with_dropout(m: Any, x: Tensor, tokens: Tensor, y: Tensor, w: Tensor) -> Any:
    mask = tokens > 6
    scores = m.head(F.dropout(m.body(m.embed(tokens))[mask], 0.3))
    count = mask.sum()
    return {"loss": F.cross_entropy(scores, tokens[mask], reduction="sum") / count, "weight": count}


def logged_by_count(m: Any, x: Tensor, tokens: Tensor, y: Tensor, w: Tensor) -> Tensor:
    scores, some = scores_of(m, x), x[:, 0] > 0
    m.log("of some", F.cross_entropy(scores, y.where(some, -100)))
    m.log("weights of some", (w * some).sum() / some.sum())
    count = some.sum()
    m.log("guarded", torch.where(count != 0, (scores[:, 0].exp() * some).sum() / count, 0.0))
    return F.cross_entropy(scores, y)


def of_a_group(m: Any, x: Tensor, tokens: Tensor, y: Tensor, w: Tensor) -> Tensor:
    """One sample is a group of answers, whose advantages cancel each other."""
    scores = m.value(m.body(m.embed(tokens)))[..., 0]
    rewards = x[:, :TOKENS] - x[:, :TOKENS].mean(1, keepdim=True)
    gains = (scores - scores.detach()).exp() * rewards
    m.log("reward", rewards.sum(1).mean())
    return (-gains.sum(1) / TOKENS).mean() + torch.stack([gain.mean() for gain in gains]).mean()


def packed(m: Any, x: Tensor, tokens: Tensor, y: Tensor, w: Tensor) -> Tensor:
    lengths = (tokens[:, 0] % TOKENS + 1).cpu()
    rows = nn.utils.rnn.pack_padded_sequence(m.embed(tokens), lengths, True, False)
    return F.cross_entropy(m.head(m.body(m.recurrent(rows)[1][0][-1])), y)


ALONE: dict[str, Any] = {
    "packed": packed,
    "advantages of each": of_a_group,
    "tokens that aren't padding": padded,
    "noise": diffused,
    "random places of each": masked,
    "preferences": preferred,
    "another order": in_another_order,
    "sorted": sorted_by_length,
    "in place": changed_in_place,
    "attention of each": attended,
    "less the largest": stable,
    "a clipped policy": clipped,
    "logged means over some": logged_by_count,
    "a generator of its own": by_own_generator,
    "random shares": by_shares,
    "numbers that are drawn until one fits": drawn_until_it_fits,
    "chosen tokens with dropout": chosen_with_dropout,
    "two views": lambda m, x, t, y, w: F.cross_entropy(
        scores_of(m, torch.cat([x, x + 0.1 * torch.randn_like(x)])), torch.cat([y, y])
    ),
    "a mean of half precision": lambda m, x, t, y, w: scores_of(m, x).mean(0).float().sum(),
    "picked by number": lambda m, x, t, y, w: (
        -scores_of(m, x).log_softmax(1)[torch.arange(len(x)), y].mean()
    ),
    "true and false": lambda m, x, t, y, w: F.binary_cross_entropy_with_logits(
        m.value(m.body(m.stem(torch.cat([x, -x]))))[:, 0],
        torch.cat([torch.ones(len(x)), torch.zeros(len(x))]),
    ),
    "a hinge that each keeps": lambda m, x, t, y, w: F.relu(scores_of(m, x) - 1e3).mean(),
    "logged functions of means": lambda *given: logged_functions(*given),
    "time first": lambda m, x, t, y, w: F.cross_entropy(
        m.head(m.body(m.embed(t).transpose(0, 1)).mean(0)), y
    ),
    "mapped": lambda m, x, t, y, w: torch.vmap(F.cross_entropy)(scores_of(m, x), y).mean(),
}


def rewarded(m: Any, x: Tensor, tokens: Tensor, y: Tensor, w: Tensor) -> Tensor:
    policy = torch.distributions.Categorical(logits=scores_of(m, x))
    chosen = policy.sample()
    reward = (chosen == y).float() + (w > 0.5)
    return -((reward - reward.mean()) * policy.log_prob(chosen)).mean()


def by_turns(m: Any, x: Tensor, tokens: Tensor, y: Tensor, w: Tensor) -> Tensor:
    scores = scores_of(m, x)
    shares = scores.detach().exp()
    for dim in (0, 1, 0, 1):
        shares = shares / shares.sum(dim, keepdim=True)
    return -(shares * scores.log_softmax(1)).sum(1).mean()


def self_paced(m: Any, x: Tensor, tokens: Tensor, y: Tensor, w: Tensor) -> Tensor:
    losses = F.cross_entropy(scores_of(m, x), y, reduction="none")
    return (losses * (losses.detach().mean() - losses.detach()).exp()).mean()


def at_risk(m: Any, x: Tensor, tokens: Tensor, y: Tensor, w: Tensor) -> Tensor:
    risks = m.value(m.body(m.stem(x)))[:, 0][w.argsort(descending=True)]
    return -(risks - risks.logcumsumexp(0)).mean()


def mixed_up(m: Any, x: Tensor, tokens: Tensor, y: Tensor, w: Tensor) -> Tensor:
    hidden, order = m.embed(tokens), torch.randperm(len(x))
    scores = m.head(m.body(0.7 * hidden + 0.3 * hidden[order]).mean(1))
    return 0.7 * F.cross_entropy(scores, y) + 0.3 * F.cross_entropy(scores, y[order])


def only_logged(m: Any, x: Tensor, tokens: Tensor, y: Tensor, w: Tensor) -> Tensor:
    scores = scores_of(m, x)
    codes = scores.detach() - scores.detach().mean(0)
    m.log("covariance", (codes.T @ codes)[0, 1] / len(x))
    return F.cross_entropy(scores, y)


def logged_negative(m: Any, x: Tensor, tokens: Tensor, y: Tensor, w: Tensor) -> Tensor:
    scores = scores_of(m, x)
    alike = F.normalize(scores) @ F.normalize(scores).T
    pairs = (y.view(-1, 1) == y).float() * (1 - torch.eye(len(x)))
    m.log("pairs", -((pairs * alike).sum(1) / pairs.sum(1).clamp(min=1)).mean())
    return F.cross_entropy(scores, y)


def logged_hinge(m: Any, x: Tensor, tokens: Tensor, y: Tensor, w: Tensor) -> Tensor:
    scores = scores_of(m, x)
    m.log("active", (torch.cdist(scores, scores) > 1e3).float().mean())
    return F.cross_entropy(scores, y)


def logged_functions(m: Any, x: Tensor, tokens: Tensor, y: Tensor, w: Tensor) -> Tensor:
    scores = scores_of(m, x)
    loss = F.cross_entropy(scores, y)
    m.log("minus", -loss)
    m.log("perplexity", loss.exp())
    m.log("root", (m.value(scores @ m.head.weight)[:, 0] - w).square().mean().sqrt())
    m.log("wrong", 1 - (scores.argmax(1) == y).float().mean())
    return loss


def logged_first(m: Any, x: Tensor, tokens: Tensor, y: Tensor, w: Tensor) -> Tensor:
    losses = F.cross_entropy(scores_of(m, x), y, reduction="none")
    m.log("first", losses[0])
    return losses.mean()


def logged_half(m: Any, x: Tensor, tokens: Tensor, y: Tensor, w: Tensor) -> Tensor:
    losses = F.cross_entropy(scores_of(m, x), y, reduction="none")
    m.log("half", losses[: len(losses) // 2].mean())
    return losses.mean()


def compared(m: Any, x: Tensor, tokens: Tensor, y: Tensor, w: Tensor) -> Tensor:
    views = scores_of(m, torch.cat([x, -x, x + 1])).chunk(3)
    one, other, third = (F.normalize(view, dim=1) for view in views)
    same = torch.arange(len(x))
    return F.cross_entropy(one @ other.T, same) + F.cross_entropy(one @ third.T, same)


TOGETHER: dict[str, Any] = {
    "views": compared,
    "rewards": rewarded,
    "shares of samples": by_turns,
    "self-paced": self_paced,
    "risks": at_risk,
    "mixup of what is embedded": mixed_up,
    "a covariance that is logged": only_logged,
    "a negative mean that is logged": logged_negative,
    "a hinge that is logged": logged_hinge,
    "a first one that is logged": logged_first,
    "a half that is logged": logged_half,
    "a share of itself": lambda m, x, t, y, w: (
        (loss := F.cross_entropy(scores_of(m, x), y)) / loss.detach()
    ),
    "a hinge that pairs keep": lambda m, x, t, y, w: F.relu(
        torch.cdist(s := scores_of(m, x), s) - 1e3
    ).mean(),
    "by its place": lambda m, x, t, y, w: (
        F.cross_entropy(scores_of(m, x), y, reduction="none") * torch.linspace(0, 1, 16)[: len(x)]
    ).mean(),
    "one sample, of normalized scores": lambda m, x, t, y, w: F.cross_entropy(
        F.normalize(scores_of(m, x)), y, reduction="none"
    )[0],
    "one that all have": lambda m, x, t, y, w: F.mse_loss(scores_of(m, x)[:, 0] - w.mean(), w),
}


@pytest.mark.parametrize("name", ALONE)
def test_nothing_is_told_of_samples_that_are_alone(name: str) -> None:
    assert texts_of(name, chunks=5) == texts_of(name, chunks=6) == []  # of 4 samples, then 3


def test_samples_that_are_mixed_with_time_first_are_told_of(monkeypatch: Any) -> None:
    def mixed(m: Any, x: Tensor, tokens: Tensor, y: Tensor, w: Tensor) -> Tensor:
        hidden = m.embed(tokens)
        hidden = (hidden + 0.3 * hidden.mean(0)).transpose(0, 1)
        return F.cross_entropy(m.head(m.body(hidden).mean(0)), y)

    monkeypatch.setitem(TOGETHER, "mixed", mixed)
    (text,) = texts_of("mixed")
    assert text.startswith("What stands before the backbone computes samples together")


@pytest.mark.parametrize("name", TOGETHER)
def test_samples_that_are_computed_together_are_told_of(name: str) -> None:
    for chunks, samples in (4, 16), (5, 15), (8, 16):
        (text,) = texts_of(name, chunks=chunks, samples=samples)
        assert "together" in text
    assert texts_of(name, chunks=1) == []


@pytest.mark.parametrize("name", ["self-paced", "padding", "noise", "half precision", "packed"])
def test_half_precision_tells_the_same(name: str) -> None:
    known = next(each for each in ALONE | TOGETHER if name in each)
    assert bool(texts_of(known, precision="bf16-mixed")) == (known in TOGETHER)


ON_TWO = "rewards", "mixup of what is embedded", "another order", "sorted", "preferences"


def told_on_ranks() -> list[bool]:
    return [bool(texts_of(name, 2)) for name in ON_TWO]


def test_the_stage_that_has_it_tells() -> None:
    first, last = run_ranks(told_on_ranks, 2)
    assert first == [False, True, False, False, False]
    assert last == [True, False, False, False, False]


def counted(m: Any, x: Tensor, tokens: Tensor, y: Tensor, w: Tensor) -> Tensor:
    m.count[None].add_(len(x))  # by a view of it
    return F.cross_entropy(scores_of(m, x), y)


def counted_by_numpy(m: Any, x: Tensor, tokens: Tensor, y: Tensor, w: Tensor) -> Tensor:
    torch.as_tensor(m.counts).add_(len(x))  # the array's own memory
    return F.cross_entropy(scores_of(m, x), y)


@pytest.mark.filterwarnings("ignore:The step changes the (buffer|attribute)")
@pytest.mark.parametrize("loss", [masked, by_own_generator, counted, counted_by_numpy])
def test_a_run_is_the_same_without_looks(loss: Any, monkeypatch: Any) -> None:
    def left() -> tuple[dict[str, Tensor], Any]:
        torch.manual_seed(0)
        module = type("Kind", (Step,), {"loss": loss})()
        data = TensorDataset(
            torch.randn(SAMPLES, FEATURES),
            torch.randint(1, CLASSES, (SAMPLES, TOKENS)),
            torch.randint(0, CLASSES, (SAMPLES,)),
            torch.rand(SAMPLES),
        )
        strategy = GPipeStrategy(4, step="micro-batch", backbone="body")
        train(module, DataLoader(data, SAMPLES), strategy=strategy, devices=1, max_epochs=2)
        return module.state_dict(), module.counts

    looked_at = left()
    monkeypatch.setattr(Exchange, "is_due", lambda self, kind: False)
    torch.testing.assert_close(looked_at, left(), rtol=0, atol=0)


def test_a_step_that_fails_is_not_held(monkeypatch: Any) -> None:
    made = list[Any]()

    def failing(m: Any, x: Tensor, tokens: Tensor, y: Tensor, w: Tensor) -> Tensor:
        scores = scores_of(m, x)
        if len(x) < SAMPLES:  # not where the whole batch is tried
            made.append(weakref.ref(scores))
            raise ValueError("It fails.")
        return F.cross_entropy(scores, y)

    kept, begin = list[Exchange](), Exchange.begin
    monkeypatch.setattr(Exchange, "begin", lambda e, *rest: kept.append(e) or begin(e, *rest))
    monkeypatch.setitem(ALONE, "failing", failing)
    with pytest.raises(ValueError, match="It fails"):
        texts_of("failing")
    gc.collect()
    assert len(kept) == 1
    assert [ref() for ref in made] == [None]


@pytest.mark.parametrize(
    ("limit", "at_most", "cause"),
    [("_ELEMENTS", 100, "more than 100 numbers"), ("_FUNCTIONS", 3, "more than 3 functions")],
)
def test_large_steps_are_not_looked_at(
    limit: str, at_most: int, cause: str, monkeypatch: Any, caplog: Any
) -> None:
    monkeypatch.setattr(f"lightning_gpipe.strategy.exchange.{limit}", at_most)
    assert texts_of("a covariance that is logged") == []
    assert caplog.text.count(cause) == caplog.text.count("can't be checked") == 1


def reading_first(m: Any, x: Tensor, tokens: Tensor, y: Tensor, w: Tensor) -> Tensor:
    losses = F.cross_entropy(scores_of(m, x), y, reduction="none")
    loss = losses.mean()
    m.log("known", (losses * w).mean())
    if float(losses.max()) > -1:
        m.log("unknown", (losses - losses.mean()).square().mean())
    m.log("count", m.count)
    return loss


def test_it_is_said_once_of_which_logged_values_nothing_is_known(
    monkeypatch: Any, caplog: Any
) -> None:
    monkeypatch.setitem(ALONE, "one", reading_first)
    assert texts_of("one") == []
    (said,) = [r.getMessage() for r in caplog.records if "it isn't known whether" in r.getMessage()]
    assert "What self.log('unknown', ...) logs. The step reads numbers by '__float__'." in said
    assert "'known'" not in said


def reading_in_turn(m: Any, x: Tensor, tokens: Tensor, y: Tensor, w: Tensor) -> Tensor:
    losses = F.cross_entropy(scores_of(m, x), y, reduction="none")
    if float(losses.max()) > -1:
        m.log(f"unknown {m.global_step // 2}", (losses - losses.mean()).square().mean())
    return losses.mean()


def test_it_is_said_of_each_logged_value_of_which_nothing_is_known(
    monkeypatch: Any, caplog: Any
) -> None:
    monkeypatch.setitem(ALONE, "one", reading_in_turn)
    assert texts_of("one") == []
    said = [r.getMessage() for r in caplog.records if "it isn't known whether" in r.getMessage()]
    assert len(said) > 1
    assert [f"'unknown {i}'" in text for i, text in enumerate(said)] == [True] * len(said)


def ranking(m: Any, x: Tensor, tokens: Tensor, y: Tensor, w: Tensor) -> Tensor:
    losses = F.cross_entropy(scores_of(m, x), y, reduction="none")
    m.log("largest", losses.detach().topk(2).values.mean())
    return losses.topk(2).values.mean()


def test_it_is_said_that_few_samples_show_no_rank(monkeypatch: Any, caplog: Any) -> None:
    monkeypatch.setitem(ALONE, "one", ranking)
    assert texts_of("one", chunks=SAMPLES // 2) == []
    cause = "Micro-batches of 2 samples may not show what 'topk' does."
    assert f"Here that can't be checked: {cause}" in caplog.text
    assert f"What self.log('largest', ...) logs. {cause}" in caplog.text


def reading(m: Any, x: Tensor, tokens: Tensor, y: Tensor, w: Tensor) -> Tensor:
    losses = F.cross_entropy(scores_of(m, x), y, reduction="none")
    return losses.mean() * (1 if float(losses.max()) > -1 else 2)


@pytest.mark.parametrize(
    ("loss", "chunks", "cause"),
    [
        (compared, SAMPLES, "A micro-batch has one sample."),
        (reading, 4, "The step reads numbers by '__float__'."),
        (drawn_until_it_fits, 4, "draws other numbers for the same sample."),
    ],
)
def test_it_is_said_once_why_a_loss_is_not_looked_at(
    loss: Any, chunks: int, cause: str, monkeypatch: Any, caplog: Any
) -> None:
    monkeypatch.setitem(ALONE, "one", loss)
    assert texts_of("one", chunks=chunks) == []
    assert caplog.text.count("Here that can't be checked") == 1
    assert cause in caplog.text


def test_nothing_is_said_of_a_loss_that_is_looked_at(caplog: Any) -> None:
    assert texts_of("two views") == []
    assert "can't be checked" not in caplog.text


class OfLists(L.LightningDataModule):
    """Gives the labels as lists, as questions with several answers have them."""

    def train_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(0)
        rows = torch.randn(SAMPLES, FEATURES, generator=generator)
        return DataLoader([(rows, [(3 * i) % CLASSES for i in range(SAMPLES)])], batch_size=None)


def one_by_one(m: Any, x: Tensor, labels: list[int]) -> Tensor:
    targets = torch.zeros(len(x), CLASSES)
    for i, label in enumerate(labels):
        targets[i, label] = 1.0
    return F.binary_cross_entropy_with_logits(scores_of(m, x), targets)


def at_once(m: Any, x: Tensor, labels: list[int]) -> Tensor:
    return F.cross_entropy(scores_of(m, x), torch.tensor(labels))


def of_pairs(m: Any, x: Tensor, labels: list[int]) -> Tensor:
    scores = scores_of(m, x)
    return F.cross_entropy(scores @ scores.T, torch.arange(len(x)))


@pytest.mark.parametrize(
    ("loss", "is_told"), [(one_by_one, False), (at_once, False), (of_pairs, True)]
)
def test_targets_of_lists_are_not_exchanged(loss: Any, is_told: bool, caplog: Any) -> None:
    module = type("Kind", (Step,), {"loss": loss})()
    strategy = GPipeStrategy(4, step="micro-batch", backbone="body")
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        train(module, OfLists(), strategy=strategy, max_epochs=3)
    assert any("together" in str(each.message) for each in found) == is_told
    assert ("It makes a tensor of what a list in the batch says" in caplog.text) != is_told


def said_on_replicas() -> list[str]:
    """What a run of two replicas logs, of which the first one's steps are looked at."""
    said, log = list[str](), logging.getLogger("lightning.pytorch")
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(handler)
    module = type("Kind", (Step,), {"loss": lambda m, x, y: F.cross_entropy(scores_of(m, x), y)})()
    data = TensorDataset(torch.randn(SAMPLES, FEATURES), torch.randint(CLASSES, (SAMPLES,)))
    strategy = GPipeStrategy(2, stages=1, step="micro-batch", backbone="body")
    try:
        train(module, DataLoader(data, 4), strategy=strategy, devices=2, max_epochs=2)
    finally:
        log.removeHandler(handler)
    return said


def test_replicas_that_are_not_looked_at_say_nothing() -> None:
    for said in run_ranks(said_on_replicas, 2):
        assert not any("can't be checked" in text for text in said)


def test_a_function_without_a_name_is_told_of(monkeypatch: Any) -> None:
    from lightning_gpipe.strategy.replay import Replay

    monkeypatch.setattr(Replay, "mixer_of_mean", lambda self, value, weight: "")
    (text,) = texts_of("a covariance that is logged")
    assert "it is computed of some, or of several samples together" in text


def test_any_two_of_four_samples_are_together_and_apart() -> None:
    for seed, (i, j) in itertools.product(range(5), itertools.combinations(range(4), 2)):
        together = [bool(way[i] == way[j]) for way in halves_of(4, seed)]
        assert set(together) == {True, False}
    assert [len(halves_of(n, 0)) for n in (1, 2, 3, 9)] == [0, 1, 2, 3]


class Attending(nn.Module):
    """Attends to what comes before."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        return hidden + self.attention(hidden, hidden, hidden, attn_mask=mask)[0]


class Causal(L.LightningModule):
    """Blocks that are given a mask, with as many rows as the samples have, or a multiple."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.blocks = nn.ModuleList(Attending() for _ in range(4))

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        (tokens,) = batch
        hidden = self.table(tokens)
        mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool, device=tokens.device).triu(1)
        for block in self.blocks:
            hidden = block(hidden, mask)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), tokens.flatten())

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        self.log("error", self.training_step(batch, index))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def said_of_causal() -> list[str]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("lightning.pytorch").addHandler(handler)
    tokens = torch.randint(1, CLASSES, (SAMPLES, TOKENS))
    loader = DataLoader(TensorDataset(tokens), SAMPLES)
    strategy = GPipeStrategy(4, step="micro-batch")
    run = trainer(strategy=strategy, devices=2, max_epochs=2)
    run.fit(Causal(), loader, loader)
    return [text for text in said if "isn't known" in text]


def test_a_mask_that_blocks_are_given_is_not_taken_for_samples() -> None:
    assert run_ranks(said_of_causal, 2) == [[], []]
