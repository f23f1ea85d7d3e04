"""A backend for CPU tensors that grants no more than NCCL promises.

gloo is lenient: operations overtake each other, buffers are filled at any time, tags keep messages
apart. A program may work by that leniency, and hang or compute nonsense with NCCL. Here, over gloo:

- The operations of a queue run one after the other, as issued. A queue is a communicator's, the
  whole device's, or that of a pair of ranks (``Rules.queue``).
- A send ends when its receive runs, and tags count for nothing.
- The host may have to wait when it issues an operation: for the first one with each peer, or for
  every one (``Rules.issue``).
- What an operation writes is NaN until ``wait()``; what it reads must stay as it is until then.
- Ranks must issue matching operations: the same collectives, sends and receives of the same length.

A breach raises :class:`StrictError`, and is kept in :data:`violations`, since whoever catches the
error may hide it. The streams of a device aren't emulated: here ``wait()`` blocks the host.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

NAME = "strict"
QUEUES = ("group", "device", "pair")
ISSUES = ("async", "first", "block")
_POISON = 0xFF  # in every byte: NaN in every floating-point type
_READY, _BYTES = 1, 2  # gloo's tags underneath
_INTERNAL = (__file__, os.path.dirname(os.path.abspath(dist.__file__)), threading.__file__)


class StrictError(RuntimeError):
    """A program does what NCCL needn't put up with."""


class Aborted(RuntimeError):
    """The group was aborted."""


@dataclass(frozen=True, slots=True)
class Rules:
    """How hard to be.

    Args:
        queue: What runs in order: the operations of a ``group``, of the whole ``device``, or of a
            ``pair`` of ranks in a group, which both must open at once.
        issue: When the host waits for an operation that it issues: ``async`` never, ``first`` for
            the first one with each peer, ``block`` always.
        deadline_s: When an operation that doesn't end is taken for a deadlock.
    """

    queue: str = "group"
    issue: str = "async"
    deadline_s: float = 30.0

    def __post_init__(self) -> None:
        if self.queue not in QUEUES or self.issue not in ISSUES:
            raise ValueError(f"A mode is one of {QUEUES} and one of {ISSUES}, joined by a colon.")

    @classmethod
    def of(cls, mode: str, deadline_s: float = 30.0) -> Rules:
        """The rules of a mode such as ``"device:first"``."""
        which, _, issue = mode.partition(":")
        return cls(which, issue, deadline_s)


violations: list[str] = []
counts: Counter[str] = Counter()
_rules = Rules()
_device_lane: list[Lane] = []


def register(rules: Rules) -> None:
    """Make the backend known to this process, and forget what was seen."""
    global _rules
    _rules = rules
    _device_lane.clear()
    violations.clear()
    counts.clear()
    if NAME.upper() not in dist.Backend._plugins:
        defaults = dict(dist.Backend.default_device_backend_map)
        dist.Backend.register_backend(NAME, StrictGroup, devices=["cpu"])
        dist.Backend.default_device_backend_map.update(defaults)


def take_over(mode: str) -> None:
    """Put the backend in the place of NCCL in this process and those that it forks."""
    from lightning_gpipe.strategy import _lightning

    register(Rules.of(mode, deadline_s=60))
    default, init = _lightning.default_backend, dist.init_process_group

    def default_backend(device: torch.device) -> str:
        return NAME if device.type == "cpu" else default(device)

    def init_process_group(name: str, *args: Any, **options: Any) -> None:
        init(NAME if name == "gloo" else name, *args, **options)

    _lightning.default_backend = default_backend
    dist.init_process_group = init_process_group


def breach(text: str) -> StrictError:
    """Keep a violation, and make its error."""
    violations.append(text)
    _note("violations", text)
    return StrictError(text)


def _note(what: str, text: str) -> None:
    """Tell who started the processes."""
    if "STRICT_FOLDER" in os.environ:
        with open(f"{os.environ['STRICT_FOLDER']}/{what}.{os.getpid()}", "a") as file:
            file.write(f"{text}\n")


def raw(tensor: Tensor) -> Any:
    """A tensor's bytes as an array on the same memory, behind autograd's back."""
    if not tensor.is_contiguous():
        raise StrictError(f"A tensor of strides {tensor.stride()} is not contiguous.")
    return tensor.detach().reshape(-1).view(torch.uint8).numpy()


