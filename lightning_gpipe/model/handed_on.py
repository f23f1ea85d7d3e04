"""A pass of a model's loop that hands a tuple or a dictionary from block to block, as it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_gpipe.model.loop import modes_of, other_modes, out_of_order
from lightning_gpipe.model.promise import Unknown, is_promise
from lightning_gpipe.model.watched import Watched, WatchedPlace


class Handed(Unknown):
    """Stands for what a block returns, which the next one alone may be given."""

    __slots__ = ()

    why = (
        "The loop hands no tensor from block to block, but a tuple or a dictionary, of which"
        " nothing is known before the last block is called. Hand it on as it is, `state ="
        " block(state)`, and use it behind the loop; or give blocks the hidden state [batch, …]"
        " as an argument by itself, `h, more = block(h, more)`."
    )


@dataclass(slots=True)
class HandedOn:
    """A pass that is like an ``nn.Sequential``'s.

    Args:
        given: What the first block is called with.
        watched: What must stay as it is meanwhile.
    """

    given: Any
    watched: Watched = field(default_factory=Watched)
    _modes: tuple[Any, ...] = ()
    _leaves: list[Any] = field(default_factory=list)
    _due: int = 0
    _latest: Any = None

    @classmethod
    def begun(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> HandedOn | None:
        """A pass whose first block is called with these arguments; None: it is another kind."""
        if len(args) != 1 or kwargs or isinstance(args[0], Tensor):
            return None
        tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
        if not tensors or any(map(is_promise, tensors)):
            return None
        begun = cls(args[0], _modes=modes_of(tensors[0]), _latest=args[0])
        begun._leaves = tree_leaves(args[0])
        for tensor in tensors:
            begun.watched.tensor(tensor)
        return begun

    def note(
        self,
        index: int,
        block: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        places: Sequence[WatchedPlace],
    ) -> Handed:
        """Note the call of a block.

        Args:
            index: The block.
            block: It.
            args: What it is called with.
            kwargs: The same.
            places: What it can change and read beside its own attributes.

        Raises:
            RuntimeError: If it isn't called with what the one before it returned alone.
        """
        if index != self._due:
            raise out_of_order(index, self._due)
        if len(args) != 1 or kwargs or args[0] is not self._latest:
            Handed().refuse()
        if [*map(id, tree_leaves(self.given))] != [*map(id, self._leaves)]:
            Handed().refuse()  # something was put into it
        first = next(leaf for leaf in self._leaves if isinstance(leaf, Tensor))
        if modes_of(first) != self._modes:
            raise other_modes(index)
        self.watched.block(index, block, places)
        self._due, self._latest = index + 1, (handed := Handed())
        return handed
