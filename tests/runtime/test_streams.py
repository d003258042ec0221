"""Commands with standard streams that are closed, full or of another encoding."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import sys
from pathlib import Path
from heterodyne.cli.streams import prepare_streams
prepare_streams()
with Path(sys.argv[1]).open("w") as file:
    print("\\u00b1 out", flush=True)
    sys.stderr.write("\\u00d7 err\\n")
    sys.stderr.flush()
    assert file.fileno() > 2
    file.write("done")
"""


@pytest.mark.parametrize("redirection", ["", ">&-", "2>&-", "<&- >&- 2>&-", "2>/dev/full", "2>&1 | true"])
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_nothing_that_is_wrong_with_them_ends_a_command(tmp_path: object, redirection: str, encoding: str) -> None:
    place = f"{tmp_path}/written"
    done = subprocess.run(
        ["/bin/sh", "-c", f'"$0" -c "$1" "$2" {redirection}', sys.executable, PROGRAM, place],
        env={"PATH": "/usr/bin:/bin", "PYTHONIOENCODING": encoding, "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        stdin=subprocess.DEVNULL,
        timeout=60,
        check=False,
    )
    assert b"Traceback" not in done.stderr
    if "|" not in redirection:  # there it is true's
        assert done.returncode == 0, done.stderr
        with open(place, encoding="utf-8") as file:  # noqa: PTH123
            assert file.read() == "done"
