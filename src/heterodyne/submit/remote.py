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
from types import FrameType

from heterodyne.secret_names import SECRET_VARIABLE

__all__ = ["node_command"]

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


def main() -> int:
    """Run the command and return its exit status."""
    host, command = sys.argv[1:]
    script = ["bash", "-c", _wrapped(command)]
    here = host in ("localhost", socket.gethostname())
    process = subprocess.Popen(
        script if here else ["ssh", "-o", "BatchMode=yes", host, shlex.join(script)], stdin=subprocess.PIPE
    )
    assert process.stdin is not None
    stdin = process.stdin

    def end(number: int, frame: FrameType | None) -> None:
        del number, frame
        stdin.close()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    try:
        stdin.write(f"{os.environ.get(SECRET_VARIABLE, '')}\n".encode())
        stdin.flush()
    except (BrokenPipeError, ValueError):  # it has ended already
        pass
    status = process.wait()
    if status == _UNREACHABLE and not here:
        sys.stderr.write(f"heterodyne: ssh cannot run anything on {host}: try 'ssh {host} true' without a password\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
