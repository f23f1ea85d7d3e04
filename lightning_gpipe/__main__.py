"""``python -m lightning_gpipe``, for ``lightning-gpipe``."""

from lightning_gpipe.cli import main

main()
