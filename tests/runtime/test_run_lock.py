from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from heterodyne.errors import HeterodyneError
from heterodyne.runtime.records.run_lock import occupied

HOLD = """
import sys, time
from collections.abc import Iterator
from pathlib import Path
from heterodyne.runtime.records.run_lock import occupied
with occupied(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the directory."""
    with subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_second_run_is_refused_by_name(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    with (
        pytest.raises(HeterodyneError, match=f"another run is at work in {tmp_path}: .* choose another --out"),
        occupied(tmp_path, option="--out", patience_s=0),
    ):
        pytest.fail("both hold it")


def test_the_hold_ends_with_the_process_and_leaves_no_file(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    holder.kill()
    with occupied(tmp_path):
        assert list(tmp_path.iterdir()) == []
    with occupied(tmp_path, patience_s=0):
        pass
