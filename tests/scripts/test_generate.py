"""scripts/generate.py as users run it."""

import importlib.util
import io
import json
import subprocess
import sys
import types
from pathlib import Path

import pytest

PATH = Path(__file__).parents[2] / "scripts" / "generate.py"
FIELDS = ["prompt", "prompt_token_ids", "text", "token_ids", "finish_reason"]


@pytest.fixture
def run(capsys, monkeypatch):
    """Call the script's main in this process, which saves starting Python each time."""
    spec = importlib.util.spec_from_file_location("generate_script", PATH)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)

    def run(*args, stdin=""):
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        code = script.main([str(arg) for arg in args])
        captured = capsys.readouterr()
        return types.SimpleNamespace(returncode=code, stdout=captured.out, stderr=captured.err)

    return run


def test_as_a_program(checkpoint, tmp_path):
    command = [sys.executable, PATH, "--model", checkpoint, "--prompt", "Hello", "--max-tokens", "3", "--json"]
    command += ["--compilation-cache", tmp_path / "compiled"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert list(json.loads(result.stdout)) == FIELDS
    assert any("engine_step" in path.name for path in (tmp_path / "compiled").iterdir())


def test_json_lines_and_nothing_else_on_stdout(run, checkpoint):
    result = run("--model", checkpoint, "--prompt", "Hello", "a b", "--max-tokens", 8, "--json")
    assert result.returncode == 0, result.stderr
    objects = [json.loads(line) for line in result.stdout.splitlines()]
    assert [list(o) for o in objects] == [FIELDS] * 2
    assert [o["prompt"] for o in objects] == ["Hello", "a b"]
    assert objects[0]["prompt_token_ids"] == [0, *(ord(c) - 31 for c in "Hello")]
    assert all(o["finish_reason"] in ("stop", "length") and len(o["token_ids"]) <= 8 for o in objects)
    assert "tokens/s" in result.stderr
    assert "%|" not in result.stderr and "\r" not in result.stderr  # no bars where nobody watches


def test_streamed_text_is_the_text_of_json(run, checkpoint):
    options = ("--model", checkpoint, "--max-tokens", 12, "--temperature", 0.7, "--top-p", 0.9, "--seed", 3)
    text = run(*options, "--prompt", "Hello").stdout
    whole = json.loads(run(*options, "--prompt", "Hello", "--json").stdout)
    assert text == f"Hello{whole['text']}\n"


@pytest.mark.parametrize("name", ["prompts.txt", "prompts.jsonl", "-"])
def test_prompts_file(run, checkpoint, tmp_path, name):
    prompts = ["Hello", "a b"]
    lines = [json.dumps({"prompt": p}) for p in prompts] if name.endswith("jsonl") else prompts
    content = "\n\n".join(lines) + "\n"
    path = "-" if name == "-" else tmp_path / name
    if name != "-":
        path.write_text(content)
    result = run("--model", checkpoint, "--prompts-file", path, "--max-tokens", 2, "--json", stdin=content)
    assert [json.loads(line)["prompt"] for line in result.stdout.splitlines()] == prompts, result.stderr


def test_chat_keeps_the_conversation(run, checkpoint):
    result = run("--model", checkpoint, "--chat", "--max-tokens", 4, "--json", stdin="Hi\nWhy\nexit\nnever\n")
    first, second = map(json.loads, result.stdout.splitlines())
    text = "".join(chr(31 + i) for i in second["prompt_token_ids"][1:])
    assert first["prompt"] == "Hi" and second["prompt"] == "Why"
    assert text.replace(" ", "") == f"u:Hi;a:{first['text']};u:Why;a:".replace(" ", "")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--prompt", "x", "--max-tokens", "0"), "error: SamplingParams(max_tokens=0): expected at least 1"),
        (
            ("--prompt", "x", "--temperature", "-1"),
            "error: SamplingParams(temperature=-1.0): expected 0 (greedy) or more",
        ),
        (("--prompts-file", "missing.txt"), "missing.txt"),
        (("--prompt", "x" * 200), "error: prompts[0]: The prompt has 201 tokens and max_model_len=128"),
        (("--prompt", "x", "--num-pages", "1", "--max-tokens", "90"), "The request can never run"),
        (("--prompt", "x", "--max-num-batched-tokens", "3"), "max_num_batched_tokens=3 is less than max_num_seqs=32"),
    ],
)
def test_mistakes_are_told_in_one_line(run, checkpoint, options, message):
    result = run("--model", checkpoint, *options)
    assert result.returncode == 2
    assert (
        message in result.stderr and "Traceback" not in result.stderr and result.stdout.strip() in ("", "x" * 200, "x")
    )


@pytest.mark.parametrize("content", ["", '{"text": "x"}', "not json", '{"prompt": 3}'])
def test_bad_prompts_file(run, checkpoint, tmp_path, content):
    path = tmp_path / "prompts.jsonl"
    path.write_text(content)
    result = run("--model", checkpoint, "--prompts-file", path)
    assert result.returncode == 2 and "prompts.jsonl" in result.stderr and "Traceback" not in result.stderr


def test_missing_model_is_told_in_one_line(run):
    result = run("--model", "no/such/folder", "--prompt", "x")
    assert result.returncode == 2
    assert "error:" in result.stderr and "Traceback" not in result.stderr
