"""The connections between ranks: who is let in, what waits, and what counts first."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import socket
import threading
import time
import weakref
from contextlib import suppress
from datetime import timedelta
from typing import Any
from unittest.mock import Mock

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.environments import LightningEnvironment

from lightning_gpipe import GPipeStrategy
from lightning_gpipe.comm.messages import RemoteError
from lightning_gpipe.failure.deadlines import Deadlines
from lightning_gpipe.failure.frames import place_of
from lightning_gpipe.failure.hub import Hub
from lightning_gpipe.failure.reason import Failure
from lightning_gpipe.failure.stall import Stall
from lightning_gpipe.failure.watchdog import Watchdog
from lightning_gpipe.strategy import rendezvous
from tests import models
from tests.ranks import run_ranks
from tests.training import train


class Hears(Hub):
    """Hears of what ranks tell, without connections."""

    def __init__(self) -> None:
        super().__init__(Mock(), "", 1, 2, Deadlines(event_s=0.01))

    def tell(self) -> str | None:
        """What is decided of a stall in which one rank goes on, and fails."""

        async def events() -> None:
            for rank in range(2):
                self._note_stall(rank, "a step")
            self._note_stall(1, "")
            self._suspect(Failure(1, 0, "an error of its own"))
            await asyncio.sleep(0.1)

        asyncio.run(events())
        return self._verdict.text if self._verdict is not None else None


def test_an_error_counts_though_the_ranks_had_stalled() -> None:
    assert Hears().tell() == "an error of its own"


class Listening:
    """The watchdog of a world of one, and the address that others would be told."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        self.address: Any = None
        deadlines = Deadlines(hello_s=1.0)
        self.watchdog = Watchdog(0, 1, 1, host, self.broadcast, lambda: None, True, deadlines)

    def broadcast(self, address: Any) -> Any:
        self.address = address
        return address

    def connect(self) -> socket.socket:
        return socket.create_connection(self.address[:2], timeout=5)


def is_closed(connection: socket.socket) -> bool:
    """Whether the other end closes a connection soon."""
    try:
        return connection.recv(100) in (b"", b'["bye", {}]\n')
    except ConnectionError:
        return True
    except TimeoutError:
        return False


GARBAGE = {
    "random bytes": os.urandom(1000) + b"\n",
    "an HTTP request": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "a very long line": b"x" * (1 << 20),
    "nothing": b"",
    "half a message": b'["hello", {"rank": 0',
    "another kind of JSON": b"[1, 2, 3]\n",
    "deep JSON": b"[" * 50_000 + b"\n",
    "a wrong token": json.dumps(["hello", {"rank": 0, "token": "0" * 32}]).encode() + b"\n",
    "a token that isn't one": json.dumps(["hello", {"rank": 0, "token": None}]).encode() + b"\n",
}


@pytest.mark.parametrize("garbage", GARBAGE)
def test_strangers_are_sent_away_without_a_word(
    garbage: str, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    listening = Listening()
    with listening.connect() as connection:
        with suppress(ConnectionError):  # it was enough already
            connection.sendall(GARBAGE[garbage])
        assert is_closed(connection)
    assert listening.watchdog.finish() is None, "the run goes on"
    listening.watchdog.close()
    assert capfd.readouterr().err == ""
    assert caplog.text == ""


def test_many_strangers_keep_nobody_out() -> None:
    listening = Listening()
    strangers = [listening.connect() for _ in range(60)]
    token = listening.address[2]
    with listening.connect() as friend:
        friend.sendall(json.dumps(["hello", {"rank": 0, "token": token}]).encode() + b"\n")
        assert is_closed(strangers[0]), "the oldest has to go"
        friend.settimeout(1.5)
        assert not is_closed(friend)
    for stranger in strangers:
        stranger.close()
    listening.watchdog.close()


@pytest.mark.parametrize("rounds", range(8))
def test_the_end_waits_for_a_connection_that_is_being_made(rounds: int) -> None:
    async def tasks_left() -> set[Any]:
        server = socket.create_server(("127.0.0.1", 0))
        hub = Hub(server, "token", 1, 1, Deadlines())
        await hub.open()
        with socket.create_connection(server.getsockname(), timeout=5) as connection:
            for _ in range(rounds):
                await asyncio.sleep(0)
            await hub.close()
            assert is_closed(connection)
        return asyncio.all_tasks() - {asyncio.current_task()}

    assert asyncio.run(tasks_left()) == set()


def test_a_connection_that_can_t_be_accepted_at_once_is_later() -> None:
    async def connect() -> None:
        server = socket.create_server(("127.0.0.1", 0))
        hub = Hub(server, "token", 1, 1, Deadlines(hello_s=0.1))
        await hub.open()
        hub._accept()  # nobody is there, as when a process may open no more files
        reader, writer = await asyncio.open_connection(*server.getsockname())
        assert await asyncio.wait_for(reader.read(), 10) == b"", "a stranger, who says nothing"
        writer.close()
        await writer.wait_closed()
        await hub.close()

    asyncio.run(connect())


def test_the_port_is_bound_to_the_main_address_alone() -> None:
    listening = Listening("127.0.0.1")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", listening.address[1]), timeout=1)
    listening.watchdog.close()


def test_the_cause_comes_before_its_consequences() -> None:
    lost = Failure.of(RuntimeError("[gloo] Connection closed by peer"), 0, 2)
    died = Failure(1, 1, "its process died", "died")
    sigterm = Failure.of(SystemExit("SIGTERM"), 0, 2, "sigterm")
    error = Failure.of(ValueError("Connection closed by peer"), 0, 2)
    assert Failure.of(RemoteError("x"), 0, 2).kind == "lost"
    kinds = [f.kind for f in sorted([lost, sigterm, died, error], key=lambda f: f.order)]
    assert kinds == ["error", "died", "sigterm", "lost"]


# ---------------------------------------------------------------------- stalls


class InBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, wait: Any) -> torch.Tensor:
        ctx.wait = wait
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.wait()
        return grads[0], None


