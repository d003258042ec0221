"""Profiles kept on disk, under a key that changes with everything that decides how fast a model runs, as far as it has a name."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from heterodyne.cluster.profile import PROFILE_VERSION, Profile
from heterodyne.cluster.spec import Cluster
from heterodyne.errors import MeasureError

__all__ = ["Cache", "default_folder", "profile_key"]


def default_folder(variables: Mapping[str, str]) -> Path:
    """``$XDG_CACHE_HOME/heterodyne``, or ``~/.cache/heterodyne``, from the variables of an environment."""
    base = variables.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "heterodyne"


def profile_key(
    *,
    model: str,
    cluster: Cluster,
    precision: str,
    micro_batch_sizes: Sequence[int],
    while_faster: bool = False,
    compiled: bool = False,
    optimizer: str,
    torch_versions: Sequence[str],
    threads: Sequence[int],
) -> str:
    """16 hex digits.

    Args:
        model: its fingerprint.
        cluster: ids, kinds and backends of its devices count, in the order of their ranks.
        torch_versions, threads: of each rank.
    """
    content = {
        "version": PROFILE_VERSION,
        "model": model,
        "devices": [[d.id, d.kind, d.backend, d.memory_bytes] for d in cluster.devices],
        "precision": precision,
        "micro_batch_sizes": sorted(set(micro_batch_sizes)),
        "while_faster": while_faster,
        "compiled": compiled,
        "optimizer": optimizer,
        "torch": list(torch_versions),
        "threads": list(threads),
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True, kw_only=True)
class Cache:
    """A folder of profiles."""

    folder: Path

    def path(self, key: str) -> Path:
        return self.folder / "profiles" / f"{key}.json"

    def load(self, key: str) -> Profile | None:
        """The profile under that key, None if there is none. Raises MeasureError if what is there is not one, or another's."""
        path = self.path(key)
        if not path.exists():
            return None
        try:
            profile = Profile.load(path)
        except MeasureError as error:
            raise MeasureError(f"{error}; it will be measured again") from error
        if profile.key != key:
            raise MeasureError(f"{path}: holds the profile {profile.key}; it will be measured again")
        return profile

    def save(self, profile: Profile) -> None:
        """Write atomically. Raises MeasureError if the folder cannot be written."""
        path = self.path(profile.key)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            profile.save(path)
        except OSError as error:
            raise MeasureError(f"{path}: the profile cannot be kept ({error.strerror}); give another folder") from error
