"""Buffers that the script puts in the place of others (``model.mask = another``): each rank keeps of them what the plan has it hold."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor, nn

from heterodyne.graph.ir import ModelGraph
from heterodyne.runtime import same_batch
from heterodyne.runtime.recapture.read_state import Change
from heterodyne.runtime.weights.materialise import replace_held
from heterodyne.runtime.weights.ownership import Ownership

__all__ = ["ReplacedBuffers"]


class ReplacedBuffers:
    """Of one rank.

    Args:
        held: the buffers by name, of which this rank has its parts; brought up to date by `take_over`.
        ownership: who holds what of them; one of another shape than the plan knows, or that it does not know, is held whole by all.
    """

    def __init__(
        self,
        module: nn.Module,
        graph: ModelGraph,
        held: dict[str, Tensor],
        ownership: Ownership,
        *,
        rank: int,
        device: torch.device,
    ) -> None:
        self._module = module
        self._held = held
        self._ownership = ownership
        self._rank, self._device = rank, device
        self._first = {buffer.name: (buffer.shape, buffer.dtype) for buffer in graph.buffers}
        self._before: dict[str, Tensor | None] = {}  # those that ranks have not agreed on, as they were
        self._whole: dict[str, Tensor] = {}
        self._changes: dict[str, Change] = {}
        self.count = 0
        """How often any have been taken over."""

    @property
    def changes(self) -> list[Change]:
        """Return the changes of all that were put in the place of others since the model was distributed."""
        return list(self._changes.values())

    @property
    def whole(self) -> Mapping[str, Tensor]:
        """Return, for the same, tensors of their whole shapes on the meta device."""
        return MappingProxyType(self._whole)

    def take_over(self) -> None:
        """Look for buffers that were put in the place of others since the last call, and let this rank keep its part of each."""
        now = dict(self._module.named_buffers())
        gone = self._held.keys() - now.keys()
        replaced = {name: buffer for name, buffer in now.items() if self._held.get(name) is not buffer}
        if not gone and not replaced:
            return
        self.count += 1
        for name in gone:
            self._before.setdefault(name, self._held.pop(name))
            self._whole.pop(name, None)
            self._changes.pop(name, None)
        for name, buffer in replaced.items():
            self._before.setdefault(name, self._held.get(name))
            self._changes[name] = _change(name, buffer)
            self._whole[name] = torch.empty_like(buffer, device="meta")
            self._hold(name, buffer)

    def agreed(self) -> None:
        """All ranks have the same."""
        self._before.clear()

    def undo(self) -> None:
        """Put the buffers from before back, as the ranks have not agreed on these."""
        for name, before in self._before.items():
            if before is None:
                self._held.pop(name, None)
            else:
                self._held[name] = before
            path, _, entry = name.rpartition(".")
            self._module.get_submodule(path)._buffers[entry] = before
        self._before.clear()

    def shapes(self) -> dict[str, object]:
        """Return shape and dtype of those for which they are others than in the captured graph."""
        now = {
            name: (tuple(whole.shape), str(whole.dtype).removeprefix("torch.")) for name, whole in self._whole.items()
        }
        return {f"shape and dtype of {name!r}": of for name, of in now.items() if of != self._first.get(name)}

    def _hold(self, name: str, buffer: Tensor) -> None:
        self._ownership.fit(name, tuple(buffer.shape))
        box = self._ownership.holders(name, [self._rank]).get(self._rank)
        self._held[name] = replace_held(self._module, name, buffer, box, self._device)


def _change(name: str, buffer: Tensor) -> Change:
    values = "without values" if buffer.is_meta else same_batch.digest({"": buffer})
    return Change(name=f"the buffer {name!r}", before="another tensor", after=f"one of {list(buffer.shape)} ({values})")
