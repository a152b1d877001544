"""What a replica holds."""

from typing import NamedTuple


class Limits(NamedTuple):
    """What a replica holds."""

    num_blocks: int
    page_size: int
    max_seqs: int
    """Sequences in one step, and so slots."""
    max_tokens: int
    """Tokens in one step."""
    max_ahead: int
    """Plans in flight at most."""
    max_len: int
    """Tokens of the longest sequence."""

    def blocks_for(self, tokens: int) -> int:
        """Blocks that `tokens` tokens take."""
        return -(-tokens // self.page_size)
