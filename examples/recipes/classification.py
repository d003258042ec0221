"""Classification as torchvision's reference script has it: BatchNorm, augmentation, warm-up, validation, checkpoints.

torchrun --nproc-per-node 3 classification.py          # shares by the ranks' own pace
torchrun --nproc-per-node 3 classification.py 5 2 1    # shares by hand
"""

import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import heterodyne as hd

SIZE, CLASSES = 12, 4


class Stripes(Dataset):
    """Stripes of four directions. ``augment``: shifted and flipped, by a generator of each sample."""

    epoch = 0

    def __init__(self, count, augment):
        self.count, self.augment = count, augment

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        draw = torch.Generator().manual_seed(1000 * self.epoch + index)
        y, x = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
        image = torch.stack([x, y, x + y, x - y])[index % CLASSES].mul(1.5).sin()
        if self.augment:
            image = image.roll(int(torch.randint(SIZE, (), generator=draw)), 0)
            image = image + 0.1 * torch.randn(SIZE, SIZE, generator=draw)
        return image[None], index % CLASSES


class Residual(nn.Module):
    def __init__(self, channels, stride):
        super().__init__()
        self.first = nn.Conv2d(channels // stride, channels, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)])
        self.around = nn.Conv2d(channels // stride, channels, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, x):
        inside = F.relu(self.norms[0](self.first(x)))
        return F.relu(self.around(x) + self.norms[1](self.second(inside)))


def make_model():
    stem = [nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()]
    tail = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, CLASSES)]
    return nn.Sequential(*stem, Residual(8, 1), Residual(16, 2), *tail)


@torch.no_grad()
def validate(model, loader):
    model.eval()
    right = []
    for image, label in loader:
        right.append(model.all_gather(model(image).argmax(1) == label))  # each sample once
    model.train()
    return torch.cat(right).float().mean()


def main(shares):
    torch.manual_seed(0)
    train, test = Stripes(100, augment=True), Stripes(43, augment=False)
    sampler = DistributedSampler(train)
    size = 24 // dist.get_world_size()
    loader = DataLoader(train, batch_size=size, sampler=sampler)
    of_test = DataLoader(test, batch_size=size, sampler=DistributedSampler(test, shuffle=False))
    model = nn.SyncBatchNorm.convert_sync_batchnorm(make_model())
    model = hd.DistributedDataParallel(model)  # was torch.nn.parallel.DistributedDataParallel
    loader, of_test = (hd.prepare_loader(each, model, shares=shares) for each in (loader, of_test))  # new
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 11)
    scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm_up, cosine], [4])
    for epoch in range(3):
        train.epoch = epoch
        sampler.set_epoch(epoch)
        for image, label in loader:
            loss = F.cross_entropy(model(image), label, label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            loss = model.mean(loss)
            if dist.get_rank() == 0:
                print(f"loss {loss:.6f}", flush=True)
        accuracy = validate(model, of_test)
        if dist.get_rank() == 0:
            print(f"accuracy {accuracy:.4f}", flush=True)
            with tempfile.TemporaryDirectory() as folder:
                torch.save(
                    {"model": model.module.state_dict(), "loader": loader.state_dict()}, Path(folder) / "last.pt"
                )


if __name__ == "__main__":
    dist.init_process_group()
    main([float(share) for share in sys.argv[1:]] or None)
    dist.destroy_process_group()
