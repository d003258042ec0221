"""Two workers of this machine under no launcher, as torchrun would start them: the script runs once more as each of them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

__all__ = ["two_workers"]


def two_workers(script: str, *arguments: str, folder: str) -> list[str]:
    """Return what each worker wrote to stdout, in order of rank. ``folder``: for what they keep. Ends this process if one fails."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {
        **os.environ,
        "XDG_CACHE_HOME": folder,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
    }
    workers = [
        subprocess.Popen(
            [sys.executable, script, *arguments],
            env={**common, "RANK": rank, "LOCAL_RANK": rank},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for rank in ("0", "1")
    ]
    said = [each.communicate()[0] for each in workers]
    if any(each.returncode for each in workers):
        command = " ".join((script, *arguments))
        raise SystemExit(f"a worker failed: run 'torchrun --nproc-per-node 2 {command}' to see why")
    return said
