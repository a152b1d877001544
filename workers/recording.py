"""How launches are recorded as CUDA graphs."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE

_EXACT = 8
"""Up to so many, there is a size for each number."""
_PADDING = 8
"""Above, a size serves the numbers down to 1 − 1/_PADDING of its own."""


def sizes(most: int) -> list[int]:
    """Sizes to record for, rising, the last of which is `most`: no number up to it needs more than an eighth of
    padding."""
    found = list(range(1, min(most, _EXACT) + 1))
    while found[-1] < most:
        size = found[-1] * _PADDING // (_PADDING - 1)
        # Multiples of 8 fill the tiles of matrix products.
        found.append(min(max(size - size % 8 if size > 64 else size, found[-1] + 1), most))
    return found


class Recorder:
    """Records graphs on a stream of its own, all in one pool of memory: replayed one after another, they share it."""

    def __init__(self, device: torch.device) -> None:
        self.count = 0
        """Graphs recorded."""
        self._pool: _POOL_HANDLE = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's own

    def record(self, run: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """What `run` launches. It runs twice: first to compile and to allocate, then to be recorded."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            run()
            self._stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            # Other threads do not touch the device, and must not be kept from their own work.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                run()
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(self._stream)
        self.count += 1
        return graph
