"""Hosts without a shared disk: each rank works in the folder of its host, under the same relative path."""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import heterodyne as hd
from heterodyne.emulate import emulate
from heterodyne.emulate.host_spaces import written_by
from heterodyne.errors import CheckpointError, HeterodyneError
from heterodyne.runtime.checkpoint.checkpoints import Checkpoints
from heterodyne.runtime.checkpoint.rescue import Moment, Rescue, rescued
from heterodyne.runtime.comm.agreement import Agreement
from heterodyne.runtime.comm.disks import Disks
from heterodyne.runtime.rendezvous.environment import WorkerEnvironment
from multiprocess.cli_job import Place, make_place
from multiprocess.crowd import Crowd, run_launched
from multiprocess.pool import Pool, World
from multiprocess.test_emulate import need_links
from multiprocess.test_own_loop import SAMPLES, Labelled, batch_of, graph, plans, start

IDENTITY = {"job": {"training": {"seed": 0}}}
FOLDER = Path("checkpoint")
Hosts = Sequence[str]


@contextmanager
def on_host(world: World, root: Path, hosts: Hosts) -> Iterator[None]:
    """This rank is on the host of that name, whose disk is a folder of that name."""
    before, disk = Path.cwd(), root / hosts[world.rank]
    disk.mkdir(exist_ok=True)
    os.chdir(disk)
    try:
        with mock.patch("socket.gethostname", return_value=hosts[world.rank]):
            yield
    finally:
        os.chdir(before)


def found(world: World, root: Path, hosts: Hosts) -> list[Any]:
    with on_host(world, root, hosts):
        ranks = Agreement.of_all()
        apart, shared = Disks.behind(FOLDER, ranks), Disks.behind(root / "shared", ranks)
        done = apart.on_each(lambda: world.rank)
        return [apart.ranks, apart.hosts, apart.own, done, shared.ranks, shared.hosts]


def test_ranks_that_see_one_directory_are_found(pool: Pool, tmp_path: Path) -> None:
    heard = pool.run(4, found, tmp_path, ("b", "a", "b", "c"))
    for rank, told in enumerate(heard):
        assert told == [
            ((0, 2), (1,), (3,)),
            (("b",), ("a",), ("c",)),
            (0, 1, 0, 2)[rank],
            [0, 1, 3],
            ((0, 1, 2, 3),),
            (("b", "a", "c"),),
        ]
    assert not list(tmp_path.rglob(".seen*"))


def state(value: float) -> dict[str, Any]:
    return {"model": {f"layer.{number}": torch.full((10_000,), value + number) for number in range(6)}, "kept": [1, 2]}


def save(world: World, root: Path, hosts: Hosts, steps: Sequence[int], keep: int = 2) -> None:
    """Layers are shared out among the ranks, and each holds its own."""
    with on_host(world, root, hosts):
        checkpoints = Checkpoints(FOLDER, agreement=Agreement.of_all(), keep=keep)
        for step in steps:
            whole = state(step)
            own = dict(list(whole["model"].items())[world.rank :: world.world_size])
            torch.manual_seed(100 * step + world.rank)
            checkpoints.save(step, {**whole, "model": own}, identity=IDENTITY, plan="{}")
            checkpoints.prune()


def load(world: World, root: Path, hosts: Hosts, wanted: Sequence[str] = ()) -> tuple[int, bool, list[str], bool]:
    """The step, whether the wanted layers are as they were, what was said, and whether this rank has its random numbers."""
    said: list[str] = []
    with on_host(world, root, hosts):
        checkpoints = Checkpoints(FOLDER, agreement=Agreement.of_all(), say=said.append)
        newest = checkpoints.latest()
        assert newest is not None
        assert newest.plan == "{}"
        restored = checkpoints.load(
            newest, identity=IDENTITY, wanted=lambda keys: not wanted or keys[-1] in wanted or keys[0] == "kept"
        )
        layers = state(restored.step)["model"]
        expected = {name: layers[name] for name in wanted or layers}
        got = restored.state["model"]
        equal = got.keys() == expected.keys() and all(torch.equal(got[name], expected[name]) for name in expected)
        assert restored.state["kept"] == [1, 2]
        return restored.step, equal, said, restored.random is not None


