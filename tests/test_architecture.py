"""Imports point one way. Every import counts: lazy ones, those for type checkers, and `import_module("…")`."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
STDLIB = sys.stdlib_module_names


class Import(NamedTuple):
    """`name` is dotted and absolute; `from a import b` is `a.b`."""

    path: Path
    line: int
    name: str

    def within(self, *modules: str) -> bool:
        """Whether the import reaches one of the modules or something below it."""
        return any(self.name == module or self.name.startswith(f"{module}.") for module in modules)

    def __str__(self) -> str:
        return f"{self.path}:{self.line} imports {self.name}"


class Row(NamedTuple):
    """Files under `where` (but for those in `but`) import nothing of `never`."""

    where: str
    never: tuple[str, ...]
    but: tuple[str, ...] = ()


TABLE = [
    Row("toka", ("torch", "transformers", "flashinfer", "triton", "workers")),
    Row(
        "toka/core", ("asyncio", "zmq", "starlette", "logging", "time", "datetime", "socket", "subprocess", "threading")
    ),
    Row("toka/core", tuple(f"toka.{name}" for name in ("api", "text", "link", "engine", "metrics", "jobs"))),
    Row("toka/core", tuple(f"toka.{name}" for name in ("serve", "cli", "launch", "hub", "config"))),
    Row("toka/text", ("transformers", "toka.core")),
    Row("toka/api", ("toka.core", "toka.link", "toka.wire", "zmq")),
    Row("toka/metrics", ("zmq", "starlette", *(f"toka.{name}" for name in ("api", "engine", "link", "wire", "serve")))),
    Row("toka/jobs", ("toka.core", "toka.link", "toka.wire", "zmq")),
    Row("workers", ("starlette", "uvicorn", "fastapi")),
    Row(
        "workers",
        ("flashinfer",),
        but=("workers/attention/flashinfer_prefill.py", "workers/attention/flashinfer_decode.py"),
    ),
    Row("workers/models", ("zmq", "toka", "workers.link", "workers.loop")),
    Row("workers/layers", ("zmq", "toka", "workers.link", "workers.loop")),
    Row("workers/attention", ("zmq", "toka", "workers.link", "workers.loop")),
]

PICKLES = ("pickle", "_pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal", "multiprocessing")
"""Modules that pickle, or whose queues and pipes do."""
PICKLING_NAMES = {
    *("recv_pyobj", "send_pyobj", "ProcessPoolExecutor"),
    *("all_gather_object", "gather_object", "scatter_object_list", "broadcast_object_list"),
    *("send_object_list", "recv_object_list"),
}
"""Functions that pickle, torch.distributed's object collectives among them."""
SHAPELESS = {"utils", "util", "helpers", "helper", "common", "manager", "misc"}


def sources(*folders: str) -> list[Path]:
    """Python files under the folders, relative to the root."""
    return sorted(path.relative_to(ROOT) for folder in folders for path in (ROOT / folder).rglob("*.py"))


def parse(path: Path) -> ast.Module:
    return ast.parse((ROOT / path).read_text(encoding="utf-8"), filename=str(path))


