"""The meeting of sites, their fragments and their packed rows, in one process."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from heterodyne.errors import NumericsError, WorkerError
from heterodyne.job import Job
from heterodyne.processes.port import reserve_port
from heterodyne.runtime.exact.weighting import NothingCountsError
from heterodyne.runtime.sites.fragments import fragments_of
from heterodyne.runtime.sites.frames import Message
from heterodyne.runtime.sites.meeting import Meeting
from heterodyne.runtime.sites.packing import packed, unpacked
from heterodyne.runtime.sites.server import MeetingServer
from heterodyne.runtime.sites.sites import Sites, terms_of
from heterodyne.runtime.sites.speaker import AtHome, Joined, Merged, Over, Speaker
from heterodyne.sync_section import OuterSteps, SyncSection

WEIGHTS = (torch.arange(4.0), torch.ones(2))
TERMS = {"training.steps": 40}


class Group:
    """Sites of one process, each with a speaker."""

    def __init__(self, weights: Sequence[Tensor] = WEIGHTS, **sync: Any) -> None:
        self.fields = {"sites": "outer", "shares": {"a": 1, "b": 1}, "at": "a:1", "every": 10, **sync}
        self.fields.setdefault("fragments", len(weights))
        self.shares = self.fields["shares"]
        self.weights = weights
        self.said: list[str] = []
        self.fragments = fragments_of({f"w{n}": tuple(row.shape) for n, row in enumerate(weights)}, len(weights))
        self.meeting = self.made()
        self.speakers = {name: self.speaker(name) for name in self.shares}

    def made(self) -> Meeting:
        sync = SyncSection.model_validate(self.fields)
        steps = OuterSteps(every=10, fragments=sync.fragments, steps=40)
        return Meeting(sync, self.weights, steps=steps, terms=TERMS, say=self.said.append)

    def speaker(self, name: str, terms: dict[str, Any] = TERMS) -> Speaker:
        sync = SyncSection.model_validate({**self.fields, "site": name})
        return Speaker(sync, self.fragments, self.weights, AtHome(self.meeting), terms=terms, say=self.said.append)

    def together(self, *does: Any) -> list[Any]:
        found: list[Any] = [None] * len(does)

        def run(place: int) -> None:
            found[place] = does[place]()

        threads = [threading.Thread(target=run, args=(place,)) for place in range(len(does))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        return found

    def join(self, *names: str, number: int = 0) -> list[Joined]:
        return self.together(*(lambda name=name: self.speakers[name].join(number, WEIGHTS) for name in names))

    def step(self, number: int, moved: dict[str, tuple[float, Tensor]]) -> list[Any]:
        """Each site has counted so much since and has these weights now."""

        def of(name: str) -> Any:
            counted, row = moved[name]
            self.speakers[name].count(counted)
            self.speakers[name].begin(number, number % 2, row)
            return self.speakers[name].end()

        return self.together(*(lambda name=name: of(name) for name in moved))


PLAIN = {"lr": 1.0, "momentum": 0.0}
SECRET = b"what both sites know of this test"


def opened(group: Group, port: int, said: Callable[[str], None] = lambda _: None) -> MeetingServer:
    return MeetingServer(group.meeting, ("127.0.0.1", port), secret=SECRET, say=said)


@pytest.mark.tour("runtime/sites/")
def test_the_outer_average_is_weighted_by_what_each_site_has_counted() -> None:
    group = Group(**PLAIN)
    group.join("a", "b")
    one, other = torch.tensor([1.0, 1, 1, 1]), torch.tensor([5.0, 1, 2, 9])
    came = group.step(0, {"a": (30, one), "b": (10, other)})
    assert came == [Merged(0, {"a": 30, "b": 10})] * 2
    for speaker in group.speakers.values():
        assert torch.allclose(speaker.given[0], 0.75 * one + 0.25 * other)
        assert torch.equal(speaker.given[1], WEIGHTS[1]), "the other fragment has its own outer step"


def test_the_outer_optimizer_is_torchs_sgd() -> None:
    group = Group(WEIGHTS[:1], lr=0.7, momentum=0.9)
    speakers = group.speakers
    group.together(*(lambda each=each: each.join(0, WEIGHTS[:1]) for each in speakers.values()))
    judged = torch.nn.Parameter(WEIGHTS[0].clone())
    sgd = torch.optim.SGD([judged], lr=0.7, momentum=0.9, nesterov=True)
    generator = torch.Generator().manual_seed(0)
    for number in range(4):
        moves = {name: torch.randn(4, generator=generator) for name in speakers}

        def outer(name: str, number: int = number, moves: dict[str, Tensor] = moves) -> None:
            speakers[name].count(1.0)
            speakers[name].begin(number, 0, speakers[name].given[0] - moves[name])
            assert isinstance(speakers[name].end(), Merged)

        group.together(*(lambda name=name: outer(name) for name in speakers))
        judged.grad = (moves["a"] + moves["b"]) / 2
        sgd.step()
        assert torch.allclose(speakers["a"].given[0], judged.detach(), atol=1e-6)


def test_who_does_not_come_is_done_without_and_brings_later_what_it_has_earned() -> None:
    group = Group(**PLAIN, grace_s=0.2)
    group.join("a", "b")
    row = WEIGHTS[0] - 1
    assert group.step(0, {"a": (10, row)}) == [Merged(0, {"a": 10})]
    assert any("site b did not come within 0.2 s" in line for line in group.said)
    assert group.step(0, {"b": (30, row)}) == [None], "the others have gone on"
    joined = group.speakers["b"].join(1, [row, WEIGHTS[1]])
    assert joined.number == 1
    assert torch.equal(group.speakers["b"].given[0], row), "it has the global weights"
    group.step(1, {"a": (0, WEIGHTS[1]), "b": (0, WEIGHTS[1])})
    came = group.step(2, {"a": (10, row), "b": (0, row)})
    assert came == [Merged(2, {"a": 10, "b": 30})] * 2


class One(Group):
    """Sites with one fragment of two numbers that begin at zero; what a site does moves each by -1 for each count."""

    def __init__(self, **sync: Any) -> None:
        super().__init__((torch.zeros(2),), **PLAIN, **sync)

    def bring(self, name: str, number: int, counted: float, moved: float) -> Callable[[], Any]:
        """Bring so much more of counts, having moved so far from the global weights."""
        speaker = self.speakers[name]

        def bring() -> Any:
            speaker.count(counted)
            speaker.begin(number, 0, speaker.given[0] - moved)
            return speaker.end()

        return bring

    def enter(self, name: str, number: int, moved: float = 0.0) -> Callable[[], Joined]:
        return lambda: self.speakers[name].join(number, [self.speakers[name].given[0] - moved])

    def back(self, name: str, state: dict[str, Any]) -> None:
        """Another process of a site, from a checkpoint."""
        self.speakers[name] = self.speaker(name)
        self.speakers[name].load_state_dict(state)

    def first_is_back(self, meeting: dict[str, Any], speaker: dict[str, Any]) -> None:
        self.meeting = self.made()
        self.meeting.load_state_dict(meeting)
        self.back("a", speaker)
        self.speakers["b"].way = AtHome(self.meeting)

    def at(self) -> float:
        (value,) = set(self.meeting.state_dict()["global"][0]["exact"].tolist())
        return float(value)


def test_what_the_first_site_does_again_from_its_checkpoint_counts_once() -> None:
    group = One()
    group.together(group.enter("a", 0), group.enter("b", 0))
    group.speakers["a"].count(5)
    kept = group.meeting.state_dict(), group.speakers["a"].state_dict()
    group.together(group.bring("a", 0, 5, 10.0), group.bring("b", 0, 10, 10.0))
    group.first_is_back(*kept)
    group.together(group.enter("a", 0, 5.0), group.enter("b", 1))
    assert group.at() == -10
    came = group.together(group.bring("a", 1, 10, 10.0), group.bring("b", 1, 10, 10.0))
    assert came == [Merged(1, {"a": 10, "b": 10})] * 2
    assert group.at() == -20


def test_what_waited_in_an_older_checkpoint_and_is_in_the_weights_counts_once() -> None:
    group = One()
    group.together(group.enter("a", 0), group.enter("b", 0))
    group.speakers["b"].count(10)
    group.speakers["b"].begin(0, 0, torch.full((2,), -10.0))
    while not group.meeting.state_dict()["earned"][0]:
        time.sleep(0.01)
    kept = group.meeting.state_dict(), group.speakers["a"].state_dict()
    group.together(group.bring("a", 0, 10, 2.0), group.speakers["b"].end)
    assert group.at() == -6
    group.first_is_back(*kept)
    group.together(group.enter("a", 0), group.enter("b", 1))
    assert (
        group.together(group.bring("a", 1, 10, 0.0), group.bring("b", 1, 10, 0.0))
        == [Merged(1, {"a": 10, "b": 10})] * 2
    )
    assert group.at() == -6


def test_where_an_answer_is_lost_all_that_the_site_does_counts_once() -> None:
    group = One()
    group.together(group.enter("a", 0), group.enter("b", 0))

    class Lossy(AtHome):
        def ask(self, message: Message, *, within_s: float) -> Message:
            super().ask(message, within_s=within_s)
            raise ConnectionResetError("lost")

    group.speakers["b"].way = Lossy(group.meeting)
    _, lost = group.together(group.bring("a", 0, 10, 10.0), group.bring("b", 0, 10, 10.0))
    assert isinstance(lost, OSError)
    assert group.at() == -10
    group.speakers["b"].way = AtHome(group.meeting)
    assert group.bring("b", 1, 10, 30.0)() is None, "the others know of more than this site knows that they know"
    group.speakers["b"].join(1, [torch.full((2,), -30.0)])
    came = group.together(group.bring("a", 1, 20, 20.0), group.bring("b", 1, 0, 0.0))
    assert came == [Merged(1, {"a": 20, "b": 10})] * 2
    assert group.at() == pytest.approx(-30)


def test_a_site_that_is_killed_in_an_outer_step_and_back_before_its_end_loses_nothing() -> None:
    group = One()
    group.together(group.enter("a", 0), group.enter("b", 0))
    group.speakers["b"].count(5)
    kept = group.speakers["b"].state_dict()
    group.speakers["b"].count(5)
    group.speakers["b"].begin(0, 0, torch.full((2,), -10.0))
    while not group.meeting.state_dict()["earned"][0]:
        time.sleep(0.01)
    group.back("b", kept)
    group.enter("b", 0, 5.0)()
    came = group.together(group.bring("a", 0, 10, 10.0), group.bring("b", 0, 10, 10.0))
    assert came == [Merged(0, {"a": 10, "b": 20})] * 2


def test_a_site_that_was_faster_alone_goes_on_where_the_others_are() -> None:
    group = One()
    group.together(group.enter("a", 0), group.enter("b", 0))
    group.together(group.bring("a", 0, 10, 10.0), group.bring("b", 0, 10, 10.0))
    group.speakers["b"].count(80)
    assert group.enter("b", 9, 80.0)().number == 1
    came = group.together(group.bring("a", 1, 20, 20.0), group.bring("b", 1, 0, 0.0))
    assert came == [Merged(1, {"a": 20, "b": 80})] * 2


def test_more_sites_meet_than_strangers_are_heard_at_a_time() -> None:
    group = One(shares={f"s{number}": 1 for number in range(80)}, start_s=60.0, grace_s=60.0)
    with reserve_port() as port:
        for place, name in enumerate(list(group.shares)[1:], 1):
            group.speakers[name].way = Over(("127.0.0.1", port), secret=SECRET, place=place)
    with closing(opened(group, port)):
        joined = group.together(*(group.enter(name, 0) for name in group.shares))
        assert joined == [Joined(0, 0.0)] * 80
        came = group.together(*(group.bring(name, 0, 1, 1.0) for name in group.shares))
    assert came == [Merged(0, dict.fromkeys(group.shares, 1.0))] * 80


def test_a_meeting_from_an_older_checkpoint_takes_the_newest_weights_of_the_sites() -> None:
    group = Group(**PLAIN)
    group.join("a", "b")
    old = group.meeting.state_dict()
    row = WEIGHTS[0] - 1
    group.step(0, {"a": (10, row), "b": (10, row)})
    group.meeting = group.made()
    group.meeting.load_state_dict(old)
    for speaker in group.speakers.values():
        speaker.way = AtHome(group.meeting)
    joined = group.together(*(lambda each=each: each.join(1, [row, WEIGHTS[1]]) for each in group.speakers.values()))
    assert [each.number for each in joined] == [1, 1]
    assert all(torch.equal(each.given[0], row) for each in group.speakers.values())


@pytest.mark.parametrize("bits", [16, 8])
def test_what_rounding_leaves_out_comes_with_the_next(bits: int) -> None:
    """The sum of all that is told of a constant pseudo-gradient follows the sum of what was meant."""
    group = Group(**PLAIN, bits=bits)
    group.join("a", "b")
    move = torch.tensor([1.0, 0.3001, 0.0071, -0.0003])
    for number in range(0, 80, 2):
        group.step(number, {name: (1, group.speakers[name].given[0] - move) for name in group.shares})
        group.step(number + 1, {name: (1, group.speakers[name].given[1]) for name in group.shares})
    gone = WEIGHTS[0] - group.speakers["a"].given[0]
    assert torch.equal(group.speakers["a"].given[0], group.speakers["b"].given[0])
    coarse = (unpacked(packed(move, bits), 4, bits) - move).abs().max()
    once = {16: 2.0**-9, 8: 1 / 254}[bits]  # each way, of a largest value of about 1
    assert (gone - 40 * move).abs().max() < 2.5 * once < 40 * coarse


def test_another_job_and_a_second_process_of_a_site_are_refused() -> None:
    group = Group(**PLAIN)
    group.join("a", "b")
    with pytest.raises(WorkerError, match=r"training.steps is 41 at site b, and 40 at site a"):
        group.speaker("b", {"training.steps": 41}).join(0, WEIGHTS)
    assert any("site b is refused: training.steps is 41 at site b" in line for line in group.said), (
        "site a says so, too"
    )
    group.speaker("b").join(0, WEIGHTS)
    group.speakers["b"].begin(0, 0, WEIGHTS[0])
    with pytest.raises(WorkerError, match="another process has joined as site b"):
        group.speakers["b"].end()


JOB = """
model: {factory: m.py:build, arguments: {width: 8}}
data: {text: text.txt}
training:
  global_batch_size: 8
  sync: {sites: outer, shares: {a: 5, b: 3}, at: "10.0.0.1:29600", momentum: 0}
