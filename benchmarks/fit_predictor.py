"""Fits what `predictor/constants.yaml` calls fitted to the published rows of the fitting side, and prints it.

The median of the logarithms of predicted over measured steps is what counts (a soft L1 loss); every source and kind of device has the
same weight, whatever the number of its rows; and each constant is held back towards where it is now, so that one that the rows say
nothing about stays.
"""

from __future__ import annotations

import argparse
import sys
from math import exp, log
from pathlib import Path

import numpy as np
from published import ROWS
from published_plan import evaluated
from published_rows import FIT, Run, runs
from scipy.optimize import least_squares

from heterodyne.predictor.constants import Constants, Fitted, constants

_MOST = 24
"""Rows of a source and kind of device; they are correlated, more say little more."""
_HELD_BACK = 0.1
_USUAL = 0.05
"""Of errors, in the logarithm: about their median. Farther rows have causes that no constant here is."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=ROWS, help="the published rows, one JSON a line")
    parser.add_argument(
        "--evaluations", type=int, default=12, help="how often all rows are predicted, times the constants"
    )
    parser.add_argument("--hold", nargs="*", default=(), metavar="NAME", help="constants that stay as they are")
    options = parser.parse_args()
    chosen = sample([run for run in runs(options.data) if run.side == FIT])
    now = constants()
    names = tuple(name for name in Fitted.model_fields if name not in options.hold)
    start = np.log([getattr(now.fitted, name) for name in names])

    def residuals(at: np.ndarray) -> np.ndarray:
        known = changed(now, names, at)
        off = [weight * log(seconds(run, known) / run.measured_s) for run, weight in chosen]
        return np.array([*off, *(_HELD_BACK * (at - start))])

    most = np.log([_bound(name) for name in names])
    found = least_squares(
        residuals,
        start,
        bounds=(-np.inf, most),
        loss="soft_l1",
        f_scale=_USUAL,
        max_nfev=options.evaluations,
        diff_step=0.02,
    )
    for name, was, value in zip(names, start, found.x, strict=True):
        print(f"{name:18} {exp(was):9.4g} -> {exp(value):9.4g}")
    return 0


def sample(found: list[Run]) -> list[tuple[Run, float]]:
    """No more than so many of each group, and the weight of each."""
    groups: dict[str, list[Run]] = {}
    for run in found:
        groups.setdefault(run.group, []).append(run)
    chosen = []
    for rows in groups.values():
        few = rows[:: max(1, len(rows) // _MOST)][:_MOST]
        chosen += [(run, min(1.0, 6 / len(few)) ** 0.5) for run in few]
    return chosen


def _bound(name: str) -> float:
    """No part of a datasheet's number is more than all of it."""
    upper = [rule.le for rule in Fitted.model_fields[name].metadata if hasattr(rule, "le")]
    return upper[0] if upper else float("inf")


def changed(now: Constants, names: tuple[str, ...], at: np.ndarray) -> Constants:
    """With these values."""
    fitted = now.fitted.model_copy(update={name: exp(value) for name, value in zip(names, at, strict=True)})
    return now.model_copy(update={"fitted": fitted})


def seconds(run: Run, known: Constants) -> float:
    return evaluated(run, known).step_s


if __name__ == "__main__":
    sys.exit(main())
