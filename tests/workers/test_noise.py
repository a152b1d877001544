"""The noise: Philox against its published vectors, and the layout of its counters against vectors of our own."""

import numpy as np
import numpy.typing as npt
import pytest
import torch

from workers import noise

GOLDEN = [
    3011740600,
    2937234061,
    612179057,
    71769380,
    3757605932,
    3866503966,
    2086179831,
    3358584639,
    3573373839,
    4258498984,
]
GOLDEN_NEGATIVE = [2561012937, 3571609276, 2938335248, 57238792]
GOLDEN_TILES = [
    4004980106,
    1534438234,
    2463265555,
    2406976185,
    1838433502,
    1932886291,
    1650461452,
    4022302117,
    4171519580,
    1888323234,
]
GOLDEN_TILES_NEGATIVE = [1772783517, 4198648469, 1488134902, 4092175703]
"""Words of the first tokens and of the first tiles for seed 0x299F31D0A4093822, choice 0x13198A2E, position 0x05A308D3;
and for −1, 0, 7."""

Int4 = tuple[int, int, int, int]

# Philox4x32-10 in the known-answer file (kat_vectors) of Random123, its authors' library: counter, key, words.
KNOWN: list[tuple[Int4, tuple[int, int], Int4]] = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


Rows = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def tensors(*rows: tuple[int, int, int]) -> Rows:
    """(seed, choice, position) of each row → int64[S] of each."""
    seed, choice, position = torch.tensor(rows, dtype=torch.int64).T.contiguous()
    return seed, choice, position


def words(rows: Rows, count: int, lane: int = noise.TOKENS, first: int = 0) -> npt.NDArray[np.uint32]:
    """The CPU's noise: uint32[S, count]."""
    seed, choice, position = (row.numpy() for row in rows)
    return noise.words_numpy(seed, choice, position, np.full_like(seed, first), count, lane)


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_philox_gives_the_published_words(counter: Int4, key: tuple[int, int], expected: Int4) -> None:
    """Both implementations give the words of Random123's known-answer test."""
    a, b, c, d, low, high = (np.array([word], np.uint64) for word in (*counter, *key))
    assert tuple(int(word[0]) for word in noise.philox_numpy((a, b, c, d), (low, high))) == expected
    e, f, g, h, left, right = (torch.tensor([word]) for word in (*counter, *key))
    assert tuple(int(word) for word in noise.philox_torch((e, f, g, h), (left, right))) == expected


@pytest.mark.parametrize("lane", [noise.TOKENS, noise.TILES])
def test_the_layout_of_counters_is_fixed(lane: int) -> None:
    """key = the halves of the seed, counter = (number div 4, position, choice, lane), word = number mod 4; lane 0 is
    for tokens and 1 for tiles. Never to change: a seed's samples would change with it."""
    seed, choice, position = 0x299F31D0A4093822, 0x13198A2E, 0x05A308D3
    got = words(tensors((seed, choice, position)), 10, lane)[0]
    for index in range(10):
        counter = tuple(np.array([word], np.uint64) for word in (index // 4, position, choice, lane))
        key = np.array([0xA4093822], np.uint64), np.array([0x299F31D0], np.uint64)
        a, b, c, d = counter
        assert got[index] == noise.philox_numpy((a, b, c, d), key)[index % 4][0]
    assert got.tolist() == (GOLDEN, GOLDEN_TILES)[lane]
    negative = words(tensors((-1, 0, 7)), 4, lane)[0]
    assert negative.tolist() == (GOLDEN_NEGATIVE, GOLDEN_TILES_NEGATIVE)[lane]


def test_noise_is_found_without_what_comes_before_it() -> None:
    """From any multiple of 4 on, each row from its own."""
    rows = tensors((1, 0, 5), (2, 1, 6))
    whole = words(rows, 2000)
    seed, choice, position = (row.numpy() for row in rows)
    part = noise.words_numpy(seed, choice, position, np.array([1024, 8]), 513, noise.TOKENS)
    assert np.array_equal(part[0], whole[0, 1024:1537])
    assert np.array_equal(part[1], whole[1, 8:521])


def test_exponentials_follow_from_the_words() -> None:
    """−log1p(−u) of u = (word + ½) · 2⁻³², in float32 and at most 1 − 2⁻²⁴."""
    rows = tensors((3, 0, 5), (2**62, 1, 6))
    integers = words(rows, 101)
    uniform = np.minimum((integers.astype(np.float32) + np.float32(0.5)) * np.float32(2**-32), np.float32(1 - 2**-24))
    want = -np.log1p(-uniform.astype(np.float64))
    np.testing.assert_allclose(
        noise.exponentials(*rows, torch.zeros(2, dtype=torch.int64), 101, noise.TOKENS).numpy(), want, rtol=1e-6
    )


def test_the_ends_of_the_words_are_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    """The least and the greatest word give positive, finite noise, whose logarithm is finite too."""
    ends = np.array([[0, 1, 2**32 - 1, 2**32 - 128]], np.uint32)
    monkeypatch.setattr(noise, "words_numpy", lambda *_: ends)
    exponentials = noise.exponentials(*tensors((0, 0, 0)), torch.tensor([0]), 4, noise.TOKENS)
    assert exponentials[0, 0] == 2**-33
    assert exponentials[0, 2] == pytest.approx(24 * np.log(2))
    assert exponentials.log().isfinite().all()


@pytest.mark.parametrize("count", [1, 3, 4, 49, 49_152])
def test_numpy_and_torch_agree(count: int) -> None:
    """The CPU's implementation and the one for devices give the same words, for any seed and any place."""
    rows = tensors((0, 0, 1), (-1, 5, 8191), (-(2**63), 2**31, 0), (2**63 - 1, 0, 2**31 - 1), (42, 1, 2))
    for lane, first in ((noise.TOKENS, 0), (noise.TILES, 0), (noise.TOKENS, 1024)):
        ours = words(rows, count, lane, first)
        assert ours.shape == (5, count)
        assert np.array_equal(ours, noise.words_torch(*rows, torch.full((5,), first), count, lane).numpy())


def test_a_row_has_its_noise_in_any_company() -> None:
    """What a row gets depends on its own seed, choice and position alone; and each of them matters."""
    rows = [(seed, choice, position) for seed in (1, 1 + 2**32) for choice in (0, 1) for position in (1, 2)]
    together = words(tensors(*rows), 20_000)
    for row, own in zip(rows, together, strict=True):
        assert np.array_equal(words(tensors(row), 20_000)[0], own)
    assert len({own.tobytes() for own in together}) == len(rows)
