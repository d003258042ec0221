"""Jobs on several hosts, from one cluster file: started over ssh, or written for a scheduler. One process for each device.

groups       nodes of a cluster that are alike and follow each other
slurm        a batch script, with a component for each group
remote       one node over ssh
kubernetes   a JobSet, and a TrainJob with its runtime, with a replicated job for each group
"""

from heterodyne.submit.groups import Launch
from heterodyne.submit.kubernetes import jobset, trainjob
from heterodyne.submit.slurm import slurm

__all__ = ["SCHEDULERS", "Launch"]

SCHEDULERS = {"slurm": slurm, "jobset": jobset, "trainjob": trainjob}
"""What writes the text for each."""
