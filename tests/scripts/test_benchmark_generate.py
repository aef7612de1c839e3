"""scripts/benchmark_generate.py on a tiny model: that it measures, not what."""

import importlib.util
import json
from pathlib import Path

PATH = Path(__file__).parents[2] / "scripts" / "benchmark_generate.py"


def test_prints_a_table_and_writes_json(checkpoint, tmp_path, capsys):
    spec = importlib.util.spec_from_file_location("benchmark_generate_script", PATH)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    path = tmp_path / "out.json"
    options = ["--batch-sizes", "1", "2", "--context", "8", "--new-tokens", "2", "--prefill", "1x16", "--repeats", "1"]
    options += ["--json-file", str(path), "--no-transformers"]
    assert script.main(["--model", str(checkpoint), *options]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert [row["case"] for row in rows] == ["prefill 1x16", "decode 1 at 8", "decode 2 at 8"]
    assert all(rate != 0 for row in rows for rate in row["tokens_per_second"].values())
    table = capsys.readouterr().out
    assert "| case | flax_paged |" in table and "| decode 2 at 8 |" in table
