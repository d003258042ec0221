"""Semi-supervised training with a mean teacher: an average of the student's weights says what samples without a label should give.

torchrun --nproc-per-node 3 mean_teacher.py          # shares by the ranks' own pace
torchrun --nproc-per-node 3 mean_teacher.py 5 2 1    # shares by hand
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import heterodyne as hd

WIDTH, CLASSES = 12, 3


class PartlyLabelled(Dataset):
    """Every third sample has a label, the others have -100; two noisy views of each."""

    epoch = 0

    def __len__(self):
        return 95

    def __getitem__(self, index):
        draw = torch.Generator().manual_seed(1000 * self.epoch + index)
        label = index % CLASSES
        sample = F.one_hot(torch.tensor(label), WIDTH) + torch.randn(
            WIDTH, generator=torch.Generator().manual_seed(index)
        )
        views = [sample + 0.2 * torch.randn(WIDTH, generator=draw) for _ in range(2)]
        return *views, label if index % 3 == 0 else -100


def main(shares):
    torch.manual_seed(0)
    data = PartlyLabelled()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=24 // dist.get_world_size(), sampler=sampler)
    student = nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, CLASSES))
    student = hd.DistributedDataParallel(student)  # was torch.nn.parallel.DistributedDataParallel
    loader = hd.prepare_loader(loader, student, shares=shares)  # new
    teacher = AveragedModel(student.module, multi_avg_fn=get_ema_multi_avg_fn(0.95))
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=16)
    for epoch in range(4):
        data.epoch = epoch
        sampler.set_epoch(epoch)
        for one, other, label in loader:
            with torch.no_grad():
                wanted = teacher(other).softmax(1)
            score = student(one)
            known = F.cross_entropy(score, label, reduction="sum") / len(label)  # both terms divide by the samples
            loss = known + 3.0 * F.mse_loss(score.softmax(1), wanted)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            teacher.update_parameters(student.module)
            loss = student.mean(loss)
            if dist.get_rank() == 0:
                print(f"loss {loss:.6f}", flush=True)


if __name__ == "__main__":
    dist.init_process_group()
    main([float(share) for share in sys.argv[1:]] or None)
    dist.destroy_process_group()
