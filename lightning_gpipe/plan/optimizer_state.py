"""What optimizers do with parameters, told by copies that step before the first step."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_gpipe.model.on_meta import to_meta_leaf
from lightning_gpipe.tensors.random_state import preserved
from lightning_gpipe.tensors.tree import CONSTANTS, tree_tensors

#: Arguments of PyTorch's optimizers that choose kernels, not what is kept.
_KERNELS = ("foreach", "fused", "capturable")


def optimizer_state_bytes(optimizers: Iterable[Optimizer]) -> dict[int, int] | None:
    """Bytes of state that optimizers will keep for their parameters.

    A copy of each optimizer steps on the meta device, over a parameter of each shape: what it keeps
    of that one it keeps of all that look alike. The optimizers and their parameters stay as they
    are.

    Args:
        optimizers: Of ``torch.optim``, or others that keep their state where those do.

    Returns:
        Bytes by the ``id`` of the parameter, of trainable ones; None: an optimizer can't step so.
    """
    found: dict[int, int] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            alike: dict[Any, list[Tensor]] = defaultdict(list)
            for p in group["params"]:
                if p.requires_grad:
                    alike[p.shape, p.stride(), p.dtype].append(p)
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    sizes = _stepped(optimizer, group, [same[0] for same in alike.values()])
            except Exception:
                return None
            for same, nbytes in zip(alike.values(), sizes, strict=True):
                for p in same:
                    found[id(p)] = found.get(id(p), 0) + nbytes
    return found


def couples_parameters(optimizer: Optimizer) -> bool:
    """Whether a step of an optimizer that isn't PyTorch's own looks at all gradients together.

    Copies step over two small parameters, with other gradients of the second one: does the first
    one end elsewhere? Where a copy can't step so, that isn't known, and not said.
    """
    module = type(optimizer).step.__module__ or ""  # a mock's has no name
    if module.partition(".")[0] == "torch":
        return False
    group = next((group for group in optimizer.param_groups if group["params"]), None)
    if group is None:
        return False
    shape = (2,) * max(1, min(group["params"][0].dim(), 4))
    values = torch.linspace(0.5, 1.5, 2 ** len(shape), dtype=torch.float64, device="cpu")
    values = values.reshape(shape)
    ends = []
    try:
        with warnings.catch_warnings(), preserved(values.device), torch.no_grad():
            warnings.simplefilter("ignore")
            for scale in (1.0, 3.0):
                torch.manual_seed(0)
                pair = [nn.Parameter(values.clone()) for _ in range(2)]
                own = _copy_for(optimizer, group, pair)
                for _ in range(2):
                    for p, factor in zip(pair, (1.0, scale), strict=True):
                        p.grad = factor * values.flip(0)
                    _step(own)
                ends.append(pair[0].detach())
    except Exception:
        return False
    return not torch.equal(*ends)


def _step(optimizer: Optimizer) -> None:
    if "closure" in inspect.signature(type(optimizer).step).parameters:
        optimizer.step(lambda: 0.0)
    else:
        optimizer.step()


def _stepped(
    optimizer: Optimizer, group: dict[str, Any], parameters: Sequence[Tensor]
) -> list[int]:
    """Bytes that a copy of an optimizer keeps of some parameters of a group after a step."""
    if not parameters:
        return []
    stand_ins = [nn.Parameter(to_meta_leaf(p)) for p in parameters]
    for p in stand_ins:
        p.grad = torch.empty_like(p)
    own = _copy_for(optimizer, group, stand_ins)
    own.step()
    return [_nbytes(own.state.get(p, {})) for p in stand_ins]


def _copy_for(
    optimizer: Optimizer, group: dict[str, Any], parameters: Sequence[nn.Parameter]
) -> Optimizer:
    """A copy of an optimizer that has not stepped, for other parameters."""
    own = copy.copy(optimizer)  # by its pickling methods: without hooks, and what patched its step
    for name, value in vars(optimizer).items():
        if isinstance(value, CONSTANTS):
            vars(own).setdefault(name, value)
    kernels = {name: False for name in _KERNELS if name in group}
    own.state = defaultdict(dict)
    own.param_groups = [{**copy.copy(group), **kernels, "params": list(parameters)}]
    return own


def _nbytes(state: Any) -> int:
    storages = {id(t.untyped_storage()): t.untyped_storage() for t in tree_tensors(state)}
    return sum(storage.nbytes() for storage in storages.values())