def on_disk(root: Path, host: str) -> dict[str, set[str]]:
    """Of each checkpoint on the disk of a host, its files of tensors."""
    return {
        path.name: {file.name for file in path.glob("*.safetensors")}
        for path in sorted((root / host / FOLDER).iterdir())
    }


PARTS = {rank: f"rank-{rank}-0.safetensors" for rank in range(3)}


def test_each_disk_has_what_its_ranks_wrote_and_lets_go_of_old_ones(pool: Pool, tmp_path: Path) -> None:
    pool.run(3, save, tmp_path, ("a", "b", "a"), (1, 2, 3))
    assert on_disk(tmp_path, "a") == {f"step-{step}": {PARTS[0], PARTS[2]} for step in (2, 3)}
    assert on_disk(tmp_path, "b") == {f"step-{step}": {PARTS[1]} for step in (2, 3)}
    manifests = [(tmp_path / host / FOLDER / "step-3" / "manifest.json").read_text() for host in "ab"]
    assert manifests[0] == manifests[1]


def test_on_a_shared_disk_the_manifest_tells_of_no_hosts(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, save, tmp_path, ("a", "a"), (1,))
    assert "hosts" not in (tmp_path / "a" / FOLDER / "step-1" / "manifest.json").read_text()


@pytest.mark.parametrize(
    "hosts", [("a", "b"), ("b", "a"), ("c", "a", "b"), ("b", "b", "a", "c")], ids=lambda hosts: "".join(hosts)
)
def test_parts_are_found_wherever_they_lie(pool: Pool, tmp_path: Path, hosts: Hosts) -> None:
    pool.run(2, save, tmp_path, ("a", "b"), (1, 2))
    read = pool.run(len(hosts), load, tmp_path, hosts)
    assert read == [(2, True, [], rank < 2) for rank in range(len(hosts))]
    for host in set(hosts):
        assert on_disk(tmp_path, host)["step-2"] == {PARTS[0], PARTS[1]}
    assert not list(tmp_path.rglob("*.partial-*"))
    assert pool.run(2, load, tmp_path, ("a", "a")) == [(2, True, [], True)] * 2, "what was brought stays, and is whole"


def wanting(world: World, root: Path, hosts: Hosts, of_ranks: Sequence[Sequence[str]]) -> Any:
    return load(world, root, hosts, of_ranks[world.rank])


def test_only_what_is_wanted_is_brought(pool: Pool, tmp_path: Path) -> None:
    pool.run(3, save, tmp_path, ("a", "b", "c"), (1,))
    pool.run(3, wanting, tmp_path, ("a", "b", "c"), (("layer.0", "layer.1"), ("layer.4",), ("layer.5", "layer.2")))
    assert on_disk(tmp_path, "a")["step-1"] == {PARTS[0], PARTS[1]}
    assert on_disk(tmp_path, "b")["step-1"] == {PARTS[1]}
    assert on_disk(tmp_path, "c")["step-1"] == {PARTS[2]}


def refused(world: World, root: Path, hosts: Hosts) -> str:
    try:
        load(world, root, hosts)
    except CheckpointError as error:
        return str(error)
    return "it worked"


def test_a_host_that_is_gone_is_named_with_its_parts_and_an_older_one_is_taken(pool: Pool, tmp_path: Path) -> None:
    pool.run(3, save, tmp_path, ("a", "b", "b"), (7,))
    for told in pool.run(2, refused, tmp_path, ("a", "a")):
        assert f"step-7: {FOLDER / 'step-7'} is no whole checkpoint: " in told
        assert f"{PARTS[1]}, {PARTS[2]} lie on the disk of b, which is no host of this run" in told
    pool.run(2, save, tmp_path, ("a", "a"), (5,), 9)
    read = pool.run(2, load, tmp_path, ("a", "a"))
    assert [each[:2] for each in read] == [(5, True)] * 2
    (said,) = read[0][2]
    assert "passing over step-7" in said
    assert "lie on the disk of b" in said
    assert {each[0] for each in pool.run(3, load, tmp_path, ("b", "c", "a"))} == {7}, "b is back"


