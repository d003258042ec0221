"""How many files and connections a worker may have open: looked at before it meets the others, while there are enough left to say so."""

from __future__ import annotations

import resource

from heterodyne.errors import WorkerError

__all__ = ["TOO_MANY_OPEN", "require_file_handles"]

# Most are those of rank 0, which keeps the store: 46, 65 and 82 were seen for 2, 4 and 6 ranks.
_OF_A_WORKER = 28
_PER_RANK = 9

TOO_MANY_OPEN = (
    "raise the limit of open files ('ulimit -n 4096' in the shell that starts the run; LimitNOFILE= of a service, --ulimit nofile= of a "
    "container)"
)


def require_file_handles(world_size: int) -> None:
    """Raise this process's own limit to what a worker among so many needs. Raises WorkerError if it is not allowed to."""
    needed = _OF_A_WORKER + _PER_RANK * world_size
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise WorkerError(
            f"a process may have {hard} files open here, and each of {world_size} workers needs about {needed}, most of them "
            f"connections to the others: {TOO_MANY_OPEN}"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed if hard == resource.RLIM_INFINITY else hard, hard))
