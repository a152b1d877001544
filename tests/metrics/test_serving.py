"""Metrics of a real server: over HTTP, in its log and to statsd, with a pretend worker on the other side of ZeroMQ."""

import contextlib
import json
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from bench.server import READY, Server, ServerEnded
from tests.fakes import write_tiny_model
from toka.launch import PACKAGES

STEP = 0.005
"""Seconds that a step is said to take."""
JOIN = re.compile(r"engine=(\S+)")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny", weights=False)


@contextlib.contextmanager
def serving(tiny: Path, *options: str) -> Iterator[Server]:
    """A server with a pretend worker."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = Server(f"model={tiny}", "load_format=dummy", "workers=manual", f"control=tcp://127.0.0.1:{port}", *options)
    with contextlib.ExitStack() as stack:
        stack.push(server.__exit__)
        joining = server.lines_until(JOIN)
        command = [sys.executable, "-m", "toka.sim.worker", f"engine={joining[1]}", f"step_ms={1000 * STEP}"]
        worker = subprocess.Popen(command, cwd=PACKAGES)
        stack.callback(worker.wait)
        stack.callback(worker.terminate)
        server.lines_until(READY)
        yield server


def scrape(server: Server) -> dict[str, float]:
    """Samples without buckets, by name and the labels that are not of every metric."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            own = [value for label, value in sample.labels.items() if label not in ("model_name", "engine")]
            if "le" not in sample.labels:
                found[" ".join([sample.name, *own])] = sample.value
    return found


def test_a_server_tells_what_it_does(tiny: Path) -> None:
    """A request with two samples of ten tokens is in the metrics, in the log and at the statsd server."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as listener:
        listener.bind(("127.0.0.1", 0))
        listener.settimeout(20)
        statsd = f"statsd_addr=127.0.0.1:{listener.getsockname()[1]}"
        with serving(tiny, statsd, "stats_report_seconds=0.05") as server:
            body = {"prompt": "Tell me about rivers.", "max_tokens": 10, "n": 2, "ignore_eos": True}
            request = urllib.request.Request(
                f"{server.url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=20) as answer:
                assert json.load(answer)["usage"]["completion_tokens"] == 20
            samples = scrape(server)
            sent = ""
            while "toka.generation_tokens:20|c" not in sent:
                sent += listener.recv(65536).decode()
            end = time.monotonic() + 20
            while " tokens/s in, " not in server.log and time.monotonic() < end:
                time.sleep(0.02)
            assert re.search(r"INFO toka.stats: \d+ running, \d+ waiting; .* preempted", server.log)
    assert samples["toka_generation_tokens_total"] == samples["vllm:generation_tokens_total"] == 20
    assert samples["toka_prompt_tokens_total computed"] + samples["toka_prompt_tokens_total cached"] == 42
    assert samples["toka_request_success_total length"] == 2
    assert samples["toka_requests_total /v1/completions 200"] == 1
    assert samples["toka_worker_up 0"] == 1
    assert samples["toka_num_requests_running"] == 0
    steps = samples["toka_step_tokens_count"]
    assert 10 <= steps <= 11
    kinds = ("prefill", "decode", "mixed")
    assert sum(samples[f"toka_step_duration_seconds_count {kind}"] for kind in kinds) == steps
    busy = sum(samples[f"toka_step_duration_seconds_sum {kind}"] for kind in kinds)
    assert busy == pytest.approx(steps * STEP)
    assert samples["toka_scheduler_seconds_count"] == steps
    assert samples["toka_event_loop_lag_seconds_count"] > 0
    assert samples["toka_tokenize_seconds_count"] == 1
    assert {"toka_startup_seconds launch", "toka_startup_seconds join"} <= set(samples)
    assert samples["process_resident_memory_bytes"] > 1e7


def test_a_wrong_statsd_address_is_one_line(tiny: Path) -> None:
    """The server refuses to start, before anything is loaded."""
    server = Server(f"model={tiny}", "load_format=dummy", "statsd_addr=nowhere")
    with pytest.raises(ServerEnded) as ended, server:
        pass
    assert str(ended.value) == "toka: statsd_addr=nowhere is no address: write HOST:PORT, such as 127.0.0.1:8125\n"
    assert server.process.returncode == 2
