"""Where keys and values lie."""

import dataclasses

import torch

from tests.workers.attention.test_paged_torch import CONFIG
from workers import memory
from workers.kvcache import KVCache

CPU = torch.device("cpu")


def test_keys_and_values_go_to_their_places() -> None:
    """Flat place p is block p // page_size, offset p % page_size; keys and values lie side by side in the block."""
    cache = KVCache(CONFIG, 3, 4, torch.float32, CPU)
    k, v = torch.randn(2, 3, 2, 8)
    cache.write(1, k, v, cache.places(torch.tensor([9, 0, 15])))
    layer = cache.layers[1]
    for token, (block, offset) in enumerate([(2, 1), (0, 0), (3, 3)]):
        assert torch.equal(layer[block, 0, offset], k[token])
        assert torch.equal(layer[block, 1, offset], v[token])
    assert torch.count_nonzero(layer) == 2 * k.numel()
    assert not cache.layers[0].any()


def test_a_spare_block_comes_on_top() -> None:
    """The last block takes unwanted writes, from several rows at once too."""
    cache = KVCache(CONFIG, 3, 4, torch.bfloat16, CPU)
    assert (cache.spare, cache.num_blocks) == (3, 3)
    assert [layer.shape for layer in cache.layers] == [(4, 2, 4, 2, 8)] * 2
    k = torch.ones(2, 2, 8, dtype=torch.bfloat16)
    cache.write(0, k, k, cache.places(torch.tensor([12, 12])))
    assert not cache.layers[0][:3].any()


def test_the_cache_starts_as_zeros() -> None:
    """Whole blocks are read and masked, and no mask hides a NaN."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert not any(layer.any() for layer in KVCache(CONFIG, 100, 16, dtype, CPU).layers)


def test_bytes_per_block_are_those_allocated() -> None:
    """The plan of the memory counts what the cache takes."""
    config = dataclasses.replace(CONFIG, num_layers=3)
    cache = KVCache(config, 7, 16, torch.float16, CPU)
    assert sum(layer.nbytes for layer in cache.layers) == 8 * memory.block_bytes(config, 16, 2)
