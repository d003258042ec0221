"""Sites that meet seldom: the part of a job that says who they are, when they meet, and what becomes of their weights then.

Each site trains by itself on its share of every global batch. Every so many of its steps an *outer step* takes one fragment of the
parameters: each site tells how far its weights have moved since it last had the global ones (its pseudo-gradient), the mean of these,
weighted by what each site's losses have counted since, is the gradient of an outer SGD on the global weights, and all take these over
(Douillard et al., "DiLoCo", 2311.08105; fragments, delay and mixing: "Streaming DiLoCo", 2501.18512).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from heterodyne.documents import Section, Whole

__all__ = ["OF_ANY_RUN", "OuterSteps", "SyncSection"]

Count = Annotated[Whole, Field(ge=1)]
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,62}")
OF_ANY_RUN = ("at", "grace_s", "start_s")
"""Fields that decide no losses."""


class SyncSection(Section):
    """How sites that meet seldom are synchronised. Inexact, so only where it is asked for.

    Args:
        sites: ``outer``: by outer steps, see the module.
        shares: the samples of each global batch that each site has, by its name, in the order of the batch. They add up to
            ``training.global_batch_size``. The first site keeps the global weights.
        at: ``HOST:PORT`` of the first site, where the others reach it.
        site: the one that this launch is (``--site``).
        every: the steps of a site between two outer steps of the same fragment; a mapping gives each site its own. ``training.steps`` are
            those of the site that does most, the others do theirs in proportion.
        fragments: into so many parts of about as many bytes the parameters are dealt. Their outer steps are spread over ``every``.
        delay: steps that a site does between sending its pseudo-gradient and taking over what came of it.
        mix: how much of the global weights a site takes over, ``local + mix * (global - local)``; None: 1 without a delay, 0.5 with one.
        lr, momentum, nesterov: of the outer SGD.
        bits: of each number of pseudo-gradients, and of what comes back: 32 (fp32), 16 (bf16) or 8 (whole numbers, with a scale for each
            256 of them). What rounding leaves out of one is put into the next.
        grace_s: seconds from the first site that comes to an outer step until it is done without those that have not come.
        start_s: seconds in which the sites find each other at the beginning; it is begun without those that have not come by then.
    """

    sites: Literal["outer"]
    shares: Annotated[dict[str, Count], Field(min_length=2, max_length=256)]
    at: str
    site: str | None = None
    every: Count | dict[str, Count] = 100
    fragments: Count = 1
    delay: Whole = 0
    mix: Annotated[float, Field(gt=0, le=1)] | None = None
    lr: Annotated[float, Field(gt=0)] = 0.7
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    nesterov: bool = True
    bits: Literal[32, 16, 8] = 32
    grace_s: Annotated[float, Field(gt=0)] = 60.0
    start_s: Annotated[float, Field(gt=0)] = 600.0

    @field_validator("at")
    @classmethod
    def _an_address(cls, value: str) -> str:
        host, port = _parts(value)
        if not host or not port.isdecimal() or not 1 <= int(port) <= 65_535:
            raise ValueError(f"{value!r} is no HOST:PORT, with a port from 1 to 65535")
        return value

    @field_validator("shares")
    @classmethod
    def _names(cls, value: dict[str, int]) -> dict[str, int]:
        wrong = next((name for name in value if not _NAME.fullmatch(name)), None)
        if wrong is not None:
            raise ValueError(f"{wrong!r} is no name of a site: letters, digits, '_', '.' and '-', 63 at most")
        return value

    @field_validator("every", "site")
    @classmethod
    def _known(cls, value: Any, info: Any) -> Any:
        sites = info.data.get("shares")
        named = set(value) if isinstance(value, dict) else {value} if isinstance(value, str) else set()
        if sites is None or not named:
            return value
        if unknown := sorted(named - set(sites)):
            raise ValueError(f"there is no site {unknown[0]!r} in shares, which has {', '.join(sites)}")
        if isinstance(value, dict) and (missing := [name for name in sites if name not in value]):
            raise ValueError(f"{missing[0]} is missing: give every site its own, or one number for all")
        return value

    @model_validator(mode="after")
    def _in_time(self) -> Self:
        least = min(map(self.every_of, self.shares))
        if self.fragments > least:
            raise ValueError(
                f"{self.fragments} fragments in {least} steps: give at most one fragment a step of `every`"
            )
        if self.delay >= least // self.fragments:
            raise ValueError(
                f"a delay of {self.delay} steps, and the next outer step is due after {least // self.fragments}: one is done before the "
                "next is begun, so give a shorter delay, fewer fragments or a longer `every`"
            )
        return self

    @property
    def address(self) -> tuple[str, int]:
        """Return host and port of `at`."""
        host, port = _parts(self.at)
        return host, int(port)

    @property
    def keeper(self) -> str:
        """Return the site that keeps the global weights."""
        return next(iter(self.shares))

    @property
    def taken_over(self) -> float:
        """Return `mix`, or what it is by default."""
        return self.mix if self.mix is not None else 0.5 if self.delay else 1.0

    def every_of(self, site: str) -> int:
        """Return the steps of a site between two outer steps of a fragment."""
        return self.every[site] if isinstance(self.every, dict) else self.every

    def first_of(self, site: str) -> int:
        """Return the place in the global batch at which the samples of a site begin."""
        names = list(self.shares)
        return sum(self.shares[name] for name in names[: names.index(site)])

    def steps_of(self, site: str, steps: int) -> int:
        """Return the steps that a site does, where the one that does most does ``steps``."""
        return -(-steps * self.every_of(site) // max(map(self.every_of, self.shares)))

    def outer_steps(self, site: str, steps: int) -> OuterSteps:
        """Return when a site comes to outer steps; ``steps`` as for `steps_of`."""
        return OuterSteps(every=self.every_of(site), fragments=self.fragments, steps=self.steps_of(site, steps))


@dataclass(frozen=True, kw_only=True)
class OuterSteps:
    """When a site comes to the outer steps, which have the same numbers at all sites: number k is of fragment ``k mod fragments``.

    After the last step of training one more is made of each fragment that the last round had taken earlier, so that all sites end with
    the same weights.
    """

    every: int
    fragments: int
    steps: int

    @property
    def count(self) -> int:
        """Return how many there are."""
        return (-(-self.steps // self.every) + 1) * self.fragments - 1

    def due(self, number: int) -> int:
        """Return after how many steps of the site one is due; 0 for what is before the first."""
        return min(self.steps, (number + 1) * self.every // self.fragments)

    def is_last(self, number: int) -> bool:
        """Return whether no later one is of the same fragment."""
        return number >= self.count - self.fragments

    def fragment(self, number: int) -> int:
        """Return the fragment of an outer step."""
        return number % self.fragments


def _parts(address: str) -> tuple[str, str]:
    host, _, port = address.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), port
