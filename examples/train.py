"""Train the digits from the command line and configuration files, through Lightning's CLI.

python examples/train.py fit --config examples/gpipe.yaml
"""

from digits import DigitsData, DigitsModel
from lightning.pytorch.cli import LightningCLI

import lightning_gpipe  # noqa: F401  (makes --trainer.strategy=gpipe known)


def main() -> None:
    LightningCLI(
        DigitsModel,
        DigitsData,
        seed_everything_default=1,
        save_config_kwargs={"overwrite": True},
    )


if __name__ == "__main__":
    main()
