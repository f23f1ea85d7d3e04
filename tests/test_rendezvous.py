"""Where processes meet, who is waited for, and what is refused before."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.environments import LightningEnvironment

from lightning_gpipe import GPipeStrategy
from lightning_gpipe.failure.deadlines import Deadlines
from lightning_gpipe.strategy import children, rendezvous
from lightning_gpipe.strategy.children import PatientlySeen
from lightning_gpipe.strategy.world import Rendezvous
from tests.models import Around
from tests.ranks import RankError, free_port, run_ranks
from tests.training import trainer


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere two sockets can't share a port")
def test_nobody_takes_the_port_while_processes_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_PORT", raising=False)
    environment = LightningEnvironment()
    rendezvous.keep_port(environment)
    with socket.socket() as another, pytest.raises(OSError, match="in use"):
        another.bind(("", environment.main_port))
    store = dist.TCPStore("127.0.0.1", environment.main_port, 1, is_master=True)
    with pytest.raises(dist.DistNetworkError) as taken:
        dist.TCPStore("127.0.0.1", environment.main_port, 1, is_master=True)
    error = rendezvous.explain_connections(taken.value, environment, 1, timedelta(minutes=1))
    assert f"has taken port {store.port}" in str(error)


def test_nodes_that_don_t_meet_are_told_how() -> None:
    environment, soon = LightningEnvironment(), timedelta(seconds=1)
    with pytest.raises(dist.DistStoreError) as missing:
        dist.TCPStore("127.0.0.1", 0, 2, is_master=True, timeout=soon)
    text = str(rendezvous.explain_connections(missing.value, environment, 2, soon))
    assert "Start the script on each of the 2 nodes" in text
    assert "GLOO" not in text
    assert ".." not in text
    error = dist.DistNetworkError("The client socket has timed out.")
    text = str(rendezvous.explain_connections(error, environment, 2, soon))
    assert "timed out. The first node's script has to run, MASTER_ADDR=127.0.0.1 to be" in text


def test_who_is_waited_for_is_told(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rendezvous, "_SOON_S", 0.05)
    environment, device = LightningEnvironment(), torch.device("cpu")
    for nodes, waits_s in (1, 0.2), (2, 0.0), (2, 1.0):
        meeting = Rendezvous(
            environment, device, None, timedelta(minutes=30), Deadlines(), 2, nodes
        )
        with meeting.expected():
            time.sleep(waits_s)
        screen = capfd.readouterr().err
        told = "gives up after 0:30:00: the Trainer has num_nodes=2. Start the script on each"
        assert (told in screen) == (nodes > 1 and waits_s > 0), screen


def test_what_a_launcher_has_not_started_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rendezvous, "_SOON_S", 0.05)
    monkeypatch.setenv("LOCAL_RANK", "0")  # left over
    child = PatientlySeen(subprocess.Popen(["sleep", "60"]), 0.0)
    timeout = timedelta(seconds=1)
    for processes, started in (2, []), (1, []), (2, [child]):
        monkeypatch.setattr(children, "children", started)
        meeting = Rendezvous(
            LightningEnvironment(), torch.device("cpu"), None, timeout, Deadlines(), processes, 1
        )
        match = "Not all processes of this run have come within"
        with pytest.raises(RuntimeError, match=match), meeting.expected():
            dist.TCPStore("127.0.0.1", 0, 2, is_master=True, timeout=timeout)
        screen = capfd.readouterr().err
        told = "does by LightningEnvironment. If none does, unset LOCAL_RANK." in screen
        assert told == (processes > 1 and not started), screen
    child.kill()
    child.wait()


@pytest.mark.parametrize(
    ("name", "value", "match"),
    [
        ("MASTER_PORT", "abc", "MASTER_PORT='abc' is no port"),
        ("MASTER_PORT", "65536", "MASTER_PORT='65536' is no port"),
        ("NODE_RANK", "1", "NODE_RANK=1 names one of 2 nodes or more, and the Trainer has num_nod"),
    ],
)
def test_wrong_variables_are_refused_at_once(
    name: str, value: str, match: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=match):
        trainer(devices=2, strategy=GPipeStrategy(3))


@pytest.mark.parametrize(
    ("backend", "match"),
    [("foo", "has .*gloo"), ("cpu:gloo,cuda:foo", "has .*gloo"), ("NCCL", "nccl|NCCL")],
)
def test_wrong_backends_are_refused_at_once(backend: str, match: str) -> None:
    with pytest.raises(ValueError, match=f"process_group_backend='{backend}' is .*{match}"):
        trainer(devices=2, strategy=GPipeStrategy(3, process_group_backend=backend))


def test_an_address_of_nobody_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "nosuchhost.invalid")
    environment, timeout = LightningEnvironment(), timedelta(seconds=1)
    meeting = Rendezvous(environment, torch.device("cpu"), None, timeout, Deadlines(), 2, 1)
    match = "Where MASTER_ADDR=nosuchhost.invalid isn't this machine, unset it"
    with pytest.raises(RuntimeError, match=match), meeting.expected():
        dist.TCPStore(environment.main_address, 29400, 2, is_master=False, timeout=timeout)


def _join_of_other_number(number: int) -> None:
    place = LightningEnvironment()
    place.set_world_size(number)
    rendezvous.join_world(place, "gloo", timedelta(seconds=5), torch.device("cpu"))


@pytest.mark.parametrize("number", [1, 3])
def test_a_group_of_another_number_of_processes_is_refused(number: int) -> None:
    with pytest.raises(RankError, match=r"one of 2 in a process group.*destroy_process_group\(\)"):
        run_ranks(_join_of_other_number, 2, number)


def test_one_process_leaves_the_group_that_it_has_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes forked later, by Lightning's DDP too, took it for theirs and waited forever."""
    for port in None, str(free_port()):
        if port is not None:
            monkeypatch.setenv("MASTER_PORT", port)
        run = trainer(devices=1, strategy=GPipeStrategy(3), max_epochs=1)
        for _ in range(2):
            run.fit(Around())
            assert not dist.is_initialized()
            assert os.environ.get("MASTER_PORT") == port


def _group_after_a_run() -> bool:
    del os.environ["LOCAL_RANK"]  # nobody says that it is one of several
    group = dist.group.WORLD
    trainer(devices=1, strategy=GPipeStrategy(3), max_epochs=1).fit(Around())
    return dist.group.WORLD is group


def test_one_process_stays_in_the_group_that_it_was_given() -> None:
    assert run_ranks(_group_after_a_run, 1) == [True]
