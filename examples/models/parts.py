"""What the Transformers are made of."""

import math

import torch
from torch import Tensor, nn


class Attention(nn.Module):
    """Multi-head attention.

    Args:
        width: Of the states, outside.
        heads: Their number.
        head_width: Channels of each head.
    """

    def __init__(self, width: int, heads: int, head_width: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(width, heads * head_width) for _ in range(3))
        self.out = nn.Linear(heads * head_width, width)

    def forward(
        self, states: Tensor, memory: Tensor, mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        """Attend from states [batch, T, width] to memory [batch, S, width].

        Args:
            states: Attend.
            memory: Is attended to.
            mask: [batch, S], which of the memory counts.
            is_causal: Whether a state sees only itself and what comes before.
        """
        query, key, value = (
            linear(given).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for linear, given in (
                (self.query, states), (self.key, memory), (self.value, memory),
            )
        )  # fmt: skip
        mask = None if mask is None else mask[:, None, None]
        found = nn.functional.scaled_dot_product_attention(
            query, key, value, mask, is_causal=is_causal
        )
        return self.out(found.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """Two linear layers.

    Args:
        width: Of the states.
        hidden: Between the two.
        scale: What their initial weights are multiplied with: a deep Transformer trains more
            safely with 1 / number of layers (section 5 of the paper).
    """

    def __init__(self, width: int, hidden: int, scale: float = 1.0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.scale = scale
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        for linear in (self.up, self.down):
            linear.reset_parameters()
            linear.weight.mul_(self.scale)

    def forward(self, states: Tensor) -> Tensor:
        return self.down(nn.functional.relu(self.up(states)))


class Embedding(nn.Module):
    """Tokens [batch, T] as states [batch, T, width], with the sines of their positions added."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(vocabulary, width)

    def forward(self, tokens: Tensor) -> Tensor:
        states = self.table(tokens)
        length, width = states.shape[1:]
        places = torch.arange(length, device=states.device).unsqueeze(1)
        channels = torch.arange(0, width, 2, device=states.device)
        angles = places * torch.exp(channels * (-math.log(10_000) / width))
        sines = torch.stack([angles.sin(), angles.cos()], dim=2).flatten(1)[:, :width]
        return states + sines.to(states.dtype)


class Head(nn.Module):
    """States as logits [batch, T, vocabulary].

    Args:
        width: Of the states.
        vocabulary: Number of tokens.
        clip: The largest magnitude of a logit, for deep Transformers (section 5 of the paper).
    """

    def __init__(self, width: int, vocabulary: int, clip: float | None = None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, elementwise_affine=False)  # the paper counts no parameters
        self.linear = nn.Linear(width, vocabulary, bias=False)
        self.clip = clip

    def forward(self, states: Tensor) -> Tensor:
        logits = self.linear(self.norm(states))
        return logits if self.clip is None else logits.clamp(-self.clip, self.clip)
