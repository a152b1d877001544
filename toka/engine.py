"""The shell around the core: takes requests in, feeds the scheduler, sends its plans, routes what comes back.

One request's way through here:

    submit ─▶ Generation, one Sequence a choice ─▶ Scheduler
    Scheduler.plan ─▶ link.send                                     as often as the run-ahead depth allows
    link ─▶ heard(Tokens) ─▶ Scheduler.apply ─▶ plan again          first the worker's next step …
    drained ─▶ Choice.token | Choice.whole ─▶ Listener.deliver      … then text, once for all that has arrived

A Request, its Deltas and the Listener who gets them are in toka/request.py, a Generation and its Choices in
toka/generation.py. Everything happens on one event loop and nothing here waits; only `run`, `wait_ready` and `drain`
are coroutines.
"""

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Callable, Iterator
from typing import assert_never

import msgspec
import numpy as np

from toka.config import Config
from toka.core.admission import Policy
from toka.core.blocks import Ints
from toka.core.hydragen import Groups
from toka.core.ledger import Ledger
from toka.core.limits import Limits
from toka.core.progress import Diverged, Progress
from toka.core.prompt import Prompt
from toka.core.scheduler import Scheduler
from toka.core.sequence import End, Sequence
from toka.errors import BadRequest, ConfigError, ContextLengthExceeded, StartError, Unavailable
from toka.generation import Choice, Generation
from toka.link import Wire
from toka.metrics.record import ABORT, ERROR, Metrics, State, Times
from toka.model import ModelFolder
from toka.request import Delta, Listener, Request, Sampling
from toka.room import Room
from toka.text.output import TextOutput
from toka.text.tokenizer import Tokenizer
from toka.weights import weights_of
from toka.wire import (
    MAX_STOP_IDS,
    Agreed,
    Attached,
    Beat,
    Failed,
    Hello,
    Loading,
    Ready,
    Stop,
    ToEngine,
    Tokens,
    Welcome,
    pack,
)

log = logging.getLogger("toka.engine")

MAX_AHEAD = 16
"""Plans in flight at most, however short the steps are."""

OnLoading = Callable[[str, int, int], None]
"""Told of a worker's start: the phase, how much of it is done, how much there is."""


