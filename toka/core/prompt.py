"""A prompt, shared by all the sequences that sample from it."""

from toka.core.blocks import Ints


class Prompt:
    """Token ids, and the names of their full blocks once somebody asked the tree for them."""

    __slots__ = ("digests", "ids", "salt")

    def __init__(self, ids: Ints, salt: str = "") -> None:
        """`ids`: int32[tokens], at least one. Prompts of different `salt` share no blocks."""
        assert len(ids) > 0
        self.ids = ids
        self.salt = salt
        self.digests: list[bytes] | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def __repr__(self) -> str:
        return f"<Prompt of {len(self.ids)} tokens>"
