"""Jobs on several hosts, from one cluster file: started over ssh or by Ray, or written for a scheduler. One process for each device.

groups       nodes of a cluster that are alike and follow each other
slurm        a batch script, with a component for each group
remote       one node over ssh
kubernetes   a JobSet, a TrainJob with its runtime, and a RayCluster, with a part for each group
ray          bundles of unlike resources on a cluster of Ray
"""

from heterodyne.submit.groups import Launch
from heterodyne.submit.kubernetes import jobset, raycluster, trainjob
from heterodyne.submit.slurm import slurm

__all__ = ["SCHEDULERS", "Launch"]

SCHEDULERS = {"slurm": slurm, "jobset": jobset, "trainjob": trainjob, "raycluster": raycluster}
"""What writes the text for each."""
