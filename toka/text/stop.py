"""Stop strings, found while the text is still coming."""

import re
from collections import deque
from functools import lru_cache


class StopMatcher:
    """Cuts a text at the first stop string in it, in time linear in the text however it is cut into pieces.

    The first is the one that starts first; of those that start together, the one that ends first. So a text that ends
    in a whole stop string is not over yet if a longer one, which started before it, may still come about: with "abcd"
    and "bc", "abc" waits, "abce" is cut before "bc" and "abcd" before "abcd".
    """

    __slots__ = ("_found", "_held", "_seen", "_state", "_trie", "stop")

    def __init__(self, stops: tuple[str, ...]) -> None:
        """Raises ValueError for an empty stop string, which would match everywhere."""
        self._trie = _trie(stops)
        self._state = 0
        self._held = ""
        """Text that is not released: it may still become a stop string."""
        self._seen = 0
        """Characters pushed."""
        self._found: tuple[int, str] | None = None
        """The stop string that wins so far, and the character that it starts at."""
        self.stop: str | None = None
        """The stop string that ended the text."""

    def push(self, text: str) -> tuple[str, str | None]:
        """The text that is now known to come before any stop string, and the stop string once it has ended the text.

        After that nothing more is released.
        """
        if self.stop is not None:
            return "", self.stop
        trie, state = self._trie, self._state
        children, fail, longest, depth = trie.children, trie.fail, trie.longest, trie.depth
        held = self._held + text
        origin = self._seen - len(self._held)
        self._seen += len(text)
        at, end = len(self._held), len(held)
        while at < end:
            if not state:
                start = trie.first.search(held, at)
                if start is None:
                    break
                at = start.start()
            character = held[at]
            while state and character not in children[state]:
                state = fail[state]
            state = children[state].get(character, 0)
            at += 1
            match = longest[state]
            if match is not None:
                start_of_match = origin + at - len(match)
                if self._found is None or start_of_match < self._found[0]:
                    self._found = start_of_match, match
            if self._found is not None and origin + at - depth[state] >= self._found[0]:
                return self._cut(held, origin), self.stop
        self._state = state
        keep = end - depth[state]
        self._held = held[keep:]
        return held[:keep], None

    def finish(self) -> str:
        """What was held back, for no text follows. `stop` says whether a stop string cut it."""
        if self._found is not None and self.stop is None:
            return self._cut(self._held, self._seen - len(self._held))
        held, self._held = self._held, ""
        return held

    def _cut(self, held: str, origin: int) -> str:
        assert self._found is not None
        start, self.stop = self._found
        self._held = ""
        return held[: start - origin]


class _Trie:
    """The stop strings as an Aho–Corasick automaton (Aho and Corasick, 1975). State 0 is "nothing has begun".

    A state is the longest suffix of the text so far that begins a stop string, of `depth` characters; `fail` is the
    next shorter such suffix; `longest` is the longest stop string that the text so far ends in.
    """

    __slots__ = ("children", "depth", "fail", "first", "longest")

    def __init__(self, stops: tuple[str, ...]) -> None:
        self.children: list[dict[str, int]] = [{}]
        self.depth = [0]
        self.fail = [0]
        self.longest: list[str | None] = [None]
        self.first = re.compile("|".join(sorted({re.escape(stop[0]) for stop in stops})) or "(?!)")
        """Finds where a stop string may begin."""
        for stop in stops:
            self._add(stop)
        self._link()

    def _add(self, stop: str) -> None:
        state = 0
        for character in stop:
            if character not in self.children[state]:
                self.children[state][character] = len(self.children)
                self.children.append({})
                self.depth.append(self.depth[state] + 1)
                self.fail.append(0)
                self.longest.append(None)
            state = self.children[state][character]
        self.longest[state] = stop

    def _link(self) -> None:
        queue = deque(self.children[0].values())
        while queue:
            parent = queue.popleft()
            self.longest[parent] = self.longest[parent] or self.longest[self.fail[parent]]
            for character, child in self.children[parent].items():
                fallback = self.fail[parent]
                while fallback and character not in self.children[fallback]:
                    fallback = self.fail[fallback]
                self.fail[child] = self.children[fallback].get(character, 0)
                queue.append(child)


@lru_cache(maxsize=32)
def _trie(stops: tuple[str, ...]) -> _Trie:
    """One automaton serves every sequence with the same stop strings. Few are kept: a character takes 300 bytes."""
    if "" in stops:
        raise ValueError("a stop string must not be empty")
    return _Trie(stops)
