"""Blocks on a device whose true costs are known, and the bytes that real blocks keep."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import nn

from heterodyne.cluster.profile import BlockSample
from heterodyne.errors import MeasureError
from heterodyne.measure.kernels import Workbench, extrapolate, measure_blocks, measure_optimizer
from heterodyne.measure.sampling import Sampling
from measure.fake_device import FakeClock, FakeProgram, bench_of

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
    """On this machine's real clock: the ratio of layers is 16, and bounds this wide leave room for a busy machine."""

    class Layers:
        def __init__(self, count: int) -> None:
            self.count = count

        def instantiate(self, batch: int, device: torch.device, *, seed: int = 0) -> tuple[nn.Module, Sequence[object]]:
            module = nn.Sequential(*(nn.Linear(256, 256) for _ in range(self.count)))
            return module, [torch.randn(batch, 64, 256).requires_grad_()]

    bench = Workbench(device=CPU, sampling=Sampling(sample_s=0.02, section_s=0.1))
    profile = measure_blocks({"short": Layers(2), "long": Layers(32)}, [4], bench)
    (short,), (long,) = profile["short"], profile["long"]
    assert 4 < long.forward_s / short.forward_s < 64
    assert 4 < long.backward_s / short.backward_s < 64


@pytest.mark.parametrize("budget_s", [1e9, 20.0, 0.0])
def test_all_ranks_meet_as_often_whatever_each_leaves_out(budget_s: float) -> None:
    met = []
    clock = FakeClock()
    bench = bench_of(clock, barrier=lambda: met.append(clock.time))
    programs = {"a": FakeProgram(clock, 0.0, 0.5, most=4), "*": FakeProgram(clock, 0.0, 2.0)}
    measure_blocks(programs, [1, 2, 4, 8], bench, budget_s=budget_s)
    assert len(met) == 2 * 4


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
    assert len(said) == 1
    assert "not measured at sizes [64]" in said[0]
    assert clock.time < 300


def test_out_of_memory_leaves_out_that_size_and_all_larger_ones() -> None:
    said: list[str] = []
    clock = FakeClock()
    profile = measure_blocks(
        {"a": FakeProgram(clock, 0.1, 0.1, most=2)}, [1, 2, 4, 8], bench_of(clock, say=said.append)
    )
    assert [s.extrapolated for s in profile["a"]] == [False, False, True, True]
    assert "out of memory at size 4" in said[0]


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
    assert "the whole model was not measured" in said[0]
    with pytest.raises(MeasureError, match=r"block kind a cannot be measured.*out of memory"):
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
    bench = Workbench(device=CPU, sampling=Sampling(sample_s=0.01, section_s=0.05))
    few = measure_optimizer([(256, 256)] * 8, name, bench)
    many = measure_optimizer([(256, 256)] * 32, name, bench)
    assert 0.2 < many / few < 5


def test_the_optimizer_is_measured_on_a_part_of_a_large_model_and_on_nothing_of_none() -> None:
    bench = Workbench(device=CPU, sampling=QUICK)
    assert measure_optimizer([(1000, 1000)] * 10_000, "adamw", bench, most_bytes=8_000_000) > 0
    assert measure_optimizer([], "adamw", bench) == 0.0