class Engine:
    """One model, served by one replica."""

    def __init__(
        self,
        config: Config,
        folder: ModelFolder,
        tokenizer: Tokenizer,
        link: Wire,
        on_loading: OnLoading | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        """Raises ConfigError or StartError if the model cannot be served as `config` says."""
        if config.max_model_len and config.max_model_len > folder.max_position_embeddings:
            raise ConfigError(
                f"max_model_len={config.max_model_len} is more than the {folder.max_position_embeddings} tokens "
                "that this model takes"
            )
        if len(folder.eos_ids) > MAX_STOP_IDS:
            raise StartError(f"the model has {len(folder.eos_ids)} end-of-text ids; up to {MAX_STOP_IDS} are served")
        self._config = config
        self._folder = folder
        self._tokenizer = tokenizer
        self._link = link
        self._on_loading = on_loading
        self.metrics = metrics or Metrics(config, folder.served_name)
        self.metrics.state = self._state
        self._key = secrets.token_bytes(16)
        self._ledger = Ledger(weights_of(config.tenant_weights))
        self._scheduler: Scheduler | None = None
        self._worker: Ready | None = None
        self._max_model_len = 0
        self._generations: set[Generation] = set()
        self._progress: list[Progress] = []
        self._wakeup: asyncio.Handle | None = None
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._ready = asyncio.Event()
        self._over: asyncio.Future[None] | None = None
        self._requests = 0
        self._room = Room(config.max_waiting_requests, config.max_waiting_tokens)

    def __repr__(self) -> str:
        return f"<Engine {len(self._generations)} requests, {self._scheduler or 'no worker'}>"

    # What the API sees

    @property
    def ready(self) -> bool:
        """A request would start now."""
        return self._scheduler is not None and not self._draining

    @property
    def max_model_len(self) -> int:
        """Longest prompt + answer in tokens; 0 until ready."""
        return self._max_model_len

    @property
    def kv_tokens(self) -> int:
        """Tokens that the KV cache holds; 0 until ready."""
        return self._scheduler.limits.num_blocks * self._config.page_size if self._scheduler else 0

    def check_room(self, tenant: str) -> None:
        """Raises Unavailable or RateLimited if a tenant's request that comes now is not taken, whatever is in it."""
        if not self._room.full(self._serving().queue, tenant):
            return
        if self._wakeup is not None:  # those who came since the last step may have room
            self._wakeup.cancel()
            self._awake()
        scheduler = self._serving()
        if self._room.full(scheduler.queue, tenant):
            raise self._room.refusal(scheduler, tenant, asyncio.get_running_loop().time())

    def submit(self, request: Request, listener: Listener) -> Generation:
        """Start a request. Raises RequestError, before any work is done, if it cannot be served."""
        scheduler = self._serving()
        generation = Generation(listener, self._cancel)
        arrived = self.metrics.clock()
        seed = request.seed if request.seed is not None else secrets.randbits(63)
        sampling = self._sampling(request)
        stops = () if request.ignore_eos else self._folder.eos_ids
        stops += tuple(id for id in request.stop_ids if id not in stops)
        scored = sampling.logprobs >= 0 or sampling.prompt_logprobs >= 0
        tokenizer = self._tokenizer if request.skip_special else self._tokenizer.spelled
        watched = request.stream or bool(request.stop) or scored or len(stops) > MAX_STOP_IDS
        for index, prompt in enumerate(request.prompts):
            ids = np.array(prompt, dtype=np.int32)
            limit = self._limit(request, ids)
            shared = Prompt(ids, request.cache_salt)
            for sample in range(request.n):
                sequence = Sequence(
                    shared,
                    limit=limit,
                    watched=watched,
                    uncached=sampling.prompt_logprobs >= 0,
                    priority=request.priority,
                    tenant=request.tenant,
                    stops=stops[:MAX_STOP_IDS],
                    seed=seed,
                    choice=index * request.n + sample,
                    sampling=sampling,
                )
                output = TextOutput(tokenizer) if watched else None
                choice = Choice(generation, sequence.choice, sequence, output, request, tokenizer, arrived)
                sequence.owner = choice
                generation.add(choice)
        for choice in generation.choices:
            scheduler.submit(choice.sequence)
        self.metrics.submitted(request.n, [choice.sequence.limit for choice in generation.choices])
        self._requests += 1
        self._generations.add(generation)
        self._idle.clear()
        self._wake()
        return generation

    def info(self) -> dict[str, object]:
        """The engine's state, for /server_info."""
        state: dict[str, object] = {
            "ready": self.ready,
            "draining": self._draining,
            "max_model_len": self._max_model_len,
            "requests_total": self._requests,
            "requests_open": len(self._generations),
            "stray_messages": self._link.dropped,
        }
        if scheduler := self._scheduler:
            state |= {
                "epoch": scheduler.epoch,
                "blocks_total": scheduler.limits.num_blocks,
                "blocks_free": scheduler.pool.available,
                "blocks_cached": scheduler.pool.retained,
                "page_size": scheduler.limits.page_size,
                "kv_cache_num_tokens": self.kv_tokens,
                "sequences_running": scheduler.running,
                "sequences_waiting": scheduler.waiting,
                "steps_total": scheduler.steps,
                "steps_in_flight": scheduler.in_flight,
                "preemptions_total": scheduler.preemptions,
            }
        return state

    def _state(self) -> State:
        """For the metrics."""
        scheduler = self._scheduler
        if scheduler is None:
            return State()
        pool = scheduler.pool
        return State(
            running=scheduler.running,
            waiting=scheduler.waiting,
            waiting_batch=scheduler.waiting_batch,
            blocks_used=pool.used,
            blocks_cached=pool.retained,
            blocks_free=pool.available - pool.retained,
            groups=scheduler.groups.count if scheduler.groups else 0,
            up=True,
        )

    # Its life

    async def run(self) -> None:
        """Serve until `stop`. Raises StartError if the worker fails or is lost, once all open requests are told."""
        self._over = asyncio.get_running_loop().create_future()
        self.metrics.phase("launch")
        self._link.open(self)
        try:
            await self._over
        finally:
            self._end(Unavailable("The server is stopping.", code="draining"))
            self._link.send(Stop(reason="the server is stopping"))
            self._link.close()

    async def wait_ready(self) -> None:
        """Until the worker has loaded."""
        await self._ready.wait()

    async def drain(self) -> None:
        """Take no new requests, let the open ones end, then stop."""
        self._draining = True
        await self._idle.wait()
        self.stop()

    def stop(self) -> None:
        """End now."""
        if self._over and not self._over.done():
            self._over.set_result(None)

    # What comes over the link

    def welcome(self, hello: Hello, epoch: int, rank: int, results: str, plans: str) -> Welcome:
        """The terms for a worker that may join."""
        config = self._config
        dtype = config.dtype
        if dtype == "auto":
            dtype = "float32" if hello.device == "cpu" else "bfloat16"
        self.metrics.joined()
        log.info("worker %d joins: pid %d on %s, %s", rank, hello.pid, hello.host, hello.device_name or hello.device)
        return Welcome(
            epoch=epoch,
            rank=rank,
            results=results,
            plans=plans,
            model=str(self._folder.path),
            dtype=dtype,
            load_format=config.load_format,
            page_size=config.page_size,
            max_slots=self._max_seqs,
            max_tokens=config.max_tokens_per_forward,
            max_model_len=config.max_model_len or self._folder.max_position_embeddings,
            kv_tokens=config.kv_cache_num_tokens or 0,
            memory_utilization=config.gpu_memory_utilization,
            max_ahead=MAX_AHEAD,
            attention=config.attention_backend,
            cuda_graphs=config.use_cudagraphs,
            hydragen=config.use_hydragen,
            logprobs_mode=config.logprobs_mode,
        )

    def heard(self, message: ToEngine) -> None:
        """A message of the live epoch."""
        with self._fatal():
            match message:
                case Tokens():
                    self._apply(message)
                case Beat() | Attached() | Hello():
                    pass
                case Loading():
                    self.metrics.phase(message.phase)
                    if self._on_loading:
                        self._on_loading(message.phase, message.done, message.total)
                case Ready():
                    self._start(message)
                case Failed():
                    self.lost(message.reason)
                case _:
                    assert_never(message)

    def drained(self) -> None:
        """All that had arrived is applied and the next steps are planned: now the text."""
        if self._progress:
            with self._fatal():
                self._route()

    def lost(self, reason: str) -> None:
        """The worker is gone: nothing that is open can be finished."""
        if self._over and not self._over.done():
            self._over.set_exception(StartError(reason))
        self._end(Unavailable("The worker that served this model is gone; the server is stopping."))

    # Inside

    @contextlib.contextmanager
    def _fatal(self) -> Iterator[None]:
        """An error of our own ends the engine. The event loop would only log it, and all that is open would hang."""
        try:
            yield
        except Exception as error:
            log.exception("the engine met an error that it did not expect")
            self.lost(f"the engine failed, as the lines above say ({type(error).__name__}); please report it")

    @property
    def _max_seqs(self) -> int:
        # Every running sequence has a token in a step.
        return min(self._config.max_seqs_per_forward, self._config.max_tokens_per_forward)

    def _policy(self) -> Policy:
        config = self._config
        return Policy(
            look_ahead=config.look_ahead,
            learn=config.use_spec_allocation and config.track_early_stopping,
            margin=1 - config.spec_allocation_target_kv_cache_utilization if config.look_ahead else 0,
        )

    def _groups(self) -> Groups | None:
        config = self._config
        if not config.use_hydragen:
            return None
        return Groups(-(-config.hydragen_min_prefix_len // config.page_size), config.hydragen_min_group_size)

    def _serving(self) -> Scheduler:
        """The scheduler, if requests may come. Raises Unavailable."""
        if self._draining:
            raise Unavailable("The server is stopping and takes no new requests.", code="draining")
        if self._scheduler is None:
            raise Unavailable("The model is not loaded yet; try again in a moment.")
        return self._scheduler

    def _sampling(self, request: Request) -> Sampling:
        """The request's, with the ids that may not be sampled before its min_tokens."""
        if request.sampling.min_tokens == 0:
            return request.sampling
        ends = {*self._folder.eos_ids, *request.stop_ids}
        return msgspec.structs.replace(request.sampling, blocked=pack(sorted(ends)))

    def _limit(self, request: Request, prompt: Ints) -> int:
        """New tokens that each sample of a prompt may have. Raises BadRequest."""
        assert self._worker
        if len(prompt) == 0:
            raise BadRequest("A prompt has no tokens.", param="prompt", code="empty_array")
        if prompt.min() < 0 or prompt.max() >= self._worker.vocab_size:
            raise BadRequest("A prompt has a token id outside the vocabulary.", param="prompt", code="invalid_value")
        room = self._max_model_len - len(prompt)
        limit = room if request.max_tokens is None else request.max_tokens
        if request.clamp:
            limit = min(limit, room)
        if request.max_tokens is not None and request.max_tokens < 1:
            raise BadRequest(
                "At least one token must be asked for.", param="max_tokens", code="integer_below_min_value"
            )
        if room < 1 or limit > room:
            raise ContextLengthExceeded(
                f"This model's maximum context length is {self._max_model_len} tokens. However, you requested "
                f"{len(prompt) + max(limit, 1)} tokens ({len(prompt)} in the prompt, {max(limit, 1)} in the "
                "completion). Please reduce the length of the prompt or the completion.",
                param="prompt",
            )
        return limit

    def _start(self, ready: Ready) -> None:
        """The worker has loaded: requests may come."""
        config = self._config
        held = ready.num_blocks * config.page_size
        if config.max_model_len and config.max_model_len > held:
            self.lost(
                f"max_model_len={config.max_model_len} does not fit the KV cache of {held} tokens: "
                "give a larger kv_cache_num_tokens or a smaller max_model_len"
            )
            return
        self._max_model_len = min(config.max_model_len or self._folder.max_position_embeddings, held)
        self._worker = ready
        self._scheduler = Scheduler(
            Limits(
                num_blocks=ready.num_blocks,
                page_size=config.page_size,
                max_seqs=self._max_seqs,
                max_tokens=config.max_tokens_per_forward,
                max_ahead=MAX_AHEAD,
                max_len=self._max_model_len,
            ),
            epoch=ready.epoch,
            key=self._key,
            policy=self._policy(),
            groups=self._groups(),
            counts=self.metrics.counts,
            ledger=self._ledger,
        )
        self.metrics.phase(None)
        self._link.send(Agreed(epoch=ready.epoch, num_blocks=ready.num_blocks))
        self._ready.set()

    def _wake(self) -> None:
        """Plan at the loop's next turn, so that requests that come together start together."""
        if self._wakeup is None:
            self._wakeup = asyncio.get_running_loop().call_soon(self._awake)

    def _awake(self) -> None:
        self._wakeup = None
        with self._fatal():
            self._plan()

    def _plan(self) -> None:
        """Send as many steps as should be in flight."""
        metrics = self.metrics
        while (scheduler := self._scheduler) is not None:
            began = metrics.clock()
            plan = scheduler.plan()
            now = metrics.clock()
            metrics.planned(now - began)
            for sequence in scheduler.preempted:
                metrics.preempted(times_of(sequence))
            for sequence in scheduler.started:
                metrics.started(times_of(sequence), now)
            if plan is None:
                break
            self._link.send(plan)

    def _apply(self, tokens: Tokens) -> None:
        if self._scheduler is None:
            return
        metrics = self.metrics
        began = metrics.clock()
        try:
            progress = self._scheduler.apply(tokens)
        except Diverged as error:
            self.lost(f"the worker's results do not fit the plans: {error}")
            return
        now = metrics.clock()
        metrics.landed(progress.work, tokens.busy, tokens.gap, now - began, now)
        for sequence in progress.work.begun:
            metrics.begun(times_of(sequence), now)
        self._progress.append(progress)
        self._plan()

    def _route(self) -> None:
        """Turn what has come into text, and tell everybody who waits for it."""
        batch, self._progress = self._progress, []
        told: dict[Generation, None] = {}
        for progress in batch:
            for sequence, sent in progress.scored:
                choice = sequence.owner
                assert isinstance(choice, Choice)
                choice.score_prompt(sent)
            for sequence, token, end, scored in progress.news:
                choice = sequence.owner
                assert isinstance(choice, Choice)
                if choice.over:
                    continue
                if scored >= 0:
                    assert progress.logprobs is not None
                    choice.score(progress.logprobs, scored)
                delta, stopped = choice.token(token, end)
                if stopped:
                    self._finish(sequence)
                if choice.over:
                    self._account(choice, delta)
                if delta:
                    choice.generation.tell(delta)
                    told[choice.generation] = None
            for sequence, end, tokens in progress.ended:
                choice = sequence.owner
                assert isinstance(choice, Choice)
                if not choice.over:
                    delta = choice.whole(tokens, end)
                    self._account(choice, delta)
                    choice.generation.tell(delta)
                    told[choice.generation] = None
        for generation in told:
            if not generation.open:
                self.metrics.longest_generation.observe(max(choice.tokens for choice in generation.choices))
                self._forget(generation)
            generation.deliver()

    def _account(self, choice: Choice, delta: Delta | None) -> None:
        """A choice has all its tokens."""
        assert delta
        assert delta.finish_reason
        self.metrics.ended(choice.times, delta.finish_reason, len(choice.sequence.prompt), choice.tokens)

    def _finish(self, sequence: Sequence) -> None:
        """A stop string has ended a sequence that the scheduler still runs."""
        if self._scheduler is not None:
            self._scheduler.finish(sequence, End.STOP)
            self._wake()

    def _cancel(self, generation: Generation) -> None:
        if generation not in self._generations:
            return
        self._forget(generation)
        for choice in generation.choices:
            if not choice.over:
                choice.over = True
                self.metrics.finished[ABORT] += 1
                if self._scheduler is not None:
                    self._scheduler.finish(choice.sequence, End.CANCELLED)
        self._wake()

    def _forget(self, generation: Generation) -> None:
        self._generations.discard(generation)
        if not self._generations:
            self._idle.set()

    def _end(self, error: Unavailable) -> None:
        """Nothing runs any more: everybody who waits hears `error`."""
        self._scheduler = None
        self._progress = []
        generations, self._generations = self._generations, set()
        for generation in generations:
            self.metrics.finished[ERROR] += sum(not choice.over for choice in generation.choices)
            generation.fail(error)
        self._idle.set()


def times_of(sequence: Sequence) -> Times:
    """When what happened to a choice's sequence."""
    assert isinstance(sequence.owner, Choice)
    return sequence.owner.times
