import json
import os
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from orbax.checkpoint import v1 as ocp

from flax_paged.cache import CacheSpec
from flax_paged.checkpoint.orbax import load_weights, new_folder, save_weights, stored_dtype
from flax_paged.models.llama import Llama, LlamaConfig

CONFIG = LlamaConfig(
    vocab_size=32,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)


def build(dtype=jnp.float32, **changes):
    import dataclasses

    return Llama(dataclasses.replace(CONFIG, **changes), rngs=nnx.Rngs(0), dtype=dtype)


def abstract(dtype=jnp.float32, **changes):
    return nnx.eval_shape(lambda: build(dtype, **changes))


def flat(model):
    return {path: np.asarray(variable[...]) for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param))}


def assert_same_bits(left, right):
    assert left.keys() == right.keys()
    for path, array in left.items():
        assert array.dtype == right[path].dtype and array.tobytes() == right[path].tobytes(), path


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_round_trip_is_bit_equal(tmp_path, dtype):
    model = build(dtype)
    save_weights(tmp_path, model)
    assert stored_dtype(tmp_path) == dtype
    assert_same_bits(flat(load_weights(tmp_path, abstract(dtype))), flat(model))


def test_the_cache_is_never_saved(tmp_path):
    plain, cached = build(), build()
    cached.init_cache(CacheSpec(num_kv_heads=2, head_dim=8, num_pages=64, page_size=16, dtype=jnp.float32))
    save_weights(tmp_path, cached)
    names = json.dumps(jax.tree.map(lambda leaf: leaf.shape, ocp.metadata(tmp_path / "weights").metadata))
    assert "cache" not in names
    assert_same_bits(flat(load_weights(tmp_path, abstract())), flat(plain))


def test_casts_between_floats_only(tmp_path):
    model = build()
    save_weights(tmp_path, model)
    loaded = flat(load_weights(tmp_path, abstract(), dtype=jnp.bfloat16))
    assert_same_bits(loaded, {path: array.astype(jnp.bfloat16) for path, array in flat(model).items()})

    ints = nnx.to_pure_dict(nnx.state(model))
    ints["norm"]["weight"] = jnp.ones((32,), jnp.int8)
    ocp.save(tmp_path / "other" / "weights", ints)
    with pytest.raises(ValueError, match=r"norm\.weight: int8 in the checkpoint, float32 expected"):
        load_weights(tmp_path / "other", abstract())


def test_other_depths_are_refused_by_layer(tmp_path):
    save_weights(tmp_path / "12", build(num_hidden_layers=12))
    with pytest.raises(ValueError, match=r"Missing parameters:\n(.*\n)*.*layers\.\[12-15\]\.self_attn\.q_proj\.weight"):
        load_weights(tmp_path / "12", abstract(num_hidden_layers=16))
    with pytest.raises(ValueError, match=r"no place for:\n(.*\n)*.*layers\.\[8-11\]\.mlp\.up_proj\.weight"):
        load_weights(tmp_path / "12", abstract(num_hidden_layers=8))


def test_wrong_shapes_name_both(tmp_path):
    save_weights(tmp_path, build())
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.up_proj\.weight: \(48, 32\) in the checkpoint, \(64, 32\)"):
        load_weights(tmp_path, abstract(intermediate_size=64))


def test_names_nearly_right_are_suggested(tmp_path):
    weights = nnx.to_pure_dict(nnx.state(build()))
    weights["norm"]["wieght"] = weights["norm"].pop("weight")
    ocp.save(tmp_path / "weights", weights)
    with pytest.raises(ValueError, match=r"norm\.weight \(the checkpoint has norm\.wieght\)"):
        load_weights(tmp_path, abstract())


def test_damaged_weights_are_named(tmp_path):
    save_weights(tmp_path, build())
    for root, _, files in os.walk(tmp_path / "weights"):
        for name in files:
            os.truncate(os.path.join(root, name), 3)
    with pytest.raises(ValueError, match="weights"):
        load_weights(tmp_path, abstract())
    (tmp_path / "empty" / "weights").mkdir(parents=True)
    with pytest.raises(ValueError, match="not a complete Orbax checkpoint"):
        load_weights(tmp_path / "empty", abstract())


def test_shards_over_a_mesh(tmp_path):
    model = build()
    save_weights(tmp_path, model)
    mesh = jax.make_mesh((2,), ("tensor",), axis_types=(jax.sharding.AxisType.Auto,))
    loaded = load_weights(tmp_path, abstract(), mesh=mesh)
    assert loaded.embed_tokens.weight[...].addressable_shards[0].data.shape == (16, 32)
    assert_same_bits(flat(loaded), flat(model))


_OTHER_DEVICES = textwrap.dedent(
    """
    import sys, numpy as np, jax
    from flax import nnx
    from flax_paged.checkpoint.orbax import load_weights, save_weights
    class Toy(nnx.Module):
        def __init__(self):
            values = np.random.default_rng(0).standard_normal((3, 32, 16)).astype(np.float32)
            self.layers = nnx.List([nnx.Dict(w=nnx.Param(jax.numpy.asarray(value), logical_axes=("mlp", "embed")))
                                    for value in values])
    devices, *commands = int(sys.argv[1]), *sys.argv[2:]
    assert len(jax.devices()) == devices
    mesh = None
    if devices > 1:
        mesh = jax.make_mesh((devices,), ("tensor",), axis_types=(jax.sharding.AxisType.Auto,))
    abstract = nnx.eval_shape(Toy)
    for command in commands:
        mode, folder = command.split(":")
        if mode == "save":
            save_weights(folder + "-whole", Toy())
            save_weights(folder, load_weights(folder + "-whole", abstract, mesh=mesh))
            continue
        model = load_weights(folder, abstract, mesh=mesh)
        for (path, variable), (_, other) in zip(nnx.to_flat_state(nnx.state(model)),
                                                nnx.to_flat_state(nnx.state(Toy())), strict=True):
            np.testing.assert_array_equal(variable[...], other[...], err_msg=str(path))
            assert variable[...].addressable_shards[0].data.shape == (32 // devices, 16)
    """
)


def run_with_devices(devices, *commands):
    flags = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", _OTHER_DEVICES, str(devices), *commands]
    result = subprocess.run(command, env=os.environ | flags, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]


def test_saved_and_loaded_on_different_numbers_of_devices(tmp_path):
    eight, one = tmp_path / "eight", tmp_path / "one"
    run_with_devices(8, f"save:{eight}")
    run_with_devices(1, f"load:{eight}", f"save:{one}")
    run_with_devices(8, f"load:{one}")
    run_with_devices(4, f"load:{eight}")


def test_a_new_folder_appears_whole_or_not_at_all(tmp_path):
    target = tmp_path / "deep" / "model"
    with pytest.raises(RuntimeError, match="boom"), new_folder(target) as folder:
        (folder / "half").write_text("x")
        assert not target.exists()
        raise RuntimeError("boom")
    assert list(target.parent.iterdir()) == []
    with new_folder(target) as folder:
        (folder / "file").write_text("first")
    with pytest.raises(FileExistsError, match="exists already"), new_folder(target):
        pass
    with pytest.raises(RuntimeError), new_folder(target, overwrite=True) as folder:
        raise RuntimeError("the old one survives")
    assert (target / "file").read_text() == "first"
    with new_folder(target, overwrite=True) as folder:
        (folder / "file").write_text("second")
    assert (target / "file").read_text() == "second"
    assert [path.name for path in target.parent.iterdir()] == ["model"]
