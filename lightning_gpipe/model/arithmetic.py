"""Under which names PyTorch has its arithmetic: functions, methods, and Python's operators."""

from __future__ import annotations


def _names(operator: str, *functions: str) -> frozenset[str]:
    """All names of an operation, in place or not.

    Args:
        operator: Python's name for it.
        functions: PyTorch's.
    """
    operators = (f"__{kind}{operator}__" for kind in ("", "r", "i"))
    return frozenset((*functions, *(f"{name}_" for name in functions), *operators))


ADD = _names("add", "add")
SUBTRACT = _names("sub", "sub", "subtract") | {"rsub"}
MULTIPLY = _names("mul", "mul", "multiply")
#: A number that is divided by a tensor isn't among them: that is no multiple of the tensor.
DIVIDE = _names("truediv", "div", "divide", "true_divide") - {"__rtruediv__"}
NEGATE = frozenset(("neg", "neg_", "negative", "negative_", "__neg__"))
