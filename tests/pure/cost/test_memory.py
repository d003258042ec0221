"""Memory is affine: what stays, plus what one micro-batch adds."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heterodyne.cluster import BlockSample
from heterodyne.cost.memory import DeviceMemory, MemoryAssumptions
from heterodyne.cost.recipe import Recipe
from heterodyne.graph import Op, Parameter, Size
from pure.build import cluster, device_profile, graph, linear

MODEL = graph(4, saved=10_000)
DEVICE = cluster(1).devices[0]
BARE = MemoryAssumptions(context_bytes={"cpu": 0}, fragmentation=0.0, block_bytes=0)


def memory(**changes: object) -> DeviceMemory:
    made = DeviceMemory(graph=MODEL, device=DEVICE, recipe=Recipe(), assumptions=BARE)
    return replace(made, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("recipe", "states"),
    [
        (Recipe(), 2),
        (Recipe(optimizer="sgd"), 1),
        (Recipe(optimizer="sgd", momentum=0.0), 0),
    ],
)
def test_each_part_has_its_size(recipe: Recipe, states: int) -> None:
    one = 8 * 8 * 4
    weights = 10 * one
    use = memory(recipe=recipe).use(4)
    assert (use.parameters, use.gradients) == (weights, weights)
    assert use.buckets == one  # what autograd hands over of one parameter, whatever the buckets are
    assert use.optimizer == states * weights
    assert use.activations == 4 * 10 * 10_000
    assert use.total == (2 + states) * weights + one + use.activations + use.workspace


@given(st.integers(1, 64))
def test_weights_and_states_do_not_shrink_with_the_batch(size: int) -> None:
    one, many = memory().use(1), memory().use(size)
    assert one.fixed == many.fixed
    assert many.activations == size * one.activations
    assert many.total < size * one.total or size == 1


def test_without_a_share_the_update_remains() -> None:
    use = memory().use(0)
    assert use.activations == use.workspace == 0
    assert use.total == use.fixed + use.update


def test_states_of_narrow_parameters_are_counted_in_full_precision() -> None:
    half = memory(graph=graph(4, dtype="bfloat16")).use(1)
    assert half.parameters * 2 == memory().use(1).parameters
    assert half.optimizer == memory().use(1).optimizer + 4 * MODEL.parameter_count  # and a master of each
    assert half.gradients == memory().use(1).gradients


def test_autocast_keeps_narrow_copies() -> None:
    """Each forward makes its own, whatever its size, and keeps them for its backward."""
    narrow = memory(recipe=Recipe(precision="bf16"))
    for size in (1, 3):
        assert narrow.use(size).activations - memory().use(size).activations == 2 * MODEL.parameter_count
    assert narrow.use(1).parameters == memory().use(1).parameters
    samples = {
        kind: tuple(replace(s, copied_bytes=30) for s in of)
        for kind, of in device_profile(MODEL, linear(1.0), saved=700).blocks.items()
    }
    known = replace(narrow, profile=replace(device_profile(MODEL, linear(1.0), saved=700), blocks=samples))
    assert known.activations(4) == 6 * (4 * 700 + 30)


def test_frozen_parameters_have_neither_gradient_nor_state() -> None:
    frozen = replace(MODEL, parameters=tuple(replace(p, trainable=False) for p in MODEL.parameters))
    use = memory(graph=frozen).use(1)
    assert use.gradients == use.optimizer == use.buckets == 0
    assert use.parameters == MODEL.parameter_bytes


def test_what_was_measured_is_believed_first() -> None:
    profile = device_profile(MODEL, linear(1.0), saved=700)
    assert memory(profile=profile).activations(4) == 6 * 4 * 700
    whole = tuple(replace(s, saved_bytes=5000 * s.micro_batch_size) for s in profile.blocks["head"])
    measured = replace(profile, blocks={**profile.blocks, "*": whole})
    assert memory(profile=measured).activations(6) == 30_000
    assert memory(profile=device_profile(MODEL, linear(1.0), saved=0)).activations(4) == 400_000  # nothing was measured


def test_a_measured_peak_replaces_the_estimate_of_the_workspace() -> None:
    profile = device_profile(MODEL, linear(1.0), saved=700)

    def peaks(kind: str, each: int) -> dict[str, tuple[BlockSample, ...]]:
        return {kind: tuple(replace(s, peak_bytes=each * s.micro_batch_size) for s in profile.blocks["head"])}

    some = memory(profile=replace(profile, blocks={**profile.blocks, **peaks("head", 900)}))
    assert some.workspace(4) == memory().workspace(4)  # the other blocks did not tell
    every = {name: sample for kind in MODEL.kinds for name, sample in peaks(kind, 900).items()} | peaks("layer", 1500)
    assert memory(profile=replace(profile, blocks=every)).workspace(4) == 4 * 800
    whole = memory(profile=replace(profile, blocks={**every, **peaks("*", 5000)}))
    assert whole.activations(4) + whole.workspace(4) == 4 * 5000


def test_measured_bytes_are_never_interpolated_below_a_sample() -> None:
    profile = device_profile(MODEL, linear(1.0), saved=700)
    odd = tuple(replace(s, saved_bytes=9000 if s.micro_batch_size == 4 else 700) for s in profile.blocks["head"])
    made = memory(profile=replace(profile, blocks=dict.fromkeys(MODEL.kinds, odd)))
    assert made.activations(4) == made.activations(8) == 6 * 9000


def test_weights_neither_come_and_go_inside_an_op_nor_are_lost_in_a_heap() -> None:
    """The gradient of a weight is counted by itself; a C heap loses less than an allocator of large pages."""

    def heavier(op: Op) -> Op:
        return replace(op, bytes_read=op.bytes_read + Size.of(sum(MODEL.stored[name].bytes for name in op.parameters)))

    heavy = replace(MODEL, ops=tuple(map(heavier, MODEL.ops)))
    flowing = max(op.bytes_read(4) + op.bytes_written(4) for op in MODEL.ops)
    assert memory(graph=heavy).workspace(4) <= 2 * flowing
    assert memory(assumptions=MemoryAssumptions(block_bytes=0)).lost(10**9) == 10**7


def test_the_framework_and_the_allocator_take_their_part() -> None:
    given_ = MemoryAssumptions(
        context_bytes={"cpu": 1000}, other_context_bytes=5000, fragmentation=0.1, heap_fragmentation=0.1, block_bytes=0
    )
    use, bare = memory(assumptions=given_).use(2), memory().use(2)
    assert use.context == 1000
    assert use.lost == pytest.approx(0.1 * (bare.fixed + bare.activations), abs=1)
    assert given_.context("cuda") == 5000


@given(st.lists(st.integers(1, 9), unique=True, max_size=4), st.integers(1, 8), st.booleans())
def test_stages_keep_together_what_the_model_keeps(cuts: list[int], size: int, measured: bool) -> None:
    """Measured blocks are cut inside by what the graph says of their ops."""
    made = memory(profile=device_profile(MODEL, linear(1.0), saved=700) if measured else None)
    ranges = list(pairwise((0, *sorted(cuts), len(MODEL.ops))))
    assert sum(made.activations(size, ops) for ops in ranges) == pytest.approx(made.activations(size), abs=len(ranges))
    assert max(made.workspace(size, ops) for ops in ranges) == made.workspace(size)
    parts = [made.use(size, [ops]) for ops in ranges]
    for field in ("parameters", "gradients", "optimizer"):
        assert sum(getattr(use, field) for use in parts) == getattr(made.use(size), field)
    assert made.use(size, ranges).fixed == made.use(size).fixed


def test_a_model_that_keeps_more_than_its_blocks_makes_every_stage_keep_more() -> None:
    profile = device_profile(MODEL, linear(1.0), saved=700)
    for whole, ratio in ((2 * 6 * 700, 2), (6 * 350, 1)):
        samples = tuple(replace(s, saved_bytes=whole * s.micro_batch_size) for s in profile.blocks["head"])
        made = memory(profile=replace(profile, blocks={**profile.blocks, "*": samples}))
        assert made.activations(4, (0, 3)) == 4 * 2 * 700 * ratio
    alone = memory(profile=replace(profile, blocks={"*": profile.blocks["head"]}))
    assert alone.activations(4, (0, 5)) == 4 * 350  # half of the ops keep half of it


def test_buffers_and_what_nobody_reads_are_held_where_they_are_needed() -> None:
    unread = Parameter(name="unread", shape=(8,), dtype="float32", trainable=True)
    buffer = Parameter(name="table", shape=(8,), dtype="float32", trainable=False)
    reader = replace(MODEL.ops[0], parameters=(*MODEL.ops[0].parameters, "table"))
    model = replace(MODEL, parameters=(*MODEL.parameters, unread), buffers=(buffer,), ops=(reader, *MODEL.ops[1:]))
    names = [{p.name for p in memory(graph=model).held([ops])} for ops in ((0, 1), (1, 10))]
    assert names[0] == {"embed.weight", "table", "unread"}
    assert "table" not in names[1]
    assert "unread" in names[1]


def _measured(handed_over: int, backend: str = "cpu") -> DeviceMemory:
    """Of which every block was seen to need so many bytes inside."""
    profile = device_profile(MODEL, linear(0.5))
    blocks = {
        kind: tuple(replace(s, peak_bytes=s.saved_bytes + handed_over) for s in of)
        for kind, of in profile.blocks.items()
    }
    return memory(device=replace(DEVICE, backend=backend), profile=replace(profile, blocks=blocks))


def test_gradients_of_one_block_may_lie_in_the_c_heap_twice() -> None:
    whole = (0, len(MODEL.ops))
    of_block = max(sum(4 * p.numel for p in MODEL.parameters_of(b) if p.trainable) for b in MODEL.blocks)
    assert _measured(10 * of_block).holes(1, whole) == of_block
    assert (
        0 < _measured(of_block // 4).holes(1, whole) < of_block
    )  # nothing can be there twice that never was there at once
    assert _measured(of_block, "cuda").holes(1, whole) == 0
    assert _measured(of_block).holes(0, whole) == memory().holes(1, whole) == 0
