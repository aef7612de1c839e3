"""scripts/benchmark_engine.py on a tiny model: that it measures, not what."""

import importlib.util
import json
from pathlib import Path

PATH = Path(__file__).parents[2] / "scripts" / "benchmark_engine.py"


def test_prints_a_table_and_writes_json(checkpoint, tmp_path, capsys):
    spec = importlib.util.spec_from_file_location("benchmark_engine_script", PATH)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    path = tmp_path / "out.json"
    options = ["--num-requests", "3", "--prompt-tokens", "2", "9", "--new-tokens", "2", "4", "--repeats", "1"]
    options += ["--max-num-seqs", "2", "--max-num-batched-tokens", "16", "--json-file", str(path), "--no-transformers"]
    assert script.main(["--model", str(checkpoint), *options]) == 0
    result = json.loads(path.read_text())
    assert [row["way"] for row in result["rows"]] == ["engine", "steps alone"]
    assert result["num_new"] >= 6 and all(row["new_tokens_per_second"] > 0 for row in result["rows"])
    assert "| steps alone |" in capsys.readouterr().out
