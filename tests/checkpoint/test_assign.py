import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from flax_paged.checkpoint.assign import WeightRule, assign
from flax_paged.checkpoint.report import collapse_names
from flax_paged.checkpoint.source import main_dtype


class Memory:
    """A tensor source over a dict."""

    def __init__(self, **tensors):
        self.tensors = {name.replace("__", "."): np.asarray(array) for name, array in tensors.items()}
        self.reads = []

    def __str__(self):
        return "memory"

    def names(self):
        return list(self.tensors)

    def shape(self, name):
        return self.tensors[name].shape

    def dtype(self, name):
        return self.tensors[name].dtype

    def read(self, name):
        self.reads.append(name)
        return self.tensors[name].copy()


class Toy(nnx.Module):
    def __init__(self, layers=2):
        self.embed = nnx.Param(jnp.zeros((6, 4)), logical_axes=("vocab", "embed"))
        self.layers = nnx.List([nnx.Linear(4, 3, use_bias=False, rngs=nnx.Rngs(0)) for _ in range(layers)])


def toy(layers=2):
    return nnx.eval_shape(lambda: Toy(layers))


RULES = {
    "embed": WeightRule("emb", aliases=("head",)),
    "layers.0.kernel": WeightRule("blk.0", transform=np.transpose),
    "layers.1.kernel": WeightRule("blk.1", transform=np.transpose),
}


def tensors(seed=0):
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape, np.float32) for name, shape in
            {"emb": (6, 4), "blk.0": (3, 4), "blk.1": (3, 4)}.items()}  # fmt: skip


def test_every_parameter_gets_its_tensor_and_transform():
    given = tensors()
    source = Memory(**given)
    model = assign(toy(), source, RULES)
    np.testing.assert_array_equal(model.embed[...], given["emb"])
    for layer in (0, 1):
        np.testing.assert_array_equal(model.layers[layer].kernel[...], given[f"blk.{layer}"].T)
    assert model.embed.get_metadata()["logical_axes"] == ("vocab", "embed")
    assert sorted(source.reads) == sorted(given), "each tensor is read once"
    assert source.reads[0] == "emb", "the largest first, while memory is free"


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_casts_to_the_dtype_asked_for(dtype):
    given = tensors()
    model = assign(toy(), Memory(**given), RULES, dtype=dtype)
    assert model.embed.dtype == dtype
    np.testing.assert_array_equal(model.embed[...], given["emb"].astype(dtype))


def test_one_error_lists_all_that_does_not_fit():
    given = tensors() | {"stray.weight": np.zeros(3, np.float32), "blk_1": np.zeros((3, 4), np.float32)}
    del given["blk.1"]
    given["blk.0"] = np.zeros((3, 5), np.float32)
    given["emb"] = np.zeros((6, 4), np.int8)
    source = Memory(**given)
    with pytest.raises(ValueError) as caught:
        assign(toy(), source, RULES)
    message = str(caught.value)
    assert "blk.1 (the checkpoint has blk_1)" in message
    assert "stray.weight" in message
    assert "blk.0: (5, 3) in the checkpoint, (4, 3) expected" in message
    assert "emb: int8" in message
    assert source.reads == [], "nothing is read before all fits"


def test_ignorable_tensors_may_go_unused():
    source = Memory(**tensors(), inv_freq=np.zeros(3, np.int64))
    assign(toy(), source, RULES, ignorable=lambda name: name == "inv_freq")
    with pytest.raises(ValueError, match="inv_freq"):
        assign(toy(), source, RULES)


def test_missing_layers_are_named_as_a_range():
    rules = {"embed": RULES["embed"]} | {
        f"layers.{layer}.kernel": WeightRule(f"blk.{layer}.weight", transform=np.transpose) for layer in range(16)
    }
    given = {"emb": tensors()["emb"]} | {f"blk.{layer}.weight": np.zeros((3, 4), np.float32) for layer in range(12)}
    with pytest.raises(ValueError, match=r"blk\.\[12-15\]\.weight"):
        assign(toy(16), Memory(**given), rules)
    given |= {f"blk.{layer}.weight": np.zeros((3, 4), np.float32) for layer in range(12, 17)}
    with pytest.raises(ValueError, match=r"no place for:\n  blk\.16\.weight"):
        assign(toy(16), Memory(**given), rules)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nan_and_infinity_are_refused_by_name(dtype, bad):
    given = {name: array.astype(dtype) for name, array in tensors().items()}
    given["blk.1"][2, 3] = bad
    with pytest.raises(ValueError, match=r"blk\.1 holds NaN or infinity"):
        assign(toy(), Memory(**given), RULES)


def test_the_largest_finite_values_are_fine():
    given = tensors()
    given["emb"][0, :2] = np.finfo(np.float32).max, np.finfo(np.float32).min
    assign(toy(), Memory(**given), RULES)
    with pytest.raises(ValueError, match="emb does not fit into float16"):
        assign(toy(), Memory(**given), RULES, dtype=jnp.float16)


def test_aliases():
    given = tensors()
    both = Memory(**given, head=given["emb"])
    np.testing.assert_array_equal(assign(toy(), both, RULES).embed[...], given["emb"])
    alone = Memory(**{("head" if name == "emb" else name): array for name, array in given.items()})
    np.testing.assert_array_equal(assign(toy(), alone, RULES).embed[...], given["emb"])
    with pytest.raises(ValueError, match=r"head differs from emb.*tie_word_embeddings"):
        assign(toy(), Memory(**given, head=given["emb"] + 1), RULES)


def test_rules_must_cover_the_model():
    with pytest.raises(ValueError, match=r"without a rule:\n  layers\.1\.kernel"):
        assign(toy(), Memory(**tensors()), {name: rule for name, rule in RULES.items() if name != "layers.1.kernel"})
    with pytest.raises(ValueError, match=r"without a variable in the model:\n  nothing"):
        assign(toy(), Memory(**tensors()), RULES | {"nothing": WeightRule("x")})


def test_shards_over_a_mesh_by_logical_axes():
    mesh = jax.make_mesh((2,), ("tensor",), axis_types=(jax.sharding.AxisType.Auto,))
    given = tensors()
    model = assign(toy(), Memory(**given), RULES, mesh=mesh)
    assert model.embed[...].addressable_shards[0].data.shape == (3, 4)
    assert len(model.layers[0].kernel[...].sharding.device_set) == 2
    np.testing.assert_array_equal(model.embed[...], given["emb"])


def test_progress_is_quiet_away_from_a_terminal(capsys):
    assign(toy(), Memory(**tensors()), RULES, progress=True)
    assert capsys.readouterr() == ("", "")


def test_collapse_names():
    names = [f"a.{i}.w" for i in (0, 1, 2, 5)] + ["b", "a.0.v", "a.7.v"]
    assert collapse_names(names) == ["a.[0-2,5].w", "b", "a.0.v", "a.7.v"]


def test_main_dtype_counts_elements_of_weights_only():
    arrays = [((2, 2), np.float32), ((9,), np.float16), ((100,), np.int64)]
    assert main_dtype(arrays) == np.float16
    assert main_dtype([]) == np.float32