def seconds_waited(where: str) -> float:
    """For how long rank 0's main thread is seen to wait, while rank 1 comes 2 s late."""
    strategy = GPipeStrategy(2, stages=2)
    seen: list[float] = []

    class Late(L.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            channel = strategy_groups(strategy).pipeline

            def meet() -> None:
                if where == "torch.distributed":
                    dist.barrier()
                elif where == "nothing":
                    time.sleep(2.0 if trainer.global_rank == 0 else 0)
                else:
                    channel.broadcast("state dict", 1, source=1)

            if trainer.global_rank == 1:
                time.sleep(2.0 if where != "nothing" else 0)
                meet()
            elif where == "a backward's thread":
                x = InBackward.apply(torch.ones(1, requires_grad=True), meet)
                thread = threading.Thread(target=x.sum().backward)
                with Watched(seen):
                    thread.start()
                    thread.join()
            else:
                with Watched(seen):
                    meet()

    train(models.Around(), max_steps=1, strategy=strategy, devices=2, callbacks=[Late()])
    return max(seen, default=0.0)


def strategy_groups(strategy: Any) -> Any:
    return strategy._connected.groups


class Watched:
    """Looks every 0.1 s whether this thread waits."""

    def __init__(self, seen: list[float]) -> None:
        self.over, main = threading.Event(), threading.get_ident()

        def look() -> None:
            stall = Stall(main, waits_in_backward=False)
            while not self.over.wait(0.1):
                seen.append(stall.seconds())

        self.thread = threading.Thread(target=look)

    def __enter__(self) -> None:
        self.thread.start()

    def __exit__(self, *_: Any) -> None:
        self.over.set()
        self.thread.join()


@pytest.mark.parametrize(
    ("where", "is_seen"),
    [
        ("comm", True),
        ("torch.distributed", True),
        ("a backward's thread", True),
        ("nothing", False),
    ],
)
def test_a_wait_for_other_ranks_is_seen(where: str, is_seen: bool) -> None:
    seconds = run_ranks(seconds_waited, 2, where)[0]
    assert (seconds > 1.0) == is_seen, seconds


# ---------------------------------------------------------------------- a second run


class Once(L.Callback):
    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_rank == 1:
            raise ValueError("once")


def fail_and_train(failures: int) -> dict[str, torch.Tensor]:
    for _ in range(failures):
        # the error itself where it arose, whoever waits for that rank elsewhere
        expected = ValueError if int(os.environ["LOCAL_RANK"]) == 1 else RuntimeError
        with pytest.raises(expected, match=r"once|Connection|peer|gloo"):
            train(
                models.Around(),
                max_steps=2,
                strategy=GPipeStrategy(2),
                devices=2,
                callbacks=[Once()],
            )
    torch.manual_seed(5)
    return train(models.Around(), max_steps=2, strategy=GPipeStrategy(2), devices=2)


def test_a_run_in_the_same_processes_after_an_error() -> None:
    torch.testing.assert_close(
        run_ranks(fail_and_train, 2, 2)[0], run_ranks(fail_and_train, 2, 0)[0], rtol=0, atol=0
    )


# ---------------------------------------------------------------------- networks


@pytest.mark.parametrize(
    ("nccl", "gloo"),
    [("eth", "eth0"), ("=eth1", "eth1"), ("^docker,eth0", "eth1"), ("ib", None), ("", None)],
)
def test_gloo_takes_the_interface_that_nccl_is_told(
    nccl: str, gloo: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["lo", "docker0", "eth0", "eth1"]
    monkeypatch.setattr(socket, "if_nameindex", lambda: [*enumerate(names, 1)])
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", nccl)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert rendezvous.gloo_interface() == gloo
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "wlan0")
    assert rendezvous.gloo_interface() is None, "the user's choice stays"
    error = RuntimeError("connect failed")
    text = str(rendezvous.explain_connections(error, LightningEnvironment(), 2, timedelta(1)))
    assert "Set GLOO_SOCKET_IFNAME" in text


def test_a_look_at_a_thread_holds_nothing_of_its_functions() -> None:
    """A step's tensors are gone after it, though the watchdog looked while it ran."""
    found: list[weakref.ref[Any]] = []
    is_inside, may_leave = threading.Event(), threading.Event()

    def step() -> None:
        tensor = torch.ones(3)
        found.append(weakref.ref(tensor))
        is_inside.set()
        may_leave.wait(10)

    thread = threading.Thread(target=step)
    thread.start()
    assert is_inside.wait(10)
    gc.disable()
    try:
        assert thread.ident is not None
        Stall(thread.ident, waits_in_backward=True).seconds()
        place_of(thread.ident)
        may_leave.set()
        thread.join(10)
        assert found[0]() is None
    finally:
        gc.enable()
