"""The command ``lightning-gpipe``."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence

from lightning_gpipe.monitor.merge import merge_traces
from lightning_gpipe.state import conversion
from lightning_gpipe.strategy import plan_command


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a subcommand.

    Args:
        arguments: Those of the command line; None: this process's.
    """
    try:
        try:
            _run(arguments)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # who read the output, such as `head`, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)


def _run(arguments: Sequence[str] | None) -> None:
    parser = _parser()
    known, others = parser.parse_known_args(arguments)
    options = vars(known)
    run = options.pop("run")
    if "arguments" in options:
        options["arguments"] = others
    elif others:
        parser.error(f"unrecognized arguments: {' '.join(others)}")
    try:
        run(**options)
    except BrokenPipeError:
        raise
    except (OSError, ValueError, RuntimeError) as error:
        sys.exit(f"lightning-gpipe: {error}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightning-gpipe", description="Tools for models trained with GPipeStrategy."
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    consolidate = commands.add_parser(
        "consolidate",
        help="make an ordinary checkpoint of a sharded one",
        description="Make an ordinary Lightning checkpoint, one file that a plain Trainer and"
        " load_from_checkpoint read, of a sharded one. Both are unpickled and may run code: use it"
        " on checkpoints that you trust.",
    )
    consolidate.add_argument("folder", metavar="FOLDER", help="the sharded checkpoint")
    consolidate.add_argument("file", metavar="FILE", help="the file to write")
    consolidate.set_defaults(run=conversion.consolidate)
    shard = commands.add_parser(
        "shard",
        help="make a sharded checkpoint of an ordinary one",
        description="Make a sharded checkpoint, of which every process reads its part alone, of an"
        " ordinary one that you trust.",
    )
    shard.add_argument("file", metavar="FILE", help="the Lightning checkpoint")
    shard.add_argument("folder", metavar="FOLDER", help="the folder to write")
    shard.set_defaults(run=conversion.shard)
    merge = commands.add_parser(
        "merge-traces",
        help="make one trace of those that ranks have written",
        description="Make one Chrome trace, for https://ui.perfetto.dev, of those that a"
        " PyTorchProfiler has written on every rank.",
    )
    merge.add_argument("files", metavar="FILE", nargs="+", help="the trace of a rank")
    merge.add_argument("out", metavar="OUT", help="the file to write")
    merge.set_defaults(run=merge_traces)
    for command in (consolidate, shard, merge):
        command.add_argument(
            "--overwrite", action="store_true", help="replace what is there under the new name"
        )
    _add_plan(commands.add_parser("plan", help="tell what fits, and what is fastest"))
    return parser


def _add_plan(plan: argparse.ArgumentParser) -> None:
    plan.description = (
        "Compare layouts of a pipeline, without data, weights or devices: what stages will hold,"
        " and how long a step takes. Exits with 1 if nothing fits."
    )
    plan.add_argument(
        "what",
        metavar="CONFIG.yaml | MODULE:FUNCTION",
        help="the file that `fit` of a LightningCLI takes, and further arguments as it takes them;"
        " or what returns the LightningModule, or the LightningModule and a batch of it",
    )
    for name, what in (("model", "LightningModule"), ("data", "LightningDataModule")):
        plan.add_argument(
            f"--{name}", metavar="MODULE:CLASS", help=f"the {what}, if the file names none"
        )
    plan.add_argument(
        "--no-data", action="store_true", help="take the model's example_input_array for a batch"
    )
    plan.add_argument(
        "--devices", type=int, help="number of devices, all nodes'; else that of the file"
    )
    plan.add_argument("--memory", help="of a device, such as 16GB")
    plan.add_argument("--step", choices=["mini-batch", "micro-batch"])
    plan.add_argument("--backbone", help="dotted name of what is cut; else it is found")
    for name, what in (
        ("stages", "numbers of stages, such as 2,4"),
        ("chunks", "numbers of micro-batches, such as 4,8,32"),
        ("virtual-stages", "numbers of virtual stages, such as 1,2"),
    ):
        plan.add_argument(f"--{name}", type=_numbers, metavar="N,…", help=what)
    plan.add_argument(
        "--checkpoint",
        type=_checkpoints,
        metavar="MODE,…",
        help="of always, except_last, never, auto, and numbers or shares of micro-batches",
    )
    plan.add_argument("--device", help="whose kernels layers will run: cuda, cpu")
    plan.add_argument("--flops", type=float, help="operations of a device in a second, as 1e14")
    plan.add_argument(
        "--measured", action="store_true", help="run every layer by itself, to tell seconds"
    )
    plan.set_defaults(run=plan_command.plan, arguments=())


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(map(int, text.split(",")))
    except ValueError:
        raise argparse.ArgumentTypeError(f"whole numbers, such as 4,8, got {text!r}") from None


def _checkpoints(text: str) -> tuple[str | int | float, ...]:
    def read(entry: str) -> str | int | float:
        if entry.isdigit():
            return int(entry)
        return float(entry) if entry.replace(".", "", 1).isdigit() else entry

    return tuple(map(read, text.split(",")))
