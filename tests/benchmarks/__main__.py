"""Speed and memory, of this package and others.

Contestants take turns in one run; figures are medians over rounds. Run one suite, or several:

    OMP_NUM_THREADS=1 python -m tests.benchmarks emulated --sizes 4x8 --rounds 5

Other packages take part where they are installed (``pip install torchgpipe deepspeed``).
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from tests.benchmarks import compute, document, emulated, monitor, overhead, peak_memory, planned
from tests.benchmarks.report import Table, save, surroundings

SUITES = {
    "emulated": emulated,
    "compute": compute,
    "memory": peak_memory,
    "overhead": overhead,
    "monitor": monitor,
    "planned": planned,
    "document": document,
}


def main() -> int:
    """Run a suite; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parsers = parser.add_subparsers(dest="suite", required=True)
    for name, suite in SUITES.items():
        about = (suite.__doc__ or "").strip()
        own = parsers.add_parser(
            name,
            help=about.splitlines()[0],
            description=about,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        own.add_argument("--rounds", type=int, default=5, help="that count; default: %(default)s")
        own.add_argument("--steps", type=int, default=3, help="in a turn; default: %(default)s")
        own.add_argument("--save", type=Path, metavar="FILE", help="keep the tables as JSON")
        suite.arguments_of(own)
    arguments = parser.parse_args()
    command = f"python -m tests.benchmarks {shlex.join(sys.argv[1:])}"
    for name, value in surroundings(command).items():
        print(f"{name}: {value}")
    tables: list[Table] = []
    for table in SUITES[arguments.suite].run(arguments):
        print(table, flush=True)
        tables.append(table)
        if arguments.save:  # a suite takes long: keep what is there
            save(tables, arguments.save, command)
    return int(arguments.suite == "emulated" and emulated.is_wrong(tables, arguments))


if __name__ == "__main__":
    sys.exit(main())
