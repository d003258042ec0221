"""A small transformer as capture would describe it, op by op: what stages that lie in parts are made of.

Its sizes divide by 2, 3 and 4, so that shares in such proportions are exact.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from heterodyne.graph import Block, Input, Loss, ModelGraph, Op, Parameter, Ref, Size, TensorSpec
from heterodyne.graph.ir import Argument
from heterodyne.graph.size import ZERO

TOKENS, WIDTH, HEADS, INNER = 4, 48, 12, 192
HIDDEN_BYTES = 4 * TOKENS * WIDTH
"""Of what goes from block to block, for each sample."""


class Writer:
    """Ops in order. ``moves``: whether they have memory traffic; without it all work is operations."""

    def __init__(self, *, moves: bool, tokens: int) -> None:
        self.ops: list[Op] = []
        self.parameters: list[Parameter] = []
        self.blocks: list[Block] = []
        self._tokens = tokens
        self._shapes: dict[str, tuple[int, ...]] = {"x": (tokens, WIDTH)}  # without the samples
        self._kept: set[str] = set()
        self._moves = moves

    def op(
        self,
        kind: str,
        shape: tuple[int, ...],
        arguments: Mapping[str, Argument],
        *,
        flops: float = 0.0,
        keeps: tuple[str, ...] = (),
        view: bool = False,
    ) -> str:
        """``shape``: of what it returns, without the samples; ``flops``: of a sample; ``keeps``: what it needs for its backward."""
        name = f"{kind}_{len(self.ops)}"
        read = [v.name for v in arguments.values() if isinstance(v, Ref)]
        stored = {p.name: p for p in self.parameters}
        first = [name if source == "result" else source for source in keeps]
        saved = [source for source in dict.fromkeys(first) if source not in self._kept]
        self._kept.update(saved)
        self._shapes[name] = shape
        moves = self._moves and not view
        of_weights = Size.of(sum(stored[n].bytes for n in read if n in stored))
        self.ops.append(
            Op(
                name=name,
                target=f"aten.{kind}.default",
                inputs=tuple(n for n in read if n not in stored),
                parameters=tuple(n for n in read if n in stored),
                outputs=(TensorSpec(shape=(Size.per_sample(1), *map(Size.of, shape)), dtype="float32"),),
                differentiable=(True,),
                module="",
                source="model.py:1",
                flops_forward=Size.per_sample(flops),
                flops_backward=Size.per_sample(2 * flops),
                bytes_read=Size.per_sample(sum(self._bytes(n) for n in read if n not in stored)) + of_weights
                if moves
                else ZERO,
                bytes_written=Size.per_sample(self._bytes(name)) if moves else ZERO,
                bytes_saved=Size.per_sample(sum(map(self._bytes, saved))),
                arguments=tuple(arguments.items()),
                samples=(0,),
            )
        )
        return name

    def linear(self, source: str, columns: int) -> str:
        rows = self._shapes[source][-1]
        weight = Parameter(name=f"w{len(self.parameters)}", shape=(columns, rows), dtype="float32", trainable=True)
        self.parameters.append(weight)
        shape = (*self._shapes[source][:-1], columns)
        flops = 2 * rows * prod(shape)
        arguments = {"input": Ref(source), "weight": Ref(weight.name), "bias": None}
        return self.op("linear", shape, arguments, flops=flops, keeps=(source,))

    def add(self, a: str, b: str) -> str:
        return self.op("add", self._shapes[a], {"self": Ref(a), "other": Ref(b), "alpha": 1})

    def norm(self, source: str) -> str:
        arguments = {"input": Ref(source), "normalized_shape": (WIDTH,), "weight": None, "bias": None}
        return self.op("layer_norm", (self._tokens, WIDTH), arguments, keeps=(source,))

    def heads(self, source: str) -> str:
        arguments = {
            "self": Ref(source),
            "size": (Size.per_sample(1), *map(Size.of, (self._tokens, HEADS, WIDTH // HEADS))),
        }
        cut = self.op("view", (self._tokens, HEADS, WIDTH // HEADS), arguments, view=True)
        return self._swapped(cut, (HEADS, self._tokens, WIDTH // HEADS))

    def _swapped(self, source: str, shape: tuple[int, ...]) -> str:
        return self.op("transpose", shape, {"self": Ref(source), "dim0": 1, "dim1": 2}, view=True)

    def block(self, name: str, source: str) -> str:
        """Attention and a perceptron, each behind a norm and beside what goes round it."""
        start = len(self.ops)
        normed = self.norm(source)
        query, key, value = (self.heads(self.linear(normed, WIDTH)) for _ in range(3))
        attended = self.op(
            "scaled_dot_product_attention",
            (HEADS, self._tokens, WIDTH // HEADS),
            {"query": Ref(query), "key": Ref(key), "value": Ref(value), "attn_mask": None, "is_causal": True},
            flops=4 * self._tokens * self._tokens * WIDTH,
            keeps=(query, key, value, "result"),
        )
        swapped = self._swapped(attended, (self._tokens, HEADS, WIDTH // HEADS))
        together = (Size.per_sample(1), Size.of(self._tokens), Size.of(WIDTH))
        merged = self.op("reshape", (self._tokens, WIDTH), {"self": Ref(swapped), "shape": together})
        between = self.add(source, self.linear(merged, WIDTH))
        inner = self.linear(self.norm(between), INNER)
        active = self.op("gelu", (self._tokens, INNER), {"self": Ref(inner), "approximate": "none"}, keeps=(inner,))
        result = self.add(between, self.linear(active, WIDTH))
        self.blocks.append(Block(index=len(self.blocks), name=name, kind="layer", start=start, stop=len(self.ops)))
        return result

    def _bytes(self, name: str) -> int:
        return 4 * prod(self._shapes[name])


def transformer(layers: int = 2, *, moves: bool = False, tokens: int = TOKENS) -> ModelGraph:
    """``layers`` alike blocks between a projection of the input and a loss that adds up everything."""
    writer = Writer(moves=moves, tokens=tokens)
    hidden = writer.linear("x", WIDTH)
    writer.blocks.append(Block(index=0, name="first", kind="first", start=0, stop=1))
    for number in range(layers):
        hidden = writer.block(f"layer{number}", hidden)
    start = len(writer.ops)
    total = writer.op("sum", (), {"self": Ref(hidden)}, flops=tokens * WIDTH)
    (loss,) = (op for op in writer.ops if op.name == total)
    scalar = TensorSpec(shape=(), dtype="float32")
    writer.ops[-1] = Op(
        **{**{f: getattr(loss, f) for f in loss.__dataclass_fields__}, "outputs": (scalar,), "samples": (None,)}
    )
    writer.blocks.append(Block(index=1 + layers, name="last", kind="last", start=start, stop=start + 1))
    return ModelGraph(
        name="Transformer",
        inputs=(
            Input(
                name="x",
                spec=TensorSpec(shape=(Size.per_sample(1), Size.of(tokens), Size.of(WIDTH)), dtype="float32"),
                batch_dim=0,
            ),
        ),
        parameters=tuple(writer.parameters),
        buffers=(),
        ops=tuple(writer.ops),
        blocks=tuple(writer.blocks),
        loss=Loss(reduction="sum"),
        output=Ref(total),
    )
