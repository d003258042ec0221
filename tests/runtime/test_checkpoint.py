"""Checkpoints in one process: bit for bit, and whole or not there."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import json
import os
import pickle
import random
import resource
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from copy import deepcopy
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from heterodyne.errors import CheckpointError
from heterodyne.runtime.checkpoint.checkpoints import Checkpoints, taken_from
from heterodyne.runtime.checkpoint.manifest import record
from heterodyne.runtime.checkpoint.random_state import random_state, restore_random_state
from heterodyne.runtime.checkpoint.state_tree import graft, merged, strip
from pure.spoiled import places

IDENTITY = {"job": {"training": {"seed": 0, "global_batch_size": 5}}, "data": {"tokens": "abc"}}
PLAN = '{"version": 1}\n'


def equal(a: Any, b: Any) -> bool:
    """Alike in type, structure and every bit of every tensor."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return bool(a == b)


def trained(steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Dropout(0.5), nn.Linear(7, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(steps):
        advance(model, optimizer)
    return model, optimizer


def advance(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    loss = model(torch.randn(4, 5)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def save(checkpoints: Checkpoints, step: int, state: Any) -> Path:
    path = checkpoints.save(step, state, identity=IDENTITY, plan=PLAN)
    checkpoints.prune()
    return path


states = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(allow_nan=False),
        st.text(max_size=3),
        st.tuples(st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool]), st.integers(0, 3)).map(
            lambda of: torch.arange(of[1]).to(of[0])
        ),
    ),
    lambda inner: st.one_of(
        st.dictionaries(st.one_of(st.text(max_size=3), st.integers(0, 9)), inner, max_size=3),
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
    ),
    max_leaves=8,
)


@given(state=states)
@settings(deadline=None)
def test_a_state_is_what_is_stripped_and_grafted(state: Any) -> None:
    try:
        tensors, skeleton = strip(state, "root")
    except ValueError:
        return  # the key 1 and the key "1" side by side
    assert equal(graft(skeleton, tensors), state)


def test_parts_of_a_state_are_merged_to_the_whole_and_read_in_parts() -> None:
    whole = {
        "model": {"a": torch.zeros(1), "b": torch.ones(1)},
        "optimizer": {"a": {"step": torch.ones(()), "kind": "x"}, "b": {"step": torch.ones(()), "kind": "y"}},
        "step": 3,
    }
    parts = [
        {"model": {"a": whole["model"]["a"]}, "optimizer": {"a": whole["optimizer"]["a"]}, "step": 3},
        None,
        {"model": {"b": whole["model"]["b"]}, "optimizer": {"b": whole["optimizer"]["b"]}, "step": 3},
    ]
    stripped = [strip(part, "root") for part in parts]
    tensors = {name: tensor for own, _ in stripped for name, tensor in own.items()}
    skeleton = merged([skeleton for _, skeleton in stripped])
    assert equal(graft(skeleton, tensors), whole)
    assert equal(graft(skeleton, stripped[2][0], without=set(stripped[0][0])), parts[2])
    with pytest.raises(KeyError):
        graft(skeleton, stripped[2][0])


