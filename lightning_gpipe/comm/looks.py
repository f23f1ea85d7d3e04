"""How often ranks check what takes time, or makes them wait for each other."""

from __future__ import annotations

import math


def is_due(number: int) -> bool:
    """Whether a check is due: in the 1st, the 2nd, the 3rd, the 5th, the 8th, ...

    These are Fibonacci's numbers: less and less often, and yet some of them are multiples of three,
    of four, or of any number, so what happens every so many steps is met.

    Args:
        number: Counts the occasions, from 1.
    """
    square = 5 * number * number
    return any(math.isqrt(n) ** 2 == n for n in (square - 4, square + 4))
