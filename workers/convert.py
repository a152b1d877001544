"""`python -m workers convert FILE.gguf FOLDER`: a GGUF file as an ordinary model folder, in bfloat16.

The engine runs it in a child process, for it needs torch and transformers. stdout says how far it has come, a line
`DONE/TOTAL` a tensor.
"""

import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader, ReaderTensor
from gguf.quants import dequantize
from safetensors.torch import save_file

from workers.errors import WorkerError

TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""GGUF's names of tensors, and Hugging Face's."""


def main(arguments: Sequence[str]) -> int:
    """Convert as `arguments` say: the GGUF file, then a folder to make. Returns the exit code."""
    if len(arguments) != 2:
        sys.stderr.write("usage: python -m workers convert FILE.gguf FOLDER\n")
        return 2
    try:
        convert(Path(arguments[0]), Path(arguments[1]))
    except WorkerError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


def convert(file: Path, folder: Path) -> None:
    """Write the model in `file` to `folder`: weights, config, tokenizer, chat template. Raises WorkerError."""
    try:
        reader = GGUFReader(file)
    except FileNotFoundError:
        raise WorkerError(f"{file} does not exist") from None
    except (OSError, ValueError, IndexError, KeyError) as error:  # what gguf's reader raises for other content
        raise WorkerError(f"{file} is not a GGUF file, or is cut short ({error}); fetch it again") from None
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    config = model_config(metadata, {tensor.name: int(tensor.shape[-1]) for tensor in reader.tensors})
    names = [hugging_face_name(tensor.name) for tensor in reader.tensors]
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", config)
    generation = {name: value for name, value in config.items() if name.endswith("_token_id")}
    _write_json(folder / "generation_config.json", generation)
    _write_tokenizer(file, folder)
    weights: dict[str, torch.Tensor] = {}
    for done, (name, tensor) in enumerate(zip(names, reader.tensors, strict=True), 1):
        weights[name] = _values(tensor, config).to(torch.bfloat16)
        sys.stdout.write(f"{done}/{len(reader.tensors)}\n")
        sys.stdout.flush()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def model_config(metadata: Mapping[str, Any], tensors: Mapping[str, int]) -> dict[str, Any]:
    """config.json from a GGUF file's metadata and the rows of its tensors. Raises WorkerError for another model."""
    architecture = metadata.get("general.architecture")
    if architecture != "llama":
        raise WorkerError(f"the GGUF file holds a model of architecture {architecture}; only llama can be converted")
    scaling = metadata.get("llama.rope.scaling.type", "none")
    if scaling != "none" or "rope_freqs.weight" in tensors:
        raise WorkerError("the GGUF file scales its rotary embedding, which cannot be converted; use the safetensors")
    if "llama.expert_count" in metadata:
        raise WorkerError("the GGUF file holds a mixture of experts, which cannot be converted; use the safetensors")
    try:
        heads = int(metadata["llama.attention.head_count"])
        hidden = int(metadata["llama.embedding_length"])
        config: dict[str, Any] = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": tensors["token_embd.weight"],
            "hidden_size": hidden,
            "intermediate_size": int(metadata["llama.feed_forward_length"]),
            "num_hidden_layers": int(metadata["llama.block_count"]),
            "num_attention_heads": heads,
            "num_key_value_heads": int(metadata.get("llama.attention.head_count_kv", heads)),
            "head_dim": int(metadata.get("llama.attention.key_length", hidden // heads)),
            "hidden_act": "silu",
            "max_position_embeddings": int(metadata["llama.context_length"]),
            "rms_norm_eps": float(metadata["llama.attention.layer_norm_rms_epsilon"]),
            "rope_parameters": {
                "rope_theta": float(metadata.get("llama.rope.freq_base", 10000.0)),
                "rope_type": "default",
            },
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": "output.weight" not in tensors,
            "dtype": "bfloat16",
        }
    except KeyError as error:
        raise WorkerError(f"the GGUF file lacks {error.args[0]}; fetch it again") from None
    if metadata.get("llama.rope.dimension_count", config["head_dim"]) != config["head_dim"]:
        raise WorkerError("the GGUF file rotates a part of each head only, which cannot be converted")
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if id is not None:
            config[f"{name}_token_id"] = int(id)
    return config


def hugging_face_name(name: str) -> str:
    """What Hugging Face calls the tensor that GGUF calls `name`. Raises WorkerError for one that Llama lacks."""
    if (match := re.fullmatch(r"(\w+)\.weight", name)) and match[1] in TOP:
        return f"{TOP[match[1]]}.weight"
    if (match := re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)) and match[2] in LAYER:
        return f"model.layers.{match[1]}.{LAYER[match[2]]}.weight"
    raise WorkerError(f"the GGUF file has a tensor {name}, which cannot be converted; use the safetensors")


def _values(tensor: ReaderTensor, config: Mapping[str, Any]) -> torch.Tensor:
    """The tensor in float32, with its rows as Hugging Face orders them."""
    try:
        values = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
    except NotImplementedError:
        raise WorkerError(
            f"the GGUF file is quantised as {tensor.tensor_type.name}, which cannot be converted"
        ) from None
    if tensor.name.endswith("attn_q.weight"):
        return _unpermute(values, config["num_attention_heads"])
    if tensor.name.endswith("attn_k.weight"):
        return _unpermute(values, config["num_key_value_heads"])
    return values


def _unpermute(values: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of q or k, [heads · head_dim, hidden]. GGUF has the two halves of each head, which rotate together,
    interleaved; Hugging Face has one behind the other."""
    rows, columns = values.shape
    return values.view(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


def _write_tokenizer(file: Path, folder: Path) -> None:
    """tokenizer.json, tokenizer_config.json and chat_template.jinja, by transformers' own reading of GGUF."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
    tokenizer.save_pretrained(folder)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
