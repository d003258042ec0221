"""Whether a life was that of plain PyTorch, was refused by name, or neither."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from life.draw import ALONE, SUBJECTS, Life
from life.script import SCRIPT, Line, Record, number_of

__all__ = ["FAILURES", "Outcome", "outcome_of"]

BAR = 1e-5
ROUNDING = 4.0
"""Where plain PyTorch itself is further off in fp32, so many times what it is off is exact as well."""
NOTHING = 1e-5
"""A tensor whose norm is below this part of all together is zero up to rounding: its error is one of all together."""
READING = ("evaluate", "validate", "predict", "state kept")
"""Kinds that change nothing."""
LOST_ANOTHER = ("Connection closed by peer", "Connection reset by peer", "broke off")
"""Words of what a rank says that another one has left."""
FAILURES = ("wrong", "nameless", "traceback", "hung", "void")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a life.

    ``what``: followed, refused, or one of `FAILURES`: wrong (silently other values), nameless (refused without what changed, or one rank
    alone), traceback (an exception that is no HeterodyneError), hung, void (plain PyTorch cannot run it: a fault of the life).
    ``step``: before or in which it ended. ``blamed``: the kinds of change since the last step that was right.
    ``passed``: how many changes of each kind were followed before that.
    """

    what: str
    step: int = 0
    told: str = ""
    blamed: tuple[str, ...] = ()
    passed: Counter[str] = field(default_factory=Counter)


def outcome_of(
    life: Life,
    plain: Sequence[Record],
    exact: Sequence[Record],
    ours: Sequence[Sequence[Record]],
    *,
    lost: str = "",
    hung: bool = False,
) -> Outcome:
    """``ours``: of each part that has run, the records of its ranks; ``lost``, ``hung``: how the part behind them ended."""
    course = _Course(life)
    for number, (_, lines) in enumerate(life.parts):
        if plain[number].crashed or plain[number].refused:
            return course.ended("void", plain[number].crashed or plain[number].refused)
        if number >= len(ours):
            for line in lines if not number else lines[:1]:
                course.comes_to(line)
            return course.ended("hung" if hung else "traceback", lost, course.kinds())
        records = ours[number]
        for place, line in enumerate(lines):
            course.comes_to(line)
            values = [record.values[place] if place < len(record.values) else None for record in records]
            for rank, value in enumerate(values):
                error = (
                    0.0 if value is None else _apart(value, plain[number].values[place], exact[number].values[place])
                )
                if error > BAR:
                    return course.ended("wrong", f"rank {rank}: {_what(line)} {error:.1e} off{_later(records)}")
            if any(value is None for value in values):
                return _stopped(course, number, records)
            if not line.line:
                course.has_been_right()
        if not all(record.end for record in records):
            return _stopped(course, number, records)
        error, where = _worst(records, plain[number], exact[number])
        if error > BAR:
            return course.ended("wrong", f"{where} {error:.1e} off at the end")
        course.has_been_right()
    course.has_been_right()
    if any(line.rank is not None for line in course.lines):
        return course.ended("wrong", "not noticed", (ALONE,))
    return course.ended("followed", "")


class _Course:
    """How far a life was right, and what may be at fault for what follows.

    What changes the result of a step shows in its loss; what changes only its update shows in the next one's, or later if it is small.
    """

    def __init__(self, life: Life) -> None:
        self.life = life
        self.lines: list[Line] = []
        self._since: list[Line] = []
        self._last: list[Line] = []
        self._passed: Counter[str] = Counter()

    def comes_to(self, line: Line) -> None:
        self.lines.append(line)
        self._since.append(line)

    def has_been_right(self) -> None:
        self._passed.update(line.kind for line in self._last if line.kind != "step")
        self._last, self._since = self._since, []

    def kinds(self) -> tuple[str, ...]:
        """Of all changes so far."""
        return tuple(dict.fromkeys(line.kind for line in self.lines if line.kind != "step"))

    def ended(self, what: str, told: str, blamed: tuple[str, ...] = ()) -> Outcome:
        """``blamed``: the changes at fault; (): the latest ones, of which those that only read come last."""
        if not blamed and what != "followed":
            # A line that is no step has itself given or met what is wrong.
            own = self.lines[-1:] if self.lines and self.lines[-1].line else []
            changes = [line for line in reversed(self.lines) if line.kind not in ("step", *READING)]
            latest = [[line for line in changes if line in lines] for lines in (self._since, self._last)]
            blamed = tuple(dict.fromkeys(line.kind for line in next(filter(None, (own, *latest, changes[:1])), ())))
        step = self.lines[-1].step if self.lines else 0
        return Outcome(what=what, step=step, told=told, blamed=blamed or ("nothing",), passed=self._passed)


