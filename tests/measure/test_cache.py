"""The key of a profile changes with everything that decides it, and a damaged file is never believed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from heterodyne.cluster import BlockSample, Cluster, Device, DeviceProfile, LinkSample, Profile
from heterodyne.errors import MeasureError
from heterodyne.measure.cache import Cache, default_folder, profile_key

DEVICES = tuple(Device(id=f"box/cpu:{i}", kind="cpu", node="box", memory_bytes=2**30) for i in range(2))
BASE: dict[str, object] = {
    "model": "0123456789abcdef",
    "cluster": Cluster(name="box", devices=DEVICES),
    "precision": "fp32",
    "micro_batch_sizes": (1, 2, 4),
    "optimizer": "adamw",
    "torch_versions": ("2.13.0", "2.13.0"),
    "threads": (1, 1),
}


def key(**changes: object) -> str:
    return profile_key(**{**BASE, **changes})  # type: ignore[arg-type]


def with_devices(*devices: Device) -> Cluster:
    return Cluster(name="box", devices=devices)


@pytest.mark.parametrize(
    "changes",
    [
        {"model": "fedcba9876543210"},
        {"precision": "bf16"},
        {"micro_batch_sizes": (1, 2)},
        {"optimizer": "sgd"},
        {"torch_versions": ("2.13.0", "2.14.0")},
        {"threads": (1, 2)},
        {"cluster": with_devices(DEVICES[1], DEVICES[0])},
        {"cluster": with_devices(DEVICES[0])},
        {"cluster": with_devices(DEVICES[0], replace(DEVICES[1], id="else/cpu:1"))},
        {"cluster": with_devices(DEVICES[0], replace(DEVICES[1], kind="T4"))},
        {"cluster": with_devices(DEVICES[0], replace(DEVICES[1], memory_bytes=2**31))},
    ],
    ids=lambda c: next(iter(c)),
)
def test_the_key_changes_with(changes: dict[str, object]) -> None:
    assert key(**changes) != key()


def test_the_key_does_not_change_with_the_name_of_the_cluster_or_the_order_of_sizes() -> None:
    assert key(cluster=Cluster(name="other", devices=DEVICES), micro_batch_sizes=(4, 2, 1, 1)) == key()


PROFILE = Profile(
    key="abc",
    devices={
        "box/cpu:0": DeviceProfile(
            blocks={
                "layer": (BlockSample(micro_batch_size=1, forward_s=0.1, backward_s=0.2, spread=0.01, saved_bytes=7),),
                "*": (
                    BlockSample(
                        micro_batch_size=8, forward_s=1, backward_s=2, spread=0, saved_bytes=70, extrapolated=True
                    ),
                ),
            },
            optimizer_s_per_byte=1e-9,
            overlap=0.5,
        )
    },
    links=(LinkSample(op="all_reduce", devices=("box/cpu:0", "box/cpu:1"), bytes=1024, seconds=0.1, spread=0.0),),
)


def test_what_is_kept_is_what_was_measured(tmp_path: Path) -> None:
    cache = Cache(folder=tmp_path / "not" / "there" / "yet")
    assert cache.load("abc") is None
    cache.save(PROFILE)
    assert cache.load("abc") == PROFILE
    assert [p.name for p in cache.path("abc").parent.iterdir()] == ["abc.json"]


def test_a_damaged_file_is_an_error_wherever_it_was_cut(tmp_path: Path) -> None:
    cache = Cache(folder=tmp_path)
    cache.save(PROFILE)
    whole = cache.path("abc").read_text().rstrip()
    for length in range(0, len(whole), 37):
        cache.path("abc").write_text(whole[:length])
        with pytest.raises(MeasureError, match="measured again"):
            cache.load("abc")


@pytest.mark.parametrize("text", ["[]", "{}", '{"version": 99, "key": "abc"}', "\x00"])
def test_a_file_that_is_something_else(tmp_path: Path, text: str) -> None:
    cache = Cache(folder=tmp_path)
    cache.path("abc").parent.mkdir()
    cache.path("abc").write_text(text)
    with pytest.raises(MeasureError, match="measured again"):
        cache.load("abc")


def test_a_profile_under_the_wrong_name_is_not_used(tmp_path: Path) -> None:
    cache = Cache(folder=tmp_path)
    cache.save(PROFILE)
    cache.path("abc").rename(cache.path("xyz"))
    with pytest.raises(MeasureError, match="holds the profile abc"):
        cache.load("xyz")


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MeasureError, match="give another folder"):
        Cache(folder=tmp_path / "file").save(PROFILE)


def test_the_default_folder_follows_the_environment() -> None:
    assert default_folder({"XDG_CACHE_HOME": "/x"}) == Path("/x/heterodyne")
    assert default_folder({}) == Path.home() / ".cache" / "heterodyne"
    assert default_folder({"XDG_CACHE_HOME": ""}) == Path.home() / ".cache" / "heterodyne"
