"""The options of one worker, from a command line and torchrun's environment."""

import pytest

from toka.wire import ANY_RANK
from workers.config import Config, OptionError, parse, usage

ENGINE = "engine=tcp://host:10211"


@pytest.mark.parametrize(
    "arguments",
    [
        [ENGINE, "rank=3", "log_level=debug"],
        ["--engine", "tcp://host:10211", "--rank", "3", "--log-level", "debug"],
        ["--engine=tcp://host:10211", "--rank=3", "--log-level=debug"],
    ],
)
def test_each_way_of_writing_an_option_is_the_same(arguments: list[str]) -> None:
    """`key=value`, `--key value` and `--key=value`, with dashes or underscores."""
    assert parse(arguments, {}) == Config(engine="tcp://host:10211", rank=3, log_level="debug")


def test_defaults_leave_the_choice_to_others() -> None:
    """The engine gives the rank, torch the threads, the machine the device."""
    config = parse([ENGINE], {})
    assert (config.rank, config.device, config.threads, config.local_rank) == (ANY_RANK, "auto", 0, 0)


def test_torchrun_gives_the_ranks() -> None:
    """RANK and LOCAL_RANK count unless the command line says otherwise."""
    environment = {"RANK": "5", "LOCAL_RANK": "1"}
    assert parse([ENGINE], environment) == Config(engine="tcp://host:10211", rank=5, local_rank=1)
    assert parse([ENGINE, "rank=0"], environment).rank == 0


def test_a_file_is_an_address_too() -> None:
    """Local workers talk over ipc://."""
    assert parse(["engine=ipc:///run/toka.sock"], {}).engine == "ipc:///run/toka.sock"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "engine=ADDRESS is missing"),
        (["engnie=tcp://h:1"], r"no option 'engnie' \(did you mean engine\?\)"),
        ([ENGINE, "--treads", "2"], r"no option 'treads' \(did you mean threads\?\)"),
        ([ENGINE, "rank"], "'rank' is no option: write key=value"),
        ([ENGINE, "--rank"], "--rank needs a value: this worker's rank, from 0"),
        ([ENGINE, "rank=one"], "rank=one will not do: this worker's rank, from 0"),
        ([ENGINE, "rank=-2"], "rank=-2 will not do"),
        ([ENGINE, "threads=-1"], "threads=-1 will not do: CPU threads"),
        ([ENGINE, "device=cuad"], r"device=cuad will not do: auto, cpu or cuda; .* \(did you mean cuda\?\)"),
        (["engine=localhost:10211"], "will not do: the engine's control address, tcp://HOST:PORT or ipc://PATH"),
        (["engine=tcp://localhost"], "tcp://HOST:PORT"),
        (["engine=tcp://localhost:99999"], "tcp://HOST:PORT"),
        ([ENGINE, "rank=1", "--rank", "2"], "rank is given twice: rank=1 and rank=2; leave one out"),
    ],
)
def test_a_wrong_option_gets_one_line_of_help(arguments: list[str], words: str) -> None:
    """It names the option, what it takes, and the nearest word that exists."""
    with pytest.raises(OptionError, match=words) as caught:
        parse(arguments, {})
    assert "\n" not in str(caught.value)


def test_help_tells_every_option() -> None:
    """The descriptions of the fields are the help text."""
    text = usage()
    assert all(f"  {name} " in text for name in Config.__struct_fields__)
