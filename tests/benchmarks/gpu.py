"""What a machine with one GPU can tell of this package in ten minutes.

All GPU-marked tests; one stage over CUDA against a plain Trainer, in weights and in time; the
host's time for an action; memory by recompute mode and number of micro-batches; two stages on one
GPU.

    python -m tests.benchmarks.gpu
"""

from __future__ import annotations

import sys

from tests.gpu.checks import main

if __name__ == "__main__":
    sys.exit(main())
