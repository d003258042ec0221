"""What ranks have to have in common before they can train one model: the version of torch, and the state of this package."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import torch

import heterodyne

__all__ = ["REQUIRED", "software", "unlike"]

REQUIRED = ("torch", "heterodyne")
"""What must be the same. Other versions of Python may meet, as long as what they send each other is understood."""


@cache
def software() -> Mapping[str, str]:
    """Return the versions of what this process runs; that of this package with a hash of its files."""
    return {
        "Python": platform.python_version(),
        "torch": str(torch.__version__),
        "heterodyne": f"{heterodyne.__version__}, files {_digest_of_package()[:12]}",
    }


def unlike(own: Mapping[str, str], first: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """Yield the name of each software of another version, with both. Builds of one torch for several makers are alike (2.13.0+rocm6.4)."""
    for name, version in own.items():
        other = first.get(name, "none")
        if _released(name, version) != _released(name, other):
            yield name, version, other


def _released(name: str, version: str) -> str:
    return version.partition("+")[0] if name == "torch" else version


def _digest_of_package() -> str:
    found = hashlib.blake2b(digest_size=16)
    root = Path(heterodyne.__file__).parent
    for path in sorted(root.rglob("*.py")):
        found.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return found.hexdigest()
