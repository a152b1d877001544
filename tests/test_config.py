"""Options: how they are written, which source wins, and what a person reads when one is wrong."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toka.config import Config, Later, load
from toka.errors import ConfigError
from toka.options import Given, Option, arithmetic, help_lines, options


def complaint(*words: str, **variables: str) -> str:
    """The one line that these options are answered with."""
    with pytest.raises(ConfigError) as caught:
        load(words, variables)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    "words",
    [
        ["page_size=8"],
        ["page-size=8"],
        ["--page_size=8"],
        ["--page-size=8"],
        ["--page-size", "8"],
        ["--page_size", "8"],
        ["page_size=(2 ** 3)"],
    ],
)
def test_an_option_is_written_in_any_of_the_usual_ways(words: list[str]) -> None:
    """key=value, --key=value and --key value, with dashes or underscores."""
    assert load(words, {}).page_size == 8


def test_the_seeds_line_works_as_written() -> None:
    """Arithmetic in parentheses, spaces and all."""
    config = load(["model=DIR", "kv_cache_num_tokens=(16 * 1024)", "max_tokens_per_forward=8192"], {})
    assert (config.model, config.kv_cache_num_tokens, config.max_tokens_per_forward) == ("DIR", 16384, 8192)


def test_without_options_there_are_the_defaults() -> None:
    """Nothing has to be given."""
    assert load([], {}) == Config()


def test_the_nearest_source_wins(tmp_path: Path) -> None:
    """The command line, then the environment, then the file, then the default."""
    file = tmp_path / "toka.toml"
    file.write_text('port = 1\nmax-n = 1\npage_size = "(4 * 2)"\nhost = "localhost"\n')
    config = load([f"config={file}", "port=3"], {"TOKA_PORT": "2", "TOKA_MAX_N": "2"})
    assert (config.port, config.max_n, config.page_size, config.host) == (3, 2, 8, "localhost")
    assert config.max_seqs_per_forward == Config().max_seqs_per_forward


def test_the_file_can_be_named_in_the_environment(tmp_path: Path) -> None:
    """TOKA_CONFIG does what config= does."""
    file = tmp_path / "toka.toml"
    file.write_text("max_n = 7")
    assert load([], {"TOKA_CONFIG": str(file)}).max_n == 7


def test_none_clears_an_optional_option() -> None:
    """None on the command line undoes what the environment says."""
    assert load(["max_model_len=None"], {"TOKA_MAX_MODEL_LEN": "64"}).max_model_len is None


def test_none_is_a_word_where_it_is_a_choice() -> None:
    """generation_config has a choice of that name."""
    assert load(["generation_config=none"], {}).generation_config == "none"


def test_a_value_may_hold_an_equals_sign() -> None:
    """Only the first one separates."""
    assert load(["model=/models/a=b"], {}).model == "/models/a=b"


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("prot=1", "port"),
        ("--max-tokens-per-foward=9", "max_tokens_per_forward"),
        ("tensor_parallel_size=1", "tp_size"),
        ("max-num-seqs=4", "max_seqs_per_forward"),
    ],
)
def test_a_wrong_key_is_answered_with_the_one_that_was_meant(word: str, meant: str) -> None:
    """A slip of the finger, and the names that other engines use."""
    assert complaint(word).endswith(f"did you mean {meant}?")


def test_a_wrong_variable_is_not_ignored() -> None:
    """A variable that starts with TOKA_ is an option or a mistake."""
    assert complaint(TOKA_PROT="1") == "TOKA_PROT=1: there is no option prot; did you mean port?"


def test_variables_that_kubernetes_sets_are_not_options() -> None:
    """A service called toka makes such variables in every pod of its namespace."""
    variables = {"TOKA_PORT": "tcp://10.0.0.7:80", "TOKA_PORT_80_TCP": "tcp://10.0.0.7:80", "TOKA_SERVICE_HOST": "x"}
    assert load([], variables) == Config()


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("page_size=0", "a whole number from 1 to 256 (tokens in a block of KV cache)"),
        ("page_size=1.5", "a whole number from 1 to 256"),
        ("max_n=0", "a whole number at least 1 (largest n"),
        ("max_model_len=1", "a whole number at least 2, or None (longest prompt + answer in tokens"),
        ("gpu_memory_utilization=90", "a number above 0, at most 1 (share of the device's memory"),
        ("worker_timeout=inf", "a number above 0 (seconds"),
        ("dtype=bf16", "Did you mean bfloat16?"),
        ("control=10211", "text like tcp://127.0.0.1:10211"),
        ("worker_ports=a-b", "text like 10212-10299"),
        ("page_size=(1 / 2)", "arithmetic knows whole numbers, + - * // ** and parentheses"),
    ],
)
def test_a_wrong_value_is_answered_with_the_range_and_the_unit(word: str, expected: str) -> None:
    """The line repeats what was written and says what would do."""
    message = complaint(word)
    assert message.startswith(f"{word}: ")
    assert expected in message


def test_a_wrong_value_in_a_file_names_the_file(tmp_path: Path) -> None:
    """A person with three sources of options must know which one to mend."""
    file = tmp_path / "toka.toml"
    file.write_text("page_size = true")
    assert complaint(f"config={file}").startswith(f"page_size = T in {file}: expected a whole number")


def test_a_file_cannot_name_another(tmp_path: Path) -> None:
    """`config` is for the command line and the environment."""
    file = tmp_path / "toka.toml"
    file.write_text('config = "other.toml"')
    assert "there is no option config" in complaint(f"config={file}")


@pytest.mark.parametrize(("content", "problem"), [(None, "No such file"), ("port 3", "not TOML")])
def test_a_file_that_cannot_be_read_is_one_line(tmp_path: Path, content: str | None, problem: str) -> None:
    """Missing, or no TOML."""
    file = tmp_path / "toka.toml"
    if content is not None:
        file.write_text(content)
    assert problem in complaint(f"config={file}")


def test_an_option_given_twice_is_refused() -> None:
    """Neither of the two is silently ignored."""
    assert "given twice" in complaint("port=1", "--port", "2")


def test_a_key_is_in_no_message(tmp_path: Path) -> None:
    """Neither of the two places that give it, nor a file."""
    assert "secret" not in complaint("api_key=secret-1", "--api-key", "secret-2")
    file = tmp_path / "toka.toml"
    file.write_text('api_key = ["secret-3"]')
    assert "secret" not in complaint(f"config={file}")
    assert load([], {"TOKA_API_KEY": "secret-4"}).api_key == "secret-4"


@pytest.mark.parametrize("words", [["serv"], ["--port"], ["--port", "--host=x"], ["=3"], ["-p", "3"], [""]])
def test_a_word_that_is_no_option_says_how_options_are_written(words: list[str]) -> None:
    """No value, no key, or neither."""
    assert "write " in complaint(*words)


@pytest.mark.parametrize("option", options(Later).values(), ids=lambda option: option.name)
def test_a_planned_option_may_say_what_already_holds(option: Option) -> None:
    """Scripts that name every option keep working where they ask for nothing new."""
    assert load([f"{option.name}={option.default}"], {}) == Config()


@pytest.mark.parametrize(
    ("word", "default"),
    [("tp_size=2", "tp_size=1"), ("torch_compile=T", "torch_compile=F"), ("key_file=keys", "key_file=None")],
)
def test_a_planned_option_is_never_silently_ignored(word: str, default: str) -> None:
    """Anything but the default is refused, and the line says what to write."""
    message = complaint(word)
    assert "not supported yet" in message
    assert message.endswith(f"or write {default}")


@pytest.mark.parametrize(
    ("text", "value"), [("T", True), ("true", True), ("True", True), ("F", False), ("false", False)]
)
def test_switches_are_letters_or_words(text: str, value: bool) -> None:
    """T and F, true and false."""
    assert options(Later)["torch_compile"].read(Given(text, text)) is value


@given(st.integers(-(10**6), 10**6), st.sampled_from(["+", "-", "*", "//"]), st.integers(1, 10**6), st.integers(0, 5))
def test_arithmetic_agrees_with_python(left: int, operator: str, right: int, power: int) -> None:
    """Precedence, signs and rounding are Python's."""
    text = f"({left} {operator} {right} - 2 ** {power})"
    assert arithmetic(text) == eval(text)


