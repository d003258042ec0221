"""A look-up that PyTorch refuses while the model runs, told in the words of the one who has to mend it: the step, the module, the line.

What a graph says of inputs is looked at before (`values_in_range`). A model without a graph, or one that computes what it looks up by,
shows it here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import torch
from torch import nn

import heterodyne
from heterodyne.errors import DataError

__all__ = ["told_with_place"]

_WORDS = ("out of bounds", "out of range", "num_classes")
_FOREIGN = (str(Path(torch.__file__).parent), str(Path(heterodyne.__file__).parent), "<")


@contextmanager
def told_with_place(module: nn.Module, where: str) -> Iterator[None]:
    """Around what runs a model, ``where`` being the step. Raises DataError for an IndexError of PyTorch, or the like."""
    try:
        yield
    except (IndexError, RuntimeError) as error:
        if not any(word in str(error) for word in _WORDS):
            raise
        part, line = _place(error, module)
        of_part = f", in {part}" if part else ""
        said = str(error).strip().partition("\n")[0].rstrip(".")
        at = f"\n{line}" if line else ""
        raise DataError(
            f"{where}{of_part}: {type(error).__name__}: {said}. A token is none of the embedding's rows, a label none of the classes, "
            f"or an index is beyond what it chooses from: correct the data, or the sizes of the model{at}"
        ) from error


def _place(error: BaseException, module: nn.Module) -> tuple[str, str]:
    """The innermost part of the model that ran, by its name, and the deepest line that is the user's; "" where there is none."""
    names = {id(part): name or type(module).__name__ for name, part in module.named_modules()}
    part = line = ""
    trace = error.__traceback__
    while trace is not None:
        frame: FrameType = trace.tb_frame
        part = names.get(id(frame.f_locals.get("self")), part)
        if not frame.f_code.co_filename.startswith(_FOREIGN):
            line = f"{frame.f_code.co_filename}:{trace.tb_lineno}"
        trace = trace.tb_next
    return part, line
