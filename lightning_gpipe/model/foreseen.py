"""What the blocks of a running loop will return: shapes and types, which the model may go by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils._pytree import TreeSpec

from lightning_gpipe.model.dry_runs import is_tensor, on_meta
from lightning_gpipe.model.looks import Kind, Looks
from lightning_gpipe.model.loop_notes import LoopNotes, Value
from lightning_gpipe.model.promise import Promised, Unknown, is_promise, refusal


class Called(NamedTuple):
    """A call of a block, or of a part of one.

    Args:
        module: It.
        leaves: What it is called with.
        spec: The structure of that.
        main: Which of the leaves is the hidden state.
    """

    module: nn.Module
    leaves: Sequence[Any]
    spec: TreeSpec
    main: int


@dataclass(slots=True)
class Foreseen:
    """What is known of it before the blocks run.

    Args:
        hidden: What the first block is called with.
        is_cast: Whether autocast is on, so that a run without data tells nothing of types.
        looks: What blocks return.
        notes: Where it is noted what the model goes by.
    """

    hidden: Any
    is_cast: bool
    looks: Looks
    notes: LoopNotes
    _calls: dict[Value, Called] = field(default_factory=dict)

    def call(self, value: Value, called: Called) -> None:
        """Note a call that makes a value."""
        leaves = [leaf._promised if is_promise(leaf) else leaf for leaf in called.leaves]
        self._calls[value] = called._replace(leaves=leaves)  # promises would seem to be kept

    def clear(self) -> None:
        """Forget the calls, which know the loop."""
        self._calls.clear()

    def kinds(self, value: Value, count: int) -> tuple[Kind, ...]:
        """What a call returns beside its hidden state, of so many elements."""
        call = self._calls[value]

        def arguments() -> tuple[list[Any], TreeSpec]:
            return [self.look(leaf) for leaf in call.leaves], call.spec

        kinds = self.looks.kinds(value, call.module, arguments, self.hidden.shape[0], count)
        for i, kind in enumerate(kinds, 1):
            if kind is Kind.NOTHING:
                self.notes.expect(value._replace(element=i), None)
        return kinds

    def read(self, promised: Promised, what: str) -> Tensor:
        """A tensor that has the ``"shape"`` or the ``"dtype"`` of a promise, as far as it is known.

        The block must return it so, if it is a block's.
        """
        value: Value = promised.value
        self.notes.use(value)
        is_cast, is_returned = what == "dtype" and self.is_cast, value.whole() in self._calls
        if is_cast and (value.element or not is_returned):
            raise refusal(Tensor.dtype)
        look: Tensor
        if is_cast:  # that of its hidden state
            call = self._calls[value]
            look = self.look(call.leaves[call.main])
        else:
            look = self.look(promised)
        if is_returned:
            self.notes.expect(value, look, what == "dtype")
        return look

    def look(self, leaf: Any) -> Any:
        """A tensor on the meta device that looks as one does; what is no tensor stays."""
        if is_promise(leaf):
            leaf = leaf._promised
        if type(leaf) is not Promised:
            return on_meta(leaf) if is_tensor(leaf) else leaf
        if leaf.look is None:
            value: Value = leaf.value
            call = self._calls[value.whole()]
            looks = [self.look(one) for one in call.leaves]
            if value.element:
                leaf.look = self.looks.beside(
                    *(value.whole(), call.module, looks, call.spec, value.element)
                )
                if leaf.look is None:
                    Unknown().refuse()
            else:
                leaf.look = self.looks.of(value, call.module, looks, call.spec, looks[call.main])
        return leaf.look
