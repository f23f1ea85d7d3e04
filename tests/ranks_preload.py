"""Imported once by the server that forks the ranks, so that each rank starts at once."""

import gc
import os
import warnings

warnings.simplefilter("ignore")

import lightning  # noqa: E402, F401
import torch  # noqa: E402, F401

import lightning_gpipe  # noqa: E402, F401
import tests.step_models  # noqa: E402, F401

if "STRICT_MODE" in os.environ:  # python -m tests.strict --all
    from tests.strict.backend import take_over

    take_over(os.environ["STRICT_MODE"])

gc.collect()
gc.freeze()  # what is imported stays: collections in the ranks needn't look at it
