"""``python -m tests.gpu``, as far as it can be seen without a GPU."""

from __future__ import annotations

from multiprocessing import Pipe

import pytest
import torch

from tests.gpu import checks as command
from tests.gpu import test_gpu
from tests.gpu.one_gpu import OneGPU


def test_without_a_gpu_it_says_so_and_ends_with_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert command.main([]) == 2
    assert "No CUDA device here" in capsys.readouterr().out


def test_arguments() -> None:
    assert command.arguments([]).only == [*command.CHECKS][: -len(command.LONG)]
    assert command.arguments(["--only", "memory", "--only", "plain"]).only == ["memory", "plain"]
    with pytest.raises(SystemExit):
        command.arguments(["--only", "nothing"])


def test_the_table_names_the_machine_and_every_check() -> None:
    rows = [command.Row("plain", "right: all", 1.25), command.Row("memory", "1 MiB", 20.0)]
    machine, *lines = command.table(rows).splitlines()
    assert f"torch {torch.__version__}" in machine
    assert lines == ["plain      1.2 s  right: all", "memory    20.0 s  1 MiB"]


def test_an_error_of_a_check_is_a_wrong_row(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = Pipe(duplex=False)
    monkeypatch.setitem(command.CHECKS, "plain", lambda left_s: f"{1 / 0}")
    command._run("plain", 60.0, theirs)
    assert ours.recv() == "wrong: ZeroDivisionError: division by zero"


def test_all_tests_of_the_gpu_are_marked() -> None:
    tests = [value for name, value in vars(test_gpu).items() if name.startswith("test_")]
    assert len(tests) == 10
    assert all("gpu" in {mark.name for mark in test.pytestmark} for test in tests)


def test_stages_may_share_a_gpu() -> None:
    assert OneGPU.get_parallel_devices(OneGPU.parse_devices(2)) == [torch.device("cuda", 0)] * 2
