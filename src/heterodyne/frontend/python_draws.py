"""Random numbers that a plan cannot give each sample: those of Python and numpy, which a trace takes once forever and each device for
itself, and those of torch's generator where a forward seeds it again, whose masks Heterodyne draws from the run's seed.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from heterodyne.errors import CaptureError
from heterodyne.frontend.faults import line_now

__all__ = ["PythonDraws"]

Generator: TypeAlias = random.Random | np.random.Generator | np.random.RandomState


class PythonDraws(TorchFunctionMode):
    """Sees, while a forward runs, after which line the generators of Python or numpy have drawn, or that of torch is seeded."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._own = _generators_of(model)
        self._first: object = None
        self._line: str | None = None
        self._seed = 0
        self._seeding: str | None = None

    def begin(self) -> None:
        """To be called before the mode is entered, where the state of torch's generator is restored later (fork_rng)."""
        self._first = self._state()
        self._seed = torch.initial_seed() ^ 0x5EED  # a forward may seed with the same as its script did
        torch.default_generator.manual_seed(self._seed)

    def __torch_function__(  # type: ignore[no-untyped-def]  # as torch declares it
        self, func, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if self._line is None and self._state() != self._first:
            self._line = line_now()
        if self._seeding is None and torch.initial_seed() != self._seed:
            self._seeding = line_now()
        return func(*args, **(kwargs or {}))

    def refuse(self) -> None:
        """Raise CaptureError, with the first op after the draw or the seeding, if there was one."""
        if self._line is not None or self._state() != self._first:
            place = f"{self._line}\n" if self._line else ""
            raise CaptureError(
                f"{place}forward draws random numbers from Python's random or from numpy, here or just before. A captured graph would keep "
                "the first draw forever, and each micro-batch of each device would draw its own. Draw them for each sample with "
                "torch.rand(x.shape[0], ...), or in the data."
            )
        if self._seeding is not None or torch.initial_seed() != self._seed:
            place = f"{self._seeding}\n" if self._seeding else ""
            raise CaptureError(
                f"{place}forward seeds torch's generator (torch.manual_seed), here or just above. Heterodyne draws for each sample from "
                "the run's seed and the step, the same under every plan, so the seed has no effect. Leave it out, or draw the noise "
                "once and keep it in a buffer (register_buffer)."
            )

    def _state(self) -> object:
        name, keys, *rest = np.random.get_state(legacy=True)  # the one that models draw from
        return random.getstate(), name, np.asarray(keys).tobytes(), *rest, [_state_of(own) for own in self._own]


def _state_of(generator: Generator) -> object:
    if isinstance(generator, random.Random):
        return generator.getstate()
    return str(
        generator.bit_generator.state
        if isinstance(generator, np.random.Generator)
        else generator.get_state(legacy=False)
    )


def _generators_of(model: nn.Module) -> list[Generator]:
    """The generators that forward can name: attributes of the modules, and what stands in the files of their classes."""
    files = {type(module).__module__ for module in model.modules()}
    places = [vars(module) for module in model.modules()] + [
        vars(sys.modules[name]) for name in files if name in sys.modules
    ]
    found = {id(value): value for place in places for value in list(place.values()) if isinstance(value, Generator)}
    return [value for value in found.values() if not isinstance(value, random.SystemRandom)]
