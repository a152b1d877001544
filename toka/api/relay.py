"""Between the engine and who listens: answers of which more, or less, is shown than was sampled."""

from collections.abc import Callable, Iterable

from msgspec.structs import replace

from toka.errors import RequestError
from toka.request import Delta, Listener

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


def joined(deltas: list[Delta]) -> Delta:
    """Deltas of one choice, in order, as one."""
    if len(deltas) == 1:
        return deltas[0]
    return replace(
        deltas[-1],
        text="".join([delta.text for delta in deltas]),
        ids=[id for delta in deltas for id in delta.ids],
        scores=[score for delta in deltas for score in delta.scores],
        prompt_scores=[score for delta in deltas for score in delta.prompt_scores],
    )
