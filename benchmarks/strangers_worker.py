"""One worker of `strangers.py`: it trains until it is told that the stranger is done, and compares each loss with one device."""

from __future__ import annotations

import copy
import json
import sys
import time
from pathlib import Path

import torch
from torch import nn

import heterodyne as hd

FURTHER = 200  # steps after the last traffic; all workers are within one step of each other


def main() -> None:
    folder = Path(sys.argv[1])
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 8))
    plain, loss = copy.deepcopy(model), nn.MSELoss()
    inputs, wanted = torch.randn(16, 64), torch.randn(16, 8)
    reference = torch.optim.SGD(plain.parameters(), lr=1e-3)
    with hd.distribute(
        model,
        (inputs, wanted),
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
        plan=hd.PlanOptions("data", measure_s=0.5, rehearsal_s=0),
    ) as trainer:
        step, last = 0, None
        first = trainer.rank == 0
        with (folder / "times").open("a") as times, (folder / "losses.jsonl").open("a") as losses:
            while last is None or step < last:
                got = trainer.step((inputs, wanted)).loss
                reference.zero_grad()
                expected = loss(plain(inputs), wanted)
                expected.backward()
                reference.step()
                step += 1
                if first:
                    times.write(f"{time.monotonic()}\n")
                    times.flush()
                    losses.write(json.dumps([got, expected.item()]) + "\n")
                    if last is None and (folder / "done").exists():
                        (folder / "last.partial").write_text(str(step + FURTHER))
                        (folder / "last.partial").rename(folder / "last")
                if last is None and (folder / "last").exists():
                    last = int((folder / "last").read_text())


if __name__ == "__main__":
    main()
