"""The one table of what may be passed to a public function, by the name of the argument.

An argument of one name means the same wherever it stands, so a function says with `checked_arguments` that it is public, and is called
with what it can take. Classes are known by their names, so that nothing is imported to look at an argument.
"""

from __future__ import annotations

import ast
import functools
import inspect
import math
import operator
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from difflib import get_close_matches
from typing import Any, Final, Literal, ParamSpec, TypeAlias, TypeVar, get_args, get_origin

from heterodyne.errors import HeterodyneError

__all__ = ["checked_arguments", "checked_options", "described"]

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
Check: TypeAlias = Callable[[Any], str | None]
"""What is wrong with a value, as the rest of a sentence that begins with it; None if nothing is."""

_MOST: Final = 2**31 - 1
_SHOWN: Final = 100
_LOSS_OPTIONS: Final = "heterodyne.api.options.LossOptions"


def checked_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Call the function only with arguments that are in the table; a choice is read off its annotation.

    Raises HeterodyneError with all that is wrong, by name; TypeError, as Python does, for a call that does not fit the signature.
    """
    signature = inspect.signature(function)
    called = function.__qualname__.removesuffix(".__init__")

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            taken = [name for name in signature.parameters if name not in ("self", "cls")]
            near = get_close_matches(str(error).rpartition(" ")[2].strip("'"), taken, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise TypeError(f"{called}() {error}{hint or '.'} It takes {', '.join(taken)}") from None
        wrong = [fault for name, value in given.items() for fault in _faults(function, signature, name, value)]
        if wrong:
            raise HeterodyneError("\n  ".join([f"{called} cannot take these arguments:", *wrong]))
        return function(*args, **kwargs)

    return call


def checked_options(kind: type[T]) -> type[T]:
    """Make objects of a class only of arguments that are in the table; see `checked_arguments`."""
    kind.__init__ = checked_arguments(kind.__init__)  # type: ignore[method-assign]  # its own, with the same signature
    return kind


def described(value: object) -> str:
    """A value for people, who may have passed anything."""
    if not isinstance(value, int | float | str | bytes | tuple | list | None):
        return f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"
    try:
        shown = repr(value)
    except ValueError:  # of a number that has more digits than Python writes
        return f"a number of {int(value).bit_length():,} bits"  # type: ignore[arg-type]  # nothing else raises that
    return shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}..."


def _faults(function: Callable[..., Any], signature: inspect.Signature, name: str, value: Any) -> Iterator[str]:
    annotation = signature.parameters[name].annotation
    choices = _choices(function, annotation)
    if value is None and "None" in str(annotation):
        return
    if choices and name not in _TABLE:
        if not (isinstance(value, str) and value in choices):
            yield f"{name} is {described(value)}, not one of {', '.join(choices)}"
    elif (check := _TABLE.get(name)) is not None and (fault := check(value)) is not None:
        yield f"{name} is {described(value)}{fault}{', or None' if 'None' in str(annotation) else ''}"


def _choices(function: Callable[..., Any], annotation: Any) -> tuple[str, ...]:
    """Return the choices of an annotation that is ``Literal[...]``, or the name of one."""
    if isinstance(annotation, str):
        if written := re.fullmatch(r"Literal(\[[^\]]*\])(?: \| None)?", annotation):
            return tuple(ast.literal_eval(written[1]))
        annotation = getattr(inspect.unwrap(function), "__globals__", {}).get(annotation)
    return get_args(annotation) if get_origin(annotation) is Literal else ()


# ---- kinds of values ----------------------------------------------------------------------------------------------


def _is_a(value: object, *names: str) -> bool:
    """Return whether its class, or one that it is derived from, has one of these names: ``module.Class``."""
    return any(f"{of.__module__}.{of.__qualname__}" in names for of in type(value).__mro__)


def _unless(test: Callable[[Any], bool], words: str) -> Check:
    return lambda value: None if test(value) else f"; it is {words}"


def _a(words: str, *names: str) -> Check:
    return _unless(lambda value: _is_a(value, *names), words)


def _whole(least: int, most: int = _MOST, words: str = "a whole number") -> Check:
    bounds = f"{words} from {least} on" if most == _MOST else f"{words} from {least} to {most:,}"
    return _unless(lambda value: _is_whole(value) and least <= value <= most, bounds)


def _number(words: str, most: float = math.inf) -> Check:
    return _unless(
        lambda value: _is_number(value) and 0 <= value <= min(most, 1e300), f"{words}: finite, and not negative"
    )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _or_auto(check: Check) -> Check:
    return lambda value: None if isinstance(value, str) and value == "auto" else check(value)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_path(value: object) -> bool:
    try:
        return isinstance(value, str | os.PathLike) and "\0" not in (text := os.fspath(value)) and bool(text)
    except TypeError:  # of bytes
        return False


def _texts(value: object) -> str | None:
    if isinstance(value, str):
        return f", a text; write a tuple, ({value!r},)"
    if isinstance(value, tuple | list | set | frozenset) and all(isinstance(each, str) for each in value):
        return None
    return "; it is a tuple of names"


def _optimizer(value: Any) -> str | None:
    if _is_a(value, "torch.optim.lr_scheduler.LRScheduler"):
        return ", a scheduler of the rate; pass its optimizer, and step the scheduler on every rank"
    if isinstance(value, type):
        known = any(f"{of.__module__}.{of.__qualname__}" == "torch.optim.optimizer.Optimizer" for of in value.__mro__)
        return None if known else ", which is none of torch.optim"
    made = _is_a(value, "torch.optim.optimizer.Optimizer") or _is_a(value, "heterodyne.job.OptimizerSection")
    if made or (callable(value) and not _is_a(value, "torch.nn.modules.module.Module")):
        return None
    return "; it is an optimizer of torch.optim, a function that makes one from parameters, or an OptimizerSection(name='adamw', lr=...)"


def _loss(value: Any) -> str | None:
    if _is_a(value, _LOSS_OPTIONS):
        return None
    if isinstance(value, type):
        return f"; make one of it: loss={value.__name__}()"
    return None if callable(value) else "; it is a function of the model's output and the target (or the batch)"


def _precision(value: Any) -> str | None:
    choices = ("fp32", "bf16", "fp16", "auto")
    if isinstance(value, str) and value in choices:
        return None
    known = {"torch.float32": "fp32", "torch.bfloat16": "bf16", "torch.float16": "fp16"}.get(str(value)[:_SHOWN])
    return f", not {' or '.join(map(repr, choices))}" + (f": write {known!r}" if known else "")


def _micro_batch_sizes(value: Any) -> str | None:
    many = isinstance(value, tuple | list) and 0 < len(value) <= 64
    if (
        value == "auto"
        if isinstance(value, str)
        else many and all(_is_whole(each) and 1 <= each <= _MOST for each in value)
    ):
        return None
    return "; it is a tuple of whole numbers from 1 on, such as (1, 2, 4, 8), or 'auto'"


def _callbacks(value: Any) -> str | None:
    if not isinstance(value, tuple | list):
        return "; it is a list of callbacks"
    called = ("on_step_end", "on_evaluate", "on_save")
    for each in value:
        if isinstance(each, type) or not all(callable(getattr(each, name, None)) for name in called):
            made = (
                f"; make one of it: {each.__name__}()"
                if isinstance(each, type)
                else ", which is none: derive it from hd.Callback"
            )
            return f"; in it is {described(each)}{made}"
    return None


def _metrics(value: Any) -> str | None:
    words = "it is a function (outputs, batch) -> (sum, count), or a metric of torchmetrics"
    if not isinstance(value, Mapping):
        return f"; it is a mapping from names: of each {words}"
    for name, metric in value.items():
        kept = metric[0] if isinstance(metric, tuple) and len(metric) == 2 and callable(metric[1]) else metric
        keeps = all(callable(getattr(kept, of, None)) for of in ("update", "compute", "reset"))
        if isinstance(name, str) and keeps and not isinstance(kept, type):
            continue
        if not isinstance(name, str) or not callable(metric) or isinstance(metric, type):
            return f"; {name!r} in it is {described(metric)}: {words}"
        try:
            inspect.signature(metric).bind(None, None)
        except TypeError as error:
            return f"; {name!r} in it: {words}, and takes others ({error})"
        except ValueError:  # functions written in C tell nothing of their arguments
            continue
    return None


def _lengths(value: Any) -> str | None:
    words = "; it is a sequence of whole numbers, the tokens of each sample"
    if isinstance(value, str | bytes | Mapping) or not (hasattr(value, "__len__") and hasattr(value, "__getitem__")):
        return words
    try:
        return None if all(operator.index(value[at]) >= 0 for at in range(len(value))) else words
    except TypeError:
        return words


def _names_to(words: str) -> Check:
    return _unless(lambda value: isinstance(value, Mapping) and all(isinstance(key, str) for key in value), words)


def _loss_count(value: Any) -> str | None:
    if callable(value) and not isinstance(value, type):
        return None
    return (
        None
        if isinstance(value, str) and value in ("samples", "sum")
        else "; it is 'samples', 'sum', or a function of a batch that counts"
    )


_FLAG: Final = _unless(lambda value: isinstance(value, bool), "True or False")
_PATH: Final = _unless(_is_path, "the path of a file or directory")
_MODULE: Final = _a("an nn.Module", "torch.nn.modules.module.Module")
_LENGTH: Final = _whole(1)
_CALLED: Final = _unless(callable, "a function")
_STATE: Final = _names_to("a mapping, as state_dict() returns it")

_TABLE: Final[Mapping[str, Check]] = {
    "balance": _FLAG,
    "batches": _unless(
        lambda value: isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping) and not _is_a(value, "torch.Tensor"),
        "an iterable of batches, such as a list or a DataLoader",
    ),
    "callbacks": _callbacks,
    "check_s": _number("seconds, or 0 for no check"),
    "cluster": _a("a Cluster", "heterodyne.cluster.spec.Cluster"),
    "clip_grad_norm": _number("the largest norm of the gradient, or 0 for no clipping"),
    "cluster_file": _PATH,
    "collate": _CALLED,
    "compile": _FLAG,
    "config": _names_to("a mapping from names to values"),
    "decay": _number("a number from 0 to 1", 1.0),
    "deterministic": _FLAG,
    "directory": _PATH,
    "dir": _PATH,
    "done": _whole(0),
    "epochs": _LENGTH,
    "extra": _names_to("a mapping from names to what shall be kept"),
    "flush_s": _number("seconds"),
    "global_batch_size": _LENGTH,
    "function": lambda value: ", which is for loss=; here it is a function" if _is_a(value, _LOSS_OPTIONS) else _loss(value),
    "graph": _a("a ModelGraph, as capture returns it", "heterodyne.graph.ir.ModelGraph"),
    "keep": _whole(1),
    "lengths": _lengths,
    "limit_s": _number("seconds"),
    "loss": _loss,
    "loss_count": _loss_count,
    "measure_s": _or_auto(_unless(lambda value: _is_number(value) and 0 < value <= 1e300, "seconds, more than 0, or 'auto'")),
    "metrics": _metrics,
    "micro_batch_sizes": _micro_batch_sizes,
    "model": _MODULE,
    "names": _texts,
    "only": _texts,
    "optimizer": _optimizer,
    "overrides": _texts,
    "pack_to": _LENGTH,
    "pad_to": _LENGTH,
    "parts": _unless(
        lambda value: isinstance(value, tuple | list) and all(isinstance(each, Mapping) for each in value),
        "a list of the parts of a batch, each a mapping from names to tensors",
    ),
    "path": _PATH,
    "plan": _unless(
        lambda value: _is_path(value) or _is_a(value, "heterodyne.plan.plan.Plan", "heterodyne.api.options.PlanOptions"),
        "a strategy ('auto', 'data', 'pipeline', ...), a Plan, the path of one, or PlanOptions(strategy, ...)",
    ),
    "precision": _precision,
    "prefetch": _whole(1, 1024),
    "profile": _a("a Profile, as Profile.load(path) reads it", "heterodyne.cluster.profile.Profile"),
    "rehearsal_s": _or_auto(_number("seconds, 0 for no rehearsal, or 'auto'")),
    "resume": _FLAG,
    "run": _unless(
        lambda value: _is_path(value) or _is_a(value, "heterodyne.api.options.RunOptions"),
        "the path of a directory, or RunOptions(path, ...)",
    ),
    "samples": _whole(1),
    "say": _CALLED,
    "seed": _unless(lambda value: _is_whole(value) and -(2**63) <= value < 2**63, "a whole number of at most 64 bits"),
    "session": _a("what 'with hd.open_session() as session' gives", "heterodyne.api.session.Session"),
    "shared": _texts,
    "shuffle": _FLAG,
    "shuffle_buffer": _whole(0),
    "slots": _LENGTH,
    "state": _STATE,
    "step": _whole(0, 2**53),
    "text": _unless(lambda value: isinstance(value, str), "a text"),
    "tf32": _FLAG,
    "total_steps": _LENGTH,
    "trackers": _unless(lambda value: isinstance(value, tuple | list), "a list of names, or of mappings from a name to its options"),
    "values": _names_to("a mapping from names to numbers"),
    "wanted": _unless(lambda value: isinstance(value, tuple | list), "a list of names, or of mappings from a name to its options"),
    "words": _unless(lambda value: isinstance(value, str), "a text"),
    "workers": _whole(0, 1024),
}  # fmt: skip
