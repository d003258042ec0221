"""What a worker occupies beside the model: a small GPT under our data parallelism and under PyTorch's DDP, two CPU workers each.

The model is small (1.7 MiB of weights), so that what is compared are interpreter, libraries and what each of the two keeps of its own. RSS
counts pages of libraries in each process that has them, USS what would be free without it. One of our workers plans for both.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from results import ROOT, Results, arguments, spread
from two_workers import two_workers

WAYS = ("ddp", "ours")
ROLES = ("a worker", "the worker that plans")  # of ranks 1 and 0
STEPS = 30
BATCH = 8
SIZE = {"vocabulary": 256, "length": 128, "width": 128, "layers": 2, "heads": 4}
BAR_MIB = 40


def worker(way: str) -> None:
    """Trains for some steps, and prints the bytes that this process occupies then."""
    import psutil
    import torch

    sys.path.insert(0, str(ROOT / "examples"))
    from gpt import build

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = build(**SIZE)
    tokens = torch.randint(SIZE["vocabulary"], (BATCH, SIZE["length"]))
    step, close = {"ddp": _ddp, "ours": _ours}[way](model, tokens)
    for _ in range(STEPS):
        step()
    seen = psutil.Process().memory_full_info()
    print(json.dumps({"RSS": seen.rss, "USS": seen.uss}), flush=True)
    close()


def _ddp(model: object, tokens: object) -> tuple[Callable[[], object], Callable[[], object]]:
    import torch

    torch.distributed.init_process_group("gloo")
    replica = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(replica.parameters())
    own = tokens.chunk(2)[torch.distributed.get_rank()]

    def step() -> None:
        replica(own, own).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, torch.distributed.destroy_process_group


def _ours(model: object, tokens: object) -> tuple[Callable[[], object], Callable[[], object]]:
    import heterodyne as hd

    trainer = hd.distribute(model, (tokens, tokens), plan=hd.PlanOptions("data", measure_s=5, rehearsal_s=0))
    return lambda: trainer.step((tokens, tokens)), trainer.close


def run(way: str, folder: str) -> list[Mapping[str, int]]:
    """What each of two workers occupies, in order of rank. ``folder``: for what they keep."""
    said = two_workers(str(Path(__file__).resolve()), way, folder=folder)
    return [json.loads(text.splitlines()[-1]) for text in said]


def main() -> int:
    asked = arguments(__doc__)
    results = Results("worker_memory")
    with TemporaryDirectory() as folder:
        rounds = [{way: run(way, folder) for way in WAYS} for _ in range(1 if asked.quick else 5)]
    for kind in ("RSS", "USS"):
        for way in WAYS:
            results.row(f"{kind}, MiB: {way}", mib=spread([of[way][1][kind] / 2**20 for of in rounds]))
        for rank, role in ((1, ROLES[0]), (0, ROLES[1])):
            more = spread([(of["ours"][rank][kind] - of["ddp"][rank][kind]) / 2**20 for of in rounds])
            results.row(f"{kind}, MiB over DDP's: {role}", mib=more)
            if kind == "RSS":
                results.bar(f"MiB over DDP's: {role}", more["median"], f"<= {BAR_MIB}")
    return results.write(asked.json)


if __name__ == "__main__":
    if sys.argv[1:] in [[way] for way in WAYS]:
        worker(sys.argv[1])
    else:
        sys.exit(main())
