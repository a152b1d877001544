"""Prompts equal transformers' `apply_chat_template`, character for character and id for id."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tests.fakes import CHATML, write_byte_tokenizer
from tests.text.vocabularies import loaded
from toka.errors import BadRequest, StartError
from toka.text.template import ChatTemplate
from toka.text.tokenizer import Tokenizer

SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "  Hi <b>&\n\n{{ 7 * 7 }} é  "}
ASSISTANT = {"role": "assistant", "content": "Hello! "}
CALL = {
    "role": "assistant",
    "content": None,
    "reasoning": "It asks for the weather.",
    "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich", "n": 1}}}],
}
PARTS = {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "<now> é", "parameters": {}}}]

RICH = """\
{%- set ns = namespace(count=0) -%}
{{- bos_token }}
{%- if tools %}
  {{- "Tools: " + (tools | tojson) + "\\n" }}
  {%- for tool in tools %}
    {{- tool.function | tojson(indent=2) }}
  {%- endfor %}
{%- endif %}
{% for message in messages %}
    {%- if message.role == "system" %}{% continue %}{% endif %}
    {%- set ns.count = ns.count + 1 %}
{{ ns.count }} {{ message["role"] | upper }}:
{% generation %}
    {%- if message.content is string %}
        {{- message.content | trim }}
    {%- else %}
        {%- for part in message.content %}[{{ part.text }}]{% endfor %}
    {%- endif %}
{% endgeneration %}
    {%- if message.reasoning_content %} ({{ message.reasoning_content }}, {{ message.thinking }}){% endif %}
    {%- for call in message.tool_calls or [] %}<call>{{ call.function | tojson }}</call>{% endfor %}
{{ eos_token }}
    {% if ns.count > 5 %}{% break %}{% endif %}
{%- endfor %}
{% if add_generation_prompt %}
ASSISTANT:{% if thinking is defined and not thinking %}<think></think>{% endif %}
{% endif %}

{{ documents }} {{ unk_token }} {{ undefined_token }}
"""

CHATS: list[list[Mapping[str, Any]]] = [
    [USER],
    [SYSTEM, USER],
    [SYSTEM, USER, ASSISTANT, USER],
    [USER, ASSISTANT],
]


def write(folder: Path, template: object) -> Path:
    """A folder with that template in tokenizer_config.json."""
    write_byte_tokenizer(folder)
    (folder / "chat_template.jinja").unlink()
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": template}))
    return folder


def load(folder: Path, source: str) -> ChatTemplate:
    template = ChatTemplate.load(write(folder, source))
    assert template is not None
    return template


def theirs(folder: Path) -> PreTrainedTokenizerBase:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert isinstance(tokenizer, PreTrainedTokenizerBase)
    return tokenizer


def agree(folder: Path, chat: Sequence[Mapping[str, Any]], **options: Any) -> str:
    """What both render. Fails if they differ, in text or in ids."""
    template = ChatTemplate.load(folder)
    assert template is not None
    options = {"add_generation_prompt": True, **options}
    text = template.render(chat, **options)
    reference, messages = theirs(folder), [dict(message) for message in chat]
    assert text == reference.apply_chat_template(messages, tokenize=False, **options)
    ids = Tokenizer.load(folder).encode(text, add_special_tokens=False)
    assert ids == reference.apply_chat_template(messages, return_dict=False, **options)
    return text


@pytest.mark.parametrize("source", [CHATML, RICH], ids=["chatml", "rich"])
@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("chat", CHATS, ids=len)
def test_prompts_are_those_of_transformers(
    tmp_path: Path, source: str, chat: list[Mapping[str, Any]], prompt: bool
) -> None:
    """White space around blocks, loop controls, filters, special tokens by name."""
    agree(write(tmp_path, source), chat, add_generation_prompt=prompt)


def test_tools_calls_and_reasoning_are_rendered(tmp_path: Path) -> None:
    """JSON without HTML escapes; null content is absent; reasoning under either name."""
    text = agree(write(tmp_path, RICH), [USER, CALL, PARTS], tools=TOOLS, thinking=False)
    assert '"description": "<now> é"' in text
    assert "[one][two]" in text
    assert "(It asks for the weather., It asks for the weather.)" in text


@pytest.mark.parametrize(
    ("source", "content"),
    [
        (CHATML, "The answer"),
        (CHATML, "The answer is "),
        (RICH, "The answer is "),
        (RICH, [{"type": "text", "text": "The answer is "}]),
    ],
)
def test_an_open_message_goes_on(tmp_path: Path, source: str, content: object) -> None:
    """continue_final_message ends the prompt right behind the last message's text."""
    chat: list[Mapping[str, Any]] = [USER, {"role": "assistant", "content": content}]
    text = agree(write(tmp_path, source), chat, add_generation_prompt=False, continue_final_message=True)
    assert text.rstrip().endswith(("The answer", "The answer is"))


