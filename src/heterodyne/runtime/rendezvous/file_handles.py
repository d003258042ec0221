"""How many files and connections a worker may have open: looked at before it joins the others, while there are enough left to say so."""

from __future__ import annotations

import resource
from collections.abc import Callable

from heterodyne.errors import WorkerError

__all__ = ["TOO_MANY_OPEN", "require_file_handles"]

# The most that any rank has open while it captures and measures: rank 0, which keeps the store, 46, 65 and 82 among 2, 4 and 6. A plan
# adds connections between those that exchange something: 90 were seen with three stages on 3 ranks.
_OF_A_WORKER = 28
_PER_RANK = 9
_OF_A_PLAN = 3

TOO_MANY_OPEN = (
    "raise the limit of open files ('ulimit -n 4096' in the shell that starts the run; LimitNOFILE= of a service, --ulimit nofile= of a "
    "container)"
)


def require_file_handles(world_size: int, say: Callable[[str], None]) -> None:
    """Raise this process's own limit, as far as it may, to what a worker among so many needs under any plan; ``say`` takes a line if it
    may be too few. Raises WorkerError if they do not suffice to begin.
    """
    needed = _OF_A_WORKER + _PER_RANK * world_size
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    if hard != unlimited and hard < needed:
        raise WorkerError(
            f"a process may have {hard} files open here, and each of {world_size} workers needs about {needed}, most of them "
            f"connections to the others: {TOO_MANY_OPEN}"
        )
    enough = _OF_A_PLAN * needed
    if soft != unlimited and soft < enough:
        resource.setrlimit(resource.RLIMIT_NOFILE, (enough if hard == unlimited else min(enough, hard), hard))
    if (
        hard != unlimited and hard < enough
    ):  # gloo does not raise an error where it runs out of them, it aborts the process
        say(
            f"heterodyne: a process may have {hard} files open here, and a worker of {world_size} may need {enough} under a plan that cuts "
            f"the model: if it ends with 'Too many open files', {TOO_MANY_OPEN}"
        )
