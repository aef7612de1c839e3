"""The persistent cache, over two processes that make the same engine."""

import json
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import json, sys
import jax, numpy as np
jax.jit(lambda x: x + 1)(np.float32(1))  # the cache is turned on late
from jax import monitoring
from toy import ToyModel
from flax_paged import Engine, SamplingParams
from flax_paged.generation import use_compilation_cache

events = []
monitoring.register_event_listener(lambda event, **_: events.append(event))
use_compilation_cache(sys.argv[1])
engine = Engine(ToyModel(), num_pages=16, page_size=4, max_num_seqs=2, max_num_batched_tokens=16, max_model_len=32)
engine.warmup(progress=False)
outputs = engine.generate([[1, 2, 3], [4]], SamplingParams(temperature=0, max_tokens=6))
json.dump({
    "tokens": [output.outputs[0].token_ids for output in outputs],
    "hits": events.count("/jax/compilation_cache/cache_hits"),
    "misses": events.count("/jax/compilation_cache/cache_misses"),
}, sys.stdout)
"""


def test_a_second_process_compiles_nothing(tmp_path):
    def run():
        command = [sys.executable, "-c", PROGRAM, tmp_path / "made" / "here"]
        result = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent)
        assert result.returncode == 0, result.stderr
        return json.loads(result.stdout)

    first, second = run(), run()
    assert first["misses"] > 0 and second["misses"] == 0
    assert second["hits"] == first["hits"] + first["misses"]
    assert second["tokens"] == first["tokens"]