def test_the_messages_stay_as_they_are(tmp_path: Path) -> None:
    """Rendering changes nothing that the caller holds."""
    chat: list[Mapping[str, Any]] = [PARTS, {"role": "assistant", "content": "so"}]
    before = json.dumps(chat)
    template = load(tmp_path, RICH)
    template.render(chat, add_generation_prompt=False, continue_final_message=True)
    assert json.dumps(chat) == before


@pytest.mark.model
@pytest.mark.parametrize("chat", CHATS, ids=len)
def test_the_default_models_prompts_are_those_of_transformers(smollm2: Path, chat: list[Mapping[str, Any]]) -> None:
    """Its template puts its own system message first."""
    agree(smollm2, chat)
    ids = loaded(smollm2).encode("<|im_start|>")
    assert len(ids) == 1


def test_a_file_of_its_own_comes_first(tmp_path: Path) -> None:
    """chat_template.jinja wins over tokenizer_config.json."""
    (write(tmp_path, "old") / "chat_template.jinja").write_text("new")
    assert agree(tmp_path, [USER]) == "new"


def test_named_templates_have_their_uses(tmp_path: Path) -> None:
    """`default`, and `tool_use` for requests with tools."""
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    write(tmp_path, named)
    assert agree(tmp_path, [USER]) == "plain"
    assert agree(tmp_path, [USER], tools=TOOLS) == "tools"


def test_additional_templates_are_files_too(tmp_path: Path) -> None:
    """As transformers 5 saves them."""
    (write_byte_tokenizer(tmp_path) / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    assert agree(tmp_path, [USER], tools=TOOLS) == "tools"
    assert agree(tmp_path, [USER]).startswith("<|im_start|>user")


def test_older_folders_name_their_tokens_elsewhere(tmp_path: Path) -> None:
    """special_tokens_map.json, with tokens as objects."""
    write(tmp_path, "{{ bos_token }}|{{ eos_token }}|{{ image_token }}")
    (tmp_path / "special_tokens_map.json").write_text(
        json.dumps({"bos_token": {"content": "<|endoftext|>", "lstrip": False}, "image_token": "<|im_end|>"})
    )
    assert agree(tmp_path, [USER]).startswith("<|endoftext|>|<|im_end|>|")


def test_a_folder_without_a_template_has_none(tmp_path: Path) -> None:
    """Base models cannot chat."""
    (write_byte_tokenizer(tmp_path) / "chat_template.jinja").unlink()
    assert ChatTemplate.load(tmp_path) is None


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{% for %}", r"the chat template of \S+ is broken: [^\n]+ \(line 1\); mend or remove it$"),
        ("{% if x %}\n{% endfor %}", r"is broken: [^\n]+ \(line 2\); mend or remove it$"),
        ([{"name": "rag", "template": "x"}], r"has chat templates named rag and none named default"),
        (7, r"neither a string nor a list of named templates; fetch the model again$"),
    ],
)
def test_a_broken_template_is_found_at_the_start(tmp_path: Path, template: object, says: str) -> None:
    """One line, with the place, before any request."""
    with pytest.raises(StartError, match=says):
        ChatTemplate.load(write(tmp_path, template))


def test_what_the_template_refuses_is_a_bad_request(tmp_path: Path) -> None:
    """With the template's own words."""
    template = load(tmp_path, "{{ raise_exception('Roles must alternate.\nSee the docs.') }}")
    with pytest.raises(BadRequest, match=r"^Roles must alternate\. See the docs\.$"):
        template.render([USER])


