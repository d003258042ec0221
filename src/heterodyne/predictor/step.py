"""A step of a setup: its seconds (pipeline, exposed gradient exchange, optimizer), and the bytes of the fullest device."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from heterodyne.cluster.catalog import Accelerator
from heterodyne.plan.schedules import SCHEDULES
from heterodyne.plan.schedules.makespans import Makespans
from heterodyne.plan.schedules.times import StageTimes, blocked
from heterodyne.predictor.constants import Constants, constants
from heterodyne.predictor.devices import chip_of
from heterodyne.predictor.footprint import Footprint, footprint
from heterodyne.predictor.network import Network
from heterodyne.predictor.overlap import exposed_s, returned_s
from heterodyne.predictor.passes import Passes
from heterodyne.predictor.roofline import Chip
from heterodyne.predictor.setup import Setup
from heterodyne.predictor.transformer import Transformer

__all__ = ["Prediction", "StepTime", "predicted", "step_time"]


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds.

    Args:
        computing_s: forward and backward of all micro-batches on the busiest device, what they exchange counted; ``bubble_s``: what
            the pipeline takes longer than that.
        exposed_s: gradients and updated parameters on their way while nothing is computed.
    """

    computing_s: float
    bubble_s: float
    exposed_s: float
    optimizer_s: float

    @property
    def step_s(self) -> float:
        return self.computing_s + self.bubble_s + self.exposed_s + self.optimizer_s


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Seconds of a step, bytes of the fullest device."""

    time: StepTime
    memory: Footprint

    @property
    def step_s(self) -> float:
        return self.time.step_s


def predicted(
    model: Transformer, setup: Setup, device: Accelerator, network: Network, known: Constants | None = None
) -> Prediction:
    """Raises ClusterError where the datasheet of the device lacks what is needed."""
    chip = chip_of(device, setup.precision, setup.software, known)
    return Prediction(time=step_time(model, setup, chip, network, known), memory=footprint(model, setup))


def step_time(
    model: Transformer, setup: Setup, chip: Chip, network: Network, known: Constants | None = None
) -> StepTime:
    """One step of training, on as many devices as the setup has. Raises ValueError for a schedule that there is not."""
    passes = Passes(model=model, setup=setup, chip=chip, network=network, known=known or constants())
    computing, pipeline = _pipeline(passes)
    software = setup.software
    parts = (setup.shards or setup.replicas) if setup.zero else 1
    return StepTime(
        computing_s=computing,
        bubble_s=pipeline - computing,
        exposed_s=_exposed_s(passes),
        optimizer_s=passes.parameters * software.optimizer_bytes / parts / chip.memory_bytes_per_s,
    )


def _pipeline(passes: Passes) -> tuple[float, float]:
    """Seconds of the busiest device, and of the whole."""
    model, s = passes.model, passes.setup
    (forward, backward), head = passes.layer, passes.head
    if s.pp == 1:
        one = s.micro_batches * (model.layers * (forward + backward) + sum(head) + passes.added_s)
        return one, one
    layers = s.layers_of_stages(model.layers)
    last, times = len(layers) - 1, []
    for stage, count in enumerate(layers):
        f = count * forward + (head[0] if stage == last else 0.0)
        b = count * backward + (head[1] if stage == last else 0.0) + passes.added_s / s.vpp
        times.append(StageTimes.halved(forward_s=f, backward_s=b))
    schedule = s.schedule if s.vpp == 1 else "Interleaved1F1B"
    if schedule not in SCHEDULES:
        raise ValueError(f"there is no schedule {schedule!r}; there are {', '.join(SCHEDULES)}")
    lag = passes.send_s
    if not s.software.overlap_sends:
        times, lag = list(blocked(times, [lag] * last)), 0.0
    busiest = max(sum(t.total_s for t in times[place :: s.pp]) for place in range(s.pp))
    return s.micro_batches * busiest, _makespans(tuple(times), lag, schedule, s.vpp).seconds(s.micro_batches)


@lru_cache(maxsize=4096)
def _makespans(times: tuple[StageTimes, ...], lag_s: float, schedule: str, chunks: int) -> Makespans:
    return Makespans(times, [lag_s] * (len(times) - 1), schedule, chunks)


def _exposed_s(passes: Passes) -> float:
    """Gradients over the replicas; updated parameters back, where states are sharded."""
    s, software = passes.setup, passes.setup.software
    if s.gathers_each_pass:
        return 0.0
    gradient = 4 if s.element_bytes == 4 else software.gradient_bytes
    whole = not s.zero or bool(s.shards)
    there = passes.over_replicas_s(passes.held, gradient, Network.all_reduce_s if whole else Network.gather_s)
    if s.zero == 2 and not software.overlap_gradients:
        there = 0.0  # of every micro-batch, in its backward
    back = _returned_s(passes) if s.zero else 0.0
    if not software.overlap_gradients:
        return there + back
    last_backward = passes.model.layers / s.pp * passes.layer[1]
    stated = passes.known.stated
    return exposed_s(there, last_backward, stated) + returned_s(back, stated)


def _returned_s(passes: Passes) -> float:
    """Of updated parameters, from those that hold their states to all replicas."""
    s, net = passes.setup, passes.network
    collective = Network.broadcasts_s if s.software.broadcasts else Network.gather_s
    if s.shards:
        return collective(net, net.group(s.shards, s.tp), passes.parameters * s.element_bytes)
    return passes.over_replicas_s(passes.held, s.element_bytes, collective)
