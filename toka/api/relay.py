"""Between the engine and who listens: answers of which more, or less, is shown than was sampled."""

from collections.abc import Callable, Iterable

from msgspec.structs import replace

from toka.errors import RequestError
from toka.request import Delta, Listener, joined_scores

Rewrite = Callable[[Delta], Iterable[Delta]]


class Relay:
    """A Listener that rewrites every delta for another."""

    def __init__(self, listener: Listener, rewrite: Rewrite) -> None:
        self._listener = listener
        self._rewrite = rewrite

    def deliver(self, deltas: list[Delta]) -> None:
        """See Listener."""
        rewritten = [one for delta in deltas for one in self._rewrite(delta)]
        if rewritten:
            self._listener.deliver(rewritten)

    def fail(self, error: RequestError) -> None:
        """See Listener."""
        self._listener.fail(error)


class Paced(Relay):
    """Joins the tokens of a choice to deltas of at least `interval`. Its first text and its end come at once."""

    def __init__(self, listener: Listener, interval: int) -> None:
        super().__init__(listener, self._pace)
        self._interval = interval
        self._held: dict[int, list[Delta]] = {}
        self._told: dict[int, int] = {}
        """Tokens of each choice that has had a text."""

    def fail(self, error: RequestError) -> None:
        """See Listener. What is held comes first."""
        held = [joined(deltas) for deltas in self._held.values()]
        self._held.clear()
        if held:
            self._listener.deliver(held)
        super().fail(error)

    def _pace(self, delta: Delta) -> Iterable[Delta]:
        index = delta.index
        self._held.setdefault(index, []).append(delta)
        told = self._told.get(index)
        first = told is None and delta.text
        if not first and delta.finish_reason is None and delta.tokens - (told or 0) < self._interval:
            return []
        if delta.text or told is not None:
            self._told[index] = delta.tokens
        return [joined(self._held.pop(index))]


def copies(count: int) -> Rewrite:
    """Choices that are alike are sampled once: choice p becomes the choices p · count … p · count + count − 1."""

    def rewrite(delta: Delta) -> Iterable[Delta]:
        return [replace(delta, index=delta.index * count + copy) for copy in range(count)]

    return rewrite


def prompt_only(delta: Delta) -> Iterable[Delta]:
    """Only the prompt was to be scored: the one token that the engine sampled behind it is dropped."""
    if delta.finish_reason is None and not delta.prompt_scores:
        return []
    end = None if delta.finish_reason is None else "length"
    return [Delta(delta.index, "", 0, end, prompt_scores=delta.prompt_scores)]


def best(choices: list[Delta], samples: int, n: int) -> list[Delta]:
    """Of each prompt's `samples` the `n` with the highest mean log-probability, best first, numbered anew."""
    if samples == n:
        return choices
    kept: list[Delta] = []
    for start in range(0, len(choices), samples):
        kept += sorted(choices[start : start + samples], key=lambda one: -mean(one))[:n]
    return [replace(one, index=index) for index, one in enumerate(kept)]


def mean(choice: Delta) -> float:
    """Log-probability of a whole choice for each of its tokens."""
    return choice.scores.mean() if choice.scores is not None else 0.0


def joined(deltas: list[Delta]) -> Delta:
    """Deltas of one choice, in order, as one."""
    if len(deltas) == 1:
        return deltas[0]
    return replace(
        deltas[-1],
        text="".join([delta.text for delta in deltas]),
        ids=[id for delta in deltas for id in delta.ids],
        scores=joined_scores([delta.scores for delta in deltas]),
        prompt_scores=joined_scores([delta.prompt_scores for delta in deltas]),
    )
