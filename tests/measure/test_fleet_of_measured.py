"""One device is measured, and a fleet of such devices is planned from that."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from heterodyne.cli.app import run
from heterodyne.cluster.profile import PROFILE_VERSION

JOB = f"""\
model:
  factory: {Path(__file__).parents[2] / "examples" / "gpt.py"}:build
  arguments: {{vocabulary: 256, length: 16, width: 32, layers: 2, heads: 4}}
data: {{sequence_length: 16}}
training: {{global_batch_size: 8, precision: fp32}}
parallelism: {{measure_s: 1}}
"""
FLEET = """\
name: boxes
nodes:
  - {name: box, count: COUNT, devices: [{kind: cpu, count: 1, memory: 4 GB}]}
links:
  - {between: all, bandwidth: 10 Gb/s, latency: 10 us}
"""


def step_s(nodes: int, profile: str) -> float:
    Path("fleet.yaml").write_text(FLEET.replace("COUNT", str(nodes)))
    assert run(["plan", "job.yaml", "--cluster", "fleet.yaml", "--profile", profile, "--on-paper"]) == 0
    return float(json.loads(Path("plan.json").read_text())["predicted"]["step_s"])


def test_a_measured_device_stands_for_a_fleet_of_its_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.yaml").write_text(JOB)
    assert run(["measure", "job.yaml", "--fresh", "--out", "measured.json"]) == 0
    alone = step_s(1, "measured.json")
    assert "planning on paper for 1 device: seconds are those of the profile" in capsys.readouterr().err
    content = json.loads(Path("measured.json").read_text())
    (device,) = content["devices"].values()
    whole = [run for runs in device["blocks"].values() for run in runs]
    assert alone > max(run["forward_s"] + run["backward_s"] for run in whole if run["micro_batch_size"] == 1)

    assert step_s(4, "measured.json") < alone
    device["calibration"] *= 2
    Path("slower.json").write_text(json.dumps(content))
    assert step_s(1, "slower.json") == pytest.approx(2 * alone, rel=0.1)

    Path("job.yaml").write_text(JOB.replace("fp32", "bf16"))
    assert run(["plan", "job.yaml", "--cluster", "fleet.yaml", "--profile", "measured.json", "--on-paper"]) == 2
    assert "cpu:0 in fp32, and is asked for bf16 by the job or the plan: measure again" in capsys.readouterr().err


def test_kinds_of_a_fleet_are_measured_or_have_a_datasheet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.yaml").write_text(JOB)
    Path("fleet.yaml").write_text(FLEET.replace("COUNT", "2"))
    empty = {"version": PROFILE_VERSION, "key": "none", "devices": {}, "links": [], "kinds": {}}
    Path("none.json").write_text(json.dumps(empty))
    plan = ["plan", "job.yaml", "--cluster", "fleet.yaml", "--profile", "none.json"]
    assert run(plan) == 2
    assert "no datasheet says what the CPUs of box do" in capsys.readouterr().err
    Path("fleet.yaml").write_text(FLEET.replace("COUNT", "2").replace("kind: cpu", "kind: T4"))
    assert run(plan) == 0
    assert "T4: from datasheets as they are" in capsys.readouterr().err
