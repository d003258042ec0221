"""Emulation by the operating system: shares are as asked for, limits hold, and nothing is left behind.

Where this machine or this user cannot do a thing, its test is skipped and says so.
"""

from __future__ import annotations

import ast
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from heterodyne.emulate import Mechanism, emulate
from heterodyne.emulate.engine import group_parents
from heterodyne.emulate.names import name_of
from heterodyne.emulate.network import why_not
from heterodyne.errors import EmulateError

PATIENCE_S = 60.0
MIB = 2**20

# Spins, and writes what the kernel says of it: CPU time, time in the queue for a core (which has the throttled time in
# it), throttled time of its group, what the host took of all cores, and time by the clock; and when it began; all in seconds.
SPIN = """
import json, os, sys, time
from pathlib import Path

def throttled_s():
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, names, path = line.split(":", 2)
        for place in (f"/sys/fs/cgroup/{names}{path}", f"/sys/fs/cgroup{path}"):
            stat = Path(place) / "cpu.stat"
            if "heterodyne-" in path and stat.exists():
                fields = dict(line.split() for line in stat.read_text().splitlines())
                if "throttled_time" in fields:
                    return int(fields["throttled_time"]) / 1e9
                if "throttled_usec" in fields:
                    return int(fields["throttled_usec"]) / 1e6
    return 0.0

def stolen_s():
    return int(Path("/proc/stat").read_text().split()[8]) / os.sysconf("SC_CLK_TCK")  # see proc_stat(5)

def now():
    ran, queued, _ = Path("/proc/self/schedstat").read_text().split()
    return int(ran) / 1e9, int(queued) / 1e9, throttled_s(), stolen_s(), time.monotonic()

start = now()
while time.monotonic() < start[-1] + float(sys.argv[1]):
    pass
Path(sys.argv[2], os.environ["RANK"]).write_text(json.dumps([*(b - a for a, b in zip(start, now())), start[-1]]))
"""


def need_quota() -> None:
    if sys.platform != "linux" or group_parents(frozenset({"cpu"})) is None:
        pytest.skip("no control group with a CPU quota can be made here (not root, or read-only)")


def need_memory() -> None:
    if sys.platform != "linux" or group_parents(frozenset({"memory"})) is None:
        pytest.skip("no control group with a memory limit can be made here (not root, or read-only)")


def need_links() -> None:
    if (reason := why_not(user=os.geteuid())) is not None:
        pytest.skip(f"links cannot be limited here: {reason}")
    if subprocess.run(["ip", "netns", "add", name_of("trial")], capture_output=True, check=False).returncode:
        pytest.skip("links cannot be limited here: the kernel refuses network namespaces")
    subprocess.run(["ip", "netns", "delete", name_of("trial")], check=True)


def leftovers() -> list[str]:
    """Whatever bears our prefix: groups and namespaces."""
    groups = [
        str(Path(place) / name)
        for place, names, _ in os.walk("/sys/fs/cgroup")
        for name in names
        if name.startswith("heterodyne-")
    ]
    spaces = Path("/run/netns")
    return groups + ([str(e) for e in spaces.iterdir() if e.name.startswith("heterodyne-")] if spaces.is_dir() else [])


def mine(pid: int) -> list[str]:
    """What the process `pid` made; other emulations may run on this machine at the same time."""
    return [name for name in leftovers() if f"-{pid}-" in name]


@pytest.fixture(autouse=True)
def _nothing_stays() -> Iterator[None]:
    yield
    assert mine(os.getpid()) == []


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.mark.parametrize("mechanism", ["cgroup", "signals"])
def test_each_worker_gets_its_share(tmp_path: Path, said: list[str], mechanism: Mechanism) -> None:
    """CPU time over time is never above the share, and below it only by the time that the worker queued for a core, or that the host of
    this machine gave to others.
    """
    if mechanism == "cgroup":
        need_quota()
    if not Path("/proc/self/schedstat").exists():
        pytest.skip("this kernel does not tell how long a process waits for a core")
    speeds = [0.6, 0.3, 0.2]
    command = [sys.executable, "-c", SPIN, "2", str(tmp_path)]
    assert emulate(speeds, command, mechanism=mechanism, logs=tmp_path / "logs", say=said.append) == 0
    assert ("CPU quota" if mechanism == "cgroup" else "SIGSTOP") in said[0]
    for rank, speed in enumerate(speeds):
        ran_s, queued_s, throttled_s, stolen_s, passed_s, _ = json.loads((tmp_path / str(rank)).read_text())
        wanted_core_s = max(0.0, queued_s - throttled_s) + stolen_s
        assert ran_s / passed_s < 1.1 * speed
        assert (ran_s + wanted_core_s) / passed_s > 0.9 * speed


