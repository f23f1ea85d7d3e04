"""Tables in Markdown."""

from collections.abc import Sequence
from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True)
class Table:
    """A table with what to know of it.

    Args:
        header: Names of the columns.
        rows: Cells.
    """

    header: Sequence[str]
    rows: Sequence[Sequence[object]]

    def __str__(self) -> str:
        lines = [self.header, ["---"] * len(self.header), *self.rows]
        return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def beside(ours: float, theirs: float, digits: int = 2) -> str:
    """A figure, and what it is of the paper's, in bold where they are more than 20 % apart."""
    share = ours / theirs
    apart = f"**{share:.2f}**" if abs(share - 1) > 0.2 else f"{share:.2f}"
    return f"{ours:,.{digits}f} ({apart})"
