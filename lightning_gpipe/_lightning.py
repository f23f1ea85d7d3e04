"""Everything that this package uses of Lightning beyond its public names.

Checked against Lightning 2.6.0 and 2.6.6; a test imports every name with the installed version.
"""

from lightning.fabric.utilities.distributed import (
    _all_gather_ddp_if_available,
    _distributed_is_initialized,
    _get_default_process_group_backend_for_device,
    _init_dist_connection,
    _sync_ddp_if_available,
)
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.strategies.launchers.multiprocessing import _MultiProcessingLauncher
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.pytorch.trainer.connectors.signal_connector import (
    _HandlersCompose,
    _SignalConnector,
)

all_gather = _all_gather_ddp_if_available
reduce = _sync_ddp_if_available
distributed_is_initialized = _distributed_is_initialized
default_backend = _get_default_process_group_backend_for_device
init_distributed = _init_dist_connection
ScriptLauncher = _SubprocessScriptLauncher
MultiProcessingLauncher = _MultiProcessingLauncher
HandlersCompose = _HandlersCompose
SignalConnector = _SignalConnector

__all__ = [
    "HandlersCompose",
    "MultiProcessingLauncher",
    "ScriptLauncher",
    "SignalConnector",
    "all_gather",
    "default_backend",
    "distributed_is_initialized",
    "init_distributed",
    "reduce",
    "reset_seed",
]
