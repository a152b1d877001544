"""How to choose tokens, from the fields of a body."""

from toka.api import errors
from toka.api.packing import float32, int32
from toka.api.schemas import MAX_IDS, ChatBody, CompletionBody, GenerationBody
from toka.errors import BadRequest
from toka.request import Sampling

GREEDY_BELOW = 1e-5
"""Temperatures below are 0: dividing by them overflows."""
MAX_TOP_K = 2**31 - 1
MAX_BIAS = 100


def sampling_of(body: GenerationBody, defaults: Sampling, vocab_size: int) -> Sampling:
    """What the client left open is as in `defaults`. Raises BadRequest for ids that are none.

    The engine adds `blocked`: it knows all the ids that end a choice.
    """
    temperature = defaults.temperature if body.temperature is None else body.temperature
    top_k = defaults.top_k if body.top_k is None else body.top_k
    bias = bias_of(body.logit_bias, vocab_size)
    allowed = body.allowed_token_ids or []
    check_ids(allowed, "allowed_token_ids", vocab_size)
    check_ids(body.stop_token_ids, "stop_token_ids", vocab_size)
    logprobs, prompt_logprobs = scored(body)
    return Sampling(
        temperature=0.0 if temperature < GREEDY_BELOW else temperature,
        top_p=defaults.top_p if body.top_p is None else body.top_p,
        top_k=min(max(top_k, 0), MAX_TOP_K),
        min_p=defaults.min_p if body.min_p is None else body.min_p,
        repetition_penalty=(
            defaults.repetition_penalty if body.repetition_penalty is None else body.repetition_penalty
        ),
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        bias_ids=int32(bias.keys()),
        bias=float32(bias.values()),
        allowed=int32(sorted(set(allowed))),
        min_tokens=body.min_tokens,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def logprobs_of(body: GenerationBody) -> int:
    """Most probable tokens to report beside each sampled one; -1: no log-probabilities at all."""
    if isinstance(body, ChatBody):
        return (body.top_logprobs or 0) if body.logprobs else -1
    assert isinstance(body, CompletionBody)
    return -1 if body.logprobs is None else body.logprobs


def scored(body: GenerationBody) -> tuple[int, int]:
    """`Sampling.logprobs` and `Sampling.prompt_logprobs`."""
    logprobs = logprobs_of(body)
    prompt = -1 if body.prompt_logprobs is None else body.prompt_logprobs
    if isinstance(body, CompletionBody):
        if body.echo:
            prompt = max(prompt, logprobs)
        if body.best_of is not None and body.best_of > body.n:
            logprobs = max(logprobs, 0)
    return logprobs, prompt


def check_logprobs(body: GenerationBody, most: int) -> None:
    """Bounds of what may be reported, and what needs what. Raises BadRequest."""
    if isinstance(body, ChatBody):
        if body.top_logprobs and not body.logprobs:
            raise errors.wrong_value("top_logprobs", "it needs 'logprobs' to be true.")
        asked = {"top_logprobs": body.top_logprobs or 0}
    else:
        asked = {"logprobs": logprobs_of(body)}
    asked["prompt_logprobs"] = body.prompt_logprobs or 0
    for name, value in asked.items():
        if value > most:
            raise errors.out_of_range(name, "integer", "<=", most, value)
    if body.logprobs_format == "packed" and logprobs_of(body) < 0 and body.prompt_logprobs is None:
        raise errors.wrong_value("logprobs_format", "'packed' needs 'logprobs' or 'prompt_logprobs'.")
    if body.prompt_logprobs is not None and body.stream:
        raise errors.wrong_value("prompt_logprobs", "it cannot be streamed; leave out 'stream'.")


def bias_of(sent: dict[str, object], vocab_size: int) -> dict[int, float]:
    """`logit_bias` with ids for keys. Raises BadRequest."""
    if len(sent) > MAX_IDS:
        raise BadRequest(
            f"Invalid 'logit_bias': too many entries. Expected at most {MAX_IDS}.",
            param="logit_bias",
            code="object_above_max_length",
        )
    bias: dict[int, float] = {}
    for key, value in sent.items():
        if not (key.isascii() and key.isdigit() and len(key) < 10):
            raise errors.wrong_value("logit_bias", "its keys must be token ids, as strings of digits.")
        at = f"logit_bias.{key}"
        id = int(key)
        if id >= vocab_size:
            raise errors.wrong_value("logit_bias", f"{id} is no token id; they are below {vocab_size}.")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise errors.wrong_type(at, "a number", value)
        if abs(value) > MAX_BIAS:
            raise errors.out_of_range(at, "decimal", *(("<=", MAX_BIAS) if value > 0 else (">=", -MAX_BIAS)), value)
        bias[id] = value
    return bias


def check_ids(ids: list[int], param: str, vocab_size: int) -> None:
    """Each must be a token id. Raises BadRequest."""
    if ids and (max(ids) >= vocab_size or min(ids) < 0):
        index, bad = next((index, one) for index, one in enumerate(ids) if not 0 <= one < vocab_size)
        sign, bound = ("<", vocab_size) if bad >= 0 else (">=", 0)
        raise errors.out_of_range(f"{param}[{index}]", "integer", sign, bound, bad)
