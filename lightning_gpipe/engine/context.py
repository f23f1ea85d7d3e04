"""What surrounds a forward, and surrounds its recompute again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch.backends import cuda, cudnn

from lightning_gpipe.model.checkpointing import refuse_checkpointed
from lightning_gpipe.model.redirect import refuse_reading, refuse_transforms
from lightning_gpipe.model.run_layer import RunLayer
from lightning_gpipe.tensors.default_type import default_dtype

#: What tells whether kernels may run, and what allows them.
_KERNELS: tuple[tuple[Callable[[], bool], Callable[[bool], object]], ...] = (
    (cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
    (cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp),
    (cuda.math_sdp_enabled, cuda.enable_math_sdp),
    (cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp),
    *(
        (partial(getattr, cudnn, name), partial(setattr, cudnn, name))
        for name in ("enabled", "benchmark", "deterministic")
    ),
)


@dataclass(frozen=True, slots=True)
class Rounding:
    """What decides how layers round.

    Args:
        autocast: For each device type whether autocast is on, and its type.
        autocast_cache: Whether autocast keeps its casts.
        default_dtype: The type of new tensors; Lightning's precision sets it for the step alone.
        kernels: Which kernels may run, as ``sdpa_kernel`` and ``torch.backends.cudnn.flags`` say.
    """

    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    autocast_cache: bool
    default_dtype: torch.dtype
    kernels: tuple[bool, ...]

    @classmethod
    def current(cls, device: torch.device) -> Rounding:
        """That of the running step."""
        return cls(
            _autocast(dict.fromkeys(("cpu", device.type))),
            torch.is_autocast_cache_enabled(),
            torch.get_default_dtype(),
            _kernels(),
        )

    def restored(self) -> AbstractContextManager[None]:
        """Autocast, the default type and the choice of kernels as they were."""
        is_same = (
            self.default_dtype == torch.get_default_dtype()
            and self.autocast == _autocast(kind for kind, _, _ in self.autocast)
            and self.autocast_cache == torch.is_autocast_cache_enabled()
            and self.kernels == _kernels()
        )
        return nullcontext() if is_same else self._restored()

    @contextmanager
    def _restored(self) -> Iterator[None]:
        with ExitStack() as stack:
            for (allowed, allow), value in zip(_KERNELS, self.kernels, strict=True):
                if allowed() != value:
                    stack.callback(allow, allowed())
                    allow(value)
            stack.enter_context(default_dtype(self.default_dtype))
            for kind, enabled, dtype in self.autocast:
                stack.enter_context(
                    torch.autocast(
                        kind, dtype=dtype, enabled=enabled, cache_enabled=self.autocast_cache
                    )
                )
            yield


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """What a recompute must restore to draw the same random numbers and to round the same way.

    Args:
        key: Numbers that are the same on every stage and for every number of stages, and differ
            between calls.
        run_layer: How layers are run.
        rounding: How they round; None: they don't run again.
        splits: Whether the backbone's input is cut along dimension 0.
    """

    key: tuple[int, ...]
    run_layer: RunLayer
    rounding: Rounding | None
    splits: bool = False

    @classmethod
    def current(
        cls,
        key: tuple[int, ...],
        device: torch.device,
        run_layer: RunLayer,
        runs_again: bool = True,
    ) -> ForwardContext:
        """The context of the running step.

        Args:
            key: See the class.
            device: Where layers compute.
            run_layer: See the class.
            runs_again: Whether the forward may run once more, or for another micro-batch outside
                of the step.

        Raises:
            RuntimeError: If the backbone is called where no other stage could follow: by a data
                loader, inside ``torch.utils.checkpoint`` or a function transform.
        """
        refuse_reading()
        refuse_checkpointed()
        refuse_transforms()
        return cls(key, run_layer, Rounding.current(device) if runs_again else None)

    def restored(self) -> AbstractContextManager[None]:
        """Let layers round as in the forward."""
        return nullcontext() if self.rounding is None else self.rounding.restored()


def _kernels() -> tuple[bool, ...]:
    return tuple(allowed() for allowed, _ in _KERNELS)


def _autocast(kinds: Iterable[str]) -> tuple[tuple[str, bool, torch.dtype], ...]:
    """For each device type whether autocast is on, and its type."""
    return tuple(
        (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds
    )
