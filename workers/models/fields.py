"""A JSON file of a model folder, read field by field with the types it must have."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from workers.errors import WorkerError


def read_json(path: Path) -> dict[str, object]:
    """A JSON object. Raises WorkerError, naming the file, for anything else."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise WorkerError(f"{path} cannot be read as JSON ({error}): download the model again") from error
    if not isinstance(content, dict):
        raise WorkerError(f"{path} holds no JSON object: download the model again")
    return content


@dataclass(frozen=True, slots=True)
class Fields:
    """Fields of one JSON object. A field that is null counts as absent; one of a wrong type raises WorkerError."""

    path: Path
    """The file, to name in errors."""
    content: Mapping[str, object]

    def refuse(self, reason: str) -> NoReturn:
        """Raise WorkerError with the file's name before the reason."""
        raise WorkerError(f"{self.path}: {reason}")

    def has(self, key: str) -> bool:
        """Whether the field is there and not null."""
        return self.content.get(key) is not None

    def count(self, key: str, default: int | None = None) -> int:
        """A whole number from 1 up. Without a default the field must be there."""
        value = self.content.get(key)
        if value is None:
            if default is None:
                self.refuse(f"{key} is missing")
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**31:
            self.refuse(f"{key} is {value!r}, and must be a whole number from 1 up")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number above 0. Without a default the field must be there."""
        value = self.content.get(key)
        if value is None:
            if default is None:
                self.refuse(f"{key} is missing")
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            self.refuse(f"{key} is {value!r}, and must be a number above 0")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self.content.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.refuse(f"{key} is {value!r}, and must be true or false")
        return value

    def text(self, key: str, default: str) -> str:
        """A string."""
        value = self.content.get(key)
        if value is None:
            return default
        if not isinstance(value, str):
            self.refuse(f"{key} is {value!r}, and must be a string")
        return value

    def texts(self, key: str) -> list[str]:
        """A list of strings, empty if absent."""
        value = self.content.get(key)
        if value is None:
            return []
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            self.refuse(f"{key} must be a list of strings")
        return value

    def table(self, key: str) -> "Fields":
        """An object inside this one, empty if absent."""
        value = self.content.get(key)
        if value is None:
            return Fields(self.path, {})
        if not isinstance(value, dict):
            self.refuse(f"{key} is {value!r}, and must be an object")
        return Fields(self.path, value)
