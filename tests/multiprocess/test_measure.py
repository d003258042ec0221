"""Measuring together: every rank at its own pace, one profile for all, links as they are."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

from heterodyne.cluster import Cluster, Profile
from heterodyne.cluster.profile import LinkSample
from heterodyne.errors import MeasureError
from heterodyne.measure import Cache, discover_cluster, measure
from heterodyne.measure.collectives import MESSAGE_BYTES, PART_BYTES, measure_all_reduce, measure_exchanges
from heterodyne.measure.links import measure_sends
from heterodyne.measure.sampling import Sampling
from heterodyne.measure.workbench import Workbench
from heterodyne.runtime.comm.communicator import Communicator
from measure.fake_model import request_of
from multiprocess.pool import Pool, World

QUICK = Sampling(warm_up=1, sample_s=0.002, samples=3, section_s=0.0, most_samples=3)
BUDGET_S = 16.0  # enough for one round of what takes longest, which are the exchanges
CPU = torch.device("cpu")


class Layer:
    """A linear layer of some width; ``broken`` on one rank: there it fails with that error, if the batch is large enough."""

    def __init__(self, width: int, *, broken: Exception | None = None, least: int = 1) -> None:
        self.width, self.broken, self.least = width, broken, least

    def instantiate(self, batch: int, device: torch.device, *, seed: int = 0) -> tuple[nn.Module, Sequence[object]]:
        if self.broken is not None and batch >= self.least:
            raise self.broken
        x = torch.randn(batch, self.width, device=device)
        return nn.Linear(self.width, self.width, device=device), [x.requires_grad_()]


def communicator_of(world: World) -> Communicator:
    return Communicator(rank=world.rank, world_size=world.world_size, device=CPU, timeout_s=30)


def measured(
    world: World, folder: str | None, broken: int | None = None, error: Exception | None = None, least: int = 1
) -> tuple[Profile | str, list[str]]:
    said: list[str] = []
    with communicator_of(world) as peers:
        cluster = discover_cluster(peers, world.rank, world.world_size, "box")
        full = torch.OutOfMemoryError("no more")
        own = (error or full) if world.rank == broken else None
        programs = {
            "layer": Layer(32, broken=own, least=least),
            "*": Layer(64, broken=full if world.rank == 0 else None),
        }
        request = request_of(programs, cluster=cluster, sampling=QUICK, budget_s=BUDGET_S)
        try:
            profile = measure(request, peers, cache=Cache(folder=Path(folder)) if folder else None, say=said.append)
        except MeasureError as error:
            return str(error), said
        return profile, said


@pytest.mark.parametrize("size", [2, 3])
def test_every_rank_has_the_same_profile_of_all(pool: Pool, size: int) -> None:
    results = pool.run(size, measured, None)
    profile = results[0][0]
    assert all(other == profile for other, _ in results)
    ids = tuple(f"box/cpu:{i}" for i in range(size))
    assert tuple(profile.devices) == ids
    assert all(device.optimizer_s_per_byte > 0 and 0 <= device.overlap <= 1 for device in profile.devices.values())
    reduces = [s for s in profile.links if s.op == "all_reduce"]
    assert reduces
    assert all(s.devices == ids and s.seconds > 0 for s in reduces)
    joined = {frozenset(s.devices) for s in profile.links if s.op == "send"}
    assert joined == {frozenset((ids[i], ids[(i + 1) % size])) for i in range(size)}


def test_what_one_rank_leaves_out_is_said_on_all_and_stops_none(pool: Pool) -> None:
    """The whole model does not fit on rank 0."""
    (profile, said), (_, said_there) = pool.run(2, measured, None)
    assert "*" not in profile.devices["box/cpu:0"].blocks
    assert "*" in profile.devices["box/cpu:1"].blocks
    assert said == said_there
    assert "box/cpu:0: the device is out of memory: the whole model: left out" in said


def test_a_rank_that_cannot_measure_fails_all_with_its_words(pool: Pool) -> None:
    results = pool.run(3, measured, None, 1)
    assert all(error == results[0][0] for error, _ in results)
    assert results[0][0] == "box/cpu:1: layers.0 cannot be measured even at 1 sample: the device is out of memory"


def test_a_block_that_breaks_on_one_rank_ends_all_with_one_message(pool: Pool) -> None:
    """At the second size, when every rank has measured the first; nobody waits for the one that is gone."""
    results = pool.run(3, measured, None, 2, RuntimeError("mat1 and mat2 cannot be multiplied"), 2)
    message = "box/cpu:2: layers.0 at 2 samples failed: RuntimeError: mat1 and mat2 cannot be multiplied"
    assert [error for error, _ in results] == [message] * 3


def test_a_kept_block_that_breaks_on_one_rank_is_told_on_all(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, measured, str(tmp_path))
    results = pool.run(2, measured, str(tmp_path), 1, RuntimeError("no kernel image"))
    assert results[0] == results[1]
    error, said = results[0]
    assert error == "box/cpu:1: layers.0 at 1 sample failed: RuntimeError: no kernel image"
    assert len(said) == 1
    assert "box/cpu:1: layers.0 fails now (RuntimeError: no kernel image)" in said[0]


def test_the_cache_of_rank_0_serves_all_or_is_replaced_for_all(pool: Pool, tmp_path: Path) -> None:
    """A profile that holds is the very same on all ranks; one that does not (a busy machine) is replaced, and that is said."""
    first = pool.run(2, measured, str(tmp_path))[0][0]
    again = pool.run(2, measured, str(tmp_path))
    (profile, said), (there, said_there) = again
    assert profile == there
    assert said == said_there
    assert (profile == first) == (not any("no longer holds" in note for note in said))
    (path,) = (tmp_path / "profiles").iterdir()
    path.write_text("{")
    (profile, said), (there, _) = pool.run(2, measured, str(tmp_path))
    assert profile == there == Profile.load(path)
    assert "measured again" in said[0]


def discovered(world: World, hosts: Sequence[str], node_ranks: Sequence[int]) -> Cluster:
    with communicator_of(world) as peers:
        local = sum((hosts[r], node_ranks[r]) == (hosts[world.rank], node_ranks[world.rank]) for r in range(world.rank))
        return discover_cluster(peers, local, world.world_size, hosts[world.rank], node_rank=node_ranks[world.rank])


def test_discovery_is_the_same_on_every_rank(pool: Pool) -> None:
    clusters = pool.run(3, discovered, ["a", "a", "b"], [0, 0, 1])
    assert clusters[0] == clusters[1] == clusters[2]
    assert [d.id for d in clusters[0].devices] == ["a/cpu:0", "a/cpu:1", "b/cpu:0"]
    memory = [d.memory_bytes for d in clusters[0].devices]
    assert memory[0] == memory[1] < memory[2]
    assert len({c.fingerprint for c in clusters}) == 1
    assert pickle.loads(pickle.dumps(clusters[0])) == clusters[0]


def links(world: World, budget_s: float) -> tuple[list[int], int, list[str]]:
    said: list[str] = []
    # Ranks whose clocks run differently still have to agree on what is done.
    bench = Workbench(device=CPU, sampling=QUICK, say=said.append, now=lambda: 1e6 * world.rank)
    ids = [f"d{r}" for r in range(world.world_size)]
    with communicator_of(world) as peers:
        process_group = peers.process_group(range(world.world_size))
        assert process_group is not None
        peers.barrier()  # without time there is nothing else that a rank that still connects is waited for
        reduces = measure_all_reduce(peers, process_group, ids, bench, budget_s=budget_s)
        sends = measure_sends(peers, ids, bench, budget_s=budget_s)
        return [s.bytes for s in reduces], len(sends), said


def test_all_sizes_in_time_and_fewer_without(pool: Pool) -> None:
    for sizes, sends, said in pool.run(3, links, 1e9):
        assert (len(sizes), sends, said) == (len(MESSAGE_BYTES), 6, [])
    results = pool.run(3, links, 0.0)
    # One size alone says nothing of bandwidth: a KiB that takes as long as its latency would make a GiB take hours.
    assert [(sizes, sends) for sizes, sends, _ in results] == [(list(MESSAGE_BYTES[:2]), 0)] * 3
    said = results[0][2]
    assert len(said) == 2  # the collective in one sentence, the transfers in another
    assert "d0 and d1 from 64 KiB on, d1 and d2 from 64 KiB on, d2 and d0" in said[1]
    assert all(notes == said for _, _, notes in results)


def exchanges(world: World, budget_s: float) -> tuple[tuple[LinkSample, ...], list[str]]:
    said: list[str] = []
    bench = Workbench(device=CPU, sampling=QUICK, say=said.append)
    with communicator_of(world) as peers:
        process_group = peers.process_group(range(world.world_size))
        assert process_group is not None
        peers.barrier()
        return measure_exchanges(
            peers, process_group, [f"d{r}" for r in range(world.world_size)], bench, budget_s=budget_s
        ), said


def test_exchanges_are_measured_alike_on_all_ranks_or_left_out_on_all(pool: Pool) -> None:
    (first, said), *others = pool.run(3, exchanges, 1.3)
    assert [(s.op, s.devices, s.bytes) for s in first] == [("exchange", ("d0", "d1", "d2"), n) for n in PART_BYTES]
    assert all(s.seconds > 0 for s in first)
    assert said == []
    assert all(found == first for found, _ in others)
    for found, told in pool.run(3, exchanges, 0.0):
        assert found == ()
        assert "were not measured" in told[0]
