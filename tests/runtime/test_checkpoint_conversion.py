"""Checkpoints of an earlier release, which were pickles: read once, by a command that says so, and by nothing else."""

from __future__ import annotations

import json
import random
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from heterodyne.cli import main
from heterodyne.errors import CheckpointError
from heterodyne.runtime.checkpoint.checkpoints import Checkpoints
from heterodyne.runtime.checkpoint.random_state import restore_random_state
from heterodyne.runtime.checkpoint.state_tree import Leaf, strip

IDENTITY = {"job": {"training": {"seed": 0}}}
STATE: dict[str, Any] = {
    "model": {"w": torch.arange(5.0)},
    "optimizer": {0: {"step": torch.tensor(3.0), "betas": (0.9, 0.95)}},
}


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A checkpoint as version 1 was written, by two ranks."""
    tensors, skeleton = strip(STATE, "state")
    generators = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    entries = {**tensors, "skeleton": skeleton, "random/0": generators, "random/1": generators}
    return write_first_version(tmp_path / "step-4", entries)


def write_first_version(path: Path, entries: dict[str, Any]) -> Path:
    path.mkdir()
    save(
        entries,
        storage_writer=FileSystemWriter(path),
        planner=DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
        no_dist=True,
    )
    (path / "plan.json").write_text("{}")
    files = {
        file.name: {"bytes": file.stat().st_size, "crc32": zlib.crc32(file.read_bytes())} for file in path.iterdir()
    }
    content = {
        "version": 1,
        "step": 4,
        "identity": IDENTITY,
        "world_size": 2,
        "torch": torch.__version__,
        "files": files,
    }
    (path / "manifest.json").write_text(json.dumps(content))
    return path


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_it_is_passed_over_until_it_is_converted(old: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoints = Checkpoints(old.parent)
    with pytest.raises(CheckpointError, match="convert-checkpoint"):
        checkpoints.latest()
    assert main(["convert-checkpoint", str(old)]) == 2
    assert "--trust" in capsys.readouterr().err
    drawn = (random.random(), np.random.rand(), torch.rand(3).tolist())

    assert main(["convert-checkpoint", str(old), "--trust"]) == 0
    found = checkpoints.latest()
    assert found is not None
    assert found.manifest.world_size == 2
    restored = checkpoints.load(found, identity=IDENTITY)
    assert restored.step == 4
    assert torch.equal(restored.state["model"]["w"], STATE["model"]["w"])
    assert restored.state["optimizer"][0]["betas"] == (0.9, 0.95)
    assert restored.random is not None
    restore_random_state(restored.random)
    assert (random.random(), np.random.rand(), torch.rand(3).tolist()) == drawn
    assert main(["convert-checkpoint", str(old), "--trust"]) == 2
    assert "needs no conversion" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    "content", [{}, {"skeleton": Leaf("nowhere")}, {"skeleton": {}, "random/0": None}, {"skeleton": {}, "random/0": {"python": 1}}],
    ids=str,
)  # fmt: skip
def test_objects_of_another_kind_are_refused(
    tmp_path: Path, content: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_first_version(tmp_path / "step-4", content)
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    assert main(["convert-checkpoint", str(path), "--trust"]) == 2
    assert "step-4 cannot be converted" in capsys.readouterr().err
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before


def test_what_is_no_checkpoint_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for trust in ((), ("--trust",)):
        assert main(["convert-checkpoint", str(tmp_path / "step-1"), *trust]) == 2
        assert "step-1 is no checkpoint: it has no manifest.json" in capsys.readouterr().err
    (tmp_path / "manifest.json").write_text("{}")
    assert main(["convert-checkpoint", str(tmp_path)]) == 2
    assert "is no checkpoint of version 1 ('version')" in capsys.readouterr().err
