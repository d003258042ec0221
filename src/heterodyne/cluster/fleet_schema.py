"""What a person can write in a fleet file, section by section; `cluster.fleet_file` says what it means."""

from __future__ import annotations

from typing import Annotated, Final, Literal, Self, TypeAlias, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from heterodyne.cluster.file_values import (
    Backend,
    Bandwidth,
    Count,
    DevicesEntry,
    Latency,
    LinkValues,
    Memory,
    Name,
    some,
)
from heterodyne.documents import Section

__all__ = ["LEVELS", "FileSection", "KindSection", "LinkSection", "NodeSection", "PlaceSection", "PodSection"]

LEVELS: Final = ("regions", "zones", "pods", "nodes")
"""From the outside in."""


def _between(ends: object) -> object:
    if isinstance(ends, str) and (ends == "all" or ends in LEVELS):
        return ends
    if isinstance(ends, list) and len(ends) == 2 and all(isinstance(end, str) for end in ends):
        return ends
    raise ValueError(
        f"{ends!r} is neither two places or nodes, as in '[us-east/a, us-east/b]', nor one of all, {', '.join(LEVELS)}"
    )


Usd: TypeAlias = Annotated[float, Field(ge=0, le=1000, strict=True)]
Watts: TypeAlias = Annotated[float, Field(gt=0, le=100_000, strict=True)]
Tflops: TypeAlias = Annotated[float, Field(gt=0, le=1_000_000, strict=True)]
Precision: TypeAlias = Literal["fp32", "tf32", "fp16", "bf16", "fp8"]


_Holder = TypeVar("_Holder", bound=Section)


def _holds_one(section: _Holder, *levels: str) -> _Holder:
    filled = [level for level in levels if getattr(section, level)]
    if len(filled) != 1:
        held = f"has {' and '.join(filled)}; give one of them" if filled else f"is empty; give {' or '.join(levels)}"
        raise ValueError(held)
    return section


class KindSection(Section):
    """A kind that the catalog does not know, or whose numbers are others here. Bandwidths are in one direction."""

    backend: Backend | None = None
    peak_tflops: dict[Precision, Tflops] = {}
    memory: Memory | None = None
    memory_bandwidth: Bandwidth | None = None
    link_bandwidth: Bandwidth | None = None
    watts: Watts | None = None
    usd_per_hour: Usd | None = None

    @property
    def missing(self) -> tuple[str, ...]:
        """Return which of the four numbers that a planner needs are not given."""
        given = {
            "peak_tflops": self.peak_tflops or None,
            "memory": self.memory,
            "memory_bandwidth": self.memory_bandwidth,
            "link_bandwidth": self.link_bandwidth,
        }
        return tuple(key for key, value in given.items() if value is None)


class LinkSection(Section):
    """A link, the price of what goes over it, or both."""

    between: Annotated[tuple[str, str] | Literal["all", "regions", "zones", "pods", "nodes"], BeforeValidator(_between)]
    bandwidth: Bandwidth | None = None
    latency: Latency | None = None
    usd_per_gb: Annotated[float, Field(ge=0, le=100, strict=True)] | None = None

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if (self.bandwidth is None) != (self.latency is None):
            raise ValueError("bandwidth and latency go together, as in 'bandwidth: 100 Gb/s, latency: 10 us'")
        if self.bandwidth is None and self.usd_per_gb is None:
            raise ValueError("says nothing; give bandwidth and latency, or usd_per_gb")
        return self


class _Priced(Section):
    """What a place says of everything in it; what stands further inside says it otherwise."""

    prices: dict[str, Usd] = {}
    spot: bool | None = None


class NodeSection(Section):
    """Alike nodes: of one ``kind``, or with a list of ``devices``. ``link: null``: nothing is known of what joins their devices."""

    name: Name | None = None
    count: Count | None = None
    kind: Annotated[str, Field(min_length=1)] | None = None
    devices_per_node: Annotated[int, Field(ge=1, le=1024, strict=True)] = 1
    memory: Memory | None = None
    devices: tuple[DevicesEntry, ...] = ()
    host_memory: Memory | None = None
    link: LinkValues | None = None
    usd_per_hour: Usd | None = None
    spot: bool | None = None
    watts: Watts | None = None

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if self.kind is None and not self.devices:
            raise ValueError(
                "has no devices; give 'kind' and 'devices_per_node', as in 'kind: T4, devices_per_node: 4'"
            )
        if self.devices and not self.model_fields_set.isdisjoint({"kind", "devices_per_node", "memory"}):
            raise ValueError("kind and memory go into the list of devices, as in 'devices: [{kind: T4, count: 4}]'")
        return self

    @property
    def entries(self) -> tuple[DevicesEntry, ...]:
        """Return what stands in each node."""
        if self.kind is None:
            return self.devices
        return (DevicesEntry.model_construct(kind=self.kind, count=self.devices_per_node, memory=self.memory),)


class PlaceSection(_Priced):
    """A place with a name; ``link`` is what a thing inside has towards another thing inside: a zone towards a zone of its region."""

    name: Name
    link: LinkValues | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,)


class PodSection(PlaceSection):
    count: Count | None = None
    nodes: Annotated[tuple[NodeSection, ...], AfterValidator(some)]

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,) if self.count is None else tuple(f"{self.name}-{i}" for i in range(self.count))


class ZoneSection(PlaceSection):
    pods: tuple[PodSection, ...] = ()
    nodes: tuple[NodeSection, ...] = ()

    @model_validator(mode="after")
    def _one_level(self) -> Self:
        return _holds_one(self, "pods", "nodes")


class RegionSection(PlaceSection):
    zones: tuple[ZoneSection, ...] = ()
    pods: tuple[PodSection, ...] = ()
    nodes: tuple[NodeSection, ...] = ()

    @model_validator(mode="after")
    def _one_level(self) -> Self:
        return _holds_one(self, "zones", "pods", "nodes")


class FileSection(_Priced):
    name: Annotated[str, Field(min_length=1)] = "cluster"
    kinds: dict[str, KindSection] = {}
    regions: tuple[RegionSection, ...] = ()
    zones: tuple[ZoneSection, ...] = ()
    pods: tuple[PodSection, ...] = ()
    nodes: tuple[NodeSection, ...] = ()
    links: tuple[LinkSection, ...] = ()

    @model_validator(mode="after")
    def _one_level(self) -> Self:
        return _holds_one(self, *LEVELS)