def _stopped(course: _Course, part: int, records: Sequence[Record]) -> Outcome:
    """A rank has not come past this line, and what there was before was right."""
    refused, crashed = [record.refused for record in records], [record.crashed for record in records]
    # Ranks that lost one of the others say so; what that one says comes first.
    causes = sorted(filter(None, (*refused, *crashed)), key=lambda text: any(words in text for words in LOST_ANOTHER))
    if not any(refused) or any(text in crashed for text in causes if not any(words in text for words in LOST_ANOTHER)):
        return course.ended("traceback", causes[0] if causes else "")
    told = causes[0]
    own = [
        record for record in records if record.refused and not any(words in record.refused for words in LOST_ANOTHER)
    ]
    if not own or not all(refused) or len({len(record.values) for record in own}) > 1:
        return course.ended("nameless", " | ".join((f"refused on some ranks alone: {told}", *causes[1:2])))
    # Nothing was wrong so far: it may be any change that it names.
    changes = [line for line in reversed(course.lines) if line.kind != "step"]
    named = [line for line in changes if all(_names(course.life, line, part, record.refused) for record in own)]
    return course.ended("refused", told, (named[0].kind,)) if named else course.ended("nameless", told)


def _names(life: Life, change: Line, part: int, told: str) -> bool:
    """Whether a refusal names this change: what was changed, or the line that did."""
    lines = life.parts[part][1]
    if change.line and change in lines:
        first = number_of(lines.index(change))
        if any(f"{SCRIPT}:{first + n}:" in told for n, _ in enumerate(change.line.splitlines())):
            return True
    names = (*change.names, "'training' was True and is False") if change.kind in READING else change.names
    if "*" in names:
        names += tuple(name for name, _ in SUBJECTS[life.subject].made()[0].named_parameters())
    return any(name in told for name in names if name != "*")


def _what(line: Line) -> str:
    return line.line.splitlines()[0] if line.line else f"loss of step {line.step}"


def _later(records: Sequence[Record]) -> str:
    refused = next((record.refused for record in records if record.refused), "")
    return f", and refused later: {refused}" if refused else ""


def _apart(found: Any, wanted: Any, exact: Any) -> float:
    """The largest error of what lines have noted: numbers, tensors, and lists of them."""
    if isinstance(wanted, list | tuple):
        if len(found) != len(wanted):
            return 1.0
        return max((_apart(f, w, e) for f, w, e in zip(found, wanted, exact, strict=True)), default=0.0)
    if not isinstance(wanted, Tensor):
        found, wanted, exact = (torch.as_tensor(value, dtype=torch.float64) for value in (found, wanted, exact))
    return _error(found, wanted, exact, 0.0)


def _worst(records: Sequence[Record], plain: Record, exact: Record) -> tuple[float, str]:
    worst, where = 0.0, ""
    for rank, record in enumerate(records):
        for part, found in record.end.items():
            of = part.split()[0]
            wanted, outside = plain.end[of], exact.end.get(of, plain.end[of])
            whole = sum(_norm(tensor) ** 2 for tensor in wanted.values()) ** 0.5
            # A state dict has no buffers that are not persistent, and optimizers keep states of weights that have left the model.
            names = {"model": found.keys() & wanted.keys(), "optimizer": wanted.keys()}.get(
                part, found.keys() | wanted.keys()
            )
            for name in sorted(names):
                error = _error(found.get(name), wanted.get(name), outside.get(name), whole)
                if not error <= worst:
                    worst, where = error, f"rank {rank}, {part}: {name}"
    return worst, where


def _error(found: Tensor | None, wanted: Tensor | None, exact: Tensor | None, whole: float) -> float:
    """Relative, by norms. What only one side has is all wrong, unless it is zero."""
    if found is None or wanted is None:
        alone = found if wanted is None else wanted
        return 0.0 if alone is None or _norm(alone) <= NOTHING * whole else 1.0
    if found.shape != wanted.shape:
        return 1.0
    rounding = 0.0 if exact is None else _norm(wanted.double() - exact.double())
    norm = _norm(wanted) + ROUNDING / BAR * rounding
    scale = norm if norm > NOTHING * whole else whole
    difference = _norm(found.double() - wanted.double())
    if not math.isfinite(difference):
        return 0.0 if torch.equal(found.isnan(), wanted.isnan()) and not _norm((found - wanted).nan_to_num()) else 1.0
    return difference / scale if scale else difference


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor.double()).item())
