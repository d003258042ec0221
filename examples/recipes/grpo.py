"""Reinforcement learning of a language model (GRPO): it generates answers between steps, and the loss is a mean over their tokens.

torchrun --nproc-per-node 3 grpo.py          # shares by the ranks' own pace
torchrun --nproc-per-node 3 grpo.py 5 2 1    # shares by hand
"""

import copy
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import heterodyne as hd

WORDS, LENGTH, ANSWER, GROUP, END = 12, 4, 6, 4, 0


class Prompts(Dataset):
    def __len__(self):
        return 26

    def __getitem__(self, index):
        return index, torch.randint(1, WORDS, (LENGTH,), generator=torch.Generator().manual_seed(index))


class Policy(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, width), nn.Embedding(LENGTH + ANSWER, width)
        self.layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(width, WORDS)

    def forward(self, ids):
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        x = self.words(ids) + self.places.weight[: ids.shape[1]]
        return self.head(self.layer(x, src_mask=mask, is_causal=True)).log_softmax(-1)


@torch.no_grad()
def generate(policy, prompts, numbers, epoch):
    """Answers token by token. Each prompt has a generator of its own, so its answers do not depend on the rank that gets it."""
    draws = [torch.Generator().manual_seed(1000 * epoch + int(number)) for number in numbers]
    ids = prompts.repeat_interleave(GROUP, 0)
    for _ in range(ANSWER):
        chances = policy(ids)[:, -1].exp().view(len(prompts), GROUP, WORDS)
        new = torch.cat([torch.multinomial(of, 1, generator=draw) for of, draw in zip(chances, draws, strict=True)])
        ids = torch.cat([ids, new], 1)
    answers = ids[:, LENGTH:]
    ended = (answers == END).cumsum(1) - (answers == END).long()
    return ids, ended == 0  # which tokens are of the answer


def reward(ids, written):
    """How many of its tokens are even numbers, but for the end."""
    answers = ids[:, LENGTH:]
    return ((answers % 2 == 0) & (answers != END) & written).sum(1).float()


def main(shares):
    torch.manual_seed(0)
    data = Prompts()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=12 // dist.get_world_size(), sampler=sampler)
    policy = hd.DistributedDataParallel(Policy())  # was torch.nn.parallel.DistributedDataParallel
    loader = hd.prepare_loader(loader, policy, shares=shares)  # new
    reference = copy.deepcopy(policy.module).requires_grad_(False)
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for numbers, prompts in loader:
            ids, written = generate(policy.module, prompts, numbers, epoch)
            gained = reward(ids, written).view(-1, GROUP)
            advantage = ((gained - gained.mean(1, keepdim=True)) / (gained.std(1, keepdim=True) + 1e-4)).view(-1, 1)
            taken = ids[:, LENGTH:, None]
            chance = policy(ids)[:, LENGTH - 1 : -1].gather(2, taken)[..., 0]
            apart = reference(ids)[:, LENGTH - 1 : -1].gather(2, taken)[..., 0] - chance
            each = -(chance - chance.detach()).exp() * advantage + 0.04 * (apart.exp() - apart - 1)
            policy.count(written.sum())  # new: the loss is a mean over tokens, of which ranks have unlike numbers
            loss = each[written].mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loss, rewards = policy.mean(loss), policy.all_gather(gained)
            if dist.get_rank() == 0:
                print(f"loss {loss:.6f} reward {rewards.mean():.4f}", flush=True)


if __name__ == "__main__":
    dist.init_process_group()
    main([float(share) for share in sys.argv[1:]] or None)
    dist.destroy_process_group()
