"""What clients ask for, as arrays over requests: drawn from a seed, or replayed from a trace.

Each thing that is drawn has a generator of its own, so that another arrival rate leaves the lengths as they were.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray

from toka.core.blocks import Ints
from toka.errors import ConfigError

Floats = NDArray[np.float64]


class Lognormal(NamedTuple):
    """Lengths in tokens: lognormal, rounded, clipped to low … high."""

    mean: float
    """Before clipping."""
    sigma: float
    """Standard deviation of the logarithm; 0: every length is the mean."""
    low: int
    high: int

    def draw(self, generator: np.random.Generator, count: int) -> Ints:
        """Lengths, int32[count]."""
        lengths = generator.lognormal(np.log(self.mean) - self.sigma**2 / 2, self.sigma, count)
        return np.clip(np.rint(lengths), self.low, self.high).astype(np.int32)


class Shape(NamedTuple):
    """How requests look."""

    own: Lognormal
    """The part of a prompt that no other prompt has."""
    output: Lognormal
    """What a sequence generates if it may."""
    samples: int = 1
    """Sequences of a request."""
    prefix: int = 0
    """Tokens that all the prompts of a group begin with."""
    groups: int = 1
    """Groups, all as likely."""


SHAREGPT = Shape(own=Lognormal(230, 1.2, 4, 2048), output=Lognormal(205, 0.9, 4, 1024))
"""Chats: 213 tokens in and 201 out on average, 108 and 133 in the median."""
MONKEYS = Shape(own=Lognormal(96, 0, 1, 96), output=Lognormal(200, 0, 1, 200), samples=64, prefix=1024)
"""Many samples of each question (Brown and others 2024), behind one prefix of examples."""


class Asked(NamedTuple):
    """How much clients ask for: more than they will get."""

    tokens: int | None = 1024
    """max_tokens of every request. None: what its longest sample will generate, times 1 + e^(spread · normal)."""
    spread: float = 0.5


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in the order of their arrival. Sequence `request * samples + i` is sample i of a request."""

    arrival: Floats
    """Seconds, float64[requests], never falling."""
    own: Ints
    """Tokens of the prompt that are the request's own, at least one, int32[requests]."""
    prefix: Ints
    """Tokens of the prompt before these, shared with its group, int32[requests]."""
    group: Ints
    output: Ints
    """What each sequence would generate if it could, int32[requests * samples]."""
    limit: Ints
    """max_tokens of each request, int32[requests]."""
    samples: int = 1
    concurrency: int | None = None
    """Closed loop: so many requests are open at any time, and `arrival` does not matter."""
    tenant: tuple[str, ...] = ()
    """Whose each request is; empty: all of one."""
    batch: tuple[bool, ...] = ()
    """Which requests are of the batch lane; empty: none."""

    @property
    def requests(self) -> int:
        """How many."""
        return len(self.arrival)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence if it runs to its limit."""
        return int((self.own + self.prefix + self.limit).max(initial=1))

    @property
    def prompt_tokens(self) -> int:
        """Over all sequences: a prompt counts once for each of its samples."""
        return int((self.own.astype(np.int64) + self.prefix).sum()) * self.samples

    @property
    def outputs(self) -> Ints:
        """What each sequence will generate, int32[requests * samples]."""
        return np.minimum(self.output, np.repeat(self.limit, self.samples))

    def prompt(self, request: int) -> Ints:
        """Token ids, int32[tokens]. Prompts of a group begin alike; from the first token of its own on a prompt is
        like no other."""
        prefix = int(self.prefix[request])
        ids: Ints = np.zeros(prefix + int(self.own[request]), dtype=np.int32)
        ids[0] = -1 - self.group[request]
        ids[prefix] = request + 1
        return ids

    def arriving(self, *, rate: float | None, concurrency: int | None, seed: int) -> "Workload":
        """The same requests, as a Poisson process of `rate` a second, or `concurrency` at a time, or, with neither, all
        at once."""
        arrival = np.zeros(self.requests)
        if rate is not None:
            arrival = np.random.default_rng([seed, 1]).exponential(1 / rate, self.requests).cumsum()
        return replace(self, arrival=arrival, concurrency=concurrency)


def synthetic(shape: Shape, asked: Asked, requests: int, seed: int) -> Workload:
    """Requests of a shape, all at once."""
    generator = np.random.default_rng(seed)
    own = shape.own.draw(generator, requests)
    output = shape.output.draw(generator, requests * shape.samples)
    if asked.tokens is None:
        multiple = 1 + np.exp(asked.spread * np.random.default_rng([seed, 2]).standard_normal(requests))
        limit = np.ceil(output.reshape(requests, shape.samples).max(axis=1) * multiple).astype(np.int32)
    else:
        limit = np.full(requests, asked.tokens, dtype=np.int32)
    return Workload(
        arrival=np.zeros(requests),
        own=own,
        prefix=np.full(requests, shape.prefix, dtype=np.int32),
        group=np.random.default_rng([seed, 3]).integers(shape.groups, size=requests, dtype=np.int32),
        output=output,
        limit=limit,
        samples=shape.samples,
    )


class Traced(Struct, frozen=True, forbid_unknown_fields=True):
    """A line of a trace."""

    arrival: Annotated[float, Meta(ge=0)]
    """Seconds."""
    input_tokens: Annotated[int, Meta(ge=1)]
    output_tokens: Annotated[int, Meta(ge=1)]
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    """None: as the command says for all."""
    group: Annotated[int, Meta(ge=0)] = 0
    prefix_tokens: Annotated[int, Meta(ge=0)] = 0
    """Of the input, shared with its group."""
    tenant: str = ""
    batch: bool = False
    """In the batch lane."""


def replayed(path: Path, asked: Asked, requests: int | None, seed: int) -> Workload:
    """The first `requests` lines of a trace, one JSON object (`Traced`) a line. Raises ConfigError."""
    try:
        lines = msgspec.json.Decoder(Traced).decode_lines(path.read_bytes())
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"trace={path}: {error.strerror if isinstance(error, OSError) else error}") from None
    lines = sorted(lines, key=lambda line: line.arrival)[:requests]
    if not lines:
        raise ConfigError(f"trace={path} has no requests")
    if any(line.prefix_tokens >= line.input_tokens for line in lines):
        raise ConfigError(f"trace={path}: prefix_tokens must be fewer than input_tokens")
    output = np.array([line.output_tokens for line in lines], dtype=np.int32)
    multiple = 1 + np.exp(asked.spread * np.random.default_rng([seed, 2]).standard_normal(len(lines)))
    usual = np.ceil(output * multiple).astype(int) if asked.tokens is None else np.full(len(lines), asked.tokens)
    prefix = np.array([line.prefix_tokens for line in lines], dtype=np.int32)
    return Workload(
        arrival=np.array([line.arrival for line in lines]),
        own=np.array([line.input_tokens for line in lines], dtype=np.int32) - prefix,
        prefix=prefix,
        group=np.array([line.group for line in lines], dtype=np.int32),
        output=output,
        limit=np.array(
            [line.max_tokens or own for line, own in zip(lines, usual.tolist(), strict=True)], dtype=np.int32
        ),
        tenant=tuple(line.tenant for line in lines),
        batch=tuple(line.batch for line in lines),
    )
