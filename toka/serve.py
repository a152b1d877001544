"""`toka serve`, from the options to the last answer: what is built, in which order, and how it all ends.

Whatever may refuse does so before the slow parts begin: options, then the port, then the model's files, then its text
side. From there on one task group holds everything that runs; the first of its tasks to fail ends the server.
"""

import asyncio
import contextlib
import logging
import shlex
import signal
import socket
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import uvloop

from toka.api.app import create_app
from toka.api.keys import Keys, check_reach
from toka.config import Config
from toka.engine import Engine
from toka.errors import StartError, TokaError
from toka.http import FLUSH, Http
from toka.hub import locate
from toka.launch import LocalWorker, manual_command
from toka.link import Link
from toka.listen import address, listening, tls_of
from toka.logs import json_line, set_up
from toka.metrics.record import Metrics
from toka.metrics.statsd import Statsd
from toka.metrics.tasks import attend
from toka.model import ModelFolder
from toka.request import Sampling
from toka.screen import Screen
from toka.text.template import ChatTemplate
from toka.text.tokenizer import Tokenizer
from toka.version import VERSION
from toka.weights import check_tenants, weights_of

log = logging.getLogger("toka.serve")

GRACE = 10.0
"""Seconds that a worker has, at the end, to finish what was sent to it."""


def serve(config: Config, screen: Screen) -> None:
    """Serve until SIGTERM or Ctrl-C. Raises ConfigError or StartError."""
    set_up(config)
    if config.log_format == "json":
        screen.log_as(lambda text: json_line(text, "info", "toka"))
    keys = Keys.load(config)
    check_reach(config, keys)
    check_tenants(weights_of(config.tenant_weights), keys.names)
    tls = tls_of(config)
    with (
        statsd_of(config) as statsd,
        listening(config) as listener,
        contextlib.closing(Link.bind(config)) as link,
    ):
        path = locate(config.model, config.revision, screen.progress, weights=config.load_format != "dummy")
        folder = ModelFolder.load(path)
        texts = path if config.tokenizer is None else locate(config.tokenizer, None, screen.progress, weights=False)
        tokenizer, template = Tokenizer.load(texts), ChatTemplate.load(texts)
        names = model_names(config, folder)
        metrics = Metrics(config, names[0])
        engine = Engine(config, folder, tokenizer, link, screen.progress, metrics)
        defaults = folder.generation_defaults if config.generation_config == "auto" else None
        if defaults and folder.unserved_defaults:
            log.warning(
                "generation_config.json asks for %s, not supported yet: left out", ", ".join(folder.unserved_defaults)
            )
        if defaults is None and folder.generation_defaults != Sampling():
            log.info("the sampling defaults in generation_config.json are not used; generation_config=auto uses them")
        if template is None:
            log.warning("%s has no chat template: /v1/completions is served, /v1/chat/completions is refused", texts)
        app = create_app(config, engine, tokenizer, template, names, int(time.time()), defaults, keys, metrics)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            try:
                runner.run(_serve(config, engine, link, Http(app, tls=tls), listener, names[0], screen, statsd))
            except BaseExceptionGroup as failures:
                raise _reason(failures) from None
            finally:
                screen.finish()


@contextlib.contextmanager
def statsd_of(config: Config) -> Iterator[Statsd | None]:
    """The statsd server that the options name. Raises ConfigError."""
    if config.statsd_addr is None:
        yield None
        return
    with contextlib.closing(Statsd.of(config.statsd_addr)) as statsd:
        yield statsd


async def _serve(
    config: Config,
    engine: Engine,
    link: Link,
    http: Http,
    listener: socket.socket,
    name: str,
    screen: Screen,
    statsd: Statsd | None,
) -> None:
    stopping = _heed_signals(engine)
    async with (
        _worker(config, engine, link, screen) as worker,
        _answering(http, listener) as answering,
        asyncio.TaskGroup() as group,
    ):
        running = group.create_task(engine.run(), name="engine")
        attending = [
            group.create_task(_announce(config, engine, name, address(config, listener), screen), name="announcement"),
            group.create_task(_outlive(answering), name="http"),
            group.create_task(attend(engine.metrics, statsd), name="metrics"),
        ]
        if worker:
            attending.append(group.create_task(_watch(worker, engine, link), name="worker"))
        await stopping.wait()
        screen.complain("stopping: running requests end, new ones are refused; once more ends at once")
        await engine.drain()
        for task in attending:
            task.cancel()
        await running


