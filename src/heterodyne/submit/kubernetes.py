"""What Kubernetes takes: a JobSet, or a TrainJob of Kubeflow with a runtime of its own, with a replicated job for each group of nodes; or a
RayCluster of KubeRay, with a group of workers for each.
"""

from __future__ import annotations

import json
import shlex
from typing import Any

import yaml

from heterodyne.cluster import Cluster
from heterodyne.cluster.catalog import find
from heterodyne.errors import ClusterError
from heterodyne.secret_names import SECRET_VARIABLE
from heterodyne.submit.groups import Group, Launch, bundle_of, groups_of, torchrun

__all__ = ["jobset", "raycluster", "trainjob"]

_RESOURCES = {"nvidia": "nvidia.com/gpu", "amd": "amd.com/gpu"}
_PRODUCT = {
    "nvidia": "nvidia.com/gpu.product",
    "amd": "amd.com/gpu.product-name",
}  # labels that the makers' operators set
_TRAINER = "trainer.kubeflow.org"


def jobset(cluster: Cluster, launch: Launch) -> str:
    """Return a JobSet, for ``kubectl create -f``. Raises ClusterError."""
    made = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": launch.name},
        "spec": _spec(cluster, launch, {}),
    }
    return _text(launch, made)


def trainjob(cluster: Cluster, launch: Launch) -> str:
    """Return a TrainJob and its TrainingRuntime, since one `numNodes` of a TrainJob is for nodes that are alike. Raises ClusterError."""
    runtime = f"{launch.name}-runtime"
    made = {
        "apiVersion": f"{_TRAINER}/v1alpha1",
        "kind": "TrainingRuntime",
        "metadata": {"name": runtime},
        "spec": {"template": {"spec": _spec(cluster, launch, {f"{_TRAINER}/trainjob-ancestor-step": "trainer"})}},
    }
    job = {
        "apiVersion": f"{_TRAINER}/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": launch.name},
        "spec": {"runtimeRef": {"apiGroup": _TRAINER, "kind": "TrainingRuntime", "name": runtime}},
    }
    return _text(launch, made, job)


def raycluster(cluster: Cluster, launch: Launch) -> str:
    """Return a RayCluster whose nodes have the resources that `launch_on_ray` asks for. Raises ClusterError."""
    if launch.hours is not None:
        raise ClusterError("a RayCluster stays until it is deleted, also after the job: leave --hours out")
    groups = groups_of(cluster)
    head = {"rayStartParams": {"num-cpus": "0"}, "template": {"spec": _pod(launch, "ray-head", {})}}
    made = {
        "apiVersion": "ray.io/v1",
        "kind": "RayCluster",
        "metadata": {"name": launch.name},
        "spec": {"headGroupSpec": head, "workerGroupSpecs": [_workers(group, launch) for group in groups]},
    }
    words = shlex.join(["heterodyne", "launch", "CLUSTER.yaml", "--ray", "--", *launch.command])
    job = f"ray job submit --address http://{launch.name}-head-svc:8265 -- {words}"
    return f"# When it is up, from a pod, with the cluster file in the image: {job}\n" + _dumped(made)


def _workers(group: Group, launch: Launch) -> dict[str, Any]:
    bundle = {name: round(count) for name, count in bundle_of(group).items()}
    start = {"num-cpus": str(bundle.pop("CPU"))} if "CPU" in bundle else {}
    start |= {"num-gpus": str(bundle.pop("GPU"))} if "GPU" in bundle else {}
    start |= {"resources": shlex.quote(json.dumps(bundle))} if bundle else {}
    return {
        "groupName": group.name,
        "replicas": group.nodes,
        "minReplicas": group.nodes,
        "maxReplicas": group.nodes,
        "rayStartParams": start,
        "template": {"spec": _pod(launch, "ray-worker", _limits(group)) | _selected(group)},
    }


def _text(launch: Launch, *documents: dict[str, Any]) -> str:
    secret = f"kubectl create secret generic {launch.name}-secret --from-literal=secret=$(openssl rand -hex 32)"
    return f"# Once, before the first start: {secret}\n" + _dumped(*documents)


def _dumped(*documents: dict[str, Any]) -> str:
    return yaml.safe_dump_all(documents, sort_keys=False, width=1000)


def _spec(cluster: Cluster, launch: Launch, labels: dict[str, str]) -> dict[str, Any]:
    """Return the spec of a JobSet. ``labels``: of the job with the first node."""
    groups = groups_of(cluster)
    spec: dict[str, Any] = {
        "failurePolicy": {"maxRestarts": 3},  # all of them: a run goes on from its newest checkpoint
        "replicatedJobs": [
            _replicated(group, groups, launch, labels if group is groups[0] else {}) for group in groups
        ],
    }
    return spec


def _replicated(group: Group, groups: list[Group], launch: Launch, labels: dict[str, str]) -> dict[str, Any]:
    master = f"{launch.name}-{groups[0].name}-0-0.{launch.name}"
    command = torchrun(group, groups, launch, node="JOB_COMPLETION_INDEX", master=master)
    secret = {"secretKeyRef": {"name": f"{launch.name}-secret", "key": "secret"}}
    pod = _pod(launch, "node", _limits(group)) | _selected(group) | {"restartPolicy": "Never"}
    pod["containers"][0] |= {
        "command": ["bash", "-c", command],
        "env": [{"name": SECRET_VARIABLE, "valueFrom": secret}],
    }
    job: dict[str, Any] = {
        "backoffLimit": 0,
        "completionMode": "Indexed",
        "completions": group.nodes,
        "parallelism": group.nodes,
        "template": {"spec": pod},
    }
    if launch.hours is not None:
        job["activeDeadlineSeconds"] = round(3600 * launch.hours)
    metadata = {"metadata": {"labels": labels}} if labels else {}
    return {"name": group.name, "replicas": 1, "template": {**metadata, "spec": job}}


def _pod(launch: Launch, container: str, limits: dict[str, int]) -> dict[str, Any]:
    """Return the spec of a pod with one container and shared memory. Raises ClusterError."""
    if not launch.image:
        raise ClusterError("pods need an image with torch, heterodyne and your code: give --image")
    return {
        "containers": [
            {
                "name": container,
                "image": launch.image,
                "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
                **({"resources": {"limits": limits}} if limits else {}),
            }
        ],
        "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}],
    }


def _limits(group: Group) -> dict[str, int]:
    unknown = [kind for kind in group.devices if kind != "cpu" and (a := find(kind)) and a.maker not in _RESOURCES]
    if unknown or "" in group.resources():
        names = ", ".join(unknown or group.devices)
        raise ClusterError(
            f"no name of a Kubernetes resource is known for {names}: write the spec for a kind of NVIDIA or AMD, and change it there"
        )
    return {_RESOURCES[maker]: count for maker, count in group.resources().items()}


def _selected(group: Group) -> dict[str, Any]:
    """Return what chooses nodes with this kind of device; nothing where a node has several kinds, which no label names."""
    kinds = [accelerator for kind in group.devices if (accelerator := find(kind)) is not None]
    if len(kinds) != 1 or not kinds[0].aliases:
        return {}
    return {"nodeSelector": {_PRODUCT[kinds[0].maker]: kinds[0].aliases[0].replace(" ", "-")}}