def imports(path: Path, tree: ast.Module) -> Iterator[Import]:
    """Every import of the file, wherever it stands."""
    package = path.with_suffix("").parts[:-1]
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (Import(path, node.lineno, alias.name) for alias in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                above = package[: len(package) - level + 1] if level else ()
                base = ".".join((*above, *([module] if module else [])))
                yield from (Import(path, node.lineno, f"{base}.{alias.name}") for alias in names)
            case ast.Call(
                func=ast.Name(id=called) | ast.Attribute(attr=called), args=[ast.Constant(value=str(name)), *_]
            ):
                if called in ("import_module", "__import__"):
                    yield Import(path, node.lineno, name)


def all_imports(*folders: str) -> list[Import]:
    return [found for path in sources(*folders) for found in imports(path, parse(path))]


@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{row.where} never {row.never[0]}…")
def test_nothing_imports_what_its_row_forbids(row: Row) -> None:
    """The table of imports holds; the message names the lines that break it."""
    broken = [found for found in all_imports(row.where) if found.within(*row.never) and str(found.path) not in row.but]
    assert not broken, "\n".join(map(str, broken))


def test_the_wire_needs_the_standard_library_and_msgspec_alone() -> None:
    """The protocol can be read, and spoken, without anything else of the engine."""
    allowed = [*STDLIB, "msgspec"]
    broken = [
        found for found in imports(Path("toka/wire.py"), parse(Path("toka/wire.py"))) if not found.within(*allowed)
    ]
    assert not broken, "\n".join(map(str, broken))


def test_workers_know_the_wire_and_nothing_else_of_toka() -> None:
    """`workers/` runs beside any engine that speaks the protocol."""
    broken = [found for found in all_imports("workers") if found.within("toka") and not found.within("toka.wire")]
    assert not broken, "\n".join(map(str, broken))


def test_only_the_configuration_reads_the_environment() -> None:
    """An option has one way in; what a child process inherits is not an option."""
    broken = [
        f"{path}:{node.lineno} reads os.{node.attr}"
        for path in sources("toka")
        if path != Path("toka/config.py")
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv")
    ]
    assert not broken, "\n".join(broken)


def test_nothing_pickles() -> None:
    """No module that pickles, no object collective, no torch.load, no allow_pickle."""
    broken = [str(found) for found in all_imports("toka", "workers", "bench") if found.within(*PICKLES)]
    for path in sources("toka", "workers", "bench"):
        for node in ast.walk(parse(path)):
            match node:
                case ast.Attribute(value=ast.Name(id="torch"), attr="load"):
                    broken.append(f"{path}:{node.lineno} calls torch.load")
                case ast.Attribute(attr=name) | ast.Name(id=name) if name in PICKLING_NAMES:
                    broken.append(f"{path}:{node.lineno} uses {name}")
                case ast.keyword(arg="allow_pickle", value=ast.Constant(value=True)):
                    broken.append(f"{path}:{node.value.lineno} allows pickle")
    assert not broken, "\n".join(broken)


def test_a_file_is_a_noun() -> None:
    """No module is named after the fact that nobody knew where to put its content."""
    assert not [path for path in sources("toka", "workers", "bench", "tests") if path.stem in SHAPELESS]


def test_a_broken_row_is_found_wherever_the_import_hides() -> None:
    """Lazy, relative, by string and for type checkers: the reader of imports sees them all, with their lines."""
    source = "\n".join(
        [
            "from toka import wire",
            "def load():",
            "    import torch.nn as nn",
            "    from ..core import blocks",
            "    from . import app",
            "    importlib.import_module('triton')",
        ]
    )
    found = [(found.line, found.name) for found in imports(Path("toka/api/chat.py"), ast.parse(source))]
    expected = [(1, "toka.wire"), (3, "torch.nn"), (4, "toka.core.blocks"), (5, "toka.api.app"), (6, "triton")]
    assert sorted(found) == expected


@pytest.mark.parametrize("module", ["toka.cli", "toka.serve", "toka.engine", "toka.api.app"])
def test_the_engine_runs_without_torch(module: str) -> None:
    """Importing it, with all that it imports, loads neither torch nor transformers."""
    loaded = _loaded_after(module)
    assert not loaded & {"torch", "transformers", "flashinfer", "triton", "workers"}


def test_the_command_line_starts_at_once() -> None:
    """`toka --help` waits for no server library, no tokenizer and no socket library."""
    assert not _loaded_after("toka.cli") & {"starlette", "uvicorn", "tokenizers", "zmq", "huggingface_hub", "jinja2"}


def test_the_wire_loads_nothing_else() -> None:
    """`import toka.wire` pulls in nothing but msgspec and the standard library."""
    before = _loaded_after("msgspec")
    assert _loaded_after("toka.wire") - before - STDLIB <= {"toka"}


def _loaded_after(module: str) -> set[str]:
    """Top-level modules in a fresh interpreter that has imported `module`."""
    code = f"import sys, {module}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    return set(done.stdout.split())
