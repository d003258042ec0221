"""Why a model could not be traced, in words, with the line of the model."""

from __future__ import annotations

import linecache
import re
import traceback
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, fx, nn

import heterodyne
from heterodyne.errors import CaptureError, NoGraphError
from heterodyne.frontend.sizes import size_of

__all__ = [
    "explain",
    "fails_for",
    "files_of",
    "is_foreign",
    "is_of_one_size",
    "line_now",
    "line_of",
    "refuse_transforms",
    "refuse_unknown_sizes",
    "user_line",
]

_FOREIGN = (str(Path(torch.__file__).parent), str(Path(heterodyne.__file__).parent))

_FRAME = re.compile(r'File "([^"]+)", line (\d+)')

_DATA_DEPENDENT = (
    "it needs the value of a tensor, and a trace has none: an `if` or `while` on a tensor, .item(), .tolist(), int() or float() of one. "
    "Use torch.where for the choice, keep numbers as tensors, or compute them when the model is built."
)
_CAUSAL = (
    "torch.nn compares the mask with a causal one, and a trace has no values. Say whether it is causal: pass is_causal=True or False to "
    "nn.TransformerEncoder (mask_is_causal to nn.TransformerDecoder's memory), src_is_causal and tgt_is_causal to nn.Transformer."
)
# What torch's own code reads out of a tensor, by its function.
_OF_TORCH = {
    "ctc_loss": (
        "torch's ctc_loss reads the lengths of its sequences, and a trace has no values. No plan cuts a model with it; data "
        "parallelism runs the module as it is."
    ),
    "_BatchNorm.forward": (
        "BatchNorm with momentum=None averages over the batches so far, and reads their number out of a tensor. Give it a momentum, as "
        "momentum=0.1."
    ),
}
_NUMPY = "it leaves PyTorch for numpy. Use the torch function of the same purpose."
_TRANSFORM = "it calls a transform of torch.func (vmap), and no graph of ops holds that. Write the mapped function for all rows at once."
_BATCH = (
    "it holds for one batch size alone. Take sizes from x.shape inside forward, never from a number that was fixed before, "
    "and do not compare the batch size with anything."
)


def explain(error: BaseException, model: nn.Module, line: str | None = None) -> CaptureError:
    """Return what went wrong, where (``line``, if the error itself does not tell), and what to change.

    It is a NoGraphError but where the model cannot be called at all.
    """
    text = _first_lines(str(error)) or type(error).__name__
    where = user_line(error) or line
    if not where and isinstance(error, TypeError) and "forward() " in text:
        return CaptureError(
            f"{type(model).__name__} cannot be called with these inputs: {text}. It gets all tensors of a batch; those that only a loss "
            "outside of the model reads go to that, where it is passed: hd.distribute(model, batch, loss=...)"
        )
    reason = _reason(error)
    place = f"{where}\n" if where else ""
    return NoGraphError(
        f"{type(model).__name__} cannot be captured.\n{place}{reason}\n(torch.export: {type(error).__name__}: {text})",
        reason=_in_one_line(where, reason),
    )


def fails_for(samples: int, error: BaseException, line: str, what: str = "forward") -> CaptureError:
    """Return what to say of an op, or of all of forward, that fails for a number of samples. ``line``: with path and text; "": unknown."""
    place = f"{line}\n" if line else ""
    said = str(error).strip().partition("\n")[0]
    return CaptureError(
        f"{place}{what} fails for a batch of {samples} samples ({said}). Each device has some of the samples, so a model must "
        "take any number of them: take sizes from x.shape, and let no op ask for a number of samples."
    )


def refuse_unknown_sizes(graph: fx.Graph) -> None:
    """Raise CaptureError if a number or a size in the graph is read out of a tensor, or is not a polynomial in the batch."""
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if node.target is torch.ops.aten.item.default:
            raise _without_graph(node, _DATA_DEPENDENT)
        for size in _symbolic_sizes(node):
            try:
                size_of(size)
            except CaptureError as error:
                raise _without_graph(node, str(error)) from error


