"""What transformers says, run by the engine's environment: log-likelihoods of texts behind others.

    python tests/clients/oracle.py MODEL < [[context, continuation], …]

Prints as many [log-likelihood, whether it is what greedy decoding would say]. An empty context is
the token that begins a text.
"""

import json
import sys
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM


def main(folder: str, pairs: list[list[str]]) -> list[list[Any]]:
    """The answers."""
    tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
    model: Any = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.train(False)
    answers: list[list[Any]] = []
    for context, continuation in pairs:
        before = tokenizer.encode(context).ids or [model.config.bos_token_id]
        after = tokenizer.encode(continuation).ids
        with torch.no_grad():
            logits = model(torch.tensor([before + after])).logits[0, len(before) - 1 : -1]
        chosen = logits.log_softmax(-1).gather(1, torch.tensor(after)[:, None])
        answers.append([float(chosen.sum()), logits.argmax(-1).tolist() == after])
    return answers


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(sys.argv[1], json.load(sys.stdin))))
