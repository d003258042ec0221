"""The launcher gives what torchrun gives, tells who failed, and leaves nobody behind."""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import pytest

from heterodyne.errors import WorkerError
from heterodyne.processes import GAVE_UP_ON_A_PEER, WorkerSpec, launch_workers, worker_exit_status
from heterodyne.processes.port import reserve_port

PATIENCE_S = 180.0

LAUNCHER = """
import sys
from pathlib import Path
from heterodyne.processes import WorkerSpec, launch_workers
spec = WorkerSpec(command=(sys.executable, "-c", sys.argv[2]))
grace_s = float(sys.argv[3]) if len(sys.argv) > 3 else 30.0
sys.exit(launch_workers([spec] * 2, logs=Path(sys.argv[1]), interrupt_grace_s=grace_s))
"""

# A worker that says who it is by a file named after its process, and so does its child in a session of its own.
SETTLE = """
import os, signal, subprocess, sys, time
from pathlib import Path
home = Path(os.environ["SETTLERS"])
child = subprocess.Popen(["sleep", "3600"], start_new_session=True)
(home / str(child.pid)).touch()
(home / str(os.getpid())).touch()
"""
STAY = SETTLE + "time.sleep(3600)"


def python(program: str, **environment: str) -> WorkerSpec:
    return WorkerSpec(command=(sys.executable, "-c", program), environment=environment)


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where workers leave their process numbers."""
    home = tmp_path / "settlers"
    home.mkdir()
    monkeypatch.setenv("SETTLERS", str(home))
    return home


def settled(home: Path) -> list[int]:
    return [int(file.name) for file in home.iterdir()]


def alive(pids: Sequence[int]) -> list[int]:
    def lives(pid: int) -> bool:
        try:
            return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    return [pid for pid in pids if lives(pid)]


def wait_until(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < until, "it does not come about"
        time.sleep(0.02)


def launcher(program: str, logs: Path, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", LAUNCHER, str(logs), program, *more]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def test_each_rank_gets_what_torchrun_gives(tmp_path: Path, said: list[str]) -> None:
    program = "import json, os; open(os.environ['OUT'], 'w').write(json.dumps(dict(os.environ)))"
    specs = [python(program, OUT=str(tmp_path / str(rank))) for rank in range(3)]
    assert launch_workers(specs, logs=tmp_path / "logs", say=said.append) == 0
    environments = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(3)]
    assert [e["RANK"] for e in environments] == ["0", "1", "2"]
    assert [e["LOCAL_RANK"] for e in environments] == ["0", "1", "2"]
    assert {e["WORLD_SIZE"] for e in environments} == {"3"}
    assert {e["LOCAL_WORLD_SIZE"] for e in environments} == {"3"}
    assert {e["GROUP_RANK"] for e in environments} == {"0"}
    assert {e["MASTER_ADDR"] for e in environments} == {"127.0.0.1"}
    assert len({e["MASTER_PORT"] for e in environments}) == 1
    assert said == []


@pytest.mark.parametrize(("given", "seen"), [(None, "1"), ("3", "3")])
def test_one_thread_unless_said_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str | None, seen: str
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if given is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    program = "import os; open(os.environ['OUT'], 'w').write(os.environ['OMP_NUM_THREADS'])"
    assert launch_workers([python(program, OUT=str(tmp_path / "out"))], logs=tmp_path) == 0
    assert (tmp_path / "out").read_text() == seen


def test_the_first_failure_is_told_with_rank_host_and_last_lines(tmp_path: Path, said: list[str], home: Path) -> None:
    fail = "import os, sys, time\nprint('the end is near')\nsys.exit(3)"
    specs = [python(STAY), python(STAY), python(fail)]
    assert launch_workers(specs, logs=tmp_path / "logs", say=said.append) == 3
    (report,) = said
    assert re.search(rf"rank 2 on {socket.gethostname()} \(pid \d+\) ended with exit status 3", report)
    assert "the end is near" in report
    assert str(tmp_path / "logs" / "rank-2.log") in report
    assert alive(settled(home)) == []


def test_a_killed_worker_is_told_by_its_signal(tmp_path: Path, said: list[str]) -> None:
    specs = [python("import time; time.sleep(3600)"), python("import os; os.kill(os.getpid(), 9)")]
    assert launch_workers(specs, logs=tmp_path, say=said.append) == 128 + signal.SIGKILL
    assert re.search(r"rank 1 on \S+ \(pid \d+\) was", said[0])
    assert "killed by SIGKILL; the one other worker was ended" in said[0]


def test_who_blames_another_is_not_the_cause(tmp_path: Path, said: list[str]) -> None:
    specs = [
        python(f"raise SystemExit({GAVE_UP_ON_A_PEER})"),
        python("import time; time.sleep(0.4); raise SystemExit(5)"),
    ]
    assert launch_workers(specs, logs=tmp_path, say=said.append) == 5
    assert "rank 1" in said[0]


def test_if_only_blame_is_left_it_is_told_as_that(tmp_path: Path, said: list[str]) -> None:
    specs = [
        python("import time; time.sleep(3600)"),
        python(f"print('rank 0 hangs'); raise SystemExit({GAVE_UP_ON_A_PEER})"),
    ]
    assert launch_workers(specs, logs=tmp_path, say=said.append) == GAVE_UP_ON_A_PEER
    assert "rank 1 on" in said[0]
    assert "gave up, because another worker died or hangs" in said[0]
    assert "rank 0 hangs" in said[0]


def test_neither_deafness_nor_a_stop_saves_a_worker(tmp_path: Path, said: list[str], home: Path) -> None:
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)" + STAY
    stopped = SETTLE + "os.kill(os.getpid(), signal.SIGSTOP)"
    wait_and_fail = """
