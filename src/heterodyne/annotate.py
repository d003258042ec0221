"""What an author writes into forward to say how parts of a model are laid out on devices: `replicate` and `split`.

    hd.set_default_strategy(hd.replicate(8))         # for whatever is in no scope

    def forward(self, x):
        x = self.attention(x)                        # 8 devices share the samples ...
        with hd.split(8):
            x = self.experts(x)                      # ... and the experts

Each scope that is entered is one TaskGraph, and so is each default strategy; entered in a loop, a scope is several. A scope of one
kind may not stand in one of the same kind, nor ``replicate`` in ``split``. ``split`` in ``replicate`` takes its ops out of the outer one.

While a model is captured, the scopes mark its ops; anywhere else they look at how they are nested and do nothing more. Where
PyTorch compiles a forward, they do nothing at all.
"""

from __future__ import annotations

import contextlib
import itertools
import linecache
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple, TypedDict

import torch
from torch import nn
from torch.fx import traceback

from heterodyne.errors import CaptureError
from heterodyne.graph.task_graphs import Kind

__all__ = ["MARK", "Mark", "Strategy", "capturing", "replicate", "set_default_strategy", "split"]

MARK = "heterodyne"
"""Under which name an op's meta (its "custom" part) holds its `Mark`."""

_FOREIGN = (
    f"{Path(__file__).parent}{os.sep}",
    f"{Path(torch.__file__).parent}{os.sep}",
    contextlib.__file__,
)


class Mark(TypedDict):
    """What an op knows of its TaskGraph. ``entry`` tells one from another; ``inside`` is the entry of the one around it."""

    entry: int
    inside: int | None
    name: str
    kind: Kind
    device_count: int
    source: str
    default: bool
    section: int


class _Line(NamedTuple):
    """A line of the author's."""

    file: str
    number: int

    @property
    def short(self) -> str:
        return f"{Path(self.file).name}:{self.number}"

    @property
    def full(self) -> str:
        return f"{self.file}:{self.number}: {linecache.getline(self.file, self.number).strip()}"


class Strategy:
    """How a TaskGraph is laid out on devices; as a context manager, the TaskGraph of what it encloses. It can be entered again."""

    def __init__(self, kind: Kind, device_count: int, name: str | None) -> None:
        self.kind = kind
        self.device_count = device_count
        self.name = name or f"{kind}({device_count})"

    def __repr__(self) -> str:
        written = f"{self.kind}({self.device_count})"
        return written if self.name == written else f"{self.kind}({self.device_count}, {self.name!r})"

    def __enter__(self) -> None:
        if torch.compiler.is_dynamo_compiling():
            _refuse_to_lose_marks()
            return
        line = _authors_line()
        if _here.entered:
            _refuse_nesting(_here.entered[-1], self, line)
        mark: AbstractContextManager[None] | None = None
        if _here.trace is not None:
            mark = traceback.annotate({MARK: _here.trace.open(self, line)})
            mark.__enter__()
        _here.entered.append(_Entered(self, line, mark))

    def __exit__(self, *error: object) -> None:
        # Where PyTorch compiled the way in and not the way out, nothing was entered.
        if torch.compiler.is_dynamo_compiling() or not _here.entered or _here.entered[-1].strategy is not self:
            return
        mark = _here.entered.pop().mark
        if mark is not None:
            mark.__exit__(None, None, None)
        if _here.trace is not None:
            _here.trace.close()


class _Entered(NamedTuple):
    strategy: Strategy
    line: _Line
    mark: AbstractContextManager[None] | None


class _Thread(threading.local):
    """The scopes that a thread is in, the innermost last, and the capture that it runs."""

    def __init__(self) -> None:
        self.entered: list[_Entered] = []
        self.trace: _Trace | None = None


