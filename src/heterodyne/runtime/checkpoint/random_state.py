"""The state of every random number generator that training may draw from, on one rank, as tensors and plain values."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

__all__ = ["advance_random_state", "random_state", "restore_random_state", "taken", "unchanged_random_state"]


def random_state(generators: tuple[Any, ...] | None = None) -> dict[str, Any]:
    """Of Python, NumPy, torch, and this rank's accelerator if there is one in use; as they are now, or were when these were `taken`."""
    python, numpy, of_torch, accelerator = taken() if generators is None else generators
    version, words, gauss = python
    name, keys, place, has_gauss, numpy_gauss = numpy
    state: dict[str, Any] = {
        "python": {"version": version, "words": torch.tensor(words), "gauss": gauss},
        "numpy": {
            "generator": str(name),
            "keys": torch.from_numpy(np.asarray(keys).astype(np.int64)),
            "place": int(place),
            "has_gauss": int(has_gauss),
            "gauss": float(numpy_gauss),
        },
        "torch": of_torch,
    }
    if accelerator is not None:
        state["accelerator"] = accelerator
    return state


def taken() -> tuple[Any, ...]:
    """The states of the generators, as they give them: so cheap that each step can begin with it."""
    module = _accelerator()
    return (
        random.getstate(),
        np.random.get_state(),
        torch.get_rng_state(),
        None if module is None else module.get_rng_state(),
    )


def restore_random_state(state: dict[str, Any]) -> None:
    """Put back what `random_state` took. An accelerator's state is left out where there is none."""
    python, numpy = state["python"], state["numpy"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    keys = numpy["keys"].numpy().astype(np.uint32)
    np.random.set_state((numpy["generator"], keys, numpy["place"], numpy["has_gauss"], numpy["gauss"]))
    torch.set_rng_state(state["torch"])
    module = _accelerator()
    if module is not None and "accelerator" in state:
        module.set_rng_state(state["accelerator"])


def advance_random_state(before: tuple[Any, ...], after: tuple[Any, ...]) -> None:
    """Bring each generator of the host that is in its state ``before`` to that ``after``; both as `taken`."""
    python, numpy, of_torch, _ = taken()
    if python == before[0]:
        random.setstate(after[0])
    if all(map(np.array_equal, numpy, before[1])):
        np.random.set_state(after[1])
    if torch.equal(of_torch, before[2]):
        torch.set_rng_state(after[2])


@contextmanager
def unchanged_random_state() -> Iterator[None]:
    """What is drawn after the block is not changed by what happens inside, so that samplers draw the same on every rank."""
    before = random_state()
    try:
        yield
    finally:
        restore_random_state(before)


def _accelerator() -> Any:
    """The module of the accelerator's device type (``torch.cuda``), None if this process has not touched it."""
    if not torch.accelerator.is_available():
        return None
    device = torch.accelerator.current_accelerator()
    module = None if device is None else torch.get_device_module(device)
    return module if module is not None and module.is_initialized() else None