def issued_at() -> str:
    """Where in the program the running operation was issued."""
    frame, found = sys._getframe(1), []
    while frame is not None and len(found) < 3:
        path = frame.f_code.co_filename
        if not path.startswith(_INTERNAL):
            found.append(f"{os.path.basename(path)}:{frame.f_lineno}")
        frame = frame.f_back  # type: ignore[assignment]
    return " < ".join(found)


class Operation:
    """Something that was issued.

    Args:
        text: What it is.
        reads: Memory that must not change before it was waited for.
        writes: Memory that nobody may touch before that.
        run: Does it, given this operation; returns the bytes for ``writes``.
    """

    def __init__(
        self, text: str, reads: list[Tensor], writes: list[Tensor], run: Callable[..., list[Any]]
    ) -> None:
        self.text = f"{text}, issued at {issued_at()}"
        self.reads, self.writes, self._run = reads, writes, run
        self.sums = [zlib.crc32(raw(t)) for t in reads]
        self.before = [raw(t).copy() for t in writes]
        for tensor in writes:
            raw(tensor)[...] = _POISON
        self.done = threading.Event()
        self.error: BaseException | None = None
        self._results: list[Any] = []
        self._is_delivered = False
        self._lock = threading.Lock()

    def execute(self) -> None:
        """Run it, in its queue's turn."""
        try:
            self.check()
            self._results = self._run(self)
            self.check()
        except BaseException as error:
            self.fail(error)
        self.done.set()

    def fail(self, error: BaseException) -> None:
        """End with an error, the first one."""
        late = "timed out" in str(error).lower() and not isinstance(error, StrictError)
        if self.error is None:
            self.error = breach(f"deadlock: {self.text} did not end") if late else error
        self.done.set()

    def check(self) -> None:
        """Look for changes to memory that belongs to the operation."""
        for tensor, before in zip(self.reads, self.sums, strict=True):
            if zlib.crc32(raw(tensor)) != before:
                raise breach(f"memory was changed while it was sent: {self.text}")
        for tensor in () if self._is_delivered else self.writes:
            if bool((raw(tensor) != _POISON).any()):
                raise breach(f"memory was written to while it was received into: {self.text}")

    def deliver(self) -> None:
        """Hand the results over, once."""
        with self._lock:
            if self.error is not None:
                raise self.error
            self.check()
            if not self._is_delivered:
                for tensor, result in zip(self.writes, self._results, strict=True):
                    raw(tensor)[...] = result
                self._is_delivered = True


class Lane:
    """A thread that runs operations in the order in which they come."""

    def __init__(self) -> None:
        self._operations: queue.SimpleQueue[Operation | None] = queue.SimpleQueue()
        self._broken: BaseException | None = None
        threading.Thread(target=self._serve, name="strict lane", daemon=True).start()

    def put(self, operation: Operation) -> None:
        self._operations.put(operation)

    def end(self) -> None:
        """End the thread, once it has run what it was given."""
        self._operations.put(None)

    def _serve(self) -> None:
        while True:
            operation = self._operations.get()
            if operation is None:
                return
            if self._broken is not None:  # nothing that comes after can be right
                operation.fail(self._broken)
            elif not operation.done.is_set():
                operation.execute()
                if isinstance(operation.error, StrictError):
                    self._broken = operation.error
            del operation  # it holds its group, and that gloo's threads


