"""litellm, as a program that uses many providers calls it."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import litellm
import pytest

from tests.clients.engine import Engine, loading

QUESTION = [{"role": "user", "content": "Which rivers are there?"}]


@pytest.fixture
def ask(engine: Engine) -> Callable[..., Any]:
    """litellm.completion, for this server."""

    def ask(provider: str = "openai", **options: Any) -> Any:
        given = {"messages": QUESTION, "max_tokens": 24, "temperature": 0} | options
        return litellm.completion(model=f"{provider}/tiny", api_base=engine.base_url, api_key="none", **given)

    return ask


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
def test_an_answer(ask: Callable[..., Any], engine: Engine, provider: str) -> None:
    """The text is the server's, and so are the counts."""
    answer = ask(provider)
    assert answer.choices[0].message.content == engine.chat(QUESTION[0]["content"], max_tokens=24, temperature=0)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 24
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 24


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
def test_a_stream(ask: Callable[..., Any], provider: str) -> None:
    """The chunks make the whole answer, and the last one counts."""
    chunks = list(ask(provider, stream=True, stream_options={"include_usage": True}))
    whole = ask(provider)
    pieces = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
    assert "".join(pieces) == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    built = litellm.stream_chunk_builder(chunks, messages=QUESTION)
    assert built is not None
    assert built.choices[0].message.content == whole.choices[0].message.content


def test_log_probabilities(ask: Callable[..., Any]) -> None:
    """One entry a token, the best first."""
    [choice] = ask(logprobs=True, top_logprobs=2).choices
    assert len(choice.logprobs.content) == 24
    assert all(entry.logprob == entry.top_logprobs[0].logprob for entry in choice.logprobs.content)


def test_a_text(engine: Engine) -> None:
    """The older endpoint, with several prompts in one request."""
    prompts = ["the hills", "the sea", "the mills"]
    answer = litellm.text_completion(
        model="text-completion-openai/tiny",
        prompt=prompts,
        api_base=engine.base_url,
        api_key="none",
        max_tokens=12,
        temperature=0,
    )
    wanted = [engine.text(prompt, max_tokens=12, temperature=0)["text"] for prompt in prompts]
    assert [choice.text for choice in answer.choices] == wanted


def test_many_at_once(engine: Engine) -> None:
    """Each of sixteen gets its own answer."""
    questions = [f"What is {index} and {index}?" for index in range(16)]

    async def all_of_them() -> list[Any]:
        asked = [
            litellm.acompletion(
                model="openai/tiny",
                api_base=engine.base_url,
                api_key="none",
                messages=[{"role": "user", "content": question}],
                max_tokens=8,
                temperature=0,
            )
            for question in questions
        ]
        return await asyncio.gather(*asked)

    answers = [answer.choices[0].message.content for answer in asyncio.run(all_of_them())]
    assert answers == [engine.chat(question, max_tokens=8, temperature=0) for question in questions]


def test_a_prompt_too_long(ask: Callable[..., Any]) -> None:
    """litellm knows it by its words, and programs fall back to a model with more room."""
    with pytest.raises(litellm.ContextWindowExceededError, match="maximum context length is 2048 tokens"):
        ask(messages=[{"role": "user", "content": "x" * 4000}])


def test_a_wrong_value(ask: Callable[..., Any]) -> None:
    """A bad request, which is not sent again."""
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        ask(temperature=9, max_retries=3)


def test_a_model_that_is_not_there(engine: Engine) -> None:
    """Not found, with the name of the one that is."""
    with pytest.raises(litellm.NotFoundError, match="Available: tiny"):
        litellm.completion(model="openai/huge", api_base=engine.base_url, api_key="none", messages=QUESTION)


def test_tools_are_refused(ask: Callable[..., Any]) -> None:
    """By name, as everything that is asked for and not served."""
    tool = {"type": "function", "function": {"name": "rivers", "parameters": {"type": "object", "properties": {}}}}
    with pytest.raises(litellm.BadRequestError, match="tools"):
        ask(tools=[tool])


def test_it_waits_for_a_server_that_loads(tmp_path: Path) -> None:
    """503 is tried again as the server says, until the model is there."""
    with loading(tmp_path, 1.5) as engine:
        question = {"messages": QUESTION, "max_tokens": 4}
        where = {"api_base": engine.base_url, "api_key": "none"}
        with pytest.raises(litellm.ServiceUnavailableError, match=r"The model is (still loading|not loaded)"):
            litellm.completion(model="openai/tiny", max_retries=0, **where, **question)
        answer = litellm.completion(model="openai/tiny", max_retries=20, **where, **question)
    assert answer.usage.completion_tokens == 4
