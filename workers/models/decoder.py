"""A dense decoder: Llama, Mistral, Qwen2 and Qwen3 by flags of `ModelConfig`.

The model is arithmetic: token ids and positions in, hidden states out. It knows nothing of sequences, slots or blocks.
What joins a token to those before it is the `Attention` that is passed in, which keeps their keys and values; weights
are put in place by `workers/weights.py`.

Shapes in names and comments:

    T  tokens of the step, of all its rows         H  query heads          D  size of a head
    S  tokens whose logits are wanted              K  key-value heads      F  size of the feed-forward part
    C  size of the hidden state                    V  vocabulary
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from workers.attention.base import Attention
from workers.layers.embedding import Embedding
from workers.layers.linear import Linear
from workers.layers.mlp import GatedMLP
from workers.layers.norm import RMSNorm
from workers.layers.ops import Ops, ops_for
from workers.layers.rope import Rope, Rotation
from workers.models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class SelfAttention:
    """Attention on a normalised copy of the residual, and the projections around it."""

    norm: RMSNorm
    qkv: Linear
    """C → (H + 2K)·D: all queries, then all keys, then all values."""
    output: Linear
    """H·D → C."""
    q_norm: RMSNorm | None
    k_norm: RMSNorm | None
    index: int
    """Which layer of the KV cache."""
    num_heads: int
    num_kv_heads: int
    head_dim: int

    def __call__(
        self, x_TC: Tensor, residual_TC: Tensor | None, rotation: Rotation, attention: Attention
    ) -> tuple[Tensor, Tensor]:
        """What the part before gave and its residual, None where there is no part before → this part's output, and the
        residual that it is still to be added to."""
        heads, kv_heads = self.num_heads, self.num_kv_heads
        qkv, residual_TC = self.norm.product(x_TC, residual_TC, self.qkv)
        qkv_THD = qkv.view(-1, heads + 2 * kv_heads, self.head_dim)
        q_THD, k_TKD, v_TKD = torch.split(qkv_THD, [heads, kv_heads, kv_heads], dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q_THD, k_TKD = self.q_norm(q_THD), self.k_norm(k_TKD)
        out_THD = attention.run(q_THD, k_TKD, v_TKD, rotation, self.index)
        return self.output(out_THD.reshape(-1, heads * self.head_dim)), residual_TC


@dataclass(frozen=True, slots=True)
class Layer:
    """Attention, then the feed-forward part."""

    attention: SelfAttention
    mlp: GatedMLP

    def __call__(
        self, x_TC: Tensor, residual_TC: Tensor | None, rotation: Rotation, attention: Attention
    ) -> tuple[Tensor, Tensor]:
        """As its parts."""
        x_TC, residual_TC = self.attention(x_TC, residual_TC, rotation, attention)
        return self.mlp(x_TC, residual_TC)


@dataclass(frozen=True, slots=True)
class Decoder:
    """The whole model."""

    config: ModelConfig
    embedding: Embedding
    rope: Rope
    layers: tuple[Layer, ...]
    norm: RMSNorm
    head_VC: Tensor
    """Output projection; the embedding's own weight where they are tied."""
    ops: Ops

    @classmethod
    def empty(cls, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> "Decoder":
        """A model whose weights are allocated and hold nothing yet."""
        ops = ops_for(device)

        def weight(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        def linear(rows: int, columns: int, bias: bool) -> Linear:
            return Linear(weight(rows, columns), weight(rows) if bias else None, ops)

        def norm(size: int) -> RMSNorm:
            return RMSNorm(weight(size), config.norm_eps, ops)

        def layer(index: int) -> Layer:
            attention = SelfAttention(
                norm=norm(config.hidden_size),
                qkv=linear(config.qkv_size, config.hidden_size, config.qkv_bias),
                output=linear(config.hidden_size, config.num_heads * config.head_dim, config.output_bias),
                q_norm=norm(config.head_dim) if config.qk_norm else None,
                k_norm=norm(config.head_dim) if config.qk_norm else None,
                index=index,
                num_heads=config.num_heads,
                num_kv_heads=config.num_kv_heads,
                head_dim=config.head_dim,
            )
            mlp = GatedMLP(
                norm=norm(config.hidden_size),
                gate_up=linear(2 * config.intermediate_size, config.hidden_size, config.mlp_bias),
                down=linear(config.hidden_size, config.intermediate_size, config.mlp_bias),
            )
            return Layer(attention, mlp)

        embedding = Embedding(weight(config.vocab_size, config.hidden_size))
        return cls(
            config=config,
            embedding=embedding,
            rope=Rope.build(config, device),
            layers=tuple(layer(index) for index in range(config.num_layers)),
            norm=norm(config.hidden_size),
            head_VC=embedding.weight if config.tied_embeddings else weight(config.vocab_size, config.hidden_size),
            ops=ops,
        )

    @property
    def vocab_size(self) -> int:
        """Logits a token."""
        return self.config.vocab_size

    def forward(self, tokens: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """int64[T] ids at int64[T] positions → the hidden state after the last norm, [T, C]."""
        x_TC, residual_TC = self.embedding(tokens), None
        rotation = self.rope(positions)
        for layer in self.layers:
            x_TC, residual_TC = layer(x_TC, residual_TC, rotation, attention)
        return self.norm(x_TC) if residual_TC is None else self.norm.add(x_TC, residual_TC)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """[S, C] → [S, V], in the weights' dtype."""
        return self.ops.product(hidden, self.head_VC, None)
