"""Code of torch run as plain Python, where modes must see its calls: what is compiled (``torch.compile``), and functions of torch.nn that
hand a call over to a mode as a whole.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import FunctionType
from typing import Any, Final

import torch

__all__ = ["run_eager", "without_overrides"]

_CHECKS: Final = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


def run_eager() -> AbstractContextManager[Any]:
    """While active, nothing that is compiled runs compiled, nor is compiled. Dynamo would leave code that it finds under a dispatch mode
    uncompiled for good.
    """
    if "torch._dynamo" not in sys.modules:
        return nullcontext()  # nothing is compiled, and asking would load it
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance


def without_overrides(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the same Python code without its question whether something overrides it: a mode has answered that."""
    assert isinstance(function, FunctionType)
    copy = FunctionType(
        function.__code__,
        {**function.__globals__, **dict.fromkeys(_CHECKS, _never)},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _never(*_: object) -> bool:
    return False
