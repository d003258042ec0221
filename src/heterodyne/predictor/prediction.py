"""Everything together: how long a step of a setup takes on a kind of device, and what it needs."""

from __future__ import annotations

from dataclasses import dataclass

from heterodyne.cluster.catalog import Accelerator
from heterodyne.predictor.constants import Constants
from heterodyne.predictor.devices import chip_of
from heterodyne.predictor.footprint import Footprint, footprint
from heterodyne.predictor.network import Network
from heterodyne.predictor.setup import Setup
from heterodyne.predictor.step import StepTime, step_time
from heterodyne.predictor.transformer import Transformer

__all__ = ["Prediction", "predicted"]


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """``flops``: of the model, in a step, on all devices, without what is computed again."""

    time: StepTime
    memory: Footprint
    tokens_per_s: float
    flops: float

    @property
    def step_s(self) -> float:
        return self.time.step_s


def predicted(
    model: Transformer, setup: Setup, device: Accelerator, network: Network, known: Constants | None = None
) -> Prediction:
    """Raises ClusterError where the datasheet of the device lacks what is needed."""
    time = step_time(model, setup, chip_of(device, setup.precision, setup.software, known), network, known)
    tokens = setup.global_batch * model.seq
    return Prediction(
        time=time,
        memory=footprint(model, setup),
        tokens_per_s=tokens / time.step_s,
        flops=3 * model.forward_flops_a_token() * tokens,
    )
