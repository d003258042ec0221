"""How slices of keys and values go from member to member.

The members that have tokens stand in a ring, in their order. Each slice goes from its owner to the next one and on, until all have
had it; under a causal mask it ends at the last member, for those before its owner do not see it. In each step a member holds one
slice, or none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from heterodyne.runtime.split.group import Group

__all__ = ["Ring", "packed"]

_SEQUENCE = 2


class Ring:
    """One journey of all slices; members call alike.

    Args:
        sizes: tokens of each member's slice.
        causal: a slice is seen by its owner and the members behind.
        shapes: of this member's keys and values, [B, G, sizes[i], E] each.
    """

    def __init__(
        self, group: Group, sizes: Sequence[int], *, causal: bool, shapes: tuple[torch.Size, torch.Size]
    ) -> None:
        self.position = group.position
        self._group = group
        self._sizes = sizes
        self._causal = causal
        self._shapes = shapes
        self._places = [member for member, size in enumerate(sizes) if size]

    def slices(self, k: Tensor, v: Tensor) -> Iterator[tuple[int | None, Tensor, Tensor]]:
        """Step by step: whose slice is here, its keys and its values; the own one first, None where there is none."""
        source = self.position if self._sizes[self.position] else None
        for step in range(len(self._places)):
            # Nothing that is computed in a step is needed to pass on its slice, so an exchange that did not block could go on meanwhile.
            is_last = step + 1 == len(self._places)
            coming = {} if is_last else self.pass_on(packed(k, v), step, home=False)
            yield source, k, v
            source = next(iter(coming), None)
            if source is not None:
                k, v = self.unpacked(coming[source], source)

    def pass_on(self, flat: Tensor, step: int, *, home: bool) -> dict[int, Tensor]:
        """Send what goes with the slice that is here after ``step``; get what comes here, by whose slice it goes with.

        ``home``: after its last stop it returns to the owner of the slice.
        """
        moves = {here: (there, source) for source, here, there in self._moves(step, home=home)}
        to, _ = moves.get(self.position, (None, None))
        coming = {here: source for here, (there, source) in moves.items() if there == self.position}
        everyone, nothing = range(self._group.size), flat.new_empty(0)
        received = self._group.all_to_all(
            [flat if member == to else nothing for member in everyone],
            [(self._numel(coming[member]) if member in coming else 0,) for member in everyone],
        )
        return {source: received[member] for member, source in coming.items()}

    def unpacked(self, flat: Tensor, source: int) -> tuple[Tensor, Tensor]:
        """Keys and values (or their gradients) of a member's slice; the inverse of `packed`."""
        k, v = (torch.Size((*s[:_SEQUENCE], self._sizes[source], *s[_SEQUENCE + 1 :])) for s in self._shapes)
        of_k, of_v = flat.split_with_sizes([k.numel(), v.numel()])
        return of_k.view(k), of_v.view(v)

    def _moves(self, step: int, *, home: bool) -> Iterator[tuple[int, int, int]]:
        """``(source, here, there)`` of each slice that is still under way after ``step``."""
        count = len(self._places)
        for place, source in enumerate(self._places):
            end = count if self._causal else place + count
            here = place + step
            if here + 1 < end:
                yield source, self._places[here % count], self._places[(here + 1) % count]
            elif here + 1 == end and home:
                yield source, self._places[here % count], source

    def _numel(self, source: int) -> int:
        return sum(self._sizes[source] * s[0] * s[1] * s[-1] for s in self._shapes)


def packed(k: Tensor, v: Tensor) -> Tensor:
    """Keys and values as one flat tensor."""
    return torch.cat([k.reshape(-1), v.reshape(-1)])
