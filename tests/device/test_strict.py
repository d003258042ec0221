"""Each rule of the strict backend bites: what NCCL refuses is refused, what would hang on a GPU is named in bounded time."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from device.accelerator import Counts
from multiprocess.pool import Pool, RemoteError, World, accelerator

A, B = "vendor_a", "vendor_b"


def on(pool: Pool, devices: tuple[str, ...], job: Callable[..., Any], *arguments: Any) -> list[Any]:
    return pool.run(len(devices), job, *arguments, devices=devices, timeout_s=60)


def group_of(world: World) -> Any:
    assert dist.get_default_backend_for_device(world.device) == "strict"
    return dist.new_group(list(range(world.world_size)), backend="strict")


def value_of(world: World, *numbers: float) -> torch.Tensor:
    return torch.tensor(numbers or (float(world.rank + 1),), device=world.device)


def summed(world: World) -> tuple[list[float], Counts]:
    group = group_of(world)
    device = accelerator(world.device)
    tensor = value_of(world)
    before = device.counts()
    dist.all_reduce(tensor, group=group)
    dist.all_reduce(tensor, group=group)
    held = device.counts() - before
    source = value_of(world, *range(3 * world.rank, 3 * world.rank + 3))
    out = torch.empty_like(source)
    dist.all_to_all_single(out, source, group=group)
    return [*tensor.tolist(), *out.tolist()], held


def test_collectives_hold_the_stream_and_not_the_host(pool: Pool) -> None:
    for (values, held), moved in zip(on(pool, (A,) * 3, summed), ([0, 3, 6], [1, 4, 7], [2, 5, 8]), strict=True):
        assert values == [18.0, *moved]
        assert held.host_waits == 0


def refused(world: World, make: str) -> None:
    group = group_of(world)
    tensor = torch.ones(2, 2) if make == "host" else torch.ones(2, 2, device=world.device).t()
    dist.all_reduce(tensor, group=group)


@pytest.mark.parametrize(("make", "words"), [("host", "device type cpu"), ("strided", "must be contiguous")])
def test_tensors_that_it_cannot_carry_are_refused(pool: Pool, make: str, words: str) -> None:
    with pytest.raises(RemoteError, match=words):
        on(pool, (A, A), refused, make)


def test_two_vendors_share_no_communicator(pool: Pool) -> None:
    with pytest.raises(RemoteError, match="cannot share a communicator"):
        on(pool, (A, B), summed)


def in_order(world: World) -> list[float]:
    group = group_of(world)
    if world.rank == 0:
        for number, tag in ((1.0, 5), (2.0, 4)):
            dist.isend(value_of(world, number), 1, group=group, tag=tag)
        torch.accelerator.synchronize()
        return []
    found = [torch.empty(1, device=world.device) for _ in range(2)]
    for tensor, tag in zip(found, (4, 5), strict=True):
        dist.irecv(tensor, 0, group=group, tag=tag).wait()
    return [tensor.item() for tensor in found]


def test_tags_are_ignored(pool: Pool) -> None:
    assert on(pool, (A, A), in_order)[1] == [1.0, 2.0]


def posted_early(world: World, warm: bool) -> float:
    """The beginning of a pipeline's step: each rank makes room for what the other will send, each direction in its own group."""
    up, down = group_of(world), group_of(world)
    if warm:
        for group, source in ((up, 0), (down, 1)):
            first = torch.zeros(1, device=world.device)
            (
                dist.isend(first, 1 - source, group=group)
                if world.rank == source
                else dist.irecv(first, source, group=group)
            ).wait()
    incoming, outgoing = (down, up) if world.rank == 0 else (up, down)
    room = torch.zeros(1, device=world.device)
    arrival = dist.irecv(room, 1 - world.rank, group=incoming)
    dist.isend(value_of(world), 1 - world.rank, group=outgoing)
    arrival.wait()
    return room.item()


def test_the_first_receive_of_a_pair_blocks_the_host(pool: Pool) -> None:
    with pytest.raises(
        RemoteError, match=r"DeadlockError: a GPU would hang here: rank 0: the first call .* blocks the host"
    ):
        on(pool, (A, A), posted_early, False)


def test_pairs_that_have_met_do_not(pool: Pool) -> None:
    assert on(pool, (A, A), posted_early, True) == [2.0, 1.0]


def crossed(world: World, batched: bool) -> float:
    """Both receive before they send, in one group."""
    group = group_of(world)
    room, own = torch.zeros(1, device=world.device), value_of(world)
    if batched:
        with dist.distributed_c10d._coalescing_manager(group, own.device, async_ops=True) as batch:
            dist.irecv(room, 1 - world.rank, group=group)
            dist.isend(own, 1 - world.rank, group=group)
        batch.wait()
    else:
        arrival = dist.irecv(room, 1 - world.rank, group=group)
        dist.isend(own, 1 - world.rank, group=group)
        arrival.wait()
    return room.item()


def test_a_pair_does_one_thing_after_the_other(pool: Pool) -> None:
    with pytest.raises(RemoteError, match=r"rank 0: recv number 1 from rank 1 is the first in its queue"):
        on(pool, (A, A), crossed, False)


def test_a_batch_is_one_operation(pool: Pool) -> None:
    assert on(pool, (A, A), crossed, True) == [2.0, 1.0]


def in_other_order(world: World) -> float:
    groups = [group_of(world), group_of(world)]
    tensors = [value_of(world), value_of(world)]
    for tensor, group in list(zip(tensors, groups, strict=True))[:: 1 - 2 * world.rank]:
        dist.all_reduce(tensor, group=group)
    return tensors[0].item()


def test_communicators_are_made_by_all_members_together(pool: Pool) -> None:
    with pytest.raises(RemoteError, match="DeadlockError: a GPU would hang here"):
        on(pool, (A, A), in_other_order)


def too_early(world: World) -> list[float]:
    group = group_of(world)
    tensor = value_of(world)
    work = dist.all_reduce(tensor, group=group, async_op=True)
    time.sleep(0.1)
    early = tensor.item()
    work.wait()
    return [early, tensor.item()]


def test_a_result_is_there_when_it_was_waited_for(pool: Pool) -> None:
    assert on(pool, (A, A), too_early) == [[1.0, 3.0], [2.0, 3.0]]


def through_streams(world: World) -> float:
    """A stream beside the current one waits; the current one waits for its event; what is sent on is the result."""
    group = group_of(world)
    tensor = value_of(world)
    work = dist.all_reduce(tensor, group=group, async_op=True)
    end = torch.Event(world.device)
    with torch.Stream(world.device):
        work.wait()
        end.record()
    torch.accelerator.current_stream().wait_event(end)
    dist.all_reduce(tensor, group=group)
    return tensor.item()


def test_order_passes_from_stream_to_stream(pool: Pool) -> None:
    assert on(pool, (A, A), through_streams) == [6.0, 6.0]


def left_alone(world: World) -> str:
    group = group_of(world)
    tensor = value_of(world)
    dist.all_reduce(tensor, group=group)
    tensor.item()
    if world.rank == 1:
        os._exit(3)
    work = dist.all_reduce(tensor, group=group, async_op=True)
    work.wait()
    time.sleep(1.0)
    return "is over" if work.is_completed() else "goes on"


def test_a_peer_that_dies_is_not_noticed(pool: Pool) -> None:
    with pytest.raises(RemoteError, match="rank 1: the worker died with exit status 3") as caught:
        on(pool, (A, A), left_alone)
    assert "rank 0" not in str(caught.value)