def refuse_transforms(graph: fx.Graph) -> None:
    """Raise CaptureError if part of the graph runs inside of a transform of torch.func, such as a vmap over the samples."""
    for node in graph.nodes:
        if node.op == "call_function" and getattr(node.target, "__module__", "").startswith("torch._functorch"):
            raise _without_graph(node, _TRANSFORM)


def _without_graph(node: fx.Node, reason: str) -> NoGraphError:
    line = line_of(node, full=True)
    return NoGraphError(f"The model cannot be captured.\n{line}\n{reason}", reason=_in_one_line(line, reason))


def _in_one_line(line: str | None, reason: str) -> str:
    """The line and the first sentence of the reason."""
    first = reason.partition(". ")[0].rstrip(".")
    return f"{line} ({first})" if line else first


def line_of(node: fx.Node, *, full: bool = False) -> str:
    """``file.py:12``, the deepest line that is the model's own; ``full``: with the path and the text. "" if it is not known."""
    named = _FRAME.findall(node.meta.get("stack_trace") or "")
    own = [(filename, int(number)) for filename, number in named if not is_foreign(filename)]
    if not own:
        return ""
    filename, number = own[-1]
    if full:
        return f"{filename}:{number}: {linecache.getline(filename, number).strip()}"
    return f"{Path(filename).name}:{number}"


def files_of(node: fx.Node) -> frozenset[str]:
    """The files that the call of a node came through, torch's and Heterodyne's left out."""
    named = _FRAME.findall(node.meta.get("stack_trace") or "")
    return frozenset(filename for filename, _ in named if not is_foreign(filename))


def line_now(*, installed: bool = False) -> str:
    """The deepest line of the model among those that run at this moment, with path and text; "" if there is none.

    ``installed``: a line of an installed package may be the model's.
    """
    own = [f for f in traceback.extract_stack() if not is_foreign(f.filename)]
    own = [f for f in own if installed or "site-packages" not in f.filename]
    return f"{own[-1].filename}:{own[-1].lineno}: {own[-1].line}" if own else ""


def _symbolic_sizes(node: fx.Node) -> Iterator[int | torch.SymInt]:
    value = node.meta.get("val")
    for tensor in value if isinstance(value, tuple | list) else [value]:
        if isinstance(tensor, Tensor):
            yield from (size for size in tensor.shape if not isinstance(size, int))


def is_foreign(filename: str) -> bool:
    """Return whether a file belongs to torch or to Heterodyne rather than to a model."""
    return filename.startswith(_FOREIGN) or filename.startswith("<")


def _reason(error: BaseException) -> str:
    kind, text = type(error).__name__, str(error)
    if any(frame.name == "_detect_is_causal_mask" for frame in traceback.extract_tb(error.__traceback__)):
        return _CAUSAL
    frames = traceback.walk_tb(error.__traceback__)
    called = [frame.f_code for frame, _ in frames if is_foreign(frame.f_code.co_filename)]
    if told := next((_OF_TORCH[code.co_qualname] for code in called if code.co_qualname in _OF_TORCH), ""):
        return told
    if (
        "DataDependent" in kind
        or "GuardOnDataDependent" in text
        or "data-dependent" in text
        or "DynamicOutputShape" in kind
    ):
        return _DATA_DEPENDENT
    if "numpy" in text.lower():
        return _NUMPY
    if isinstance(error, AssertionError | ValueError) and _raised_by_model(error):
        return "the model raised this itself, on a made-up batch of another size than the example. A model must take any number of samples."
    if is_of_one_size(error):
        return _BATCH
    return "the model fails when it runs on tensors without data, or does something that torch.export does not know."


def is_of_one_size(error: BaseException) -> bool:
    """Return whether a trace failed because it holds for one batch size alone."""
    text = str(error)
    return "Constraints violated" in text or "specialized" in text or "ConstraintViolation" in type(error).__name__


def user_line(error: BaseException) -> str:
    """The deepest line that is the model's own, with its text."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not is_foreign(f.filename)]
    if frames:
        return f"{frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line}"
    return ""


def _raised_by_model(error: BaseException) -> bool:
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and not is_foreign(frames[-1].filename)


def _first_lines(text: str, count: int = 3, width: int = 400) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " ".join(lines[:count])[:width]
