"""What hooks may ask of the whole model, of which each process holds a part."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor

from lightning_gpipe.comm.messages import ObjectChannel
from lightning_gpipe.gradients.norm import ModelGradients
from lightning_gpipe.strategy.planning import PlanningStrategy


class WholeModelStrategy(PlanningStrategy):
    """Part of GPipeStrategy: parameters and gradients of all stages, during a run."""

    def gathered(
        self, parameters: Iterable[Tensor], gradients: bool = False
    ) -> Iterator[Tensor | None]:
        """The values of parameters of all stages, one after another. Collective over the pipeline.

        Each comes when it is asked for, so there is memory for one more tensor at a time::

            names, parameters = zip(*self.named_parameters())
            for name, value in zip(names, self.trainer.strategy.gathered(parameters)):
                norms[name] = value.norm()

        Every rank must ask for all of them. They are to be read: a change counts for nobody else.

        Args:
            parameters: All or some of the whole model's, the same on every stage.
            gradients: Whether to give their gradients.

        Yields:
            The values of each, on this rank's device, without a graph; None where a parameter has
            no gradient.
        """
        pipeline = self._running.pipeline
        where, channel = pipeline.gradients(), pipeline.groups.pipeline
        return _gathered(parameters, gradients, where, channel)

    def grad_norm(self, parameters: Tensor | Iterable[Tensor], norm_type: float = 2.0) -> Tensor:
        """The norm of the gradients over all stages. Collective over the pipeline.

        Args:
            parameters: All or some of the whole model's, the same on every stage.
            norm_type: p of the p-norm; ``inf`` or ``"inf"`` for the largest absolute value.

        Returns:
            A scalar, the same for every number of stages. What has no gradient counts as zero.
        """
        return self._running.grad_norm(_listed(parameters), norm_type)

    def clip_grad_norm_(
        self,
        parameters: Tensor | Iterable[Tensor],
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        """What ``torch.nn.utils.clip_grad_norm_`` does, over all stages. Collective over them.

        The arguments are the same; ``foreach`` makes no difference.

        Returns:
            The norm before, a scalar.

        Raises:
            RuntimeError: If the norm isn't finite, and ``error_if_nonfinite``.
        """
        return self._running.clip(_listed(parameters), max_norm, norm_type, error_if_nonfinite)


def _gathered(
    parameters: Iterable[Tensor], gradients: bool, where: ModelGradients, channel: ObjectChannel
) -> Iterator[Tensor | None]:
    summed = where.summed() if gradients else {}
    for parameter in parameters:
        value = summed.get(id(parameter), parameter.grad) if gradients else parameter
        value = None if value is None else value.detach()
        source = where.owner(parameter)
        if source is not None:
            value = channel.broadcast("gathered weights", value, source)
            channel.flush()  # so that no more than one is under way
        yield value


def _listed(tensors: Tensor | Iterable[Tensor]) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)