def _heed_signals(engine: Engine) -> asyncio.Event:
    """SIGTERM or Ctrl-C once sets the event, twice ends what runs; after that they have their usual effect."""
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()

    def heed() -> None:
        if stopping.is_set():
            engine.stop()
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)
        stopping.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, heed)
    return stopping


@contextlib.asynccontextmanager
async def _worker(config: Config, engine: Engine, link: Link, screen: Screen) -> AsyncIterator[LocalWorker | None]:
    """The local worker, or a line that says how to start one. It is gone afterwards."""
    if config.workers == "manual":
        screen.line(f"waiting for a worker; start it with: {manual_command(link.control)}")
        yield None
        return
    worker = await LocalWorker.start(link.control, f"log_level={config.log_level}", f"log_format={config.log_format}")
    try:
        yield worker
    finally:
        # A worker that is still loading has nothing to finish.
        await worker.stop(GRACE if engine.max_model_len else 0.0)


@contextlib.asynccontextmanager
async def _answering(http: Http, listener: socket.socket) -> AsyncIterator["asyncio.Task[None]"]:
    """The HTTP side, which outlives the engine by as long as clients need to take their answers, but not for ever."""
    task = asyncio.create_task(http.serve(sockets=[listener]), name="uvicorn")
    try:
        yield task
    finally:
        http.should_exit = True
        await asyncio.wait([task], timeout=FLUSH)
        for connection in list(http.server_state.connections):
            connection.transport.abort()
        await task


async def _announce(config: Config, engine: Engine, name: str, address: str, screen: Screen) -> None:
    """Say that the server is ready, and what to type."""
    started = time.monotonic()
    await engine.wait_ready()
    screen.finish()
    log.info("ready after %.1f s", time.monotonic() - started)
    screen.line(banner(name, address, engine.kv_tokens, engine.max_model_len, config))


async def _outlive(task: "asyncio.Task[None]") -> None:
    """Fail when the task does, but leave it running when cancelled."""
    await asyncio.shield(task)
    raise StartError("the HTTP side has ended by itself")


async def _watch(worker: LocalWorker, engine: Engine, link: Link) -> None:
    """Tell the engine if its worker ends."""
    how = await worker.ended()
    link.poll()  # what the worker still said tells more than how it ended
    engine.lost(f"the worker {how}; its last lines above say why")


def model_names(config: Config, folder: ModelFolder) -> list[str]:
    """What the model answers to in the API, its own name first: the option's, else the hub id or the folder's name."""
    if config.served_model_name:
        return [config.served_model_name]
    typed = [] if Path(config.model).expanduser().is_dir() else [config.model]
    return list(dict.fromkeys([*typed, folder.served_name]))


def banner(name: str, address: str, kv_tokens: int, max_model_len: int, config: Config) -> str:
    """What a person reads when the server is ready: where, what, how much, and a line to try."""
    reachable = address.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")
    question = '[{"role": "user", "content": "What is the capital of France?"}]'
    body = f'{{"messages": {question}, "max_tokens": 64, "temperature": 0}}'
    words = ["curl"]
    if config.uds:
        words.append(f"--unix-socket {shlex.quote(config.uds)}")
    words.append(f"{reachable}/v1/chat/completions -H 'content-type: application/json'")
    if config.api_key or config.api_key_file:
        words.append("-H 'authorization: Bearer YOUR_KEY'")
    return "\n".join(
        [
            f"toka {VERSION} serves {name} at {address}/v1" + (f" on {config.uds}" if config.uds else ""),
            f"KV cache: {kv_tokens:,} tokens; longest prompt and answer: {max_model_len:,} tokens",
            "try it:",
            f"  {' '.join(words)} -d '{body}'",
        ]
    )


def _reason(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    """What to tell a person: one line where toka failed on purpose, everything where it did not."""
    known, unknown = failures.split(TokaError)
    if unknown or known is None:
        return failures
    reason: BaseException = known
    while isinstance(reason, BaseExceptionGroup):
        reason = reason.exceptions[0]
    return reason
