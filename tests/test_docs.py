"""What the documents say is what the code does."""

import re
import shlex
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest
from msgspec import Struct

from toka import cli
from toka.api.fields import IGNORED
from toka.config import Config, load
from toka.options import from_words, options, shown_value
from toka.sim.command import Simulate

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = ["README.md", "CONTRIBUTING.md", "docs/access.md", "docs/api.md", "docs/contract.md", "docs/metrics.md"]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
TOOLS = {"pip", "curl", "tox", "ruff", "mypy", "pytest"}
"""Commands that are not ours."""


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def commands() -> list[str]:
    """Everything in the documents that a person may type: console blocks, and code spans that begin with a command."""
    blocks = [block for name in DOCUMENTS for block in re.findall(r"```console\n(.*?)```", text(name), re.DOTALL)]
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    spans = [span for name in DOCUMENTS for span in re.findall(r"(?<!`)`([^`\n]+)`(?!`)", text(name))]
    ours = r"(\w+=\S+ )?(python|pytest|tox|toka|toka-\w+)( |$)"
    return sorted({*lines, *(span for span in spans if re.match(ours, span))})


def test_the_option_table_is_the_config() -> None:
    """Every field, its default and its description, in order; and nothing else."""
    shown = re.findall(r"^\| `(\w+)` \| `(.+?)` \| (.+) \|$", text("README.md"), re.MULTILINE)
    assert shown == [
        (option.name, shown_value(option.default), option.description) for option in options(Config).values()
    ]


def test_the_endpoints_are_the_routes() -> None:
    """Every route of the application, and nothing else."""
    routes = re.findall(r'Route\("([^":]+)(?::path)?(}?)"', text("toka/api/app.py"))
    shown = re.findall(r"`(/[^`]+)`", text("README.md").partition("Endpoints: ")[2].partition("\n\n")[0])
    assert shown == ["".join(route) for route in routes]


def test_the_fields_without_effect_are_listed() -> None:
    """All of them, and no others (W-CHAT-23)."""
    shown = text("docs/api.md").partition("compares this list with the code. -->")[2].partition("\n\n")[0]
    assert re.findall(r"`(\w+)`", shown) == sorted(IGNORED)


def statements() -> tuple[list[str], list[str]]:
    """The statements of the client contract that hold, and those that do not yet, as tests are named for them."""
    held, _, rest = text("docs/contract.md").partition("## Not there yet")
    named = [re.findall(r"^- \*\*W-([A-Z]+)-(\d+)\*\*", part, re.MULTILINE) for part in (held, rest)]
    held_names, missing_names = ([f"test_w_{kind.lower()}_{number}" for kind, number in part] for part in named)
    return held_names, missing_names


def named_tests() -> set[str]:
    """The beginnings of all tests that are named for a statement."""
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py")]
    return {name for source in sources for name in re.findall(r"def (test_w_[a-z]+_\d+)(?![0-9])", source)}


def test_every_statement_of_the_contract_is_tested() -> None:
    """What is said to hold has a test of its name, every test so named has its statement, and none is said twice."""
    held, missing = statements()
    assert len(held) > 70
    assert len({*held, *missing}) == len(held) + len(missing)
    assert named_tests() == set(held)


@pytest.mark.parametrize("command", commands())
def test_commands_can_be_typed(command: str) -> None:
    """Programs, modules, files, subcommands and options that the documents name exist."""
    words = shlex.split(command)
    while re.match(r"[A-Z_]+=", words[0]):
        words.pop(0)
    program, arguments = words[0], words[1:]
    match program:
        case "python" if arguments[0] == "-m":
            assert find_spec(arguments[1])
            if arguments[1] == "toka":
                check_toka(arguments[2:])
        case "python":
            assert (ROOT / arguments[0]).is_file()
        case "toka":
            check_toka(arguments)
        case "toka-ping" | "toka-download":
            assert program in PROJECT["scripts"]
        case "pytest":
            for path in (argument.partition("::")[0] for argument in arguments if argument.startswith("tests")):
                assert (ROOT / path).exists()
        case _:
            assert program in TOOLS


def check_toka(words: list[str]) -> None:
    """A subcommand, or none for serve, and options that it takes."""
    command = words.pop(0) if words and "=" not in words[0] else "serve"
    assert command in cli.COMMANDS
    given = from_words([word for word in words if word != "--help"])
    if command == "serve":
        load([value.shown for value in given.values()], {})
    else:
        structs = {"ping": cli.Ping, "download": cli.Download, "simulate": Simulate, "version": Struct}
        assert set(given) <= set(structs[command].__struct_fields__)


@pytest.mark.parametrize("name", [*DOCUMENTS, "CHANGELOG.md"])
def test_links_within_the_project_lead_somewhere(name: str) -> None:
    """Files that are linked exist."""
    links = re.findall(r"\]\(([^)#:]+)\)", text(name))
    assert [link for link in links if not (ROOT / name).parent.joinpath(link).exists()] == []


def test_console_scripts_exist() -> None:
    """What pip installs as a command is a function."""
    for target in PROJECT["scripts"].values():
        module, _, function = target.partition(":")
        assert callable(getattr(sys.modules[module], function))


def test_the_licence_is_whole() -> None:
    """The text of Apache-2.0 that the metadata names."""
    assert PROJECT["license"] == "Apache-2.0"
    assert "Apache License\n                           Version 2.0, January 2004" in text("LICENSE")
