"""A two-tower recommender: the items of all ranks are negatives of each user.

torchrun --nproc-per-node 3 two_tower.py          # shares by the ranks' own pace
torchrun --nproc-per-node 3 two_tower.py 5 2 1    # shares by hand
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import heterodyne as hd

USERS, ITEMS = 40, 60


class Tower(nn.Module):
    def __init__(self, entries):
        super().__init__()
        self.entries = nn.Embedding(entries, 16)
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))

    def forward(self, ids):
        return F.normalize(self.layers(self.entries(ids)), dim=1)


class TwoTowers(nn.Module):
    def __init__(self):
        super().__init__()
        self.users, self.items = Tower(USERS), Tower(ITEMS)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, users, items):
        return self.users(users) * self.scale.exp(), self.items(items)


def main(shares):
    torch.manual_seed(0)
    users = torch.randint(USERS, (124,))
    data = TensorDataset(users, (users + torch.randint(3, (124,))) % ITEMS)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=36 // dist.get_world_size(), sampler=sampler)
    model = hd.DistributedDataParallel(TwoTowers())  # was torch.nn.parallel.DistributedDataParallel
    loader = hd.prepare_loader(loader, model, shares=shares)  # new
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for users, items in loader:
            of_users, of_items = model(users, items)
            every, numbers = model.all_gather(of_items), model.all_gather(items)  # was the rank's own items alone
            bought = (items[:, None] == numbers).float()
            loss = -((of_users @ every.t()).log_softmax(1) * bought / bought.sum(1, keepdim=True)).sum(1).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loss = model.mean(loss)
            if dist.get_rank() == 0:
                print(f"loss {loss:.6f}", flush=True)


if __name__ == "__main__":
    dist.init_process_group()
    main([float(share) for share in sys.argv[1:]] or None)
    dist.destroy_process_group()
