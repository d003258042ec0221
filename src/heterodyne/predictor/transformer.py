"""The shape of a transformer: all that the cost of training it depends on."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Transformer"]


@dataclass(frozen=True, kw_only=True)
class Transformer:
    """A decoder or an encoder of alike layers between an embedding and a head.

    Args:
        hidden: the width of the residual stream. ``head_dim``: of one attention head; None: ``hidden / heads``.
        ffn: the inner width of the feed-forward layer, of one expert where there are ``experts``.
        gated: three matrices (SwiGLU) instead of two.
        moe_every: each such layer has experts, the others one feed-forward layer.
        capacity: places of all experts together over the tokens that come to them; 1: as many as come (dropless).
        dense_dispatch: tokens are brought to experts by products with one-hot matrices, as in GShard, not by sorting.
        shared_ffn: the inner width of what every token passes besides its experts.
        dropout: behind attention and the feed-forward layer; their masks are kept.
        causal: attention looks back only. ``predicted``: the part of the tokens that reach the head.
        tied: the head shares the weights of the embedding.
    """

    layers: int
    hidden: int
    heads: int
    vocab: int
    seq: int
    ffn: int
    kv_heads: int | None = None
    head_dim: int | None = None
    gated: bool = False
    experts: int = 0
    topk: int = 1
    moe_every: int = 1
    capacity: float = 1.0
    dense_dispatch: bool = False
    shared_ffn: int = 0
    dropout: bool = False
    causal: bool = True
    predicted: float = 1.0
    tied: bool = True

    @property
    def of_head(self) -> float:
        """The width of one head."""
        return self.head_dim or self.hidden / self.heads

    @property
    def query_width(self) -> float:
        return self.heads * self.of_head

    @property
    def key_width(self) -> float:
        return (self.kv_heads or self.heads) * self.of_head

    @property
    def matrices(self) -> int:
        """Of a feed-forward layer."""
        return 3 if self.gated else 2

    @property
    def expert_layers(self) -> int:
        return self.layers // self.moe_every if self.experts else 0

    @property
    def attention_parameters(self) -> float:
        """Of one layer, its norms and biases (which count for little) among them."""
        return self.hidden * (2 * self.query_width + 2 * self.key_width) + 4 * self.hidden

    @property
    def ffn_parameters(self) -> float:
        """Of one feed-forward layer, or of one expert."""
        return self.matrices * self.hidden * self.ffn

    @property
    def shared_parameters(self) -> float:
        return self.matrices * self.hidden * self.shared_ffn + self.hidden * self.experts

    @property
    def embedding_parameters(self) -> float:
        return self.vocab * self.hidden

    @property
    def parameters(self) -> float:
        dense = self.layers - self.expert_layers
        return (
            self.layers * self.attention_parameters
            + dense * self.ffn_parameters
            + self.expert_layers * (self.experts * self.ffn_parameters + self.shared_parameters)
            + self.embedding_parameters * (1 if self.tied else 2)
        )

    def forward_flops_a_token(self) -> float:
        """Of matrix products and attention: two operations a multiply-add. Causal attention counts half, as flash kernels compute it."""
        each = 2 * (self.attention_parameters - 4 * self.hidden)
        scores = 4 * self.seq * self.query_width * (0.5 if self.causal else 1.0)
        dense = self.layers - self.expert_layers
        experts = self.expert_layers * 2 * (self.topk * self.ffn_parameters + self.shared_parameters)
        return (
            self.layers * (each + scores)
            + dense * 2 * self.ffn_parameters
            + experts
            + 2 * self.predicted * self.embedding_parameters
        )