@given(state=states)
@settings(deadline=None, max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_state_comes_back_bit_for_bit(state: Any, tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoint")
    try:
        save(checkpoints, 1, state)
    except ValueError:
        return
    found = checkpoints.latest()
    assert found is not None
    assert equal(checkpoints.load(found, identity=IDENTITY).state, state)


@pytest.mark.tour("runtime/checkpoint/")
def test_training_goes_on_as_if_it_had_never_stopped(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    model, optimizer = trained(3)
    save(checkpoints, 3, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    undisturbed = [advance(model, optimizer) for _ in range(4)]

    found = checkpoints.latest()
    assert found is not None
    assert found.plan == PLAN
    restored = checkpoints.load(found, identity=IDENTITY)
    again, other = trained(0)
    again.load_state_dict(restored.state["model"])
    other.load_state_dict(restored.state["optimizer"])
    assert restored.random is not None
    restore_random_state(restored.random)
    assert restored.step == 3
    assert [advance(again, other) for _ in range(4)] == undisturbed
    assert equal(dict(again.state_dict()), dict(model.state_dict()))


def test_every_generator_is_put_back() -> None:
    state = random_state()
    drawn = (random.random(), np.random.rand(), torch.rand(3).tolist())
    restore_random_state(state)
    assert (random.random(), np.random.rand(), torch.rand(3).tolist()) == drawn


def test_the_newest_are_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (1, 2, 10, 9):
        save(checkpoints, step, {"w": torch.full((3,), step)})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-10", "step-9"]
    found = checkpoints.latest()
    assert found is not None
    assert found.step == 10


@pytest.mark.parametrize(("damaged", "at"), [((6, 8), 5), ((999,), 5), ((3,), 5)])
def test_damaged_ones_are_no_reason_to_let_go_of_a_good_one(tmp_path: Path, damaged: tuple[int, ...], at: int) -> None:
    before = Checkpoints(tmp_path, keep=9)
    for step in sorted({2, *damaged}):
        save(before, step, {"weight": torch.ones(3)})
    for step in damaged:
        file = next((tmp_path / f"step-{step}").glob("*.safetensors"))
        file.write_bytes(file.read_bytes()[:10])
    after = Checkpoints(tmp_path, keep=2)
    found = after.latest()
    assert found is not None
    assert found.step == 2
    after.load(found, identity=IDENTITY)
    save(after, at, {"weight": torch.zeros(3)})
    assert {2, at} <= {int(path.name[5:]) for path in tmp_path.iterdir()}
    save(after, at + 10, {"weight": torch.zeros(3)})
    kept = {int(path.name[5:]) for path in tmp_path.iterdir()}
    assert {at, at + 10} <= kept
    assert 2 not in kept
    assert Checkpoints(tmp_path).latest() is not None


@pytest.mark.parametrize("file", ["manifest.json", "rank-0-0.safetensors"])
def test_a_pipe_in_place_of_a_file_is_passed_over_and_not_waited_for(tmp_path: Path, file: str) -> None:
    checkpoints = Checkpoints(tmp_path)
    for step in (1, 2):
        save(checkpoints, step, {"weight": torch.ones(3)})
    (tmp_path / "step-2" / file).unlink()
    os.mkfifo(tmp_path / "step-2" / file)
    found = checkpoints.latest()
    assert found is not None
    assert found.step == 1


def test_a_link_to_itself_makes_room_for_the_step(tmp_path: Path) -> None:
    (tmp_path / "step-1").symlink_to(tmp_path / "step-1")
    assert save(Checkpoints(tmp_path), 1, {"weight": torch.ones(3)}).is_dir()


def test_a_step_can_be_written_again(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    for value in (1, 2):
        save(checkpoints, 5, {"w": torch.tensor(value)})
    found = checkpoints.latest()
    assert found is not None
    assert checkpoints.load(found, identity=IDENTITY).state["w"].item() == 2
    save(checkpoints, 6, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-5", "step-6"]


def test_without_any_there_is_none(tmp_path: Path) -> None:
    assert Checkpoints(tmp_path / "nowhere").latest() is None


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints, the older one with the value 1."""
    directory = tmp_path_factory.mktemp("checkpoints")
    checkpoints = Checkpoints(directory)
    for step in (1, 2):
        save(checkpoints, step, {"w": torch.full((100,), float(step)), "note": "text"})
    return directory


def assert_passed_over(directory: Path, file: str) -> str:
    """The newest, step 2, is passed over with a line that names the file, and cannot be asked for. The line."""
    said: list[str] = []
    checkpoints = Checkpoints(directory, say=said.append)
    found = checkpoints.latest()
    assert found is not None
    assert found.step == 1
    assert checkpoints.load(found, identity=IDENTITY).state["w"][0].item() == 1
    (line,) = said
    assert file in line
    with pytest.raises(CheckpointError, match="step-2"):
        checkpoints.at(directory / "step-2")
    return line


@pytest.fixture
def copy(written: Path, tmp_path: Path) -> Path:
    shutil.copytree(written, tmp_path / "copy")
    return tmp_path / "copy"


FILES = ("manifest.json", "plan.json", "rank-0-0.safetensors", "state.json")


@given(data=st.data(), file=st.sampled_from(FILES[1:]), damage=st.sampled_from(["cut", "missing", "flip", "swapped"]))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_one_that_is_damaged_anywhere_is_named_and_passed_over(
    data: st.DataObject, file: str, damage: str, copy: Path, written: Path
) -> None:
    path = copy / "step-2" / file
    whole = (written / "step-2" / file).read_bytes()
    other = (written / "step-1" / file).read_bytes()
    place = data.draw(st.integers(0, len(whole) - 1), label="place")
    flipped = whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :]
    if damage == "missing":
        path.unlink()
    elif damage == "swapped":
        if other == whole:
            return
        path.write_bytes(other)
    else:
        path.write_bytes(whole[:place] if damage == "cut" else flipped)
    line = assert_passed_over(copy, file)
    if damage == "cut":
        assert f"{file} has {place} bytes of {len(whole)}" in line
    path.write_bytes(whole)


def test_no_flipped_bit_of_a_manifest_is_believed(copy: Path) -> None:
    """Each byte in turn, and each length that it can be cut to."""
    path = copy / "step-2" / "manifest.json"
    whole = path.read_bytes()
    checkpoints = Checkpoints(copy)
    for place, byte in enumerate(whole):
        for damaged in (whole[:place] + bytes([byte ^ 1]) + whole[place + 1 :], whole[:place]):
            path.write_bytes(damaged)
            with pytest.raises(CheckpointError):
                checkpoints.at(copy / "step-2")


def of_itself(manifest: dict[str, Any]) -> str:
    """A manifest whose digest is right, as somebody would write it who knows how."""
    fields = {key: value for key, value in manifest.items() if key != "digest"}
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    return json.dumps({**fields, "digest": hashlib.sha256(text.encode()).hexdigest()})


@pytest.mark.parametrize(
    "change",
    [
        {"step": "2"},
        {"step": -3},
        {"step": 1e9},
        {"step": 2.0},
        {"step": True},
        {"step": 10**9},
        {"step": 3},
        {"files": {}},
        {"files": {"../step-1/plan.json": {"bytes": 15, "sha256": "0" * 64}}},
        {"files": None},
        {"world_size": 0},
        {"identity": []},
        {"identity": {"job": "job"}},
        {"identity": {"job": {"training": "training"}}},
        {"version": 99},
        {"version": "2"},
        {"more": 1},
        {"torch": None},
    ],
    ids=str,
)
def test_an_odd_manifest_is_passed_over_as_a_damaged_one_is(copy: Path, change: dict[str, Any]) -> None:
    path = copy / "step-2" / "manifest.json"
    path.write_text(of_itself({**json.loads(path.read_text()), **change}))
    assert_passed_over(copy, "step-2")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[]",
        "[" * 100_000,
        '{"a":' * 5_000 + "1" + "}" * 5_000,
        '{"step": 1, "step": 2}',
        '{"step": NaN}',
        '{"step": ' + "9" * 5_000 + "}",
        "\ud800",
        pickle.dumps("text").decode("latin-1"),
    ],
    ids=lambda text: text[:12],
)
@pytest.mark.parametrize("file", ["manifest.json", "state.json"])
def test_text_that_is_no_manifest_is_passed_over(copy: Path, text: str, file: str) -> None:
    (copy / "step-2" / file).write_text(text, errors="surrogatepass")
    assert_passed_over(copy, file)


def test_a_file_that_it_does_not_list_is_no_part_of_it(copy: Path) -> None:
    (copy / "step-2" / ".metadata").write_bytes(b"")
    assert_passed_over(copy, ".metadata")


class Bomb:
    """What a pickle of it does when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("file", [*FILES, "rank-1-0.safetensors", ".metadata", "__0_0.distcp"])
def test_a_pickle_in_place_of_any_file_is_not_run(copy: Path, tmp_path: Path, file: str) -> None:
    """Also where the manifest lists it as it is, as somebody would who may write there."""
    directory = copy / "step-2"
    (directory / file).write_bytes(pickle.dumps(Bomb(tmp_path / "executed")))
    if file != "manifest.json":
        manifest = json.loads((directory / "manifest.json").read_text())
        manifest["files"][file] = record(directory / file).model_dump()
        (directory / "manifest.json").write_text(of_itself(manifest))
    checkpoints = Checkpoints(copy)
    found = checkpoints.latest()
    assert found is not None
    with suppress(CheckpointError):
        checkpoints.load(found, identity=IDENTITY)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("file", ["manifest.json", "state.json"])
@pytest.mark.parametrize("protocol", [0, 4])
def test_a_pickle_in_place_of_any_field_is_not_run(copy: Path, tmp_path: Path, file: str, protocol: int) -> None:
    """Each value in turn, with digests that are right."""
    directory = copy / "step-2"
    content = json.loads((directory / file).read_text())
    manifest = json.loads((directory / "manifest.json").read_text())
    bomb = pickle.dumps(Bomb(tmp_path / "executed"), protocol).decode("latin-1")
    checkpoints = Checkpoints(copy)
    for *around, last in places(content):
        changed = deepcopy(content)
        reduce(getitem, around, changed)[last] = bomb
        if file == "manifest.json":
            (directory / file).write_text(of_itself(changed))
        else:
            (directory / file).write_text(json.dumps(changed))
            manifest["files"][file] = record(directory / file).model_dump()
            (directory / "manifest.json").write_text(of_itself(manifest))
        with suppress(CheckpointError):
            found = checkpoints.latest()
            assert found is not None
            checkpoints.load(found, identity=IDENTITY)
        assert not (tmp_path / "executed").exists(), (around, last)


DAMAGES: dict[str, Callable[[Path, bytes], object]] = {
    "emptied": lambda path, _: path.write_bytes(b""),
    "cut": lambda path, _: path.write_bytes(path.read_bytes()[:-1]),
    "longer": lambda path, _: path.write_bytes(path.read_bytes() + b"}"),
    "of another step": lambda path, other: path.write_bytes(other),
    "removed": lambda path, _: path.unlink(),
    "a directory": lambda path, _: (path.unlink(), path.mkdir()),
    "a link to nowhere": lambda path, _: (path.unlink(), path.symlink_to("nowhere")),
}


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", DAMAGES)
def test_any_file_damaged_in_any_way_is_noticed_and_without_a_whole_one_nothing_begins(
    copy: Path, file: str, damage: str
) -> None:
    first, second = copy / "step-1" / file, copy / "step-2" / file
    whole = first.read_bytes(), second.read_bytes()
    if damage == "of another step" and whole[0] == whole[1]:
        return
    DAMAGES[damage](second, whole[0])
    assert_passed_over(copy, "step-2")
    DAMAGES[damage](first, whole[1])
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* is whole:\n  - step-2: .*\n  - step-1: .*\nmove"):
        Checkpoints(copy).latest()


FOREIGN = {"pickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
LOADS = {
    "torch.load",
    "np.load",
    "numpy.load",
    "yaml.load",
    "yaml.unsafe_load",
    "yaml.full_load",
    "pd.read_pickle",
    "eval",
    "exec",
}
BETWEEN_OWN_PROCESSES = {
    "heterodyne.runtime.comm.agreement",  # whether an error can be sent to the other ranks
    "heterodyne.runtime.comm.objects",  # what other ranks have signed
    "heterodyne.runtime.data.elements",  # where a stream is, from the process of this rank that reads it
}


def test_nothing_on_the_way_of_resume_reads_what_could_run_code() -> None:
    """Of our own modules, all that `heterodyne.api.train` imports, at once or in a function."""
    reached: dict[str, ast.Module] = {}
    waiting = ["heterodyne.api.train"]
    while waiting:
        name = waiting.pop()
        found = None if name in reached else importlib.util.find_spec(name)
        if found is None or found.origin is None:
            continue
        reached[name] = ast.parse(Path(found.origin).read_text())
        waiting += imported(reached[name])
    assert "heterodyne.runtime.checkpoint.checkpoints" in reached
    assert "heterodyne.runtime.trainer" in reached
    faults = {name: found for name, tree in reached.items() if (found := readers_of_code(tree))}
    assert set(faults) == BETWEEN_OWN_PROCESSES, faults
    assert not [name for name in faults if name.startswith("heterodyne.runtime.checkpoint")]


def imported(tree: ast.Module) -> list[str]:
    """Our modules that a module names in its imports, but for those that only a type checker reads."""
    names: list[str] = []
    unread = [
        each
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for each in ast.walk(node)
    ]
    for node in {*ast.walk(tree)} - {*unread}:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return [name for name in names if name.split(".")[0] == "heterodyne" and is_module(name)]


def is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # its parent is a module with that name in it
        return False


def readers_of_code(tree: ast.Module) -> list[str]:
    found: list[str] = []
    for node in ast.walk(tree):
        match node:
            case ast.Import():
                found += [alias.name for alias in node.names if alias.name.split(".")[0] in FOREIGN]
            case ast.ImportFrom(module=str(module)):
                if module.split(".")[0] in FOREIGN or module.startswith("torch.distributed.checkpoint"):
                    found.append(module)
            case ast.Call():
                told = {(word.arg, ast.unparse(word.value)) for word in node.keywords}
                if ast.unparse(node.func) in LOADS or told & {("allow_pickle", "True"), ("weights_only", "False")}:
                    found.append(ast.unparse(node)[:80])
    return found


@pytest.mark.parametrize(
    "error", [KeyError("w"), TypeError("no dict"), RuntimeError("size\nmismatch"), CheckpointError("of another")]
)
def test_a_state_that_nothing_can_take_is_named(written: Path, error: Exception) -> None:
    found = Checkpoints(written).latest()
    assert found is not None
    with (
        pytest.raises(CheckpointError, match=r"step-2 holds a state that this run cannot take \(.*moving it away"),
        taken_from(f"{found.path} holds a state", "resume from an earlier one by moving it away"),
    ):
        raise error


@pytest.mark.parametrize(
    "value",
    [object(), {1, 2}, lambda: 0, torch.float32, b"bytes", {(1, 2): 3}],
    ids=lambda value: type(value).__name__,
)
def test_what_no_checkpoint_can_hold_is_refused_with_its_place(tmp_path: Path, value: Any) -> None:
    with pytest.raises(CheckpointError, match=r"state\.scheduler\.fns\[1\]"):
        save(Checkpoints(tmp_path), 1, {"scheduler": {"fns": [1, value]}})
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        Checkpoints(tmp_path).at(tmp_path / "step-7")
    (tmp_path / "step-7").mkdir()
    with pytest.raises(CheckpointError, match=r"manifest\.json is missing"):
        Checkpoints(tmp_path).at(tmp_path / "step-7")


def test_one_of_another_version_is_refused(written: Path, tmp_path: Path) -> None:
    shutil.copytree(written / "step-2", tmp_path / "step-2")
    path = tmp_path / "step-2" / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": 99}))
    with pytest.raises(CheckpointError, match="of another version"):
        Checkpoints(tmp_path).at(tmp_path / "step-2")


def test_one_of_another_job_says_in_which_fields(written: Path) -> None:
    checkpoints = Checkpoints(written)
    found = checkpoints.latest()
    assert found is not None
    other = {"job": {"training": {"seed": 1, "global_batch_size": 5}}, "data": {"tokens": "xyz"}}
    with pytest.raises(CheckpointError) as caught:
        checkpoints.load(found, identity=other)
    assert "job.training.seed: 0 there, 1 here" in str(caught.value)
    assert "data.tokens: 'abc' there, 'xyz' here" in str(caught.value)
    assert "global_batch_size" not in str(caught.value)
    same = dict(found.manifest.identity)
    with pytest.raises(
        CheckpointError, match=r"(?s)other data:.*samples: None there, 8 here.*give it the data that it began with"
    ):
        found.require({**same, "data": {**same["data"], "samples": 8}})


@contextmanager
def files_no_larger_than(size: int) -> Iterator[None]:
    """The operating system refuses to write more, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)


@pytest.mark.parametrize("room", [0, 100, 5000, 50_000])
def test_without_room_the_previous_one_stays_and_it_is_said(tmp_path: Path, room: int) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    save(checkpoints, 1, {"w": torch.zeros(3)})
    with (
        files_no_larger_than(room),
        pytest.raises(CheckpointError, match=r"step 2 cannot be written .* make room"),
    ):
        save(checkpoints, 2, {"w": torch.zeros(100_000)})
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]
    found = checkpoints.latest()
    assert found is not None
    save(checkpoints, 2, {"w": torch.zeros(100_000)})
    assert [path.name for path in tmp_path.iterdir()] == ["step-2"]


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "checkpoint").write_text("a file stands here")
    with pytest.raises(CheckpointError, match=r"checkpoint.*cannot be"):
        save(Checkpoints(tmp_path / "checkpoint"), 1, {})


@pytest.mark.filterwarnings(
    "ignore:.*fork:DeprecationWarning"
)  # the child only saves; it takes no lock of a parent's thread
def test_a_writer_that_is_killed_at_any_moment_harms_nothing(tmp_path: Path) -> None:
    """A child saves 1, 2, 3, ... as fast as it can and is killed; what is left must be whole, and go on from there."""
    moments = random.Random(0)
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 1, {"w": torch.full((20_000,), 1)})
    reached, partials = 1, 0
    for _ in range(12):
        child = os.fork()
        if child == 0:
            try:
                for step in range(reached + 1, reached + 10_000):
                    save(checkpoints, step, {"w": torch.full((20_000,), step)})
            finally:
                os._exit(1)
        while not any((tmp_path / f"step-{reached + ahead}").exists() for ahead in (1, 2, 3)):
            time.sleep(0.001)
        time.sleep(0.03 * moments.random())
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status), "it was killed, it did not fail"
        partials += any(".partial-" in path.name for path in tmp_path.iterdir())
        found = checkpoints.latest()
        assert found is not None
        assert found.step >= reached
        restored = checkpoints.load(found, identity=IDENTITY)
        assert (restored.state["w"] == found.step).all()
        reached = found.step
    assert partials, "some were cut short"
    save(checkpoints, reached + 1, {})
    assert not [path for path in tmp_path.iterdir() if ".partial-" in path.name]
