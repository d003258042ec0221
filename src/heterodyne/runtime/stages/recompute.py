"""Running something without keeping what its backward needs, and again when that is needed.

What autograd would keep is replaced by a number; when the backward asks for it, or before (`Recomputation.now`), the same is
run once more, and gives what the first run would have kept. This is the non-reentrant checkpointing of PyTorch
(``torch.utils.checkpoint``), opened up so that the second run can be placed where a rank would wait anyway. Random draws
repeat, because the second run begins with torch's generator as the first one did.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from heterodyne.errors import HeterodyneError

__all__ = ["Recomputation"]

Run = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]


class Recomputation:
    """One run of ``run`` on ``values``; what it is called with stays alive, nothing in between does.

    ``around`` surrounds the second run with what the first one is surrounded with (modes, autocast): a backward may ask for it in
    a thread of its own.
    """

    def __init__(
        self, run: Run, values: Mapping[str, Tensor], around: Callable[[], AbstractContextManager[object]]
    ) -> None:
        self._run = run
        self._around = around
        self._values = dict(values)
        self._kept: list[Tensor] | None = None
        self._count = 0
        self._before = torch.get_rng_state()

    def first(self) -> dict[str, Tensor]:
        """The values that it makes, with their graph."""
        with torch.autograd.graph.saved_tensors_hooks(self._number, self._get):
            return self._run(self._values)

    def now(self) -> None:
        """Run again, if that was not done yet."""
        if self._kept is not None:
            return
        kept: list[Tensor] = []
        inputs = {name: t.detach().requires_grad_(t.requires_grad) for name, t in self._values.items()}

        def keep(tensor: Tensor) -> Tensor:
            # Without its graph: an output that its own op keeps would hold itself for ever.
            kept.append(tensor.detach())
            return kept[-1]

        with self._around(), torch.random.fork_rng([]), torch.enable_grad():
            torch.set_rng_state(self._before)
            with torch.autograd.graph.saved_tensors_hooks(keep, _same):
                self._run(inputs)
        if len(kept) != self._count:
            raise HeterodyneError(
                f"computed again, a part of the model keeps {len(kept)} tensors for its backward, and {self._count} the first time: "
                "it goes another way each time. Let it do the same, or plan without recompute"
            )
        self._kept = kept

    def _number(self, _tensor: Tensor) -> int:
        self._count += 1
        return self._count - 1

    def _get(self, number: int) -> Tensor:
        self.now()
        assert self._kept is not None
        return self._kept[number]


def _same(tensor: Tensor) -> Tensor:
    return tensor