def test_a_damaged_file_is_named_with_its_host_and_taken_from_another(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, save, tmp_path, ("a", "b"), (1,))
    part = tmp_path / "b" / FOLDER / "step-1" / PARTS[1]
    whole = part.read_bytes()
    part.write_bytes(whole[:-1])
    for told in pool.run(2, refused, tmp_path, ("a", "b")):
        assert f"{PARTS[1]} has {len(whole) - 1} bytes of {len(whole)} (b)" in told
    part.write_bytes(whole)
    pool.run(2, load, tmp_path, ("a", "b"))
    part.write_bytes(whole[:-1])
    assert [each[:2] for each in pool.run(2, load, tmp_path, ("b", "a"))] == [(1, True)] * 2
    assert part.read_bytes() == whole


def without_room(world: World, root: Path, hosts: Hosts, host: str, do: Callable[..., Any]) -> str:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if hosts[world.rank] == host:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, hard))
    try:
        do(world, root, hosts)
    except CheckpointError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    return "it worked"


def save_second(world: World, root: Path, hosts: Hosts) -> None:
    save(world, root, hosts, (2,))


def test_a_disk_without_room_is_told_to_all_and_harms_nothing(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, save, tmp_path, ("a", "b"), (1,))
    for told in pool.run(2, without_room, tmp_path, ("a", "b"), "b", save_second):
        assert "step 2 cannot be written" in told
    for told in pool.run(3, without_room, tmp_path, ("a", "b", "c"), "c", load):
        assert "files cannot be brought from host to host (" in told
        assert " on c: " in told
    assert [set(on_disk(tmp_path, host)) for host in "abc"] == [{"step-1"}, {"step-1"}, set()]
    assert {each[0] for each in pool.run(2, load, tmp_path, ("b", "a"))} == {1}


