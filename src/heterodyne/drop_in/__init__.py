"""In place of PyTorch's DDP: the script's own model, loss and loop, eagerly, on unequal shares of the global batch.

data_parallel   the class; PyTorch's own, with another average
reduction       its communication hook: gradients by weights, in buckets behind the backward
loss_weight     how much of the global batch this rank's loss stands for
sampler, loader how global batches are dealt by shares, and that the model knows what was dealt
batch_groups    global batches that any batch sampler draws
streams         the same for an IterableDataset
gathering       rows of all ranks, for losses that compare samples
pace            own time of a sample, and new shares from it
sharded_optimizer   state sharded by share
"""

from heterodyne.drop_in.data_parallel import DistributedDataParallel
from heterodyne.drop_in.loader import prepare_loader
from heterodyne.drop_in.sampler import DistributedSampler
from heterodyne.drop_in.sharded_optimizer import ZeroRedundancyOptimizer

__all__ = ["DistributedDataParallel", "DistributedSampler", "ZeroRedundancyOptimizer", "prepare_loader"]
