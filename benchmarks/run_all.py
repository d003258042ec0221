"""Run every benchmark and write RESULTS.md: the misses first, then tables with their spread, and the pictures.

A few of the figures go into the README too, between two marks.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pictures import RatioBar, ratio_picture
from results import ROOT
from scatter import Predicted, scatter_picture

HERE = Path(__file__).resolve().parent
MARKS = ("<!-- measured: written by make bench -->", "<!-- end of measured -->")
HEADLINES: tuple[tuple[tuple[str, str], str, Callable[[float], str]], ...] = (
    (
        ("uneven_data_parallel", "speed-up over DDP, unequal devices"),
        "a GPT on four emulated workers of 0.7, 0.35, 0.35 and 0.2 of a core, over PyTorch's DDP",
        "{:.2f}x".format,
    ),
    (
        ("uneven_pipeline", "speed-up over PyTorch's 1F1B, unequal devices"),
        "the same workers as a pipeline, over PyTorch's 1F1B",
        "{:.2f}x".format,
    ),
    (
        ("paper_claims", "768 accelerators of two kinds over the sum of their parts"),
        "predicted: 768 accelerators of two kinds, over the sum of what each kind does alone",
        "{:.1%}".format,
    ),
    (
        ("published", "zero-shot, test half: median error"),
        "median error of predicted steps, 234 published runs that nothing was fitted to",
        "{:.1%}".format,
    ),
    (
        ("kill_and_resume", "losses that differ in any bit"),
        "losses that differ in any bit after 20 kills and resumes",
        "{:.0f}".format,
    ),
)
"""Which bars the README shows, in which words."""

BENCHMARKS = (
    "uneven_data_parallel",
    "drop_in",
    "islands",
    "hosts",
    "sites",
    "uneven_pipeline",
    "uneven_tensor_parallel",
    "large_head",
    "large_head_simulated",
    "overlap",
    "moe",
    "moe_hosts",
    "disaggregated_experts",
    "families",
    "lives",
    "looking_inside",
    "predicted_weights",
    "convergence",
    "capture_large",
    "kill_and_resume",
    "chain_of_faults",
    "bad_inputs",
    "strangers",
    "way_out",
    "crowded",
    "heartbeats",
    "trackers",
    "host_overhead",
    "accelerator_path",
    "gpu/run",
    "worker_memory",
    "memory_truth",
    "memory_limits",
    "sharded_state",
    "offload",
    "simulator_speed",
    "greedy_schedules",
    "simulator_truth",
    "published",
    "paper_claims",
    "planner_speed",
    "planner_gap",
    "planner_quality",
    "planner_golden",
    "planner_ablation",
    "planner_invariants",
    "planner_optimality",
    "planner_here",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="each in its quick form; RESULTS.md is not touched")
    parser.add_argument("--page", action="store_true", help="run nothing; RESULTS.md of what is kept in results/")
    parser.add_argument("names", nargs="*", help=f"which ones; default all: {', '.join(BENCHMARKS)}")
    options = parser.parse_args()
    kept = HERE / "results"
    kept.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for name in () if options.page else options.names or BENCHMARKS:
            out = Path(folder) / f"{name}.json" if options.quick else kept / f"{name}.json"
            out.parent.mkdir(exist_ok=True)
            quick = ["--quick"] if options.quick else []
            print(f"== {name}", flush=True)
            subprocess.run([sys.executable, str(HERE / f"{name}.py"), "--json", str(out), *quick], check=False)
    if not options.quick:
        found = kept_results()
        (HERE / "RESULTS.md").write_text(page(found), encoding="utf-8")
        readme = ROOT / "README.md"
        readme.write_text(with_table(readme.read_text(encoding="utf-8"), found), encoding="utf-8")
        if not options.page:
            pictures(found)
    return 0


def kept_results() -> list[dict[str, Any]]:
    """What the benchmarks have last written."""
    paths = [HERE / "results" / f"{name}.json" for name in BENCHMARKS]
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths if path.exists()]


def bars_table(found: list[dict[str, Any]]) -> list[str]:
    """Every bar of every benchmark, the misses first."""
    bars = [(run["name"], name, bar) for run in found for name, bar in run["bars"].items()]
    bars.sort(key=lambda entry: entry[2]["ok"])
    return [
        "| | benchmark | bar | wanted | measured |",
        "|---|---|---|---|---|",
        *(
            f"| {'ok' if b['ok'] else '**miss**'} | {run} | {name} | {b['bar']} | {b['value']:.4g} |"
            for run, name, b in bars
        ),
    ]


def with_table(readme: str, found: list[dict[str, Any]]) -> str:
    """The README with the figures between its marks made anew."""
    before, rest = readme.split(MARKS[0])
    _, after = rest.split(MARKS[1])
    bars = {(run["name"], name): bar["value"] for run in found for name, bar in run["bars"].items()}
    rows = [f"| {words} | {scale(bars[of])} |" for of, words, scale in HEADLINES if of in bars]
    missed = sum(not bar["ok"] for run in found for bar in run["bars"].values())
    every = f"All {len(bars)} bars with machine, command and spread, the {missed} missed ones first: [RESULTS.md](benchmarks/RESULTS.md)."
    return before + "\n".join([MARKS[0], "", "| measured | |", "|---|---|", *rows, "", every, MARKS[1]]) + after


def page(found: list[dict[str, Any]]) -> str:
    """RESULTS.md."""
    text = [
        "# Results",
        "",
        "Written by `make bench`. Ratios are measured side by side in one run; spread: quartiles of the rounds.",
        "",
    ]
    text += bars_table(found)
    for run in found:
        text += ["", f"## {run['name']}", "", f"`{run['command']}` at {run['commit']} on {run['machine']}", ""]
        text += ["| what | figures |", "|---|---|"]
        for row in run["rows"]:
            figures = "; ".join(f"{key} {shown(value)}" for key, value in row.items() if key != "what")
            text.append(f"| {row['what']} | {figures} |")
        if (ROOT / "docs" / "pictures" / f"{run['name']}.png").exists():
            text += ["", f"![{run['name']}](../docs/pictures/{run['name']}.png)"]
    return "\n".join(text) + "\n"


def shown(value: Any) -> str:
    if isinstance(value, dict) and "median" not in value:
        return ", ".join(f"{name} {shown(each)}" for name, each in value.items())
    if isinstance(value, dict):
        return f"{value['median']:.4g} [{value['q1']:.4g} .. {value['q3']:.4g}], n={value['n']}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def pictures(found: list[dict[str, Any]]) -> None:
    for run in found:
        ratios = [(row["what"], row["step_ratio"]) for row in run["rows"] if "step_ratio" in row]
        if ratios:
            bars = [RatioBar(name=what, value=r["median"], low=r["q1"], high=r["q3"]) for what, r in ratios]
            ratio_picture(
                bars,
                ROOT / "docs" / "pictures" / f"{run['name']}.png",
                title="Step time over that of the plan",
            )
        points = [
            Predicted(kind=row["kind"], simulated_s=row["simulated_s"], measured_s=row["measured_s"])
            for row in run["rows"]
            if "simulated_s" in row
        ]
        if points:
            scatter_picture(
                points,
                ROOT / "docs" / "pictures" / f"{run['name']}.png",
                title="Step time of plans of many kinds",
                band=0.12,
            )


if __name__ == "__main__":
    sys.exit(main())
