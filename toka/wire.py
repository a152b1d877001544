"""The protocol between the engine and its workers, whole and in one file.

Every message is a tagged, array-like msgspec Struct in msgpack. Runs of integers travel as little-endian int32 `bytes`
(`pack` and `unpack` below, or numpy's `<i4`), never as lists. To change a message:

* add fields at the end only, each with a default; never reorder, retype or remove one;
* a new message gets a new tag; a tag is never used again;
* raise `VERSION` only when an older peer would misread what it gets. A worker of another version is refused.

`tests/test_wire.py` holds the bytes of each message.

Who says what, and where (the engine binds every socket, workers connect):

    worker ── Hello ───────────────────────────▶ engine    control socket, DEALER → ROUTER
    worker ◀─ Welcome | Refused ──────────────── engine    control socket
    worker ── Attached, Loading, Ready, Failed ▶ engine    PUSH → PULL, one PULL for all workers
    worker ── Tokens, Beat ────────────────────▶ engine    the same socket
    worker ◀─ Agreed, Plan, Plan, …, Stop ────── engine    PUSH → PULL, a fresh one for each (rank, epoch)
"""

import sys
from array import array
from collections.abc import Iterable

import msgspec

VERSION = 1
ANY_RANK = -1
"""A worker without a rank of its own in `Hello`: the engine gives it the first that is free."""
MAX_STOP_IDS = 9
"""How many ids the device stops at by itself: EOS and eight more. The engine judges every end; this only saves work."""
MAX_BIAS = 1024
"""How many entries `Sampling.bias` and `Sampling.allowed` may have."""
LEAST_LOGPROB = -9999.0
"""The log-probability of what cannot come, and the least there is: JSON, where they end up, has no infinity."""
NO_TOKEN = -1
"""What a worker returns for a row whose sequence has already stopped on the device."""


