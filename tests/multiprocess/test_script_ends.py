"""A script ends on every rank, with its own traceback, whatever it forgets: the ``with``, its errors, or the other ranks."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from multiprocess.crowd import Crowd, run_launched

PATIENCE_S = 240.0  # a test that hangs, not one that is slow

LAUNCHER = """
import sys
from pathlib import Path
from heterodyne.processes import WorkerSpec, launch_workers
spec = WorkerSpec(command=(sys.executable, "-c", sys.argv[2]))
sys.exit(launch_workers([spec] * 2, logs=Path(sys.argv[1])))
"""

BEGINNING = """
import os
import torch
import heterodyne as hd
rank = int(os.environ["RANK"])
torch.manual_seed(0)
batch = torch.randn(4, 8), torch.randint(0, 4, (4,))
def metric(outputs, batch):
    if rank == 1:
        raise RuntimeError("an error of rank 1")
    return 0.0, 1
def distribute():
    loss = torch.nn.functional.cross_entropy
    plan = hd.PlanOptions("equal", measure_s=0.1, rehearsal_s=0.0, check_s=0.0)
    return hd.distribute(torch.nn.Linear(8, 4), batch, loss=loss, plan=plan)
"""

SCRIPTS = {
    "forgets": """
trainer = distribute()
trainer.step(batch)
print("the end")
""",
    "raises": """
trainer = distribute()
if rank == 1:
    raise ValueError("what the script says")
trainer.step(batch)
""",
    "catches": """
with distribute() as trainer:
    try:
        trainer.validate([batch], {"metric": metric})
    except RuntimeError:
        pass
print("the end")
""",
    "goes on": """
with distribute() as trainer:
    for number in range(8):
        spoiled = number == 5 and rank == 1  # ranks compare their batches in other steps
        try:
            trainer.step((batch[0][:3], batch[1][:3]) if spoiled else batch)
        except hd.errors.DataError:
            pass
""",
    "all catch": """
with distribute() as trainer:
    for spoiled in (True, False, True, True, False):
        try:
            trainer.step((batch[0][:3], batch[1][:3]) if spoiled else batch)
        except hd.HeterodyneError:
            pass
    assert trainer.steps_done == 2
print("the end")
""",
    "begins again": """
import time
for attempt in range(2):
    try:
        with distribute() as trainer:
            trainer.step(batch)
            if attempt == 0:
                time.sleep(0.5 if rank == 0 else 0.0)  # the other one comes to what rank 0 is about to close
                raise ValueError("what the script says")
            print("the end")
    except ValueError:
        pass
""",
}


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[int, str, str]]]:
    """Of the scripts that have no with the status, what rank 0 and the launcher say, and the log of rank 1. All at the same time, as much
    of it is waiting, and in processes of their own: what is registered for the end of the interpreter is not called in forked ones.
    """
    logs = {name: tmp_path_factory.mktemp(name) for name in ("forgets", "raises")}
    started = {
        name: subprocess.Popen(
            [sys.executable, "-c", LAUNCHER, str(folder), BEGINNING + SCRIPTS[name]],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for name, folder in logs.items()
    }
    try:
        said = {name: process.communicate(timeout=PATIENCE_S)[0] for name, process in started.items()}
        yield {
            name: (process.returncode, said[name], (logs[name] / "rank-1.log").read_text())
            for name, process in started.items()
        }
    finally:
        for process in started.values():
            process.kill()
            process.wait()


def on_two(folder: Path, name: str) -> tuple[list[int], list[str]]:
    """The statuses of two ranks that run a script, and what they say."""
    script = folder / "script.py"
    script.write_text(BEGINNING + SCRIPTS[name])
    with Crowd() as crowd:
        cache = {"XDG_CACHE_HOME": str(folder)}
        workers = [
            crowd.start(run_launched, [str(script)], str(folder), cache, rank=rank, world_size=2) for rank in range(2)
        ]
        return [worker.wait() for worker in workers], [worker.output for worker in workers]


def test_a_script_without_with_ends_in_peace(ended: dict[str, tuple[int, str, str]]) -> None:
    status, said, log = ended["forgets"]
    assert status == 0, said
    assert "the end" in said
    assert "Traceback" not in said + log


def test_a_script_that_raises_without_with_ends_on_all_ranks_and_its_own_words_come_first(
    ended: dict[str, tuple[int, str, str]],
) -> None:
    status, said, log = ended["raises"]
    assert status == 1, said + log
    assert log.splitlines()[-1].endswith("ValueError: what the script says")
    assert "failed: ValueError: what the script says" in said, "rank 0 says why it ends"
    assert re.findall(r"heterodyne: rank (\d) on \S+ \(pid", said) == ["1"], "and the launcher blames who raised, alone"


def test_an_error_that_one_rank_alone_catches_ends_all(tmp_path: Path) -> None:
    statuses, said = on_two(tmp_path, "catches")
    assert 0 not in statuses, said
    assert "the end" not in said[0] + said[1]
    assert "RuntimeError: an error of rank 1" in said[1].partition("heterodyne: rank 1")[0], "the traceback comes first"
    for told in said:
        assert "has had an error that the others have not: validate() raised RuntimeError: an error of rank 1" in told


def test_a_rank_that_goes_on_alone_after_an_error_ends_all_before_messages_mix(tmp_path: Path) -> None:
    statuses, said = on_two(tmp_path, "goes on")
    assert 0 not in statuses, said
    for told in said:
        assert "preamble" not in told, "gloo took a message for another one"
        assert "has had an error that the others have not: step() raised DataError: the batch has 3 samples" in told


@pytest.mark.parametrize("script", ["all catch", "begins again"])
def test_ranks_that_all_catch_an_error_go_on_or_meet_again_in_another_trainer(tmp_path: Path, script: str) -> None:
    statuses, said = on_two(tmp_path, script)
    assert statuses == [0, 0], said
    assert all("the end" in told for told in said)
