"""One node of a job that is started over ssh: this process stands for it here, and ends it when it is ended.

    python -m heterodyne.submit.remote HOST COMMAND

The secret of the run goes over the connection, not into a command line, which other users could read. When the connection ends, for
whatever reason, so does the command.
"""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from types import FrameType

from heterodyne.secret_names import SECRET_VARIABLE

__all__ = ["node_command", "started"]

_UNREACHABLE = 255  # what ssh returns for itself


def node_command(host: str, command: str) -> tuple[str, ...]:
    """Return what runs a command of the shell on a host."""
    return (sys.executable, "-m", "heterodyne.submit.remote", host, command)


def _wrapped(command: str) -> str:
    """Return a script that reads the secret, runs the command, and ends it when its standard input ends."""
    return (
        f"read -r {SECRET_VARIABLE}; export {SECRET_VARIABLE}; exec 3<&0\n"
        f"{{ {command}\n}} </dev/null 3<&- & program=$!\n"
        "{ cat <&3; kill -TERM $program; } >/dev/null 2>&1 & watch=$!\n"
        "wait $program; status=$?\n"
        "kill $watch 2>/dev/null\n"
        "exit $status\n"
    )


def started(
    command: str, secret: str, *, over: Sequence[str] = (), output: int | None = None
) -> subprocess.Popen[bytes]:
    """Start a command of the shell with the secret of the run. It ends when its standard input is closed, or whoever holds that is gone.

    ``over``: what carries it to another host; ``output``: where what it writes goes, as for `subprocess.Popen`.
    """
    script = ["bash", "-c", _wrapped(command)]
    process = subprocess.Popen(
        [*over, shlex.join(script)] if over else script,
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=None if output is None else subprocess.STDOUT,
    )
    assert process.stdin is not None
    try:
        process.stdin.write(f"{secret}\n".encode())
        process.stdin.flush()
    except BrokenPipeError:  # it has ended already
        pass
    return process


def main() -> int:
    """Run the command and return its exit status."""
    host, command = sys.argv[1:]
    here = host in ("localhost", socket.gethostname())
    over = () if here else ("ssh", "-o", "BatchMode=yes", host)
    process = started(command, os.environ.get(SECRET_VARIABLE, ""), over=over)
    stdin = process.stdin
    assert stdin is not None

    def end(number: int, frame: FrameType | None) -> None:
        del number, frame
        stdin.close()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    status = process.wait()
    if status == _UNREACHABLE and not here:
        sys.stderr.write(f"heterodyne: ssh cannot run anything on {host}: try 'ssh {host} true' without a password\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
