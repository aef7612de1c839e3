"""scripts/finetune.py as users run it: killed and resumed, and what it writes is served."""

import importlib.util
import json
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


def load(name):
    spec = importlib.util.spec_from_file_location(f"{name}_script", SCRIPTS / f"{name}.py")
    script = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = script  # dataclasses look their module up
    spec.loader.exec_module(script)
    return script


@pytest.fixture
def run(capsys):
    """Call the scripts' main in this process."""

    def run(name, *args):
        code = load(name).main([str(arg) for arg in args])
        captured = capsys.readouterr()
        return types.SimpleNamespace(returncode=code, stdout=captured.out, stderr=captured.err)

    return run


@pytest.fixture
def data(tmp_path):
    lines = [
        {"messages": [{"role": "user", "content": f"{a}+{b}"}, {"role": "assistant", "content": str(a + b)}]}
        for a in range(4)
        for b in range(4)
    ]
    path = tmp_path / "sums.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def options(checkpoint, data, output, *more):
    fixed = ("--model", checkpoint, "--data", data, "--output", output, "--max-length", 32, "--batch-size", 2)
    return (*fixed, "--learning-rate", 0.02, "--warmup-steps", 2, *more)


def losses(output):
    metrics = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [(values["step"], values["loss"]) for values in metrics if "loss" in values]


def test_lora_run_writes_what_is_served(run, checkpoint, data, tmp_path):
    output, prompts = tmp_path / "run", tmp_path / "prompts.txt"
    prompts.write_text("1+2\n3+3\n")
    more = ("--lora", "--steps", 12, "--checkpoint-every", 5, "--keep", 2, "--eval-data", data, "--eval-every", 6)
    sample = ("--sample-prompts", prompts, "--sample-every", 12, "--sample-tokens", 4, "--adapter-format", "peft")
    result = run("finetune", *options(checkpoint, data, output, *more, *sample))
    assert result.returncode == 0, result.stderr
    assert "16 examples" in result.stderr and "step 12 of 12: loss" in result.stderr and "%|" not in result.stderr
    steps = losses(output)
    assert [step for step, _ in steps] == list(range(1, 13)) and steps[-1][1] < 0.8 * steps[0][1]
    metrics = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert [values["step"] for values in metrics if "eval_perplexity" in values] == [0, 6, 12]
    assert (output / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in (output / "checkpoints").iterdir()) == ["10", "12"]
    samples = [json.loads(line) for line in (output / "samples.jsonl").read_text().splitlines()]
    assert [(sample["step"], sample["prompt"]) for sample in samples] == [
        (s, p) for s in (0, 12) for p in ("1+2", "3+3")
    ]
    # The same answer in another process' way: the prompt as the template writes it, through scripts/generate.py.
    prompt = ("--prompt", "u:3+3;a:", "--max-tokens", 4, "--json")
    served = run("generate", "--model", checkpoint, "--adapter", output / "adapter", *prompt)
    assert json.loads(served.stdout)["text"] == samples[-1]["text"]
    assert json.loads(run("generate", "--model", checkpoint, *prompt).stdout)["text"] == samples[1]["text"]


def test_full_run_packs_accumulates_and_saves_a_model(run, checkpoint, data, tmp_path):
    more = ("--steps", 4, "--micro-batches", 2, "--compute-dtype", "bfloat16", "--remat", "full", "--z-loss", 1e-4)
    result = run("finetune", *options(checkpoint, data, tmp_path / "run", *more))
    assert result.returncode == 0, result.stderr
    assert losses(tmp_path / "run")[-1][1] < losses(tmp_path / "run")[0][1]
    served = run("generate", "--model", tmp_path / "run" / "model", "--prompt", "1+2", "--max-tokens", 2, "--json")
    assert json.loads(served.stdout)["token_ids"]


def test_killed_while_writing_a_checkpoint_and_resumed(run, checkpoint, data, tmp_path):
    """The losses are those of a run that nobody interrupted, to the last digit."""
    more = ("--lora", "--steps", 24, "--checkpoint-every", 2)
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert run("finetune", *options(checkpoint, data, whole, *more)).returncode == 0
    command = [sys.executable, SCRIPTS / "finetune.py", *options(checkpoint, data, broken, *more)]
    process = subprocess.Popen([str(part) for part in command], stderr=subprocess.DEVNULL)
    checkpoints = broken / "checkpoints"
    deadline = time.monotonic() + 300
    is_partial = False
    while not is_partial and process.poll() is None and time.monotonic() < deadline:
        names = [path.name for path in checkpoints.iterdir()] if checkpoints.is_dir() else []
        # Orbax writes under another name, and renames the folder once all is there.
        is_partial = any(not name.isdigit() for name in names) and any(name.isdigit() for name in names)
    process.send_signal(signal.SIGKILL)
    process.wait()
    complete = [int(path.name) for path in checkpoints.iterdir() if path.name.isdigit()]
    assert is_partial and complete and max(complete) < 24
    # A line that was being written, and steps after the checkpoint, are not kept twice.
    with (broken / "metrics.jsonl").open("a") as file:
        file.write('{"step": 99, "lo')
    result = run("finetune", *options(checkpoint, data, broken, *more, "--resume"))
    assert result.returncode == 0, result.stderr
    assert "Going on after step" in result.stderr
    assert losses(broken) == losses(whole)
    assert all(path.name.isdigit() for path in checkpoints.iterdir())
    # Nothing is left to do; other settings are another run.
    assert run("finetune", *options(checkpoint, data, broken, *more, "--resume")).returncode == 0
    result = run("finetune", *options(checkpoint, data, broken, *more, "--resume", "--seed", 1))
    assert result.returncode == 2 and "seed was 0 and is 1" in result.stderr


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("--steps", 0), "expected at least one step"),
        (("--eval-every", 0), "--eval-every 0: expected at least 1"),
        (("--data", "missing.jsonl"), "missing.jsonl"),
        (("--lora", "--lora-targets", "query"), "no linear map 'query'"),
        (("--learning-rate", -1), "expected a positive learning rate"),
        (("--micro-batches", 3), "expected a multiple of num_micro_batches=3"),
    ],
)
def test_mistakes_are_told_in_one_line(run, checkpoint, data, tmp_path, change, message):
    result = run("finetune", *options(checkpoint, data, tmp_path / "run", *change))
    assert result.returncode == 2
    assert "error:" in result.stderr and message in result.stderr and "Traceback" not in result.stderr


def test_a_run_is_not_overwritten(run, checkpoint, data, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").touch()
    result = run("finetune", *options(checkpoint, data, tmp_path / "run"))
    assert result.returncode == 2 and "is not empty. Go on with that run (--resume)" in result.stderr
