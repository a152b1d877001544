"""How long the event loop keeps others waiting: /health, while hundreds of clients stream and long prompts come.

    python bench/loop.py             half a minute
    python bench/loop.py --smoke     the same path with little work: that it runs, not how fast

A real server, a worker without a model (steps of 20 ms), 500 clients that stream in a process of their own. Meanwhile
/health is asked for every few milliseconds, first with nothing else going on, then while prompts of 1 MB of text come
one after the other and are tokenized by SmolLM2's tokenizer, then while /tokenize answers for such texts. Each line is
the time that /health took: median, 99th percentile, longest; the last line is JSON. Three processes and a thread
want a core at the same time: on a machine that others use too, the longest time is theirs.
"""

import http.client
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread
from typing import NamedTuple
from urllib.parse import urlsplit

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.pretend import serving
from bench.server import Server, ServerEnded

TOKENIZER = "SmolLM2-135M-Instruct"
VOCABULARY = 49152
STEP_MS = 20.0
CONTEXT = 1 << 18
BLOCKS = 1 << 20
MEGABYTE = 1 << 20
ENDLESS = 8000
"""Tokens of a stream: more than are made while this runs."""
PAUSE = 0.003
"""Seconds between two questions of whether the server is well."""
PROMPT_TOKENS = re.compile(rb'"prompt_tokens":(\d+)')
COUNT = re.compile(rb'"count":(\d+)')
WORDS = ("river", "rises", "in", "the", "hills", "north", "of", "town", "and", "runs", "forty", "miles", "to", "sea")


class Waits(NamedTuple):
    """Milliseconds that /health took."""

    median: float
    p99: float
    longest: float
    asked: int

    def __str__(self) -> str:
        return f"median {self.median:.1f} ms, p99 {self.p99:.1f} ms, longest {self.longest:.1f} ms of {self.asked:,}"


def main() -> int:
    """Measure and print; returns the exit code."""
    words = sys.argv[1:]
    if "--help" in words or set(words) - {"--smoke"}:
        show(__doc__ or "")
        return 0 if "--help" in words else 2
    smoke = "--smoke" in words
    try:
        show(json.dumps(measure(clients=50 if smoke else 500, prompts=1 if smoke else 8, smoke=smoke)))
    except (ServerEnded, OSError, subprocess.SubprocessError) as error:
        sys.stderr.write(f"bench: {error}\n")
        return 1
    return 0


def measure(*, clients: int, prompts: int, smoke: bool) -> dict[str, object]:
    """All figures."""
    figures: dict[str, object] = {"bench": "loop", "smoke": smoke, "clients": clients}
    long = [megabyte(number) for number in range(prompts)]
    completions = [json.dumps({"prompt": text, "max_tokens": 1}).encode() for text in long]
    texts = [json.dumps({"prompt": text}).encode() for text in long]
    options = (f"tokenizer={TOKENIZER}", f"max_seqs_per_forward={clients + 8}")
    with serving(STEP_MS, *options, vocab_size=VOCABULARY, num_blocks=BLOCKS, max_len=CONTEXT) as server:
        loading = streams(server, clients, ENDLESS)
        try:
            started = time.perf_counter()
            until_running(server, clients)
            show(f"{clients} clients stream after {time.perf_counter() - started:.2f} s")
            for name, work in (
                ("streams", lambda: time.sleep(0.5 if smoke else 4)),
                ("prompts", lambda: send(server, "/v1/completions", completions, PROMPT_TOKENS)),
                ("tokenize", lambda: send(server, "/tokenize", texts, COUNT)),
            ):
                waits = ask_while(server, work)
                running = int(str(info(server)["sequences_running"]))
                show(f"{name}: {waits}")
                assert running >= clients, f"only {running} clients still streamed: the streams are too short"
                figures |= {f"{name}_ms": waits.median, f"{name}_ms_p99": waits.p99, f"{name}_ms_max": waits.longest}
        finally:
            loading.terminate()
            loading.wait()
    return {name: round(value, 2) if isinstance(value, float) else value for name, value in figures.items()}


def streams(server: Server, clients: int, tokens: int) -> "subprocess.Popen[bytes]":
    """So many clients that stream, under way."""
    command = [sys.executable, str(Path(__file__).parent / "load.py"), server.url, server.model]
    return subprocess.Popen([*command, str(clients), "1", str(tokens), "stream"], stdout=subprocess.DEVNULL)


def until_running(server: Server, clients: int) -> None:
    """Wait for all of them."""
    end = time.monotonic() + 60
    while int(str(info(server)["sequences_running"])) < clients:
        if time.monotonic() > end:
            raise OSError("the clients do not get to stream")
        time.sleep(0.05)


def ask_while(server: Server, work: Callable[[], object]) -> Waits:
    """Ask for /health over and over while something else is done."""
    failures: list[BaseException] = []
    over = Event()

    def run() -> None:
        try:
            work()
        except BaseException as error:
            failures.append(error)
        finally:
            over.set()

    thread = Thread(target=run)
    thread.start()
    took = []
    connection = connect(server)
    while not over.wait(PAUSE):
        started = time.perf_counter()
        connection.request("GET", "/health")
        response = connection.getresponse()
        response.read()
        took.append(1000 * (time.perf_counter() - started))
        if response.status != 200:
            raise OSError(f"/health says {response.status}")
    connection.close()
    thread.join()
    for failure in failures:
        raise failure
    return Waits(float(np.median(took)), float(np.percentile(took, 99)), max(took), len(took))


def send(server: Server, path: str, bodies: list[bytes], count: re.Pattern[bytes]) -> None:
    """POST one after the other, and look for the number of tokens in each answer. What would hold the interpreter, and
    with it the clock of those who ask for /health, is done before."""
    for body in bodies:
        data = post(server, path, body)
        found = count.search(data)
        if not found or int(found[1]) < MEGABYTE // 10:
            raise OSError(f"{path} answers {data[:200].decode(errors='replace')}")


def megabyte(number: int) -> str:
    """A text of so many bytes, unlike those of other numbers."""
    generator = np.random.default_rng(number)
    words = np.array(WORDS)[generator.integers(0, len(WORDS), MEGABYTE // 4)]
    return " ".join(words.tolist())[:MEGABYTE]


def post(server: Server, path: str, body: bytes) -> bytes:
    """The answer. Raises OSError if it is an error."""
    connection = connect(server)
    connection.request("POST", path, body)
    response = connection.getresponse()
    data = response.read()
    connection.close()
    if response.status != 200:
        raise OSError(f"{path} says {response.status}: {data[:500].decode(errors='replace')}")
    return data


def info(server: Server) -> dict[str, object]:
    """/server_info."""
    connection = connect(server)
    connection.request("GET", "/server_info")
    found: dict[str, object] = json.loads(connection.getresponse().read())
    connection.close()
    return found


def connect(server: Server) -> http.client.HTTPConnection:
    """A connection of its own."""
    parts = urlsplit(server.url)
    return http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=60)


def show(line: str) -> None:
    """Print."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
