"""scripts/benchmark_serve.py: its numbers of calls that are known, and that it measures a server."""

import importlib.util
import json
import math
from pathlib import Path

import pytest

PATH = Path(__file__).parents[2] / "scripts" / "benchmark_serve.py"


@pytest.fixture(scope="module")
def script():
    pytest.importorskip("httpx")
    spec = importlib.util.spec_from_file_location("benchmark_serve_script", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_percentiles(script):
    values = [float(i) for i in range(1, 101)]
    assert [script.percentile(values, p) for p in (50, 90, 99, 100)] == [50, 90, 99, 100]
    assert script.percentile([5.0], 50) == script.percentile([5.0], 99) == 5 and math.isnan(script.percentile([], 50))


def test_summary(script):
    calls = [
        script.Call(start=1.0, arrivals=[1.5, 2.0, 2.5], num_tokens=5, end=2.5),
        script.Call(start=2.0, arrivals=[3.0], num_tokens=1, end=3.0),
        script.Call(start=2.0, end=2.1, error="429"),
    ]
    row = script.summary(4.0, calls)
    assert row["num_done"] == 2 and row["num_failed"] == 1 and row["errors"] == ["429"]
    assert row["tokens_per_second"] == pytest.approx(6 / 2.0) and row["calls_per_second"] == 1.0
    assert row["time_to_first_token"]["p50"] == 0.5 and row["time_to_first_token"]["p99"] == 1.0
    assert row["time_per_output_token"]["mean"] == 0.25  # of the first call alone


def test_compares_http_with_the_engine(script, checkpoint, tmp_path, capsys):
    path = tmp_path / "out.json"
    options = ["--num-clients", "2", "--max-tokens", "3", "--prompt-words", "2", "--repeats", "1"]
    assert script.main(["--compare-engine", str(checkpoint), *options, "--json-file", str(path)]) == 0
    result = json.loads(path.read_text())
    assert result["ratio"] > 0 and "2 clients: HTTP brings" in capsys.readouterr().out


def test_nobody_there(script, capsys):
    assert script.main(["--url", "http://127.0.0.1:9"]) == 2
    assert "error: " in capsys.readouterr().err
