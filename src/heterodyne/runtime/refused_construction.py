"""Constructors that change the user's model, and take that back if they raise."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Concatenate, ParamSpec, Protocol, TypeVar

__all__ = ["undone_if_refused"]

P = ParamSpec("P")


class _Closing(Protocol):
    _closing: ExitStack


C = TypeVar("C", bound=_Closing)


def undone_if_refused(init: Callable[Concatenate[C, P], None]) -> Callable[Concatenate[C, P], None]:
    """Give a constructor the stack ``self._closing``, and close it if the constructor raises.

    The constructor adds to it how each of its changes is undone. Afterwards the object closes it itself.
    """

    @functools.wraps(init)
    def guarded(self: C, /, *args: P.args, **kwargs: P.kwargs) -> None:
        with ExitStack() as made:
            self._closing = made
            init(self, *args, **kwargs)
            self._closing = made.pop_all()

    return guarded