class StrictWork(dist.Work):
    """What the caller of an operation gets."""

    def __init__(self, operation: Operation, group: StrictGroup, must_wait: bool) -> None:
        super().__init__()
        self._operation, self._group, self._must_wait = operation, group, must_wait

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the operation has run, and take its results."""
        self._must_wait = False
        wait_for(self._operation)
        self._operation.deliver()
        return True

    def is_completed(self) -> bool:
        return self._operation.done.is_set()

    def is_success(self) -> bool:
        return self.is_completed() and self._operation.error is None

    def exception(self) -> BaseException | None:
        return self._operation.error

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> list[Tensor]:
        return self._operation.writes or self._operation.reads

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """Complete a future from a thread of its own: what follows may issue and wait."""
        self._must_wait = False
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()

        def complete() -> None:
            try:
                self.wait()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(self.result())

        threading.Thread(target=complete, name="strict future", daemon=True).start()
        return future

    def __del__(self) -> None:
        if self._must_wait and self._operation.error is None and not self._group.is_closed:
            breach(f"dropped without wait(): {self._operation.text}")


def wait_for(operation: Operation) -> None:
    """Block the host until an operation has run."""
    if not operation.done.wait(2 * _rules.deadline_s + 5):
        operation.fail(breach(f"deadlock: {operation.text} never ended"))


class Wire:
    """gloo underneath a queue."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self.size = size
        self._limit = timedelta(seconds=_rules.deadline_s)
        self.gloo = dist.ProcessGroupGloo(store, rank, size, timeout=self._limit)

    def wait(self, work: Any) -> None:
        work.wait(self._limit)

    def send(self, operation: Operation, data: Tensor, to: int, number: int) -> None:
        theirs = torch.zeros(2, dtype=torch.int64, device="cpu")
        self.wait(self.gloo.recv([theirs], to, _READY))  # a send waits for its receive
        if theirs.tolist() != [number, data.nbytes]:
            raise breach(
                f"send {number} of {data.nbytes} bytes meets receive {int(theirs[0])} of"
                f" {int(theirs[1])} bytes: {operation.text}"
            )
        if data.nbytes:
            self.wait(self.gloo.send([data.detach().reshape(-1).view(torch.uint8)], to, _BYTES))

    def receive(self, nbytes: int, source: int, number: int) -> Any:
        ours = torch.tensor([number, nbytes], device="cpu")
        self.wait(self.gloo.send([ours], source, _READY))
        buffer = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        if nbytes:
            self.wait(self.gloo.recv([buffer], source, _BYTES))
        return buffer.numpy()

    def compare(self, operation: Operation, *what: Any) -> None:
        """See that all ranks run the same collective."""
        mark = zlib.crc32(repr(what).encode())
        ours = torch.tensor([mark], dtype=torch.int64, device="cpu")
        marks = [torch.zeros_like(ours) for _ in range(self.size)]
        self.wait(self.gloo.allgather([marks], [ours]))
        if any(int(theirs) != mark for theirs in marks):
            raise breach(f"ranks run different collectives, here {what}: {operation.text}")


