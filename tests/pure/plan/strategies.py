"""Random plans: general ones, which need not fit any model, and valid ones for the models of `pure.build`."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from heterodyne.cluster import Cluster
from heterodyne.graph import ModelGraph
from heterodyne.plan import Axis, Group, Layout, MicroBatches, Pipeline, Plan, Prediction, Region, Stage

NAMES = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), min_size=1, max_size=8)
SHARES = st.lists(st.integers(0, 9), min_size=1, max_size=3).map(tuple)
KINDS = st.sampled_from(["replicate", "split", "context"])
AXES = st.lists(st.builds(Axis, kind=KINDS, shares=SHARES), max_size=2).map(tuple)
LAYOUTS = st.builds(Layout, kind=KINDS, shares=SHARES, inner=AXES)
REGIONS = st.builds(Region, task_graph=NAMES, layout=LAYOUTS)
WHOLE = st.builds(Region, task_graph=st.just("*"), layout=LAYOUTS)
GROUPS = st.builds(Group, kind=NAMES, devices=st.integers(1, 99), node=NAMES, place=st.none() | st.integers(0, 9))


def _stage(**fields: Any) -> Stage:
    """Devices and ops are named once: by a group, and by blocks, where there are any."""
    named = {"devices": "group", "ops": "blocks"}
    return Stage(**{name: value for name, value in fields.items() if fields.get(named.get(name, "")) is None})


STAGES = st.builds(
    _stage,
    ops=st.tuples(st.integers(0, 99), st.integers(0, 99)),
    devices=st.lists(NAMES, max_size=3).map(tuple),
    blocks=st.none() | st.tuples(st.integers(0, 99), st.integers(0, 99)),
    group=st.none() | GROUPS,
    regions=st.tuples(WHOLE, st.lists(REGIONS, max_size=2)).map(lambda of: (of[0], *of[1])),
    recompute=st.lists(st.integers(0, 9), max_size=3).map(tuple),
    offload_activations=st.lists(st.integers(0, 9), max_size=3).map(tuple),
    keep=st.lists(NAMES, max_size=2).map(tuple),
    state_shares=st.none() | SHARES,
    overlap=st.booleans(),
    reload_ahead=st.none() | st.integers(0, 3),
    reshard_after_forward=st.booleans(),
)
MICRO_BATCHES = st.lists(st.integers(1, 9), max_size=6).map(lambda sizes: MicroBatches(tuple(sizes)))
PIPELINES = st.builds(
    Pipeline, micro_batches=MICRO_BATCHES, stages=st.lists(STAGES, max_size=4).map(tuple), replicas=st.integers(1, 9)
)
NUMBERS = st.floats(0, 1e6)
PREDICTIONS = st.builds(
    Prediction,
    step_s=NUMBERS,
    samples_per_s=NUMBERS,
    efficiency=NUMBERS,
    memory_bytes=st.dictionaries(NAMES, st.integers(0, 2**40), max_size=3),
)
GENERAL_PLANS = st.builds(
    Plan,
    model=NAMES,
    cluster=NAMES,
    global_batch_size=st.integers(1, 4096),
    precision=st.sampled_from(["fp32", "bf16"]),
    schedule=NAMES,
    bucket_bytes=st.integers(1, 2**30),
    pipelines=st.lists(PIPELINES, max_size=4).map(tuple),
    idle=st.lists(NAMES, max_size=3).map(tuple),
    predicted=st.none() | PREDICTIONS,
    reason=st.text(max_size=20),
)


def valid_plan(
    model: ModelGraph, machines: Cluster, micro_batches: list[MicroBatches | None], *, bucket_bytes: int = 600
) -> Plan:
    """One pipeline a device; None leaves the device idle."""
    ids = [device.id for device in machines.devices]
    stage = {"ops": (0, len(model.ops)), "regions": (Region(layout=Layout(shares=(1,))),)}
    return Plan(
        model=model.fingerprint,
        cluster=machines.fingerprint,
        global_batch_size=max(1, sum(m.samples for m in micro_batches if m is not None)),
        bucket_bytes=bucket_bytes,
        pipelines=tuple(
            Pipeline(micro_batches=m, stages=(Stage(devices=(device,), **stage),))
            for device, m in zip(ids, micro_batches, strict=True)
            if m is not None
        ),
        idle=tuple(device for device, m in zip(ids, micro_batches, strict=True) if m is None),
    )
