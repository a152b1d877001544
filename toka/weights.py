"""How much of the engine each tenant may have, when there is not enough for all."""

import math
from collections.abc import Collection

from toka.errors import ConfigError


def weights_of(text: str | None) -> dict[str, float]:
    """Weights by tenant from `NAME:WEIGHT,NAME:WEIGHT`. Raises ConfigError."""
    weights: dict[str, float] = {}
    for word in text.split(",") if text is not None else ():
        name, _, given = (part.strip() for part in word.partition(":"))
        try:
            weight = float(given)
        except ValueError:
            weight = math.nan
        if not name or not 0 < weight < math.inf:
            raise ConfigError(
                f"tenant_weights={text}: {word.strip()!r} is not a name and a number above 0; write key-1:2,key-2:0.5"
            )
        if name in weights:
            raise ConfigError(f"tenant_weights={text}: {name} has two weights")
        weights[name] = weight
    return weights


def check_tenants(weights: Collection[str], tenants: Collection[str]) -> None:
    """Raises ConfigError for weights of tenants that do not exist: nobody would be served by them."""
    if unknown := [name for name in weights if name not in tenants]:
        known = f"those there are: {', '.join(tenants)}" if tenants else "there are no API keys: give api_key_file=…"
        raise ConfigError(f"tenant_weights has {', '.join(unknown)}, which is no API key's name; {known}")
