"""A whole measurement on one rank: what is kept, when it is believed, and when it is not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from heterodyne.cluster import Cluster, Device, Profile
from heterodyne.cluster.profile import PROFILE_VERSION
from heterodyne.errors import MeasureError
from heterodyne.measure import Cache, measure
from heterodyne.measure.confirm import Cores
from heterodyne.runtime.comm.communicator import Communicator
from measure.fake_device import FakeClock, FakeProgram
from measure.fake_model import graph_of, request_of

ONE = Cluster(name="box", devices=(Device(id="box/cpu:0", kind="cpu", node="box", memory_bytes=2**30),))


@pytest.fixture
def alone() -> Iterator[Communicator]:
    with Communicator(rank=0, world_size=1, device=torch.device("cpu")) as communicator:
        yield communicator


class Machine:
    """A request on a fake device, and everything that was said."""

    def __init__(self, alone: Communicator, cache: Cache | None) -> None:
        self.clock = FakeClock()
        self.programs = {kind: FakeProgram(self.clock, 0.01, 0.02) for kind in ("layer", "head", "*")}
        self.said: list[str] = []
        self.steps: list[tuple[str, int, int]] = []
        self.others_s = 0.0  # of a core, in a second of measuring
        self._alone, self._cache = alone, cache

    def measure(self, *, refresh: bool = False, **changes: object) -> Profile:
        # The optimizer runs on the real CPU, which the fake clock does not see: it is given nothing to do.
        graph = graph_of(("layer", "head"))
        frozen = tuple(replace(p, trainable=False) for p in graph.parameters)
        request = request_of(self.programs, **{"cluster": ONE, "graph": replace(graph, parameters=frozen), **changes})
        return measure(
            request,
            self._alone,
            cache=self._cache,
            refresh=refresh,
            say=self.said.append,
            progress=lambda *step: self.steps.append(step),
            clock=self.clock,
            now=self.clock.now,
            cores=self.cores,
        )

    def cores(self) -> Cores:
        """Of a host with two cores, of which one is ours."""
        own_s, others_s = self.clock.now(), self.others_s * self.clock.now()
        return Cores(worked_s=own_s + others_s, idle_s=own_s - others_s, own_s=own_s)


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(folder=tmp_path)


def only_path(cache: Cache) -> Path:
    (path,) = (cache.folder / "profiles").iterdir()
    return path


def test_blocks_and_the_whole_model_of_every_device(alone: Communicator) -> None:
    machine = Machine(alone, None)
    profile = machine.measure()
    device = profile.devices["box/cpu:0"]
    assert set(device.blocks) == {"layer", "head", "*"}
    assert [s.forward_s for s in device.blocks["layer"]] == pytest.approx([0.03, 0.05])
    assert profile.links == ()
    assert device.overlap == 0
    assert machine.steps == [
        ("layers.0 at 1 sample", 1, 6),
        ("heads.1 at 1 sample", 2, 6),
        ("the whole model at 1 sample", 3, 6),
        ("layers.0 at 2 samples", 4, 6),
        ("heads.1 at 2 samples", 5, 6),
        ("the whole model at 2 samples", 6, 6),
        ("the optimizer", 1, 1),
    ]


def test_a_kept_profile_is_confirmed_and_not_measured_again(alone: Communicator, cache: Cache) -> None:
    machine = Machine(alone, cache)
    first = machine.measure()
    runs = machine.clock.runs
    assert machine.measure() == first
    assert machine.clock.runs - runs < runs / 3
    assert machine.said == []


@pytest.mark.parametrize(("samples", "again"), [(None, True), (3_000, True), (500, False), (10, False)])
def test_a_profile_of_a_short_training_does_not_serve_a_much_longer_one(
    alone: Communicator, cache: Cache, samples: int | None, again: bool
) -> None:
    """What measuring is worth follows the training: a quarter of it, from 10 s to the budget."""
    machine = Machine(alone, cache)
    first = machine.measure(training_samples=300)
    assert 10.0 <= first.budget_s < 30.0, "of 60 s"
    found = machine.measure(training_samples=samples)
    assert (found == first) != again
    assert ["measuring again" in said for said in machine.said] == [True] * again


@pytest.mark.parametrize(("factor", "again"), [(1.1, False), (0.9, False), (1.3, True), (0.5, True)])
def test_a_device_of_the_same_name_and_another_speed_is_measured_again(
    alone: Communicator, cache: Cache, factor: float, again: bool
) -> None:
    machine = Machine(alone, cache)
    first = machine.measure()
    machine.clock.factor = factor
    second = machine.measure()
    assert (second != first) == again
    assert len(machine.said) == again
    if again:
        assert "no longer holds" in machine.said[0]
        assert "box/cpu:0: heads.1 takes" in machine.said[0]
        assert second.devices["box/cpu:0"].blocks["layer"][0].forward_s == pytest.approx(0.03 * factor)
        assert machine.measure() == second  # and it is the new one that is kept


def test_refresh_measures_without_looking(alone: Communicator, cache: Cache) -> None:
    machine = Machine(alone, cache)
    machine.measure()
    only_path(cache).write_text("nonsense")
    machine.measure(refresh=True)
    assert machine.said == []
    assert Profile.load(only_path(cache)).devices


def test_a_damaged_cache_is_said_and_replaced(alone: Communicator, cache: Cache) -> None:
    machine = Machine(alone, cache)
    first = machine.measure()
    only_path(cache).write_text(only_path(cache).read_text()[:100])
    second = machine.measure()
    assert second.key == first.key
    assert "measured again" in machine.said[0]
    assert Profile.load(only_path(cache)) == second


def test_a_profile_of_an_earlier_version_is_refused_and_measured_again_and_that_is_said_once(
    alone: Communicator, cache: Cache
) -> None:
    """It lacks what has come since: the names of the blocks, and what a process occupies before there is a model."""
    machine = Machine(alone, cache)
    first = machine.measure()
    path = only_path(cache)
    content = json.loads(path.read_text())
    assert content["version"] == PROFILE_VERSION
    old = {name: value for name, value in content.items() if name != "kinds"} | {"version": 1}
    for device in old["devices"].values():
        del device["context_bytes"]
    path.write_text(json.dumps(old))
    second = machine.measure()
    assert second.key == first.key
    assert second.kinds == {"layer": "layers.0", "head": "heads.1"}
    assert len(machine.said) == 1
    assert f"not a profile of version {PROFILE_VERSION}" in machine.said[0]
    assert Profile.load(path) == second


def test_a_block_that_now_fails_is_a_change_that_is_said(alone: Communicator, cache: Cache) -> None:
    """Nothing is known of why; measuring anew tells, here that the device is too small now."""
    machine = Machine(alone, cache)
    machine.measure()
    machine.programs["head"] = FakeProgram(machine.clock, 0.01, 0.02, most=0)
    with pytest.raises(MeasureError, match=r"box/cpu:0: heads.1 cannot be measured even at 1 sample"):
        machine.measure()
    assert machine.said == [
        "the kept profile no longer holds, measuring again: box/cpu:0: heads.1 fails now (OutOfMemoryError: no more)"
    ]


def test_a_cache_that_cannot_be_written_is_said_and_the_profile_is_there(alone: Communicator, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    machine = Machine(alone, Cache(folder=tmp_path / "file"))
    assert machine.measure().devices
    assert "cannot be kept" in machine.said[0]


def test_another_request_has_another_profile(alone: Communicator, cache: Cache) -> None:
    machine = Machine(alone, cache)
    assert machine.measure().key != machine.measure(micro_batch_sizes=(1, 2, 4)).key
    assert machine.said == []


def test_what_others_take_of_the_cores_is_said_and_kept(alone: Communicator, cache: Cache) -> None:
    machine = Machine(alone, cache)
    machine.others_s = 0.9
    first = machine.measure()
    said = "this machine is busy (45% of its cores are taken by others): the plan will be off"
    assert machine.said == [said]
    assert first.devices["box/cpu:0"].taken_by_others == pytest.approx(0.45)
    assert machine.measure() == first  # as it was measured
    assert machine.said == [said, said]


def test_measuring_takes_a_part_of_the_training(alone: Communicator) -> None:
    """A sample takes the fake blocks 0.18 s, at any size: forwards of 0.03 s at one, and backwards of twice that."""
    sizes = [1 << n for n in range(12)]
    largest = {}
    for samples in (None, 10**9, 1000):
        machine = Machine(alone, None)
        profile = machine.measure(micro_batch_sizes=sizes, training_samples=samples, budget_s=1e4)
        largest[samples] = max(profile.micro_batch_sizes)
    assert largest[None] == largest[10**9] == sizes[-1]
    assert largest[1000] < sizes[-1]


def test_what_a_device_left_out_is_said_with_its_name(alone: Communicator) -> None:
    machine = Machine(alone, None)
    machine.programs["*"] = FakeProgram(machine.clock, 0.01, 0.02, most=1)
    machine.measure()
    assert machine.said == ["box/cpu:0: the device is out of memory: the whole model: left out"]


def test_a_device_that_is_too_small_is_named(alone: Communicator) -> None:
    machine = Machine(alone, None)
    tiny = Cluster(name="box", devices=(Device(id="box/cpu:0", kind="cpu", node="box", memory_bytes=1000),))
    with pytest.raises(
        MeasureError, match=r"box/cpu:0: layers.0 cannot be measured even at 1 sample: .* 1000 B of memory left"
    ):
        machine.measure(cluster=tiny)


def test_requests_that_make_no_sense(alone: Communicator) -> None:
    machine = Machine(alone, None)
    with pytest.raises(MeasureError, match="without a program: tail"):
        machine.measure(graph=graph_of(("layer", "tail")))
    with pytest.raises(MeasureError, match="at least 1"):
        machine.measure(micro_batch_sizes=(0, 1))
    two = Cluster(
        name="box", devices=(*ONE.devices, Device(id="box/cpu:1", kind="cpu", node="box", memory_bytes=2**30))
    )
    with pytest.raises(MeasureError, match="2 devices and there are 1 workers"):
        machine.measure(cluster=two)
