"""Valid bodies, spoilt: dropped, retyped, nested, huge, doubled and renamed fields, and damaged bytes."""

import json
import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from random import Random
from typing import Any

HUGE = "@huge@"
DEEP = "@deep@"
"""What these stand for is put in when the body is written: no Python list could be nested so deep."""
ATOMS: list[Any] = [
    *(None, True, False, 0, -1, 1, 2, 20, 128, 299, 2**31, -(2**31) - 1, 2**63, -(2**63) - 1, 2**64, 10**30),
    *(0.0, -0.0, 0.5, 1.0, 1.5, -1e-9, 5e-324, 1e308, math.nan, math.inf, -math.inf),
    *("", " ", "x", "stop", "user", "auto", "none", "packed", "tiny", "1", "null", HUGE, DEEP),
    *("\x00", "\ud800", "\udfff\ud800", "🦀", "\u2028", "e\u0301", "\ufffd", "\ufeff"),
    *([], {}, [[]], [None], [{}], [""], [[], [1]], [1, "a"], {"a": {}}, {"": None}, {"5": 1}, {"type": "text"}),
]
Fields = Mapping[str, Sequence[Any]]
"""Names, and values that fit them."""
EDITS = ("drop", "retype", "retype", "retype", "wrap", "add", "add", "add", "rename", "double", "swap", "grow")


def atom(random: Random) -> Any:
    """A value of its own."""
    return deepcopy(random.choice(ATOMS))


def mutate(body: Any, fields: Fields, random: Random) -> bytes:
    """A body with a few fields more, and none to four faults."""
    value = json.loads(json.dumps(body))
    one = value.get("requests", [value])[0] if isinstance(value, dict) else value[0]
    for name in random.sample([name for name in fields if fields[name]], random.choice((0, 0, 1, 2, 4))):
        one[name] = deepcopy(random.choice(fields[name]))
    for _ in range(random.choice((0, 0, 1, 1, 2, 4))):
        value = edit(value, fields, random)
    data = write(value, random)
    return damage(data, random) if random.random() < 0.1 else data


def edit(value: Any, fields: Fields, random: Random) -> Any:
    """The same with one thing changed, somewhere in it."""
    at = random.choice(places(value))
    if at is None:
        return atom(random) if random.random() < 0.1 else change(value, fields, random)
    parent, key = at
    kind = random.choice(EDITS)
    if kind == "drop":
        del parent[key]
    elif kind == "retype":
        parent[key] = atom(random)
    elif kind == "wrap":
        parent[key] = random.choice(([parent[key]], {"text": parent[key]}, {random.choice(list(fields)): parent[key]}))
    elif kind == "rename" and isinstance(parent, dict):
        parent[random.choice([key.upper(), key + " ", key[:-1], random.choice(list(fields))])] = parent.pop(key)
    elif kind == "swap":
        other, name = random.choice([one for one in places(value) if one is not None])
        mine, theirs = json.dumps(parent[key]), json.dumps(other[name])
        parent[key], other[name] = json.loads(theirs), json.loads(mine)
    elif kind == "grow" and isinstance(parent[key], list):
        parent[key] = parent[key] * random.choice((2, 17, 1025))
    else:
        parent[key] = change(parent[key], fields, random)
    return value


def change(value: Any, fields: Fields, random: Random) -> Any:
    """An object with one field more, a list with one item more, or something else instead."""
    if isinstance(value, dict):
        return value | {random.choice(list(fields)): atom(random)}
    if isinstance(value, list):
        return [*value, atom(random)]
    return atom(random)


def places(value: Any) -> list[Any]:
    """Every (object or list, key) in a value, and None for the value itself."""
    found: list[Any] = [None]
    waiting = [value]
    while waiting and len(found) < 200:
        one = waiting.pop()
        if isinstance(one, dict | list):
            keys = list(one) if isinstance(one, dict) else range(len(one))
            found += [(one, key) for key in keys]
            waiting += [one[key] for key in keys]
    return found


def write(value: Any, random: Random) -> bytes:
    """JSON, or nearly: NaN and Infinity as Python writes them, now and then a key twice and raw surrogates."""
    plain = random.random() < 0.2
    text = json.dumps(value, ensure_ascii=not plain)
    if isinstance(value, dict) and value and random.random() < 0.1:
        key = random.choice(list(value))
        text = f"{text[:-1]}, {json.dumps(key)}: {json.dumps(atom(random))}}}"
    depth = random.choice((40, 400, 40_000))
    nested = random.choice(("[" * depth + "]" * depth, '{"a":' * depth + "1" + "}" * depth, "[" * depth))
    huge = '"' + random.choice(("a", "a ", "\\n", "🦀", "\\ud83e\\udd80")) * 20_000 + '"'
    text = text.replace(f'"{DEEP}"', nested).replace(f'"{HUGE}"', huge)
    return text.encode("utf-8", "surrogatepass")


def damage(data: bytes, random: Random) -> bytes:
    """The same with a few bytes changed, cut off or put in."""
    spoilt = bytearray(data)
    for _ in range(random.randint(1, 4)):
        at = random.randint(0, len(spoilt))
        match random.randrange(3):
            case 0 if at < len(spoilt):
                spoilt[at] = random.randrange(256)
            case 1:
                del spoilt[at:]
            case _:
                spoilt[at:at] = random.choice((b"\x00", b"\xff\xfe", b'"', b"{", b"]", b",", b"\\u", b"//", b"1e999"))
    return bytes(spoilt)