@pytest.mark.parametrize(
    "text",
    [
        "(9 ** 9 ** 9)",
        "(2 ** 64)",
        "(2 ** -1)",
        "(1 // 0)",
        "(1",
        "()",
        "(1, 2)",
        "(True)",
        "(f())",
        "('a' * 9)",
        "(" * 99,
    ],
)
def test_arithmetic_is_bounded_and_only_that(text: str) -> None:
    """Nothing is called, nothing is huge, nothing but whole numbers comes out."""
    with pytest.raises(ValueError, match=r"."):
        arithmetic(text)


def test_every_option_explains_itself() -> None:
    """The description is the help text, the row in the README and half of each error."""
    assert all(option.description for struct in (Config, Later) for option in options(struct).values())
    assert len(help_lines(Config)) == len(Config.__struct_fields__)


def test_the_defaults_are_values_that_could_be_given() -> None:
    """What the README shows as a default is accepted as it stands there."""
    words = [f"{option.name}={option.default}" for option in options(Config).values()]
    assert load(words, {}) == Config()


def test_the_environment_of_the_process_is_read(tmp_path: Path) -> None:
    """Without variables of its own, load takes the process's."""
    code = "from toka.config import load; import sys; sys.stdout.write(str(load([]).max_n))"
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"TOKA_MAX_N": "3"}, capture_output=True, text=True, check=True
    )
    assert done.stdout == "3"