class _Trace:
    """The TaskGraphs of one capture, numbered as they are opened."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._open: list[int] = []
        self._default: int | None = None
        self._defaults = 0

    def open(self, scope: Strategy, line: _Line) -> Mark:
        """A scope begins."""
        mark = self._mark(scope, line, inside=self._open[-1] if self._open else self._default)
        self._open.append(mark["entry"])
        return mark

    def close(self) -> None:
        """The innermost scope ends."""
        self._open.pop()

    def set_default(self, strategy: Strategy | None, line: _Line) -> None:
        """From here on the ops outside of scopes are of a new TaskGraph, or of none."""
        custom = {key: value for key, value in traceback.current_meta.get("custom", {}).items() if key != MARK}
        self._default = None
        if strategy is not None:
            self._defaults += 1
            custom[MARK] = mark = self._mark(strategy, line, default=True)
            self._default = mark["entry"]
        # A new dict, so that `capturing` can put the old one back.
        traceback.current_meta["custom"] = custom

    def _mark(self, strategy: Strategy, line: _Line, *, inside: int | None = None, default: bool = False) -> Mark:
        return Mark(
            entry=next(self._numbers),
            inside=inside,
            name=strategy.name,
            kind=strategy.kind,
            device_count=strategy.device_count,
            source=line.short,
            default=default,
            section=max(0, self._defaults - 1),
        )


class _Process:
    """The default strategy of the captures that follow."""

    def __init__(self) -> None:
        self.default: tuple[Strategy, _Line] | None = None


_here = _Thread()
_process = _Process()


def replicate(device_count: int, name: str | None = None) -> Strategy:
    """A TaskGraph of which each of ``device_count`` devices has a copy, for its samples. Raises CaptureError."""
    return _strategy("replicate", device_count, name)


def split(device_count: int, name: str | None = None) -> Strategy:
    """A TaskGraph of which ``device_count`` devices have a part each. Raises CaptureError."""
    return _strategy("split", device_count, name)


def set_default_strategy(strategy: Strategy | None) -> None:
    """Set what holds for ops outside of scopes; None: nothing.

    Outside of a forward it is the default of all captures that follow, in this process, until it is set again. In a forward
    it holds for what follows in that forward and is forgotten with the capture: set again, it opens a new TaskGraph, which
    is a new stage of a pipeline. A forward that merely runs sets nothing (seen by ``nn.Module.__call__`` among the callers).

    Raises CaptureError in a scope, and for what is not `replicate` or `split`.
    """
    if torch.compiler.is_dynamo_compiling():
        _refuse_to_lose_marks()
        return
    line = _authors_line()
    if strategy is not None and not isinstance(strategy, Strategy):
        raise CaptureError(
            f"{line.full}\nthe default strategy is {strategy!r}; give heterodyne.replicate(count), heterodyne.split(count) or None"
        )
    if _here.entered:
        outer = _here.entered[-1]
        raise CaptureError(
            f"{line.full}\nthe default strategy is set to {strategy} inside the TaskGraph {outer.strategy.name!r} ({outer.line.short}), "
            "and holds for what is in no scope. Set it before that scope begins or after it ends"
        )
    if _here.trace is not None:
        _here.trace.set_default(strategy, line)
    elif not _in_forward():
        _process.default = None if strategy is None else (strategy, line)


@contextlib.contextmanager
def capturing() -> Iterator[None]:
    """Let scopes and default strategies mark the ops that are traced (under PyTorch's ``preserve_node_meta``), and leave no mark behind."""
    kept, custom = (_here.trace, _here.entered), traceback.current_meta.get("custom")
    _here.trace, _here.entered = _Trace(), []
    try:
        if _process.default is not None:
            _here.trace.set_default(*_process.default)
        yield
    finally:
        _here.trace, _here.entered = kept
        if custom is None:
            traceback.current_meta.pop("custom", None)
        else:
            traceback.current_meta["custom"] = custom


def _strategy(kind: Kind, device_count: int, name: str | None) -> Strategy:
    called = kind if name is None else f"TaskGraph {name!r}: {kind}"
    if not isinstance(device_count, int) or isinstance(device_count, bool) or device_count < 1:
        raise CaptureError(
            f"{_authors_line().full}\n{called} takes the number of its devices, a whole number from 1 on, not {device_count!r}"
        )
    if name is not None and (not isinstance(name, str) or not name or name == "*" or "#" in name):
        raise CaptureError(
            f"{_authors_line().full}\nthe name of a TaskGraph is a text without '#' (which numbers those of one name) and not '*' "
            f"(which is whatever has no TaskGraph), not {name!r}"
        )
    return Strategy(kind, device_count, name)


def _refuse_nesting(outer: _Entered, inner: Strategy, line: _Line) -> None:
    around, named = outer.strategy, f"the TaskGraph {outer.strategy.name!r} ({outer.line.short})"
    if around.kind == inner.kind:
        raise CaptureError(
            f"{line.full}\nthe TaskGraph {inner.name!r} begins inside {named}, and both are '{inner.kind}'. An op belongs to one "
            "TaskGraph: leave one of the scopes out, or end the outer one first"
        )
    if around.kind == "split":
        raise CaptureError(
            f"{line.full}\nthe TaskGraph {inner.name!r} begins inside {named}, which is 'split', and what is split has no copies within. "
            "Put replicate around split, or end the outer scope first"
        )


def _refuse_to_lose_marks() -> None:
    """The strict trace of torch.export compiles forward, and marks would be lost without a word."""
    if _here.trace is not None:
        raise CaptureError(
            "TaskGraphs inside of a forward that torch.compile traces (torch.export's strict trace does) would be lost: export with "
            "strict=False, or mark the code around what is compiled"
        )


def _authors_line() -> _Line:
    """The innermost line that is neither ours nor PyTorch's."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_FOREIGN):
        frame = frame.f_back
    return _Line(frame.f_code.co_filename, frame.f_lineno)


def _in_forward() -> bool:
    frame = sys._getframe(1).f_back
    while frame is not None and frame.f_code is not nn.Module._call_impl.__code__:
        frame = frame.f_back
    return frame is not None
