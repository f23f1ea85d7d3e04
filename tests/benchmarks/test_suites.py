"""The benchmarks run and print; how fast things are, ``python -m tests.benchmarks`` tells."""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import sys
import time
from collections.abc import Callable
from math import isnan
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path

from tests.benchmarks.bound import Bound
from tests.benchmarks.compute import contestants
from tests.benchmarks.report import Table
from tests.benchmarks.turns import Contestant, Result, Turn, spread, take_turns
from tests.benchmarks.workloads import transformer

FEW = ("--rounds", "1", "--steps", "1")


def tables(tmp_path: Path, *arguments: str) -> list[Table]:
    """The tables of a suite."""
    path = tmp_path / "tables.json"
    command = [sys.executable, "-m", "tests.benchmarks", *arguments, *FEW, "--save", str(path)]
    printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=100)
    kept = json.loads(path.read_text())
    found = [Table(t["title"], t["columns"], t["rows"]) for t in kept["tables"]]
    assert all(str(table) in printed.stdout for table in found)
    assert "torch" in kept["versions"]
    return found


def test_steps_are_no_shorter_than_the_bound(tmp_path: Path) -> None:
    only = ("--only", "fill_drain", "torch GPipe")
    (table,) = tables(tmp_path, "emulated", "--sizes", "2x3", "--checkpoint", "never", *only)
    shares = {name: figures[1] for name, figures in table.rows}
    assert set(shares) == {
        "bound of fill-drain", "ideal", "lightning-gpipe, fill_drain", "torch GPipe",
    }  # fmt: skip
    assert all(0 < shares[name] < 1.1 for name in shares if name != "ideal")


def test_peak_memory(tmp_path: Path) -> None:
    options = ("--workloads", "conv-net", "--chunks", "4", "--checkpoint", "always")
    few = ("--only", "except_last", "--warm-up", "1")
    (table,) = tables(tmp_path, "memory", *options, *few)
    assert [name for name, _ in table.rows] == [
        "ideal", "one process", "lightning-gpipe, except_last",
    ]  # fmt: skip
    assert all(peak > 0 for _, figures in table.rows for peak in figures)


def waits(turn: Turn) -> None:
    turn.next()
    time.sleep(100)


def lead(pipe: Connection) -> None:
    pipe.send("begun")
    take_turns([Contestant("a", waits, 2)], rounds=1, steps=1, warm_up=0)


def started(lead: Callable[[Connection], None]) -> tuple[SpawnProcess, Connection]:
    """A process that has computed nothing before it forks, as tests here may have."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    leader = context.Process(target=lead, args=(theirs,))
    leader.start()
    theirs.close()
    return leader, ours


def test_contestants_end_with_who_leads_the_rounds() -> None:
    leader, ours = started(lead)
    assert ours.recv() == "begun"
    children = f"/proc/{leader.pid}/task/{leader.pid}/children"
    while not (found := Path(children).read_text().split()):
        time.sleep(0.05)
    leader.kill()
    leader.join()
    end = time.monotonic() + 10
    while any(_runs(child) for child in found):
        assert time.monotonic() < end
        time.sleep(0.05)


def _runs(process: str) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def fails(turn: Turn) -> None:
    turn.next()
    raise ValueError("no such thing")


def dies(turn: Turn) -> None:
    turn.next()
    sys.exit(0)


def runs(turn: Turn) -> None:
    for _ in turn.rounds():
        pass


def lead_some_that_fail(pipe: Connection) -> None:
    found = [Contestant("a", fails, 2), Contestant("b", dies, 1), Contestant("c", runs, 2)]
    results = take_turns(found, rounds=2, steps=1, warm_up=1)
    pipe.send([(results[name].error, len(results[name].step_s)) for name in "abc"])


def test_a_contestant_that_fails_has_a_word_in_the_table() -> None:
    leader, ours = started(lead_some_that_fail)
    (failed, _), (died, _), (error, rounds) = ours.recv()
    leader.join()
    assert failed == "ValueError: no such thing"
    assert died
    assert (error, rounds) == (None, 2)


def test_steps_are_compared_with_the_bound_of_their_own_round() -> None:
    def noted(backward_s: float) -> list[dict[str, tuple[float, int]]]:
        return [{"F": (1.0, 3), "B": (backward_s, 3)}, {"F": (1.0, 3), "B": (backward_s, 3)}]

    ideal = Result(step_s=[9.0, 15.0, 9.0], notes=[noted(2.0), noted(4.0), noted(2.0)])
    bound = Bound(ideal, 2, 3, "never")
    assert bound.median_s == (3 + 2 - 1) * (1 + 2)
    assert bound.reached(Result(step_s=[12.0, 20.0, 24.0])) == [1.0, 1.0, 0.5]
    assert bound.reached(Result(error="died")) == []
    assert Bound(Result(error="died"), 2, 3, "never").reached(Result(step_s=[1.0])) == []


def test_a_spread_is_half_of_what_lies_between_the_quartiles() -> None:
    assert spread([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]) == (6 - 2) / 2 / 4
    assert isnan(spread([1.0]))


def test_two_virtual_stages_take_part_where_there_are_layers_for_them() -> None:
    names = [each.name for each in contestants(transformer(blocks=4), 2, 8, "never")]
    assert [name for name in names if name.endswith("V=2")] == [
        "lightning-gpipe, mini-batch step, V=2", "lightning-gpipe, micro-batch step, V=2",
    ]  # fmt: skip
    assert not any("V=2" in each.name for each in contestants(transformer(3), 2, 8, "never"))
