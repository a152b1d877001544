"""`python -m workers` as a process."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.fakes import write_tiny_model
from tests.workers.engine import Engine
from toka.wire import Admit, Agreed, Failed, Loading, Plan, Ready, Sampling, Stop, ToEngine, Tokens, pack, unpack
from workers.__main__ import main

PROMPTS = [[5, 17, 200, 3, 90] * 9, [250]]


def worker(*arguments: str, stdin: int = subprocess.DEVNULL) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "workers", "device=cpu", "threads=1", *arguments]
    return subprocess.Popen(command, stdin=stdin, stderr=subprocess.PIPE, text=True)


def heard(engine: Engine) -> ToEngine:
    """The next word that is not about progress."""
    while isinstance(message := engine.hear(), Loading):
        pass
    return message


def test_a_worker_runs_plans_like_transformers(engine: Engine, tmp_path: Path) -> None:
    """Two prompts, one in two chunks beside the other's first token, then decodes sent ahead; each greedy token is that
    of transformers. Stop ends the process with code 0, and its log names it."""
    folder = write_tiny_model(tmp_path)
    process = worker(f"engine={engine.address}")
    engine.admit(model=str(folder), kv_tokens=128, page_size=16, rank=3)
    ready = heard(engine)
    assert isinstance(ready, Ready)
    assert (ready.num_blocks, ready.max_model_len, ready.vocab_size) == (8, 2048, 259)
    engine.say(Agreed(epoch=7, num_blocks=8))
    first, second = (pack(prompt) for prompt in PROMPTS)
    admits = [
        Admit(slot=0, ids=first, blocks=pack([5, 2, 7]), sampling=Sampling(temperature=0)),
        Admit(slot=2, ids=second, blocks=pack([1]), sampling=Sampling(temperature=0)),
    ]
    engine.say(Plan(epoch=7, step=0, admits=admits, chunks=pack([0, 0, 20])))
    engine.say(Plan(epoch=7, step=1, chunks=pack([2, 0, 1, 0, 20, 25])))
    engine.say(Plan(epoch=7, step=2, appends=pack([0, 4]), decode=pack([0, 2])))
    for step in range(3, 9):
        engine.say(Plan(epoch=7, step=step))
    engine.say(Stop())
    rosters = [[], [2, 0]] + [[0, 2]] * 7
    out: dict[int, list[int]] = {0: [], 2: []}
    for roster in rosters:
        tokens = engine.hear()
        assert isinstance(tokens, Tokens)
        for slot, token in zip(roster, unpack(tokens.ids), strict=True):
            out[slot].append(token)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for prompt, answer in zip(PROMPTS, out.values(), strict=True):
        expected = model.generate(
            torch.tensor([prompt]), max_new_tokens=8, min_new_tokens=8, do_sample=False, eos_token_id=None
        )
        assert answer == expected[0, len(prompt) :].tolist()
    _, log = process.communicate(timeout=10)
    assert process.returncode == 0
    assert re.fullmatch(r"worker 3: stopped after 9 steps: .+ s of work, .+ s idle between them", log.splitlines()[-1])


def test_a_process_ends_with_its_parent_and_tells_what_failed(engine: Engine, tmp_path: Path) -> None:
    """A folder without a model: the engine hears why, a person reads why, the exit code is 1; and the end of standard
    input ends a worker that still waits for its engine."""
    reader, writer = os.pipe()
    failing = worker(f"engine={engine.address}")
    waiting = worker(f"engine=ipc://{tmp_path}/nobody", "parent=stdin", stdin=reader)
    os.close(reader)
    engine.admit(model=str(tmp_path))
    failed = heard(engine)
    assert isinstance(failed, Failed)
    assert "has no config.json" in failed.reason
    _, log = failing.communicate(timeout=10)
    assert (failing.returncode, log) == (1, f"worker 0: {failed.reason}\n")
    assert waiting.poll() is None
    os.close(writer)
    _, log = waiting.communicate(timeout=10)
    assert waiting.returncode == 1
    assert log.splitlines()[-1] == "worker: whoever started this worker is gone; leaving"


def test_a_wrong_option_is_one_line_and_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    """On standard error, before anything slow is done."""
    assert main(["engnie=tcp://h:1"]) == 2
    assert capsys.readouterr().err == "worker: there is no option 'engnie' (did you mean engine?)\n"


def test_help_is_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    """It goes to standard output."""
    assert main(["--help"]) == 0
    assert "engine" in capsys.readouterr().out


def test_convert_is_a_command_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets what follows its name."""
    monkeypatch.setattr("workers.convert.main", lambda arguments: 5 if arguments == ["a.gguf", "out"] else 1)
    assert main(["convert", "a.gguf", "out"]) == 5
