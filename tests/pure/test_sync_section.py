"""What a job can say of sites that meet seldom, and when they come to outer steps."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heterodyne.errors import JobError
from heterodyne.job import Job
from heterodyne.sync_section import OuterSteps, SyncSection

TEXT = """\
model: {factory: "models:gpt"}
training:
  steps: 100
  global_batch_size: 8
  sync:
    sites: outer
    shares: {north: 5, south: 3}
    at: "10.0.0.1:29600"
"""


def job(tmp_path: Path, more: str = "", *overrides: str, text: str = TEXT) -> Job:
    path = tmp_path / "job.yaml"
    path.write_text(text + more, encoding="utf-8")
    return Job.load(path, overrides)


def test_the_defaults_are_those_of_diloco(tmp_path: Path) -> None:
    sync = job(tmp_path).training.sync
    assert sync is not None
    assert (sync.every, sync.lr, sync.momentum, sync.nesterov, sync.bits) == (100, 0.7, 0.9, True, 32)
    assert (sync.fragments, sync.delay, sync.taken_over, sync.keeper) == (1, 0, 1.0, "north")
    delayed = job(tmp_path, "    delay: 5\n").training.sync
    assert delayed is not None
    assert delayed.taken_over == 0.5


@pytest.mark.parametrize(
    ("line", "more", "says"),
    [
        (9, "    every: 0\n", "every: Input should be greater than or equal to 1"),
        (9, "    every: x\n", "every: Input should be a valid integer, unable to parse string as an integer"),
        (9, "    every: {north: 0, south: 3}\n", "every.north: Input should be greater than or equal to 1"),
        (9, "    every: -3\n", "greater than or equal to 1"),
        (9, "    every: {north: 10}\n", "south is missing"),
        (9, "    every: {north: 10, south: 5, east: 2}\n", "no site 'east' in shares, which has north, south"),
        (9, "    site: east\n", "no site 'east' in shares"),
        (5, "    every: 4\n    fragments: 5\n", "5 fragments in 4 steps"),
        (
            5,
            "    every: 10\n    fragments: 2\n    delay: 5\n",
            "a delay of 5 steps, and the next outer step is due after 5",
        ),
        (9, "    bits: 4\n", "32, 16 or 8"),
        (9, "    mix: 0\n", "greater than 0"),
        (9, "    momentum: 1\n", "less than 1"),
        (9, "    grace_s: 0\n", "greater than 0"),
        (9, "    evry: 4\n", "did you mean 'every'?"),
    ],
)
def test_what_cannot_be_is_refused_with_its_line(tmp_path: Path, line: int, more: str, says: str) -> None:
    with pytest.raises(JobError) as caught:
        job(tmp_path, more)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.line == line


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("south: 3", "south: 4", "add up to 9 samples, and training.global_batch_size is 8"),
        ("north: 5, south: 3", "north: 8", "at least 2"),
        ("south: 3", "'so uth': 3", "'so uth' is no name of a site"),
        ("10.0.0.1:29600", "10.0.0.1", "is no HOST:PORT"),
        ("10.0.0.1:29600", "10.0.0.1:70000", "is no HOST:PORT"),
        ("sites: outer", "sites: inner", "'outer'"),
    ],
)
def test_a_site_file_that_does_not_add_up_is_refused(tmp_path: Path, old: str, new: str, says: str) -> None:
    with pytest.raises(JobError) as caught:
        job(tmp_path, text=TEXT.replace(old, new))
    assert says in str(caught.value)


def test_a_site_does_its_share_of_the_samples_and_of_the_steps(tmp_path: Path) -> None:
    read = job(tmp_path, "    every: {north: 20, south: 10}\n", "training.sync.site=south").here
    assert (read.training.global_batch_size, read.training.steps) == (3, 50)
    assert read.training.sync is not None
    assert read.training.sync.first_of("south") == 5


def test_a_job_that_names_no_site_is_its_own(tmp_path: Path) -> None:
    for read in (job(tmp_path, "", "training.sync=null"), job(tmp_path)):
        assert read.here is read


def test_where_sites_meet_and_how_long_they_wait_decides_no_losses(tmp_path: Path) -> None:
    one = job(tmp_path, "", "training.sync.site=south")
    other = job(tmp_path, "", "training.sync.site=south", "training.sync.at=b:1", "training.sync.grace_s=1")
    assert one.fingerprint == other.fingerprint != job(tmp_path, "", "training.sync.site=north").fingerprint


def test_an_address_may_be_of_ipv6() -> None:
    sync = SyncSection(sites="outer", shares={"a": 1, "b": 1}, at="[::1]:29600")
    assert sync.address == ("::1", 29600)


@given(every=st.integers(1, 30), steps=st.integers(1, 100), fragments=st.integers(1, 8), own=st.integers(1, 30))
def test_every_fragment_is_taken_once_a_period_and_after_the_last_step(
    every: int, steps: int, fragments: int, own: int
) -> None:
    fragments = min(fragments, every, own)
    outer = OuterSteps(every=every, fragments=fragments, steps=steps)
    due = [outer.due(number) for number in range(outer.count)]
    assert due == sorted(due)
    for fragment in range(fragments):
        of = [due[number] for number in range(outer.count) if outer.fragment(number) == fragment]
        assert of[-1] == steps, "all sites end with the same weights"
        gaps = [after - before for before, after in pairwise(of) if after < steps]
        assert all(gap == every for gap in gaps)
    for number in range(outer.count):
        assert outer.is_last(number) == (
            outer.fragment(number) not in map(outer.fragment, range(number + 1, outer.count))
        )
    sync = SyncSection(
        sites="outer", shares={"a": 1, "b": 1}, at="a:1", every={"a": every, "b": own}, fragments=fragments
    )
    of_sites = [sync.outer_steps(site, steps) for site in ("a", "b")]
    assert len({each.count for each in of_sites}) == 1, "outer steps have the same numbers at all sites"
    assert max(each.steps for each in of_sites) == steps


@pytest.mark.parametrize(
    ("sync", "says"),
    [
        ("outer", "training.sync: takes a section, not a single value; its keys can be: sites, shares, at"),
        ("{sites: outer, shares: {}}", "training.sync.shares: takes at least 2, and has 0"),
    ],
)
def test_what_is_no_section_is_told_its_keys(tmp_path: Path, sync: str, says: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(
        f"model: {{factory: m.py:build}}\ndata: {{text: t}}\ntraining: {{global_batch_size: 8, sync: {sync}}}\n"
    )
    with pytest.raises(JobError) as caught:
        Job.load(path)
    assert says in str(caught.value)
    assert caught.value.line == 3
