"""What no devices could hold is refused before anything is measured, and one device is measured for a part of the time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from heterodyne.api.before_measuring import measuring_s, require_room
from heterodyne.errors import InfeasibleError
from heterodyne.job import OptimizerSection, ParallelismSection
from heterodyne.plan.capabilities import Capabilities
from pure.build import cluster, graph

MODEL = graph(6)
WEIGHTS = MODEL.parameter_bytes
ADAMW, SGD = OptimizerSection(name="adamw"), OptimizerSection(name="sgd", momentum=0.0)
ANY, DATA = ParallelismSection(), ParallelismSection(strategy="data")


@pytest.mark.tour("api/")
def test_weights_gradients_and_states_have_to_fit_into_all_devices_together() -> None:
    """In whatever parts: four times the weights with AdamW, twice with plain SGD, on one device where the strategy says so."""
    require_room(Capabilities(MODEL), cluster(2, memory=2 * WEIGHTS), optimizer=ADAMW, parallelism=ANY)
    require_room(Capabilities(MODEL), cluster(1, memory=2 * WEIGHTS), optimizer=SGD, parallelism=DATA)
    for devices, memory, parallelism in ((2, 2 * WEIGHTS - 1, ANY), (2, 2 * WEIGHTS, DATA)):
        with pytest.raises(InfeasibleError, match=r"nothing is measured.*gradients.*adamw") as refused:
            require_room(Capabilities(MODEL), cluster(devices, memory=memory), optimizer=ADAMW, parallelism=parallelism)
        assert "--cluster fleet.yaml --on-paper" in str(refused.value)
        assert set(refused.value.shortfalls) == {device.id for device in cluster(devices).devices}


def test_a_model_that_no_plan_may_cut_has_to_fit_into_one_device() -> None:
    for able in (Capabilities(replace(MODEL, opaque="data decides the flow")), Capabilities(MODEL, "model")):
        with pytest.raises(InfeasibleError, match="the largest of 2 devices"):
            require_room(able, cluster(2, memory=2 * WEIGHTS), optimizer=ADAMW, parallelism=ANY)


def test_one_device_has_no_shares_to_balance() -> None:
    assert measuring_s(2, 60.0) == 60.0
    assert 0 < measuring_s(1, 60.0) <= 20.0
