"""Random numbers of a dataset that belong to the sample: its augmentation is the same whoever reads it, and when."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

__all__ = ["draws_of", "generator_states", "generators_kept", "seed_generators"]


@contextmanager
def draws_of(*key: int | str) -> Iterator[None]:
    """Seeds the generators of Python, NumPy and torch (on the CPU) with ``key``, and gives them back as they were."""
    with generators_kept():
        seed_generators(*key)
        yield


@contextmanager
def generators_kept() -> Iterator[None]:
    """Gives the generators back as they were."""
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])


def seed_generators(*key: int | str) -> None:
    """Seeds them with ``key``, for good."""
    words = np.frombuffer(hashlib.blake2b(repr(key).encode(), digest_size=16).digest(), dtype="<u4")
    random.seed(int(words[0]))
    np.random.seed(int(words[1]))
    torch.default_generator.manual_seed(int(words[2]) << 32 | int(words[3]))


def generator_states() -> tuple[object, ...]:
    """Return where the generators that `draws_of` seeds are; equal states compare equal."""
    numpy: Any = np.random.get_state()
    return random.getstate(), numpy[1].tobytes(), numpy[2:], torch.get_rng_state().numpy().tobytes()
