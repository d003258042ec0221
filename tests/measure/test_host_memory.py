"""How much memory a worker has, on made-up machines with control groups of both versions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heterodyne.measure.host_memory import HostMemory, read_host_memory, round_down, worker_memory

GIB = 2**30


def machine(root: Path, cgroup: str, mounts: str, limits: dict[str, str]) -> Path:
    """A /proc with one process, and files with limits under root."""
    proc = root / "proc"
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text(cgroup)
    (proc / "self" / "mounts").write_text(mounts.replace("ROOT", str(root)))
    for name, text in limits.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")
    return proc


V2 = "cgroup2 ROOT/cg cgroup2 rw,nosuid 0 0\n"
V1 = "cgroup ROOT/cg/cpu cgroup rw,cpu 0 0\ncgroup ROOT/cg/memory cgroup rw,memory 0 0\n"


def test_version_2_counts_every_group_on_the_way(tmp_path: Path) -> None:
    limits = {
        "cg/memory.max": "max",
        "cg/slice/memory.max": str(8 * GIB),
        "cg/slice/worker-1/memory.max": str(2 * GIB),
        "cg/slice/worker-2/memory.max": str(1 * GIB),
    }
    seen = read_host_memory(proc=machine(tmp_path, "0::/slice/worker-1\n", V2, limits), total_bytes=64 * GIB)
    assert seen.total_bytes == 64 * GIB
    assert sorted(limit for _, limit in seen.limits) == [2 * GIB, 8 * GIB]


def test_version_1_counts_the_memory_controller_only(tmp_path: Path) -> None:
    limits = {
        "cg/memory/memory.limit_in_bytes": str(2**63 - 4096),
        "cg/memory/job/memory.limit_in_bytes": str(4 * GIB),
        "cg/cpu/job/memory.limit_in_bytes": str(1 * GIB),
    }
    proc = machine(tmp_path, "3:cpu:/job\n2:memory:/job\n1:name=systemd:/job\n", V1, limits)
    assert [limit for _, limit in read_host_memory(proc=proc, total_bytes=64 * GIB).limits] == [4 * GIB]


def test_in_a_container_the_mount_itself_is_the_group(tmp_path: Path) -> None:
    """The path is one of the host, which the container cannot see."""
    limits = {"cg/memory.max": str(3 * GIB)}
    proc = machine(tmp_path, "0::/docker/0123456789ab\n", V2, limits)
    assert [limit for _, limit in read_host_memory(proc=proc, total_bytes=64 * GIB).limits] == [3 * GIB]


def test_without_control_groups_there_is_just_the_machine(tmp_path: Path) -> None:
    assert read_host_memory(proc=tmp_path / "nothing", total_bytes=GIB) == HostMemory(total_bytes=GIB)


def test_workers_share_the_machine_and_every_limit_that_they_stand_under() -> None:
    def seen(*limits: tuple[str, int]) -> HostMemory:
        return HostMemory(total_bytes=64 * GIB, limits=limits)

    assert worker_memory(seen(), []) == 64 * GIB
    assert worker_memory(seen(), [seen()] * 3) == 16 * GIB
    box = ("box", 8 * GIB)
    assert worker_memory(seen(box), [seen(box)] * 3) == 2 * GIB
    # A limit of its own counts whole, one that two of the four share counts half.
    assert worker_memory(seen(box, ("mine", GIB)), [seen(box)] * 3) == 1 * GIB
    assert worker_memory(seen(("half", 4 * GIB)), [seen(("half", 4 * GIB)), seen(), seen()]) == 2 * GIB


def test_a_limit_that_was_set_counts_to_the_last_byte() -> None:
    own = HostMemory(total_bytes=64 * GIB, limits=(("mine", GIB + 4096),))
    assert worker_memory(own, [own]) == (GIB + 4096) // 2
    assert worker_memory(replace(own, limits=(("mine", GIB + 4096),)), []) == GIB + 4096


def test_a_limit_above_the_share_does_not_count() -> None:
    own = HostMemory(total_bytes=4 * GIB, limits=(("mine", 3 * GIB),))
    assert worker_memory(own, [own, own, own][:1]) == worker_memory(HostMemory(total_bytes=3 * GIB), [own])


@given(size=st.integers(1, 2**60))
def test_rounding_down_loses_little_and_is_stable(size: int) -> None:
    rounded = round_down(size)
    assert size * (1 - 1 / 64) <= rounded <= size
    assert round_down(rounded) == rounded


@pytest.mark.parametrize("noise", [0, 1, 4096, 2**20])
def test_a_little_less_memory_is_the_same_memory(noise: int) -> None:
    """What a driver or a new kernel takes does not make it another machine."""
    assert round_down(25_276_514_304 - noise) == round_down(25_276_514_304)
