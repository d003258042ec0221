"""The accelerator of the tests refuses what a GPU refuses, computes what a CPU computes, and counts what a GPU makes a host wait for."""

from __future__ import annotations

import copy
import runpy
from collections.abc import Callable
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from device.accelerator import Counts
from multiprocess.pool import Pool, World, accelerator

NAME = "vendor_a"
GPT = Path(__file__).parents[2] / "examples" / "gpt.py"


def on_one(pool: Pool, job: Callable[[World], Any]) -> Any:
    (result,) = pool.run(1, job, devices=(NAME,), timeout_s=120)
    return result


def kind_of(world: World) -> tuple[str, int, str, bool]:
    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    module = torch.get_device_module(kind)
    return kind.type, torch.accelerator.device_count(), module.get_device_properties(0).name, module.is_available()


def test_a_process_has_the_device_of_its_vendor(pool: Pool) -> None:
    found = pool.run(2, kind_of, devices=("vendor_a", "vendor_b"), timeout_s=120)
    assert found == [("vendor_a", 1, "Test vendor_a", True), ("vendor_b", 1, "Test vendor_b", True)]


def mixed(world: World) -> None:
    here, there = torch.ones(3, device=NAME), torch.ones(3)
    assert torch.equal((here + torch.tensor(2.0)).cpu(), torch.full((3,), 3.0)), (
        "a number on the host is none of two devices"
    )
    assert here[torch.tensor([0, 2])].shape == (2,), "indices may lie on the host"
    for together in (
        lambda: here + there,
        lambda: torch.cat([there, here]),
        lambda: there.add_(here),
        lambda: here @ there,
    ):
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            together()


def test_tensors_of_two_devices_are_not_mixed(pool: Pool) -> None:
    on_one(pool, mixed)


def filled(world: World) -> None:
    device = accelerator(NAME)
    others = torch.accelerator.memory_allocated()
    device.limit(others + 2**20)
    try:
        held = torch.zeros(2**17, device=NAME)  # half of it
        assert torch.accelerator.memory_allocated() - others == 2**19
        with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate 1048576 bytes"):
            torch.zeros(2**18, device=NAME)
        assert torch.accelerator.memory_allocated() - others == 2**19
        torch.accelerator.reset_peak_memory_stats()
        held + held
        assert torch.accelerator.max_memory_allocated() - others == 2**20
        assert torch.accelerator.memory_allocated() - others == 2**19
    finally:
        device.limit(2**30)


def test_memory_has_a_limit_and_is_counted(pool: Pool) -> None:
    on_one(pool, filled)


def counted(world: World) -> dict[str, tuple[int, ...]]:
    device = accelerator(NAME)
    value, pinned = torch.ones(4, device=NAME), torch.ones(4, pin_memory=True)
    found = {}

    def note(name: str, do: Callable[[], object]) -> None:
        before = device.counts()
        do()
        found[name] = astuple(device.counts() - before)[:-1]

    note("compute", lambda: (value * 2).sum())
    note("item", lambda: value.sum().item())
    note("if", lambda: bool(value[0] > 0))
    note("tolist", lambda: value.tolist())
    note("cpu", lambda: value.cpu())
    note("pageable", lambda: torch.ones(4).copy_(value, non_blocking=True))
    note("pinned", lambda: pinned.copy_(value, non_blocking=True))
    note("upload", lambda: torch.ones(4).to(NAME))
    note("synchronize", lambda: torch.accelerator.synchronize())
    return found


def test_what_makes_the_host_wait_is_counted(pool: Pool) -> None:
    none = (0, 0, 0, 0)
    assert on_one(pool, counted) == {
        "compute": none,
        "item": (1, 0, 0, 0),
        "if": (1, 0, 0, 0),
        "tolist": (0, 1, 0, 0),
        "cpu": (0, 1, 0, 0),
        "pageable": (0, 1, 0, 0),
        "pinned": none,
        "upload": (0, 0, 1, 0),
        "synchronize": (0, 0, 0, 1),
    }
    assert Counts(1, 2, 4, 8, 16).host_waits == 11


