"""A scaling study: what so many devices reach under each strategy, as a file that grows cell by cell, and what follows from it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from math import isclose
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field

from heterodyne.errors import FileError, HeterodyneError
from heterodyne.job import Strategy
from heterodyne.json_files import EXACT, Count, checked, read_json, readable_json
from heterodyne.text_files import write_text

__all__ = ["KINDS", "Cell", "Figures", "Origin", "Seen", "Study"]

Positive: TypeAlias = Annotated[float, Field(gt=0)]
NotNegative: TypeAlias = Annotated[float, Field(ge=0)]
Origin = Literal["datasheets", "profile", "run"]
"""What a cell comes from; each knows more than those before it."""
Seen = Literal["predicted", "measured"]
KINDS: tuple[Seen, ...] = ("predicted", "measured")
_INSTEAD = "name another file with --out, or move this one away to begin again"
_KNOWS = {"datasheets": 0, "profile": 1, "run": 2}


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """A step under a plan. ``efficiency``: as plans and reports have it, samples/s over the sum of what the devices reach each for itself
    with its own share; ``memory_bytes``: of the fullest device. None: not known.
    """

    __pydantic_config__ = EXACT

    step_s: Positive
    samples_per_s: Positive
    efficiency: NotNegative | None = None
    memory_bytes: Count | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """So many devices under one strategy.

    Args:
        plan: what the planner calls the plan that it chose. ``model``: the fingerprint of the model that it is for.
        bound_samples_per_s: what all devices reach together, at their best and each for itself, without communicating.
        alone_samples_per_s: what the fastest device is predicted to reach by itself; None where the model fits on none, or it is not known.
        usd_per_hour, watts: of the devices that take part; None where those of any are not known.
        traffic_usd: what a step's traffic between places costs.
        refused: why there is no plan, or why it did not run; "" if there is one.
    """

    __pydantic_config__ = EXACT

    devices: Annotated[int, Field(ge=1)]
    strategy: Strategy
    origin: Origin
    plan: str = ""
    model: str = ""
    predicted: Figures | None = None
    measured: Figures | None = None
    bound_samples_per_s: Positive | None = None
    alone_samples_per_s: Positive | None = None
    usd_per_hour: NotNegative | None = None
    watts: NotNegative | None = None
    traffic_usd: NotNegative = 0.0
    refused: str = ""

    def seen(self, kind: Seen) -> Figures | None:
        return self.measured if kind == "measured" else self.predicted

    @property
    def figures(self) -> Figures | None:
        """Return what was measured, or else what is predicted."""
        return self.measured or self.predicted

    @property
    def error(self) -> float | None:
        """The relative error of the predicted step; None where only one side is known."""
        if self.predicted is None or self.measured is None:
            return None
        return self.predicted.step_s / self.measured.step_s - 1

    def usd(self, figures: Figures) -> float | None:
        """The cost of a step."""
        return None if self.usd_per_hour is None else self.usd_per_hour * figures.step_s / 3600 + self.traffic_usd

    def joules(self, figures: Figures) -> float | None:
        """The energy of a step, in which each device that takes part draws its power all the time."""
        return None if self.watts is None else self.watts * figures.step_s

    def of_ideal(self, figures: Figures) -> float | None:
        """Samples/s over the bound, which does not depend on how samples are shared out."""
        return figures.samples_per_s / self.bound_samples_per_s if self.bound_samples_per_s else None


@dataclass(frozen=True, kw_only=True)
class Study:
    """All cells, and what they are of.

    Args:
        job, cluster: fingerprints of the job and of the devices with their prices; cells of another one are none of this study.
        profile, speeds: those of measurements, and of emulated workers, by which cells were found; "" and () before there is any.
        name: of the job. ``batch``: samples of a step.
        cells: by strategy, then by number of devices.
    """

    __pydantic_config__ = EXACT

    kind: Literal["study"] = "study"
    version: Literal[1] = 1
    name: str
    job: str
    cluster: str
    batch: Annotated[int, Field(ge=1)]
    profile: str = ""
    speeds: tuple[float, ...] = ()
    cells: tuple[Cell, ...] = ()

    @classmethod
    def load(cls, path: Path) -> Study:
        """Raises FileError for a file that is no study, or a damaged one."""
        try:
            content: Any = read_json(path)
            if not isinstance(content, dict) or content.get("kind") != "study":
                raise ValueError("it is no study")
            found = checked(cls, content)
            found._require_consistent()
            return found
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise FileError(
                f"cannot be gone on with ({why}): {_INSTEAD}",
                path=str(path),
            ) from error

    def _require_consistent(self) -> None:
        """Raises ValueError for cells that no study writes."""
        seen: set[tuple[int, Strategy]] = set()
        for cell in self.cells:
            name = f"the cell of {cell.devices} devices, {cell.strategy},"
            if (cell.devices, cell.strategy) in seen:
                raise ValueError(f"{name} is there twice")
            seen.add((cell.devices, cell.strategy))
            of_origin = cell.measured if cell.origin == "run" else cell.predicted
            if (of_origin is None) == (not cell.refused):
                raise ValueError(f"{name} has neither figures nor a reason why there are none, or both")
            predicted = cell.predicted
            if predicted is not None and not isclose(
                predicted.step_s * predicted.samples_per_s, self.batch, rel_tol=1e-3
            ):
                raise ValueError(f"{name} has a step and samples/s that are not of {self.batch} samples")

    def save(self, path: Path) -> None:
        """Write it whole or not at all. Raises HeterodyneError."""
        try:
            write_text(path, readable_json(json.loads(json.dumps(asdict(self), allow_nan=False))) + "\n")
        except OSError as error:
            raise HeterodyneError(
                f"{path} cannot be written ({error.strerror}): make room, or name another file with --out"
            ) from error

    def going_on(self, found: Study, path: Path) -> Study:
        """Return the study in a file, as far as it has come, if it is of the same job and devices as this one. Raises FileError."""
        for what, there, here in (
            ("job", found.job, self.job),
            ("cluster", found.cluster, self.cluster),
            ("profile", found.profile, self.profile or found.profile),
            ("set of emulated workers", found.speeds, self.speeds or found.speeds),
        ):
            if there and there != here:
                raise FileError(
                    f"this study is of another {what}: {_INSTEAD}",
                    path=str(path),
                )
        return replace(
            self, cells=found.cells, profile=self.profile or found.profile, speeds=self.speeds or found.speeds
        )

    def done(self, devices: int, strategy: Strategy, origin: Origin) -> bool:
        """Return whether the cell is known from such a source, or from one that knows more."""
        cell = self._cell(devices, strategy)
        return cell is not None and _KNOWS[cell.origin] >= _KNOWS[origin]

    def require_same_model(self, cell: Cell, path: Path) -> None:
        """Raises FileError for a cell of a model that is not that of the other cells."""
        if cell.model and any(own.model not in ("", cell.model) for own in self.cells):
            raise FileError(
                f"this study is of another model, whose code has been changed since: {_INSTEAD}",
                path=str(path),
            )

    def with_cell(self, cell: Cell) -> Study:
        others = [own for own in self.cells if (own.devices, own.strategy) != (cell.devices, cell.strategy)]
        order = list(dict.fromkeys(own.strategy for own in (*self.cells, cell)))
        return replace(
            self, cells=tuple(sorted([*others, cell], key=lambda own: (order.index(own.strategy), own.devices)))
        )

    def _cell(self, devices: int, strategy: Strategy) -> Cell | None:
        return next((own for own in self.cells if (own.devices, own.strategy) == (devices, strategy)), None)

    def of(self, strategy: Strategy, kind: Seen) -> tuple[tuple[Cell, Figures], ...]:
        """Return the cells of a strategy of which such figures are known, by rising number of devices."""
        return tuple(
            (cell, figures)
            for cell in self.cells
            if cell.strategy == strategy and (figures := cell.seen(kind)) is not None
        )

    @property
    def strategies(self) -> tuple[Strategy, ...]:
        return tuple(dict.fromkeys(cell.strategy for cell in self.cells))

    def speed_up(self, cell: Cell) -> float | None:
        """Return how many times the samples/s of the smallest number of devices under the same strategy: both measured, or both predicted.

        None where the cell has no figures.
        """
        for kind in reversed(KINDS):
            known, own = self.of(cell.strategy, kind), cell.seen(kind)
            if own is not None and known[0][0].devices == self._smallest(cell.strategy):
                return own.samples_per_s / known[0][1].samples_per_s
        return None

    def _smallest(self, strategy: Strategy) -> int | None:
        return min((c.devices for c in self.cells if c.strategy == strategy and c.figures is not None), default=None)

    @property
    def alone(self) -> float | None:
        """Samples/s that the fastest of all devices is predicted to reach by itself."""
        return max(_known(cell.alone_samples_per_s for cell in self.cells), default=None)

    @property
    def ideal(self) -> tuple[tuple[int, float], ...]:
        """For each number of devices the samples/s of all of them together, if none ever waits."""
        found: dict[int, float] = {}
        for cell in self.cells:
            if cell.bound_samples_per_s:
                found[cell.devices] = max(cell.bound_samples_per_s, found.get(cell.devices, 0.0))
        return tuple(sorted(found.items()))


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]
