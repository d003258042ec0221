"""``heterodyne plan`` for devices that are not here."""

from __future__ import annotations

import contextlib
import io
import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from heterodyne.api import on_paper
from heterodyne.cli.app import run
from heterodyne.cli.plan import elsewhere
from heterodyne.plan import Plan
from heterodyne.plan.capabilities import runs_at_all, uses
from heterodyne.search.fleet import space
from heterodyne.search.fleet.evaluator import Watch
from heterodyne.units import format_seconds

JOB = """\
model:
  huggingface: {model_type: llama, hidden_size: 1024, num_hidden_layers: 8, num_attention_heads: 16, num_key_value_heads: 8,
                intermediate_size: 4096, vocab_size: 32000}
data: {sequence_length: 1024}
training: {global_batch_size: 64, precision: bf16}
"""
SMALL = JOB.replace("num_hidden_layers: 8", "num_hidden_layers: 2").replace("size: 64", "size: 4")
FLEET = """\
name: lab
prices: {A100-SXM-80GB: 1.8, V100-SXM2-32GB: 0.6}
nodes:
  - {name: new, count: 2, devices: [{kind: A100-SXM-80GB, count: 4}]}
  - {name: old, count: 2, devices: [{kind: V100-SXM2-32GB, count: 4}]}
links:
  - {between: all, bandwidth: 100 Gb/s, latency: 10 us}
"""
TINY = """\
name: tiny
nodes:
  - {name: t, count: 2, devices: [{kind: T4, count: 1, memory: 3.2 GB}]}
links:
  - {between: all, bandwidth: 10 Gb/s, latency: 10 us}
"""
FIELDS = {
    "kind",
    "cluster",
    "devices",
    "objective",
    "plan",
    "bound_s",
    "alternatives",
    "families",
    "frontier",
    "stopped",
    "export",
}
"""Of the JSON of a plan, whichever search has found it."""


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in (("job.yaml", JOB), ("fleet.yaml", FLEET), ("tiny.yaml", TINY)):
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@dataclass(frozen=True)
class Shown:
    """One plan with all that can be asked of it, for the tests that only look at it: what was printed, and where the files are."""

    out: str
    said: str
    folder: Path

    @property
    def plan(self) -> Plan:
        return Plan.load(self.folder / "plan.json")


def _shown(folder: Path, *options: str) -> Shown:
    for name, text in (("job.yaml", JOB), ("fleet.yaml", FLEET)):
        (folder / name).write_text(text)
    out, said = io.StringIO(), io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(out), contextlib.redirect_stderr(said):
        assert planned("--frontier", *options) == 0
    return Shown(out=out.getvalue(), said=said.getvalue(), folder=folder)


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Shown:
    options = ("--families", "--picture", "frontier.png", "--timeline", "step.json")
    return _shown(tmp_path_factory.mktemp("shown"), *options)


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Shown:
    return _shown(tmp_path_factory.mktemp("told"), "--json")


def planned(*options: str) -> int:
    return run(["plan", "job.yaml", "--cluster", "fleet.yaml", *options])


