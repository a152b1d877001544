"""What a model is, as its folder's config.json says it. Imports no torch: the memory plan reads it too."""

import math
from dataclasses import dataclass
from pathlib import Path

from workers.errors import WorkerError
from workers.models.fields import Fields, read_json


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Every position divided by `factor` ("linear")."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Low frequencies divided by `factor`, high ones kept, and a ramp between them ("llama3")."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_length: int
    """Context in tokens before the extension."""


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """Interpolation by parts and a warmer softmax ("yarn"; Peng et al. 2023, arXiv:2309.00071, section 3)."""

    factor: float
    original_length: int
    """Context in tokens before the extension."""
    beta_fast: float
    beta_slow: float
    attention_factor: float
    """What rotated queries and keys are multiplied by."""
    truncate: bool
    """Round the ends of the ramp to whole dimensions."""


Scaling = LinearScaling | Llama3Scaling | YarnScaling


@dataclass(frozen=True, slots=True)
class Family:
    """What an architecture fixes and config.json does not say."""

    model_type: str
    attention_bias: bool = False
    """config.json's `attention_bias` counts, for the output projection too."""
    mlp_bias: bool = False
    """config.json's `mlp_bias` counts."""
    qkv_bias: bool = False
    """Queries, keys and values always have biases."""
    qk_norm: bool = False
    head_dim: int | None = None
    """Where config.json has none. None: hidden_size / num_attention_heads."""
    sliding_window: int | None = None
    """Where config.json does not mention one."""
    optional_window: bool = False
    """A window counts only with `use_sliding_window`, and for the layers from `max_window_layers` on."""


