"""Where the wings are wired: what capture, measure, search and runtime need of each other is handed over here, and nowhere else.

session      one rank among the others: the communicator, the cluster, the device
preparation  model -> graph -> profile -> plan -> program, the same on every rank
distribute   for one's own training loop
train, verify, measure, plan, simulate   for job files: the verbs of the command line
workers      starts one process a device where nobody else did
"""

from heterodyne.api.distributed import Distributed, distribute
from heterodyne.api.measure import measure_job
from heterodyne.api.plan import plan_job
from heterodyne.api.session import Session, open_session
from heterodyne.api.simulate import Simulated, simulate_job
from heterodyne.api.train import train_job
from heterodyne.api.verify import verify_job
from heterodyne.api.workers import on_every_device
from heterodyne.frontend import capture

__all__ = [
    "Distributed",
    "Session",
    "Simulated",
    "capture",
    "distribute",
    "measure_job",
    "on_every_device",
    "open_session",
    "plan_job",
    "simulate_job",
    "train_job",
    "verify_job",
]
