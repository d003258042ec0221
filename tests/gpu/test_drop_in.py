"""The drop-in for DDP on CUDA, alone and in one job with CPU ranks."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import heterodyne as hd
from multiprocess.pool import Pool, World
from multiprocess.test_drop_in import CASES, Residual, Samples, train

UNLIKE = ("samples", "views", "unused", "tokens", "penalty", "batch norm", "accumulated", "accumulated, batch norm")


@pytest.mark.parametrize("devices", [("cuda", "cpu"), ("cpu", "cuda", "cpu")], ids="+".join)
@pytest.mark.parametrize("name", UNLIKE)
@pytest.mark.filterwarnings("ignore")
def test_unlike_devices_have_the_gradient_of_the_cpu_alone(pool: Pool, name: str, devices: tuple[str, ...]) -> None:
    for gradient, loss in pool.run(len(devices), train, name, 2, torch.float64, devices, timeout_s=180):
        assert gradient <= 1e-9
        assert loss <= 1e-9


def paced(world: World) -> list[int]:
    """The samples of rank 0 in each step of a large model, which a GPU trains in less time than a CPU."""
    device = ("cuda", "cpu")[world.rank]
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 1500), nn.Tanh(), nn.Linear(1500, 1500), nn.Tanh(), nn.Linear(1500, 5)).to(
        device
    )
    ddp = hd.DistributedDataParallel(module)
    loader = hd.prepare_loader(torch.utils.data.DataLoader(Samples(16 * 256, torch.float32), batch_size=128), ddp)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    seen = []
    for batch in loader:
        seen.append(len(batch["x"]))
        optimizer.zero_grad()
        F.cross_entropy(ddp(batch["x"].to(device)), batch["y"].to(device)).backward()
        optimizer.step()
    return seen


def test_the_faster_device_gets_more(pool: Pool) -> None:
    gpu, cpu = pool.run(2, paced, timeout_s=180)
    assert [a + b for a, b in zip(gpu, cpu, strict=True)] == [256] * 16
    assert gpu[0] == 128
    assert gpu[-1] > 128


def test_one_device_over_nccl() -> None:
    """One rank has nothing to add up, and everything of the reducer to go through."""
    torch.distributed.init_process_group("nccl", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(hd.HeterodyneError, match="on the cpu"):
            hd.DistributedDataParallel(Residual())
        ddp = hd.DistributedDataParallel(Residual().cuda(), device_ids=[0])
        x = torch.randn(4, 6)
        for _ in range(3):
            ddp(x).square().mean().backward()
        assert all(parameter.grad is not None for parameter in ddp.parameters())
    finally:
        torch.distributed.destroy_process_group()


def test_every_case_is_known() -> None:
    assert set(UNLIKE) <= CASES.keys()
