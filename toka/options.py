"""How text becomes the fields of a struct, each checked: `key=value` words, flags, a TOML file, the environment.

A field's `Meta` is all there is to say about an option: its bounds, and a description that serves as its help text.
"""

import ast
import difflib
import math
import operator
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec
from msgspec import Struct, inspect

from toka.errors import ConfigError

S = TypeVar("S", bound=Struct)

MAX_NUMBER = 2**63
MAX_ARITHMETIC = 100
"""Characters of an expression in parentheses; bounds the work and the depth of parsing one."""

OPERATIONS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}

ELSEWHERE = {
    "tensor_parallel_size": "tp_size",
    "data_parallel_size": "dp_size",
    "pipeline_parallel_size": "pp_size",
    "block_size": "page_size",
    "context_length": "max_model_len",
    "max_num_seqs": "max_seqs_per_forward",
    "max_running_requests": "max_seqs_per_forward",
    "max_num_batched_tokens": "max_tokens_per_forward",
    "chunked_prefill_size": "max_tokens_per_forward",
    "max_total_tokens": "kv_cache_num_tokens",
    "mem_fraction_static": "gpu_memory_utilization",
    "model_path": "model",
    "tokenizer_path": "tokenizer",
}
"""Names that other engines give to an option, and ours."""


SECRET = frozenset({"api_key"})
"""Options whose values no message repeats."""


class Given(NamedTuple):
    """A value somebody gave, and how they wrote it, for the message if it is wrong."""

    value: object
    shown: str


def shown_unless_secret(name: str, value: object) -> str:
    """A value for a message."""
    return "…" if name in SECRET else shown_value(value)


class Option:
    """One field of a struct, as something that a person sets."""

    __slots__ = ("_type", "choices", "default", "description", "name", "optional", "plain", "required")

    def __init__(self, field: msgspec.structs.FieldInfo) -> None:
        self.name = field.name
        self._type = field.type
        self.required = field.required
        self.default: object = None if field.required else field.default
        described = inspect.type_info(field.type)
        extra: dict[str, object] = {}
        if isinstance(described, inspect.Metadata):
            extra, described = described.extra_json_schema or {}, described.type
        self.description = str(extra.get("description", ""))
        parts = list(described.types) if isinstance(described, inspect.UnionType) else [described]
        self.optional = any(isinstance(part, inspect.NoneType) for part in parts)
        self.plain = next(part for part in parts if not isinstance(part, inspect.NoneType))
        self.choices = self.plain.values if isinstance(self.plain, inspect.LiteralType) else ()

    def expects(self) -> str:
        """What a value must be, in words: `a whole number from 1 to 256`."""
        match self.plain:
            case inspect.BoolType():
                words = "T or F"
            case inspect.IntType():
                words = f"a whole number{_bounds(self.plain)}"
            case inspect.FloatType():
                words = f"a number{_bounds(self.plain)}"
            case inspect.LiteralType():
                words = _either([str(choice) for choice in self.choices])
            case inspect.StrType(pattern=str(pattern)):
                words = f"text like {shown_value(self.default)} (pattern {pattern})"
            case _:
                words = "text"
        return f"{words}, or None" if self.optional else words

    def read(self, given: Given) -> object:
        """The checked value. Raises ConfigError, which says what was expected."""
        try:
            value = self._from_text(given.value) if isinstance(given.value, str) else given.value
            return msgspec.convert(value, self._type)
        except ValueError as error:
            reason = "" if isinstance(error, msgspec.ValidationError) else str(error)
            raise ConfigError(self._complaint(given, reason)) from None

    def _from_text(self, text: str) -> object:
        """What the text means for this type. Raises ValueError, with a reason or an empty message."""
        if self.optional and text in ("None", "none", "null"):
            return None
        match self.plain:
            case inspect.BoolType():
                return {"t": True, "true": True, "f": False, "false": False}.get(text.lower(), text)
            case inspect.IntType():
                if text.startswith("("):
                    return arithmetic(text)
                return int(text) if re.fullmatch(r"[+-]?\d{1,19}", text) else text
            case inspect.FloatType():
                number = float(text) if re.fullmatch(r"[-+.\deE]+", text) else math.nan
                return number if math.isfinite(number) else text
            case _:
                return text

    def _complaint(self, given: Given, reason: str) -> str:
        close = difflib.get_close_matches(str(given.value), [str(choice) for choice in self.choices], n=1)
        return (
            f"{given.shown}: expected {self.expects()} ({self.description})"
            + (f"; {reason}" if reason else "")
            + (f". Did you mean {close[0]}?" if close else "")
        )


def options(struct: type[Struct]) -> dict[str, Option]:
    """The options that a struct's fields make, by name, in order."""
    return {field.name: Option(field) for field in msgspec.structs.fields(struct)}


