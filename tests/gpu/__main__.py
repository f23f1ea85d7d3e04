"""All that a machine with a GPU can tell in ten minutes.

python -m tests.gpu                      # prints a table; 1 if a check failed, 2 without a GPU
python -m tests.gpu --only memory        # one check
python -m tests.gpu --only suite-nccl    # a part of the suite, all processes on one GPU, over NCCL
"""

import sys

from tests.gpu.checks import main

if __name__ == "__main__":
    sys.exit(main())
