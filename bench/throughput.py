"""How many tokens a second: all requests are queued at once, and their answers come whole, so that HTTP costs little.

    python bench/throughput.py dataset_name=sharegpt-like
    python bench/throughput.py dataset_name=monkeys serve='model=DIR load_format=dummy'
    python bench/throughput.py --input-len 512 --output-len 512 --num-prompts 1000 --output-json FILE

Prints what `vllm bench throughput` prints, and takes its options; but it goes through the API, against any OpenAI
server. Answers have exactly the tokens that were asked for (`ignore_eos=F`: at most). The clock runs from the first
request sent to the last answer. A prompt of `n` choices counts once.
"""

import sys
from pathlib import Path
from typing import Annotated

from msgspec import Meta

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.clients import Bar
from bench.command import command, facts, save, show, stamp, verdict
from bench.dataset import Ids, Workload
from bench.metrics import line, totals
from bench.target import Count, Heat, asks, clients, reached, warmups


class Options(Workload, frozen=True, kw_only=True):
    """What to send."""

    ignore_eos: Annotated[bool, Meta(description="every answer has exactly the tokens that were asked for")] = True
    temperature: Annotated[Heat | None, Meta(description="of sampling")] = 1.0
    stream: Annotated[bool, Meta(description="stream the answers nevertheless")] = False
    max_concurrency: Annotated[Count | None, Meta(description="requests at a time; default: all")] = None
    output_json: Annotated[str | None, Meta(description="file to write the result to")] = None


def main() -> int:
    """Measure and print; returns the exit code."""
    return command(__doc__ or "", Options, run)


def run(options: Options) -> int:
    """The same for given options."""
    with reached(options) as server:
        requests = options.requests(Ids.of(server.vocab_size))
        sent = asks(options, server, requests, stream=options.stream)
        streams = min(options.max_concurrency or len(sent), len(sent))
        with clients(options, server, streams, stream=options.stream) as crew:
            if options.num_warmups:
                crew.run(asks(options, server, warmups(options, requests), stream=options.stream))
            with Bar(len(sent), shown=not options.disable_tqdm) as bar:
                answers, health = crew.run(sent, concurrency=options.max_concurrency, bar=bar)
    found = totals(answers)
    requests_per_second, tokens, output = (
        found[key] for key in ("request_throughput", "total_token_throughput", "output_throughput")
    )
    show(f"Throughput: {requests_per_second:.2f} requests/s, {tokens:.2f} total tokens/s, {output:.2f} output tokens/s")
    show(f"Total num prompt tokens:  {found['total_input_tokens']}")
    show(f"Total num output tokens:  {found['total_output_tokens']}")
    show(line("Elapsed time (s):", found["duration"]))
    show(line("Failed requests:", found["failed"]))
    if options.output_json is not None:
        result = {
            "date": stamp(),
            "model_id": server.model,
            "dataset_name": options.dataset_name,
            "synthetic": options.dataset_name != "custom",
            "seed": options.seed,
            "elapsed_time": found["duration"],
            "num_requests": len(requests),
            "num_sequences": sum(one.n for one in requests),
            "completed": found["completed"],
            "failed": found["failed"],
            "total_num_tokens": found["total_input_tokens"] + found["total_output_tokens"],
            "total_input_tokens": found["total_input_tokens"],
            "total_output_tokens": found["total_output_tokens"],
            "requests_per_second": found["request_throughput"],
            "tokens_per_second": found["total_token_throughput"],
            "output_tokens_per_second": found["output_throughput"],
        }
        save(Path(options.output_json), result | facts(server, health, answers))
    return verdict(requests, answers, health, exact=options.ignore_eos)


if __name__ == "__main__":
    sys.exit(main())
