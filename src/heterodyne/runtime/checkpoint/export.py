"""Final weights as safetensors, in the form that plain PyTorch or Transformers loads.

A Transformers model is saved by its own ``save_pretrained``: ``config.json`` and ``model.safetensors``, tied weights
stored once, so that ``from_pretrained(directory)`` loads it. Any other module gets ``model.safetensors`` with every name of
its state dict, tied ones too, so that ``load_state_dict(load_file(path))`` loads it.
"""

from __future__ import annotations

import contextlib
import io
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor, nn

from heterodyne.errors import CheckpointError

__all__ = ["WEIGHTS", "export_model"]

WEIGHTS = "model.safetensors"


def export_model(model: nn.Module, directory: Path, state: Mapping[str, Any] | None = None) -> Path:
    """Write the weights of a model into a directory, in the place of any that are there; the directory. Other files stay.

    ``state``: its state dict, where the model here holds but a part of it.

    It is written aside and renamed, file by file where the directory is there already. Raises CheckpointError if it cannot be written, or
    if the state dict of a plain module holds something that is no tensor.
    """
    partial = directory.with_name(f"{directory.name}.partial-{secrets.token_hex(4)}")
    try:
        partial.mkdir(parents=True)
        try:
            _write(model, partial, model.state_dict() if state is None else state)
            if directory.exists():
                _move(partial, directory)
            else:
                partial.rename(directory)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise CheckpointError(
            f"the weights cannot be written to {directory} ({error.strerror or error}); make room or make it writable"
        ) from error
    return directory


def _move(new: Path, directory: Path) -> None:
    """New files take the place of those of their names; weights of another number of files go."""
    written = {path.name for path in new.iterdir()}
    for name in written:
        (new / name).replace(directory / name)
    for path in (*directory.glob("model*.safetensors"), *directory.glob("model*.safetensors.index.json")):
        if path.name not in written:
            path.unlink()


def _write(model: nn.Module, directory: Path, state: Mapping[str, Any]) -> None:
    save_pretrained = getattr(model, "save_pretrained", None)
    if callable(save_pretrained):
        with contextlib.redirect_stderr(io.StringIO()):  # it draws a bar of its own across that of the run
            save_pretrained(directory, state_dict=dict(state))
        return
    tensors: dict[str, Tensor] = {}
    stored: set[int] = set()
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise CheckpointError(f"{name} in the state dict of the model is no tensor, which safetensors cannot hold")
        tensor = value.detach().cpu().contiguous()
        # safetensors refuses tensors that share memory, as tied weights do.
        storage = tensor.untyped_storage().data_ptr()
        tensors[name] = tensor.clone() if storage in stored else tensor
        stored.add(storage)
    save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})