@pytest.mark.parametrize(
    "source",
    ["{{ messages[0].content + 1 }}", "{{ messages[5].content.x }}", "{{ messages[0]['a'] / 0 }}", "{{ 1 / 0 }}"],
)
def test_what_the_template_trips_over_is_a_bad_request(tmp_path: Path, source: str) -> None:
    """A template is foreign code: no error of its own is the server's."""
    with pytest.raises(BadRequest, match=r"^[^\n]+$"):
        load(tmp_path, source).render([USER])


@pytest.mark.parametrize(
    "source",
    ["{{ messages.append(1) }}", "{{ ''.__class__.__mro__ }}", "{{ messages[0].__init__.__globals__ }}"],
)
def test_a_template_cannot_reach_out(tmp_path: Path, source: str) -> None:
    """The sandbox refuses what could change or leave it."""
    with pytest.raises(BadRequest):
        load(tmp_path, source).render([USER])


def test_a_template_knows_the_day(tmp_path: Path) -> None:
    """Some put it into the system message."""
    assert load(tmp_path, "{{ strftime_now('%Y') | int > 2000 }}").render([USER]) == "True"


@pytest.mark.parametrize(
    ("source", "takes"),
    [
        (CHATML, False),
        (RICH, True),
        ("{% for m in messages %}{{ m.content | trim }}{% endfor %}", False),
        ("{% for m in messages %}{{ m.content | tojson }}{% endfor %}", False),
        ("{% for m in messages %}{% for p in m['content'] %}{{ p['text'] }}{% endfor %}{% endfor %}", True),
        ("{{ raise_exception('no') }}", False),
    ],
)
def test_whether_content_may_be_parts_is_tried_out(tmp_path: Path, source: str, takes: bool) -> None:
    """A template takes parts if their text comes out, and not as Python or JSON prints them."""
    assert load(tmp_path, source).takes_parts is takes


@pytest.mark.parametrize(
    ("source", "names"),
    [
        (CHATML, {"messages", "add_generation_prompt"}),
        ("{% if enable_thinking is defined and not enable_thinking %}x{% endif %}", {"enable_thinking"}),
        (
            "{%- macro head() %}{%- if reasoning_effort is not defined %}{%- set reasoning_effort = 'low' %}{% endif %}"
            "{{- 'Reasoning: ' + reasoning_effort }}{%- endmacro %}{{- head() }}",
            {"reasoning_effort"},
        ),
        ("{%- if not thinking is defined %}{% set thinking = false %}{% endif %}{{ thinking }}", {"thinking"}),
        ("{% set thinking = true %}{% for m in messages %}{{ thinking }}{% endfor %}", {"messages"}),
        ("{# enable_thinking #}{{ 'enable_thinking' }}", set()),
    ],
)
def test_the_variables_that_a_template_knows(tmp_path: Path, source: str, names: set[str]) -> None:
    """Those that it reads from outside, be there a default or not; its own and words in a text are none."""
    assert load(tmp_path, source).variables == names


def test_another_template_has_the_same_tokens(tmp_path: Path) -> None:
    """A broken one is the request's fault."""
    template = load(tmp_path, CHATML)
    assert template.other("{{ bos_token }}|{{ messages[0].role }}").render([USER]) == "<|im_start|>|user"
    with pytest.raises(BadRequest, match=r"^Invalid 'chat_template': [^\n]+ \(line 1\)\.$"):
        template.other("{% for %}")


def test_an_open_message_excludes_a_new_one(tmp_path: Path) -> None:
    """Both at once make no sense."""
    with pytest.raises(BadRequest, match="set one of them to false"):
        load(tmp_path, CHATML).render([ASSISTANT], continue_final_message=True)


@pytest.mark.parametrize(
    ("source", "chat"),
    [(CHATML, []), (CHATML, [{"role": "assistant"}]), ("{{ messages[0].content[:2] }}", [ASSISTANT])],
)
def test_an_open_message_needs_text_that_the_template_keeps(
    tmp_path: Path, source: str, chat: list[Mapping[str, Any]]
) -> None:
    """Else there is nothing to go on from."""
    with pytest.raises(BadRequest):
        load(tmp_path, source).render(chat, add_generation_prompt=False, continue_final_message=True)
