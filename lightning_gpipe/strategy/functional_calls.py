"""Calls of the module with other parameters: ``torch.func.functional_call``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn

from lightning_gpipe.model.redirect import is_redirected
from lightning_gpipe.pipeline.module import PipelinedModule
from lightning_gpipe.strategy import patches


@contextmanager
def refused(pipeline: PipelinedModule) -> Iterator[None]:
    """Refuse those that give the backbone other parameters, inside this context.

    Stages run it with what they hold, and a recompute with what it has then. One stage may do so
    without gradients.
    """
    target = patches.REPARAMETRIZE
    with target.replaced(partial(_reparametrize, pipeline, target.current())):
        yield


def _reparametrize(
    pipeline: PipelinedModule,
    original: Callable[..., AbstractContextManager[None]],
    module: nn.Module,
    given: Mapping[str, Any],
    *args: Any,
    **kwargs: Any,
) -> AbstractContextManager[None]:
    body = pipeline.module.get_submodule(pipeline.backbone)
    may_run = pipeline.groups.stages == 1 and not torch.is_grad_enabled()
    may_run = may_run or not is_redirected(body)  # as for a summary, without values
    own = dict(chain(module.named_parameters(), module.named_buffers()))
    others = [key for key, value in given.items() if own.get(key) is not value]
    names = [name for name, part in module.named_modules() if part is body and not may_run]
    for name in names:
        inside = f"{name}." if name else ""
        if any(key.startswith(inside) for key in others):
            raise RuntimeError(
                "torch.func.functional_call gives the backbone other parameters, and stages run it"
                " with their own. Call a copy that isn't the backbone"
                " (self.other = copy.deepcopy(self.backbone)), or copy the values into the"
                " parameters before the call: weight.copy_(values) under torch.no_grad()."
            )
    return original(module, given, *args, **kwargs)
