"""A request in flight: its choices, and how their tokens become text."""

from bisect import bisect_right
from collections.abc import Callable
from typing import Protocol

from toka.core.blocks import Ints
from toka.core.scores import Scores
from toka.core.sequence import End, Sequence
from toka.errors import RequestError
from toka.metrics.record import Times
from toka.request import Delta, Listener, Request
from toka.text.output import TextOutput
from toka.wire import Logprobs, unpack


class Decoder(Protocol):
    """What turns a whole answer into text."""

    def decode(self, ids: list[int]) -> str: ...


class Choice:
    """One answer of a request. The owner of a sequence."""

    __slots__ = (
        "_decoder",
        "_ids",
        "_marks",
        "_output",
        "_prompt_scores",
        "_request",
        "_scored",
        "_scores",
        "_text",
        "generation",
        "index",
        "over",
        "sequence",
        "times",
        "tokens",
    )

    def __init__(
        self,
        generation: "Generation",
        index: int,
        sequence: Sequence,
        output: TextOutput | None,
        request: Request,
        decoder: Decoder,
        arrived: float,
    ) -> None:
        """`arrived`: when, by the clock of the engine's metrics. `output` makes text token by token, for answers that
        stream or that some text or id may end. One that does not stream is withheld until its end. Without it
        `decoder` makes the text of the whole answer."""
        self.generation = generation
        self.index = index
        self.sequence = sequence
        self.tokens = 0
        self.over = False
        self.times = Times(arrived)
        self._request = request
        self._output = output
        self._decoder = decoder
        self._text: list[str] = []
        self._ids: list[int] = []
        self._marks: list[int] = []
        self._scores: Scores | None = None
        self._scored = 0
        self._prompt_scores: Scores | None = None
        if output is not None and request.stop and request.sampling.min_tokens == 0:
            output.arm(request.stop)

    def score_prompt(self, sent: Logprobs) -> None:
        """Tokens of the prompt, at rising positions without a gap. After a preemption they may come again."""
        positions = unpack(sent.rows)
        if not positions or positions[-1] <= self._scored:
            return
        if self._prompt_scores is None:
            self._prompt_scores = Scores(sent.width)
        self._prompt_scores.extend(sent, self._scored + 1 - positions[0])
        self._scored = positions[-1]

    def score(self, sent: Logprobs, row: int) -> None:
        """The log-probabilities of the token that `token` is told of next, in one row of what its step brought."""
        if self._scores is None:
            self._scores = Scores(min(sent.width, self._request.sampling.logprobs))
        self._scores.add(sent, row)

    def token(self, token: int, end: End | None) -> tuple[Delta | None, bool]:
        """One more token. Returns the news, if there is any to tell, and whether its text or its id has ended the
        choice while its sequence still runs."""
        output, request = self._output, self._request
        assert output is not None
        self.tokens += 1
        self._ids.append(token)
        stop: str | int | None = None
        if end is End.STOP or (token in request.stop_ids and self.tokens > request.sampling.min_tokens):
            # The text of an id that ends an answer is not part of it.
            stop = token if token in request.stop_ids else None
            self.over = True
        else:
            text, stop, _ = output.push((token,))
            if text:
                self._text.append(text)
            self._marks.append(output.mark)
            self.over = stop is not None or end is not None
        if self.over:
            if not isinstance(stop, str):
                self._text.append(output.finish())
                stop = output.stop if output.stop is not None else stop
            if isinstance(stop, str) and request.include_stop:
                self._text.append(stop)
            reason = End.LENGTH if stop is None and end is End.LENGTH else End.STOP
            return self._delta(reason.value, stop), end is None
        if request.stop and self.tokens == request.sampling.min_tokens:
            output.arm(request.stop)
        return (self._delta() if request.stream and self._text else None), False

    def _delta(self, reason: str | None = None, stop: str | int | None = None) -> Delta:
        """All text that has gathered, and the tokens whose text is out with it; at the end all of them."""
        assert self._output is not None
        text, self._text = "".join(self._text), []
        ids, scores, prompt = self._ids, self._scores, self._prompt_scores
        self._ids, self._scores, self._prompt_scores = [], None, None
        if reason is None and self._output.withheld:
            count = bisect_right(self._marks, self._output.released)
            ids, self._ids = ids[:count], ids[count:]
            if scores is not None:
                scores, self._scores = scores.split(count)
            del self._marks[:count]
        else:
            self._marks = []
        return Delta(self.index, text, self.tokens, reason, stop, ids, scores, prompt)

    def whole(self, tokens: Ints, end: End) -> Delta:
        """All of an answer at once."""
        self.over = True
        self.tokens = len(tokens)
        ids = tokens.tolist()
        stop = None
        text = self._decoder.decode(ids[:-1] if end is End.STOP else ids)
        if end is End.STOP and ids[-1] in self._request.stop_ids:
            stop = ids[-1]
        return Delta(self.index, text, self.tokens, end.value, stop, ids)


class Generation:
    """A request in flight. Deltas gather in `fresh` until `deliver`, at most once a step."""

    __slots__ = ("_cancel", "choices", "fresh", "listener", "open")

    def __init__(self, listener: Listener, cancel: "Callable[[Generation], None]") -> None:
        self.listener = listener
        self.choices: list[Choice] = []
        self.fresh: list[Delta] = []
        self.open = 0
        """Choices that are not over."""
        self._cancel = cancel

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that the prefix cache held, each prompt counted once, as its first sample found it."""
        first = {choice.sequence.prompt: choice.sequence.cached for choice in reversed(self.choices)}
        return sum(first.values())

    def add(self, choice: Choice) -> None:
        """One more choice, before anything runs."""
        self.choices.append(choice)
        self.open += 1

    def tell(self, delta: Delta) -> None:
        """Put news by for the next `deliver`."""
        self.fresh.append(delta)
        if delta.finish_reason:
            self.open -= 1

    def deliver(self) -> None:
        """Tell the listener all that is new."""
        deltas, self.fresh = self.fresh, []
        self.listener.deliver(deltas)

    def fail(self, error: RequestError) -> None:
        """The rest of the answer will not come."""
        for choice in self.choices:
            choice.over = True
        self.listener.fail(error)

    def cancel(self) -> None:
        """Nobody waits any more."""
        self._cancel(self)
