"""One server process for the session, and an engine of the same sizes in this process to compare with."""

import dataclasses
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import openai
import pytest
from serving_checkpoint import make_checkpoint

from flax_paged import Engine, load_model, load_tokenizer

SCRIPT = Path(__file__).parents[2] / "scripts" / "serve.py"
SIZES = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "max_model_len": 256, "num_pages": 64}


@dataclasses.dataclass
class Server:
    """A server process; its log is a file, so that it never waits for a reader."""

    process: subprocess.Popen
    url: str
    log_path: Path

    def metrics(self) -> dict[str, float]:
        lines = httpx.get(f"{self.url}/metrics").text.splitlines()
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}

    def wait_until_idle(self) -> dict[str, float]:
        for _ in range(600):
            metrics = self.metrics()
            if metrics["flax_paged_live_pages"] == 0 and metrics["flax_paged_waiting_sequences"] == 0:
                return metrics
            time.sleep(0.05)
        raise AssertionError(f"the server is still busy: {metrics}")


@pytest.fixture(scope="session")
def compilation_cache(tmp_path_factory):
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("served") / "tiny"
    make_checkpoint(path)
    return path


@pytest.fixture(scope="session")
def launch_server(checkpoint, compilation_cache, tmp_path_factory):
    """Launch a server process with more options; returns it and the path of its log. All end with the session."""
    processes = []

    def launch(*options: str) -> tuple[subprocess.Popen, Path]:
        log_path = tmp_path_factory.mktemp("log") / "stderr"
        sizes = [text for name, value in SIZES.items() for text in (f"--{name.replace('_', '-')}", str(value))]
        command = [sys.executable, SCRIPT, "--model", checkpoint, "--port", "0", *sizes]
        with log_path.open("wb") as log:
            process = subprocess.Popen([*command, "--compilation-cache", compilation_cache, *options], stderr=log)
        processes.append(process)
        return process, log_path

    yield launch
    for process in processes:
        process.send_signal(signal.SIGKILL)
        process.wait()


@pytest.fixture(scope="session")
def start_server(launch_server):
    """Launch a server and wait until it is ready."""

    def start(*options: str) -> Server:
        process, log_path = launch_server(*options)
        return Server(process, _wait_until_ready(process, log_path), log_path)

    return start


def _wait_until_ready(process: subprocess.Popen, log_path: Path) -> str:
    while process.poll() is None:
        if found := re.search(r"Ready after .*: (http://\S+)", log_path.read_text()):
            return found[1]
        time.sleep(0.1)
    raise AssertionError(log_path.read_text())


@pytest.fixture(scope="session")
def server(start_server):
    return start_server()


@pytest.fixture(scope="session")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
        yield client


@pytest.fixture(scope="session")
def engine(checkpoint):
    """The same engine in this process."""
    engine = Engine(load_model(checkpoint), load_tokenizer(checkpoint), **SIZES)
    engine.warmup()
    return engine
