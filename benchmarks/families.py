"""Model families that the tests do not know, under plans of every kind: exact, or refused with the line; no third kind.

Each family is trained for two steps of SGD with momentum on batches whose samples count unevenly: by plain PyTorch in one process, and in
real processes under each plan. *Exact*: losses, gradients, momentum, weights and buffers within 1e-5 of plain PyTorch's, in fp32, relative
to their norms (or as near as plain PyTorch in fp32 is to itself in double precision). *Refused*: before the first step, with a message that
names a line. Wrong, crashed, hung, refused without a line or after the first step began is a failure.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import TYPE_CHECKING

from results import Results, arguments

if TYPE_CHECKING:
    from unseen.family import Family
    from unseen.outcome import Outcome

GOOD = ("exact", "refused")
QUICK_KINDS = ("data", "1F1B", "tensor 2")
QUICK = (
    "Llama", "Mixtral", "T5", "BERT, question answering", "ViTMAE", "CLIP", "ResNet", "nn.Transformer", "siamese",
    "loss: focal",
)  # fmt: skip


def main() -> int:
    options = arguments(__doc__)
    # Threads that a library starts on import would not survive a fork, and one for each process is what two cores bear.
    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_VERBOSITY": "error"}
    import torch
    from unseen.outcome import FORK, warm_up
    from unseen.plans import KINDS

    torch.set_num_threads(1)
    results = Results("families")
    kinds = QUICK_KINDS if options.quick else KINDS
    counts: Counter[str] = Counter()
    possible = exact = 0
    chosen = families(quick=options.quick)
    for family in chosen:
        warm_up(family)
    # A capture keeps one core busy, so as many families at once as there are cores.
    with ProcessPoolExecutor(os.cpu_count(), mp_context=FORK) as executor:
        running = {executor.submit(outcomes, family.name, kinds, options.quick): family for family in chosen}
        for future in as_completed(running):
            family, (found, seconds) = running[future], future.result()
            results.row(family.name, **{o.kind: o.what for o in found}, seconds=seconds)
            for outcome in found:
                counts[outcome.what] += 1
                can_be = outcome.kind not in family.impossible
                possible += can_be
                exact += can_be and outcome.what == "exact"
                if outcome.what not in GOOD or (can_be and outcome.what == "refused"):
                    results.row(f"{family.name}, {outcome.kind}: {outcome.what}", message=outcome.told)
    for package in ("timm", "torchvision"):
        if importlib.util.find_spec(package) is None:
            results.row(f"{package}: not installed, so none of its models")
    results.row("all", **counts, possible=possible)
    results.bar("exact, of what can be exact", exact / possible, ">= 0.95")
    results.bar("neither exact nor refused with a line", sum(counts[w] for w in counts if w not in GOOD), "<= 0")
    return results.write(options.json)


def outcomes(name: str, kinds: Sequence[str], quick: bool) -> tuple[list[Outcome], float]:
    """What becomes of one family, and in how many seconds; by name, since families hold functions that cannot be pickled."""
    from unseen.outcome import outcomes_of

    started_s = time.perf_counter()
    family = next(family for family in families(quick=quick) if family.name == name)
    return outcomes_of(family, kinds), time.perf_counter() - started_s


def families(*, quick: bool) -> list[Family]:
    from unseen import own, several, stock, text, vision

    found = [*text.FAMILIES, *vision.FAMILIES, *several.FAMILIES, *stock.FAMILIES, *own.FAMILIES]
    named = {family.name: family for family in found}
    return [named[name] for name in QUICK] if quick else found


if __name__ == "__main__":
    sys.exit(main())
