"""What a GPU would wait for or do twice, counted on a device that counts; and what torch.compile gains.

No GPU is needed: the accelerator of the tests (`tests/device`) runs in host memory, refuses what a GPU and NCCL refuse, and counts what
would make a host wait. Counts of a step are those after the first two, of the rank that has most.

- Waits of a step: the host reads the norm and the losses before the update, since a step that is not finite is not applied.
- Ops: calls of the dispatcher in forward and backward of a stage that is the whole model, over those of the module itself.
- Attention: masks of Hugging Face models without padding, which would keep flash kernels away.
- Messages: bytes that the stages of a pipeline send each other in a step.
- Collectives of a stage in parts: those of the backend, and exchanges by hand.
- Compiling (inductor, on the CPU): the step of a model, compiled over as it is, and the error of its gradients.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from results import Results, arguments, spread
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from device.accelerator import built, unavailable  # noqa: E402
from device.test_exactness import A  # noqa: E402
from device.test_precision import sent  # noqa: E402
from device.test_waits import counted  # noqa: E402
from heterodyne.frontend import trace  # noqa: E402
from heterodyne.model_output import LOSS, loss_of  # noqa: E402
from multiprocess.models import build, captured  # noqa: E402
from multiprocess.pool import Pool, World, accelerator  # noqa: E402
from multiprocess.test_training_pipelines import SAMPLES, Spread, chain, in_parts, whole, worker_under  # noqa: E402

LANGUAGE = ("gpt2", "llama", "mistral", "qwen2", "gpt_neox", "phi")
OTHERS = ("bert", "t5", "vit")
SMALL = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 128, "vocab_size": 128,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
OWN_NAMES = {
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 128, "n_positions": 64},
    "t5": {"d_model": 64, "num_layers": 2, "num_heads": 4, "d_ff": 128, "d_kv": 16, "decoder_start_token_id": 0},
    "vit": {"image_size": 32, "patch_size": 8},
}


def main() -> int:
    options = arguments(__doc__)
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_VERBOSITY": "error"}
    torch.set_num_threads(1)
    results = Results("accelerator_path")
    why = unavailable()
    if why is not None:
        print(why)
        return 1
    built()
    waits(results)
    ops_and_masks(results, LANGUAGE[:2] if options.quick else (*LANGUAGE, *OTHERS))
    compiled(results, rounds=5 if options.quick else 30)
    return results.write(options.json)


# ---- waits and collectives of a step --------------------------------------------------------------------------------


def waits(results: Results) -> None:
    graph = captured("gpt2")
    pool = Pool()
    try:
        for name, plan in (("data parallel", whole), ("pipeline", chain), ("stage in parts", in_parts)):
            counts = pool.run(4, counted, graph, plan(graph), devices=(A,) * 4, timeout_s=120.0)
            most = max(counts, key=lambda count: count.host_waits)
            results.row(f"a step, {name}", **vars(most))
            # The losses, behind which the backward still runs, and the norm of the step before.
            results.bar(f"synchronisations of a step, {name}", max(c.synchronisations for c in counts), "<= 2")
            reads = max(c.scalar_reads + c.copies_to_host for c in counts)
            results.bar(f"reads by the host in a step, {name}", reads, "<= 0")
        wide, narrow = (
            sum(pool.run(4, sent, graph, chain(graph), precision, devices=(A,) * 4, timeout_s=120.0))
            for precision in ("fp32", "bf16")
        )
        results.row("messages of a pipeline, a step", bytes_fp32=wide, bytes_bf16=narrow)
        results.bar("bytes of a pipeline in bf16 over fp32", narrow / wide, "<= 0.5")
        kinds = sum(pool.run(4, collectives, graph, in_parts(graph), devices=(A,) * 4, timeout_s=120.0), Counter())
        results.row("collectives of a stage in parts", **kinds)
        results.bar("exchanges by hand in a stage in parts", kinds["all_to_all"], "<= 0")
    finally:
        pool.close()


def collectives(world: World, graph: Any, plan: Spread) -> Counter[str]:
    """Of one step, by kind."""
    case = build(graph, SAMPLES)
    worker = worker_under(world, case, plan)
    worker.step(case.batch)
    accelerator(world.device)
    before = posted()
    worker.step(case.batch)
    found = posted() - before
    worker.close()
    return found


def posted() -> Counter[str]:
    """What the communicators of this process were asked for."""
    import gc

    from device.queues import CommunicatorQueue

    found: Counter[str] = Counter()
    for queue in [each for each in gc.get_objects() if isinstance(each, CommunicatorQueue)]:
        for (kind, _), count in queue._counts.items():
            if not kind.startswith("tag"):
                found[kind] += count
    return found


# ---- ops and masks of stages ----------------------------------------------------------------------------------------


class Dispatched(TorchDispatchMode):
    """Counts calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


