"""What every endpoint shares: the options, the engine, the text side of the model, and the names it is served under."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from toka.config import Config
from toka.errors import BadRequest, ModelNotFound
from toka.metrics.record import Metrics
from toka.request import Sampling, Server

SHOWN = 200
"""Characters of a client's own words that an error message repeats at most."""


def shown(text: str) -> str:
    """A client's own words as part of one line: not too many, and nothing that moves a cursor."""
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in text[:SHOWN])


class Tokenizer(Protocol):
    """Text to token ids."""

    @property
    def vocab_size(self) -> int:
        """Ids are below it."""

    @property
    def bos_id(self) -> int | None:
        """What an empty prompt starts from."""

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids that stand for no text of their own."""

    @property
    def spelled(self) -> "Tokenizer":
        """The same tokenizer, but that special tokens have text in an answer: their names."""

    @property
    def spaces_names(self) -> bool:
        """Whether there are spaces between special tokens where they are spelled."""

    @property
    def settings(self) -> Mapping[str, object]:
        """The tokenizer's tokenizer_config.json."""

    def fewest(self, text: str) -> int:
        """Tokens that a text has at least, known without encoding it; 0 where nothing is known."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, without special tokens unless they are spelled."""

    def bytes_of(self, id: int, first: bool = False) -> bytes:
        """What an id adds to the bytes of a text, which it begins if `first`; nothing for special tokens that
        are not spelled."""

    def token_of(self, id: int) -> str:
        """What the vocabulary calls an id; empty for one that it lacks."""


class ChatTemplate(Protocol):
    """Messages to text."""

    @property
    def source(self) -> str:
        """The template itself."""

    @property
    def variables(self) -> frozenset[str]:
        """Names that the template reads and does not set itself."""

    @property
    def takes_parts(self) -> bool:
        """Whether the template iterates over content parts. If not, `content` is always a string."""

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, object]] | None = None,
        **kwargs: Any,  # what a client passes on to the template: any JSON
    ) -> str:
        """The prompt. Raises BadRequest with what the template says is wrong."""

    def other(self, source: str) -> "ChatTemplate":
        """A template of the same model with another source. Raises BadRequest if it is broken."""


@dataclass(frozen=True, slots=True)
class Service:
    """Complete at birth and never changed."""

    config: Config
    server: Server
    tokenizer: Tokenizer
    template: ChatTemplate | None
    """None: the model has no chat template."""
    names: tuple[str, ...]
    """Names the model answers to; the first is the one it goes by."""
    created: int
    """Unix time of the model in /v1/models."""
    version: str
    fingerprint: str
    """Changes if and only if something changes that can change outputs."""
    metrics: Metrics
    defaults: Sampling = field(default_factory=Sampling)
    """What a request leaves open."""

    def model(self, asked: str | None) -> str:
        """The name to answer with: the one asked for. Raises ModelNotFound if it is not served."""
        if asked is None:
            return self.names[0]
        if asked not in self.names:
            raise ModelNotFound(
                f"The model `{shown(asked)}` does not exist. Available: {', '.join(self.names)}.", param="model"
            )
        return asked

    def chat(self) -> ChatTemplate:
        """The chat template. Raises BadRequest if the model has none."""
        if self.template is None:
            raise BadRequest(
                f"The model `{self.names[0]}` has no chat template, so it cannot chat. "
                "Use /v1/completions, or serve a model folder with a chat_template.jinja."
            )
        return self.template
