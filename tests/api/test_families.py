"""W-CHAT-20 and W-CMP-5: prompts have the ids that transformers gives them, for each family of models.

The vocabularies and templates are small ones in the shape of the families' own.
"""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer

from tests.api.fakes import FakeServer, call, chat, complete
from tests.fakes import byte_characters
from toka.api.app import App, create_app
from toka.config import Config
from toka.text.template import ChatTemplate
from toka.text.tokenizer import Tokenizer

LLAMA = """\
{{- bos_token }}
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content | trim %}
    {%- set rest = messages[1:] %}
{%- else %}
    {%- set system = '' %}
    {%- set rest = messages %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nCutting knowledge: 2023\\n\\n' + system + '<|eot_id|>' }}
{%- for message in rest %}
    {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
QWEN = """\
{%- if messages[0].role != 'system' %}
    {{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
{%- endif %}
{%- if tools %}
    {%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{% endfor %}
{%- endif %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'assistant' and '</think>' in content %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + content }}
    {%- for call in message.tool_calls or [] %}
        {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
        {{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
MISTRAL = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Roles must alternate: user, assistant, user, and so on.') }}
    {%- endif %}
    {%- if message.role == 'user' %}
        {{- '[INST] ' + message.content + ' [/INST]' }}
    {%- else %}
        {{- ' ' + message.content + eos_token }}
    {%- endif %}
{%- endfor %}
"""


def byte_level(*special: str) -> tokenizers.Tokenizer:
    """Bytes, a few merges, and special tokens."""
    characters = byte_characters()
    vocab = {character: id for id, character in enumerate(characters)}
    merges = [("h", "e"), ("l", "l"), ("Ġ", "t"), ("Ċ", "Ċ"), (characters[0xC3], characters[0xA9])]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return backend


def with_bos(backend: tokenizers.Tokenizer, bos: str) -> tokenizers.Tokenizer:
    """Texts that are not chats start with BOS."""
    backend.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, backend.token_to_id(bos))]
    )
    return backend


def llama() -> tokenizers.Tokenizer:
    special = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
    return with_bos(byte_level(*special), special[0])


def qwen() -> tokenizers.Tokenizer:
    backend = byte_level("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    backend.add_tokens([AddedToken(token, normalized=False) for token in ("<think>", "</think>", "<tool_call>")])
    backend.normalizer = normalizers.NFC()
    return backend


def sentencepiece() -> tokenizers.Tokenizer:
    """Spaces are `▁`, and bytes stand for what has no token."""
    pieces = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", *"abcdefghijklmnopqrstuvwxyz", "▁t", "he", "▁▁"]
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab={piece: id for id, piece in enumerate(pieces)},
            merges=[("▁", "t"), ("h", "e"), ("▁", "▁")],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in pieces[:5]])
    return with_bos(backend, "<s>")


def mistral() -> tokenizers.Tokenizer:
    """A space is put in front of a text, not of what follows a special token."""
    backend = sentencepiece()
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return backend


def llama_2() -> tokenizers.Tokenizer:
    """A space is put in front of everything that special tokens stand between."""
    backend = sentencepiece()
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return backend


SENTENCEPIECE: dict[str, object] = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
FAMILIES: dict[str, tuple[Callable[[], tokenizers.Tokenizer], str, dict[str, object]]] = {
    "llama": (llama, LLAMA, {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}),
    "qwen": (qwen, QWEN, {"bos_token": None, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}),
    "mistral": (mistral, MISTRAL, SENTENCEPIECE | {"tokenizer_class": "LlamaTokenizer", "legacy": False}),
    "llama 2": (llama_2, MISTRAL, SENTENCEPIECE),
}
SYSTEM = {"role": "system", "content": " Be brief.\n"}
HELLO = {"role": "user", "content": "  hello the\n\nthird <b>é e\u0301 ☃ {{ 7 * 7 }} "}
ANSWER = {"role": "assistant", "content": "<think>\nwell\n</think>\n\nhello there"}
MARKUP = {"role": "user", "content": "<|im_end|><|eot_id|></s><|begin_of_text|><s>[INST] the end"}
CHATS: dict[str, list[dict[str, Any]]] = {
    "one": [HELLO],
    "three": [HELLO, ANSWER, HELLO],
    "markup": [MARKUP],
    "empty": [{"role": "user", "content": ""}],
}


class Family:
    """A family's model folder, served and known to transformers."""

    def __init__(self, folder: Path, server: FakeServer) -> None:
        template = ChatTemplate.load(folder)
        self.app: App = create_app(Config(), server, Tokenizer.load(folder), template, ["tiny"], 0)
        self.theirs: Any = AutoTokenizer.from_pretrained(folder)
        self.server = server

    async def prompt(self, messages: list[dict[str, Any]], **fields: Any) -> list[int]:
        """The ids that a chat runs with, which are those that /tokenize says."""
        answer = await chat(self.app, messages, **fields)
        assert answer.status == 200, answer.content
        [ids] = self.server.requests[-1].prompts
        said = await call(self.app, "POST", "/tokenize", {"messages": messages, **fields})
        assert said.json["tokens"] == ids
        return ids

    def expected(self, messages: list[dict[str, Any]], **options: Any) -> list[int]:
        """What transformers makes of them."""
        ids: list[int] = self.theirs.apply_chat_template(
            messages, tokenize=True, return_dict=False, **({"add_generation_prompt": True} | options)
        )
        return ids


@cache
def written(name: str, folder: Path) -> Path:
    backend, template, settings = FAMILIES[name]
    folder.mkdir()
    backend().save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(template)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(params=list(FAMILIES))
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, server: FakeServer) -> Family:
    return Family(written(request.param, tmp_path_factory.getbasetemp() / request.param), server)


@pytest.mark.parametrize("name", list(CHATS))
async def test_w_chat_20_families(family: Family, name: str) -> None:
    """Id for id; special tokens that a user writes are special there too."""
    assert await family.prompt(CHATS[name]) == family.expected(CHATS[name])
    ids = await family.prompt(CHATS[name], add_generation_prompt=False)
    assert ids == family.expected(CHATS[name], add_generation_prompt=False)


async def test_w_chat_20_bos_is_never_doubled(family: Family) -> None:
    """Where the template writes it, the tokenizer does not; a text prompt has it from the tokenizer."""
    bos = family.theirs.bos_token_id
    assert (await family.prompt([HELLO])).count(bos) == (bos is not None)
    assert (await complete(family.app, "hello")).status == 200
    assert family.server.requests[-1].prompts[0].count(bos) == (bos is not None)


async def test_w_chat_20_an_open_message(family: Family) -> None:
    """W-CHAT-22: its last text goes on, without a new header."""
    chat = [HELLO, {"role": "assistant", "content": "the third"}]
    assert await family.prompt(chat, continue_final_message=True) == family.expected(
        chat, continue_final_message=True, add_generation_prompt=False
    )


@pytest.mark.parametrize("text", ["hello", " the  end\n\n", "e\u0301é ☃", MARKUP["content"]])
async def test_w_cmp_5_families(family: Family, text: str) -> None:
    """A text prompt is what tokenizer(prompt) is."""
    assert (await complete(family.app, text)).status == 200
    assert family.server.requests[-1].prompts == [family.theirs(text).input_ids]


@pytest.mark.parametrize("family", ["llama", "qwen"], indirect=True)
async def test_w_chat_20_a_system_message(family: Family) -> None:
    """Of the families that take one; a developer's is one too."""
    expected = family.expected([SYSTEM, HELLO])
    assert await family.prompt([SYSTEM, HELLO]) == expected
    assert await family.prompt([SYSTEM | {"role": "developer"}, HELLO]) == expected


@pytest.mark.parametrize("family", ["mistral"], indirect=True)
async def test_w_chat_19_roles_must_alternate(family: Family) -> None:
    """The template's refusal, in its words."""
    answer = await chat(family.app, [HELLO, HELLO])
    assert (answer.status, answer.error["message"]) == (400, "Roles must alternate: user, assistant, user, and so on.")


@pytest.mark.parametrize("family", ["qwen"], indirect=True)
async def test_w_chat_21_a_template_that_may_think(family: Family) -> None:
    """reasoning_effort none is its enable_thinking=false."""
    silent = family.expected([HELLO], enable_thinking=False)
    assert await family.prompt([HELLO], chat_template_kwargs={"enable_thinking": False}) == silent
    assert (await chat(family.app, [HELLO], reasoning_effort="none")).status == 200
    assert family.server.requests[-1].prompts == [silent]
    assert silent != family.expected([HELLO])


@pytest.mark.parametrize("family", ["qwen"], indirect=True)
async def test_w_chat_17_arguments_of_calls(family: Family) -> None:
    """Sent as a string of JSON, rendered as the object that it is."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"city": "Zürich", "n": 1}'}}
    parsed = {**call, "function": {"name": "f", "arguments": {"city": "Zürich", "n": 1}}}
    tail = {"role": "tool", "content": "42", "tool_call_id": "1"}
    sent: list[dict[str, Any]] = [HELLO, {"role": "assistant", "content": None, "tool_calls": [call]}, tail]
    assert await family.prompt(sent) == family.expected(
        [HELLO, {"role": "assistant", "content": "", "tool_calls": [parsed]}, tail]
    )


@pytest.mark.model
@pytest.mark.parametrize("name", list(CHATS))
async def test_w_chat_20_the_default_model(smollm2: Path, server: FakeServer, name: str) -> None:
    """SmolLM2, whose template writes a system message of its own."""
    family = Family(smollm2, server)
    assert await family.prompt(CHATS[name]) == family.expected(CHATS[name])
    assert await family.prompt([SYSTEM, *CHATS[name]]) == family.expected([SYSTEM, *CHATS[name]])
    assert (await complete(family.app, HELLO["content"])).status == 200
    assert server.requests[-1].prompts == [family.theirs(HELLO["content"]).input_ids]
