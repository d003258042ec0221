"""Worker processes on one machine: started with the environment of `torchrun`, watched, and ended to the last one."""

from heterodyne.processes.launch import WorkerSpec, launch_workers, most_workers, to_standard_error
from heterodyne.processes.launchers import require_no_launcher
from heterodyne.processes.signals import stop_requests
from heterodyne.processes.status import (
    GAVE_UP_ON_A_PEER,
    OUT_OF_MEMORY,
    describe_exit,
    shell_status,
    worker_exit_status,
)

__all__ = [
    "GAVE_UP_ON_A_PEER",
    "OUT_OF_MEMORY",
    "WorkerSpec",
    "describe_exit",
    "launch_workers",
    "most_workers",
    "require_no_launcher",
    "shell_status",
    "stop_requests",
    "to_standard_error",
    "worker_exit_status",
]
