"""The protocol: the bytes of each message, what readers of another age make of them, and integers packed."""

import struct
from typing import get_args

import msgspec
import pytest

from toka import wire

PLAN = wire.Plan(
    epoch=3,
    step=17,
    releases=wire.pack([4]),
    admits=[
        wire.Admit(
            slot=2,
            ids=wire.pack([5, 6, 7]),
            blocks=wire.pack([9]),
            stops=wire.pack([0]),
            seed=-1,
            choice=1,
            prompt_len=3,
            sampling=wire.Sampling(
                temperature=0.5,
                top_k=3,
                top_p=0.9,
                min_p=0.25,
                repetition_penalty=1.5,
                presence_penalty=-0.5,
                frequency_penalty=0.5,
                bias_ids=wire.pack([1]),
                bias=b"\0\0\x80?",
                allowed=wire.pack([1]),
                min_tokens=2,
                blocked=wire.pack([0]),
                logprobs=5,
                prompt_logprobs=0,
            ),
        )
    ],
    appends=wire.pack([1, 8]),
    chunks=wire.pack([2, 0, 3]),
    decode=wire.pack([0, 1]),
    groups=[wire.Group(id=2, blocks=wire.pack([9]))],
    members=wire.pack([2, 2]),
)

LOGPROBS = wire.Logprobs(
    rows=wire.pack([0]),
    chosen=b"\0\0\x80\xbf",
    width=1,
    ids=wire.pack([7]),
    values=b"\0\0\x80\xbf",
    ranks=wire.pack([2]),
)

GOLDEN: dict[str, tuple[wire.Message, str]] = {
    "hello": (
        wire.Hello(version=1, rank=0, device="cuda", device_name="H200", memory=150 << 30, host="a", pid=7),
        "98a568656c6c6f0100a463756461a448323030cf0000002580000000a16107",
    ),
    "welcome": (
        wire.Welcome(
            epoch=1,
            rank=0,
            results="ipc://r",
            plans="ipc://p",
            model="/m",
            dtype="float32",
            load_format="auto",
            page_size=16,
            max_slots=1024,
            max_tokens=8192,
            max_model_len=2048,
            kv_tokens=0,
            memory_utilization=0.9,
            max_ahead=16,
            attention="auto",
            cuda_graphs=True,
            hydragen=False,
            logprobs_mode="processed",
        ),
        "dc0013a777656c636f6d650100a76970633a2f2f72a76970633a2f2f70a22f6da7666c6f61743332a46175746f10cd0400"
        "cd2000cd080000cb3feccccccccccccd10a46175746fc3c2a970726f636573736564",
    ),
    "refused": (wire.Refused(reason="no"), "92a772656675736564a26e6f"),
    "attached": (wire.Attached(epoch=1, rank=0), "93a861747461636865640100"),
    "loading": (
        wire.Loading(epoch=1, rank=0, phase="weights", done=1, total=2),
        "96a76c6f6164696e670100a7776569676874730102",
    ),
    "ready": (
        wire.Ready(epoch=1, rank=0, num_blocks=100, max_model_len=2048, vocab_size=256, seconds=1.5),
        "97a57265616479010064cd0800cd0100cb3ff8000000000000",
    ),
    "failed": (wire.Failed(epoch=1, rank=0, reason="x"), "94a66661696c65640100a178"),
    "beat": (wire.Beat(epoch=1, rank=0, step=-1), "94a4626561740100ff"),
    "tokens": (
        wire.Tokens(
            epoch=1,
            step=2,
            ids=wire.pack([7, -1]),
            busy=0.25,
            logprobs=LOGPROBS,
            prompts=[(0, LOGPROBS)],
        ),
        "99a6746f6b656e730102c40807000000ffffffffc400cb3fd0000000000000cb000000000000000096c4040000"
        "0000c404000080bf01c40407000000c404000080bfc4040200000091920096c40400000000c404000080bf01c4"
        "0407000000c404000080bfc40402000000",
    ),
    "agreed": (wire.Agreed(epoch=1, num_blocks=100), "93a66167726565640164"),
    "plan": (
        PLAN,
        "9aa4706c616e0311c40404000000919802c40c050000000600000007000000c40409000000c40400000000ff01"
        "039ecb3fe000000000000003cb3feccccccccccccdcb3fd0000000000000cb3ff8000000000000cbbfe0000000"
        "000000cb3fe0000000000000c40401000000c4040000803fc4040100000002c404000000000500c40801000000"
        "08000000c40c020000000000000003000000c4080000000001000000919302c40409000000ffc4080200000002"
        "000000",
    ),
    "stop": (wire.Stop(reason=""), "92a473746f70a0"),
}


