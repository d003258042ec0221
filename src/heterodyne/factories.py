"""Functions of the user's that a job names: ``package.module:function`` or ``path/to/file.py:function``.

Errors of the user's own code are reported as Python names them, with the deepest line of that code.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from heterodyne.errors import JobError

__all__ = ["call_factory", "describe_error", "named_function"]

_FOREIGN = (str(Path(torch.__file__).parent), str(Path(importlib.__file__).parent), str(Path(__file__).parent))


def call_factory(factory: str, arguments: Mapping[str, Any], *, base: Path, key: str) -> Any:
    """Return what the function returns.

    Args:
        factory: its name.
        arguments: by keyword.
        base: where relative paths start.
        key: the key of the job that names it, such as ``model.factory``; its ``arguments`` are in the same section.

    Raises JobError if there is no such function, the arguments do not fit, or it fails.
    """
    function = named_function(factory, base=base, key=key)
    _check_arguments(factory, function, arguments, key)
    try:
        return function(**arguments)
    except Exception as error:  # whatever the user's own code raises, it is reported as such
        raise JobError(f"{key}: {factory} failed with {describe_error(error)}") from error


def named_function(named: str, *, base: Path, key: str) -> Callable[..., Any]:
    """The function of that name; see `call_factory`. Raises JobError."""
    place, separator, name = named.rpartition(":")
    if not separator or not place or not name:
        raise JobError(f"{key} {named!r}: write package.module:function or path/to/file.py:function")
    _make_importable((base / place).parent if place.endswith(".py") else base)
    module = _load_file(base / place, key) if place.endswith(".py") else _load_module(place, key)
    function = getattr(module, name, None)
    if not callable(function):
        known = [
            n for n, v in vars(module).items() if callable(v) and getattr(v, "__module__", None) == module.__name__
        ]
        raise JobError(f"{key}: {place} has no function {name!r}; it has: {', '.join(known) or 'none'}")
    return function  # type: ignore[no-any-return]  # the test narrows it


def describe_error(error: BaseException) -> str:
    """The error as Python names it, and the deepest line of the user's own code that led to it."""
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    own = [
        frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(("<", *_FOREIGN))
    ]
    return f"{text}\n  {own[-1].filename}:{own[-1].lineno}: {own[-1].line}" if own else text


def _make_importable(folder: Path) -> None:
    """Modules beside the user's own can be imported. Last: a file ``yaml.py`` there must not stand in for the library."""
    if (path := str(folder.resolve())) not in sys.path:
        sys.path.append(path)


def _load_module(name: str, key: str) -> ModuleType:
    if not all(part.isidentifier() for part in name.split(".")):
        raise JobError(
            f"{key}: {name!r} is no name of a module; write package.module:function or path/to/file.py:function"
        )
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # A module that the user's own module fails to import is another matter than the module itself.
        if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            raise JobError(
                f"{key}: there is no module {name!r}; install it, or name a file: path/to/file.py:function"
            ) from error
        raise JobError(f"{key}: {name} cannot be imported: {describe_error(error)}") from error
    except Exception as error:  # whatever the user's own code raises, it is reported as such
        raise JobError(f"{key}: {name} cannot be imported: {describe_error(error)}") from error


def _load_file(path: Path, key: str) -> ModuleType:
    if not path.is_file():
        raise JobError(f"{key}: there is no file {path}; the path is relative to the job file")
    name = f"heterodyne_{key.partition('.')[0]}_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses, pickling and inspect look a module up by its name; a second job's file of that name replaces it.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # whatever the user's own code raises, it is reported as such
        del sys.modules[name]
        raise JobError(f"{key}: {path} cannot be imported: {describe_error(error)}") from error
    return module


def _check_arguments(factory: str, function: Callable[..., Any], arguments: Mapping[str, Any], key: str) -> None:
    try:
        signature = inspect.signature(function)
    except ValueError:  # some functions written in C tell nothing of their arguments
        return
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise JobError(f"{key.partition('.')[0]}.arguments: {error}; {factory} takes {signature}") from error