class StrictGroup(dist.ProcessGroup):
    """A communicator."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._store, self._rank, self._size = store, rank, size
        self._name = self._description = ""
        self.is_closed = False
        self._numbers: Counter[tuple[str, int]] = Counter()
        self._connected: set[Any] = set()
        self._pairs: dict[int, tuple[Lane, Wire]] = {}
        self._issued: list[Operation] = []
        self._wire = Wire(dist.PrefixStore("all", store), rank, size)
        self._lane = self._new_lane()

    def _new_lane(self) -> Lane:
        if _rules.queue != "device":
            return Lane()
        if not _device_lane:
            _device_lane.append(Lane())
        return _device_lane[0]

    def _issue(
        self, operation: Operation, lane: Lane, connection: Any, must_wait: bool = False
    ) -> StrictWork:
        if self.is_closed:
            raise Aborted(f"The group was closed before {operation.text}.")
        counts[operation.text.split()[0]] += 1
        self._issued = [o for o in self._issued if not o.done.is_set()]
        self._issued.append(operation)
        lane.put(operation)
        is_first = connection not in self._connected
        self._connected.add(connection)
        work = StrictWork(operation, self, must_wait)
        if _rules.issue == "block" or (_rules.issue == "first" and is_first):
            wait_for(operation)
            if operation.error is not None:
                raise operation.error
        return work

    # ------------------------------------------------------------------ messages

    def send(self, tensors: list[Tensor], to: int, tag: int = 0) -> StrictWork:
        (data,) = tensors
        lane, wire, place, number = self._message("send", to)

        def run(operation: Operation) -> list[Any]:
            wire.send(operation, data, place, number)
            return []

        text = f"send {number} of {data.nbytes} bytes to {to} in {self._name}"
        return self._issue(Operation(text, [data], [], run), lane, ("send", to))

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> StrictWork:
        (data,) = tensors
        lane, wire, place, number = self._message("receive", source)

        def run(operation: Operation) -> list[Any]:
            return [wire.receive(data.nbytes, place, number)]

        text = f"receive {number} of {data.nbytes} bytes from {source} in {self._name}"
        return self._issue(Operation(text, [], [data], run), lane, ("receive", source), True)

    def _message(self, what: str, peer: int) -> tuple[Lane, Wire, int, int]:
        """Where a message runs, the peer's rank there, and the message's number."""
        self._numbers[what, peer] += 1
        number = self._numbers[what, peer]
        if _rules.queue != "pair":
            return self._lane, self._wire, peer, number
        if peer not in self._pairs:
            low, high = sorted((self._rank, peer))
            store = dist.PrefixStore(f"{low}:{high}", self._store)
            try:  # the host waits for the other end's
                wire = Wire(store, int(self._rank == high), 2)
            except RuntimeError as error:
                text = f"deadlock: {peer} does not connect to {self._rank}, at {issued_at()}"
                raise breach(text) from error
            self._pairs[peer] = Lane(), wire
        return *self._pairs[peer], int(peer > self._rank), number

    # ------------------------------------------------------------------ collectives

    def _collective(
        self,
        what: tuple[Any, ...],
        reads: list[Tensor],
        writes: list[Tensor],
        work: Callable[[Operation], list[Any]],
    ) -> StrictWork:
        def run(operation: Operation) -> list[Any]:
            self._wire.compare(operation, *what)
            return work(operation)

        text = f"{what[0]} {' '.join(map(str, what[1:]))} in {self._name}"
        return self._issue(Operation(text, reads, writes, run), self._lane, "collective")

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> StrictWork:
        (data,) = tensors
        is_root = opts.rootRank == self._rank
        gloo_options = dist.BroadcastOptions()
        gloo_options.rootRank, gloo_options.rootTensor = opts.rootRank, 0

        def work(operation: Operation) -> list[Any]:
            flat = torch.empty(data.nbytes, dtype=torch.uint8, device="cpu")
            if is_root:
                flat.numpy()[...] = raw(data)
            self._wire.wait(self._wire.gloo.broadcast([flat], gloo_options))
            return [] if is_root else [flat.numpy()]

        what = "broadcast", data.nbytes, opts.rootRank
        return self._collective(what, [data] * is_root, [data] * (not is_root), work)

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> StrictWork:
        (data,) = tensors
        op = opts.reduceOp if opts is not None else dist.ReduceOp.SUM
        is_average = op == dist.ReduceOp.AVG  # which gloo doesn't know
        gloo_options = dist.AllreduceOptions()
        gloo_options.reduceOp = dist.ReduceOp.SUM if is_average else op

        def work(operation: Operation) -> list[Any]:
            total = torch.empty(data.shape, dtype=data.dtype, device="cpu")
            raw(total)[...] = operation.before[0]
            self._wire.wait(self._wire.gloo.allreduce([total], gloo_options))
            if is_average:  # as NCCL's, which rounds whole numbers towards zero
                exact = total.is_floating_point() or total.is_complex()
                total.div_(self._size, rounding_mode=None if exact else "trunc")
            return [raw(total)]

        what = "all_reduce", tuple(data.shape), data.dtype, str(getattr(op, "op", op))
        return self._collective(what, [], [data], work)

    def allgather(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> StrictWork:
        (parts,), (own,) = outputs, inputs

        def work(operation: Operation) -> list[Any]:
            flat = torch.empty(own.nbytes, dtype=torch.uint8, device="cpu")
            flat.numpy()[...] = raw(own)
            found = [torch.empty_like(flat) for _ in range(self._size)]
            self._wire.wait(self._wire.gloo.allgather([found], [flat]))
            return [part.numpy() for part in found]

        return self._collective(("all_gather", own.nbytes), [own], list(parts), work)

    def _allgather_base(self, output: Tensor, own: Tensor, opts: Any = None) -> StrictWork:
        return self.allgather([list(output.view(-1).chunk(self._size))], [own], opts)

    all_gather_single = _allgather_base  # the name from torch 2.15 on

    def barrier(self, opts: Any = None) -> StrictWork:
        def work(operation: Operation) -> list[Any]:
            self._wire.wait(self._wire.gloo.barrier())
            return []

        barrier = self._collective(("barrier",), [], [], work)
        barrier.wait()
        return barrier

    # ------------------------------------------------------------------ life

    def abort(self) -> None:
        """End everything at once."""
        self.is_closed = True
        for operation in self._issued:
            if not operation.done.is_set():
                operation.fail(Aborted(f"The group was aborted during {operation.text}."))

    def shutdown(self) -> None:
        """Wait for what was issued, and end."""
        for operation in self._issued:
            wait_for(operation)
        self.is_closed = True
        self._issued.clear()
        for lane in (self._lane, *(lane for lane, _ in self._pairs.values())):
            if lane not in _device_lane:
                lane.end()
        _note("used", str(counts))

    def getBackendName(self) -> str:
        return NAME

    def getRank(self) -> int:
        return self._rank

    def getSize(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, text: str) -> None:
        self._description = text

    @property
    def group_name(self) -> str:
        return self._name

    pg_name = group_name

    @property
    def group_desc(self) -> str:
        return self._description