def test_children_of_a_worker_share_its_share(tmp_path: Path, said: list[str]) -> None:
    need_quota()
    program = f"""
import subprocess, sys
spinners = [subprocess.Popen([sys.executable, "-c", {SPIN!r}, "1", folder]) for folder in sys.argv[1:]]
for spinner in spinners:
    spinner.wait()
"""
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        folder.mkdir()
    command = [sys.executable, "-c", program, *map(str, folders)]
    assert emulate([0.4], command, mechanism="cgroup", logs=tmp_path / "logs", say=said.append) == 0
    spinners = [json.loads((folder / "0").read_text()) for folder in folders]
    began = min(start for *_, start in spinners)
    ended = max(start + passed for *_, passed, start in spinners)  # the two do not begin and end together
    ran_s = sum(ran for ran, *_ in spinners)
    assert ran_s < 1.1 * 0.4 * (ended - began)


def test_too_much_for_the_machine_is_said(tmp_path: Path, said: list[str]) -> None:
    many = [1.0] * (len(os.sched_getaffinity(0)) + 1)
    assert emulate(many, ["true"], logs=tmp_path, say=said.append) == 0
    assert any("expect less than asked for" in line for line in said)


def test_the_memory_limit_kills_and_is_named(tmp_path: Path, said: list[str]) -> None:
    need_memory()
    program = "import os, time; x = bytearray(200 << 20) if os.environ['RANK'] == '1' else time.sleep(3600)"
    command = [sys.executable, "-c", program]
    status = emulate([0.5, 0.5], command, memory=[64 * MIB], logs=tmp_path, say=said.append)
    assert status == 128 + signal.SIGKILL
    assert "memory 64 MiB" in said[0]
    assert "rank 1" in said[-1]
    assert "was killed by SIGKILL: it reached its memory limit of 64 MiB" in said[-1]


def test_memory_below_the_limit_is_free(tmp_path: Path, said: list[str]) -> None:
    need_memory()
    command = [sys.executable, "-c", "x = bytearray(20 << 20)"]
    assert emulate([1.0], command, memory=[64 * MIB], logs=tmp_path, say=said.append) == 0


TRANSFER = """
import os, socket, sys, time
address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
if os.environ["RANK"] == "0":
    connection, _ = socket.create_server(address).accept()
    received, start = 0, time.monotonic()
    while data := connection.recv(1 << 20):
        received += len(data)
    open(sys.argv[1], "w").write(str(received / (time.monotonic() - start)))
else:
    while True:
        try:
            connection = socket.create_connection(address)
            break
        except OSError:
            time.sleep(0.05)
    connection.sendall(bytes(int(sys.argv[2])))
"""


@pytest.mark.parametrize("bytes_per_s", [2e6, 20e6])
def test_a_link_carries_no_more_than_was_asked_for(tmp_path: Path, said: list[str], bytes_per_s: float) -> None:
    need_links()
    size = str(int(0.7 * bytes_per_s))
    command = [sys.executable, "-c", TRANSFER, str(tmp_path / "rate"), size]
    assert emulate([1.0, 1.0], command, links=[bytes_per_s], logs=tmp_path / "logs", say=said.append) == 0
    rate = float((tmp_path / "rate").read_text())
    # What the bucket and the sockets' buffers swallow at once makes a short transfer look a little faster.
    assert rate < 1.3 * bytes_per_s


PLACE = """
import os, socket, sys
names = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
open(os.path.join(sys.argv[1], os.environ["RANK"]), "w").write(" ".join([socket.gethostname(), *(os.environ[n] for n in names)]))
"""


