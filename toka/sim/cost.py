"""What a step costs: a linear model of the device's time, and what the way there and the engine add."""

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta, Struct

from toka.errors import ConfigError

FOLDER = Path(__file__).parent / "costs"
"""The models that come with toka; `h200-1b` names the file `h200-1b.toml` in it."""
Seconds = Annotated[float, Meta(ge=0)]


class Work(NamedTuple):
    """What one step has to do."""

    rows: int = 0
    """Sequences that decode."""
    kv_tokens: int = 0
    """Tokens whose keys and values the decoding sequences read; what a Hydragen group shares is read once."""
    prefill_tokens: int = 0
    prefill_pairs: int = 0
    """Pairs of a prefilled token and one that it attends to, itself included."""


class Costs(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds. The first five are the device's."""

    step: Seconds
    """Of any step: reading the weights, launching, sampling the first row."""
    row: Seconds
    """Of a decoding sequence."""
    kv_token: Seconds
    """Of each token whose keys and values are read in decoding."""
    prefill_token: Seconds
    prefill_pair: Seconds
    round_trip: Seconds = 0.0
    """From the engine to the device and back, half each way."""
    engine_step: Seconds = 0.0
    """Of the engine's process, for planning a step and taking in its results."""
    engine_token: Seconds = 0.0
    """Of the engine's process, for the text of a token and its way out."""
    engine_request: Seconds = 0.0
    """Of the engine's process, for a request's way in."""

    def seconds(self, work: Work) -> float:
        """How long the device takes."""
        return (
            self.step
            + self.row * work.rows
            + self.kv_token * work.kv_tokens
            + self.prefill_token * work.prefill_tokens
            + self.prefill_pair * work.prefill_pairs
        )

    @classmethod
    def load(cls, name: str) -> "Costs":
        """From a TOML file, or one of those that come with toka. Raises ConfigError."""
        own = FOLDER / f"{name}.toml"
        path = own if own.is_file() else Path(name).expanduser()
        try:
            with path.open("rb") as file:
                return msgspec.convert(tomllib.load(file), cls)
        except (OSError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
            known = ", ".join(sorted(file.stem for file in FOLDER.glob("*.toml")))
            reason = error.strerror if isinstance(error, OSError) else error
            raise ConfigError(f"costs={name}: {reason}; give a TOML file, or one of: {known}") from None

    def toml(self) -> str:
        """The file that `load` reads."""
        return "".join(f"{name} = {getattr(self, name):.4g}\n" for name in self.__struct_fields__)


class Measured(Struct, frozen=True, forbid_unknown_fields=True):
    """A step that was measured."""

    seconds: Annotated[float, Meta(gt=0)]
    rows: int = 0
    kv_tokens: int = 0
    prefill_tokens: int = 0
    prefill_pairs: int = 0


def measured(path: Path) -> list[Measured]:
    """Steps from a file with one JSON object a line. Raises ConfigError."""
    try:
        return msgspec.json.Decoder(Measured).decode_lines(path.read_bytes())
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{path}: {error.strerror if isinstance(error, OSError) else error}") from None


def fit(steps: Sequence[Measured]) -> Costs:
    """The costs that come closest to measured steps, none of them negative, by least squares of the relative error.
    A kind of work that no step did costs nothing. Raises ConfigError without steps."""
    if not steps:
        raise ConfigError("there are no measured steps to fit costs to")
    work = np.array([[1, one.rows, one.kv_tokens, one.prefill_tokens, one.prefill_pairs] for one in steps], dtype=float)
    work /= np.array([[one.seconds] for one in steps])
    scale = np.maximum(np.abs(work).max(axis=0), 1e-300)
    found = np.zeros(5)
    active = np.flatnonzero(work.any(axis=0))
    while len(active):
        solution = np.linalg.lstsq(work[:, active] / scale[active], np.ones(len(work)))[0]
        if solution.min() >= 0:
            found[active] = solution / scale[active]
            break
        active = np.delete(active, solution.argmin())
    return Costs(step=found[0], row=found[1], kv_token=found[2], prefill_token=found[3], prefill_pair=found[4])
