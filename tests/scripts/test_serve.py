"""scripts/serve.py where it refuses to start; tests/serving has the server that did."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

PATH = Path(__file__).parents[2] / "scripts" / "serve.py"


def refusal(*options) -> str:
    command = [sys.executable, PATH, *map(str, options)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 2 and result.stdout == "" and "Traceback" not in result.stderr, result.stderr
    return result.stderr.strip().splitlines()[-1]


def test_an_occupied_port():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        message = refusal("--model", "any", "--port", port)
    assert message == f"error: port {port} of 127.0.0.1 is in use; choose another with --port."


def test_a_model_that_does_not_fit(checkpoint):
    message = refusal("--model", checkpoint, "--port", 0, "--num-pages", 100_000_000)
    # 2 layers of 16 tokens, 2 KV heads, 8 values and their keys; float32 on a CPU.
    assert "(100,000,000 pages of 8.2 kB)" in message or "(100,000,000 pages of 4.1 kB)" in message
    assert message.startswith("error: The model does not fit: ") and "are free on the host" in message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--model", "missing/folder/x", "--port", 0), "does not exist"),
        (("--model", "any", "--max-num-waiting", 0), "max_num_waiting=0"),
    ],
)
def test_wrong_options(options, message):
    assert message in refusal(*options)