"""


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("training.seed", 1),
        ("training.clip_grad_norm", 2),
        ("optimizer.lr", 0.5),
        ("training.sync.every", 7),
        ("training.sync.shares", "{b: 3, a: 5}"),
        ("model.arguments", "{width: 9}"),
    ],
)
def test_what_decides_the_losses_is_compared_between_sites(tmp_path: Path, field: str, value: object) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    own, other = (
        terms_of(Job.load(path, ("training.sync.site=b", *more)), {"seed": 0}, {"w": (4,)})
        for more in ((), (f"{field}={value}",))
    )
    assert [name for name in own if own[name] != other[name]] == [
        {"model.arguments": "model.arguments.width"}.get(field, field)
    ]


def test_a_share_in_which_nothing_counts_updates_nothing_and_is_no_fault() -> None:
    def step(_: object) -> None:
        raise NothingCountsError("no label")

    said: list[str] = []
    optimizer = SimpleNamespace(param_groups=[{"lr": 0.1}])
    worker = SimpleNamespace(step=step, steps_done=4, state=SimpleNamespace(steps_done=4), optimizer=optimizer)
    of_site: Any = SimpleNamespace(_worker=worker, _say=said.append)
    batch: Any = None
    result = Sites.step(of_site, batch)
    assert (result.step, result.count, result.fault, worker.state.steps_done) == (4, 0.0, None, 5)
    assert math.isnan(result.loss)
    assert "step 5: no sample of this site's share" in said[0]


def test_what_is_a_matter_of_a_site_is_not_compared(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    own, other = (
        terms_of(Job.load(path, more), {"seed": 0}, {"w": (4,)})
        for more in (
            ("training.sync.site=a",),
            ("training.sync.site=b", "training.precision=bf16", "training.sync.at=b:1"),
        )
    )
    assert own == other


def test_the_job_of_a_run_with_sites_can_be_read_again(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    job = Job.load(path)
    path.write_text(yaml.safe_dump(job.model_dump(mode="json", by_alias=True)))
    assert Job.load(path) == job


def test_weights_that_are_not_finite_are_not_brought() -> None:
    group = Group(**PLAIN)
    group.join("a", "b")
    with pytest.raises(NumericsError, match="are not finite"):
        group.speakers["a"].begin(0, 0, torch.full((4,), math.nan))


def test_over_a_connection_it_is_the_same_and_a_cut_one_costs_nothing_that_was_earned() -> None:
    group = Group(**PLAIN, grace_s=0.2)
    with reserve_port() as port:
        way = Over(("127.0.0.1", port), secret=SECRET, place=1)
    group.speakers["b"].way = way
    with closing(opened(group, port)) as server:
        group.join("a", "b")
        row = WEIGHTS[0] - 1
        assert group.step(0, {"a": (10, row), "b": (10, row)}) == [Merged(0, {"a": 10, "b": 10})] * 2
        assert torch.equal(group.speakers["b"].given[0], row)
    assert way.sent == server.came
    assert way.received == server.went
    kept = group.meeting.state_dict()
    [cut] = group.step(1, {"b": (5, WEIGHTS[1] + 1)})
    assert isinstance(cut, OSError)
    assert any("is not reached" in line and "trains on alone" in line for line in group.said)
    group.meeting = group.made()  # the first site is back from its checkpoint
    group.meeting.load_state_dict(kept)
    group.speakers["a"].way = AtHome(group.meeting)
    with closing(opened(group, port)):
        [again] = group.step(2, {"b": (5, row - 1)})
        assert again is None
        now = {"a": [row, WEIGHTS[1]], "b": [row - 1, WEIGHTS[1] + 1]}
        group.together(*(lambda name=name: group.speakers[name].join(2, now[name]) for name in now))
        came = group.step(2, {"a": (10, row), "b": (0, row - 1)})
        assert came == [Merged(2, {"a": 10, "b": 10})] * 2, "of all that b has counted since"
        assert torch.allclose(group.speakers["b"].given[0], row - 0.5)


def test_who_has_another_secret_is_told_so_and_named() -> None:
    group = Group(**PLAIN)
    strangers: list[str] = []
    with reserve_port() as port:
        group.speakers["b"].way = Over(("127.0.0.1", port), secret=b"another one", place=1)
    with (
        closing(opened(group, port, strangers.append)),
        pytest.raises(WorkerError, match=r"Set HETERODYNE_RUN_SECRET to the same"),
    ):
        group.speakers["b"].join(0, WEIGHTS)
    assert strangers == [
        "a connection from 127.0.0.1 did not show the secret of this run, and was closed; so will others be"
    ]


def test_a_port_that_is_taken_and_a_meeting_that_nobody_holds_are_told() -> None:
    group = Group(**PLAIN, start_s=0.1)
    with reserve_port() as port:
        group.speakers["b"].way = Over(("127.0.0.1", port), secret=SECRET, place=1)
    with pytest.raises(WorkerError, match=r"found nobody at training.sync.at a:1 within 0.1 s .*: start site a there"):
        group.speakers["b"].join_at_last(0, WEIGHTS)
    with (
        closing(opened(group, port)),
        pytest.raises(WorkerError, match=r"cannot meet at 127.0.0.1:\d+ .*: is another program at that port"),
    ):
        opened(group, port)


@given(sizes=st.lists(st.integers(1, 50), min_size=1, max_size=20), count=st.integers(1, 6))
def test_fragments_hold_every_parameter_once_and_are_about_alike(sizes: Sequence[int], count: int) -> None:
    shapes = {f"w{number}": (size, 3) for number, size in enumerate(sizes)}
    fragments = fragments_of(shapes, count)
    assert sorted(name for fragment in fragments for name in fragment.names) == sorted(shapes)
    assert max(f.size for f in fragments) - min(f.size for f in fragments) <= 3 * max(sizes)
    values = {name: torch.randn(shape) for name, shape in shapes.items()}
    for fragment in fragments:
        if fragment.shapes:
            assert all(
                torch.equal(value, values[name]) for name, value in fragment.values(fragment.row(values)).items()
            )


@settings(deadline=None)
@given(size=st.integers(0, 700), bits=st.sampled_from([32, 16, 8]), seed=st.integers(0, 99))
def test_rows_come_back_as_near_as_their_bits_allow(size: int, bits: int, seed: int) -> None:
    row = torch.randn(size, generator=torch.Generator().manual_seed(seed))
    data = packed(row, bits)
    back = unpacked(data, size, bits)
    assert len(data) == size * bits // 8 + (-(-size // 256) * 4 if bits == 8 else 0)
    allowed = {32: 0.0, 16: 2.0**-8, 8: 1 / 254}[bits]
    largest = row.abs() if bits == 16 else row.abs().max() if size else torch.zeros(0)
    assert bool(((back - row).abs() <= allowed * 1.001 * largest).all())
    with pytest.raises(ValueError, match="bytes for"):
        unpacked(data + b"\0", size, bits)
