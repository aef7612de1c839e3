"""Loading streams: peak memory stays near the size of the weights."""

import json
import os
import subprocess
import sys
import textwrap

import ml_dtypes
import pytest
from checkpoint_files import CONFIG, hf_tensors, write_hf_folder

_SIZES = {"vocab_size": 16384, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 4, "head_dim": 128}

_LOAD = textwrap.dedent(
    """
    import json, sys
    import jax, numpy as np
    from flax import nnx
    from flax_paged.loading import load_model, save_model
    def peak():
        # Not getrusage's ru_maxrss: that begins with the peak of the process which started this one.
        line = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    folder, dtype = sys.argv[1], sys.argv[2]
    tiny = load_model(sys.argv[3], dtype=dtype)   # imports, compilers and Orbax's threads are there before we measure
    before = peak()
    model = load_model(folder, dtype=dtype)
    after = peak()
    arrays = [variable[...] for _, variable in nnx.to_flat_state(nnx.state(model))]
    print(json.dumps({"weights": sum(a.nbytes for a in arrays), "baseline": before, "peak": after}))
    if len(sys.argv) > 4:
        save_model(model, sys.argv[4])
    """
)


def measure(*args, **environment):
    result = subprocess.run(
        [sys.executable, "-c", _LOAD, *map(str, args)],
        env=os.environ | {"XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"} | environment,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("big")
    big, tiny = CONFIG | _SIZES, CONFIG
    shapes = hf_tensors(big, ml_dtypes.bfloat16)
    names = list(shapes)
    shards = {f"model-0000{part + 1}-of-00002.safetensors": names[part::2] for part in range(2)}
    write_hf_folder(root / "big", big, shapes, shards)
    write_hf_folder(root / "tiny", tiny, hf_tensors(tiny))
    return root


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_streaming_load_peaks_near_the_weights(folders, dtype):
    found = measure(folders / "big", dtype, folders / "tiny")
    assert found["weights"] > 150e6
    assert found["peak"] - found["baseline"] < 1.3 * found["weights"], found


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_orbax_load_peaks_near_the_weights(folders):
    measure(folders / "big", "float32", folders / "tiny", folders / "orbax")
    measure(folders / "tiny", "float32", folders / "tiny", folders / "orbax-tiny")
    # Without the setting glibc keeps up to 200 MB of freed buffers, whatever the weights' size: not what is tested.
    found = measure(folders / "orbax", "float32", folders / "orbax-tiny", MALLOC_MMAP_THRESHOLD_="1048576")
    assert found["peak"] - found["baseline"] < 1.3 * found["weights"], found
