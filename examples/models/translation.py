"""T(L, H, A), the translation model of section 5 of the GPipe paper, as one sequence of layers.

Between two layers go the states of the source [batch, S, width], which of them count [batch, S],
and the states of the target [batch, T, width]. Encoder layers change the first and pass on the
last; decoder layers do the reverse.
"""

from typing import TypeAlias

from torch import Tensor, nn

from .parts import Attention, Embedding, FeedForward, Head

States: TypeAlias = tuple[Tensor, Tensor, Tensor]  # source, mask, target
HEAD_WIDTH = 64  # the number of heads widens attention: 64 channels each, whatever the width


class Start(nn.Module):
    """Embeds the tokens of source and target, of one vocabulary.

    Args:
        vocabulary: Number of tokens.
        width: Of the states.
        padding: The token that doesn't count.
    """

    def __init__(self, vocabulary: int, width: int, padding: int) -> None:
        super().__init__()
        self.embedding = Embedding(vocabulary, width)
        self.padding = padding

    def forward(self, tokens: tuple[Tensor, Tensor]) -> States:
        source, target = tokens
        return self.embedding(source), source != self.padding, self.embedding(target)


class EncoderLayer(nn.Module):
    """The source attends to itself."""

    def __init__(self, width: int, hidden: int, heads: int, dropout: float, scale: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, HEAD_WIDTH)
        self.feed_forward = FeedForward(width, hidden, scale)
        self.dropout = nn.Dropout(dropout)

    def forward(self, states: States) -> States:
        source, mask, target = states
        normed = self.norm1(source)
        source = source + self.dropout(self.attention(normed, normed, mask))
        source = source + self.dropout(self.feed_forward(self.norm2(source)))
        return source, mask, target


class DecoderLayer(nn.Module):
    """The target attends to what came before in it, and to the source."""

    def __init__(self, width: int, hidden: int, heads: int, dropout: float, scale: float) -> None:
        super().__init__()
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(width) for _ in range(3))
        self.attention = Attention(width, heads, HEAD_WIDTH)
        self.to_source = Attention(width, heads, HEAD_WIDTH)
        self.feed_forward = FeedForward(width, hidden, scale)
        self.dropout = nn.Dropout(dropout)

    def forward(self, states: States) -> States:
        source, mask, target = states
        normed = self.norm1(target)
        target = target + self.dropout(self.attention(normed, normed, is_causal=True))
        target = target + self.dropout(self.to_source(self.norm2(target), source, mask))
        target = target + self.dropout(self.feed_forward(self.norm3(target)))
        return source, mask, target


class End(nn.Module):
    """The target's states as logits."""

    def __init__(self, width: int, vocabulary: int, clip: float | None) -> None:
        super().__init__()
        self.head = Head(width, vocabulary, clip)

    def forward(self, states: States) -> Tensor:
        return self.head(states[2])


def translation(
    layers: int,
    hidden: int,
    heads: int,
    width: int = 1024,
    vocabulary: int = 64_000,
    padding: int = 0,
    dropout: float = 0.0,
    scale_feed_forward: bool = False,
    clip_logits: float | None = None,
) -> nn.Sequential:
    """T(L, H, A): 2 L + 2 layers, from (source [batch, S], target [batch, T]) to logits.

    The logits [batch, T, vocabulary] are those of the token that follows each of the target's.

    Args:
        layers: L, of the encoder, and of the decoder.
        hidden: H, of the feed-forward parts.
        heads: A, of attention.
        width: Of the model.
        vocabulary: Number of tokens, of both languages together.
        padding: The token that fills a source up.
        dropout: Probability.
        scale_feed_forward: Whether feed-forward weights are initially divided by L.
        clip_logits: The largest magnitude of a logit; None: any.
    """
    each = width, hidden, heads, dropout, 1 / layers if scale_feed_forward else 1.0
    return nn.Sequential(
        Start(vocabulary, width, padding),
        *(EncoderLayer(*each) for _ in range(layers)),
        *(DecoderLayer(*each) for _ in range(layers)),
        End(width, vocabulary, clip_logits),
    )
