"""Imported once by the server that forks the ranks, so that each rank starts at once."""

import warnings

warnings.simplefilter("ignore")

import lightning  # noqa: E402, F401
import torch  # noqa: E402, F401

import lightning_gpipe  # noqa: E402, F401
