"""Checkpoints of version 1, which held Python objects, as checkpoints of today. Nothing else reads pickles.

They were written through torch.distributed.checkpoint: ``.metadata``, the skeleton of the state, and the random state of each rank are
pickles, and reading a pickle runs whatever its writer wanted.
"""

from __future__ import annotations

import random
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch

from heterodyne.errors import CheckpointError
from heterodyne.json_files import read_json
from heterodyne.runtime.checkpoint.checkpoints import PLAN, Checkpoints
from heterodyne.runtime.checkpoint.manifest import MANIFEST
from heterodyne.runtime.checkpoint.random_state import random_state
from heterodyne.runtime.checkpoint.state_tree import graft
from heterodyne.text_files import read_bytes, read_text

__all__ = ["convert_checkpoint", "require_first_version"]

_SKELETON, _RANDOM = "skeleton", "random"


def convert_checkpoint(path: Path) -> Path:
    """Write the checkpoint in a directory ``step-N`` anew, in the place of itself. Runs what its pickles want. The directory.

    Raises CheckpointError if it is none of version 1, or not whole.
    """
    manifest = require_first_version(path)
    try:
        entries = _entries(path)
        tensors = {name: value for name, value in entries.items() if isinstance(value, torch.Tensor)}
        state = graft(entries[_SKELETON], tensors)
        ranks = {name.partition("/")[2]: value for name, value in entries.items() if name.startswith(f"{_RANDOM}/")}
        generators = {rank: _generators(old) for rank, old in ranks.items()}
        step, identity, plan = manifest["step"], manifest["identity"], read_text(path / PLAN)
    except Exception as error:  # reading objects raises whatever they want
        raise CheckpointError(
            f"{path} cannot be converted: it does not hold what an earlier release wrote ({type(error).__name__}: {error}); it is as it "
            "was: convert an earlier one"
        ) from error
    checkpoints = Checkpoints(path.parent, keep=sys.maxsize)
    return checkpoints.save(step, state, identity=identity, plan=plan, generators=generators)


def require_first_version(path: Path) -> dict[str, Any]:
    """The manifest of a whole checkpoint of version 1; no pickle is read. Raises CheckpointError for anything else."""
    if not (path / MANIFEST).is_file():
        raise CheckpointError(
            f"{path} is no checkpoint: it has no {MANIFEST}; name a directory step-N of a run's checkpoints"
        )
    try:
        manifest: dict[str, Any] = read_json(path / MANIFEST)
        if manifest["version"] != 1:
            raise CheckpointError(f"{path} is of version {manifest['version']}, which needs no conversion")
        for name, file in manifest["files"].items():
            if zlib.crc32(read_bytes(path / name, sys.maxsize - 1)) != file["crc32"]:
                raise CheckpointError(f"{path} is no whole checkpoint: {name} has another content than was written")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is no checkpoint of version 1 ({error})") from error
    return manifest


def _entries(path: Path) -> dict[str, Any]:
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    reader = FileSystemReader(path)
    entries: dict[str, Any] = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        if isinstance(entry, TensorStorageMetadata)
        else None
        for name, entry in reader.read_metadata().state_dict_metadata.items()
    }
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    load(entries, storage_reader=reader, planner=planner, no_dist=True)
    return entries


def _generators(old: dict[str, Any]) -> dict[str, Any]:
    """The state of a rank's generators as it is written today: put into the generators of this process, and taken from them."""
    random.setstate(old["python"])
    np.random.set_state(old["numpy"])
    torch.set_rng_state(old["torch"])
    taken = random_state()
    return taken | ({"accelerator": old["accelerator"]} if "accelerator" in old else {})