def test_workers_of_a_host_have_one_name_and_places_on_it(tmp_path: Path, said: list[str]) -> None:
    need_links()
    command = [sys.executable, "-c", PLACE, str(tmp_path)]
    assert emulate([0.5] * 4, command, links=[1e7], hosts=[0, 1, 0, 2], logs=tmp_path / "logs", say=said.append) == 0
    assert [(tmp_path / str(rank)).read_text() for rank in range(4)] == [
        "host-0 0 2 0",
        "host-1 0 1 1",
        "host-0 1 2 0",
        "host-2 0 1 2",
    ]
    with pytest.raises(EmulateError, match="give each a number from 0 on"):
        emulate([0.5] * 2, command, links=[1e7], hosts=[0, 2], logs=tmp_path)


SHARING = """
import os, socket, sys, time
from pathlib import Path
rank, host = os.environ["RANK"], socket.gethostname()
assert Path("before").read_text() == "from before"
Path(f"rank-{rank}").touch()
Path("/dev/shm", f"of-rank-{rank}").touch()
meeting = Path(sys.argv[1])
(meeting / rank).touch()
while len(list(meeting.iterdir())) < 3:
    time.sleep(0.01)
seen = [sorted(p.name for p in Path(place).iterdir() if p.name.startswith(prefix)) for place, prefix in ((".", "rank"), ("/dev/shm", "of"))]
Path("before").write_text(host)
(meeting / f"{rank}.seen").write_text(repr((host, *seen, os.readlink("/proc/self/ns/ipc"))))
"""


