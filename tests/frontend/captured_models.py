"""The small models captured, once for all tests of a process."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn

from frontend.tiny_models import fresh
from heterodyne.frontend import Captured, trace


@dataclass(frozen=True, kw_only=True)
class Capture:
    """``before`` and ``after``: what the model and the generator were."""

    captured: Captured
    before: tuple[Any, ...]
    after: tuple[Any, ...]


@cache
def capture_of(name: str) -> Capture:
    model, batch = fresh(name)
    before = _state(model)
    captured = trace(model, batch)
    return Capture(captured=captured, before=before, after=_state(model))


def captured_case(name: str) -> Captured:
    return capture_of(name).captured


def _state(model: nn.Module) -> tuple[Any, ...]:
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return (
        [(name, id(t), t._version, t.grad) for name, t in tensors],
        [(name, id(m), type(m), m.training, sorted(vars(m))) for name, m in model.named_modules()],
        torch.random.get_rng_state().tolist(),
    )