def calls_of(run: Callable[[], Tensor]) -> int:
    with Dispatched() as dispatched:
        run().backward()
    return dispatched.calls


def family(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    import transformers

    config = transformers.AutoConfig.for_model(
        name, **(OWN_NAMES.get(name) if name in ("gpt2", "t5") else SMALL | OWN_NAMES.get(name, {}))
    )
    for key in ("dropout", "attention_dropout", "hidden_dropout_prob", "attention_probs_dropout_prob", "dropout_rate",
                "resid_pdrop", "embd_pdrop", "attn_pdrop"):  # fmt: skip
        if hasattr(config, key):
            setattr(config, key, 0.0)
    tokens = torch.randint(3, 128, (4, 32))
    if name == "vit":
        model = transformers.ViTForImageClassification(config)
        return model, {"pixel_values": torch.randn(4, 3, 32, 32), "labels": torch.randint(0, 2, (4,))}
    kind = {"bert": "AutoModelForMaskedLM", "t5": "AutoModelForSeq2SeqLM"}.get(name, "AutoModelForCausalLM")
    return getattr(transformers, kind).from_config(config), {"input_ids": tokens, "labels": tokens}


def ops_and_masks(results: Results, names: tuple[str, ...]) -> None:
    worst, masks, causal = 0.0, 0, 0
    for name in names:
        torch.manual_seed(0)
        model, batch = family(name)
        model.train()
        traced = trace(model, batch)
        stage = traced.stage(0, len(traced.graph.ops), starts=[0]).bind(model, torch.device("cpu"))
        alone = calls_of(lambda model=model, batch=batch: loss_of(model(**batch)))
        own = calls_of(lambda stage=stage, batch=batch: stage(batch, {}, 4)[LOSS])
        attention = [op for op in traced.graph.ops if op.kind == "scaled_dot_product_attention"]
        masked = sum(len(op.operands) > 3 for op in attention)
        results.row(
            f"ops of {name}", stage=own, module=alone, ratio=own / alone, attention=len(attention), masked=masked
        )
        worst = max(worst, own / alone)
        if name in LANGUAGE:
            masks += masked
            causal += sum(op.argument("is_causal") is True for op in attention)
    results.bar("ops of a stage over those of the module", worst, "<= 1.02")
    results.bar("causal attention with a mask", masks, "<= 0")
    results.bar("attention that is causal by its argument", causal, f">= {2 * sum(name in LANGUAGE for name in names)}")


# ---- compiling ------------------------------------------------------------------------------------------------------


class Mixed(nn.Module):
    """Products with much in between that a compiler can do at once."""

    def __init__(self, width: int = 128, layers: int = 4) -> None:
        super().__init__()
        self.inner = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))
        self.head = nn.Linear(width, 16)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        for norm, inner in zip(self.norms, self.inner, strict=True):
            hidden = inner(norm(x))
            x = x + torch.sigmoid(hidden) * torch.tanh(hidden) + 0.1 * torch.nn.functional.gelu(hidden) * hidden
        return nn.functional.cross_entropy(self.head(x), labels)


def compiled(results: Results, rounds: int) -> None:
    torch.manual_seed(0)
    model = Mixed().train()
    batch = {"x": torch.randn(512, 128), "labels": torch.randint(0, 16, (512,))}
    traced = trace(model, {name: tensor[:4] for name, tensor in batch.items()})
    ops = len(traced.graph.ops)
    plain, fast = (traced.stage(0, ops, starts=[0]).bind(model, torch.device("cpu")) for _ in range(2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fast.compile()
        started_s = time.perf_counter()
        gradients = [gradients_of(model, lambda stage=stage: stage(batch, {}, 512)[LOSS]) for stage in (plain, fast)]
        compiling_s = time.perf_counter() - started_s
        seconds: list[list[float]] = [[], []]
        for _ in range(rounds):
            for place, stage in enumerate((plain, fast)):
                started_s = time.perf_counter()
                gradients_of(model, lambda stage=stage: stage(batch, {}, 512)[LOSS])
                seconds[place].append(time.perf_counter() - started_s)
    error = max(float((a - b).norm() / a.norm()) for a, b in zip(*gradients, strict=True))
    ratio = median(plain_s / fast_s for plain_s, fast_s in zip(*seconds, strict=True))
    results.row("a stage as it is", milliseconds=spread([1000 * s for s in seconds[0]]))
    results.row("a stage compiled", milliseconds=spread([1000 * s for s in seconds[1]]), compiling_s=compiling_s)
    results.bar("a stage as it is over compiled", ratio, ">= 1.0")
    results.bar("error of gradients of a compiled stage", error, "<= 1e-5")


def gradients_of(model: nn.Module, run: Callable[[], Tensor]) -> list[Tensor]:
    model.zero_grad()
    run().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


if __name__ == "__main__":
    sys.exit(main())
