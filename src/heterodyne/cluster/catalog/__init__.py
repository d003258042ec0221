"""The catalog of accelerators: what datasheets and named sources say of each kind, in YAML files beside this one.

A number that no source states is None; nothing is guessed. The numbers here describe one *device as the driver shows it*:
a card that holds two such devices is divided between them. Measured speeds are not here (see `cluster.profile`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType

from pydantic import Field

from heterodyne.documents import Section, read_yaml, validate
from heterodyne.errors import ClusterError

__all__ = ["Accelerator", "Price", "catalog", "collectives_of", "find", "library_of", "lookup"]

_FILES = MappingProxyType({"nvidia.yaml": "nvidia", "amd.yaml": "amd", "other.yaml": ""})
_MAKERS = ("nvidia", "tesla", "geforce", "amd", "instinct", "radeon", "intel", "huawei", "google", "aws")


@dataclass(frozen=True, kw_only=True, slots=True)
class Price:
    """What a provider asked for one device for one hour, at the time of the source."""

    usd_per_hour: float
    provider: str
    source: str


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """One kind of device.

    Args:
        kind: its name here.
        backend: the torch device type ("cuda" for AMD too).
        aliases: what drivers call it.
        peak_flops: dense peak in FLOP/s by precision: ``fp32`` (vector), ``tf32``, ``fp16``, ``bf16``, ``fp8``.
        measured_flops: best matrix product that a source measured, in FLOP/s by precision.
        memory_bytes: as on the datasheet; the driver keeps some of it.
        memory_bandwidth_bytes_per_s: of the device's own memory.
        link_bandwidth_bytes_per_s: to the other devices of its node, in one direction.
        link_type: what that link is.
        tdp_w: watts.
        prices: snapshots; providers differ two- to fourfold.
        sources: who states the numbers (prices name their own).
        notes: what a reader of the numbers should know.
        maker: ``nvidia`` or ``amd``; "" for any other.
    """

    kind: str
    backend: str
    aliases: tuple[str, ...]
    peak_flops: Mapping[str, float]
    measured_flops: Mapping[str, float]
    memory_bytes: int | None
    memory_bandwidth_bytes_per_s: float | None
    link_bandwidth_bytes_per_s: float | None
    link_type: str | None
    tdp_w: float | None
    prices: tuple[Price, ...]
    sources: tuple[str, ...]
    notes: str
    maker: str = ""

    @property
    def collectives(self) -> str:
        """The library by which its devices exchange tensors: no two of these talk to each other."""
        return collectives_of(self.backend, self.maker)


def library_of(kind: str, backend: str) -> str:
    """The library by which devices of a kind exchange tensors; where nothing is known of the kind, that of their backend."""
    known = find(kind)
    return collectives_of(backend) if known is None else known.collectives


def collectives_of(backend: str, maker: str = "") -> str:
    """The library of a torch device type: of ``cuda`` NCCL, and RCCL where AMD makes it; any other has one of its own."""
    if backend != "cuda":
        return backend
    return "RCCL" if maker == "amd" else "NCCL"


class _PriceEntry(Section):
    usd_per_hour: float = Field(gt=0)
    provider: str = Field(min_length=1)
    source: str = Field(min_length=1)


class _Entry(Section):
    """One entry of a catalog file; the units are in the keys."""

    backend: str
    aliases: tuple[str, ...] = ()
    devices_per_card: int = Field(default=1, ge=1)
    peak_dense_tflops: dict[str, float] = {}
    measured_max_matmul_tflops: dict[str, float] = {}
    memory_gb: float | None = Field(default=None, gt=0)
    memory_bandwidth_gb_per_s: float | None = Field(default=None, gt=0)
    link_gb_per_s_per_direction: float | None = Field(default=None, gt=0)
    link_type: str | None = None
    tdp_w: float | None = Field(default=None, gt=0)
    prices: tuple[_PriceEntry, ...] = ()
    sources: tuple[str, ...] = Field(min_length=1)
    notes: str = ""

    def accelerator(self, kind: str, maker: str) -> Accelerator:
        parts = self.devices_per_card

        def share(value: float | None, unit: float = 1.0) -> float | None:
            return None if value is None else value * unit / parts

        return Accelerator(
            kind=kind,
            backend=self.backend,
            aliases=self.aliases,
            peak_flops=MappingProxyType({p: peak * 1e12 / parts for p, peak in self.peak_dense_tflops.items()}),
            measured_flops=MappingProxyType(
                {p: peak * 1e12 / parts for p, peak in self.measured_max_matmul_tflops.items()}
            ),
            memory_bytes=None if self.memory_gb is None else round(self.memory_gb * 10**9 / parts),
            memory_bandwidth_bytes_per_s=share(self.memory_bandwidth_gb_per_s, 1e9),
            link_bandwidth_bytes_per_s=share(self.link_gb_per_s_per_direction, 1e9),
            link_type=self.link_type,
            tdp_w=share(self.tdp_w),
            prices=tuple(
                Price(usd_per_hour=p.usd_per_hour / parts, provider=p.provider, source=p.source) for p in self.prices
            ),
            sources=self.sources,
            notes=self.notes,
            maker=maker,
        )


@cache
def catalog() -> Mapping[str, Accelerator]:
    """Every accelerator by its kind, in the order of the files."""
    entries: dict[str, Accelerator] = {}
    for name, maker in _FILES.items():
        path = Path(str(files(__package__).joinpath(name)))
        content, lines = read_yaml(path, ClusterError)
        for kind, fields in content.items():
            inner = {at[1:]: line for at, line in lines.items() if at[:1] == (kind,)}
            entries[kind] = validate(_Entry, fields, error=ClusterError, path=str(path), lines=inner).accelerator(
                kind, maker
            )
    return MappingProxyType(entries)


def find(name: str) -> Accelerator | None:
    """The accelerator of that kind, or that drivers report by that name; None if the catalog does not have it."""
    return _by_name().get(_plain(name))


def lookup(kind: str) -> Accelerator:
    """The accelerator of that kind or driver name. Raises ClusterError with the names that come close."""
    found = find(kind)
    if found is not None:
        return found
    plain = _plain(kind)
    longer = [a.kind for a in catalog().values() if plain and _plain(a.kind).startswith(plain)]
    spelled = get_close_matches(plain, _by_name(), n=4, cutoff=0.5)
    close = list(dict.fromkeys(longer + [_by_name()[name].kind for name in spelled]))[:4]
    hint = f"did you mean {' or '.join(close)}?" if close else "heterodyne kinds lists all."
    raise ClusterError(f"the catalog has no accelerator {kind!r}; {hint}")


@cache
def _by_name() -> Mapping[str, Accelerator]:
    names: dict[str, Accelerator] = {}
    for accelerator in catalog().values():
        for name in (accelerator.kind, *accelerator.aliases):
            other = names.setdefault(_plain(name), accelerator)
            if other is not accelerator:
                raise ClusterError(f"the catalog gives the name {name!r} to {other.kind} and to {accelerator.kind}")
    return MappingProxyType(names)


def _plain(name: str) -> str:
    """A name without its maker, in lower case, with ``-`` between words: ``Tesla V100-SXM2-16GB`` is ``v100-sxm2-16gb``."""
    words = name.lower().replace("_", "-").replace(" ", "-").split("-")
    return "-".join(word for word in words if word and word not in _MAKERS)
