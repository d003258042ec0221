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