def decode(data: bytes) -> wire.Message:
    try:
        return wire.decode_to_engine(data)
    except msgspec.ValidationError:
        return wire.decode_to_worker(data)


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_bytes(name: str) -> None:
    """The bytes of a message never change, or an older peer could not read it."""
    message, golden = GOLDEN[name]
    assert wire.encode(message).hex() == golden
    assert decode(bytes.fromhex(golden)) == message


def test_every_message_has_golden_bytes() -> None:
    """A new message comes with its bytes."""
    tags = {kind.__struct_config__.tag for kind in get_args(wire.ToEngine | wire.ToWorker)}
    assert tags == set(GOLDEN)


def test_a_plan_from_before_groups_is_read() -> None:
    """Its last two fields are missing and have their defaults."""
    old = wire.decode_to_worker(bytes.fromhex("98a4706c616e0300c40090c400c400c0"))
    assert old == wire.Plan(epoch=3, step=0)


def test_tokens_from_before_there_were_scores_are_read() -> None:
    """Missing fields have their defaults."""
    old = wire.decode_to_engine(
        bytes.fromhex("97a6746f6b656e730102c40807000000ffffffffc400cb3fd0000000000000cb0000000000000000")
    )
    assert old == wire.Tokens(epoch=1, step=2, ids=wire.pack([7, -1]), busy=0.25)


def test_scores_from_before_there_were_ranks_are_read() -> None:
    """They say nothing of ranks."""
    old = wire.decode_to_engine(
        bytes.fromhex(
            "98a6746f6b656e730102c40400000000c400cb0000000000000000cb000000000000000095c40400000000c404000080bf01"
            "c40407000000c404000080bf"
        )
    )
    assert isinstance(old, wire.Tokens)
    assert old.logprobs == msgspec.structs.replace(LOGPROBS, ranks=b"")


def test_a_welcome_from_before_logprobs_mode_is_read() -> None:
    """Such an engine means the model's logits."""
    old = wire.decode_to_worker(
        bytes.fromhex(
            "9fa777656c636f6d650100a76970633a2f2f72a76970633a2f2f70a22f6da7666c6f61743332a46175746f10cd0400cd2000"
            "cd080000cb3feccccccccccccd10"
        )
    )
    assert isinstance(old, wire.Welcome)
    assert old.logprobs_mode == "raw"


def test_an_old_reader_reads_a_longer_message() -> None:
    """Fields are added at the end; who does not know them passes over them."""
    longer = msgspec.msgpack.encode([*msgspec.msgpack.decode(wire.encode(PLAN)), "new", 1])
    assert wire.decode_to_worker(longer) == PLAN


def test_a_new_reader_reads_a_shorter_message() -> None:
    """Fields added at the end have defaults."""
    assert wire.decode_to_engine(msgspec.msgpack.encode(["tokens", 1, 2, b""])) == wire.Tokens(epoch=1, step=2, ids=b"")


@pytest.mark.parametrize("data", [b"", b"\xc1", msgspec.msgpack.encode(["no such tag", 1]), wire.encode(PLAN)[:-3]])
def test_anything_else_is_refused(data: bytes) -> None:
    """What is not in the protocol raises DecodeError, and nothing else."""
    with pytest.raises(msgspec.DecodeError):
        wire.decode_to_worker(data)


def test_a_message_for_the_other_side_is_refused() -> None:
    """The engine's decoder does not take plans."""
    with pytest.raises(msgspec.ValidationError):
        wire.decode_to_engine(wire.encode(PLAN))


def test_pack_is_little_endian_int32() -> None:
    """Whatever the machine's own order."""
    assert wire.pack([1, -2]) == struct.pack("<ii", 1, -2)
    assert wire.unpack(struct.pack("<ii", 1, -2)) == [1, -2]


def test_pack_refuses_what_is_no_int32() -> None:
    """Nothing wraps around silently."""
    with pytest.raises(OverflowError):
        wire.pack([1 << 31])


def test_no_message_has_a_list_of_integers() -> None:
    """Runs of integers travel as bytes."""
    for kind in (*get_args(wire.ToEngine | wire.ToWorker), wire.Admit, wire.Sampling, wire.Group, wire.Logprobs):
        for field in msgspec.structs.fields(kind):
            assert field.type != list[int], f"{kind.__name__}.{field.name}"
