"""WGAN with gradient penalty: two models and two optimizers in turns.

torchrun --nproc-per-node 3 gan.py          # shares by the ranks' own pace
torchrun --nproc-per-node 3 gan.py 5 2 1    # shares by hand
"""

import itertools
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import heterodyne as hd

NOISE = 4


class Ring(Dataset):
    """Points on a circle, with the noise that the generator and the penalty get in the same step."""

    epoch = 0

    def __len__(self):
        return 100

    def __getitem__(self, index):
        draw = torch.Generator().manual_seed(1000 * self.epoch + index)
        angle = 2 * torch.pi * torch.rand((), generator=draw)
        return (
            torch.stack([angle.sin(), angle.cos()]),
            torch.randn(2, NOISE, generator=draw),
            torch.rand(1, generator=draw),
        )


def layers(*sizes):
    pairs = [[nn.Linear(a, b), nn.LeakyReLU(0.2)] for a, b in itertools.pairwise(sizes)]
    return nn.Sequential(*[layer for pair in pairs for layer in pair][:-1])


def penalty(critic, real, fake, mix):
    between = (mix * real + (1 - mix) * fake).requires_grad_()
    (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    return (slope.norm(dim=1) - 1).square().mean()


def main(shares):
    torch.manual_seed(0)
    data = Ring()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=36 // dist.get_world_size(), sampler=sampler)
    generator = hd.DistributedDataParallel(layers(NOISE, 32, 2))  # was torch.nn.parallel.DistributedDataParallel
    critic = hd.DistributedDataParallel(layers(2, 32, 1))
    loader = hd.prepare_loader(loader, generator, critic, shares=shares)  # new
    of_generator = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.9))
    of_critic = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.9))
    for epoch in range(3):
        data.epoch = epoch
        sampler.set_epoch(epoch)
        for real, noise, mix in loader:
            fake = generator(noise[:, 0]).detach()
            of_critic.zero_grad()
            distance = critic(fake).mean() - critic(real).mean() + 10 * penalty(critic, real, fake, mix)
            distance.backward()
            of_critic.step()
            distance = critic.mean(distance)

            of_generator.zero_grad()
            loss = -critic(generator(noise[:, 1])).mean()
            loss.backward()
            of_generator.step()
            loss = generator.mean(loss)
            if dist.get_rank() == 0:
                print(f"critic {distance:.6f} generator {loss:.6f}", flush=True)


if __name__ == "__main__":
    dist.init_process_group()
    main([float(share) for share in sys.argv[1:]] or None)
    dist.destroy_process_group()
