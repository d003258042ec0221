"""How tensors are laid out on the devices of a stage: what ops allow, what is chosen, and where the cuts are."""

from heterodyne.graph.sharding.layout import COPY, PARTIAL, REPLICATE, Layout, conversion, sharded
from heterodyne.graph.sharding.nested import shard_along, turns
from heterodyne.graph.sharding.price import Price
from heterodyne.graph.sharding.problem import Mode, Problem
from heterodyne.graph.sharding.rule import OpStrategy
from heterodyne.graph.sharding.sharding import Exchange, Sharding, shard

__all__ = [
    "COPY",
    "PARTIAL",
    "REPLICATE",
    "Exchange",
    "Layout",
    "Mode",
    "OpStrategy",
    "Price",
    "Problem",
    "Sharding",
    "conversion",
    "shard",
    "shard_along",
    "sharded",
    "turns",
]
