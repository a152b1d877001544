"""The options of `python -m workers`, and how a command line and torchrun's environment become one frozen struct."""

import difflib
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta, Struct

from toka.wire import ANY_RANK


class OptionError(Exception):
    """An option that does not exist or has a wrong value. `str(error)` is one line for a person."""


class Config(Struct, frozen=True, kw_only=True):
    """The options of one worker. Each field's description is its help text."""

    engine: Annotated[
        str,
        Meta(
            pattern=r"^(tcp://.+:\d+|ipc://.+)$",
            description="the engine's control address, tcp://HOST:PORT or ipc://PATH",
        ),
    ]
    rank: Annotated[
        int,
        Meta(ge=ANY_RANK, description="this worker's rank, from 0; default: torchrun's RANK, or the first free"),
    ] = ANY_RANK
    device: Annotated[
        Literal["auto", "cpu", "cuda"], Meta(description="auto, cpu or cuda; auto: cuda where there is one")
    ] = "auto"
    local_rank: Annotated[
        int, Meta(ge=0, description="which of this machine's CUDA devices; default: torchrun's LOCAL_RANK, or 0")
    ] = 0
    threads: Annotated[int, Meta(ge=0, description="CPU threads of torch, 1 or more; 0: torch's own default")] = 0
    parent: Annotated[
        Literal["none", "stdin"], Meta(description="none or stdin; stdin: leave when standard input reaches its end")
    ] = "none"
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="debug, info, warning or error")
    ] = "info"
    log_format: Annotated[
        Literal["text", "json"], Meta(description="text or json; json: each line of the log is an object")
    ] = "text"


_HINTS = get_type_hints(Config, include_extras=True)


def parse(arguments: Sequence[str], environment: Mapping[str, str]) -> Config:
    """The options in `key=value`, `--key value` or `--key=value`, over what torchrun says in `environment`.

    Raises OptionError, naming the option, what it takes and, for a key that does not exist, the nearest that does.
    """
    values = {
        key: environment[variable]
        for key, variable in (("rank", "RANK"), ("local_rank", "LOCAL_RANK"))
        if variable in environment
    }
    values.update(_pairs(arguments))
    if "engine" not in values:
        raise OptionError(f"engine=ADDRESS is missing: {_description('engine')}, as the server prints it")
    for key, value in values.items():
        try:
            msgspec.convert(value, _HINTS[key], strict=False)
            if key == "engine" and value.startswith("tcp://") and not 0 < int(value.rpartition(":")[2]) < 2**16:
                raise msgspec.ValidationError
        except msgspec.ValidationError:
            raise OptionError(f"{key}={value} will not do: {_description(key)}{_hint(value, _choices(key))}") from None
    return msgspec.convert(values, Config, strict=False)


def usage() -> str:
    """The help text."""
    lines = [f"  {key:<11} {_description(key)}" for key in _HINTS]
    head = "python -m workers engine=tcp://HOST:PORT [key=value …]: one worker of a toka engine"
    return "\n".join([head, *lines, ""])


def _pairs(arguments: Sequence[str]) -> dict[str, str]:
    values: dict[str, str] = {}
    rest = iter(arguments)
    for argument in rest:
        name, equals, value = argument.partition("=")
        key = name.removeprefix("--").replace("-", "_")
        if not equals and not name.startswith("--"):
            raise OptionError(f"{argument!r} is no option: write key=value or --key value{_hint(key, list(_HINTS))}")
        if key not in _HINTS:
            raise OptionError(f"there is no option {key!r}{_hint(key, list(_HINTS))}")
        if not equals:
            following = next(rest, None)
            if following is None:
                raise OptionError(f"{argument} needs a value: {_description(key)}")
            value = following
        if key in values:
            raise OptionError(f"{key} is given twice: {key}={values[key]} and {key}={value}; leave one out")
        values[key] = value
    return values


def _description(key: str) -> str:
    return next(note.description for note in _HINTS[key].__metadata__ if isinstance(note, Meta)) or ""


def _choices(key: str) -> list[str]:
    kind = _HINTS[key].__origin__
    return list(get_args(kind)) if get_origin(kind) is Literal else []


def _hint(word: str, known: list[str]) -> str:
    near = difflib.get_close_matches(word, known, n=1)
    return f" (did you mean {near[0]}?)" if near else ""