def told_of(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    """All that is known of the plan and of those beside it."""
    capsys.readouterr()
    assert planned("--json", *options) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_several_nodes_are_planned_on_paper(shown: Shown) -> None:
    assert "planning on paper for 16 devices" in shown.said
    assert "Fleet lab: 16 devices of 2 kinds" in shown.out
    assert "The plan:" in shown.out
    plan = shown.plan
    assert not plan.bound
    assert plan.predicted is not None
    assert plan.predicted.step_s > 0
    assert sum(p.replicas * p.micro_batches.samples for p in plan.pipelines) == plan.global_batch_size == 64
    steps = 1e9 / (64 * 1024)
    told = f"1e9 tokens take {format_seconds(steps * plan.predicted.step_s)} and cost {steps * plan.predicted.usd:,.2f} usd"
    assert told in shown.out


def test_what_16_bits_would_gain_is_said_of_a_job_in_32(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (files / "job.yaml").write_text(SMALL)
    assert run(["plan", "job.yaml", "--cluster", "fleet.yaml"]) == 0
    assert "in 16 bits" not in capsys.readouterr().err
    assert run(["plan", "job.yaml", "--cluster", "fleet.yaml", "--set", "training.precision=fp32"]) == 0
    said = capsys.readouterr().err
    assert re.search(
        r"in 16 bits A100-SXM-80GB computes \d+\.\d times as fast and V100-SXM2-32GB computes \d+\.\d", said
    )


def test_planning_on_paper_loads_no_torch(files: Path) -> None:
    program = (
        "import sys; from heterodyne.cli.app import run; status = run(['plan', 'job.yaml', '--cluster', 'fleet.yaml']); "
        "sys.exit(status or ('torch' in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", program], cwd=files, check=False, capture_output=True).returncode == 0


def test_the_same_files_give_the_same_plan(told: Shown, files: Path) -> None:
    assert planned("--frontier") == 0
    assert (files / "plan.json").read_text() == (told.folder / "plan.json").read_text()


def test_json_is_all_that_is_printed_when_it_is_asked_for(told: Shown) -> None:
    found = json.loads(told.out)
    assert found.keys() == FIELDS
    assert found["plan"] == json.loads((told.folder / "plan.json").read_text())
    assert found["plan"]["predicted"]["step_s"] >= found["bound_s"] > 0


def test_every_family_has_a_best_or_a_reason_and_none_beats_the_plan(shown: Shown) -> None:
    lines = shown.out.splitlines()
    named = [line for line in lines if line.startswith(("data parallel only", "one pipeline", "V100-SXM2-32GB alone"))]
    assert len(named) == 3
    words = ("longer", "as long", "is one of these", "impossible: ")
    assert all(any(word in line for word in words) for line in named)


def test_the_frontier_is_a_table_and_a_picture(shown: Shown, told: Shown) -> None:
    assert "Time, money and devices" in shown.out
    assert (shown.folder / "frontier.png").read_bytes().startswith(b"\x89PNG")
    frontier = [Plan.parse(json.dumps(plan)) for plan in json.loads(told.out)["frontier"]]
    figures = [(p.predicted.step_s, p.predicted.usd or 0.0, p.device_count) for p in frontier if p.predicted]
    assert len(figures) > 1
    for own in figures:
        assert not any(other != own and all(a <= b for a, b in zip(other, own, strict=True)) for other in figures)


def test_less_money_is_never_more_than_the_fastest_plan_costs(
    told: Shown, files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fast = json.loads(told.out)["plan"]["predicted"]
    cheap = told_of(capsys, "--objective", "money")["plan"]["predicted"]
    assert cheap["usd"] <= fast["usd"]
    assert cheap["step_s"] >= fast["step_s"]


def test_the_step_is_a_trace_of_ranks_that_stand_for_all(shown: Shown) -> None:
    trace = json.loads((shown.folder / "step.json").read_text())["traceEvents"]
    plan = shown.plan
    places = {
        (pipeline.stages, number if stage.group.place is None else stage.group.place)
        for pipeline in plan.pipelines
        for number, stage in enumerate(pipeline.stages)
        if stage.group is not None
    }
    assert len({event["pid"] for event in trace}) == len(places)
    end = max(event["ts"] + event["dur"] for event in trace if event["ph"] == "X")
    assert plan.predicted is not None
    assert end / 1e6 == pytest.approx(plan.predicted.step_s, rel=1e-6)


@pytest.mark.parametrize(
    ("framework", "written", "told"),
    [
        ("megatron", "plan.megatron.txt", "--micro-batch-size"),
        ("torchtitan", "plan.torchtitan.toml", "[parallelism]"),
        ("schedule", "plan.schedule.csv", "0F0"),
    ],
)
def test_even_plans_are_written_for_other_frameworks(files: Path, framework: str, written: str, told: str) -> None:
    assert planned("--without", "old", "--export", framework) == 0
    assert told in (files / written).read_text()


def test_what_is_exported_is_the_best_that_the_others_take(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Over both kinds the step would be a little shorter, which is said; what is planned and written is over one."""
    assert planned("--links", "inter=800Gb/s", "--export", "megatron") == 0
    assert re.search(
        r"a plan (about as fast|with a step of .*) cannot be exported: other frameworks know one kind",
        capsys.readouterr().err,
    )
    stages = [stage for pipeline in Plan.load(files / "plan.json").pipelines for stage in pipeline.stages]
    assert len({stage.group.kind for stage in stages if stage.group}) == 1
    assert "--global-batch-size 64" in (files / "plan.megatron.txt").read_text()


def test_where_no_plan_is_taken_by_others_it_is_said_why(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    both = FLEET.replace("count: 4}]", "count: 1, memory: 6 GB}]").replace("count: 2, devices", "count: 1, devices")
    (files / "fleet.yaml").write_text(both)
    for options in ((), ("--json",)):
        assert planned("--export", "megatron", "--timeline", "step.json", *options) == 2
        out, said = capsys.readouterr()
        assert (
            "plan.json is written; it cannot be exported for megatron: other frameworks know one kind of device" in said
        )
        for name in ("plan.json", "step.json"):
            (files / name).unlink()  # all else that was asked for is there
        assert not (files / "plan.megatron.txt").exists()
    export = json.loads(out)["export"]
    assert (export["framework"], export["files"]) == ("megatron", [])
    assert "one kind of device" in export["refused"]


def test_a_number_of_micro_batches_that_others_do_not_take_is_planned_otherwise(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    four = ("--cluster", "tiny.yaml", "--set", "training.global_batch_size=13", "--export", "megatron")
    (files / "tiny.yaml").write_text(TINY.replace("count: 2", "count: 4").replace("3.2 GB", "16 GB"))
    (files / "job.yaml").write_text(JOB.replace("hidden_layers: 8", "hidden_layers: 24"))
    assert run(["plan", "job.yaml", *four]) == 0
    assert "Megatron-LM cannot interleave 13 micro-batches on 4 places; 12 or 16 would do" in capsys.readouterr().err
    assert "--pipeline-model-parallel-size 4" in (files / "plan.megatron.txt").read_text()


def test_a_fleet_that_is_not_there_yet_is_compared_with_the_one_that_is(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert planned("--add", "2x4xA100-SXM-80GB", "--links", "inter=200Gb/s") == 0
    out = capsys.readouterr().out
    assert "What if: add 2x4xA100-SXM-80GB, inter=200Gb/s" in out
    assert "Fleet lab: 24 devices" in out


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--cluster", "tiny.yaml"), r"it lacks .*\n.*\neverything shared out, parameters and gradients take .* once"),
        (
            ("--cluster", "fleet.yaml", "--set", "model.huggingface.num_hidden_layers=40000"),
            r"one copy of the weights and as much for their gradients are .*, and 16 devices have .* more of new",
        ),
        (("--cluster", "tiny.yaml", "--objective", "money"), "no price is stated for t"),
        (
            ("--cluster", "fleet.yaml", "--budget", "0.1"),
            r"budget of 0.10 usd/hour; 1 of old, which would do, cost 0.60",
        ),
        (("--cluster", "fleet.yaml", "--without", "node7"), "there is no pool node7; there are new, old"),
        (("--cluster", "fleet.yaml", "--add", "8xH1000"), "there is no accelerator 'H1000'"),
        (("--cluster", "fleet.yaml", "--picture", "no/where.png"), "--picture no/where.png: there is no directory no"),
        (("--cluster", "fleet.yaml", "--picture", "frontier.txt"), "--picture frontier.txt: a picture is one of .png"),
        (("--on-paper",), "--cluster fleet.yaml"),
        (("--cluster", "nothere.yaml"), "nothere.yaml: cannot be read"),
    ],
)
def test_what_cannot_be_is_refused_in_one_message(
    files: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], told: str
) -> None:
    (files / "job.yaml").write_text(SMALL)
    assert run(["plan", "job.yaml", *options]) == 2
    said = capsys.readouterr().err
    assert said.count("error:") == 1
    assert re.search(told, said)
    assert not (files / "plan.json").exists()


def test_a_model_without_a_shape_is_captured(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (files / "model.py").write_text(
        "import torch\nfrom torch import nn\n"
        "class Small(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n"
        "        self.embed = nn.Embedding(256, 64)\n"
        "        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))\n        self.head = nn.Linear(64, 256)\n"
        "    def forward(self, input_ids, labels):\n        x = self.embed(input_ids)\n"
        "        for layer in self.layers:\n            x = x + torch.relu(layer(x))\n"
        "        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())\n"
    )
    (files / "job.yaml").write_text(
        "model: {factory: 'model.py:Small'}\ndata: {sequence_length: 32}\ntraining: {global_batch_size: 32}\n"
    )
    assert planned() == 0
    assert "The plan:" in capsys.readouterr().out


def test_a_model_is_captured_with_the_samples_of_its_own_dataset(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (files / "model.py").write_text(
        "import torch\nfrom torch import nn\n"
        "class Points(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))\n"
        "    def forward(self, x, y):\n        return nn.functional.mse_loss(self.layers(x), y)\n"
        "def points():\n    return [{'x': torch.randn(8), 'y': torch.randn(1)} for _ in range(64)]\n"
    )
    (files / "job.yaml").write_text(
        "model: {factory: 'model.py:Points'}\ndata: {dataset: 'model.py:points'}\ntraining: {global_batch_size: 32}\n"
    )
    assert planned() == 0
    assert "The plan:" in capsys.readouterr().out


def test_who_interrupts_a_search_gets_the_best_so_far(tmp_path: Path) -> None:
    examples = Path(__file__).parents[2] / "examples"
    at_once = (
        "import sys; from functools import partial; from heterodyne.api import watched; from heterodyne.cli.app import run; "
        "watched.Watch = partial(watched.Watch, every_s=0.0); sys.exit(run(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", at_once, "plan", str(examples / "mixture_1800b.yaml")]
    command += ["--cluster", str(examples / "fleets" / "six_kinds.yaml"), "--out", str(tmp_path / "plan.json")]
    command += ["--framework", "megatron core"]  # which runs so many kinds of plans that the search takes a while
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        said = ""
        for line in process.stderr:
            said += line
            if line.startswith("so far"):
                process.send_signal(signal.SIGINT)
                break
        out, rest = process.communicate()
    assert process.returncode == 0, said + rest
    assert "stopping with the best plan so far" in rest
    assert "there may be better plans" in rest
    assert "The plan:" in out
    assert Plan.load(tmp_path / "plan.json").predicted is not None


WIDE = """\
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))

class Wide(nn.Module):
    def __init__(self, width=16384, layers=3):
        super().__init__()
        self.embed, self.head = nn.Embedding(256, width), nn.Linear(width, 256)
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))

    def forward(self, input_ids, labels):
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())
"""


def test_blocks_of_a_captured_model_that_fit_no_device_lie_in_parts(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A block has 2.1e9 parameters: 34 GB with gradients and Adam's states, where a device has 32."""
    (files / "model.py").write_text(WIDE)
    (files / "job.yaml").write_text(
        "model: {factory: 'model.py:Wide'}\ndata: {sequence_length: 64}\ntraining: {global_batch_size: 8}\n"
    )
    (files / "fleet.yaml").write_text(
        "name: old\nnodes:\n  - {name: n, kind: V100-SXM2-32GB, count: 1, devices_per_node: 8}\n"
    )
    told = told_of(capsys, "--runnable")
    assert max(told["plan"]["predicted"]["memory_bytes"].values()) < 32 * 2**30
    stages = [stage for pipeline in Plan.load(files / "plan.json").pipelines for stage in pipeline.stages]
    assert any(axis.kind == "split" for stage in stages for axis in stage.layout.axes)


