"""What the workers of an emulated host have to themselves: its name, its shared memory, and a folder as on a disk of its own.

A process for each host holds its namespaces and waits, and the workers enter these. It reads from a pipe of ours, so it ends when we do,
whatever ends us, and with the last process in them the kernel removes namespaces and mounts.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from heterodyne.errors import EmulateError

__all__ = ["HostSpace", "host_spaces", "why_not", "written_by"]

_TOOLS = ("unshare", "nsenter", "mount", "hostname")
_READY = "ready"
# name, folder, what the host writes, the work directory of overlayfs. Where overlayfs does not mount (or would read a ':' in a name as the
# border between two), the host has a copy from the start, which is whole or not there.
_HOLD = f"""set -e
hostname "$1"
mount -t tmpfs tmpfs /dev/shm
layered() {{
    case "$2$3$4" in *:* | *,* | *\\\\*) return 1 ;; esac
    mount -t overlay -o "lowerdir=$2,upperdir=$3,workdir=$4" overlay "$2" 2>/dev/null
}}
if [ -n "$2" ] && ! layered "$@"; then
    if [ -z "$(ls -A "$3")" ]; then
        cp -a --reflink=auto "$2/." "$4/copy" || {{ rm -rf "$4/copy"; exit 1; }}
        rmdir "$3"
        mv "$4/copy" "$3"
    fi
    mount --bind "$3" "$2"
fi
echo {_READY}
exec cat
"""


@dataclass(frozen=True, kw_only=True)
class HostSpace:
    """The namespaces of one host, by the process that holds them."""

    pid: int

    def enter(self, command: Sequence[str]) -> tuple[str, ...]:
        """The command that enters them and becomes `command`, under the same process number, in the directory that it is started in."""
        inside = ("sh", "-c", 'cd "$0" && exec "$@"', str(Path.cwd()), *command)
        return ("nsenter", f"--target={self.pid}", "--mount", "--uts", "--ipc", *inside)


def why_not() -> str | None:
    """Return why hosts cannot have namespaces here; None if they can, given root."""
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    return f"{' and '.join(missing)} not found: install util-linux" if missing else None


def written_by(folder: Path, host: int) -> Path:
    """Return where what a host writes into its own copy of a folder is kept, beside the folder."""
    return folder.with_name(f"{folder.name}.hosts") / f"host-{host}"


@contextmanager
def host_spaces(hosts: int, folder: Path | None = None) -> Iterator[tuple[HostSpace, ...]]:
    """Namespaces for so many hosts: each has a name (``host-N``), System V and POSIX shared memory of its own, and a copy of ``folder``.

    What a host had written into its copy before is there again.

    Raises:
        EmulateError: the kernel or the tools do not do it.
    """
    with ExitStack() as stack:
        yield tuple(stack.enter_context(_held(host, folder)) for host in range(hosts))


@contextmanager
def _held(host: int, folder: Path | None) -> Iterator[HostSpace]:
    own, work = ("", "") if folder is None else _places(folder, host)
    process = subprocess.Popen(
        ["unshare", "--mount", "--uts", "--ipc", "sh", "-c", _HOLD, "sh", f"host-{host}", str(folder or ""), own, work],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # Ctrl-C is for the workers
    )
    try:
        assert process.stdout is not None
        said = [process.stdout.readline().strip()]
        if said != [_READY]:
            process.kill()
            said += process.stdout.read().splitlines()
            raise EmulateError(f"host-{host} cannot be given namespaces and mounts of its own: {' '.join(said)}")
        yield HostSpace(pid=process.pid)
    finally:
        process.kill()
        process.communicate()
        if work:
            shutil.rmtree(work, ignore_errors=True)


def _places(folder: Path, host: int) -> tuple[str, str]:
    """Make the folder that a host writes to, and the one that overlayfs needs beside it."""
    own = written_by(folder, host)
    work = own.with_name(f".{own.name}")
    try:
        for path in (own, work):
            path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EmulateError(
            f"{error.filename} cannot be made ({error.strerror}): it would hold what a host writes"
        ) from error
    return str(own), str(work)
