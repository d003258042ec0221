"""The norm of all gradients of the model together, and gradients scaled down to it, wherever the parameters are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from heterodyne.plan.boxes import Box
from heterodyne.runtime.comm.process_group import ProcessGroup
from heterodyne.runtime.weights.boxed import boxed
from heterodyne.runtime.weights.masters import MasterWeights

__all__ = ["Clipping"]


class Clipping:
    """Clips by the norm of all gradients of the model together (Pascanu et al., 2013), as `torch.nn.utils.clip_grad_norm_` does.

    Args:
        weights: what this rank updates.
        parameters: those of this rank that are trained.
        counted: of which parameters this rank adds the norm of which boxes to that of the others; each element is counted once. Of
            what it updates a range of, () is all of that.
        largest: the norm to scale down to; smaller gradients stay as they are. 0: none is scaled, the norm is taken all the same.
        process_group: joins the ranks that count; None: this rank has all parameters, and needs no others.
    """

    def __init__(
        self,
        weights: MasterWeights,
        parameters: Mapping[str, nn.Parameter],
        counted: Mapping[str, Sequence[Box]],
        largest: float,
        process_group: ProcessGroup | None,
    ) -> None:
        self._weights = weights
        self._parameters = parameters
        self._counted = counted
        self._largest = largest
        self._process_group = process_group

    @property
    def on_device(self) -> bool:
        """Whether the norm is made where the gradients are, and not on the host."""
        return self._process_group is None or self._process_group.works_on.type != "cpu"

    def clip(self) -> Tensor:
        """Scale the gradients; the norm before. Collective over the process group."""
        if self._process_group is None:
            norm: Tensor = nn.utils.get_total_norm(list(self._weights.gradients().values()))
            if self._largest:
                nn.utils.clip_grads_with_norm_(self._parameters.values(), self._largest, norm)
            return norm
        counted = [
            boxed(gradient, box)
            for name, gradient in self._weights.gradients().items()
            for box in self._counted.get(name, ())
        ]
        own = nn.utils.get_total_norm(counted) if counted else torch.zeros((), device=self._process_group.works_on)
        # Where the process group works: an accelerator that adds it up by itself is not waited for.
        total = own.detach().to(self._process_group.works_on).double().square()
        self._process_group.all_reduce(total).wait()
        norm = total.sqrt()
        if self._largest:
            # Not a number: no gradient is touched, so that those at fault can be distinguished from the others.
            scale = (self._largest / (norm + 1e-6)).clamp(max=1.0).nan_to_num(1.0)
            for gradient in self._weights.gradients().values():
                gradient.mul_(scale)
        return norm
