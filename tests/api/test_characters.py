"""W-SSE-4 to 6 through the whole engine: characters, stop strings, and the stream against the whole."""

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.api.fakes import post
from tests.api.test_ends import BODIES, EVERY_WAY, ask, folder, serving

__all__ = ["folder"]

SCRIPT = "Zoë’s naïve 🦀 said: 你好 STO and STOP, e\u0301 and 👩‍💻! ".encode()


@pytest.fixture(autouse=True)
def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker says this text, a byte a token, from a place in it that depends on the length of the prompt."""

    def say(seeds: object, choices: object, positions: NDArray[np.int64], vocab_size: int) -> NDArray[np.int64]:
        return np.frombuffer(SCRIPT, np.uint8)[positions % len(SCRIPT)].astype(np.int64)

    monkeypatch.setattr("toka.sim.worker.pretend_tokens", say)


async def start(app: object, path: str) -> int:
    """The place in the text where the answers on this path begin."""
    answer = await post(app, path, BODIES[path] | {"max_tokens": 1})  # type: ignore[arg-type]
    place: int = answer.json["usage"]["prompt_tokens"] % len(SCRIPT)
    return place


@pytest.mark.parametrize("path", list(BODIES))
async def test_w_sse_4_characters_are_whole(folder: Path, path: str) -> None:
    """A token inside a character brings no text until the character is complete."""
    async with serving(folder) as (app, _):
        at = await start(app, path)
        rest = len(SCRIPT) - at
        [choice], _ = await ask(app, path, True, max_tokens=rest + len(SCRIPT), ignore_eos=True)
        assert choice.ids == list(SCRIPT[at:] + SCRIPT)
        assert choice.text == (SCRIPT[at:] + SCRIPT).decode("utf-8", "replace")
        whole = SCRIPT.decode()
        assert choice.text.endswith(whole)
        shown = "".join(choice.texts[-len(whole) :])
        assert shown == whole, "a piece a character"
        assert "\ufffd" not in shown


@pytest.mark.parametrize(("path", "stream"), EVERY_WAY)
async def test_w_sse_4_cut_off_at_the_end(folder: Path, path: str, stream: bool) -> None:
    """U+FFFD for what is never completed, with the end and not before."""
    async with serving(folder) as (app, _):
        at = await start(app, path)
        inside = SCRIPT.index("🦀".encode()) + 2
        count = (inside - at) % len(SCRIPT) or len(SCRIPT)
        [choice], _ = await ask(app, path, stream, max_tokens=count, ignore_eos=True)
        assert choice.text.endswith("naïve \ufffd")
        assert choice.finish == "length"
        assert all("\ufffd" not in piece for piece in choice.texts[1:-1])


@pytest.mark.parametrize("path", list(BODIES))
@pytest.mark.parametrize(
    "stop", [None, "STOP", "naïve 🦀", ["nowhere", "👩‍💻"], "Zoë’s naïve 🦀 said: 你好 STO and STOX"]
)
async def test_w_sse_5_the_stream_is_the_whole(folder: Path, path: str, stop: object) -> None:
    """Byte for byte, stop strings or not."""
    async with serving(folder) as (app, _):
        fields = {"max_tokens": 300, "ignore_eos": True, "stop": stop}
        [streamed], usage = await ask(app, path, True, **fields)
        [whole], other = await ask(app, path, False, **fields)
        assert (streamed.text, streamed.ids, streamed.finish, streamed.stop) == (
            *(whole.text, whole.ids, whole.finish, whole.stop),
        )
        assert usage["completion_tokens"] == other["completion_tokens"]


@pytest.mark.parametrize("path", list(BODIES))
async def test_w_sse_6_what_may_become_a_stop_string(folder: Path, path: str) -> None:
    """The start of one is held back, comes when it turns out to be none, and never if it becomes one."""
    async with serving(folder) as (app, _):
        at = await start(app, path)
        [choice], _ = await ask(app, path, True, max_tokens=500, ignore_eos=True, stop="STOP")
        assert (choice.finish, choice.stop) == ("stop", "STOP")
        text = (SCRIPT[at:] + SCRIPT).decode("utf-8", "replace")
        assert choice.text == text[: text.index("STOP")]
        if "STO and " in choice.text:
            assert "STO " in choice.texts, "held until the letter that decides, and then shown at once"
        assert not any(piece in ("S", "ST", "STO", "T", "TO") for piece in choice.texts)


@pytest.mark.parametrize("path", list(BODIES))
async def test_w_sse_7_stream_interval(folder: Path, path: str) -> None:
    """Chunks of so many tokens; the first and the last come at once, and nothing is lost."""
    async with serving(folder) as (app, _):
        fields = {"max_tokens": 200, "ignore_eos": True}
        [plain], _ = await ask(app, path, True, **fields)
        [paced], _ = await ask(app, path, True, stream_interval=10, **fields)
        assert (paced.text, paced.ids, paced.entries, paced.finish) == (
            *(plain.text, plain.ids, plain.entries, plain.finish),
        )
        assert paced.texts[0] == plain.texts[0]
        assert 20 <= len(paced.texts) <= 23
