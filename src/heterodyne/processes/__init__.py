"""Worker processes on one machine: started with the environment of `torchrun`, watched, and ended to the last one."""

from heterodyne.processes.launch import WorkerSpec, launch_workers
from heterodyne.processes.status import GAVE_UP_ON_A_PEER, describe_exit

__all__ = ["GAVE_UP_ON_A_PEER", "WorkerSpec", "describe_exit", "launch_workers"]
