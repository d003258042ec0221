"""The norm of all gradients of the model together, and gradients scaled down to it, wherever the parameters are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from heterodyne.plan.boxes import Box
from heterodyne.runtime.comm.channel import Channel
from heterodyne.runtime.weights.boxed import boxed

__all__ = ["Clipping"]


class Clipping:
    """Clips by the norm of all gradients of the model together (Pascanu et al., 2013), as `torch.nn.utils.clip_grad_norm_` does.

    Args:
        parameters: those of this rank that are trained.
        counted: of which parameters this rank adds the norm of which boxes to that of the others; each element is counted once.
        largest: the norm to scale down to; smaller gradients stay as they are. 0: none is scaled, the norm is taken all the same.
        channel: joins the ranks that count; None: this rank has all parameters, and needs no others.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        counted: Mapping[str, Sequence[Box]],
        largest: float,
        channel: Channel | None,
    ) -> None:
        self._parameters = parameters
        self._counted = counted
        self._largest = largest
        self._channel = channel

    def clip(self) -> Tensor:
        """Scale the gradients; the norm before. Collective over the channel."""
        if self._channel is None:
            gradients = [p.grad for p in self._parameters.values() if p.grad is not None]
            norm: Tensor = nn.utils.get_total_norm(gradients)
            if self._largest:
                nn.utils.clip_grads_with_norm_(self._parameters.values(), self._largest, norm)
            return norm
        counted = [
            boxed(p.grad, box)
            for name, p in self._parameters.items()
            for box in self._counted.get(name, ())
            if p.grad is not None
        ]
        own = nn.utils.get_total_norm(counted) if counted else torch.zeros((), device=self._channel.works_on)
        # Where the channel works: an accelerator that adds it up by itself is not waited for.
        total = own.detach().to(self._channel.works_on).double().square()
        self._channel.all_reduce(total).wait()
        norm = total.sqrt()
        if self._largest:
            # Not a number: no gradient is touched, so that those at fault can be told from the others.
            scale = (self._largest / (norm + 1e-6)).clamp(max=1.0).nan_to_num(1.0)
            for parameter in self._parameters.values():
                if parameter.grad is not None:
                    parameter.grad.mul_(scale)
        return norm
