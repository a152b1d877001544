"""The small JSON files of a model folder."""

import json
from pathlib import Path
from typing import Any

from toka.errors import StartError


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if there is no such file. Raises StartError if the file holds anything else."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise StartError(f"{path} cannot be read: {error.strerror or error}") from None
    except ValueError as error:  # JSONDecodeError, or bytes that are not UTF-8
        raise StartError(f"{path} is not valid JSON ({error}); fetch the model again") from None
    if not isinstance(value, dict):
        raise StartError(f"{path} holds no JSON object; fetch the model again")
    return value


def special_tokens(folder: Path) -> dict[str, str]:
    """The tokens that the folder gives a name, such as `bos_token`, as transformers reads them.

    They stand in tokenizer_config.json; older folders have some in special_tokens_map.json.
    """
    settings = read_json(folder / "tokenizer_config.json")
    if "added_tokens_decoder" not in settings:
        settings |= read_json(folder / "special_tokens_map.json")
    named = {name: token_text(value) for name, value in settings.items() if name.endswith("_token")}
    extra = settings.get("extra_special_tokens")
    if isinstance(extra, dict):
        named |= {name: token_text(value) for name, value in extra.items()}
    return {name: text for name, text in named.items() if text is not None}


def token_text(value: object) -> str | None:
    """A token as the JSON files write it: a string, or an object with `content`. None for anything else."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None
