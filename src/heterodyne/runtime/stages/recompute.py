"""Activation recomputation (checkpointing) that can run ahead of the backward.

Saved tensors are replaced by empty places; when the backward asks for one, or earlier (`Recomputation.now`), the block is run once more
and fills the places, until all are full: then it stops early. Autograd holds the places, so each tensor is freed as soon as the backward
has used it. This is PyTorch's non-reentrant checkpointing (``torch.utils.checkpoint``), opened up so that the second run can be placed
where a rank would be idle. Random draws repeat, because the second run starts with the same generator state.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress

import torch
from torch import Tensor

from heterodyne.errors import HeterodyneError
from heterodyne.runtime.stages.kept_outputs import KeptOutputs

__all__ = ["Recomputation"]

Run = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]


class _Place:
    """Of a tensor that a backward needs; empty until it was computed again."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self) -> None:
        self.tensor: Tensor | None = None


class _Enough(Exception):  # noqa: N818  # it is no error
    """All places are full."""


class Recomputation:
    """One run of ``run`` on ``values``; its inputs stay alive, nothing in between does.

    ``around`` surrounds the second run with what surrounds the first one (modes, autocast): a backward may ask for it in a thread of its
    own. ``kept``: outputs that ops of ``run`` keep. ``to_end``: no early stop, as where the run has collectives.
    """

    def __init__(
        self,
        run: Run,
        values: Mapping[str, Tensor],
        around: Callable[[], AbstractContextManager[object]],
        *,
        kept: KeptOutputs | None = None,
        to_end: bool = False,
    ) -> None:
        self._run = run
        self._around = around
        self._values = dict(values)
        self._kept = kept
        self._to_end = to_end
        self._places: list[weakref.ref[_Place]] = []
        self._shapes: list[torch.Size] = []
        self._filled = False
        self._before = torch.get_rng_state()

    def first(self) -> dict[str, Tensor]:
        """The values that it makes, with their graph."""
        with torch.autograd.graph.saved_tensors_hooks(self._place, self._get):
            made = self._run(self._values)
        if self._to_end:
            # Others take part, and one of them may need nothing that was kept, as without samples: all begin as their backwards come here.
            for tensor in made.values():
                if tensor.requires_grad:
                    tensor.register_hook(lambda _: self.now())  # type: ignore[no-untyped-call]
        return made

    def now(self) -> None:
        """Run again, if that was not done yet."""
        if self._filled:
            return
        inputs = {name: t.detach().requires_grad_(t.requires_grad) for name, t in self._values.items()}
        filled = 0

        def keep(tensor: Tensor) -> Tensor:
            nonlocal filled
            # Without its graph: an output that its own op keeps would hold itself for ever.
            detached = tensor.detach()
            self._fill(filled, detached)
            filled += 1
            if filled == len(self._places) and not self._to_end:
                raise _Enough
            return detached

        if self._kept is not None:
            self._kept.replay()
        with self._around(), torch.random.fork_rng([]), torch.enable_grad():
            torch.set_rng_state(self._before)
            with suppress(_Enough), torch.autograd.graph.saved_tensors_hooks(keep, _same):
                self._run(inputs)
        if filled != len(self._places):
            raise HeterodyneError(_another_way(f"keeps {filled} tensors", f"{len(self._places)}"))
        if self._kept is not None:
            self._kept.clear()
        self._filled = True

    def _fill(self, number: int, tensor: Tensor) -> None:
        if number >= len(self._places):
            return
        if tensor.shape != self._shapes[number]:
            now, before = list(tensor.shape), list(self._shapes[number])
            raise HeterodyneError(_another_way(f"keeps a tensor {now}", f"one {before}"))
        place = self._places[number]()
        if place is not None:
            place.tensor = tensor

    def _place(self, tensor: Tensor) -> _Place:
        place = _Place()
        self._places.append(weakref.ref(place))
        self._shapes.append(tensor.shape)
        return place

    def _get(self, place: _Place) -> Tensor:
        self.now()
        assert place.tensor is not None
        return place.tensor


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _another_way(now: str, before: str) -> str:
    return (
        f"computed again, a part of the model {now} for its backward, and {before} the first time: it goes another way each time. Let it "
        "do the same, or plan without recompute"
    )
