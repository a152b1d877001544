"""Whether prompts and the tokens asked for fit the context, in OpenAI's words."""

from collections.abc import Sequence
from typing import Literal

from toka.api import errors
from toka.errors import ContextLengthExceeded, Unavailable

Overflow = Literal["error", "clamp"]

MAX_CHOICES = 16384
"""Prompts times samples of one request: to set so many up takes a tenth of a second, and everybody waits for it."""


def check_choices(prompts: int, n: int) -> None:
    """Several prompts, with `n` samples of each, may not have more than MAX_CHOICES answers. Raises BadRequest."""
    if prompts > 1 and prompts * n > MAX_CHOICES:
        samples = f" with n = {n}" if n > 1 else ""
        raise errors.too_long("prompt", "array", f"{max(1, MAX_CHOICES // n)} prompts{samples}")


def check_fewest(fewest: int, *, context: int, param: str) -> None:
    """Refuse, before it is tokenized, a text of at least `fewest` tokens that cannot fit.

    Raises ContextLengthExceeded, or Unavailable while the context is unknown.
    """
    _check_known(context)
    if fewest > context:
        raise ContextLengthExceeded(
            f"This model's maximum context length is {context} tokens. However, your {param} resulted in at least "
            f"{fewest} tokens. Please reduce the length of the {param}.",
            param=param,
        )


def check_prompts(prompts: Sequence[Sequence[int]], *, context: int, param: str, new: int = 1) -> None:
    """Every prompt must fit with at least `new` tokens after it.

    `context` is the longest prompt + answer in tokens, 0 while nobody knows. `param` is the field of the prompts.
    Raises ContextLengthExceeded, or Unavailable while the context is unknown.
    """
    _check_known(context)
    longest = max(map(len, prompts))
    if longest + new > context:
        raise ContextLengthExceeded(
            f"This model's maximum context length is {context} tokens. However, your {param} resulted in "
            f"{longest} tokens{', and an answer needs at least one more' if longest <= context else ''}. "
            f"Please reduce the length of the {param}.",
            param=param,
        )


def fit(
    asked: int,
    prompts: Sequence[Sequence[int]],
    *,
    context: int,
    param: str,
    overflow: Overflow,
    name: str = "max_tokens",
) -> int | None:
    """`max_tokens` for prompts that `check_prompts` let pass; None: as many as the context holds after each.

    With `overflow="error"` raises ContextLengthExceeded, which says the largest value that fits every prompt. With
    `clamp` that value is taken, unless the value asked for fits no prompt at all: then each gets what fits it.
    """
    longest = max(map(len, prompts))
    if longest + asked <= context:
        return asked
    if overflow == "clamp":
        return None if min(map(len, prompts)) + asked > context else context - longest
    place = "messages" if param == "messages" else "prompt"
    raise ContextLengthExceeded(
        f"This model's maximum context length is {context} tokens. However, you requested {longest + asked} tokens "
        f"({longest} in the {place}, {asked} in the completion). Use {name} ≤ {context - longest}.",
        param=param,
    )


def _check_known(context: int) -> None:
    if context <= 0:
        raise Unavailable("The model is still loading. Try again in a moment.")