class Message(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Anything that crosses a socket."""


# Worker → engine, on the control socket


class Hello(Message, tag="hello", frozen=True, kw_only=True):
    """A worker asks to join."""

    version: int
    rank: int = ANY_RANK
    device: str = "cpu"
    """`cpu` or `cuda`."""
    device_name: str = ""
    memory: int = 0
    """Bytes of the device's memory, in all."""
    host: str = ""
    pid: int = 0


# Engine → worker, on the control socket


class Welcome(Message, tag="welcome", frozen=True, kw_only=True):
    """The worker is in: what to load, how large, and where to talk."""

    epoch: int
    rank: int
    results: str
    """Endpoint of the PULL that takes everything workers say from here on."""
    plans: str
    """Endpoint of the PUSH that only this (rank, epoch) reads."""
    model: str
    """A folder with config.json and safetensors."""
    dtype: str
    """`float32`, `bfloat16` or `float16`."""
    load_format: str
    page_size: int
    max_slots: int
    """Sequences in one forward pass, and so slots of device state."""
    max_tokens: int
    """Tokens in one forward pass."""
    max_model_len: int
    """Longest sequence in tokens; 0: the model's own limit."""
    kv_tokens: int
    """Tokens of KV cache to allocate; 0: what fits."""
    memory_utilization: float
    """Share of the device's memory that weights, activations and KV cache may take together."""
    max_ahead: int
    """Plans that may be in flight at once."""
    attention: str = "auto"
    """What attends: `auto`, `triton`, `flashinfer` or `torch`."""
    cuda_graphs: bool = True
    """On a GPU, decoding steps are recorded once and replayed."""
    hydragen: bool = False
    """Plans name groups, and what they share is to be read for all of their slots at once."""
    logprobs_mode: str = "raw"
    """What a sampled token's log-probability is the log-softmax of. `raw`: the model's logits; `processed`: what the
    token was drawn from, after bias, penalties, masks, temperature, top_k, top_p and min_p (at temperature 0: after
    bias, penalties and masks). Tokens of prompts, which nobody drew, are scored by the model's logits in both."""


class Refused(Message, tag="refused", frozen=True, kw_only=True):
    """The worker may not join; `reason` says what to do about it."""

    reason: str


# Worker → engine


class Attached(Message, tag="attached", frozen=True, kw_only=True):
    """Both data sockets are connected; loading begins."""

    epoch: int
    rank: int


class Loading(Message, tag="loading", frozen=True, kw_only=True):
    """How far a long start has come: `done` of `total` bytes (or steps) of `phase`."""

    epoch: int
    rank: int
    phase: str
    done: int
    total: int


class Ready(Message, tag="ready", frozen=True, kw_only=True):
    """Weights are loaded and the KV cache is allocated."""

    epoch: int
    rank: int
    num_blocks: int
    """Blocks of KV cache that may be planned for. The spare block that takes unwanted writes comes on top."""
    max_model_len: int
    """Longest sequence that the model itself takes, in tokens."""
    vocab_size: int
    """Rows of the embedding: ids from 0 up to this, exclusive."""
    seconds: float
    """Time from `Welcome` to here."""


class Failed(Message, tag="failed", frozen=True, kw_only=True):
    """The worker cannot go on and is about to leave; `reason` is one line for the person who started it."""

    epoch: int
    rank: int
    reason: str


class Beat(Message, tag="beat", frozen=True, kw_only=True):
    """The process lives, whatever its main thread is busy with; `step` is the last one done (-1: none yet)."""

    epoch: int
    rank: int
    step: int


class Logprobs(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Log-probabilities of n tokens, and of the most probable ones in their places. Numbers are little-endian, and all
    are finite: what is impossible has LEAST_LOGPROB."""

    rows: bytes
    """int32[n]: in `Tokens.logprobs` the rows of the roster; in `Tokens.prompts` the positions, in the prompt, of the
    tokens that are scored."""
    chosen: bytes
    """float32[n]: of the tokens themselves."""
    width: int
    """The largest number of most probable tokens that any of the rows asked for."""
    ids: bytes
    """int32[n, width]: the most probable tokens, in falling order; of equals the lowest id first."""
    values: bytes
    """float32[n, width]: theirs. A token that is both sampled and in here has the very same float in both places."""
    ranks: bytes = b""
    """int32[n]: places of the tokens themselves among all, counted from 1 in the order of `ids`; of prompts only."""


class Tokens(Message, tag="tokens", frozen=True, kw_only=True):
    """What one step sampled."""

    epoch: int
    step: int
    ids: bytes
    """int32[rows]: a token for each row of the step's roster, in its order, or NO_TOKEN."""
    counts: bytes = b""
    """int32[rows]: tokens of each row; empty while every row has one."""
    busy: float = 0.0
    """Seconds the device worked on the step."""
    gap: float = 0.0
    """Seconds the device stood idle before it."""
    logprobs: Logprobs | None = None
    """Of the rows whose sequences ask for it and that sampled a token."""
    prompts: list[tuple[int, Logprobs]] = []
    """(index into the plan's chunks, the tokens of the prompt that the chunk has scored): the chunk over positions
    [start, end) scores those at start + 1 … min(end, prompt_len − 1)."""


# Engine → worker


class Agreed(Message, tag="agreed", frozen=True, kw_only=True):
    """The least `num_blocks` over the ranks of the replica. Plans name blocks below it only."""

    epoch: int
    num_blocks: int


class Sampling(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """How to choose tokens. The engine passes it on unread, from the request to the worker."""

    temperature: float = 1.0
    """0: the most probable token."""
    top_k: int = 0
    """Sample among this many most probable tokens; 0: all."""
    top_p: float = 1.0
    """Sample among the fewest most probable tokens whose probabilities reach this sum; 1: all."""
    min_p: float = 0.0
    """Sample among the tokens at least this share as probable as the most probable one; 0: all."""
    repetition_penalty: float = 1.0
    """Divides the positive logits, and multiplies the negative ones, of tokens in the prompt or the answer; 1: off."""
    presence_penalty: float = 0.0
    """Taken from the logits of tokens in the answer."""
    frequency_penalty: float = 0.0
    """Taken from the logits of tokens in the answer as often as they are there."""
    bias_ids: bytes = b""
    """int32[≤ MAX_BIAS]: tokens whose logits are changed."""
    bias: bytes = b""
    """float32[≤ MAX_BIAS], little-endian: what is added to them, before the temperature."""
    allowed: bytes = b""
    """int32[≤ MAX_BIAS]: the only tokens that may be sampled; none: all may."""
    min_tokens: int = 0
    """Generated tokens before which none of `blocked` is sampled."""
    blocked: bytes = b""
    """int32[n]: the ids that end the sequence."""
    logprobs: int = -1
    """Report the log-probability of each sampled token (see `Welcome.logprobs_mode`) and of this many most probable
    ones; -1: nothing."""
    prompt_logprobs: int = -1
    """The same for each token of the prompt but the first. Such a sequence takes nothing from the prefix cache."""


class Admit(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """A sequence takes a slot. It brings everything that its steps will need and that no later plan repeats."""

    slot: int
    ids: bytes
    """int32[tokens]: what must be in the KV cache before the first new token: the prompt, and after a preemption what
    was generated before it."""
    blocks: bytes
    """int32[blocks]: the head of the slot's block row. More come as `Plan.appends`."""
    stops: bytes = b""
    """int32[≤ MAX_STOP_IDS]: ids after which the device may stop by itself."""
    seed: int = 0
    """int64, the key of the noise."""
    choice: int = 0
    """Which of the request's samples this is: prompt index · n + sample index. Part of the noise's counter."""
    prompt_len: int = 0
    """How many of `ids` the client sent; the rest was generated before a preemption."""
    sampling: Sampling = Sampling()


class Group(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Blocks that several slots begin with, whose keys and values a step may read once for all of them (Juravsky et
    al., "Hydragen", 2024). A group may lie within a parent, which itself has none: there are two levels."""

    id: int
    blocks: bytes
    """int32[blocks]: the shared blocks, behind those of `parent`; none: there is no such group any more."""
    parent: int = -1
    """The group that all of this one's slots are in as well; -1: none, the blocks begin with the first token."""


class Plan(Message, tag="plan", frozen=True, kw_only=True):
    """One step, as changes to what the worker already holds. Applied in this order: releases, admits, appends; then the
    step runs over the chunks and the decoding slots.

    The step's roster, one row a sampled token: first each chunk that ends its slot's `ids`, in the order of `chunks`,
    then each decoding slot, in the order of `decode`.
    """

    epoch: int
    step: int
    """Counts up by one from 0 within an epoch."""
    releases: bytes = b""
    """int32[n]: slots given up."""
    admits: list[Admit] = []
    appends: bytes = b""
    """int32[n, 2]: (slot, block), in the order in which they extend the slot's row."""
    chunks: bytes = b""
    """int32[n, 3]: (slot, start, length): prefill `ids[start : start + length]` of the slot."""
    decode: bytes | None = None
    """int32[n]: slots that run their last token. None: those of the plan before."""
    groups: list[Group] = []
    """Groups that are no more, then groups that are new. An id may be used again."""
    members: bytes = b""
    """int32[n, 2]: (slot, group): the innermost group that the slot is in from this step on; -1: none. A slot that is
    released leaves its group by itself."""


class Stop(Message, tag="stop", frozen=True, kw_only=True):
    """Finish what was sent and exit with code 0."""

    reason: str = ""


ToEngine = Hello | Attached | Loading | Ready | Failed | Beat | Tokens
ToWorker = Welcome | Refused | Agreed | Plan | Stop

_encoder = msgspec.msgpack.Encoder()
_to_engine = msgspec.msgpack.Decoder(ToEngine)
_to_worker = msgspec.msgpack.Decoder(ToWorker)


def encode(message: Message) -> bytes:
    """The bytes of one message."""
    return _encoder.encode(message)


def decode_to_engine(data: bytes | memoryview) -> ToEngine:
    """What a worker said. Raises msgspec.DecodeError (of which ValidationError is one) on anything else."""
    return _to_engine.decode(data)


def decode_to_worker(data: bytes | memoryview) -> ToWorker:
    """What the engine said. Raises msgspec.DecodeError (of which ValidationError is one) on anything else."""
    return _to_worker.decode(data)


def pack(numbers: Iterable[int]) -> bytes:
    """int32 little-endian bytes. Raises OverflowError for a number outside int32."""
    run = array("i", numbers)
    if sys.byteorder == "big":
        run.byteswap()
    return run.tobytes()


def unpack(data: bytes) -> list[int]:
    """The numbers in `data`, the inverse of `pack`. Raises ValueError for bytes that are no whole int32."""
    run = array("i")
    run.frombytes(data)
    if sys.byteorder == "big":
        run.byteswap()
    return run.tolist()
