"""How large a model trains where memory is unequal, under limits that the kernel enforces: a plan for these devices, and equal sharding.

Three workers may keep 4 : 2 : 1 of some memory beside what the framework takes (control groups; who exceeds is killed). A GPT grows layer
by layer, trained with AdamW in fp32: 16 bytes a parameter. The plan is what `heterodyne` chooses by itself. Equal sharding is FSDP2, which
shards weights, gradients and state alike over all, so that the smallest worker stops it. By the closed form all memories together hold
sum(memory) / 16 parameters, and equal shards 3 min(memory) / 16.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from results import ROOT, Results, arguments

HERE = Path(__file__)
SHARES = (4, 2, 1)
WIDTH, LENGTH, BATCH, HEADS, VOCABULARY = 384, 32, 8, 6, 256
LAYER = 12 * WIDTH**2 + 13 * WIDTH
BYTES = 16
STEPS = 3


def main() -> int:
    options = arguments(__doc__)
    results = Results("memory_limits")
    unit, trials = (100, 1) if options.quick else (200, 2)
    base = {way: base_bytes(way) for way in ("plan", "fsdp")}
    results.row("a worker with the framework and no model, bytes", **base)
    room = [share * unit * 2**20 for share in SHARES]
    allowed = sum(room) // BYTES // LAYER
    equal = len(room) * min(room) // BYTES // LAYER
    results.row("by the closed form, layers", all_memories=allowed, equal_shards=equal)

    ours = largest("plan", base, room, allowed)
    fsdp = largest("fsdp", base, room, allowed)
    results.row("the largest that trains, layers", plan=ours, fsdp2=fsdp)
    results.bar("largest model: plan over equal sharding", ours / max(1, fsdp), ">= 1.8")
    results.bar("largest model: plan over the closed form", ours / allowed, ">= 0.95")
    lives = [trains("plan", base, room, ours) for _ in range(trials)]
    dies = [not trains("fsdp", base, room, ours) for _ in range(trials)]
    results.row(f"at {ours} layers, of {trials} runs", plan_trains=sum(lives), fsdp2_is_killed=sum(dies))
    results.bar("runs of that plan that train", sum(lives) / trials, ">= 1")
    results.bar("runs of equal sharding that are killed there", sum(dies) / trials, ">= 1")
    return results.write(options.json)


def largest(way: str, base: dict[str, int], room: list[int], most: int) -> int:
    """Layers, by bisection."""
    low, high = 0, most + 1
    while high - low > max(1, most // 20):
        middle = (low + high) // 2
        low, high = (middle, high) if trains(way, base, room, middle) else (low, middle)
    return low


def base_bytes(way: str) -> int:
    """What a worker occupies before there is a model, with all that it loads."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "base.json"
        run(way, 1, ["--out", str(out)])
        return int(json.loads(out.read_text()))


def trains(way: str, base: dict[str, int], room: list[int], layers: int) -> bool:
    memory = ",".join(f"{base[way] + each} B" for each in room)
    done = run(way, layers, [], memory=memory).returncode == 0
    print(f"{way} with {layers} layers: {'trains' if done else 'does not'}", flush=True)
    return done


def run(way: str, layers: int, more: list[str], memory: str | None = None) -> subprocess.CompletedProcess[bytes]:
    emulate = [sys.executable, "-m", "heterodyne", "emulate", "--speeds", "0.6,0.6,0.6"]
    emulate += [] if memory is None else ["--memory", memory]
    worker = [sys.executable, str(HERE), "--worker", "--way", way, "--layers", str(layers), *more]
    return subprocess.run([*emulate, "--", *worker], check=False, capture_output=True, timeout=300)


def worker(options: argparse.Namespace) -> None:
    import torch

    import heterodyne as hd
    from heterodyne.job import OptimizerSection

    sys.path.insert(0, str(ROOT / "examples"))
    from gpt import build

    torch.manual_seed(0)
    tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH))
    batch = {"input_ids": tokens, "labels": tokens}
    with hd.open_session() as session:
        meta = options.way == "fsdp" or session.rank
        with torch.device("meta" if meta else "cpu"):
            model = build(length=LENGTH, width=WIDTH, layers=options.layers, heads=HEADS)
        if options.way == "fsdp":
            report(options, session.rank, fully_sharded(model, tokens, session))
            return
        section = OptimizerSection(lr=1e-4)
        trainer = hd.distribute(
            model, batch, optimizer=section, session=session, measure_s=3, rehearsal_s=0, micro_batch_sizes=(1, 2)
        )
        for _ in range(STEPS):
            trainer.step(batch)
        report(options, session.rank, BYTES * sum(p.numel() for p in model.parameters() if not p.is_meta))


def report(options: argparse.Namespace, rank: int, held: int) -> None:
    """What rank 0 occupies beside ``held`` bytes of weights, gradients and state."""
    import psutil

    if rank == 0 and options.out:
        options.out.write_text(json.dumps(psutil.Process().memory_info().rss - held))


def fully_sharded(model: Any, tokens: Any, session: Any) -> int:
    """FSDP2 with every layer a unit; weights are made shard by shard."""
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.optim import AdamW

    mesh = init_device_mesh("cpu", (session.world_size,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02)
    optimizer = AdamW(model.parameters(), lr=1e-4)
    share = BATCH // session.world_size
    own = tokens[session.rank * share : (session.rank + 1) * share]
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(input_ids=own, labels=own).backward()
        optimizer.step()
    return BYTES * sum(p.to_local().numel() for p in model.parameters())


if __name__ == "__main__":
    if "--worker" not in sys.argv:
        sys.exit(main())
    parser = argparse.ArgumentParser()
    parser.add_argument("--worker", action="store_true")
    parser.add_argument("--way")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--out", type=Path)
    worker(parser.parse_args())
