"""The kinds of devices in a fleet file: what the catalog knows of each, what the file says itself, and what nobody says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType

from heterodyne.cluster.catalog import Accelerator, find, lookup
from heterodyne.cluster.file_values import DevicesEntry
from heterodyne.cluster.fleet_schema import KindSection
from heterodyne.documents import Location
from heterodyne.errors import ClusterError

__all__ = ["Kinds"]

_FOUR_NUMBERS = "peak_tflops: {bf16: 320}, memory: 64 GB, memory_bandwidth: 1.6 TB/s, link_bandwidth: 200 GB/s"


class Kinds:
    """Kinds by any of their names.

    Args:
        sections: ``kinds`` of the file.
        error: makes the error for a message and a place in the file.
        strict: whether a planner's numbers must be known of every kind, and not just its memory, as in a cluster file.
    """

    def __init__(
        self, sections: Mapping[str, KindSection], error: Callable[[str, Location], ClusterError], *, strict: bool
    ) -> None:
        self._error = error
        self._strict = strict
        self._sections = {self.name(kind): section for kind, section in sections.items()}
        self.own = {self.name(kind): self._own(kind, s) for kind, s in sections.items()}
        """The accelerators that the file describes."""

    def name(self, kind: str) -> str:
        """The catalog's name of a kind, or the name as it stands if the catalog does not know it."""
        known = find(kind)
        return known.kind if known else kind

    def memory(self, entry: DevicesEntry, at: Location) -> int:
        """Bytes of a device of an entry. Raises ClusterError if a number is missing that somebody has to state."""
        known = self._known(entry.kind)
        if known is None and (self._strict or entry.memory is None) and entry.kind != "cpu":
            raise self._unknown(entry.kind, at)
        if known is not None and self._strict:
            self._complete(known, entry, at)
        memory = entry.memory if entry.memory is not None else known.memory_bytes if known else None
        if memory is None and entry.kind == "cpu":
            raise self._error("a cpu needs 'memory': how much each worker may use, as in 'memory: 16 GiB'", at)
        if memory is None:
            raise self._error(
                f"the catalog knows {entry.kind!r} but not its memory; give 'memory', as in 'memory: 64 GB'", at
            )
        return memory

    def backend(self, kind: str) -> str:
        known = self._known(kind)
        return known.backend if known else "cpu" if kind == "cpu" else "cuda"

    def watts(self, kind: str) -> float | None:
        known = self._known(kind)
        return known.tdp_w if known else None

    def price(self, kind: str) -> float | None:
        """Usd per device and hour, if ``kinds`` states it."""
        section = self._sections.get(kind)
        return section.usd_per_hour if section else None

    def link_bandwidth(self, kinds: list[str], at: Location) -> float | None:
        """Bytes per second in a node of these kinds: the slowest. None if one is not known."""
        for kind in kinds:
            known = self._known(kind)
            if known is None or known.link_bandwidth_bytes_per_s is None:
                if not self._strict or kind == "cpu":
                    return None
                raise self._error(
                    f"nobody states the link between the {kind} of a node; give 'link: {{bandwidth: 64 GB/s, latency: 10 us}}', "
                    "or 'link: null' if it is not known",
                    at,
                )
        return min(known.link_bandwidth_bytes_per_s or 0 for known in map(self._known, kinds) if known) or None

    def _known(self, kind: str) -> Accelerator | None:
        return self.own.get(self.name(kind)) or find(kind)

    def _own(self, kind: str, section: KindSection) -> Accelerator:
        known = find(kind)
        if known is None and section.missing:
            raise self._error(
                f"{kind!r} is not in the catalog and needs {', '.join(section.missing)} too, as in '{_FOUR_NUMBERS}'",
                ("kinds", kind),
            )
        base = known or Accelerator(
            kind=kind, backend="cuda", aliases=(), peak_flops={}, measured_flops={}, memory_bytes=None,
            memory_bandwidth_bytes_per_s=None, link_bandwidth_bytes_per_s=None, link_type=None, tdp_w=None,
            prices=(), sources=(), notes="",
        )  # fmt: skip
        peaks: dict[str, float] = {precision: tflops * 1e12 for precision, tflops in section.peak_tflops.items()}
        return replace(
            base,
            backend=section.backend or base.backend,
            peak_flops=MappingProxyType({**base.peak_flops, **peaks}),
            measured_flops=MappingProxyType({p: best for p, best in base.measured_flops.items() if p not in peaks}),
            memory_bytes=section.memory or base.memory_bytes,
            memory_bandwidth_bytes_per_s=section.memory_bandwidth or base.memory_bandwidth_bytes_per_s,
            link_bandwidth_bytes_per_s=section.link_bandwidth or base.link_bandwidth_bytes_per_s,
            tdp_w=section.watts or base.tdp_w,
            sources=(*base.sources, "the fleet file"),
        )

    def _complete(self, known: Accelerator, entry: DevicesEntry, at: Location) -> None:
        stated = {
            "peak_tflops": known.peak_flops or None,
            "memory": entry.memory or known.memory_bytes,
            "memory_bandwidth": known.memory_bandwidth_bytes_per_s,
        }
        missing = [key for key, value in stated.items() if value is None]
        if missing:
            raise self._error(
                f"no source of the catalog states {', '.join(missing)} of {known.kind}; give them under 'kinds: {{{known.kind}: ...}}', "
                f"as in '{_FOUR_NUMBERS}'",
                at,
            )

    def _unknown(self, kind: str, at: Location) -> ClusterError:
        try:
            lookup(kind)
        except ClusterError as unknown:
            end = "" if str(unknown).endswith("?") else "."
            described = f"Or describe it: 'kinds: {{{kind}: {{{_FOUR_NUMBERS}}}}}'"
            if not self._strict:
                described = "Or, if that is its name, give its 'memory', as in 'memory: 64 GB'"
            return self._error(f"{unknown}{end} {described}", at)
        raise AssertionError(kind)
