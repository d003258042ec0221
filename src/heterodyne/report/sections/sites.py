"""Sites that meet seldom: what is inexact, who took part in how many outer steps, and what they cost in bytes and in waiting."""

from __future__ import annotations

from typing import Any

from heterodyne.report.run import Run
from heterodyne.report.words import DASH, byte_size, percent, seconds

__all__ = ["sites_facts", "sites_section", "took_part"]

_DAY_S = 86_400


def sites_facts(run: Run) -> tuple[str, ...]:
    """Return that the run is inexact, how often the sites met, and their traffic in bytes, in words; nothing for a run without sites."""
    sync = run.job.training.sync if run.job is not None else None
    if sync is None or sync.site is None:
        return ()
    outer = run.metrics.outer
    facts = [
        f"inexact, as asked for: site {sync.site} takes over an outer average of {len(sync.shares)} sites every "
        f"{sync.every_of(sync.site)} steps"
    ]
    if len(outer) > 1:
        # The first line has what it took to begin, too.
        each = sum(line.bytes for line in outer[1:]) / len(outer[1:])
        span_s = outer[-1].time_s - outer[0].time_s
        facts.append(
            f"{byte_size(each)} an outer step"
            + (f", {byte_size(each * len(outer[1:]) / span_s * _DAY_S)} a day" if span_s > 0 else "")
        )
        facts.append(f"{seconds(sum(line.wait_s for line in outer) / len(outer))} of waiting in each")
    return tuple(facts)


def sites_section(run: Run) -> dict[str, Any] | None:
    """Return the facts, and for each site its share and in how many outer steps it took part; None for a run without sites."""
    facts = sites_facts(run)
    sync = run.job.training.sync if run.job is not None else None
    if not facts or sync is None:
        return None
    samples = sum(sync.shares.values())
    rows = [
        {
            "name": name,
            "share": f"{share} ({percent(share / samples)})",
            "every": str(sync.every_of(name)),
            "took_part": took_part(run).get(name, DASH),
        }
        for name, share in sync.shares.items()
    ]
    return {"facts": facts, "rows": rows, "bits": sync.bits, "fragments": sync.fragments}


def took_part(run: Run) -> dict[str, str]:
    """Return for each site in how many outer steps it took part, in words; empty before the first one, and for a run without sites."""
    outer, sync = run.metrics.outer, run.job.training.sync if run.job is not None else None
    names = sync.shares if outer and sync is not None else ()
    return {name: f"{sum(name in line.sites for line in outer)} of {len(outer)}" for name in names}