FAMILIES = {
    "LlamaForCausalLM": Family("llama", attention_bias=True, mlp_bias=True),
    "MistralForCausalLM": Family("mistral", sliding_window=4096),
    "Qwen2ForCausalLM": Family("qwen2", qkv_bias=True, optional_window=True),
    "Qwen3ForCausalLM": Family("qwen3", attention_bias=True, qk_norm=True, head_dim=128, optional_window=True),
}
"""Every architecture that `decoder.py` computes, by its name in config.json."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a dense decoder. Sizes count elements."""

    architecture: str
    vocab_size: int
    """Rows of the embedding."""
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    max_model_len: int
    """Longest sequence the model takes, in tokens."""
    rope_base: float
    rope_scaling: Scaling | None
    tied_embeddings: bool
    """The output projection is the embedding."""
    qkv_bias: bool
    output_bias: bool
    """Of the attention's output projection."""
    mlp_bias: bool
    qk_norm: bool
    """Queries and keys are normalised per head before they are rotated."""

    @classmethod
    def load(cls, folder: Path) -> "ModelConfig":
        """Read `folder`/config.json. Raises WorkerError for what is missing, wrong, or not computed here."""
        path = folder / "config.json"
        if not path.is_file():
            raise WorkerError(f"{folder} has no config.json: give the folder of a Hugging Face model")
        return cls.parse(Fields(path, read_json(path)))

    @classmethod
    def parse(cls, fields: Fields) -> "ModelConfig":
        """The shape that config.json's fields give. Raises WorkerError."""
        architecture, family = _family(fields)
        if fields.has("quantization_config"):
            method = fields.table("quantization_config").text("quant_method", "an unnamed method")
            fields.refuse(f"the checkpoint is quantised ({method}): use one with float32, bfloat16 or float16 weights")
        activation = fields.text("hidden_act", "silu")
        if activation != "silu":
            fields.refuse(f"hidden_act {activation!r} is not supported, only 'silu' is")
        hidden_size, num_heads = fields.count("hidden_size"), fields.count("num_attention_heads")
        num_kv_heads = fields.count("num_key_value_heads", num_heads)
        if num_heads % num_kv_heads:
            fields.refuse(f"{num_heads} attention heads cannot share {num_kv_heads} key-value heads evenly")
        head_dim = fields.count("head_dim", family.head_dim or max(hidden_size // num_heads, 1))
        if head_dim % 2:
            fields.refuse(f"head_dim {head_dim} is odd, so it cannot be rotated in pairs")
        num_layers, max_model_len = fields.count("num_hidden_layers"), fields.count("max_position_embeddings")
        _refuse_window(fields, family, num_layers, max_model_len)
        rope_base, rope_scaling = _rope(fields, max_model_len)
        attention_bias = family.attention_bias and fields.flag("attention_bias", False)
        return cls(
            architecture=architecture,
            vocab_size=fields.count("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=fields.count("intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            norm_eps=fields.number("rms_norm_eps", 1e-6),
            max_model_len=max_model_len,
            rope_base=rope_base,
            rope_scaling=rope_scaling,
            tied_embeddings=fields.flag("tie_word_embeddings", False),
            qkv_bias=family.qkv_bias or attention_bias,
            output_bias=attention_bias,
            mlp_bias=family.mlp_bias and fields.flag("mlp_bias", False),
            qk_norm=family.qk_norm,
        )

    @property
    def qkv_size(self) -> int:
        """Rows of the fused projection: the queries of all heads, then the keys, then the values."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim


def _family(fields: Fields) -> tuple[str, Family]:
    served = ", ".join(FAMILIES)
    model_type = fields.text("model_type", "")
    named = fields.texts("architectures") or [
        name for name, family in FAMILIES.items() if family.model_type == model_type
    ]
    if not named:
        fields.refuse(f"model_type {model_type!r} is not supported. Supported: {served}")
    architecture = named[0]
    family = FAMILIES.get(architecture)
    if family is None:
        fields.refuse(f"architecture {architecture} is not supported. Supported: {served}")
    if model_type not in ("", family.model_type):
        fields.refuse(f"architecture {architecture} does not go with model_type {model_type!r}")
    return architecture, family


def _refuse_window(fields: Fields, family: Family, num_layers: int, max_model_len: int) -> None:
    """Attention here sees the whole sequence. That is what a window does too while no sequence is longer than it."""
    if family.optional_window:
        from_layer = fields.count("max_window_layers", 28)
        default = fields.flag("use_sliding_window", False) and from_layer < num_layers
        windowed = "sliding_attention" in fields.texts("layer_types") if fields.has("layer_types") else default
        window = fields.count("sliding_window", 4096) if windowed else max_model_len
    elif family.sliding_window is not None:
        absent = family.sliding_window if "sliding_window" not in fields.content else max_model_len
        window = fields.count("sliding_window", absent)
    else:
        return
    if window < max_model_len:
        fields.refuse(
            f"sliding-window attention (over {window} tokens) is not supported. With max_position_embeddings at "
            f"{window} in this file, no sequence outgrows the window, and the model can be served"
        )


def _rope(fields: Fields, max_model_len: int) -> tuple[float, Scaling | None]:
    """The base of the rotation and how it is stretched, from `rope_parameters` or `rope_theta` and `rope_scaling`."""
    rope = fields.table("rope_parameters" if fields.has("rope_parameters") else "rope_scaling")
    if any(isinstance(value, dict) for value in rope.content.values()):
        fields.refuse("rope_parameters that differ between layers are not supported")
    for place in (rope, fields):
        if place.number("partial_rotary_factor", 1.0) != 1.0:
            fields.refuse("a partial_rotary_factor other than 1 is not supported")
    base = rope.number("rope_theta", fields.number("rope_theta", 10_000.0))
    if base <= 1:
        fields.refuse(f"rope_theta is {base:g}, and must be above 1")
    kind = rope.text("rope_type", rope.text("type", "default"))
    original = rope.count("original_max_position_embeddings", max_model_len)
    original = fields.count("original_max_position_embeddings", original)
    match kind:
        case "default":
            return base, None
        case "dynamic":
            # It stretches the base for sequences longer than max_position_embeddings only, and there are none.
            return base, None
        case "linear":
            return base, LinearScaling(rope.number("factor"))
        case "llama3":
            low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
            if low >= high:
                fields.refuse(f"low_freq_factor {low:g} must be below high_freq_factor {high:g}")
            return base, Llama3Scaling(rope.number("factor"), low, high, original)
        case "yarn":
            return base, _yarn(rope, original, max_model_len)
        case _:
            fields.refuse(f"rope_type {kind!r} is not supported. Supported: default, linear, dynamic, llama3, yarn")


def _yarn(rope: Fields, original: int, max_model_len: int) -> YarnScaling:
    factor = rope.number("factor", max_model_len / original)

    def warmth(share: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * share * math.log(factor) + 1.0

    attention_factor = warmth(1.0)
    if rope.has("mscale") and rope.has("mscale_all_dim"):
        attention_factor = warmth(rope.number("mscale")) / warmth(rope.number("mscale_all_dim"))
    return YarnScaling(
        factor=factor,
        original_length=original,
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        attention_factor=rope.number("attention_factor", attention_factor),
        truncate=rope.flag("truncate", True),
    )
