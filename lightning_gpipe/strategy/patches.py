"""Attributes of Lightning, torch and torchmetrics that are others for the length of a run.

All stand in one table. What isn't there in the installed version is an error before the run, and
the end of the run puts back what was there.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any, ClassVar

from lightning_gpipe.model.redirect import Redirect
from lightning_gpipe.tensors import hooks

_ABSENT = object()


@dataclass(frozen=True, slots=True)
class Target:
    """An attribute that is replaced during a run.

    Args:
        owner: Dotted name of the module or class that has it.
        name: Its name.
        reason: Why it can't stay what it is.
        of_instances: Whether it is replaced on instances of the class, not on the class.
    """

    owner: str
    name: str
    reason: str
    of_instances: bool = False

    def resolve(self) -> Any:
        """The module or class that has it.

        Raises:
            AttributeError: If the installed version has no such class.
        """
        try:
            return importlib.import_module(self.owner)
        except ModuleNotFoundError:
            module, _, name = self.owner.rpartition(".")
            return getattr(importlib.import_module(module), name)

    def current(self) -> Any:
        """What stands there now, on the class or module."""
        return getattr(self.resolve(), self.name)

    @contextmanager
    def replaced(self, value: Any, on: Any = None) -> Iterator[None]:
        """Put another value in its place inside this context.

        Args:
            value: The other value.
            on: The instance, for what is replaced on instances; copies of it have their own.

        Raises:
            AttributeError: If the installed version has no such attribute.
        """
        owner = self.resolve() if on is None else on
        if not hasattr(owner, self.name):
            raise AttributeError(_missing(self.owner, self.name, self.reason))
        own = vars(owner).get(self.name, _ABSENT)  # as it stands: a staticmethod, for instance
        if on is not None and callable(value):
            value = Redirect(on, None if own is _ABSENT else own, value, self.name)
        setattr(owner, self.name, value)
        try:
            yield
        finally:
            if own is _ABSENT:
                delattr(owner, self.name)
            else:
                setattr(owner, self.name, own)


@dataclass(frozen=True, slots=True)
class Function:
    """A function that is replaced for everyone, whatever name they have imported it by.

    A wrapper calls the function of its closure, which is replaced; of another its code is.

    Args:
        owner: Dotted name of its module.
        name: Its name there.
        reason: Why it can't stay what it is.
    """

    owner: str
    name: str
    reason: str
    of_instances: ClassVar = False

    def current(self) -> Any:
        """The function that is called now."""
        function = self._function()
        if function.__closure__:
            return function.__closure__[0].cell_contents
        return next(filter(callable, function.__code__.co_consts), function)

    @contextmanager
    def replaced(self, value: Any) -> Iterator[None]:
        """Put another function in its place inside this context.

        Raises:
            AttributeError: If the installed version has no such function.
        """
        function = self._function()
        place, name, other = function, "__code__", _calls(value)
        if function.__closure__:
            place, name, other = function.__closure__[0], "cell_contents", value
        original = getattr(place, name)
        setattr(place, name, other)
        try:
            yield
        finally:
            setattr(place, name, original)

    def _function(self) -> Any:
        function = getattr(importlib.import_module(self.owner), self.name, None)
        if not isinstance(function, FunctionType) or len(function.__closure__ or ()) > 1:
            raise AttributeError(_missing(self.owner, self.name, self.reason))
        return function


_OTHER = "the other function"


def _call(*args: Any, **kwargs: Any) -> Any:
    """The code that stands in a function's place, with the other function as a constant."""
    other: Any = "the other function"
    return other(*args, **kwargs)


def _calls(function: Callable[..., Any]) -> CodeType:
    """Code that calls a function."""
    code = _call.__code__
    return code.replace(co_consts=tuple(function if c == _OTHER else c for c in code.co_consts))


