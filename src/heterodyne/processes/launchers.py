"""Programs that start workers themselves, and so cannot be what each worker runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath

from heterodyne.errors import WorkerError

__all__ = ["require_no_launcher"]

_LAUNCHERS = frozenset(
    {"torchrun", "torch.distributed.run", "torch.distributed.launch", "accelerate", "accelerate.commands.launch"}
    | {"deepspeed", "mpirun", "mpiexec", "srun"}
)


def require_no_launcher(command: Sequence[str], starts: str) -> None:
    """Raise WorkerError for a command that starts workers itself: each of ours would start as many. ``starts``: what does that already."""
    launcher = PurePath(command[0]).name if command else ""
    if launcher.startswith("python") and list(command[1:2]) == ["-m"] and len(command) > 2:
        launcher = command[2]
    if launcher in _LAUNCHERS:
        raise WorkerError(
            f"'{launcher}' starts workers itself, and so does {starts}: write the program alone behind --, for example: -- python train.py"
        )