def test_what_is_planned_runs_here_unless_somebody_else_runs_it(files: Path) -> None:
    assert planned("--out", "here.json") == planned("--framework", "megatron core", "--out", "there.json") == 0
    here, there = (Plan.load(files / name) for name in ("here.json", "there.json"))
    assert not [use for use in uses(here) if not runs_at_all(use.feature)]
    assert there.zero > 0


def test_what_this_library_does_not_run_is_said_where_nothing_else_fits(
    files: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows of one table, with what training keeps of them, fill more than a device."""
    (files / "fleet.yaml").write_text(
        TINY.replace("T4, count: 1, memory: 3.2", "A100-SXM-80GB, count: 1, memory: 10").replace("count: 2", "count: 8")
    )
    (files / "job.yaml").write_text(
        JOB.replace("num_hidden_layers: 8", "num_hidden_layers: 1")
        .replace("vocab_size: 32000", "vocab_size: 512000")
        .replace("sequence_length: 1024", "sequence_length: 64")
        .replace("size: 64", "size: 8")
    )
    assert planned() == 0
    assert "optimizer states sharded over replicas (ZeRO-1)" in capsys.readouterr().out
    monkeypatch.setattr(space, "runs_at_all", lambda feature: feature != "state_sharding")
    monkeypatch.setattr(on_paper, "FEW_DEVICES", 0)
    assert planned() == 2
    assert "which this version does not run, a step would take" in capsys.readouterr().err


def test_what_fits_with_state_on_hosts_alone_is_planned_device_by_device(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (files / "job.yaml").write_text(SMALL)
    (files / "fleet.yaml").write_text(
        TINY.replace("count: 2, devices", "count: 1, devices").replace("3.2 GB", "4.5 GB")
    )
    assert run(["plan", "job.yaml", "--cluster", "fleet.yaml", "--on-paper", "--json"]) == 0
    out, said = capsys.readouterr()
    assert "searching device by device" in said
    found = json.loads(out)
    assert found["plan"]["predicted"]["step_s"] > 0
    assert found.keys() == FIELDS
    plan = Plan.load(files / "plan.json")
    assert plan.bound
    assert any(stage.offload for pipeline in plan.pipelines for stage in pipeline.stages)
    assert all(runs_at_all(use.feature) for use in uses(plan))


def test_nodes_that_no_link_joins_are_planned_apart(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (files / "job.yaml").write_text(SMALL)
    (files / "fleet.yaml").write_text(
        "name: apart\nnodes:\n  - {name: n, devices: [{kind: V100-SXM2-32GB, count: 2}]}\n"
        "  - {name: m, devices: [{kind: A100-SXM-80GB, count: 1}]}\n"
    )
    assert planned("--set", "parallelism.micro_batch_sizes=[2]") == 0
    plan = Plan.load(files / "plan.json")
    assert len({stage.group.node for pipeline in plan.pipelines for stage in pipeline.stages if stage.group}) == 1
    assert {size for pipeline in plan.pipelines for size in pipeline.micro_batches.sizes} == {2}, "as the job asks for"


def test_of_a_search_that_was_stopped_nobody_says_that_nothing_fits(
    files: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    watches = iter([Watch(asked=lambda: True)])  # only the first search is stopped

    @contextlib.contextmanager
    def watched(*_: object) -> Iterator[Watch]:
        yield next(watches, Watch())

    monkeypatch.setattr(on_paper, "watched", watched)
    assert planned() == 2
    said = capsys.readouterr().err
    assert "give it more time" in said
    assert "fits" not in said
    assert not (files / "plan.json").exists()


def test_unlike_devices_of_one_node_are_a_machine_to_measure(tmp_path: Path) -> None:
    """They are pools of their own, and one node all the same; two nodes are no machine."""
    one, other = "{kind: cpu, count: 2, memory: 1 GiB}", "{kind: cpu, memory: 2 GiB}"
    for nodes, several in (([f"{one}, {other}"], False), ([one], False), ([one, other], True)):
        written = "".join(f"  - {{name: n{number}, devices: [{devices}]}}\n" for number, devices in enumerate(nodes))
        (tmp_path / "cluster.yaml").write_text(f"name: c\nnodes:\n{written}")
        assert elsewhere(tmp_path / "cluster.yaml") is several


CITIES = """\
name: two cities
links:
  - {between: nodes, bandwidth: 100 Gb/s, latency: 10 us}
  - {between: regions, bandwidth: 50 Mb/s, latency: 40 ms}
regions:
  - {name: berlin, nodes: [{kind: A100-SXM-80GB, devices_per_node: 2}]}
  - {name: oslo, nodes: [{kind: A100-SXM-80GB, devices_per_node: 2}]}
"""


def test_ways_over_sites_are_compared(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (files / "cities.yaml").write_text(CITIES)
    (files / "job.yaml").write_text(SMALL)
    assert run(["plan", "job.yaml", "--cluster", "cities.yaml", "--sites", "--picture", "sites.png"]) == 0
    shown = capsys.readouterr()
    for words in ("Ways over the sites, 4 samples a step", "apart, meeting every 100 steps", "inexact", "berlin alone"):
        assert words in shown.out
    assert (files / "sites.png").stat().st_size
    assert run(["plan", "job.yaml", "--cluster", "cities.yaml", "--sites", "--json"]) == 0
    ways = json.loads(capsys.readouterr().out)
    assert [way["step_s"] for way in ways if way["step_s"]] == sorted(way["step_s"] for way in ways if way["step_s"])
    (files / "apart.yaml").write_text(re.sub(r"  - \{between: regions.*\n", "", CITIES))
    assert run(["plan", "job.yaml", "--cluster", "apart.yaml", "--sites"]) == 2
    assert "nothing says what joins the sites berlin and oslo; add to links" in capsys.readouterr().err
    assert run(["plan", "job.yaml", "--cluster", "cities.yaml", "--sites", "--families", "--out", "x.json"]) == 2
    assert "makes no plan: leave out --out, --families" in capsys.readouterr().err
    assert run(["train", "job.yaml", "--site", "berlin"]) == 2
    assert "--site berlin: the job has no sites; write training.sync" in capsys.readouterr().err
