"""Many clients at once, some of whom leave: the others lose nothing, and everything is given back."""

import asyncio
import json
import urllib.request
from pathlib import Path

import pytest
from openai import AsyncOpenAI

from bench.server import Server
from tests.fakes import write_tiny_model

CLIENTS = 64
TOKENS = 120


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of random weights."""
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


def state(server: Server) -> dict[str, object]:
    with urllib.request.urlopen(f"{server.url}/server_info", timeout=10) as response:
        found: dict[str, object] = json.load(response)
        return found


async def everything_is_back(server: Server) -> None:
    """Nothing open, nothing running, all blocks free."""
    async with asyncio.timeout(20):
        while True:
            now = await asyncio.to_thread(state, server)
            if (now["requests_open"], now["sequences_running"], now["sequences_waiting"]) == (0, 0, 0):
                assert now["blocks_free"] == now["blocks_total"]
                return
            await asyncio.sleep(0.05)


async def stream(client: AsyncOpenAI, index: int, leave_after: int | None) -> str:
    """The text of a stream, or what came before it was left after `leave_after` chunks."""
    pieces = []
    answer = await client.completions.create(
        model="tiny",
        prompt=f"client {index} asks ",
        max_tokens=TOKENS,
        seed=index,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    async with answer:
        async for chunk in answer:
            pieces.append(chunk.choices[0].text)
            if len(pieces) == leave_after:
                break
    return "".join(pieces)


async def whole(client: AsyncOpenAI, index: int) -> str:
    answer = await client.completions.create(
        model="tiny",
        prompt=f"client {index} asks ",
        max_tokens=TOKENS,
        seed=index,
        extra_body={"ignore_eos": True},
    )
    return answer.choices[0].text


@pytest.mark.parametrize("options", [["kv_cache_num_tokens=32768"], ["kv_cache_num_tokens=2048", "look_ahead=F"]])
async def test_a_third_of_the_clients_hang_up(tiny: Path, options: list[str]) -> None:
    """With room for all, and with a cache so small that they preempt each other."""
    with Server(f"model={tiny}", *options) as server:
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            streamed = await asyncio.gather(
                *(stream(client, index, 5 + index % 20 if index % 3 == 0 else None) for index in range(CLIENTS))
            )
            await everything_is_back(server)
            asked_whole = await asyncio.gather(*(whole(client, index) for index in range(CLIENTS)))
            for index, (pieces, text) in enumerate(zip(streamed, asked_whole, strict=True)):
                assert text.startswith(pieces) if index % 3 == 0 else pieces == text
            await everything_is_back(server)


async def test_a_client_that_waits_for_a_whole_answer_may_leave_too(tiny: Path) -> None:
    """Unstreamed requests are cancelled as well, whether they run or wait."""
    with Server(f"model={tiny}", "kv_cache_num_tokens=32768", "max_seqs_per_forward=4") as server:
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            asked = [
                asyncio.create_task(
                    client.completions.create(
                        model="tiny", prompt="go", max_tokens=1500, extra_body={"ignore_eos": True}
                    )
                )
                for _ in range(16)
            ]
            await asyncio.sleep(0.5)
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
            await everything_is_back(server)
            assert int(str(state(server)["steps_total"])) < 1000
