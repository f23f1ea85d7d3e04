"""Pipeline parallelism for PyTorch Lightning behind one argument.

>>> import lightning as L
>>> from lightning_gpipe import GPipeStrategy
>>> trainer = L.Trainer(devices=4, strategy=GPipeStrategy(chunks=32))  # doctest: +SKIP

Importing this package registers the strategy under the name ``"gpipe"``, so that
``Trainer(strategy="gpipe")`` works.
"""

from lightning.pytorch.strategies import StrategyRegistry

from lightning_gpipe.model.blocks import Blocks
from lightning_gpipe.strategy.gpipe import GPipeStrategy
from lightning_gpipe.strategy.monitor import PipelineMonitor

__version__ = "0.1.0"
__all__ = ["Blocks", "GPipeStrategy", "PipelineMonitor", "__version__"]

if "gpipe" not in StrategyRegistry:
    StrategyRegistry.register(
        "gpipe", GPipeStrategy, description="Pipeline parallelism (GPipe) with default settings"
    )
