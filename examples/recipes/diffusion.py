"""Diffusion as scripts for diffusers write it: noise, time steps and loss in the loop, an average of the weights beside it.

torchrun --nproc-per-node 3 diffusion.py          # shares by the ranks' own pace
torchrun --nproc-per-node 3 diffusion.py 5 2 1    # shares by hand
"""

import math
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import heterodyne as hd

SIZE, STEPS = 8, 100


class Images(Dataset):
    """Blobs. Each sample has a generator of its own, so its noise does not depend on the rank that gets it."""

    epoch = 0

    def __len__(self):
        return 68

    def __getitem__(self, index):
        draw = torch.Generator().manual_seed(1000 * self.epoch + index)
        y, x = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
        image = torch.exp(-((x - index % SIZE) ** 2 + (y - index // SIZE % SIZE) ** 2) / 8.0)
        noise = torch.randn(1, SIZE, SIZE, generator=draw)
        return {"image": image[None], "noise": noise, "t": torch.randint(STEPS, (), generator=draw)}


class Block(nn.Module):
    def __init__(self, channels_in, channels):
        super().__init__()
        self.first, self.second = (
            nn.Conv2d(channels_in, channels, 3, padding=1),
            nn.Conv2d(channels, channels, 3, padding=1),
        )
        self.time, self.norm = nn.Linear(16, channels), nn.GroupNorm(4, channels)

    def forward(self, x, time):
        x = F.silu(self.norm(self.first(x) + self.time(time)[:, :, None, None]))
        return F.silu(self.second(x))


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down, self.middle, self.up = Block(1, 8), Block(8, 16), Block(24, 8)
        self.out = nn.Conv2d(8, 1, 1)

    def forward(self, x, t):
        rates = torch.exp(-math.log(STEPS) * torch.arange(8) / 8)
        time = torch.cat([(t[:, None] * rates).sin(), (t[:, None] * rates).cos()], 1)
        high = self.down(x, time)
        low = self.middle(F.avg_pool2d(high, 2), time)
        return self.out(self.up(torch.cat([high, F.interpolate(low, scale_factor=2)], 1), time))


def main(shares):
    torch.manual_seed(0)
    data = Images()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=24 // dist.get_world_size(), sampler=sampler)
    model = hd.DistributedDataParallel(UNet())  # was torch.nn.parallel.DistributedDataParallel
    loader = hd.prepare_loader(loader, model, shares=shares)  # new
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    average = AveragedModel(model.module, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    kept = torch.linspace(1, 0.02, STEPS)
    for epoch in range(3):
        data.epoch = epoch
        sampler.set_epoch(epoch)
        for batch in loader:
            part = kept[batch["t"]][:, None, None, None]
            noisy = part.sqrt() * batch["image"] + (1 - part).sqrt() * batch["noise"]
            loss = F.mse_loss(model(noisy, batch["t"]), batch["noise"])
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            average.update_parameters(model.module)
            mean = model.mean(loss)  # of the global batch
            if dist.get_rank() == 0:
                print(f"loss {mean:.6f}", flush=True)
    size = sum(p.double().square().sum() for p in average.parameters())
    if dist.get_rank() == 0:
        print(f"average of the weights {size.sqrt():.6f}")


if __name__ == "__main__":
    dist.init_process_group()
    main([float(share) for share in sys.argv[1:]] or None)
    dist.destroy_process_group()