def cut_short(world: World, root: Path, hosts: Hosts) -> None:
    """Rank 1 is killed when it is to give its directory the final name."""

    def killed(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with mock.patch.object(Checkpoints, "_name", killed) if world.rank else mock.patch.dict({}):
        save(world, root, hosts, (2,))


def test_a_host_that_dies_between_two_names_leaves_the_one_before(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, save, tmp_path, ("a", "b"), (1,))
    own = Pool()
    with pytest.raises(AssertionError):
        own.run(2, cut_short, tmp_path, ("a", "b"))
    own.close()
    assert "step-2" in on_disk(tmp_path, "a")
    assert "step-2" not in on_disk(tmp_path, "b")
    read = pool.run(2, load, tmp_path, ("a", "b"))
    assert [each[:2] for each in read] == [(1, True)] * 2
    assert "passing over step-2" in read[0][2][0]


def rescue(world: World, root: Path, hosts: Hosts, steps: Sequence[int]) -> None:
    with on_host(world, root, hosts):
        whole = state(0)
        own = dict(list(whole["model"].items())[world.rank :: world.world_size])
        moment = Moment(step=steps[world.rank], state={**whole, "model": own}, random={})
        Rescue(
            FOLDER,
            rank=world.rank,
            size=world.world_size,
            run="this",
            identity=IDENTITY,
            plan="{}",
            moment=lambda: moment,
            still=lambda _: True,
        ).write()


def assemble(world: World, root: Path, hosts: Hosts) -> tuple[int | None, str]:
    with on_host(world, root, hosts):
        return rescued(FOLDER, Agreement.of_all())


def test_what_ranks_of_several_hosts_rescued_is_one_checkpoint(pool: Pool, tmp_path: Path) -> None:
    pool.run(3, rescue, tmp_path, ("a", "b", "b"), (0, 0, 0))
    assert pool.run(2, assemble, tmp_path, ("b", "a")) == [(0, "")] * 2
    assert on_disk(tmp_path, "a") == {"step-0": {PARTS[0]}}
    assert on_disk(tmp_path, "b") == {"step-0": {PARTS[1], PARTS[2]}}
    assert [each[:2] for each in pool.run(2, load, tmp_path, ("a", "b"))] == [(0, True)] * 2
    pool.run(2, rescue, tmp_path, ("a", "b"), (0, 1))
    for step, why in pool.run(2, assemble, tmp_path, ("a", "b")):
        assert step is None
        assert "some ranks were behind step 0, others behind step 1" in why
    assert not list(tmp_path.rglob("rescue"))


STEPS = 5


def loop(world: World, root: Path, hosts: Hosts, last: int, resume: bool) -> dict[str, Any]:
    """Steps until the last one, with a checkpoint after each; the losses, and the whole state at the end."""
    with on_host(world, root, hosts):
        run = hd.RunOptions(Path("runs") / "own", resume=resume)
        with start(world, Labelled(), plans()["split"], graph(), run=run, check_s=0) as trainer:
            losses = {}
            for step in range(trainer.steps_done, last):
                losses[step] = trainer.step(batch_of(SAMPLES, step)).loss
                trainer.save_checkpoint()
            return {"losses": losses, "state": trainer.state_dict()}


@pytest.fixture(scope="module")
def undisturbed(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    (whole, *_) = pool.run(3, loop, tmp_path_factory.mktemp("loop"), ("a", "a", "a"), STEPS, False)
    return dict(whole)


@pytest.mark.parametrize(
    ("before", "after"),
    [(("a", "b", "c"), ("c", "a", "b")), (("a", "b", "b"), ("new", "a", "b"))],
    ids=["others first", "a new one first"],
)
def test_a_loop_goes_on_as_if_it_had_not_stopped_whichever_rank_each_host_has(
    pool: Pool, tmp_path: Path, undisturbed: dict[str, Any], before: Hosts, after: Hosts
) -> None:
    pool.run(3, loop, tmp_path, before, 3, False)
    for told in pool.run(3, loop, tmp_path, after, STEPS, True):
        assert told["losses"] == {step: undisturbed["losses"][step] for step in (3, 4)}
        torch.testing.assert_close(told["state"], undisturbed["state"], rtol=0, atol=0)
    runs = {host: tmp_path / host / "runs" / "own" for host in after}
    assert [{path.name for path in (run / FOLDER).iterdir()} for run in runs.values()] == [{"step-4", "step-5"}] * 3
    metrics = runs[after[0]] / "metrics.jsonl"
    assert [json.loads(line)["step"] for line in metrics.read_text().splitlines()] == list(range(1, STEPS + 1))


def refused_loop(world: World, root: Path, hosts: Hosts, resume: bool) -> str:
    try:
        loop(world, root, hosts, STEPS, resume)
    except HeterodyneError as error:
        return f"{type(error).__name__}: {error}"
    return "it worked"


def test_what_a_disk_has_of_another_run_is_not_written_over(pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "b" / "runs" / "own").mkdir(parents=True)
    (tmp_path / "b" / "runs" / "own" / "metrics.jsonl").touch()
    for told in pool.run(3, refused_loop, tmp_path, ("a", "b", "b"), False):
        assert "is not empty (it holds metrics.jsonl)" in told
        assert told.endswith("(on b)")


def live(environment: WorkerEnvironment, folder: str, host: str, arguments: list[str]) -> None:
    with mock.patch("socket.gethostname", return_value=host):
        run_launched(environment, ["-m", "heterodyne", *arguments], folder, {})


def train(root: Path, hosts: Hosts, *options: str) -> tuple[list[int], str]:
    """``heterodyne train`` on hosts with a folder of their own each; the statuses, and what rank 0 said."""
    short = ("training.validate_every=6", "optimizer.schedule_steps=12", "parallelism.measure_s=0.1")
    arguments = ["train", "job.yaml", *(word for value in short for word in ("--set", value)), *options]
    with Crowd() as crowd:
        workers = [
            crowd.start(live, str(root / host), host, arguments, rank=rank, world_size=len(hosts))
            for rank, host in enumerate(hosts)
        ]
        return [worker.wait() for worker in workers], workers[0].output


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Hosts a and b with the same files, each on its disk."""
    root = tmp_path_factory.mktemp("hosts")
    for host in "ab":
        (root / host).mkdir()
        make_place(root / host)
        (root / host / "yaml.py").unlink()
    return root


def test_a_job_goes_on_after_hosts_have_changed_places(place: Path) -> None:
    statuses, said = train(place, ("a", "b"), "--run-dir", "whole", "--set", "training.steps=12")
    assert statuses == [0, 0], said
    assert "is on no disk that all hosts share (a; b)" in said
    statuses, said = train(place, ("a", "b"), "--run-dir", "parts", "--set", "training.steps=6")
    assert statuses == [0, 0], said
    statuses, said = train(place, ("b", "a"), "--run-dir", "parts", "--resume", "--set", "training.steps=12")
    assert statuses == [0, 0], said
    assert "resuming after step 6" in said
    losses = [Place(path=place / host).losses(run) for host, run in (("a", "whole"), ("b", "parts"))]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert (place / "b" / "parts" / "model" / "model.safetensors").is_file()


def test_a_file_that_hosts_lack_is_named_with_them_before_anything_begins(place: Path) -> None:
    text = place / "b" / "text.txt"
    text.rename(text.with_name("elsewhere.txt"))
    try:
        statuses, said = train(place, ("a", "b"), "--run-dir", "none")
    finally:
        text.with_name("elsewhere.txt").rename(text)
    assert statuses == [2, 2]
    assert "on b: data.text: text.txt: there is no such file" in said
    assert "let every host have the same files, as a has them" in said
    assert not (place / "a" / "none").exists()
    assert not (place / "b" / "none").exists()


KEPT = """
import sys, torch
import torch.distributed as dist
from datetime import timedelta
from pathlib import Path
from heterodyne.runtime.checkpoint.checkpoints import Checkpoints
from heterodyne.runtime.comm.agreement import Agreement

dist.init_process_group("gloo", timeout=timedelta(seconds=60))
rank = dist.get_rank()
checkpoints = Checkpoints(Path("checkpoint"), agreement=Agreement.of_all())
if sys.argv[1] == "save":
    checkpoints.save(3, {f"of {rank}": torch.full((99,), rank)}, identity={}, plan="{}")
else:
    found = checkpoints.load(checkpoints.latest(), identity={})
    assert all((found.state[f"of {other}"] == other).all() for other in range(3))
dist.destroy_process_group()
"""


def test_on_emulated_hosts_with_disks_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need_links()
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")

    def on_hosts(hosts: list[int], what: str) -> int:
        own: dict[str, Any] = {"hosts": hosts, "links": [1e8, 1e8], "own_disks": Path()}
        return emulate([0.7] * 3, [sys.executable, "-c", KEPT, what], logs=tmp_path / what, **own)

    disks = [written_by(tmp_path / "work", host) for host in (0, 1)]
    assert on_hosts([0, 0, 1], "save") == 0
    assert [{*on_disk(disk.parent, disk.name)["step-3"]} for disk in disks] == [{PARTS[0], PARTS[1]}, {PARTS[2]}]
    disks[0].rename(tmp_path / "other")
    disks[1].rename(disks[0])
    (tmp_path / "other").rename(disks[1])
    assert on_hosts([0, 1, 1], "load") == 0
    assert [{*on_disk(disk.parent, disk.name)["step-3"]} for disk in disks] == [{*PARTS.values()}] * 2
