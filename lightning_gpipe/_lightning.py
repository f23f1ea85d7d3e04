"""Everything that this package uses of Lightning beyond its public names.

Checked against Lightning 2.6.0 and 2.6.6; a test imports every name with the installed version.
"""

from lightning.fabric.utilities.distributed import (
    _distributed_is_initialized,
    _get_default_process_group_backend_for_device,
    _init_dist_connection,
)
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher

distributed_is_initialized = _distributed_is_initialized
default_backend = _get_default_process_group_backend_for_device
init_distributed = _init_dist_connection
ScriptLauncher = _SubprocessScriptLauncher

__all__ = [
    "ScriptLauncher",
    "default_backend",
    "distributed_is_initialized",
    "init_distributed",
    "reset_seed",
]