@pytest.mark.parametrize("name", ["folder", "no,overlay", "not:two"])
def test_each_host_has_shared_memory_and_a_disk_of_its_own(
    tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """With overlayfs, and with a copy where that does not mount: its options have no commas in them."""
    need_links()
    folder, meeting = tmp_path / name, tmp_path / "meeting"
    folder.mkdir()
    (folder / "before").write_text("from before")
    meeting.mkdir()
    monkeypatch.chdir(folder)
    shared_memories = Path("/proc/self/mountinfo").read_text().count(" /dev/shm ")
    command = [sys.executable, "-c", SHARING, str(meeting)]
    hosts = {"links": [1e7], "hosts": [0, 0, 1], "own_disks": Path(), "say": said.append}
    assert emulate([0.5] * 3, command, logs=tmp_path / "logs", **hosts) == 0
    heard = [ast.literal_eval((meeting / f"{rank}.seen").read_text()) for rank in range(3)]
    assert [host for host, *_ in heard] == ["host-0", "host-0", "host-1"]
    for rank, ranks in enumerate(([0, 1], [0, 1], [2])):
        assert heard[rank][1] == [f"rank-{other}" for other in ranks]
        assert set(heard[rank][2]) & {f"of-rank-{other}" for other in range(3)} == {f"of-rank-{o}" for o in ranks}
    assert heard[0][3] == heard[1][3] != heard[2][3]
    assert [path.name for path in folder.iterdir()] == ["before"]
    assert (folder / "before").read_text() == "from before"
    assert not list(Path("/dev/shm").glob("of-rank-*"))
    for host, wrote in (("host-0", {"before", "rank-0", "rank-1"}), ("host-1", {"before", "rank-2"})):
        kept = tmp_path / f"{name}.hosts" / host
        assert {path.name for path in kept.iterdir()} == wrote
        assert (kept / "before").read_text() == host
    assert emulate([0.5] * 3, ["sh", "-c", "cat before; ls rank-*"], logs=tmp_path / "again", **hosts) == 0
    assert (tmp_path / "again" / "rank-2.log").read_text() == "host-1rank-2\n"
    assert sorted(path.name for path in (tmp_path / f"{name}.hosts").iterdir()) == ["host-0", "host-1"]
    mounts = Path("/proc/self/mountinfo").read_text()
    assert str(tmp_path) not in mounts
    assert mounts.count(" /dev/shm ") == shared_memories
    assert not psutil.Process().children()
    with pytest.raises(EmulateError, match="own disks need hosts"):
        emulate([0.5], command, own_disks=folder, logs=tmp_path)


def test_links_without_root_are_refused(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("this user is root")
    with pytest.raises(EmulateError, match="network namespaces need root"):
        emulate([1.0], ["true"], links=[1e6], logs=tmp_path)


def test_the_exit_status_is_that_of_the_failing_worker(tmp_path: Path, said: list[str]) -> None:
    command = [sys.executable, "-c", "import os, sys; sys.exit(int(os.environ['RANK']) * 7)"]
    assert emulate([0.5, 0.5], command, logs=tmp_path, say=said.append) == 7
    assert "rank 1" in said[-1]


EMULATOR = """
import sys
from pathlib import Path
from heterodyne.emulate import emulate
stay = "import os, sys, time; open(os.path.join(sys.argv[1], os.environ['RANK']), 'w').write(str(os.getpid())); time.sleep(3600)"
home = sys.argv[1]
command = [sys.executable, "-c", stay, home]
sys.exit(emulate([0.5, 0.5], command, mechanism=sys.argv[2], links=[1e6] if sys.argv[3] == "links" else None, logs=Path(home, "logs")))
"""


def emulator(home: Path, mechanism: Mechanism, links: str) -> subprocess.Popen[bytes]:
    """An emulation in a process of its own, once both of its workers are there."""
    process = subprocess.Popen([sys.executable, "-c", EMULATOR, str(home), mechanism, links], stderr=subprocess.DEVNULL)
    until = time.monotonic() + PATIENCE_S
    try:
        while len(workers(home)) < 2:
            assert process.poll() is None
            assert time.monotonic() < until
            time.sleep(0.02)
    except BaseException:
        process.kill()
        process.wait()
        raise
    return process


def workers(home: Path) -> list[int]:
    return [int(text) for rank in "01" if (home / rank).exists() and (text := (home / rank).read_text())]


def gone(pids: list[int]) -> bool:
    def ended(pid: int) -> bool:
        try:
            return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    return all(map(ended, pids))


def wait_for(pids: list[int]) -> None:
    until = time.monotonic() + PATIENCE_S
    while not gone(pids):
        assert time.monotonic() < until
        time.sleep(0.02)


@pytest.mark.parametrize(("mechanism", "links"), [("cgroup", "links"), ("signals", "")])
def test_ctrl_c_leaves_nothing(tmp_path: Path, mechanism: Mechanism, links: str) -> None:
    if mechanism == "cgroup":
        need_quota()
        need_links()
    process = emulator(tmp_path, mechanism, links)
    try:
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 130
    finally:
        process.kill()
        process.wait()
    assert gone(workers(tmp_path))
    assert mine(process.pid) == []


def test_workers_of_a_killed_emulator_die_even_while_stopped(tmp_path: Path) -> None:
    process = emulator(tmp_path, "signals", "")
    process.kill()
    process.wait()
    wait_for(workers(tmp_path))


def test_what_a_killed_emulator_left_is_removed_by_the_next(tmp_path: Path, said: list[str]) -> None:
    need_quota()
    need_links()
    process = emulator(tmp_path, "cgroup", "links")
    process.kill()
    process.wait()
    wait_for(workers(tmp_path))
    before = mine(process.pid)
    assert len(before) == 2 + 3  # a group for each worker; a namespace for each worker, and the switch
    assert emulate([1.0], ["true"], logs=tmp_path / "logs", say=said.append) == 0
    assert mine(process.pid) == []
    assert all(Path(name).name in said[0] for name in before)


def test_the_program_knows_nothing(tmp_path: Path, said: list[str]) -> None:
    """Any program that torchrun starts is started: here one that is no Python at all."""
    shell = shutil.which("sh")
    assert shell is not None
    command = [shell, "-c", f'echo "$RANK of $WORLD_SIZE" > {tmp_path}/said-$RANK']
    assert emulate([0.9, 0.3], command, logs=tmp_path / "logs", say=said.append) == 0
    assert [(tmp_path / f"said-{rank}").read_text() for rank in (0, 1)] == ["0 of 2\n", "1 of 2\n"]
