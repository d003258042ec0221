"""Momentum contrast (MoCo): a key encoder that follows the query encoder, and a queue of keys of all ranks.

torchrun --nproc-per-node 3 moco.py          # shares by the ranks' own pace
torchrun --nproc-per-node 3 moco.py 5 2 1    # shares by hand
"""

import copy
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import heterodyne as hd

WIDTH, QUEUE = 16, 96


class Views(Dataset):
    """Two views of each sample, drawn by a generator of its own, so they do not depend on the rank that gets it."""

    epoch = 0

    def __len__(self):
        return 76

    def __getitem__(self, index):
        sample = torch.randn(WIDTH, generator=torch.Generator().manual_seed(index))
        draw = torch.Generator().manual_seed(1000 * self.epoch + index)
        return tuple(sample + 0.3 * torch.randn(WIDTH, generator=draw) for _ in range(2))


def main(shares):
    torch.manual_seed(0)
    data = Views()
    sampler = DistributedSampler(data, drop_last=True)
    loader = DataLoader(data, batch_size=24 // dist.get_world_size(), sampler=sampler, drop_last=True)
    encoder = nn.Sequential(nn.Linear(WIDTH, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 8))
    queries = hd.DistributedDataParallel(encoder)  # was torch.nn.parallel.DistributedDataParallel
    loader = hd.prepare_loader(loader, queries, shares=shares)  # new
    keys = copy.deepcopy(queries.module).requires_grad_(False)
    queue = F.normalize(torch.randn(QUEUE, 8), dim=1)
    optimizer = torch.optim.SGD(queries.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(4):
        data.epoch = epoch
        sampler.set_epoch(epoch)
        for one, other in loader:
            with torch.no_grad():
                for key, query in zip(keys.parameters(), queries.parameters(), strict=True):
                    key.lerp_(query, 0.05)
                key = F.normalize(keys(other), dim=1)
            query = F.normalize(queries(one), dim=1)
            scores = torch.cat([(query * key).sum(1, keepdim=True), query @ queue.t()], 1) / 0.2
            loss = F.cross_entropy(scores, torch.zeros(len(scores), dtype=torch.long))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            queue = torch.cat([queries.all_gather(key), queue])[:QUEUE]  # was an all_gather of equal parts
            loss = queries.mean(loss)
            if dist.get_rank() == 0:
                print(f"loss {loss:.6f}", flush=True)


if __name__ == "__main__":
    dist.init_process_group()
    main([float(share) for share in sys.argv[1:]] or None)
    dist.destroy_process_group()
