"""Seconds of one optimizer step on the device of this rank, beside those of all others."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from heterodyne.measure.notes import words_of
from heterodyne.measure.sampling import sample
from heterodyne.measure.workbench import Workbench

__all__ = ["measure_optimizer"]


def measure_optimizer(
    shapes: Sequence[Sequence[int]],
    name: str,
    bench: Workbench,
    *,
    budget_s: float = 10.0,
    most_bytes: int = 256 * 2**20,
    on_host: bool = False,
) -> float:
    """Seconds of one step of ``adamw``, ``adamw8bit``, ``sgd`` (with momentum) or ``adafactor`` per byte of fp32 parameters; 0 without any.

    Real tensors of the given shapes, up to ``most_bytes`` of them (four times that with gradients and states): beyond the
    caches, bytes are what counts. ``on_host``: the host keeps state and master weights, so gradients go there and weights come back.

    Raises MeasureError, on every rank alike, if it fails on any.
    """
    failure: str | None = None
    step: Callable[[], tuple[object, ...]] | None = None
    cause: Exception | None = None
    seconds = 0.0
    bench.meet()
    bench.progress("the optimizer", 1, 1)
    try:
        parameters = _parameters(shapes, bench, most_bytes)
        if parameters:
            step = _optimizer_step(parameters, name, bench, on_host=on_host)
            timing = sample(step, bench.stopwatch, bench.sampling, budget_s=budget_s)
            seconds = timing.seconds / sum(4 * p.numel() for p in parameters)
    except Exception as error:  # noqa: BLE001  # whatever it is, the others wait for the outcome
        failure, step, cause = f"the optimizer {name} cannot be measured: {words_of(error)}", None, error
    bench.meet(step, failure=failure, cause=cause)
    return seconds


def _parameters(shapes: Sequence[Sequence[int]], bench: Workbench, most_bytes: int) -> list[torch.nn.Parameter]:
    """fp32 parameters with gradients, the first one whatever its size and then as many as ``most_bytes`` allow."""
    generator = torch.Generator(bench.device).manual_seed(bench.seed)
    parameters: list[torch.nn.Parameter] = []
    total = 0
    for shape in shapes:
        bytes_here = 4 * torch.Size(shape).numel()
        if bytes_here == 0 or (total and total + bytes_here > most_bytes):
            continue
        parameter = torch.nn.Parameter(torch.zeros(tuple(shape), device=bench.device))
        parameter.grad = torch.empty_like(parameter).normal_(generator=generator)
        parameters.append(parameter)
        total += bytes_here
    return parameters


def _in_8_bits(updated: Sequence[torch.nn.Parameter]) -> torch.optim.Optimizer:
    from torchao.optim import AdamW8bit  # an extra, which a job that names it has been checked for

    made: torch.optim.Optimizer = AdamW8bit(updated, lr=1e-8)
    return made


def _optimizer_step(
    parameters: Sequence[torch.nn.Parameter], name: str, bench: Workbench, *, on_host: bool = False
) -> Callable[[], tuple[object, ...]]:
    """``on_host``: of copies there, which get the gradients and give the weights back."""
    updated = [torch.nn.Parameter(p.detach().to("cpu", copy=True)) for p in parameters] if on_host else list(parameters)
    # A learning rate of almost nothing: the weights stay in the range of ordinary numbers however often this is repeated.
    made: dict[str, Callable[[], torch.optim.Optimizer]] = {
        "adamw": lambda: torch.optim.AdamW(updated, lr=1e-8, fused=True),
        "adamw8bit": lambda: _in_8_bits(updated),
        "sgd": lambda: torch.optim.SGD(updated, lr=1e-8, momentum=0.9, fused=True),
        "adafactor": lambda: torch.optim.Adafactor(updated, lr=1e-8, foreach=False),
    }
    optimizer = made[name]()
    clock = bench.stopwatch

    def step() -> tuple[object, ...]:
        start = clock.mark()
        if on_host:
            for there, here in zip(updated, parameters, strict=True):
                there.grad = None if here.grad is None else here.grad.to("cpu")
        optimizer.step()
        if on_host:
            with torch.no_grad():
                for there, here in zip(updated, parameters, strict=True):
                    here.copy_(there)
        return start, clock.mark()

    return step
