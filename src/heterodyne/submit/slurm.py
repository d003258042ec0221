"""A batch script of Slurm: a component of a heterogeneous job for each group of nodes (``#SBATCH hetjob``)."""

from __future__ import annotations

from heterodyne.cluster import Cluster
from heterodyne.secret_names import SECRET_VARIABLE
from heterodyne.submit.groups import Group, Launch, groups_of, torchrun

__all__ = ["slurm"]


def slurm(cluster: Cluster, launch: Launch) -> str:
    """Return the script, for ``sbatch``. Its processes end together: as soon as a group has ended, well or not."""
    groups = groups_of(cluster)
    several = len(groups) > 1
    nodes = "SLURM_JOB_NODELIST_HET_GROUP_0" if several else "SLURM_JOB_NODELIST"
    steps = []
    for number, group in enumerate(groups):
        command = torchrun(group, groups, launch, node="SLURM_NODEID", master="$MASTER")
        component = f"--het-group={number} " if several else ""
        quoted = command.replace("'", "'\\''")
        steps.append(f"srun {component}--ntasks-per-node=1 --kill-on-bad-exit=1 bash -c '{quoted}' &")
    return "\n".join(
        [
            "#!/bin/bash",
            *"\n#SBATCH hetjob\n".join(_component(group, launch) for group in groups).splitlines(),
            "# GPUs are named as most sites do in gres.conf; partition and account are yours to add.",
            "",
            f'export MASTER=$(scontrol show hostnames "${nodes}" | head -n 1)',
            f"export {SECRET_VARIABLE}=$(openssl rand -hex 32)",
            *steps,
            f"for group in {' '.join(group.name for group in groups)}; do",
            "    wait -n || { status=$?; kill $(jobs -p); exit $status; }",
            "done",
            "",
        ]
    )


def _component(group: Group, launch: Launch) -> str:
    lines = [f"--job-name={launch.name}", f"--nodes={group.nodes}", "--ntasks-per-node=1"]
    gpus = [f"{kind.lower().partition('-')[0]}:{count}" for kind, count in group.devices.items() if kind != "cpu"]
    lines += [f"--gpus-per-node={','.join(gpus)}"] if gpus else [f"--cpus-per-task={group.processes}"]
    if launch.hours is not None:
        minutes = round(60 * launch.hours)
        lines.append(f"--time={minutes // 60}:{minutes % 60:02}:00")
    return "\n".join(f"#SBATCH {line}" for line in lines)
