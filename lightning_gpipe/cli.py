"""The command ``lightning-gpipe``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from lightning_gpipe.state import conversion


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a subcommand.

    Args:
        arguments: Those of the command line; None: this process's.
    """
    options = vars(_parser().parse_args(arguments))
    run = options.pop("run")
    try:
        run(**options)
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
    for command in (consolidate, shard):
        command.add_argument(
            "--overwrite", action="store_true", help="replace what is there under the new name"
        )
    return parser
