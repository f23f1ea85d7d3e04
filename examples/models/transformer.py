"""Transformer-L, the language model of Table 1 of the GPipe paper."""

from torch import Tensor, nn

from .parts import Attention, Embedding, FeedForward, Head


class Layer(nn.Module):
    """Attention to what came before, and two linear layers.

    Args:
        width: Of the states [batch, T, width].
        hidden: Of the feed-forward part.
        heads: Of attention.
        dropout: Probability.
        scale: What initial feed-forward weights are multiplied with.
    """

    def __init__(self, width: int, hidden: int, heads: int, dropout: float, scale: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, width // heads)
        self.feed_forward = FeedForward(width, hidden, scale)
        self.dropout = nn.Dropout(dropout)

    def forward(self, states: Tensor) -> Tensor:
        normed = self.norm1(states)
        states = states + self.dropout(self.attention(normed, normed, is_causal=True))
        return states + self.dropout(self.feed_forward(self.norm2(states)))


def transformer(
    layers: int,
    width: int = 2048,
    hidden: int = 8192,
    heads: int = 32,
    vocabulary: int = 32_000,
    dropout: float = 0.0,
    scale_feed_forward: bool = False,
    clip_logits: float | None = None,
) -> nn.Sequential:
    """Transformer-L: L + 2 layers, from tokens [batch, T] to logits [batch, T, vocabulary].

    Args:
        layers: L.
        width: Of the model.
        hidden: Of the feed-forward parts.
        heads: Of attention.
        vocabulary: Number of tokens.
        dropout: Probability.
        scale_feed_forward: Whether feed-forward weights are initially divided by L.
        clip_logits: The largest magnitude of a logit; None: any.
    """
    scale = 1 / layers if scale_feed_forward else 1.0
    return nn.Sequential(
        Embedding(vocabulary, width),
        *(Layer(width, hidden, heads, dropout, scale) for _ in range(layers)),
        Head(width, vocabulary, clip_logits),
    )
