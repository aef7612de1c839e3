import importlib.util
from pathlib import Path

PATH = Path(__file__).parents[2] / "scripts" / "feature_table.py"


def test_the_page_says_what_the_code_accepts():
    spec = importlib.util.spec_from_file_location("feature_table_script", PATH)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    written = script.PAGE.read_text(encoding="utf-8").split(script.BEGIN)[1].split(script.END)[0].strip()
    assert written == script.table(), "run: python scripts/feature_table.py --write"
    rows = [line.split("|") for line in written.splitlines() if "| yes |" in line]
    assert len(rows) == len(script.FEATURES) + len(script.CACHE_DTYPES)
    assert all(reference.strip() == xla.strip() == "yes" for _, _, reference, xla, *_ in rows)
