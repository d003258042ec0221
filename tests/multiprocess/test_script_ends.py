"""A script ends on every rank, with its own traceback, whatever it forgets: the ``with``, its errors, or the other ranks."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

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
    """Of each script the status, what rank 0 and the launcher say, and the log of rank 1; all at the same time: much of it is waiting."""
    logs = {name: tmp_path_factory.mktemp(name) for name in SCRIPTS}
    started = {
        name: subprocess.Popen(
            [sys.executable, "-c", LAUNCHER, str(logs[name]), BEGINNING + script],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for name, script in SCRIPTS.items()
    }
    try:
        said = {name: process.communicate(timeout=PATIENCE_S)[0] for name, process in started.items()}
        yield {
            name: (process.returncode, said[name], (Path(logs[name]) / "rank-1.log").read_text())
            for name, process in started.items()
        }
    finally:
        for process in started.values():
            process.kill()
            process.wait()


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


def test_an_error_that_one_rank_alone_catches_ends_all(ended: dict[str, tuple[int, str, str]]) -> None:
    status, said, log = ended["catches"]
    assert status == 1, said + log
    assert "the end" not in said + log
    assert "RuntimeError: an error of rank 1" in log.partition("heterodyne: rank 1")[0], "the traceback comes first"
    assert "has had an error that the others have not: validate() raised RuntimeError: an error of rank 1" in said


def test_a_rank_that_goes_on_alone_after_an_error_ends_all_before_messages_mix(
    ended: dict[str, tuple[int, str, str]],
) -> None:
    status, said, log = ended["goes on"]
    assert status == 1, said + log
    assert "preamble" not in said + log, "gloo took a message for another one"
    assert "has had an error that the others have not: step() raised DataError: the batch has 3 samples" in said + log


def test_ranks_that_all_catch_an_error_go_on(ended: dict[str, tuple[int, str, str]]) -> None:
    status, said, log = ended["all catch"]
    assert status == 0, said + log
    assert "the end" in said


def test_ranks_that_catch_an_error_of_a_trainer_meet_again_in_another(ended: dict[str, tuple[int, str, str]]) -> None:
    status, said, log = ended["begins again"]
    assert status == 0, said + log
    assert "the end" in said + log