def random_numbers(world: World) -> None:
    module = torch.get_device_module(NAME)
    torch.manual_seed(3)
    host = torch.get_rng_state()
    first = torch.rand(2, device=NAME)
    assert torch.equal(torch.get_rng_state(), host), "the device draws from a generator of its own"
    torch.manual_seed(3)
    state = module.get_rng_state()
    assert torch.equal(torch.rand(2, device=NAME), first)
    module.set_rng_state(state)
    assert torch.equal(torch.rand(2, device=NAME), first)
    with torch.random.fork_rng([torch.device(NAME)], device_type=NAME):
        torch.rand(2, device=NAME)
    second = torch.rand(2, device=NAME)
    generator = torch.Generator(NAME).manual_seed(3)
    assert torch.equal(torch.rand(2, device=NAME, generator=generator), first)
    assert not torch.equal(second, first)


def test_it_has_a_generator_of_its_own(pool: Pool) -> None:
    on_one(pool, random_numbers)


def views_and_sizes(world: World) -> None:
    base = torch.arange(12.0, device=NAME).view(3, 4)
    base.t()[1:, 2].zero_()
    assert base.cpu().tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 0, 0, 0]]
    out = torch.empty(0, device=NAME)
    torch.add(base, base, out=out)
    assert out.shape == (3, 4)
    assert torch.equal(out.cpu(), 2 * base.cpu())
    split = base.split(2, dim=1)
    split[1].mul_(10)
    assert base[0].cpu().tolist() == [0, 1, 20, 30]
    flat = torch.nn.utils.parameters_to_vector([base, out])
    assert flat.device.type == NAME


def test_views_share_the_memory_of_the_device(pool: Pool) -> None:
    on_one(pool, views_and_sizes)


def moments(world: World) -> None:
    first, last = (torch.Event(NAME, enable_timing=True) for _ in range(2))
    first.record()
    with torch.Stream(NAME) as beside:
        assert torch.accelerator.current_stream() == beside
        last.record()
    assert torch.accelerator.current_stream() != beside
    last.synchronize()
    assert first.elapsed_time(last) >= 0


def test_streams_and_events(pool: Pool) -> None:
    on_one(pool, moments)


def trained(world: World) -> None:
    torch.manual_seed(0)
    build = runpy.run_path(str(GPT))["build"]
    here = build(vocabulary=61, length=12, width=32, layers=2, heads=4)
    there = copy.deepcopy(here).to(NAME)
    tokens = torch.randint(0, 61, (3, 12))
    steps = {model: torch.optim.AdamW(model.parameters(), lr=1e-2) for model in (here, there)}
    for _ in range(2):
        with sdpa_kernel(SDPBackend.MATH):  # the one that both have
            losses = [model(tokens.to(device), tokens.to(device)) for model, device in ((here, "cpu"), (there, NAME))]
        for model, loss in zip((here, there), losses, strict=True):
            steps[model].zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        assert torch.equal(losses[0], losses[1].cpu())
        for (name, ours), theirs in zip(here.named_parameters(), there.parameters(), strict=True):
            assert torch.equal(ours.grad, theirs.grad.cpu()), name
        for optimizer in steps.values():
            optimizer.step()
    assert there.head.weight is there.tokens.weight


def test_training_is_that_of_the_cpu_bit_for_bit(pool: Pool) -> None:
    on_one(pool, trained)


def cast(world: World) -> None:
    value = torch.randn(4, 8, 16, device=NAME, requires_grad=True)
    with torch.autocast(NAME, torch.bfloat16):
        product = value @ value.mT
        attended = torch.nn.functional.scaled_dot_product_attention(value, value, value)
        assert product.dtype == attended.dtype == torch.bfloat16
        assert torch.nn.functional.layer_norm(product, (8,)).dtype == torch.float32
    (product.float().sum() + attended.float().sum()).backward()
    assert value.grad is not None
    assert value.grad.dtype == torch.float32


def test_it_has_autocast(pool: Pool) -> None:
    on_one(pool, cast)
