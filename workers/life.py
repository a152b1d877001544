"""One worker from Hello to its exit code."""

import logging
import os
import platform
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress

import torch
import zmq

from toka.wire import VERSION, Failed, Hello, Ready, Welcome
from workers.config import Config, OptionError
from workers.errors import WorkerError
from workers.link import BadMessage, EngineLost, Link, Refusal, Stopped, join
from workers.logs import call
from workers.loop import Loop
from workers.outbox import CudaOutbox, HostOutbox
from workers.slots import BadPlan
from workers.start import Progress, Started, start

log = logging.getLogger("worker")

Start = Callable[[Welcome, torch.device, Progress], Started]


def live(config: Config, begin: Start = start) -> int:
    """Join, load, work, leave. Returns the exit code: 0 after Stop, 1 for a failure of this worker or of the engine, 2
    if the worker was started wrongly. Raises OptionError for a device or an address that is none."""
    device = _device(config)
    if config.threads:
        torch.set_num_threads(config.threads)
    stdin = None
    if config.parent == "stdin":
        stdin = sys.stdin.fileno()
        # Ctrl-C in a terminal reaches the whole group; the parent decides what it means and says Stop.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.setsockopt(zmq.IPV6, 1)  # for either kind of address
    try:
        welcome = join(context, config.engine, _hello(config, device), stdin)
        call(welcome.rank)
        with Link(context, welcome, stdin=stdin) as link:
            return _work(link, welcome, device, begin)
    except Refusal as refusal:
        log.error("the engine refused this worker: %s", refusal)
        return 2
    except Stopped as stop:
        log.info("stopped before it was ready%s", f": {stop}" if str(stop) else "")
        return 0
    except (EngineLost, BadMessage) as error:
        log.error("%s; leaving", error)
        return 1
    except KeyboardInterrupt:
        return 130
    finally:
        context.term()


def _work(link: Link, welcome: Welcome, device: torch.device, begin: Start) -> int:
    began = time.monotonic()
    try:
        started = begin(welcome, device, link.progress)
        seconds = time.monotonic() - began
        link.say(
            Ready(
                epoch=link.epoch,
                rank=link.rank,
                num_blocks=started.num_blocks,
                max_model_len=started.max_model_len,
                vocab_size=started.vocab_size,
                seconds=seconds,
            )
        )
        log.info("ready after %.1f s: %d blocks of %d tokens", seconds, started.num_blocks, welcome.page_size)
        if link.agreed().num_blocks > started.num_blocks:
            raise BadMessage(f"the engine wants more than the {started.num_blocks} blocks that are here")
        cuda = device.type == "cuda"
        outbox = CudaOutbox(welcome.max_slots, welcome.max_ahead, device) if cuda else HostOutbox()
        loop = Loop(link, started.slots, started.step, outbox)
        loop.run()
        log.info("stopped after %d steps: %.1f s of work, %.1f s idle between them", loop.steps, loop.busy, loop.idle)
        return 0
    except (EngineLost, Stopped):
        raise
    except (Exception, KeyboardInterrupt) as error:
        reason, ours = _reason(error)
        log.error("%s", reason, exc_info=None if ours else error)
        # If the engine is gone as well, there is nobody left to tell.
        with suppress(EngineLost):
            link.say(Failed(epoch=link.epoch, rank=link.rank, reason=reason))
        return 130 if isinstance(error, KeyboardInterrupt) else 1


def _reason(error: BaseException) -> tuple[str, bool]:
    """What a person should read, in one line; and whether that says it all, so that no traceback is needed."""
    lines = str(error).splitlines()
    first = lines[0] if lines else ""
    match error:
        case WorkerError():
            return first, True
        case BadMessage() | BadPlan():
            return f"the engine sent a plan that cannot be run: {first}", True
        case KeyboardInterrupt():
            return "stopped by hand", True
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in first:
        advice = "set kv_cache_num_tokens, max_tokens_per_forward or gpu_memory_utilization lower"
        return f"out of memory: {advice}{f' ({first})' if first else ''}", True
    return f"{type(error).__name__}: {first}", False


def _device(config: Config) -> torch.device:
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if config.device == "cpu" or (config.device == "auto" and not found):
        return torch.device("cpu")
    if not found:
        raise OptionError("device=cuda will not do: torch sees no CUDA device here; use device=cpu")
    if config.local_rank >= found:
        raise OptionError(f"local_rank={config.local_rank} will not do: the CUDA devices here are 0 … {found - 1}")
    torch.cuda.set_device(config.local_rank)
    return torch.device("cuda", config.local_rank)


def _hello(config: Config, device: torch.device) -> Hello:
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        name, memory = properties.name, properties.total_memory
    else:
        name, memory = platform.machine(), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Hello(
        version=VERSION,
        rank=config.rank,
        device=device.type,
        device_name=name,
        memory=memory,
        host=socket.gethostname(),
        pid=os.getpid(),
    )