def from_words(arguments: Sequence[str]) -> dict[str, Given]:
    """`key=value`, `--key=value` and `--key value`, with dashes or underscores in the key. Raises ConfigError."""
    found: dict[str, Given] = {}
    words = iter(arguments)
    for word in words:
        key, value = _pair(word, words)
        name = key.removeprefix("--").replace("-", "_")
        if name in found:
            shown = shown_unless_secret(name, value)
            raise ConfigError(f"{name} is given twice: {found[name].shown} and {key}={shown}; leave one out")
        found[name] = Given(value, f"{key}={shown_unless_secret(name, value)}")
    return found


def from_file(path: Path) -> dict[str, Given]:
    """The keys of a TOML file; dashes or underscores. Raises ConfigError."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"config={path}: {error.strerror or error}; give the path of a TOML file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"config={path}: not TOML: {error}") from None
    return {
        name: Given(value, f"{key} = {shown_unless_secret(name, value)} in {path}")
        for key, value in table.items()
        for name in [key.replace("-", "_")]
    }


def known(given: Mapping[str, Given], names: Iterable[str]) -> None:
    """Raises ConfigError for a key that is not among `names`, with the likeliest meant."""
    names = list(names)
    for key, value in given.items():
        if key not in names:
            close = [ELSEWHERE[key]] if ELSEWHERE.get(key) in names else difflib.get_close_matches(key, names, n=1)
            hint = f"did you mean {close[0]}?" if close else "--help lists the options"
            raise ConfigError(f"{value.shown}: there is no option {key}; {hint}")


def build(struct: type[S], given: Mapping[str, Given]) -> S:
    """The struct with what was given, and its defaults for the rest. Raises ConfigError."""
    fields = options(struct)
    known(given, fields)
    for option in fields.values():
        if option.required and option.name not in given:
            raise ConfigError(f"{option.name}=… is missing: {option.description}")
    return struct(**{name: fields[name].read(value) for name, value in given.items()})


def help_lines(struct: type[Struct]) -> list[str]:
    """One line an option: name, default, description."""
    rows = [
        (option.name if option.required else f"{option.name}={shown_value(option.default)}", option)
        for option in options(struct).values()
    ]
    width = max(len(left) for left, _ in rows)
    return [
        f"  {left:<{width}}  {option.description}" + (f" [{option.expects()}]" if option.choices else "")
        for left, option in rows
    ]


def shown_value(value: object) -> str:
    """A value as a person would write it on the command line."""
    return ("T" if value else "F") if isinstance(value, bool) else str(value)


def arithmetic(text: str) -> int:
    """The value of whole-number arithmetic: + - * // ** and parentheses. Raises ValueError with the reason."""
    if len(text) > MAX_ARITHMETIC:
        raise ValueError(f"arithmetic is limited to {MAX_ARITHMETIC} characters")
    try:
        return _evaluate(ast.parse(text, mode="eval").body)
    except (SyntaxError, ZeroDivisionError) as error:
        raise ValueError(f"cannot work it out: {error.args[0]}") from None


def _evaluate(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int(number)) if not isinstance(number, bool):
            result = number
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            result = -_evaluate(operand)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            base, exponent = _evaluate(left), _evaluate(right)
            if not 0 <= exponent < 64:
                raise ValueError("exponents go from 0 to 63")
            result = base**exponent
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATIONS:
            result = OPERATIONS[type(op)](_evaluate(left), _evaluate(right))
        case _:
            raise ValueError("arithmetic knows whole numbers, + - * // ** and parentheses")
    if abs(result) >= MAX_NUMBER:
        raise ValueError("that is more than 64 bits")
    return result


def _pair(word: str, rest: Iterator[str]) -> tuple[str, str]:
    key, equals, value = word.partition("=")
    if equals and key.strip("-"):
        return key, value
    if not word.startswith("--") or equals or not word.strip("-"):
        raise ConfigError(f"{word!r} is no option; write key=value, --key value or --key=value")
    following = next(rest, None)
    if following is None or following.startswith("--"):
        raise ConfigError(f"{word} has no value; write {word.removeprefix('--')}=…, and T or F for a switch")
    return word, following


def _bounds(kind: inspect.IntType | inspect.FloatType) -> str:
    low = f"at least {kind.ge}" if kind.ge is not None else f"above {kind.gt}" if kind.gt is not None else ""
    high = f"at most {kind.le}" if kind.le is not None else f"below {kind.lt}" if kind.lt is not None else ""
    if kind.ge is not None and kind.le is not None:
        return f" from {kind.ge} to {kind.le}"
    return "".join(f"{mark}{part}" for mark, part in zip((" ", ", " if low else " "), (low, high), strict=True) if part)


def _either(choices: list[str]) -> str:
    return choices[0] if len(choices) == 1 else f"{', '.join(choices[:-1])} or {choices[-1]}"
