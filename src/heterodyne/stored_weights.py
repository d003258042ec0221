"""Weights in safetensors files, read tensor by tensor, so that nobody needs memory for all of a model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from heterodyne.errors import JobError
from heterodyne.json_files import read_json
from heterodyne.text_files import require_regular

__all__ = ["StoredWeights", "parameters_on_meta"]

_INDEX, _ONE_FILE = "model.safetensors.index.json", "model.safetensors"


class StoredWeights:
    """Of a Hugging Face directory.

    Args:
        names: from the name of each parameter to its name in the files.
        files: from the latter to the file.
    """

    def __init__(self, names: Mapping[str, str], files: Mapping[str, Path]) -> None:
        self._names = names
        self._files = files

    @classmethod
    def of(cls, directory: Path, model: nn.Module) -> StoredWeights | None:
        """For a model without weights, whose parameters may be tied; None if the files have not each parameter under one of its names,
        in its shape. Raises JobError for files that cannot be read.
        """
        files = _files(directory)
        shapes = _shapes(files)
        names: dict[str, str] = {}
        tied: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            tied.setdefault(id(parameter), []).append(name)
        for name, parameter in model.named_parameters():
            stored = next((other for other in tied[id(parameter)] if shapes.get(other) == tuple(parameter.shape)), None)
            if stored is None:
                return None
            names[name] = stored
        return cls(names, files)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def read(self, name: str, box: Sequence[tuple[int, int, int]], dtype: torch.dtype) -> Tensor:
        """A parameter, or of it the box of ``(dim, first, stop)``; only that is read. Raises JobError."""
        stored = self._names[name]
        path = self._files[stored]
        try:
            require_regular(path)
            with safe_open(path, framework="pt") as file:
                part = file.get_slice(stored)
                ranges = [slice(0, size) for size in part.get_shape()]
                for dim, first, stop in box:
                    begin = ranges[dim].start
                    ranges[dim] = slice(begin + first, begin + stop)
                tensor: Tensor = part[tuple(ranges)] if ranges else file.get_tensor(stored)
        except (OSError, SafetensorError) as error:
            raise JobError(f"model.directory: {path} cannot be read: {error}") from error
        return tensor.to(dtype)


def _files(directory: Path) -> dict[str, Path]:
    try:
        if (directory / _INDEX).exists():
            content = read_json(directory / _INDEX)
            return {name: directory / Path(file).name for name, file in content["weight_map"].items()}
        require_regular(directory / _ONE_FILE)
        with safe_open(directory / _ONE_FILE, framework="pt") as file:
            return dict.fromkeys(file.keys(), directory / _ONE_FILE)
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise JobError(f"model.directory: the weights in {directory} cannot be read: {error}") from error


def _shapes(files: Mapping[str, Path]) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {}
    for path in dict.fromkeys(files.values()):
        try:
            require_regular(path)
            with safe_open(path, framework="pt") as file:
                found |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118  # it is no mapping
        except (OSError, SafetensorError) as error:
            raise JobError(f"model.directory: {path} cannot be read: {error}") from error
    return found


@contextlib.contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Modules that are made meanwhile have parameters without memory, and buffers with their values."""

    def without_memory(_: nn.Module, __: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta:  # the latter may be tied
            return None
        return nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)

    handle = nn.modules.module.register_module_parameter_registration_hook(without_memory)  # type: ignore[arg-type]  # it may return a parameter
    try:
        yield
    finally:
        handle.remove()
