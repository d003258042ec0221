"""A pipeline with predicted weights beside the exact one: samples/s on unequal workers, and losses after as many samples.

A Llama is trained on emulated workers of 0.7, 0.35 and 0.35 of a core under the plan that the search finds for a
pipeline that is flushed after each step, which is exact, and under the one that it finds where `parallelism.async: predicted` is asked
for. The period of a step is compared with what was predicted. That such steps are those of the definition is proved by the tests.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from pictures import run_picture
from results import ROOT, Results, arguments, spread

from heterodyne.report.run import Run, load_run

JOB = """
model:
  huggingface: {model_type: llama, hidden_size: 128, intermediate_size: 384, num_hidden_layers: 6, num_attention_heads: 4,
                num_key_value_heads: 4, vocab_size: 256, max_position_embeddings: 64, tie_word_embeddings: false}
data: {text: stdlib, sequence_length: 64}
training: {global_batch_size: 32, clip_grad_norm: 0, validation_samples: 64}
optimizer: {lr: 1.0e-3, warmup_steps: 20}
parallelism: {strategy: pipeline, micro_batch_sizes: [2, 4, 8]}
"""
SPEEDS = "0.7,0.35,0.35"
WAYS = {"exact": "null", "predicted": "predicted"}


def main() -> int:
    options = arguments(__doc__)
    results = Results("predicted_weights")
    steps = 20 if options.quick else 240
    runs = {}
    with tempfile.TemporaryDirectory() as folder:
        for way, asked in WAYS.items():
            runs[way] = trained(Path(folder) / way, asked, steps)
            report(results, way, runs[way])
        if not options.quick:
            picture = ROOT / "docs" / "pictures" / "predicted_weights.png"
            run_picture(runs["predicted"], picture, reference=runs["exact"].metrics, beside="exact")
    exact, predicted = (run.metrics for run in runs.values())
    faster = median(rates(runs["predicted"])) / median(rates(runs["exact"]))
    results.bar("samples/s over the exact pipeline", faster, ">= 1.05")
    at_end = predicted.validations[-1].loss / exact.validations[-1].loss
    results.bar("validation loss over that of the exact pipeline, same samples", at_end, "<= 1.02")
    error = runs["predicted"].plan.predicted.step_s / median(s.step_s for s in predicted.steps[2:]) - 1
    results.bar("error of the predicted step", abs(error), "<= 0.1")
    return results.write(options.json)


def trained(folder: Path, asked: str, steps: int) -> Run:
    heterodyne = [sys.executable, "-m", "heterodyne"]
    job = folder.with_suffix(".yaml")
    job.write_text(JOB)
    train = [*heterodyne, "train", str(job), "--run-dir", str(folder)]
    settings = (f"async={asked}", f"measure_s={8 if steps < 100 else 20}")
    for setting in (
        *(f"parallelism.{each}" for each in settings),
        f"training.steps={steps}",
        f"training.validate_every={steps // 4}",
    ):
        train += ["--set", setting]
    subprocess.run([*heterodyne, "emulate", "--speeds", SPEEDS, "--", *train], check=True, timeout=300)
    return load_run(folder)


def rates(run: Run) -> list[float]:
    return [step.samples_per_s for step in run.metrics.steps[2:]]


def report(results: Results, way: str, run: Run) -> None:
    steps = run.metrics.steps
    results.row(
        way,
        samples_per_s=spread(rates(run)),
        predicted_samples_per_s=run.plan.predicted.samples_per_s,
        schedule=run.plan.schedule,
        micro_batches=str(run.plan.pipelines[0].micro_batches),
        stages=len(run.plan.pipelines[0].stages),
        losses=[round(step.loss, 4) for step in steps[:: max(1, len(steps) // 8)]],
        validation=[round(each.loss, 4) for each in run.metrics.validations],
    )


if __name__ == "__main__":
    sys.exit(main())
