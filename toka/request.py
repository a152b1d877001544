"""What the API hands to the engine, and what it hears back."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from msgspec import Struct

from toka.core.scores import Score, Scores, joined_scores
from toka.core.sequence import BATCH
from toka.errors import RequestError
from toka.wire import Sampling

__all__ = ["Delta", "Generation", "Listener", "Request", "Sampling", "Score", "Scores", "Server", "joined_scores"]

MAX_PRIORITY = BATCH - 1
"""Of requests that somebody waits for. Numbers above are work in the background."""


@dataclass(frozen=True, slots=True)
class Request:
    """What one client asked for, checked and tokenized. Choice `p * n + i` is sample i of prompt p."""

    id: str
    prompts: list[list[int]]
    """Token ids of each prompt, at least one prompt, each of at least one token."""
    n: int = 1
    max_tokens: int | None = None
    """New tokens of each choice; None: as many as the context holds."""
    clamp: bool = False
    """After a prompt that leaves less room than `max_tokens`, take what there is. Otherwise it is an error."""
    sampling: Sampling = field(default_factory=Sampling)
    seed: int | None = None
    """int64. None: the engine draws one for the request."""
    stop: tuple[str, ...] = ()
    """Strings that end a choice; they are not part of its text."""
    include_stop: bool = False
    """Leave the stop string that ended a choice in its text."""
    stop_ids: tuple[int, ...] = ()
    """Token ids that end a choice, besides the model's own. Their text is not part of it."""
    ignore_eos: bool = False
    skip_special: bool = True
    """Special tokens have no text. Otherwise they are spelled, and stop strings may match them."""
    stream: bool = False
    """Deliver text as it comes; otherwise once, at the end of each choice."""
    priority: int = 0
    """Lower numbers start first; see MAX_PRIORITY."""
    cache_salt: str = ""
    """Requests of different salts share no cached prefix."""
    tenant: str = ""
    """Whose it is: what `toka.api.keys` calls the API key that it came with; empty where nobody needs a key."""


class Delta(Struct, frozen=True):
    """News of one choice. A Struct, since there is one for each streamed token and a frozen dataclass takes a
    microsecond to make."""

    index: int
    text: str
    """Text since the last delta of this choice. Never ends inside a character, nor in what may become a stop string."""
    tokens: int
    """Sampled tokens of this choice so far, the one that ended it included."""
    finish_reason: str | None = None
    """`stop` or `length` in the last delta of the choice, else None."""
    stop_reason: str | int | None = None
    """The stop string, or the id of `stop_ids`, that ended the choice; None for EOS and length."""
    ids: Sequence[int] = ()
    """Tokens since the last delta of this choice, the one that ended it included."""
    scores: Scores | None = None
    """A row for each of `ids`, if `sampling.logprobs` asks for them; None also where there are none."""
    prompt_scores: Scores | None = None
    """In the first delta of a choice, if `sampling.prompt_logprobs` asks for them: a row for each token of its prompt
    but the first."""


class Listener(Protocol):
    """Who waits for a request. Called on the event loop; must return at once and never raise."""

    def deliver(self, deltas: list[Delta]) -> None:
        """At most once a step: all that the step brought for this request."""

    def fail(self, error: RequestError) -> None:
        """The request ends here without the rest of its answer. Nothing follows."""


class Generation(Protocol):
    """A request in flight."""

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens, over all prompts, that the prefix cache held."""

    def cancel(self) -> None:
        """Nobody waits any more: give everything back. No call of the listener follows. Harmless after the end."""


class Server(Protocol):
    """What the API sees of the engine."""

    @property
    def ready(self) -> bool:
        """A request would start now."""

    @property
    def max_model_len(self) -> int:
        """Longest prompt + answer in tokens; 0 until ready."""

    def check_room(self, tenant: str) -> None:
        """Raises Unavailable or RateLimited if a tenant's request that comes now is not taken, whatever is in it."""

    def submit(self, request: Request, listener: Listener) -> Generation:
        """Start a request. Raises RequestError, before any work is done, if it cannot be served."""

    def info(self) -> dict[str, object]:
        """The engine's state for /server_info: blocks in all and free, running, waiting, steps, and so on."""