import os, sys, time
while len(os.listdir(os.environ["SETTLERS"])) < 4:
    time.sleep(0.02)
sys.exit(1)
"""
    specs = [python(deaf), python(stopped), python(wait_and_fail)]
    assert launch_workers(specs, logs=tmp_path / "logs", grace_s=0.3, say=said.append) == 1
    assert len(settled(home)) == 4
    assert alive(settled(home)) == []


def test_children_in_other_sessions_end_with_their_worker_even_after_success(tmp_path: Path, home: Path) -> None:
    assert launch_workers([python(SETTLE)] * 2, logs=tmp_path / "logs") == 0
    assert len(settled(home)) == 4
    assert alive(settled(home)) == []


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_is_passed_on_and_everybody_stops_cleanly(
    tmp_path: Path, home: Path, number: signal.Signals, status: int
) -> None:
    clean = (
        SETTLE
        + f"""
def stop(number, frame):
    (home.parent / f"clean-{{os.environ['RANK']}}").touch()
    sys.exit(0)
signal.signal({int(number)}, stop)
(home.parent / f"ready-{{os.environ['RANK']}}").touch()
time.sleep(3600)
"""
    )
    process = launcher(clean, tmp_path / "logs")
    try:
        wait_until(lambda: len(list(tmp_path.glob("ready-*"))) == 2)
        process.send_signal(number)
        _, said = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == status
    assert signal.Signals(number).name in said
    assert len(list(tmp_path.glob("clean-*"))) == 2
    assert alive(settled(home)) == []


def test_a_second_ctrl_c_ends_the_deaf_at_once(tmp_path: Path, home: Path) -> None:
    process = launcher("import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)" + STAY, tmp_path / "logs")
    try:
        wait_until(lambda: len(settled(home)) == 4)
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        assert "press Ctrl-C again" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    assert "did not stop and were killed: 0, 1" in said
    assert alive(settled(home)) == []


def long_step(seconds: float) -> str:
    return (
        "import ctypes, os, signal, time\n"
        "from pathlib import Path\n"
        "from heterodyne.processes import to_standard_error\n"
        "from heterodyne.processes.parent import end_with_launcher\n"
        "from heterodyne.processes.signals import orderly_stop\n"
        "end_with_launcher()\n"
        "home = Path(os.environ['SETTLERS'])\n"
        "with orderly_stop('step 7', 3600.0, to_standard_error):\n"
        "    (home / str(os.getpid())).touch()\n"
        f"    until = time.monotonic() + {seconds}\n"
        "    while time.monotonic() < until:\n"
        "        ctypes.CDLL(None).poll(None, 0, 200)  # no handler of Python runs in it\n"
        "    (home.parent / f'whole-{os.getpid()}').touch()\n"
    )


def test_a_step_that_takes_longer_than_the_grace_is_waited_for(tmp_path: Path, home: Path) -> None:
    process = launcher(long_step(8.0), tmp_path / "logs", "1.0")
    try:
        wait_until(lambda: len(settled(home)) == 2)
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 143
    assert len(list(tmp_path.glob("whole-*"))) == 2
    assert "send SIGTERM again to end them at once" in said
    assert "SIGTERM: step 7 is finished first" in said
    assert "were killed" not in said


def test_a_worker_alone_is_ended_at_once_by_a_second_signal(tmp_path: Path, home: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", long_step(3600.0)], stderr=subprocess.PIPE, text=True)
    try:
        wait_until(lambda: len(settled(home)) == 1)
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        assert "SIGINT: step 7 is finished first" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 130
    finally:
        process.kill()
        process.communicate()


def test_workers_end_when_guardian_and_launcher_are_gone(tmp_path: Path, home: Path) -> None:
    process = launcher(long_step(3600.0), tmp_path / "logs")
    try:
        wait_until(lambda: len(settled(home)) == 2)
        (guardian,) = [p for p in psutil.Process(process.pid).children() if p.pid not in settled(home)]
        guardian.kill()
        process.kill()
        wait_until(lambda: alive(settled(home)) == [])
    finally:
        process.kill()
        process.communicate()


def test_the_workers_of_a_killed_launcher_die_with_it(tmp_path: Path, home: Path) -> None:
    process = launcher(STAY, tmp_path / "logs")
    try:
        wait_until(lambda: len(settled(home)) == 4)
        process.kill()
        wait_until(lambda: alive(settled(home)) == [])
    finally:
        process.kill()
        process.communicate()


def test_a_command_that_does_not_exist_is_named(tmp_path: Path, home: Path) -> None:
    specs = [python(STAY), WorkerSpec(command=("no-such-program",))]
    with pytest.raises(WorkerError, match=r"rank 1: 'no-such-program' cannot be started: No such file"):
        launch_workers(specs, logs=tmp_path / "logs")
    assert alive(settled(home)) == []


def test_what_the_outside_knows_of_a_death_is_told(tmp_path: Path, said: list[str]) -> None:
    spec = WorkerSpec(command=(sys.executable, "-c", "raise SystemExit(9)"), explain=lambda: "the dog ate it")
    assert launch_workers([spec], logs=tmp_path, say=said.append) == 9
    assert "exit status 9: the dog ate it." in said[0]


def test_temporary_logs_stay_only_after_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert launch_workers([python("pass")] * 2, say=said.append) == 0
    assert list(tmp_path.iterdir()) == []
    assert launch_workers([python("import os; raise SystemExit(int(os.environ['RANK']))")] * 2, say=said.append) == 1
    (log,) = tmp_path.glob("*/rank-1.log")
    assert str(log) in said[0]


def test_of_earlier_logs_those_of_living_runs_and_the_latest_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "heterodyne-logs-fresh").mkdir()  # somebody is just making it
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "heterodyne-logs-link").symlink_to(tmp_path / "elsewhere")
    old = [tmp_path / f"heterodyne-logs-{number:02}" for number in range(12)]
    for number, directory in enumerate(old):
        directory.mkdir()
        (directory / "alive").touch()
        os.utime(directory, (number, number))
    with (old[0] / "alive").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert launch_workers([python("pass")], say=said.append) == 0
    stays = {"elsewhere", "heterodyne-logs-link", "heterodyne-logs-fresh", old[0].name, *(one.name for one in old[4:])}
    assert {path.name for path in tmp_path.iterdir()} == stays


def test_workers_that_one_of_them_was_asked_to_stop_are_given_time_and_nobody_is_blamed(
    tmp_path: Path, said: list[str]
) -> None:
    late = "import os, sys, time; time.sleep(0.5 * (os.environ['RANK'] == '0')); sys.exit(130)"
    assert launch_workers([python(late)] * 2, logs=tmp_path, say=said.append, grace_s=0.1) == 130
    assert said == []


def test_ports_are_free_and_exclude_each_other() -> None:
    with reserve_port() as first, reserve_port() as second:
        assert first != second
        for port in (first, second):
            with socket.create_server(("127.0.0.1", port)):
                pass


def test_exit_statuses_tell_cause_from_consequence() -> None:
    assert worker_exit_status(WorkerError("rank 2 died", rank=2), rank=0) == GAVE_UP_ON_A_PEER
    assert worker_exit_status(WorkerError("rank 2 twice", rank=2), rank=2) == 2
    assert worker_exit_status(KeyboardInterrupt(), rank=0) == 130
    assert worker_exit_status(ValueError(), rank=0) == 1


def test_handlers_of_the_caller_come_back(tmp_path: Path) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    launch_workers([python("pass")], logs=tmp_path)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == before
