"""Code that is compiled (``torch.compile``), run as the Python that it was made of: where modes must see its calls."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

__all__ = ["run_eager"]


def run_eager() -> AbstractContextManager[Any]:
    """While active, nothing that is compiled runs compiled, nor is compiled. Dynamo would leave code that it meets under a dispatch mode
    uncompiled for good.
    """
    if "torch._dynamo" not in sys.modules:
        return nullcontext()  # nothing is compiled, and asking would load it
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance
