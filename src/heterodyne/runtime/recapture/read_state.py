"""What forward and loss read beside the batch and the values of weights: numbers, tensors, functions, modes, hooks.

A graph holds these as they were when it was captured, and so does what is known of the loss. `ReadState` finds them once, and tells
before each step whether one is another now: by identity, and tensors by their version counter, in a few list comparisons.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import is_
from types import FunctionType

from torch import nn

from heterodyne.around_model import HOOKS
from heterodyne.code_read import CodeRead, is_users
from heterodyne.runtime.recapture.values_read import are_equal
from heterodyne.runtime.recapture.walk import CALLED, Walk, quoted

__all__ = ["Change", "ReadState", "State"]


@dataclass(frozen=True, kw_only=True)
class Change:
    """``before``, ``after``: in words, None where there was nothing, or is nothing any more."""

    name: str
    before: str | None
    after: str | None

    def __str__(self) -> str:
        if self.before is None:
            return f"{self.name} is new ({self.after})"
        return f"{self.name} was {self.before} and is {'gone' if self.after is None else self.after}"


@dataclass(frozen=True, eq=False)
class State:
    """What was read at one moment, by name. ``modes``: those of torch's own modules, which a graph follows by itself in evaluation."""

    values: Mapping[str, object]
    modes: Mapping[str, bool]

    def also(self, values: Mapping[str, object]) -> State:
        """Return the same with other values that were read, too."""
        return State({**self.values, **values}, self.modes) if values else self

    def changes(self, later: State, *, modes: bool = True) -> list[Change]:
        """Return what is another in ``later``; without ``modes`` those of torch's own modules may be others."""
        before, after = dict(self.values), dict(later.values)
        if modes:
            before |= self.modes
            after |= later.modes
        both = before.keys() & after.keys()
        others = [name for name in before if name in both and not are_equal(before[name], after[name])]
        new, gone = ([name for name in of if name not in both] for of in (after, before))
        return [  # what is gone comes last: with a function that is replaced, all that it has read
            Change(name=name, before=_words(before, name), after=_words(after, name)) for name in (*others, *new, *gone)
        ]

    def numbers_changed(self, later: State) -> list[str]:
        """Return the attributes of modules, with the path of these, that are numbers in both and others in ``later``."""
        pairs = ((name, value, later.values.get(name)) for name, value in self.values.items() if name[-1:] == "'")
        return [name[1:-1] for name, value, now in pairs if _is_number(value) and _is_number(now) and value != now]

    def numbers(self, names: Iterable[str]) -> dict[str, int | float]:
        """Return the numbers of these attributes, as far as they are numbers."""
        values = ((name, self.values.get(quoted(name))) for name in names)
        return {name: value for name, value in values if isinstance(value, int | float)}


class ReadState:
    """Of a model with its loss. Names are those in the code that the forward may reach, see `CodeRead`.

    Where forward itself ``runs``, what it assigns does not belong to it if it is a tensor, a function, or private, or was seen to change
    in a forward (`leave`): such a name keeps what a forward has made. Where a graph runs instead, only the script assigns. Values of
    parameters and buffers do not belong to it: they are read as they are. Whether they require gradients does.
    """

    def __init__(self, module: nn.Module, *, runs: bool = True) -> None:
        self._module = module
        self._runs = runs
        self._structure: list[object] = []
        self._called: list[object] | None = None
        self._of_forward: set[str] = set()
        self._renewed = [renew for part in module.modules() if callable(renew := getattr(part, "renew", None))]
        self.take()

    def leave(self) -> None:
        """A step has ended: what is another now is no doing of the script, and what a forward changes is its own affair from here on."""
        if not self.is_same():
            before, now = self.state, self.take()
            if self._runs:
                self._of_forward |= {change.name for change in before.changes(now)}
                self.take()

    def take(self) -> State:
        """Return what there is now, from which `is_same` then tells changes."""
        structure, called = self._structure_now(), self._called
        if not _are_same(structure, self._structure):
            self._structure, called = structure, None
            self._code = CodeRead.of(self._module)
        self._walk = self._walked()
        if called is not None and not _are_same(
            called, self._walk.called
        ):  # a function that has joined reads other names
            self._code = CodeRead.of(self._module)
            self._walk = self._walked()
        self._called = self._walk.called
        values = {name: value for name, value in self._walk.values.items() if name not in self._of_forward}
        self.state = State(values, self._walk.modes)
        self.parameters = dict(self._module.named_parameters())
        return self.state

    def _walked(self) -> Walk:
        walk = Walk(self._code, self._of_forward, runs=self._runs)
        walk.all_of(self._module)
        return walk

    def is_same(self) -> bool:
        """Return whether nothing has changed since `take`, as far as identities and versions tell."""
        for renew in self._renewed:
            renew()
        return self._walk.is_same()

    def _structure_now(self) -> list[object]:
        """The modules, and the functions that hang on them: with these the code that is read may be another."""
        found: list[object] = []
        for function in self._code.functions if self._structure else ():
            found += [function, function.__code__]
        for kind in dict.fromkeys(map(type, self._module.modules())):
            for base in filter(is_users, kind.__mro__):
                found += [value for value in vars(base).values() if isinstance(value, FunctionType | property)]
        for part in self._module.modules():
            found += [part, type(part)]
            found += [value for value in vars(part).values() if isinstance(value, (*CALLED, partial))]
            for key in HOOKS:
                found += vars(part)[key].values() if vars(part).get(key) else ()
        return found


def _are_same(objects: Sequence[object], others: Sequence[object]) -> bool:
    return len(objects) == len(others) and all(map(is_, objects, others))


def _is_number(value: object) -> bool:
    return type(value) in (int, float)


def _words(values: Mapping[str, object], name: str) -> str | None:
    return repr(values[name]) if name in values else None
