"""Predictions beside measurements: of the run, of memory, of each rank's seconds."""

from __future__ import annotations

from typing import Any

from heterodyne.report.compare import Claim, Comparison
from heterodyne.report.tables import claim_text
from heterodyne.report.words import change, kind_name

__all__ = ["prediction_section"]


def prediction_section(comparison: Comparison) -> dict[str, Any]:
    """The errors of the run and of each device's memory as lines, those of each rank's seconds as a matrix."""
    names = {"step": "Step time", "samples/s": "Samples per second", "efficiency": "Efficiency"}
    ranks = dict.fromkeys(c.rank for c in comparison.seconds if c.rank is not None)
    return {
        "lines": [_claim(c, names.get(c.what, c.what)) for c in comparison.run],
        "memory": [_claim(c, c.device) for c in comparison.memory],
        "kinds": [kind_name(kind) for kind in comparison.kinds],
        "ranks": [
            {"rank": r, "device": comparison.of_rank(r)[0].device, "cells": [_claim(c, c.what) for c in comparison.of_rank(r)]}
            for r in ranks
        ],
    }  # fmt: skip


def _claim(claim: Claim, name: str) -> dict[str, str]:
    return {
        "name": name,
        "predicted": claim_text(claim, claim.predicted),
        "measured": claim_text(claim, claim.measured),
        "error": change(claim.error),
    }
