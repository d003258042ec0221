"""Blocks on a device whose true costs are known, and the bytes that real blocks keep."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence

import pytest
import torch
from torch import nn

from heterodyne.cluster.profile import BlockSample, DeviceProfile
from heterodyne.cost.compute import compute_of
from heterodyne.errors import MeasureError
from heterodyne.measure.kernels import extrapolate, measure_blocks, whole_sizes
from heterodyne.measure.optimizer_step import measure_optimizer
from heterodyne.measure.sampling import Sampling
from heterodyne.measure.workbench import Workbench
from measure.fake_device import CpuClock, FakeClock, FakeProgram, bench_of, until
from measure.fake_model import graph_of

CPU = torch.device("cpu")


def test_every_kind_at_every_size_with_its_own_time() -> None:
    clock = FakeClock()
    programs = {"layer": FakeProgram(clock, 0.001, 0.002), "head": FakeProgram(clock, 0.003, 0.001)}
    profile = measure_blocks(programs, [4, 1, 2], bench_of(clock))
    for kind, program in programs.items():
        assert [s.micro_batch_size for s in profile[kind]] == [1, 2, 4]
        for s in profile[kind]:
            assert s.forward_s == pytest.approx(program.forward_s(s.micro_batch_size))
            assert s.backward_s == pytest.approx(2 * s.forward_s)
            assert not s.extrapolated


def test_more_layers_take_more_time() -> None:
    """Real work, by CPU time: the ratio of layers is 16, and bounds this wide leave room for caches that others use too."""

    class Layers:
        def __init__(self, count: int) -> None:
            self.count = count

        def instantiate(self, batch: int, device: torch.device, *, seed: int = 0) -> tuple[nn.Module, Sequence[object]]:
            module = nn.Sequential(*(nn.Linear(256, 256) for _ in range(self.count)))
            return module, [torch.randn(batch, 64, 256).requires_grad_()]

    bench = Workbench(device=CPU, clock=CpuClock(), sampling=Sampling(sample_s=0.02, section_s=0.1))
    profile = measure_blocks({"short": Layers(2), "long": Layers(32)}, [4], bench)
    (short,), (long,) = profile["short"], profile["long"]
    assert 4 < long.forward_s / short.forward_s < 64
    assert 4 < long.backward_s / short.backward_s < 64


def test_the_whole_model_is_measured_at_three_sizes_and_they_give_the_composition() -> None:
    """A whole of 1.2 times the sum of its three blocks at those sizes is taken for one of 1.2 times at every size."""
    clock = FakeClock()
    layer = FakeProgram(clock, 0.0, 0.002)
    programs = {"layer": layer, "head": FakeProgram(clock, 0.0, 0.004), "*": FakeProgram(clock, 0.0, 1.2 * 0.008)}
    blocks = measure_blocks(programs, [1, 2, 4, 8], bench_of(clock), counts={"layer": 2, "head": 1})
    assert tuple(s.micro_batch_size for s in blocks["*"]) == whole_sizes([1, 2, 4, 8]) == (1, 4, 8)
    assert whole_sizes([2]) == (2,)
    compute = compute_of(
        graph_of(("layer", "head", "layer")), "d", DeviceProfile(blocks=blocks, optimizer_s_per_byte=0.0)
    )
    for size in (1, 2, 3, 4, 8, 16):
        assert compute.micro_batch_s(size) == pytest.approx(1.2 * 3 * 0.008 * size)  # a backward is two forwards
    assert compute.forward.composition == tuple((size, pytest.approx(1.2)) for size in (1, 4, 8))


@pytest.mark.parametrize(("fixed_s", "largest"), [(0.0, 4), (0.01, 64), (0.1, 256)])
def test_sizes_grow_while_any_rank_gains(fixed_s: float, largest: int) -> None:
    """``a + b n`` seconds: doubling to n gains (a / n) / (2 a / n + b), within 3% from n = 31.3 a / b on.

    Once may be noise. The other rank never gains.
    """
    clock = FakeClock()
    programs = {"layer": FakeProgram(clock, fixed_s, 0.01), "*": FakeProgram(clock, fixed_s, 0.01)}
    bench = bench_of(clock, gather=lambda word: (word, None), devices=("a", "b"))
    blocks = measure_blocks(programs, [1 << n for n in range(9)], bench, while_faster=True, budget_s=1e9)
    assert [s.micro_batch_size for s in blocks["layer"]] == [1 << n for n in range(largest.bit_length())]
    assert blocks["*"][0].micro_batch_size == 1


def test_who_gains_nothing_by_larger_sizes_continues_in_proportion_while_others_go_on() -> None:
    """Here 0.01 s a sample at any size; the other rank gains up to 8 samples."""
    clock, words = FakeClock(), iter(["yes"] * 3)
    programs = {"layer": FakeProgram(clock, 0.0, 0.01), "*": FakeProgram(clock, 0.0, 0.01)}
    met = []

    def gather(word: str | None) -> list[str | None]:
        met.append(word)
        gains = len(met) in (4, 6, 8)  # behind the first meeting and those after each section
        return [word, next(words, None) if gains else None]

    bench = bench_of(clock, gather=gather, devices=("a", "b"))
    blocks = measure_blocks(programs, [1, 2, 4, 8, 16], bench, while_faster=True, budget_s=1e9)
    assert [(s.micro_batch_size, s.extrapolated) for s in blocks["layer"]] == [
        (1, False),
        (2, False),
        (4, False),
        (8, True),
    ]
    assert [s.micro_batch_size for s in blocks["*"]] == [1, 4]
    for s in blocks["layer"]:
        assert s.forward_s == pytest.approx(0.01 * s.micro_batch_size)


def test_the_halves_of_a_backward_are_measured_apart_and_the_whole_model_is_not_halved() -> None:
    """A backward of twice the forward, of which a third is left for the second half."""
    clock = FakeClock()
    layer = FakeProgram(clock, 0.001, 0.003)

    class Thirds:
        def __enter__(self) -> None:
            clock.put_off = 1 / 3

        def __exit__(self, *exception: object) -> None:
            return

        def run(self) -> None:
            clock.put_off, left_s = 0.0, clock.left_s
            clock.left_s = 0.0
            clock.run(left_s)

    blocks = measure_blocks({"layer": layer, "*": layer}, [1, 2, 4], bench_of(clock, halves=Thirds))
    for s in blocks["layer"]:
        assert s.backward_s == pytest.approx(2 * s.forward_s)
        assert s.input_s == pytest.approx(2 / 3 * s.backward_s)
        assert s.weight_s == pytest.approx(1 / 3 * s.backward_s)
        assert s.halved_forward_s == pytest.approx(s.forward_s)
    assert {(s.input_s, s.weight_s) for s in blocks["*"]} == {(0.0, 0.0)}


@pytest.mark.parametrize("budget_s", [1e9, 20.0, 0.0])
@pytest.mark.parametrize("most", [1, 4, 10**9])
def test_all_ranks_meet_as_often_whatever_each_leaves_out(budget_s: float, most: int) -> None:
    """Once before and once after each of the sections: four sizes of the block, three of the whole model."""
    met: list[str | None] = []
    clock = FakeClock()

    def gather(word: str | None) -> list[str | None]:
        met.append(word)
        return [word]

    programs = {"a": FakeProgram(clock, 0.0, 0.5, most=most), "*": FakeProgram(clock, 0.0, 2.0, most=most)}
    measure_blocks(programs, [1, 2, 4, 8], bench_of(clock, gather=gather), budget_s=budget_s)
    assert met == [None] * (1 + 7)


def test_a_block_that_fails_is_told_at_the_next_meeting_and_ends_the_measurement_of_all() -> None:
    """Here the words of this rank; what the others do with them: `test_the_failure_of_another_rank`."""
    met: list[str | None] = []
    clock = FakeClock()

    def gather(word: str | None) -> list[str | None]:
        met.append(word)
        return [None, word]

    class Fails(FakeProgram):
        def instantiate(
            self, batch: int, device: torch.device, *, seed: int = 0
        ) -> tuple[nn.Module, list[torch.Tensor]]:
            if batch > 1:
                raise ValueError("expected 3 dimensions\nand more")
            return super().instantiate(batch, device, seed=seed)

    programs = {"a": FakeProgram(clock, 0.1, 0.1), "b": Fails(clock, 0.1, 0.1)}
    bench = bench_of(clock, gather=gather, devices=("box/cpu:0", "box/cpu:1"), names={"b": "layers.0 (x4)"})
    with pytest.raises(
        MeasureError, match=r"^box/cpu:1: layers.0 \(x4\) at 2 samples failed: ValueError: expected 3 dimensions$"
    ):
        measure_blocks(programs, [1, 2, 4], bench)
    assert [word is None for word in met] == [True, True, True, True, False]


def test_the_failure_of_another_rank_ends_this_one_after_the_same_section() -> None:
    clock = FakeClock()
    words = iter([None, None, "layers.0 failed"])
    bench = bench_of(clock, gather=lambda word: [word, next(words)], devices=("x", "y"))
    with pytest.raises(MeasureError, match=r"^y: layers.0 failed$"):
        measure_blocks({"a": FakeProgram(clock, 0.1, 0.1)}, [1, 2, 4, 8], bench)


def test_a_rank_computes_until_the_last_one_comes_also_when_it_left_the_section_out() -> None:
    """The others need the time of 20 runs more in each section; this rank, whose memory is full at 4 samples, computes them all."""
    clock = FakeClock()
    computed: list[int] = []

    def gather(word: str | None) -> list[str | None]:
        if threading.current_thread() is not threading.main_thread():
            before = clock.runs
            until(lambda: clock.runs >= before + 20)
            computed.append(clock.runs - before)
        return [word]

    # The budget is large: how long a thread computes while it waits, in the time of this clock, is chance.
    full = {"a": FakeProgram(clock, 0.1, 0.1, most=2)}
    measure_blocks(full, [1, 2, 4], bench_of(clock, gather=gather), budget_s=1e9)
    assert len(computed) == 2  # at 4 samples the memory was full: nothing is left that could be computed
    computed.clear()
    room = {"memory_bytes": 100, "needs": lambda _kind, size: 50 * size}
    measure_blocks({"a": FakeProgram(clock, 0.1, 0.1)}, [1, 2, 4], bench_of(clock, gather=gather), budget_s=1e9, **room)  # type: ignore[arg-type]
    assert len(computed) == 3  # 4 samples were not tried, so the run at 2 is still there


def test_a_kind_that_is_a_small_part_of_the_model_may_be_known_less_well() -> None:
    """Both take as long and are as noisy; one is eight blocks of nine, the other one of them, and its error counts for as little."""
    chance = random.Random(1)
    clock = FakeClock(noise=lambda _: chance.uniform(0.6, 1.4))
    programs = {"often": FakeProgram(clock, 0.0, 0.1 / 3), "once": FakeProgram(clock, 0.0, 0.1 / 3)}
    began: list[float] = []
    sampling = Sampling(section_s=0.1, patience=1000.0, long_s=1e9)
    bench = bench_of(clock, sampling=sampling, progress=lambda _what, _number, _total: began.append(clock.time))
    measure_blocks(programs, [1, 2], bench, budget_s=1e9, counts={"often": 8, "once": 1})
    _, _, often, once = began  # at two samples, when it is known what part of the model each of them is
    assert clock.time - once < (once - often) / 2


def test_the_whole_model_is_measured_if_the_time_that_its_blocks_promise_is_left() -> None:
    """Ten blocks of 3 s at one sample: a whole run is expected to take 30 s, and not tried with less than some of them left."""
    said: list[str] = []
    clock = FakeClock()
    programs = {"layer": FakeProgram(clock, 0.0, 1.0), "*": FakeProgram(clock, 0.0, 10.0)}
    for budget_s, there in ((60.0, False), (600.0, True)):
        started_s = clock.time
        blocks = measure_blocks(
            programs, [1], bench_of(clock, say=said.append), budget_s=budget_s, counts={"layer": 10}
        )
        assert ("*" in blocks) == there
        assert clock.time - started_s < budget_s
    assert said == ["the time for measuring is used up: the whole model: left out"]


def test_what_does_not_fit_into_the_time_is_continued_and_said() -> None:
    said: list[str] = []
    clock = FakeClock()
    program = FakeProgram(clock, 1.0, 1.0)
    profile = measure_blocks({"a": program}, [1, 2, 4, 64], bench_of(clock, say=said.append), budget_s=300)
    measured = [s for s in profile["a"] if not s.extrapolated]
    continued = [s for s in profile["a"] if s.extrapolated]
    assert [s.micro_batch_size for s in measured] == [1, 2, 4]
    assert [s.micro_batch_size for s in continued] == [64]
    assert continued[0].forward_s == pytest.approx(
        program.forward_s(64)
    )  # the cost is affine, and so is the continuation
    assert said == ["the time for measuring is used up: a at 64 samples: extrapolated"]
    assert clock.time < 300


def test_out_of_memory_leaves_out_that_size_and_all_larger_ones() -> None:
    said: list[str] = []
    clock = FakeClock()
    profile = measure_blocks(
        {"a": FakeProgram(clock, 0.1, 0.1, most=2)}, [1, 2, 4, 8], bench_of(clock, say=said.append)
    )
    assert [s.extrapolated for s in profile["a"]] == [False, False, True, True]
    assert said == ["the device is out of memory: a at 4 and 8 samples: extrapolated"]


def test_what_needs_more_memory_than_there_is_is_not_tried() -> None:
    clock = FakeClock()
    profile = measure_blocks(
        {"a": FakeProgram(clock, 0.1, 0.1)}, [1, 8], bench_of(clock), memory_bytes=100, needs=lambda _, size: 50 * size
    )
    assert [s.extrapolated for s in profile["a"]] == [False, True]


def test_a_whole_model_that_does_not_fit_is_left_out_and_a_block_that_does_not_is_an_error() -> None:
    said: list[str] = []
    clock = FakeClock()
    fits, does_not = FakeProgram(clock, 0.1, 0.1), FakeProgram(clock, 0.1, 0.1, most=0)
    assert set(measure_blocks({"a": fits, "*": does_not}, [1, 2], bench_of(clock, say=said.append))) == {"a"}
    assert said == ["the device is out of memory: the whole model: left out"]
    with pytest.raises(MeasureError, match=r"a cannot be measured even at 1 sample: the device is out of memory"):
        measure_blocks({"a": does_not, "*": fits}, [1, 2], bench_of(clock))


def test_a_continued_sample_never_gets_smaller() -> None:
    falling = [
        BlockSample(micro_batch_size=b, forward_s=t, backward_s=t, spread=0.1, saved_bytes=100 * b)
        for b, t in ((1, 2.0), (2, 1.5))
    ]
    further = extrapolate(falling, 8)
    assert (further.forward_s, further.saved_bytes, further.spread) == (1.5, 800, 0.1)
    assert extrapolate(falling[:1], 3).forward_s == pytest.approx(6.0)


class Program:
    """Any module with any input, the batch first."""

    def __init__(self, module: nn.Module, shape: tuple[int, ...], *, leaf: bool = True) -> None:
        self.module, self.shape, self.leaf = module, shape, leaf

    def instantiate(self, batch: int, device: torch.device, *, seed: int = 0) -> tuple[nn.Module, Sequence[object]]:
        x = torch.randn(batch, *self.shape, device=device)
        return self.module, [x.requires_grad_(self.leaf)]


QUICK = Sampling(warm_up=0, sample_s=0, samples=1, section_s=0, most_samples=1)


def saved_bytes(module: nn.Module, shape: tuple[int, ...], size: int, precision: str = "fp32") -> int:
    bench = Workbench(device=CPU, sampling=QUICK, precision=precision)  # type: ignore[arg-type]
    return measure_blocks({"a": Program(module, shape)}, [size], bench)["a"][0].saved_bytes


@pytest.mark.parametrize("size", [1, 3])
def test_saved_bytes_are_those_of_the_activations(size: int) -> None:
    """A linear layer keeps its input, GELU its input too; the second layer keeps what GELU gave. Weights do not count."""
    module = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8))
    assert saved_bytes(module, (10, 32), size) == 4 * size * 10 * (32 + 64 + 64)


def test_a_tensor_that_two_ops_keep_counts_once() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.a(x) + self.b(x)

    assert saved_bytes(Twice(), (16,), 5) == 4 * 5 * 16


def test_under_autocast_narrow_activations_count_and_narrow_weights_do_not() -> None:
    assert saved_bytes(nn.Linear(32, 64), (10, 32), 2, "bf16") == 2 * 2 * 10 * 32


def test_gradients_accumulate_as_in_training_and_inputs_keep_none() -> None:
    program = Program(nn.Linear(4, 4), (4,))
    bench = Workbench(device=CPU, sampling=QUICK)
    run = bench.run_of(program, 2)
    run()
    weight = program.module.weight
    assert isinstance(weight, nn.Parameter)
    assert weight.grad is not None
    once = weight.grad.clone()
    run()
    torch.testing.assert_close(weight.grad, 2 * once)


def test_a_block_may_write_into_its_input() -> None:
    assert saved_bytes(nn.ReLU(inplace=True), (8,), 2) == 2 * 8 * 4


def test_a_block_without_gradients_has_only_a_forward() -> None:
    frozen = nn.Linear(8, 8).requires_grad_(False)
    bench = Workbench(device=CPU, sampling=QUICK)
    (measured,) = measure_blocks({"a": Program(frozen, (8,), leaf=False)}, [1], bench)["a"]
    assert measured.forward_s > 0
    assert measured.saved_bytes == 0


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_the_optimizer_costs_time_in_proportion_to_the_bytes(name: str) -> None:
    bench = Workbench(device=CPU, clock=CpuClock(), sampling=Sampling(sample_s=0.01, section_s=0.05))
    few = measure_optimizer([(256, 256)] * 8, name, bench)
    many = measure_optimizer([(256, 256)] * 32, name, bench)
    assert 0.2 < many / few < 5


def test_the_optimizer_is_measured_on_a_part_of_a_large_model_and_on_nothing_of_none() -> None:
    bench = Workbench(device=CPU, sampling=QUICK)
    assert measure_optimizer([(1000, 1000)] * 10_000, "adamw", bench, most_bytes=8_000_000) > 0
    assert measure_optimizer([], "adamw", bench) == 0.0


def test_an_optimizer_that_fails_is_told_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("`fused=True` is not supported here")

    monkeypatch.setattr(torch.optim, "AdamW", refuse)
    told: list[str | None] = []
    bench = Workbench(device=CPU, sampling=QUICK, gather=lambda word: [told.append(word), word][1:])  # type: ignore[func-returns-value]
    with pytest.raises(MeasureError, match="optimizer adamw cannot be measured: RuntimeError: `fused=True` is not"):
        measure_optimizer([(4, 4)], "adamw", bench)
    assert told[0] is None
    assert told[1] is not None
