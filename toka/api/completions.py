"""POST /v1/completions: text or token ids in, text out."""

from collections.abc import Sequence

from msgspec import UNSET

from toka.api import errors
from toka.api.chunks import TextChunks
from toka.api.details import Details
from toka.api.fields import COMPLETION
from toka.api.generate import Generate, Job, Text
from toka.api.limits import check_choices, last
from toka.api.logprobs import Entry, text_logprobs
from toka.api.sampling import check_ids as check_each
from toka.api.schemas import ChatLogprobs, CompletionBody, TextChoice, TextCompletion, TextLogprobs, Usage
from toka.api.service import Tokenizer
from toka.errors import BadRequest
from toka.request import Delta

DEFAULT_MAX_TOKENS = 16


class Completions(Generate[CompletionBody]):
    """OpenAI's legacy endpoint, the workhorse of evaluations. Choice `p * n + i` is sample i of prompt p."""

    schema = COMPLETION
    id_prefix = "cmpl-"
    param = "prompt"
    chunks = TextChunks

    def text(self, body: CompletionBody) -> Text:
        """Ids are checked here, texts are tokenized later."""
        tokenizer = self.service.tokenizer
        texts, ids = split(body.prompt)
        check_choices(len(texts or ids), body.n, body.best_of)
        keep = self.kept(body)
        if texts:
            for text in texts:
                self.check_text(body, text)
            return Text(sum(map(len, texts)), lambda: [encode(tokenizer, text, keep) for text in texts])
        single = isinstance(body.prompt, list) and isinstance(body.prompt[0], int)
        for number, prompt in enumerate(ids):
            check_ids(prompt, "prompt" if single else f"prompt[{number}]", tokenizer.vocab_size)
        return Text(0, lambda: [last(prompt, keep) for prompt in ids])

    @staticmethod
    def shape(entries: Sequence[Entry]) -> TextLogprobs:
        """OpenAI's for completions."""
        return text_logprobs(entries)

    def usual_limit(self) -> int | None:
        """OpenAI's default is 16."""
        return DEFAULT_MAX_TOKENS

    def echoed(self, body: CompletionBody, prompts: list[list[int]]) -> list[str] | None:
        """If the client asks for them: texts as they were sent; ids, and what is left of a text, decoded."""
        if not body.echo:
            return None
        texts, _ = split(body.prompt)
        if texts and body.truncate_prompt_tokens is None:
            return texts
        tokenizer = self.shown_by(body)
        return [tokenizer.decode(ids) for ids in prompts]

    def whole(self, job: Job[CompletionBody], choices: list[Delta], usage: Usage) -> TextCompletion:
        """An answer that is not streamed."""
        label = job.label
        return TextCompletion(
            id=label.id,
            created=label.created,
            model=label.model,
            system_fingerprint=label.fingerprint,
            choices=[text_choice(one, job.details) for one in choices],
            usage=usage,
        )


def text_choice(delta: Delta, details: Details | None) -> TextChoice:
    """A whole choice."""
    assert delta.finish_reason is not None
    if details is None:
        return TextChoice(delta.index, delta.text, delta.finish_reason, delta.stop_reason)
    shown = details.take(delta)
    assert not isinstance(shown.logprobs, ChatLogprobs)
    return TextChoice(
        delta.index,
        shown.text,
        delta.finish_reason,
        delta.stop_reason,
        shown.logprobs,
        UNSET if shown.ids is None else list(shown.ids),
        UNSET if shown.prompt_ids is None else shown.prompt_ids,
        UNSET if shown.prompt is None else shown.prompt,
    )


def split(prompt: str | list[str | int | list[int]]) -> tuple[list[str], list[list[int]]]:
    """A prompt in any of its four forms, as texts or as lists of ids; the other list is empty. Raises BadRequest."""
    if isinstance(prompt, str):
        return [prompt], []
    texts: list[str] = []
    ids: list[int] = []
    lists: list[list[int]] = []
    for one in prompt:
        if isinstance(one, str):
            texts.append(one)
        elif isinstance(one, int):
            ids.append(one)
        else:
            lists.append(one)
    if bool(texts) + bool(ids) + bool(lists) > 1:
        first = type(prompt[0])
        wanted = errors.NAMES["array" if first is list else first.__name__]
        index = next(index for index, one in enumerate(prompt) if type(one) is not first)
        raise errors.wrong_type(f"prompt[{index}]", f"{wanted} like the items before it", prompt[index])
    return texts, lists or ([ids] if ids else [])


def check_ids(ids: list[int], param: str, vocab_size: int) -> None:
    """Token ids are used as they are, so each must be one. Raises BadRequest."""
    if not ids:
        raise errors.empty(param, "array")
    check_each(ids, param, vocab_size)


def encode(tokenizer: Tokenizer, text: str, keep: int | None) -> list[int]:
    """Ids of a text prompt: the last `keep` ones, and with them what the tokenizer puts in front of a text, such as
    BOS. An empty text starts from BOS. Raises BadRequest if there is none."""
    ids = tokenizer.encode(text)
    if keep is not None and len(ids) > keep:
        plain = tokenizer.encode(text, add_special_tokens=False)
        return last(ids, keep, len(ids) - len(plain) if ids[-len(plain) :] == plain else 0)
    if ids:
        return ids
    if tokenizer.bos_id is None:
        raise BadRequest(
            "Invalid 'prompt': it has no tokens, and this model has no beginning-of-sequence token to start from.",
            param="prompt",
            code="empty_string",
        )
    return [tokenizer.bos_id]
