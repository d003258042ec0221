"""Whatever is wrong is told in one message, with an exit status of 2 and without a traceback."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from heterodyne.cli import main
from heterodyne.cluster.profile import PROFILE_VERSION
from multiprocess.cli_job import make_place

FILES = {
    "typo.yaml": "model: {factory: 'model.py:build'}\ntraining:\n  stepz: 3\n",
    "date.yaml": "model: {factory: 'model.py:build'}\ndata: 2026-99-99\n",
    "alias.yaml": "model: &m {arguments: *m}\n",
    "empty.yaml": "",
    "unit.yaml": "nodes:\n  - name: a\n    devices: [{kind: cpu, memory: 2 GX}]\n",
    "none.yaml": "nodes: []\n",
    "small.yaml": "nodes:\n  - name: a\n    devices: [{kind: cpu, memory: 40 MiB}]\n",
    "empty.txt": "",
    "short.txt": "abc",
    "syntax.py": "def build(:\n",
    "raises.py": "def build():\n    raise ValueError('the width is odd')\n",
    "number.py": "def build():\n    return 3\n",
    "lossless.py": "from torch import nn\nclass M(nn.Module):\n    def forward(self, input_ids, labels): return None\nbuild = M\n",
    "text.json": "{oops",
    "many.yaml": "name: many\nnodes: [{name: here, devices: [{kind: cpu, count: 4000, memory: 1 GiB}]}]\n",
    "profile.json": json.dumps({"version": PROFILE_VERSION, "key": "x", "devices": {}, "links": [], "kinds": {}}),
    "old.json": '{"version": 0}',
}  # fmt: skip
TRAIN = ("train", "job.yaml")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_place(tmp_path_factory.mktemp("bad")).path
    for name, text in FILES.items():
        (path / name).write_text(text)
    os.mkfifo(path / "pipe")
    (path / "tokenizer").mkdir()
    (path / "tokenizer" / "tokenizer.json").write_text("[]")
    (path / "holds").mkdir()
    (path / "holds" / "something").touch()
    return path


@pytest.fixture(autouse=True)
def here(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    monkeypatch.setenv("XDG_CACHE_HOME", str(place / "home"))
    for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(variable, raising=False)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("train", "typo.yaml"), "typo.yaml:3: training.stepz: there is no such key; did you mean 'steps'?"),
        (("train", "date.yaml"), "date.yaml:2: '2026-99-99' is no timestamp"),
        (("train", "alias.yaml"), "alias.yaml:1: an alias (*) refers to what it stands in"),
        (("train", "empty.yaml"), "empty.yaml: is empty"),
        (("train", "nowhere.yaml"), "nowhere.yaml: cannot be read"),
        (("train", "."), ".: cannot be read: Is a directory"),
        ((*TRAIN, "--set", "steps"), "--set steps: write section.field=value"),
        ((*TRAIN, "--set", "training.steps=many"), "--set training.steps=many: training.steps"),
        ((*TRAIN, "--set", "bogus.x=3"), "--set bogus.x=3: bogus: there is no such key"),
        ((*TRAIN, "--set", "training.steps=[1"), "is not a YAML value"),
        (("plan", "job.yaml", "--cluster", "unit.yaml"), "unit.yaml:3: nodes.0.devices.0.memory: '2 GX' has no unit"),
        (("plan", "job.yaml", "--cluster", "none.yaml"), "none.yaml:1: is empty; give"),
        ((*TRAIN, "--cluster", "nowhere.yaml"), "nowhere.yaml: cannot be read"),
        ((*TRAIN, "--plan", "nowhere.json"), "nowhere.json: cannot be read"),
        ((*TRAIN, "--plan", "text.json"), "text.json:1: not JSON"),
        (("simulate", "nowhere"), "nowhere: cannot be read"),
        ((*TRAIN, "--plan", "old.json"), "old.json: plan version 0 is not 2; plan again"),
        (("plan", "job.yaml", "--profile", "text.json"), "text.json: not a profile"),
        (("plan", "job.yaml", "--profile", "."), "the profile cannot be read (Is a directory)"),
        (("plan", "job.yaml", "--profile", "profile.json"), "the profile knows nothing of"),
        ((*TRAIN, "--run-dir", "holds"), "not empty (it holds something): continue the run in it with --resume"),
        ((*TRAIN, "--run-dir", "holds", "--resume"), "there is nothing to resume: holds is no run directory"),
        ((*TRAIN, "--resume"), "there is nothing to resume: no run job-N in runs"),
        ((*TRAIN, "--run-dir", "job.yaml/below"), "cannot be made (Not a directory)"),
        ((*TRAIN, "--set", "data.text=nowhere"), "data.text: nowhere: there is no such file or directory"),
        ((*TRAIN, "--set", "data.text=empty.txt"), "empty.txt is empty; name a file that has text"),
        ((*TRAIN, "--set", "data.text=short.txt"), "the text has 3 bytes, one sequence needs 16: give more text"),
        ((*TRAIN, "--set", "model.factory=nowhere.py:build"), "there is no file nowhere.py; the path is relative"),
        ((*TRAIN, "--set", "model.factory=model.py:nothing"), "has no function 'nothing'; it has: Tiny, build"),
        ((*TRAIN, "--set", "model.factory=syntax.py:build"), "syntax.py cannot be imported: SyntaxError"),
        ((*TRAIN, "--set", "model.factory=raises.py:build"), "raises.py:2: raise ValueError('the width is odd')"),
        ((*TRAIN, "--set", "model.factory=number.py:build"), "returned a int, not a torch.nn.Module"),
        ((*TRAIN, "--set", "model.factory=lossless.py:build"), "loss"),
        ((*TRAIN, "--set", "model.arguments.widht=3"), "got an unexpected keyword argument 'widht'"),
        (
            (*TRAIN, "--set", "model.arguments.vocabulary=100"),
            "has 100 rows (0 ... 99): the data and the model must be of one tokenizer",
        ),
        ((*TRAIN, "--cluster", "small.yaml"), "it lacks"),
        ((*TRAIN, "--cluster", "many.yaml"), "many.yaml: it has 4,000 devices, a worker each, and with"),
        (("plan", "job.yaml", "--out", "no/plan.json"), "--out no/plan.json: there is no directory no"),
        (("report", "nowhere"), "nowhere is not a directory"),
        (("report", "holds"), "holds is no run"),
        (
            ("emulate", "--speeds", "2", "--", "true"),
            "the speed of rank 0 is 2; it must be at least 0.001 and at most 1",
        ),
        (("emulate", "--speeds", "fast", "--", "true"), "'fast' is not a number"),
        (("emulate", "--speeds", "0.5", "--", "torchrun", "x.py"), "'torchrun' starts workers itself"),
        (
            ("emulate", "--speeds", "0.5", "--", "python", "-m", "torch.distributed.run", "x.py"),
            "starts workers itself",
        ),
        (("emulate", "--speeds", ",".join(["0.1"] * 100_000), "--", "true"), "100,000 speeds are as many workers"),
        (("train", "pipe"), "pipe: cannot be read: it is a pipe (FIFO), and no regular file"),
        ((*TRAIN, "--set", "data.text=pipe"), "pipe cannot be read (it is a pipe (FIFO)"),
        ((*TRAIN, "--set", "data.text="), "--set data.text=: there is no value; write data.text=null"),
        ((*TRAIN, "--set", "data.text=['']"), "data.text names nothing, or an empty path"),
        ((*TRAIN, "--set", "training.steps=1:30"), "1:30 is a number to the base of 60 in YAML"),
        ((*TRAIN, "--set", "data.tokenizer=tokenizer"), "data.tokenizer: the tokenizer in tokenizer cannot be loaded"),
        (("train", "a\x1b[31m.yaml"), "the argument a\\x1b[31m.yaml has control characters"),
    ],
    ids=lambda value: " ".join(value)[:80] if isinstance(value, tuple) else "",
)
def test_it_is_told(arguments: tuple[str, ...], told: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = files_in(place)
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert said.count("error: ") == 1
    assert told in said
    assert "Traceback" not in said
    assert files_in(place) == before
    assert not list((place / "runs").glob("*")), "a run that never began leaves no directory"


def files_in(place: Path) -> set[Path]:
    """But for what every run and every import may leave behind."""
    return {path for path in place.iterdir() if path.name not in ("cache", "home", "runs", "__pycache__")}


@pytest.mark.parametrize(
    "arguments", [("trian", "job.yaml"), ("train",), (*TRAIN, "--fast"), ("emulate",)], ids=" ".join
)
def test_a_command_that_there_is_not_shows_what_there_is(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert "Usage: " in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["devices", "measure", "plan", "simulate", "train", "verify", "report", "emulate"])
def test_each_verb_has_help_that_the_list_of_verbs_can_show_whole(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--help"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.split()[:1] == [verb]]
    assert line.endswith(".")
    assert not line.endswith("...")
    assert main([verb, "--help"]) == 0
    assert line.split(maxsplit=1)[1] in capsys.readouterr().out


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        ({"RANK": "0"}, "the environment has RANK='0' but not WORLD_SIZE, MASTER_ADDR, MASTER_PORT"),
        ({"WORLD_SIZE": "2"}, "the environment has WORLD_SIZE='2' but not RANK"),
        ({"RANK": "5", "WORLD_SIZE": "2", "MASTER_ADDR": "x", "MASTER_PORT": "1"}, "RANK=5 must be less than WORLD_SIZE=2"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "x", "MASTER_PORT": "y"}, "MASTER_PORT='y' is not a whole number"),
    ],
    ids=str,
)  # fmt: skip
def test_an_environment_that_contradicts_itself_is_told(
    variables: dict[str, str], told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert main(TRAIN) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("columns", ["²", "1" + 30 * "0"])
def test_a_terminal_of_no_possible_width_stops_nothing(
    columns: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert main(["devices", "--cluster", "small.yaml"]) == 0
    assert "a/cpu:0" in capsys.readouterr().out


def test_code_that_a_run_of_others_names_is_not_run_unasked(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = place / "strange"
    run.mkdir()
    (run / "job.yaml").write_text("model: {factory: 'evil.py:build'}\n")
    (run / "evil.py").write_text("from pathlib import Path\nPath('ran').touch()\ndef build(): ...\n")
    layout = {"kind": "replicate", "shares": [1]}
    stage = {"ops": [0, 1], "devices": ["a"], "regions": [{"layout": layout}]}
    plan = {"version": 2, "global_batch_size": 8, "pipelines": [{"micro_batches": "1x8", "stages": [stage]}]}
    (run / "plan.json").write_text(json.dumps(plan))
    run.chmod(0o777)
    assert main(["simulate", "strange"]) == 2
    assert "strange is somebody else's" in capsys.readouterr().err
    assert not (place / "ran").exists()