def as_method(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that instances of a class call with themselves in front."""

    def method(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return method


def _missing(owner: str, name: str, reason: str) -> str:
    return (
        f"{owner} has no '{name}' that can be replaced, which lightning-gpipe needs because"
        f" {reason}: install the versions of torch and lightning that its documentation names."
    )


METRIC_SYNC = Target(
    "torchmetrics.Metric", "sync", "the stages of a pipeline see the same values: replicas count"
)
EPOCH_WARNING = Target(
    "lightning.pytorch.trainer.connectors.logger_connector.result",
    "_distributed_is_initialized",
    "the means of an epoch don't differ between the stages of a pipeline",
)
SUMMARY = Target(
    "lightning.pytorch.callbacks.ModelSummary",
    "_summary",
    "a summary shows the whole model, of which a stage holds a part",
)
FILTER_ON_OPTIMIZER = Target(
    "lightning.pytorch.callbacks.BaseFinetuning",
    "filter_on_optimizer",
    "parameters of other stages have no values to compare",
)
THROUGHPUT_WORLD = Target(
    "lightning.fabric.utilities.throughput.Throughput",
    "world_size",
    "the stages of a pipeline work on the same samples",
    of_instances=True,
)
THROUGHPUT_FLOPS = Target(
    "lightning.fabric.utilities.throughput.Throughput",
    "available_flops",
    "a pipeline has the operations of all its devices",
    of_instances=True,
)
MODULE_FORWARD = Target(
    "torch.nn.Module",
    "forward",
    "a summary calls the whole module, without a pipeline",
    of_instances=True,
)
CLIP_BY_NORM = Target(
    "lightning.pytorch.plugins.precision.Precision",
    "clip_grad_by_norm",
    "the norm is that of all stages",
    of_instances=True,
)
CLIP_BY_VALUE = Target(
    "lightning.pytorch.plugins.precision.Precision",
    "clip_grad_by_value",
    "a stage may have no gradients",
    of_instances=True,
)
UNSCALE = Target(
    "torch.amp.GradScaler",
    "_unscale_grads_",
    "all stages skip a step, or none",
    of_instances=True,
)
TOTAL_NORM = Function(
    "torch.nn.utils.clip_grad",
    "_get_total_norm",
    "the norm of one stage's gradients isn't the model's",
)
GRAD_NORM = Function(
    "lightning.pytorch.utilities.grads",
    "grad_norm",
    "a stage has the gradients of its own parameters",
)
CLIPPED_GROUPS = Target(
    "torch.nn.utils.clip_grad",
    "_group_tensors_by_device_and_dtype",
    "a stage may hold none of the parameters whose gradients are clipped by value",
)
ASYNC_REMOVE = Target(
    "lightning.pytorch.plugins.io.AsyncCheckpointIO",
    "remove_checkpoint",
    "a file must stay until the one that replaces it is written",
    of_instances=True,
)
SAVE_ON_EXCEPTION = Target(
    "lightning.pytorch.callbacks.ModelCheckpoint",
    "_should_save_on_exception",
    "a file can't be named that isn't written, for want of the other stages",
)
LOAD_STATE_DICT = Target(
    "torch.nn.Module",
    "load_state_dict",
    "PyTorch warns of parameters without values, as other stages' are",
)
LOG_GRAPH = Target(
    "lightning.pytorch.loggers.TensorBoardLogger",
    "log_graph",
    "a graph is traced through the layers as written",
)
AUTOGRAD_BACKWARD = Target(
    "torch.autograd",
    "backward",
    "with one stage, loss.backward() needs nobody else",
)
AUTOGRAD_GRAD = Target(
    "torch.autograd",
    "grad",
    "through the backbone it would not find what stands before it, on other stages than the first",
)
REGISTER_HOOK = Target(
    "torch.Tensor",
    "register_hook",
    "a backward isn't split where a layer puts a hook on a tensor: it would run twice",
)
RETAIN_GRAD = Target(
    "torch.Tensor",
    "retain_grad",
    "nor where a tensor keeps its gradient: it would be added twice",
)
SAVED_TENSORS_HOOKS = Target(
    "torch.autograd.graph.saved_tensors_hooks",
    "__enter__",
    "nor does a graph run twice whose saved tensors have hooks, as in a checkpoint",
)
REPARAMETRIZE = Target(
    "torch.nn.utils.stateless",
    "_reparametrize_module",
    "functional_call would give the backbone parameters that stages don't have",
)
SIGTERM_BROADCAST = Target(
    "lightning.pytorch.loops.training_epoch_loop._TrainingEpochLoop",
    "_broadcast_sigterm_tensor",
    "all ranks hear of a SIGTERM at once, and a broadcast before every batch lets GPUs wait",
)
TRY_BATCH_SIZE = Target(
    "lightning.pytorch.tuner.batch_size_scaling",
    "_try_loop_run",
    "memory that runs out on one stage is a try that failed on all",
)
BATCH_SIZE_FILE = Target(
    "lightning.pytorch.tuner.batch_size_scaling",
    "uuid",
    "all ranks must read the file that rank 0 writes, and each names its own",
)
CHECK_VALIDATION = Target(
    "lightning.pytorch.loops.training_epoch_loop._TrainingEpochLoop",
    "_should_check_val_fx",
    "a time is up on one rank before it is on another, and all must validate together",
)
LOG = Target(
    "lightning.pytorch.LightningModule",
    "log",
    "a step that runs once per micro-batch logs once per mini-batch; other stages may log else",
)
CLOSURE = Target(
    "lightning.pytorch.loops.optimization.automatic._AutomaticOptimization",
    "_make_closure",
    "gradients arise during the steps, so they are zeroed before",
)
TRAINING_STEP = Target(
    "lightning.pytorch.loops.optimization.automatic._AutomaticOptimization",
    "_training_step",
    "the stages of a pipeline skip a batch together, as one process does",
)
DEFAULT_GROUP = Target(
    "torch.distributed.distributed_c10d",
    "_get_default_group",
    "a dataset that shares itself out by rank means replicas, and so do others",
)
DATALOADER = Target(
    "lightning.pytorch.trainer.connectors.data_connector._DataLoaderSource",
    "dataloader",
    "data that a hook shares out by rank is read by replicas",
)


@contextmanager
def hooks_counted() -> Iterator[None]:
    """Count hooks inside this context, and gradients that tensors keep."""
    with ExitStack() as undo:
        for method in REGISTER_HOOK, RETAIN_GRAD:
            undo.enter_context(method.replaced(hooks.counted(method.current())))
        entry = SAVED_TENSORS_HOOKS
        undo.enter_context(entry.replaced(hooks.counted_entry(entry.current())))
        yield
