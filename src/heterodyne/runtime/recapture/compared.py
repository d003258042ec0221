"""Whether all ranks have seen the same change: digests, added up by one asynchronous all-reduce."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from itertools import chain

import torch

from heterodyne.errors import PlanError
from heterodyne.runtime.comm.communicator import Communicator
from heterodyne.runtime.recapture.read_state import Change

__all__ = ["Compared", "disagreement"]

_BITS = 20  # of a digest: the sum of squares over 1,024 ranks is still exact in float64


class Compared:
    """What all ranks have seen change, on its way. Making one is collective.

    Args:
        changes: of what forward and loss read, compared among all ranks.
        between: what the script did between two steps to weights and options, compared among those that have samples; None on others.
        state: what it did to the optimizer's state, compared among those that have any; None on others.
        look: this rank asks for values of weights to be compared.
        suspects: this rank suspects that something is slower than it was.
    """

    def __init__(
        self,
        communicator: Communicator,
        changes: Sequence[Change],
        between: Sequence[Change] | None = None,
        state: Sequence[Change] | None = None,
        *,
        look: bool = False,
        suspects: bool = False,
    ) -> None:
        self._ranks = communicator.world_size
        sums = [(0, 0, 0) if of is None else _sums(of) for of in (changes, between, state)]
        self._sums = torch.tensor([look, suspects, *chain(*sums)], dtype=torch.float64)
        self._sent = communicator.control.all_reduce(self._sums) if self._ranks > 1 else None

    def equal(self) -> bool:
        """Return whether all ranks have seen the same."""
        _, _, *sums = self._received()
        # Of equal digests, and of no others, the squares are so large (Cauchy-Schwarz).
        return all(ranks * squares == total**2 for ranks, total, squares in (sums[:3], sums[3:6], sums[6:]))

    def look(self) -> bool:
        """Return whether any rank asks for weights to be compared; alone it has nobody to compare them with."""
        return self._ranks > 1 and self._received()[0] > 0

    def suspected(self) -> bool:
        """Return whether any rank does."""
        return self._received()[1] > 0

    def _received(self) -> list[int]:
        if self._sent is not None:
            self._sent.wait()
            self._sent = None
        return [int(value) for value in self._sums.tolist()]


def disagreement(communicator: Communicator, changes: Iterable[Change]) -> PlanError:
    """Return what to say of changes that not all ranks have made. Collective."""
    of_all: list[dict[str, str]] = communicator.all_gather_object({change.name: str(change) for change in changes})
    unlike = sorted(name for name in set().union(*of_all) if len({of.get(name) for of in of_all}) > 1)
    name = next((name for name in unlike if any(name not in of for of in of_all)), unlike[0] if unlike else "")
    ranks = [rank for rank, of in enumerate(of_all) if name in of]
    if name and len(ranks) == len(of_all):
        where = "and each rank has another value"
        cause = "Where forward or a hook computes it, each rank does so of its own samples: keep it out of what forward reads"
    else:
        where = (
            f"on {'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))} alone"
            if name
            else "not alike on all ranks"
        )
        cause = "Change what forward and loss read alike on every rank, before the same step (no 'if rank == 0')"
    what = of_all[ranks[0]][name] if name else "something that forward or loss reads was changed"
    return PlanError(f"{what}, {where}: the ranks would train different models. {cause}")


def _sums(changes: Iterable[Change]) -> tuple[int, int, int]:
    """Return what ranks add up to compare digests: of this one its number, its digest and the square of that."""
    found = hashlib.blake2b(digest_size=8)
    lines = [f"{change.name}\0{change.after}\0" for change in sorted(changes, key=lambda change: change.name)]
    found.update("".join(lines).encode())
    digest = int.from_bytes(found.digest(), "big") >> (64 - _BITS) if lines else 0
    return 1, digest, digest**2
