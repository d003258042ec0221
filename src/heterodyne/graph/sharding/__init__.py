"""How tensors lie on the devices of a stage: what ops allow, what is chosen, and where the cuts are."""

from heterodyne.graph.sharding.layout import COPY, SUM, WHOLE, Conversion, Layout, conversion, cut
from heterodyne.graph.sharding.nested import nested, shard_along, turns
from heterodyne.graph.sharding.price import Price
from heterodyne.graph.sharding.problem import Mode, Problem
from heterodyne.graph.sharding.rule import Strategy
from heterodyne.graph.sharding.sharding import Exchange, Narrow, Sharding, shard

__all__ = [
    "COPY",
    "SUM",
    "WHOLE",
    "Conversion",
    "Exchange",
    "Layout",
    "Mode",
    "Narrow",
    "Price",
    "Problem",
    "Sharding",
    "Strategy",
    "conversion",
    "cut",
    "nested",
    "shard",
    "shard_along",
    "turns",
]
