"""lm_eval's local-completions, as its command line runs it: log-likelihoods, perplexity and texts of our own tasks."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.clients.engine import Engine, engine_python, variables

TASKS = Path(__file__).parent / "tasks"
NAMES = ("rivers_choice", "rivers_perplexity", "rivers_text")
STOPS = ["\n\n", "Question:", "</s>", "a", "e", "i"]
"""Of rivers_text.yaml."""

Json = dict[str, Any]


@pytest.fixture(scope="module")
def samples(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Json]]:
    """What lm_eval has logged of each task's questions, in their order."""
    folder = tmp_path_factory.mktemp("lm_eval")
    for name in NAMES:
        task = (TASKS / f"{name}.yaml").read_text(encoding="utf-8")
        files = f"dataset_kwargs:\n  data_files:\n    test: {TASKS / 'rivers.jsonl'}\n"
        (folder / f"{name}.yaml").write_text(task + files, encoding="utf-8")
    server = f"model=tiny,base_url={engine.base_url}/completions,num_concurrent=4,max_retries=1,max_length=256"
    command = [sys.executable, "-m", "lm_eval", "--model", "local-completions", "--model_args", server]
    command += ["--tasks", ",".join(NAMES), "--include_path", str(folder), "--batch_size", "2"]
    command += ["--log_samples", "--output_path", str(folder / "out")]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "hf")}
    done = subprocess.run(
        command, env=os.environ | offline, cwd=folder, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    logged = {}
    for name in NAMES:
        [file] = (folder / "out").rglob(f"samples_{name}_*.jsonl")
        lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        logged[name] = sorted(lines, key=lambda line: int(line["doc_id"]))
    return logged


def oracle(engine: Engine, pairs: list[tuple[str, str]]) -> list[tuple[float, bool]]:
    """What transformers says of continuations behind contexts."""
    command = [engine_python(), str(Path(__file__).parent / "oracle.py"), str(engine.folder)]
    done = subprocess.run(
        command, input=json.dumps(pairs), env=variables(), capture_output=True, text=True, timeout=120, check=True
    )
    return [(value, greedy) for value, greedy in json.loads(done.stdout)]


def test_log_likelihoods(engine: Engine, samples: dict[str, list[Json]]) -> None:
    """Of every choice behind its question: those of transformers, and whether greedy decoding would have said it."""
    pairs, said = [], []
    for sample in samples["rivers_choice"]:
        doc = sample["doc"]
        pairs += [(f"Question: {doc['question']}\nAnswer:", f" {choice}") for choice in doc["choices"]]
        said += [(float(value), greedy in (True, "True")) for value, greedy in sample["filtered_resps"]]
    assert len(said) == 12
    wanted = oracle(engine, pairs)
    assert [value for value, _ in said] == pytest.approx([value for value, _ in wanted], abs=1e-2, rel=1e-4)
    assert [greedy for _, greedy in said] == [greedy for _, greedy in wanted]


def test_perplexity(engine: Engine, samples: dict[str, list[Json]]) -> None:
    """Of whole texts: those of transformers behind the token that begins a text."""
    stories = [sample["doc"]["story"] for sample in samples["rivers_perplexity"]]
    said = [float(sample["filtered_resps"][0]) for sample in samples["rivers_perplexity"]]
    wanted = [value for value, _ in oracle(engine, [("", story) for story in stories])]
    assert said == pytest.approx(wanted, abs=1e-2, rel=1e-4)


def test_texts(engine: Engine, samples: dict[str, list[Json]]) -> None:
    """What is generated: the server's greedy text before the first of six stop strings."""
    for sample in samples["rivers_text"]:
        prompt = f"Question: {sample['doc']['question']}\nAnswer:"
        whole = engine.text(prompt, max_tokens=24, temperature=0)["text"]
        ends = [whole.index(stop) for stop in STOPS if stop in whole]
        assert sample["filtered_resps"] == [whole[: min(ends, default=None)]]
