"""This package, other packages, and what a step can't be faster than."""
