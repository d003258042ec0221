"""Outputs of modules inside of models on several devices, against forward hooks on one device; and edits that train something.

Twelve models of the library's tests (two with routed experts, several with tied weights) under six plans of two or three ranks, in real
processes. Of every module that a hook on one device sees, `activations` must give the same within 1e-5, relative to its norm. Refused by
name is what no plan can have as one device does: what an expert's activation sees is in the order of the experts. A plan whose model
cannot be evaluated at all (BatchNorm in evaluation, split) counts as not possible. Then `edit` puts a trained module of the script and
a function inside of three models: losses, gradients of what it trains and weights after two steps, within 1e-5.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from results import Results, arguments

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

MODELS = (
    "gpt",
    "llama",
    "gpt2",
    "bert",
    "t5",
    "vit",
    "unet",
    "resnet",
    "mixtral",
    "qwen3_moe",
    "transformer",
    "attention",
)
NOT_POSSIBLE = {
    ("resnet", "split"),
    ("resnet", "hybrid"),
    ("resnet", "mixed"),
    ("transformer", "data 3"),
    ("transformer", "zero 3"),
    ("transformer", "mixed"),
}
"""Plans that the model cannot be evaluated or trained under, or models that torch's fused path evaluates where they run whole."""


def main() -> int:
    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_VERBOSITY": "error"}
    from life.plans import RANKS
    from multiprocess.session_pool import session_pool
    from multiprocess.test_inside import EDITED, PLANS, by_hand, edited, error, graph_of, looked_at

    options = arguments(__doc__)
    results = Results("looking_inside")
    models = ("gpt", "gpt2", "mixtral") if options.quick else MODELS
    worst, refused, looked = 0.0, 0, 0
    of_edits = 0.0
    with session_pool() as pool:
        for name in models:
            graph = pool.ask(graph_of, name)
            for kind in PLANS:
                if (name, kind) in NOT_POSSIBLE:
                    continue
                errors, why = pool.run(RANKS.get(kind, 2), looked_at, name, kind, graph, timeout_s=300.0)[0]
                worst, refused, looked = max(worst, *errors.values()), refused + len(why), looked + len(errors)
                results.row(
                    f"{name}: {kind}",
                    modules=len(errors),
                    refused=len(why),
                    worst=max(errors.values()),
                )
        for name in EDITED:
            losses, gradients, weights, seen = by_hand(name)
            for kind in ("1F1B",) if "frozen" in name else PLANS:
                found = pool.run(RANKS.get(kind, 2), edited, name, kind, pool.ask(graph_of, name), timeout_s=300.0)
                wrong = max(
                    max(
                        *(abs(a - b) / abs(b) for a, b in zip(own[0], losses, strict=True)),
                        *(error(own[1][key], gradients[key]) for key in gradients),
                        *(error(own[2][key], weights[key]) for key in weights),
                        error(own[3], seen),
                    )
                    for own in found
                )
                of_edits = max(of_edits, wrong)
                results.row(f"edit of {name}: {kind}", worst=wrong)
    results.bar(f"worst error of {looked} modules' outputs", worst, "<= 1e-5")
    results.bar("modules that are refused", refused, "<= 0")
    results.bar("worst error of edits and of what they train", of_edits, "<= 1e-5")
    return results.write(options.json)


if __name__ == "__main__":
    sys.exit(main())
