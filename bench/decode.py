"""How fast one stream decodes on the CPU, against transformers; and what sixteen streams together make of it.

    python bench/decode.py                  both ratios, about three minutes on two cores
    python bench/decode.py smoke=T          the same path with few tokens: that it runs, not how fast
    python bench/decode.py url=http://…     a server that runs already, with the same model

Each run takes three measurements in turn: `transformers.generate`, one stream, and many streams. All decode greedily,
in float32, the same number of tokens after prompts of the same length, with as many threads as torch takes by itself.
Speeds are tokens over wall time, the prompt and HTTP included; what is printed is the median over the runs. The last
line is JSON.
"""

import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from http.client import HTTPConnection
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

from msgspec import Meta, Struct

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.server import Server, ServerEnded
from toka.config import Config
from toka.errors import TokaError
from toka.hub import locate
from toka.options import build, from_words, help_lines
from toka.text.tokenizer import Tokenizer

PROMPT = "The history of the city begins long before its first stone was laid, on a hill above the river, when"
FRESH = itertools.count(1000)
"""Token ids to begin a prompt with."""


class Options(Struct, frozen=True, kw_only=True):
    """What to measure."""

    model: Annotated[str, Meta(description="hub id or folder")] = Config().model
    url: Annotated[str | None, Meta(description="a running server; default: one is started")] = None
    tokens: Annotated[int, Meta(ge=2, description="tokens of each answer")] = 64
    streams: Annotated[int, Meta(ge=1, description="streams together")] = 16
    runs: Annotated[int, Meta(ge=1, description="alternated runs")] = 5
    smoke: Annotated[bool, Meta(description="one short run, to see that it works")] = False


def main() -> int:
    """Measure and print; returns the exit code."""
    if "--help" in sys.argv[1:]:
        show("\n".join(["python bench/decode.py [key=value …]", *help_lines(Options)]))
        return 0
    try:
        options = build(Options, from_words(sys.argv[1:]))
        show(json.dumps(measure(options)))
    except (TokaError, ServerEnded, OSError) as error:
        sys.stderr.write(f"bench: {error}\n")
        return 1
    return 0


def measure(options: Options) -> dict[str, object]:
    """The medians and both ratios."""
    tokens, streams, runs = (8, 4, 1) if options.smoke else (options.tokens, options.streams, options.runs)
    folder = locate(options.model)
    prompt = Tokenizer.load(folder).encode(PROMPT)
    with ExitStack() as stack:
        url = options.url or stack.enter_context(Server(f"model={folder}", "dtype=float32", "log_level=warning")).url
        contestants: dict[str, Callable[[], float]] = {
            "transformers": oracle(folder, prompt, tokens),
            "stream": lambda: ask_together(url, prompt, tokens, 1),
            "streams": lambda: ask_together(url, prompt, tokens, streams),
        }
        for run in contestants.values():  # the first run of anything is slower
            run()
        speeds: dict[str, list[float]] = {name: [] for name in contestants}
        for number in range(runs):
            for name, run in contestants.items():
                speeds[name].append(run())
            shown = ", ".join(f"{name} {values[-1]:.1f}" for name, values in speeds.items())
            show(f"run {number + 1} of {runs}, tokens/s: {shown}")
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    single, together = medians["stream"] / medians["transformers"], medians["streams"] / medians["stream"]
    show(f"one stream: {medians['stream']:.1f} tokens/s, {single:.2f} × transformers' {medians['transformers']:.1f}")
    show(f"{streams} streams: {medians['streams']:.1f} tokens/s, {together:.2f} × one stream's")
    return {
        "bench": "decode",
        "tokens": tokens,
        "streams": streams,
        "runs": runs,
        "tokens_per_second": {name: round(value, 2) for name, value in medians.items()},
        "stream_over_transformers": round(single, 3),
        "streams_over_stream": round(together, 3),
    }


def oracle(folder: Path, prompt: list[int], tokens: int) -> Callable[[], float]:
    """A run of transformers' own generate, in float32; returns tokens per second."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers has no types for it
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.generation_config.eos_token_id = None  # nothing ends before its time, as with ignore_eos
    ids = torch.tensor([prompt])
    mask = torch.ones_like(ids)

    def run() -> float:
        started = time.perf_counter()
        with torch.inference_mode():
            made = model.generate(ids, attention_mask=mask, max_new_tokens=tokens, do_sample=False, pad_token_id=0)
        seconds = time.perf_counter() - started
        assert made.shape[1] == len(prompt) + tokens
        return tokens / seconds

    return run


def ask_together(url: str, prompt: list[int], tokens: int, streams: int) -> float:
    """So many requests at once, no two with the same prompt; returns tokens per second over all of them."""
    # The first token is another each time, so that no answer can come from what another request has computed.
    prompts = [[next(FRESH), *prompt[1:]] for _ in range(streams)]
    with ThreadPoolExecutor(streams) as pool:
        started = time.perf_counter()
        made = sum(pool.map(lambda ids: ask(url, ids, tokens), prompts))
        return made / (time.perf_counter() - started)


def ask(url: str, prompt: list[int], tokens: int) -> int:
    """One completion; returns how many tokens came."""
    address = urlsplit(url)
    connection = HTTPConnection(address.hostname or "", address.port or 80, timeout=600)
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        answer = json.loads(connection.getresponse().read())
    finally:
        connection.close()
    if "error" in answer:
        raise OSError(f"{url} answered: {answer['error']['message']}")
    made: int = answer["usage"]["completion_tokens"]
    return made


def show(line: str) -> None:
    """Print."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
