"""Where groups may be made, read from what the kernel says of its mounts. No group is made here."""

from __future__ import annotations

from pathlib import Path

import pytest

from heterodyne.emulate.cgroups import Controller, find_hierarchies

VERSION_1 = """\
31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,relatime shared:9 - cgroup cgroup rw,cpu,cpuacct
35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
"""
OWN_1 = "4:memory:/user.slice/alice\n1:cpu,cpuacct:/\n"

VERSION_2 = "29 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
OWN_2 = "0::/user.slice/user-1000.slice/run.scope\n"

HYBRID = VERSION_1 + "41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n"

BOTH: frozenset[Controller] = frozenset({"cpu", "memory"})


def test_version_1_has_a_tree_for_each_controller() -> None:
    found = find_hierarchies(BOTH, VERSION_1, OWN_1)
    assert found is not None
    places = {next(iter(h.controllers)): h.candidates for h in found}
    assert places["cpu"] == (Path("/sys/fs/cgroup/cpu,cpuacct"),)
    assert places["memory"] == (
        Path("/sys/fs/cgroup/memory/user.slice/alice"),
        Path("/sys/fs/cgroup/memory/user.slice"),
        Path("/sys/fs/cgroup/memory"),
    )
    assert {h.version for h in found} == {1}


def test_version_2_holds_all_controllers_in_one_group() -> None:
    found = find_hierarchies(BOTH, VERSION_2, OWN_2)
    assert found is not None
    (hierarchy,) = found
    assert (hierarchy.version, hierarchy.controllers) == (2, BOTH)
    assert hierarchy.candidates[0] == Path("/sys/fs/cgroup/user.slice/user-1000.slice/run.scope")
    assert hierarchy.root == Path("/sys/fs/cgroup")


def test_where_both_are_mounted_version_1_has_what_it_names() -> None:
    found = find_hierarchies(BOTH, HYBRID, OWN_1 + "0::/\n")
    assert found is not None
    assert {h.version for h in found} == {1}


def test_a_container_sees_its_part_of_the_tree() -> None:
    mounts = "32 31 0:29 /docker/abc /sys/fs/cgroup/cpu ro,relatime - cgroup cgroup rw,cpu\n"
    found = find_hierarchies(frozenset({"cpu"}), mounts, "1:cpu:/docker/abc/job\n")
    assert found is not None
    assert found[0].candidates == (Path("/sys/fs/cgroup/cpu/job"), Path("/sys/fs/cgroup/cpu"))


def test_without_mounts_there_is_nothing() -> None:
    assert find_hierarchies(BOTH, "", "") is None


def test_needing_nothing_takes_nothing() -> None:
    assert find_hierarchies(frozenset(), VERSION_1, OWN_1) == ()


@pytest.mark.parametrize("writable", [False, True])
def test_a_directory_that_is_no_group_bears_none(tmp_path: Path, writable: bool) -> None:
    mounts = VERSION_2.replace("/sys/fs/cgroup", str(tmp_path))
    found = find_hierarchies(BOTH, mounts, "0::/\n")
    assert found is not None
    if writable:
        (tmp_path / "cgroup.subtree_control").write_text("cpu memory")
        (tmp_path / "cgroup.procs").write_text("")
    assert found[0].parent() is None
    assert [entry.name for entry in tmp_path.iterdir() if entry.is_dir()] == []
