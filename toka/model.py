"""What the engine must know of a model, read from its folder's JSON files. Weights are the workers' business."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import msgspec

from toka.errors import StartError
from toka.request import Sampling
from toka.text.files import read_json, special_tokens

SUPPORTED = ("llama", "mistral", "qwen2", "qwen3")
"""Values of `model_type` in config.json that workers can run."""

END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>", "<|end_of_turn|>")
"""Tokens with which chat models end their turn. Not every folder names its own as its end of text."""

DEFAULTS = {
    "temperature": (0.0, 100.0),
    "top_p": (math.ulp(0.0), 1.0),
    "top_k": (0, 1 << 31),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (math.ulp(0.0), 1e6),
}
"""What a generation_config.json may say of sampling, and the least and the largest value."""
UNSERVED: Mapping[str, float] = {
    "typical_p": 1,
    "epsilon_cutoff": 0,
    "eta_cutoff": 0,
    "no_repeat_ngram_size": 0,
    "min_new_tokens": 0,
    "num_beams": 1,
}
"""What a generation_config.json may ask of sampling and does not get here, and the values that ask for nothing."""


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A model that can be served."""

    path: Path
    """Absolute."""
    model_type: str
    architectures: tuple[str, ...]
    vocab_size: int
    """Rows of the embedding; the tokenizer may have fewer tokens."""
    max_position_embeddings: int
    """Longest sequence that the model takes, in tokens."""
    eos_ids: tuple[int, ...]
    """Ids that end an answer, ascending: those in config.json and generation_config.json, the tokenizer's, and the
    chat template's end of turn."""
    generation_defaults: Sampling
    """How the model's makers sample: generation_config.json, and OpenAI's values for what it leaves out."""
    unserved_defaults: tuple[str, ...]
    """What generation_config.json sets besides and is not supported, as `name=value`."""
    served_name: str
    """The model's name in the API: its hub id, or the folder's last part."""

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a folder. Raises StartError, one line, for one that is no model or not one that can be served."""
        path = path.expanduser().resolve()
        if not path.is_dir():
            raise StartError(f"model={path}: no such folder")
        if not (path / "config.json").is_file():
            raise StartError(f"{path} has no config.json, so it is no model folder; name the folder that has one")
        config, generation = read_json(path / "config.json"), read_json(path / "generation_config.json")
        file = path / "config.json"
        model_type = config.get("model_type")
        if model_type not in SUPPORTED:
            raise StartError(f"{file}: model_type {model_type} is not supported; supported are {', '.join(SUPPORTED)}")
        _refuse(file, config)
        return cls(
            path=path,
            model_type=model_type,
            architectures=tuple(map(str, config.get("architectures") or ())),
            vocab_size=_count(file, config, "vocab_size"),
            max_position_embeddings=_count(file, config, "max_position_embeddings"),
            eos_ids=_eos_ids(path, config, generation),
            generation_defaults=_sampling(path / "generation_config.json", generation),
            unserved_defaults=_unserved(generation),
            served_name=_name(path),
        )


def _refuse(file: Path, config: Mapping[str, Any]) -> None:
    """Raises StartError for a model that would be run wrongly."""
    if config.get("auto_map"):
        raise StartError(
            f"{file} has an auto_map: the model brings code of its own (trust_remote_code), which is not run;"
            " take a version of it that transformers knows by itself"
        )
    if config.get("quantization_config"):
        quantization = config["quantization_config"]
        method = quantization.get("quant_method", "unnamed") if isinstance(quantization, dict) else quantization
        raise StartError(
            f"{file} has a quantization_config ({method}): quantised weights are not supported;"
            " take the model in bfloat16, float16 or float32"
        )
    window = _window(file, config)
    if window is not None and window < _count(file, config, "max_position_embeddings"):
        raise StartError(
            f"{file}: sliding-window attention (over {window} tokens) is not supported; with max_position_embeddings"
            f" set to {window} in that file, sequences stay within the window, and the model can be served"
        )


def _window(file: Path, config: Mapping[str, Any]) -> int | None:
    """Tokens that some layer of the model sees at most; None: all."""
    match config["model_type"]:
        case "mistral":
            used = True
        case "qwen2" | "qwen3":
            kinds, first = config.get("layer_types"), config.get("max_window_layers", 28)
            if isinstance(kinds, list):
                used = "sliding_attention" in kinds
            else:
                some = isinstance(first, int) and first < _count(file, config, "num_hidden_layers")
                used = bool(config.get("use_sliding_window")) and some
        case _:
            used = False
    window = config.get("sliding_window", 4096) if used else None
    return window if isinstance(window, int) else None


def _count(file: Path, config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        shown = "nothing" if value is None else repr(value)
        raise StartError(f"{file} has {shown} for {name}, a whole number from 1 on is needed; fetch the model again")
    return value


def _eos_ids(path: Path, config: Mapping[str, Any], generation: Mapping[str, Any]) -> tuple[int, ...]:
    found: set[int] = set()
    for source in (config, generation):
        value = source.get("eos_token_id")
        found.update(id for id in (value if isinstance(value, list) else [value]) if isinstance(id, int) and id >= 0)
    added = _added_tokens(path)
    template = _template_text(path)
    ends = [special_tokens(path).get("eos_token"), *(token for token in END_OF_TURN if token in template)]
    found.update(added[token] for token in ends if token in added)
    return tuple(sorted(found))


class _Added(msgspec.Struct):
    id: int
    content: str


class _TokenizerFile(msgspec.Struct):
    """The part of tokenizer.json that is wanted; the vocabulary is skipped unread."""

    added_tokens: list[_Added] = []


def _added_tokens(path: Path) -> dict[str, int]:
    """Ids of the tokens that tokenizer.json sets apart from its vocabulary; none if there is no such file."""
    file = path / "tokenizer.json"
    if not file.is_file():
        return {}
    try:
        read = msgspec.json.decode(file.read_bytes(), type=_TokenizerFile)
    except (msgspec.DecodeError, OSError) as error:
        raise StartError(f"{file} is not a tokenizer ({error}); fetch the model again") from None
    return {token.content: token.id for token in read.added_tokens}


def _template_text(path: Path) -> str:
    """The source of all chat templates, to look for a token in."""
    files = [path / "chat_template.jinja", *sorted((path / "additional_chat_templates").glob("*.jinja"))]
    texts = [file.read_text(encoding="utf-8", errors="replace") for file in files if file.is_file()]
    return "\n".join([*texts, str(read_json(path / "tokenizer_config.json").get("chat_template"))])


def _sampling(file: Path, generation: Mapping[str, Any]) -> Sampling:
    found: dict[str, Any] = {}
    for name, (low, high) in DEFAULTS.items():
        value = generation.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise StartError(f"{file} has {value!r} for {name}, which cannot be; mend it or fetch the model again")
        found[name] = int(value) if name == "top_k" else float(value)
    return Sampling(**found)


def _unserved(generation: Mapping[str, Any]) -> tuple[str, ...]:
    values = {name: generation.get(name) for name in UNSERVED}
    return tuple(f"{name}={value}" for name, value in values.items() if value not in (None, UNSERVED[name]))


def _name(path: Path) -> str:
    """The hub id if the folder lies in huggingface-hub's cache (models--OWNER--NAME/snapshots/COMMIT)."""
    repository = path.parent.parent.name
    if path.parent.name == "snapshots" and repository.startswith("models--"):
        return repository.removeprefix("models--").replace("--", "/", 1)
    return path.name
