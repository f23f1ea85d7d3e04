"""Layers that take more than one argument: a Transformer's blocks, with masks and positions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

from torch import nn
from typing_extensions import override

#: Runs the layer with an index in the backbone on what the one before returned.
RunLayer: TypeAlias = Callable[[int, Callable[..., Any], Any], Any]


class Blocks(nn.Module):
    """A backbone of blocks that get the same extra arguments, such as masks and positions.

    It takes the place of the ``nn.ModuleList`` in which a model keeps its blocks::

        model.transformer.h = Blocks(model.transformer.h)  # GPT-2 of Hugging Face

    The model's own loop over the blocks then sees a single one, which runs them all, so the model's
    code stays as it is, and so do the names of its parameters: ``transformer.h.0.…``. Each block
    gets the hidden state of the one before (the first element, where a block returns a tuple) and
    all other arguments as they were given.

    Extra arguments whose first dimension is the batch's are split into micro-batches; others, such
    as positions ``[1, length]``, go to every micro-batch whole. Caches of keys and values are no
    tensors and can't be given: set ``use_cache=False``.

    Args:
        blocks: Called as ``block(hidden, *extra, **more)``; hidden ``[batch, …]``.
    """

    def __init__(self, blocks: Iterable[nn.Module]) -> None:
        super().__init__()
        for index, block in enumerate(blocks):
            self.add_module(str(index), block)

    def __iter__(self) -> Iterator[nn.Module]:
        yield self

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: Any) -> Any:
        return [self][index]

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run all blocks.

        Args:
            args: The hidden state, and what else the blocks get.
            kwargs: The same.

        Returns:
            What the last block returns.
        """
        value = self.pack(*args, **kwargs)
        for index, name in enumerate(self._modules):
            value = self.run(index, getattr(self, name), value)
        return value

    @staticmethod
    def pack(*args: Any, **kwargs: Any) -> Any:
        """The arguments as one value.

        Raises:
            TypeError: If the hidden state isn't the first of them.
        """
        if not args:
            raise TypeError(
                "Blocks takes the hidden state as its first positional argument; it was called with"
                f" {', '.join(kwargs) or 'nothing'} only."
            )
        return args[0], args[1:], kwargs

    def run(self, index: int, block: Callable[..., Any], value: Any) -> Any:
        """Run one block.

        Args:
            index: Its place.
            block: The block, or what stands in for it.
            value: What :meth:`pack` or the block before returned.

        Returns:
            The next block's value, or the last one's output.
        """
        output, extra, more = value
        hidden = output[0] if isinstance(output, tuple) else output
        output = block(hidden, *extra, **more)
        return output if index == len(self._modules) - 1 else (output, extra, more)


def run_layer(index: int, layer: Callable[..., Any], value: Any) -> Any:
    """Run a layer of an ``nn.Sequential``; see :meth:`Blocks.run`."""
    return layer(value)


def runner(backbone: nn.Module) -> RunLayer:
    """How the layers of a backbone are run."""
    return backbone.run if isinstance(backbone, Blocks) else run_layer
