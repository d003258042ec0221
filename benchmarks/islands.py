"""All-reduce over three hosts with 3, 2 and 1 workers, against gloo's ring, in network namespaces with links of their own.

Host memory is all that workers of one host share; between hosts each has one link of 200 Mb/s. Ranks take turns among the hosts, as a
scheduler may place them, or follow the hosts. With links of 20, 40 and 80 Mb/s, homes of elements by bandwidth are compared with equal
ones. Ideals of the bars (bytes over the slowest link): 3.75, 1.25 and 1.33. It needs root, for namespaces.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from emulation import in_rounds, ratios, worker_arguments
from results import Results, arguments, spread

from heterodyne.cost.islands import reduced

HERE = Path(__file__).resolve()
TURNS, IN_ORDER = (0, 1, 0, 1, 0, 2), (0, 0, 0, 1, 1, 2)
MEGABIT = 125_000.0
LATENCY_S = 0.0002


@dataclass(frozen=True, kw_only=True)
class Size:
    megabytes: int
    rounds: int


FULL, QUICK = Size(megabytes=16, rounds=7), Size(megabytes=4, rounds=4)


def main() -> int:
    options = arguments(__doc__)
    results = Results("islands")
    size = QUICK if options.quick else FULL
    for name, hosts, bar in (("ranks in turns", TURNS, ">= 3.0"), ("ranks by host", IN_ORDER, ">= 1.15")):
        found = on_hosts(hosts, [200 * MEGABIT] * 3, ["gloo", "islands"], size)
        compared(results, name, found, "gloo", "islands", bar)
        predicted(results, name, found, [200 * MEGABIT] * 3, size)
    links = [20 * MEGABIT, 40 * MEGABIT, 80 * MEGABIT]
    found = on_hosts(IN_ORDER, links, ["equal homes", "islands"], size)
    compared(results, "links of 20, 40, 80 Mb/s", found, "equal homes", "islands", ">= 1.2")
    predicted(results, "links of 20, 40, 80 Mb/s", found, links, size)
    least_s = size.megabytes * 2**20 / links[0]
    results.row("least seconds over the slowest link", seconds=least_s)
    results.bar("seconds over those of the slowest link", median(found["islands"]) / least_s, "<= 1.05")
    return results.write(options.json)


def compared(results: Results, name: str, found: dict[str, list[float]], before: str, after: str, bar: str) -> None:
    for way in (before, after):
        results.row(f"{name}: {way}", seconds=spread(found[way]))
    ratio = ratios([found], before, after)
    results.row(f"{name}: {before} / {after}", ratio=spread(ratio))
    results.bar(f"{name}: {before} over {after}", median(ratio), bar)


def predicted(results: Results, name: str, found: dict[str, list[float]], links: list[float], size: Size) -> None:
    """Compare with what the steps move over the slowest link, which is what the cost model expects."""
    seconds = reduced(links) * size.megabytes * 2**20
    results.row(f"{name}: predicted", seconds=seconds, error=seconds / median(found["islands"]) - 1)


def on_hosts(hosts: tuple[int, ...], links: list[float], ways: list[str], size: Size) -> dict[str, list[float]]:
    """Run this script as each worker of emulated hosts, and return the seconds of each way."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "measured.json"
        told = {"links": links, "hosts": hosts, "megabytes": size.megabytes, "rounds": size.rounds}
        worker = [sys.executable, str(HERE), "--worker", "--out", str(out), "--ways", *ways, "--size", json.dumps(told)]
        options = f"links={links!r}, hosts={hosts!r}"
        emulate = f"raise SystemExit(emulate([1.0] * {len(hosts)}, {worker!r}, {options}))"
        subprocess.run(
            [sys.executable, "-c", f"from heterodyne.emulate import emulate; {emulate}"], check=True, timeout=280
        )
        found: dict[str, list[float]] = json.loads(out.read_text())
        return found


def work() -> None:
    import torch
    import torch.distributed as dist

    from heterodyne.cluster.spec import Link
    from heterodyne.runtime.comm.communicator import Communicator

    options = worker_arguments()
    assert options is not None
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    communicator = Communicator(rank=rank, world_size=ranks, device=torch.device("cpu"))
    tensor = torch.ones(options.size["megabytes"] * 2**18)
    equal = communicator.process_group(range(ranks))
    rates = [options.size["links"][host] for host in options.size["hosts"]]
    communicator.links = [Link(between=("", ""), bandwidth_bytes_per_s=rate, latency_s=LATENCY_S) for rate in rates]
    group = communicator.process_group(range(ranks))
    assert equal is not None
    assert group is not None
    (buffer,) = group.buffers([(tensor.numel(), torch.float32)])
    (beside,) = equal.buffers([(tensor.numel(), torch.float32)])
    ways = {
        "gloo": lambda: dist.all_reduce(tensor),
        "islands": lambda: group.all_reduce(buffer).wait(),
        "equal homes": lambda: equal.all_reduce(beside).wait(),
    }
    found = in_rounds({way: ways[way] for way in options.ways}, communicator, rounds=options.size["rounds"], steps=1)
    if rank == 0:
        options.out.write_text(json.dumps(found.seconds))
    dist.destroy_process_group()


if __name__ == "__main__":
    if "--worker" in sys.argv:
        work()
    else:
        sys.exit(main())
