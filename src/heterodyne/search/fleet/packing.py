"""The most samples that columns do in what room there is, in fractions, and what the room is worth: a linear program.

It is solved by the simplex method from the basis on that was the best before columns were added. There are hardly more rows than pools, so
that a library takes longer to be asked than this takes to answer.
"""

from __future__ import annotations

import numpy as np

from heterodyne.search.fleet.arrays import Floats

__all__ = ["Packing"]

_SLACK = 1e-9
_PIVOTS = 200


class Packing:
    """Of columns, more of which may be added.

    Args:
        room: of each row, not negative.
        worth: of columns. ``need``: of each row's room, of some at least. Shape [rows, columns].
    """

    def __init__(self, room: Floats, worth: Floats | None = None, need: Floats | None = None) -> None:
        self._room = room
        self._worth, self._need = np.zeros(len(room)), np.eye(len(room))
        self._basis = list(range(len(room)))
        if worth is not None and need is not None:
            self.add(worth, need)

    @property
    def columns(self) -> int:
        return len(self._worth) - len(self._room)

    def add(self, worth: Floats, need: Floats) -> None:
        """More columns."""
        self._worth = np.concatenate([self._worth, worth])
        self._need = np.concatenate([self._need, need], axis=1)

    def most(self) -> tuple[float, Floats | None]:
        """The most that columns are worth, and the prices of a unit of each row's room; None where rounding keeps it from an end."""
        worth, need = self._worth, self._need
        slack = _SLACK * worth.max()
        for _ in range(_PIVOTS):
            try:
                inverse = np.linalg.inv(need[:, self._basis])
            except np.linalg.LinAlgError:
                break
            prices: Floats = worth[self._basis] @ inverse
            more = worth - prices @ need
            enter = int(more.argmax())
            if more[enter] <= slack:
                return float(prices @ self._room), np.maximum(0.0, prices)
            used, taken = inverse @ self._room, inverse @ need[:, enter]
            times = np.divide(used, taken, out=np.full(len(used), np.inf), where=taken > _SLACK)
            self._basis[int(times.argmin())] = enter
        return 0.0, None
