"""The load generators as a person runs them, against a pretend worker and against a server that misbehaves."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from bench.pretend import ASCII, serving

ROOT = Path(__file__).resolve().parent.parent.parent


def generate(program: str, *words: str) -> "subprocess.CompletedProcess[str]":
    """Run bench/`program`.py. A pretend worker knows fewer ids than the tokenizer beside it."""
    words = words if "--help" in words else (*words, f"vocab_size={ASCII}")
    command = [sys.executable, str(ROOT / "bench" / f"{program}.py"), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env={**os.environ, "PYTHONPATH": ""})


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server whose worker makes tokens up, in 1 ms a step."""
    with serving(1.0) as server:
        yield server.url


def test_serve_prints_and_saves(url: str, tmp_path: Path) -> None:
    """The block that scrapers read, on stdout and alone; the file with vLLM's keys, and the figures of each request."""
    done = generate(
        "serve",
        *(f"--base-url={url}", "--dataset-name", "random", "--num-prompts", "12", "--random-input-len", "20"),
        *("--random-output-len", "9", "--random-range-ratio", "0.3", "--max-concurrency", "4", "--ignore-eos"),
        *("--goodput", "ttft:60000", "tpot:60000", "--num-warmups", "1", "--metric-percentiles", "50,99"),
        *("--save-result", "--save-detailed", "--result-dir", str(tmp_path), "--result-filename", "a.json"),
        *("--metadata", "who=test", "--num-clients", "2"),
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "============ Serving Benchmark Result ============"
    assert lines[1] == f"{'Successful requests:':<40} {12:<10}"
    assert lines[-1] == "=" * 50
    result = json.loads((tmp_path / "a.json").read_text())
    assert (result["completed"], result["failed"], result["num_prompts"]) == (12, 0, 12)
    assert result["request_goodput"] == pytest.approx(result["request_throughput"])
    assert result["max_concurrent_requests"] <= 4
    assert (result["num_clients"], result["who"], result["synthetic"]) == (2, "test", True)
    assert sum(result["output_lens"]) == result["total_output_tokens"]
    assert all(14 <= length <= 26 for length in result["input_lens"])
    assert all(map(len, result["generated_texts"]))
    keys = {f"{figure}_{name}_ms" for figure in ("mean", "p50", "p99") for name in ("ttft", "tpot", "itl", "e2el")}
    assert result.keys() >= keys
    assert 0 < result["mean_ttft_ms"] < result["mean_e2el_ms"]


def test_serve_at_a_rate(url: str) -> None:
    """Requests come when they are due: 20 at 40 a second need half a second."""
    words = ["dataset_name=generated-shared-prefix", "gsp_num_groups=4", "gsp_prompts_per_group=5"]
    words += ["gsp_system_prompt_len=64", "gsp_question_len=8", "gsp_output_len=3", "request_rate=40", "burstiness=inf"]
    done = generate("serve", f"base_url={url}", *words, "ignore_eos=T")
    assert done.returncode == 0, done.stderr
    seconds = float(done.stdout.partition("Benchmark duration (s):")[2].split()[0])
    assert seconds >= 19 / 40
    assert "Request rate configured (RPS):           40.00" in done.stdout


def test_throughput_of_several_choices(url: str, tmp_path: Path) -> None:
    """Whole answers of n choices: all tokens are there, prompts count once."""
    words = ["dataset_name=monkeys", "num_prompts=6", "n=4", "monkeys_prefix_len=40", "monkeys_question_len=8"]
    done = generate("throughput", f"base_url={url}", *words, "output_len=10", f"output_json={tmp_path / 'o.json'}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Throughput: ")
    assert "Total num prompt tokens:  288\nTotal num output tokens:  240\n" in done.stdout
    result = json.loads((tmp_path / "o.json").read_text())
    assert (result["num_requests"], result["num_sequences"], result["total_num_tokens"]) == (6, 24, 528)
    assert result["tokens_per_second"] == pytest.approx(528 / result["elapsed_time"])


def test_streams_of_several_choices(url: str) -> None:
    """Their chunks are told apart, and all tokens are counted."""
    words = ["num_prompts=3", "n=4", "input_len=8", "output_len=6", "stream=T"]
    done = generate("throughput", f"base_url={url}", *words)
    assert done.returncode == 0, done.stderr
    assert "Total num output tokens:  72\n" in done.stdout


def test_latency_one_after_the_other(url: str, tmp_path: Path) -> None:
    """vLLM's lines, and milliseconds per token; at a millisecond a step no token comes faster."""
    words = ["num_iters=3", "num_iters_warmup=1", "output_len=12", f"output_json={tmp_path / 'o.json'}"]
    done = generate("latency", f"base_url={url}", *words)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Avg latency: ")
    assert "99% percentile latency: " in done.stdout
    result = json.loads((tmp_path / "o.json").read_text())
    assert len(result["latencies"]) == 3
    assert result["mean_tpot_ms"] > 0.9
    assert result["avg_latency"] > 0.011


class Scripted(BaseHTTPRequestHandler):
    """Answers as the prompt's first id says."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        found = {"/v1/models": {"data": [{"id": "scripted", "root": "elsewhere"}]}}.get(self.path)
        self.reply(404 if found is None else 200, found or {"detail": "Not Found"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        script, tokens = body["prompt"][0], body["max_tokens"]
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": tokens}
        if script == 1:
            self.reply(500, {"error": {"message": "out of luck"}})
            return
        if script == 2:
            usage["completion_tokens"] -= 1
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        time.sleep(0.05)
        for number in range(tokens):
            if number:
                time.sleep(0.02)
            self.event({"choices": [{"index": 0, "text": "a"}]})
            if script == 3:
                self.close_connection = True
                return
        self.event({"choices": [], "usage": usage})
        self.wfile.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
        # A server may close a connection between two requests without a word.
        self.close_connection = script == 4

    def event(self, value: dict[str, Any]) -> None:
        data = b"data: " + json.dumps(value).encode() + b"\n\n"
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def reply(self, status: int, value: dict[str, Any]) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


@pytest.fixture
def scripted() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Scripted)
    thread = Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def rows(path: Path, *scripts: int) -> list[str]:
    """Options for requests that follow these scripts, in order, one after the other."""
    path.write_text("".join(json.dumps({"prompt": [script, 8]}) + "\n" for script in scripts))
    words = ["dataset_name=custom", f"dataset_path={path}", "custom_output_len=3", "disable_shuffle=T"]
    return [*words, "ignore_eos=T", "max_concurrency=1"]


def test_times_of_a_real_connection(scripted: str, tmp_path: Path) -> None:
    """What a server takes is what is measured: 50 ms to the first token, 20 between tokens."""
    words = [*rows(tmp_path / "rows", 0, 0), "save_result=T", f"result_dir={tmp_path}", "result_filename=a.json"]
    done = generate("serve", f"base_url={scripted}/v1", *words)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "a.json").read_text())
    assert 50 <= result["mean_ttft_ms"] < result["mean_e2el_ms"]
    assert result["mean_itl_ms"] >= 19
    assert result["mean_tpot_ms"] == pytest.approx(result["mean_itl_ms"])
    assert result["mean_e2el_ms"] == pytest.approx(result["mean_ttft_ms"] + 2 * result["mean_tpot_ms"])


def test_failures_are_counted_and_shown(scripted: str, tmp_path: Path) -> None:
    """A refusal, and a stream that breaks off; the others go on, and the exit code is 1."""
    done = generate("serve", f"base_url={scripted}", *rows(tmp_path / "rows", 0, 1, 3, 0))
    assert done.returncode == 1
    assert f"{'Successful requests:':<40} 2" in done.stdout
    assert f"{'Failed requests:':<40} 2" in done.stdout
    assert "1 failed: 500: out of luck" in done.stderr
    assert "1 failed: the server closed the connection within an answer" in done.stderr


def test_wrong_counts_are_an_error(scripted: str, tmp_path: Path) -> None:
    """With ignore_eos every answer has as many tokens as were asked for."""
    done = generate("serve", f"base_url={scripted}", *rows(tmp_path / "rows", 0, 2))
    assert done.returncode == 1
    assert "WRONG COUNT: request 1: 2 tokens came, 3 were asked for" in done.stderr


def test_connections_that_are_closed_between_requests(scripted: str, tmp_path: Path) -> None:
    """That is no failure: another one is made."""
    done = generate("serve", f"base_url={scripted}", *rows(tmp_path / "rows", 4, 4, 4))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("words", "code", "reason"),
    [
        (["base_url=http://127.0.0.1:9"], 1, "does not answer as an OpenAI server does"),
        (["serve=model=/nowhere"], 1, "/nowhere"),
        (["--profile"], 2, "profiler"),
        (["goodput=itl:5"], 2, "goodput"),
    ],
    ids=["nobody", "no start", "refused", "wrong"],
)
def test_what_cannot_be_is_one_line(words: list[str], code: int, reason: str) -> None:
    """No traceback; exit code 2 for options, 1 for the rest."""
    done = generate("serve", *words)
    assert done.returncode == code
    assert done.stdout == ""
    assert done.stderr.startswith("bench: ")
    assert reason in done.stderr
    assert "Traceback" not in done.stderr


def test_models_that_are_not_served(scripted: str) -> None:
    """The message says which are."""
    done = generate("latency", f"base_url={scripted}", "model=other")
    assert (done.returncode, done.stderr) == (2, f"bench: model=other: {scripted} serves scripted\n")


@pytest.mark.parametrize("program", ["serve", "throughput", "latency"])
def test_help(program: str) -> None:
    """What it does, and every option."""
    done = generate(program, "--help")
    assert done.returncode == 0
    assert f"python bench/{program}.py" in done.stdout
    assert "base_url=None" in done.stdout
