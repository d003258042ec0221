"""Hosts are looked at together: links are measured, and a directory that one of them does not see is found."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from heterodyne.doctor.between import _together
from heterodyne.doctor.facts import read_facts
from heterodyne.runtime.comm.communicator import Communicator
from multiprocess.pool import World


def look(world: World, folder: str) -> Any:
    """Ranks 0 and 1 are processes of host a, rank 2 of host b, which has a disk of its own."""
    communicator = Communicator(rank=world.rank, world_size=world.world_size, device=torch.device("cpu"))
    host = "aab"[world.rank]
    facts = read_facts(Path(folder) / host, 0)
    own = dataclasses.replace(
        facts,
        host=host,
        machine=host,
        load=0.0,
        addresses=("10.0.0.1",),
        files=2**20,
        drivers=(),
        shared_memory_bytes=None,
        utc_s=500.0 * world.rank,
    )
    return _together(communicator, own, "eth0", None)


def test_each_host_is_looked_at_once(pool: Any, tmp_path: Path) -> None:
    found, *others = pool.run(3, look, str(tmp_path))
    assert others == [None, None]
    assert [facts.host for facts in found.hosts] == ["a", "b"]
    (link,) = found.links
    assert link.hosts == ("a", "b")
    assert link.bandwidth_bytes_per_s > 1e6
    assert 0 < link.latency_s < 1
    assert [
        (fault.host, "another directory" in fault.what) for fault in found.faults if "secret" not in fault.what.lower()
    ] == [("b", True)]
    assert not list(tmp_path.rglob(".heterodyne*"))
