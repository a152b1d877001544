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
from workers.layers.linear import Linear, product
from workers.layers.mlp import GatedMLP
from workers.layers.norm import RMSNorm
from workers.layers.ops import ops_for
from workers.layers.rope import Rope, Rotation
from workers.models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class SelfAttention:
    """Projections around the attention itself."""

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

    def __call__(self, x_TC: Tensor, rotation: Rotation, attention: Attention) -> Tensor:
        """[T, C] → [T, C]."""
        heads, kv_heads = self.num_heads, self.num_kv_heads
        qkv = self.qkv(x_TC).view(-1, heads + 2 * kv_heads, self.head_dim)
        q_THD, k_TKD, v_TKD = torch.split(qkv, [heads, kv_heads, kv_heads], dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q_THD, k_TKD = self.q_norm(q_THD), self.k_norm(k_TKD)
        out_THD = attention.run(q_THD, k_TKD, v_TKD, rotation, self.index)
        return self.output(out_THD.reshape(-1, heads * self.head_dim))


@dataclass(frozen=True, slots=True)
class Layer:
    """Attention, then the feed-forward part, each on a normalised copy of the residual."""

    input_norm: RMSNorm
    attention: SelfAttention
    post_norm: RMSNorm
    mlp: GatedMLP

    def __call__(
        self, x_TC: Tensor, residual_TC: Tensor | None, rotation: Rotation, attention: Attention
    ) -> tuple[Tensor, Tensor]:
        """What the layer before gave, None for its residual before the first → the last part's output, [T, C], and the
        residual, [T, C], that it is still to be added to."""
        if residual_TC is None:
            x_TC, residual_TC = self.input_norm(x_TC), x_TC
        else:
            x_TC, residual_TC = self.input_norm.add(x_TC, residual_TC)
        x_TC = self.attention(x_TC, rotation, attention)
        x_TC, residual_TC = self.post_norm.add(x_TC, residual_TC)
        return self.mlp(x_TC), residual_TC


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

    @classmethod
    def empty(cls, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> "Decoder":
        """A model whose weights are allocated and hold nothing yet."""
        ops = ops_for(device)

        def weight(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        def linear(rows: int, columns: int, bias: bool) -> Linear:
            return Linear(weight(rows, columns), weight(rows) if bias else None)

        def norm(size: int) -> RMSNorm:
            return RMSNorm(weight(size), config.norm_eps, ops)

        def layer(index: int) -> Layer:
            attention = SelfAttention(
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
                gate_up=linear(2 * config.intermediate_size, config.hidden_size, config.mlp_bias),
                down=linear(config.hidden_size, config.intermediate_size, config.mlp_bias),
                ops=ops,
            )
            return Layer(norm(config.hidden_size), attention, norm(config.hidden_size), mlp)

        embedding = Embedding(weight(config.vocab_size, config.hidden_size))
        return cls(
            config=config,
            embedding=embedding,
            rope=Rope.build(config, device),
            layers=tuple(layer(index) for index in range(config.num_layers)),
            norm=norm(config.hidden_size),
            head_VC=embedding.weight if config.tied_embeddings else weight(config.vocab_size, config.hidden_size),
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
        return product(hidden, self.head_VC, None)
