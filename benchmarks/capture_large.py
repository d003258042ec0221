"""A 70B-parameter model is captured without its weights: seconds and memory, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys

from results import Results, arguments

CAPTURE = """
import json, resource, sys, time
import torch
from transformers import LlamaConfig, LlamaForCausalLM
import heterodyne as hd

layers = int(sys.argv[1])
config = LlamaConfig(
    hidden_size=8192, intermediate_size=28672, num_hidden_layers=layers, num_attention_heads=64, num_key_value_heads=8, vocab_size=128256
)
with torch.device("meta"):
    model = LlamaForCausalLM(config).train()
    batch = {"input_ids": torch.zeros(4, 4096, dtype=torch.int64), "labels": torch.zeros(4, 4096, dtype=torch.int64)}
started = time.perf_counter()
graph = hd.capture(model, batch)
seconds = time.perf_counter() - started
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
flops = (graph.flops_forward() + graph.flops_backward())(1)
sizes = {"parameters": graph.parameter_count, "ops": len(graph.ops), "blocks": len(graph.blocks), "kinds": len(graph.kinds)}
print(json.dumps({"seconds": seconds, "peak_gib": peak / 2**30, **sizes, "teraflop_a_sample": flops / 1e12}))
"""


def main() -> int:
    options = arguments(__doc__)
    results = Results("capture_large")
    for layers in (8, 80):
        run = subprocess.run([sys.executable, "-c", CAPTURE, str(layers)], check=True, capture_output=True, text=True)
        row = json.loads(run.stdout.splitlines()[-1])
        results.row(f"Llama, {layers} layers of width 8192", **row)
    results.bar("seconds for 70B parameters", row["seconds"], "<= 60")
    results.bar("peak memory for 70B parameters, GiB", row["peak_gib"], "<= 4")
    return results.write(options.json)


if __name__ == "__main__":
    sys.exit(main())
