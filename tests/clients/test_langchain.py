"""langchain-openai, as its documentation writes it: chains, streams, batches, async."""

import asyncio
from pathlib import Path

import openai
import pytest
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI, OpenAI

from tests.clients.engine import Engine, loading

QUESTION = "Which rivers are there?"


@pytest.fixture
def chat(engine: Engine) -> ChatOpenAI:
    """The chat model."""
    return ChatOpenAI(model="tiny", base_url=engine.base_url, api_key="none", temperature=0, max_tokens=24)


@pytest.fixture
def wanted(engine: Engine) -> str:
    """What the server says to the question."""
    return engine.chat(QUESTION, max_tokens=24, temperature=0)


def test_an_answer(chat: ChatOpenAI, wanted: str) -> None:
    """The text, why it ended, and the counts."""
    answer = chat.invoke(QUESTION)
    assert answer.content == wanted
    assert answer.response_metadata["finish_reason"] == "length"
    assert answer.response_metadata["model_name"] == "tiny"
    assert answer.usage_metadata["output_tokens"] == 24
    assert answer.usage_metadata["total_tokens"] == answer.usage_metadata["input_tokens"] + 24


def test_a_stream(chat: ChatOpenAI, wanted: str) -> None:
    """Chunks add up to the message, with its usage."""
    chunks = list(chat.stream(QUESTION, stream_usage=True))
    assert len(chunks) > 3
    total = chunks[0]
    for chunk in chunks[1:]:
        total += chunk
    assert total.content == wanted
    assert total.usage_metadata["output_tokens"] == 24
    assert total.response_metadata["finish_reason"] == "length"


def test_a_stream_may_be_left(chat: ChatOpenAI, wanted: str) -> None:
    """Whoever has read enough goes, and the next request is served as ever."""
    for chunk in chat.stream(QUESTION):
        if chunk.content:
            break
    assert chat.invoke(QUESTION).content == wanted


def test_a_chain(chat: ChatOpenAI, engine: Engine) -> None:
    """A prompt with a gap, the model, a parser; in a batch, each in its place."""
    prompt = ChatPromptTemplate.from_messages([("human", "Tell me of {what}.")])
    chain = prompt | chat | StrOutputParser()
    subjects = [{"what": f"river {index}"} for index in range(8)]
    answers = chain.batch(subjects)
    assert answers == [engine.chat(f"Tell me of {one['what']}.", max_tokens=24, temperature=0) for one in subjects]


def test_a_conversation(chat: ChatOpenAI, engine: Engine) -> None:
    """All roles arrive in order."""
    spoken = [SystemMessage("Be brief."), HumanMessage("Hello"), AIMessage("Hi."), HumanMessage(QUESTION)]
    roles = ["system", "user", "assistant", "user"]
    messages = [{"role": role, "content": one.content} for role, one in zip(roles, spoken, strict=True)]
    answer = engine.post("/v1/chat/completions", messages=messages, max_tokens=24, temperature=0)
    assert chat.invoke(spoken).content == answer["choices"][0]["message"]["content"]


def test_async(chat: ChatOpenAI, wanted: str) -> None:
    """Whole answers and a stream on one event loop."""

    async def both() -> tuple[list[str], str]:
        answers = await asyncio.gather(*(chat.ainvoke(QUESTION) for _ in range(8)))
        pieces = [chunk.content async for chunk in chat.astream(QUESTION)]
        return [answer.content for answer in answers], "".join(pieces)

    assert asyncio.run(both()) == ([wanted] * 8, wanted)


def test_options(chat: ChatOpenAI, wanted: str) -> None:
    """A stop string ends the text before it; log-probabilities come with the message; n answers by generate."""
    stop = wanted[8:11]
    assert chat.invoke(QUESTION, stop=[stop]).content == wanted[: wanted.index(stop)]
    scored = chat.bind(logprobs=True, top_logprobs=2).invoke(QUESTION).response_metadata["logprobs"]["content"]
    assert len(scored) == 24
    [several] = chat.bind(n=3, temperature=1, seed=7).bound.generate([[HumanMessage(QUESTION)]], n=3).generations
    assert len(several) == 3


def test_a_text_model(engine: Engine) -> None:
    """The older class, which completes texts, several in one request."""
    model = OpenAI(model="tiny", base_url=engine.base_url, api_key="none", temperature=0, max_tokens=12)
    prompts = ["the hills", "the sea"]
    wanted = [engine.text(prompt, max_tokens=12, temperature=0)["text"] for prompt in prompts]
    assert model.batch(prompts) == wanted
    assert "".join(model.stream(prompts[0])) == wanted[0]


def test_a_prompt_too_long(chat: ChatOpenAI) -> None:
    """A bad request with OpenAI's words."""
    with pytest.raises(openai.BadRequestError, match="maximum context length is 2048 tokens"):
        chat.invoke("x" * 4000)


def test_a_wrong_value(chat: ChatOpenAI) -> None:
    """The error names the field."""
    with pytest.raises(openai.BadRequestError, match="temperature") as raised:
        chat.invoke(QUESTION, temperature=9)
    assert raised.value.param == "temperature"


def test_tools_are_refused(chat: ChatOpenAI) -> None:
    """By name, as everything that is asked for and not served."""

    def rivers(country: str) -> str:
        """The rivers of a country."""
        return country

    with pytest.raises(openai.BadRequestError, match="tools"):
        chat.bind_tools([rivers]).invoke(QUESTION)


def test_it_waits_for_a_server_that_loads(tmp_path: Path) -> None:
    """503 is tried again as the server says, until the model is there."""
    with loading(tmp_path, 1.5) as engine:
        given = {"model": "tiny", "base_url": engine.base_url, "api_key": "none", "max_tokens": 4}
        with pytest.raises(openai.InternalServerError, match=r"The model is (still loading|not loaded)"):
            ChatOpenAI(**given, max_retries=0).invoke(QUESTION)
        assert ChatOpenAI(**given, max_retries=20).invoke(QUESTION).usage_metadata["output_tokens"] == 4
