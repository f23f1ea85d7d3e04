"""Listens to a model's loop over its layers, and runs them all where the last one is called.

The model's loop can't be cut, but it can be listened to. In the pipeline it meets stand-ins, which
note what each block is called with and return a promise in place of the block's output. The call of
the last one runs all blocks, on all stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from types import NoneType
from typing import Any, TypeAlias

from torch import nn
from torch.utils._pytree import tree_leaves, tree_unflatten

from lightning_gpipe.model.capturing import not_capturing
from lightning_gpipe.model.checkpointing import refuse_checkpointed, refuse_repeats
from lightning_gpipe.model.dry_runs import AsWritten, DryRuns
from lightning_gpipe.model.handed_on import HandedOn
from lightning_gpipe.model.layer_state import places_of
from lightning_gpipe.model.looks import Looks
from lightning_gpipe.model.loop import Loop
from lightning_gpipe.model.parameters import layers_of
from lightning_gpipe.model.promise import CONDITION, Promise, Unknown, with_known
from lightning_gpipe.model.returns import Returns
from lightning_gpipe.model.run_layer import RunLayer, run_layer
from lightning_gpipe.model.stand_in import StandIn, StandIns, stand_in
from lightning_gpipe.model.watched import WatchedPlace

#: Runs all blocks: called with the first one's value and how each is run.
RunBlocks: TypeAlias = Callable[[Any, RunLayer], Any]

#: The attributes of a list whose loops are listened to.
OWN = "as_tuple", "_listener", "_before"


class Listening(nn.Module):
    """A list of layers whose loops, while a function is attached, meet stand-ins of its layers."""

    as_tuple: bool | None = None
    _listener: Listener | None = None
    _before: Listener | None = None

    @property
    def is_attached(self) -> bool:
        """Whether loops meet stand-ins."""
        return self._listener is not None

    def attach(self, run: RunBlocks, as_written: AsWritten, is_alone: bool) -> None:
        """Let loops over the layers meet stand-ins.

        Args:
            run: Runs what they note.
            as_written: Lets a layer be called as if it were in no pipeline.
            is_alone: Whether one rank has all layers, which the model may call by themselves, too.
        """
        before = self._before  # of which a running loop may have stand-ins
        if before is None or not before.runs(run, is_alone):
            self._forget()
            before = Listener(run, as_written, is_alone)
        self._listener = before

    def detach(self) -> None:
        """Be an ordinary list again."""
        self._before, self._listener = self._listener, None

    def state_without(self) -> dict[str, Any]:
        """Its attributes without those by which loops are listened to, for its copies."""
        return {name: value for name, value in self.__dict__.items() if name not in OWN}

    def give_back(self, kind: type[nn.Module]) -> None:
        """Be of a class again that the list was of before it was taken over."""
        self._forget()
        for name in OWN:
            self.__dict__.pop(name, None)
        self.__class__ = kind  # type: ignore[assignment]

    def _forget(self) -> None:
        for listener in (self._before, self._listener):
            if listener is not None:
                listener.forget()

    def __iter__(self) -> Iterator[Any]:
        listener, layers = self._listener, self._modules.values()
        return iter(self._stand_ins(listener) if listener is not None else layers)

    def named_children(self) -> Iterator[tuple[str, Any]]:
        """The layers, or what stands in for them, with their names; so does ``children``."""
        listener = self._listener
        if listener is None:
            return super().named_children()
        return iter(listener.loop_over(self, self._named_stand_ins(listener)))

    def __reversed__(self) -> Iterator[Any]:
        self._check_backwards()
        return reversed(layers_of(self))

    def __getitem__(self, index: Any) -> Any:
        is_backwards = isinstance(index, slice) and (index.step or 1) < 0
        if is_backwards:
            self._check_backwards()
        if self._listener is None or is_backwards or self._gives_layers(self._listener):
            return super().__getitem__(index)  # type: ignore[misc]
        return self._stand_ins(self._listener)[index]

    def _check_backwards(self) -> None:
        """Refuse a loop that goes backwards over layers that run in stages; others are called."""
        if self._listener is not None and not self._listener.is_alone:
            raise RuntimeError(
                "The model loops backwards over the backbone's layers, which run in order, on their"
                " stages. If its steps do so, keep the layers in the order in which they"
                " run. Do other things, such as sampling from a normalizing flow, outside the run,"
                " or in one with devices=1 and step='mini-batch', where it runs as written:"
                " trainer.save_checkpoint saves the whole module."
            )

    def _gives_layers(self, listener: Listener) -> bool:
        """Whether an index gives the layers themselves, though a function is attached."""
        return False

    def is_last(self, met: Sequence[Any]) -> bool:
        """Whether what a loop has met last, if anything, is the last layer, its key or both."""
        last = next(each for each in reversed(self._modules.items()) if each[1] is not None)
        return any(each in (*last, last) for each in met)

    def _stand_ins(self, listener: Listener) -> StandIns:
        found = [listener.stand_in(self, i, "", layer) for i, layer in enumerate(layers_of(self))]
        return StandIns(found, partial(listener.loop_over, self))

    def _named_stand_ins(self, listener: Listener) -> list[tuple[str, Any]]:
        """What stands in for the layers with their names, each once, as modules have children."""
        named = list(super().named_children())
        made = dict(zip(layers_of(self), list.__iter__(self._stand_ins(listener)), strict=True))
        return [(name, made[layer]) for name, layer in named]


class Listener:
    """Listens to loops over the blocks; a copy of the blocks has none."""

    def __init__(self, run: RunBlocks, as_written: AsWritten, is_alone: bool) -> None:
        self._run, self.is_alone = run, is_alone
        self._dry_runs = DryRuns(as_written)
        self._looks = Looks(self._dry_runs)
        self._loop: Loop | None = None
        self._handed_on: HandedOn | None = None
        self._loops = 0
        self._stand_ins: dict[tuple[int, str], StandIn] = {}
        self._returns: dict[tuple[Any, ...], Returns] = {}  # by the block, part, mode and flags
        self._places: dict[int, list[WatchedPlace]] = {}  # of each block

    def __reduce__(self) -> tuple[Any, ...]:
        return NoneType, ()

    def forget(self) -> None:
        """Let go of its stand-ins, which refer to it."""
        self._stand_ins.clear()

    @property
    def is_looped_over(self) -> bool:
        """Whether a loop over the blocks runs."""
        return self._loops > 0

    def loop_over(self, blocks: Listening, stand_ins: Sequence[Any]) -> Iterator[Any]:
        """What a loop meets. Where it has skipped the last block, its end runs the others."""
        before, layers = self._loop, layers_of(blocks)
        self._loops += 1
        try:
            yield from stand_ins
            is_end = self._loops == 1 and blocks.is_last(stand_ins[-1:])
            if self._loop is not None and self._loop is not before and is_end:
                self._end(self._loop, layers)
        finally:
            self._loops -= 1

    def runs(self, run: RunBlocks, is_alone: bool) -> bool:
        """Whether it lets the same run the blocks."""
        return self._run == run and self.is_alone == is_alone

    def stand_in(self, blocks: Listening, index: int, part: str, module: Any) -> StandIn:
        """What a loop meets in place of a block, or of a part of one.

        Args:
            blocks: All of them.
            index: The block.
            part: The part's dotted name in it; empty: the block itself.
            module: It.
        """
        known = self._stand_ins.get((index, part))
        if known is not None and known == module:
            return known  # models compare blocks

        def of_part(name: str, inner: Any) -> Any:
            if inner is None:
                return None
            return self.stand_in(blocks, index, f"{part}.{name}".lstrip("."), inner)

        call = partial(self.hear, blocks, index, part, module)
        self._stand_ins[index, part] = made = stand_in(module, call, of_part)
        return made

    def hear(
        self,
        blocks: Listening,
        index: int,
        part: str,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: Any,
    ) -> Any:
        """Note the call of a block; the last one runs them all. Collective over the pipeline then.

        Args:
            blocks: All of them.
            index: The block.
            part: The part of it that is called; empty: the block itself.
            module: What is called.
            args: What it is called with.
            kwargs: The same.

        Returns:
            A promise; from the last block its output.
        """
        refuse_repeats()
        if index == 0:
            refuse_checkpointed()
        layers, (args, kwargs, _) = layers_of(blocks), with_known(args, kwargs)
        if index == 0 and not part:
            self._handed_on = HandedOn.begun(args, kwargs)
        if self._handed_on is not None:
            return self._hand_on(self._handed_on, index, layers, args, kwargs)
        loop, named = self._loop, [name for name, _ in layers[index].named_children()]
        if loop is None or (index == 0 and loop.begins(part, args, kwargs)):
            loop = Loop.begin(self._looks, args, kwargs)
            self._dry_runs.follow(loop.hidden)
        self._loop = loop
        is_last = index == len(layers) - 1
        if part and not loop.notes.is_due(part, index, named, is_last):
            raise RuntimeError(
                f"The loop calls '{part}' of block {index} otherwise than the parts of the block"
                f" before: call the same of each, in the same order. {CONDITION}"
            )
        leaves = tree_leaves((args, kwargs))
        flags = [leaf for leaf in leaves if type(leaf) in (bool, str, NoneType)]
        mode = index, part, module.training, *flags, len(leaves)
        if mode not in self._returns:
            is_told = not part and blocks.as_tuple is False
            if any(Unknown in type(leaf).__mro__ for leaf in leaves):  # as the block before
                before = self._returns.get((part, module.training), Returns())
                self._returns[mode] = replace(before, is_known=False)
            elif is_told:
                self._returns[mode] = Returns()
            else:
                self._returns[mode] = Returns.of(
                    self._dry_runs, module, *loop.on_meta(args, kwargs)
                )
                self._returns[part, module.training] = self._returns[mode]
        returns = self._returns[mode]
        value = loop.note(index, part, module, args, kwargs)
        if not loop.watched.has(index):
            loop.watched.block(index, layers[index], self._places_of(index, layers[index]))
        if not loop.notes.is_complete(len(layers), named):
            if returns.first:
                raise RuntimeError(
                    f"Block {index} returns {returns.first} first: let it return the hidden state"
                    f" [batch, …] first. {CONDITION}"
                )
            promise = loop.promise(value)
            promise._promised.why_unknown = returns.why_not
            if returns.is_known and (part or blocks.as_tuple is None):
                loop.notes.returns(value, "" if returns.spec is None else repr(returns.spec))
            if returns.spec is not None:
                beside = loop.beside(value, returns.spec.num_leaves - 1)
                return tree_unflatten([promise, *beside], returns.spec)
            return (promise,) if blocks.as_tuple and not part else promise
        return self._run_all(loop, layers, returns.unsplit)

    def _hand_on(
        self,
        running: HandedOn,
        index: int,
        layers: Sequence[nn.Module],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Note the call of a block that is given no tensor by itself; the last one runs them."""
        block = layers[index]
        handed = running.note(index, block, args, kwargs, self._places_of(index, block))
        if index < len(layers) - 1:
            return handed
        self._handed_on = None
        running.watched.check()
        with not_capturing(layers[0], len(layers)):
            return self._run(running.given, run_layer)

    def _end(self, loop: Loop, layers: Sequence[nn.Module]) -> None:
        """Run the blocks where the loop has ended without the last one, if it uses any."""
        output = loop.latest()
        if len(loop.notes.parts) < len(layers) and output is not None:
            loop.notes.skip(len(layers))
            output._promised.known = self._run_all(loop, layers, frozenset(), output)

    def _run_all(
        self,
        loop: Loop,
        layers: Sequence[nn.Module],
        unsplit: frozenset[int],
        output: Promise | None = None,
    ) -> Any:
        """Run the blocks; see :meth:`Loop.end`. Returns what comes out of the last one."""
        self._loop = None
        given, program, promises = loop.end(unsplit, output)
        with not_capturing(layers[0], len(layers)):
            made, more = program.parted(self._run(given, program.run))
        for promise, known in zip(promises[output is not None :], more, strict=True):
            promise._promised.known = known
        return program.without(made, Unknown())

    def _places_of(self, index: int, block: nn.Module) -> list[WatchedPlace]:
        """What a block can change and read beside its own attributes; looked for once a run."""
        if index not in self._places:
            found = places_of(block)
            self._places[index] = [WatchedPlace(p) for p in found if p.value is not block]
        return self._places[index]
