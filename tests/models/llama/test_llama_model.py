import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from llama_tools import (
    PagedRun,
    abstract_llama,
    call,
    dense_logits,
    flat_arrays,
    leaves_hold_tracers,
    random_llama,
    rope_of_every_type,
    tiny_config,
    tokens_of,
)

from flax_paged.attention import PagedAttention, cache_spec_for
from flax_paged.cache import CacheSpec, KVCache
from flax_paged.metadata import SequenceSlice, build_metadata
from flax_paged.models.llama import Llama
from flax_paged.nn import RopeConfig
from flax_paged.nn.rope import attention_factor
from flax_paged.sharding import LOGICAL_AXIS_RULES
from flax_paged.step import CompiledStep

EXACT = {"rtol": 0, "atol": 1e-4}
KINDS = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "head norms": {"qk_norm": True, "head_dim": 24},
    "window": {"sliding_window": 5},
    "mixed windows": {"sliding_window": 3, "layer_types": ("full_attention", "sliding_attention")},
    "one kv head": {"num_key_value_heads": 1, "head_dim": 80},
}


@pytest.mark.parametrize("kind", KINDS)
def test_paged_steps_equal_the_dense_form(kind):
    """Prefill by chunks that are no whole pages, then decode, beside a neighbour: each step as a full recompute."""
    model = random_llama(tiny_config(**KINDS[kind]))
    tokens, other = tokens_of(23), tokens_of(12, seed=1)
    expected, expected_other = dense_logits(model, tokens), dense_logits(model, other)
    run = PagedRun(model, [23, 12])
    start = other_start = 0
    for length, other_length in [(5, 9), (8, 1), (6, 0), (1, 1), (1, 0), (1, 1), (1, 0)]:
        new = {0: tokens[start : start + length]}
        if other_length:
            new = {1: other[other_start : other_start + other_length], **new}
        out = run(new)
        np.testing.assert_allclose(out[0], expected[start : start + length], **EXACT)
        if other_length:
            np.testing.assert_allclose(out[1], expected_other[other_start : other_start + other_length], **EXACT)
        start, other_start = start + length, other_start + other_length
    assert (start, other_start) == (23, 12)


def test_first_decode_step_follows_the_prompt_without_a_hole():
    """A prompt of 9 in pages of 4 full of NaN: slots 0 ... 8, then 9, each at its own position."""
    model = random_llama(tiny_config())
    tokens = tokens_of(14)
    run = PagedRun(model, [14])
    run({0: tokens[:9]})
    for n in range(9, 14):
        cache = np.asarray(run.step.module().layers[1].self_attn.attention.kv_cache[...])
        slots = cache[run.pages[0]].reshape(-1, *cache.shape[2:])
        written = np.isfinite(slots).all((1, 2))
        assert written[:n].all()
        assert not written[n:].any()
        out = run({0: tokens[n : n + 1]})
        np.testing.assert_allclose(out[0][0], dense_logits(model, tokens[: n + 1])[-1], **EXACT)


def test_logits_do_not_depend_on_batch_page_size_or_bucket():
    model = random_llama(tiny_config())
    prompts = [tokens_of(n, seed=n) for n in (13, 1, 4, 8, 5, 16, 2, 7)]
    expected = dense_logits(model, prompts[0])[-1]
    forms = [
        ([0], {"page_size": 4, "max_num_tokens": 16}),
        ([0], {"page_size": 16, "max_num_tokens": 64, "max_num_seqs": 5}),
        ([0], {"page_size": 1, "max_num_tokens": 13}),
        (range(8), {"page_size": 4, "max_num_tokens": 56}),
        ([5, 3, 0], {"page_size": 5, "max_num_tokens": 37, "spare_pages": 40}),
    ]
    for members, shape in forms:
        run = PagedRun(model, [len(p) + 2 for p in prompts], **{"max_num_seqs": 8, **shape})
        out = run({i: prompts[i] for i in members}, logits="last")
        np.testing.assert_allclose(out[0], expected, **EXACT)
        again = run({i: prompts[i][:1] for i in members}, logits="last")  # and a decode step
        np.testing.assert_allclose(again[0], dense_logits(model, [*prompts[0], prompts[0][0]])[-1], **EXACT)


def test_neighbours_content_does_not_touch_a_row():
    """Same shapes and pages, other neighbours: bit for bit the same."""
    rows = []
    for seed in (1, 2):
        run = PagedRun(random_llama(tiny_config()), [9, 9])
        rows.append(run({0: tokens_of(6), 1: tokens_of(7, seed=seed)}, logits="last")[0])
    np.testing.assert_array_equal(rows[0], rows[1])


@pytest.mark.parametrize("rope_type", ["default", "linear", "llama3", "yarn"])
def test_rotation_far_into_the_context_is_the_same_in_both_forms(rope_type):
    """At position 20000, where a scaling that one path drops or a rounded position shows."""
    values = rope_of_every_type()[rope_type]
    rope = RopeConfig.from_hf({"rope_parameters": values})
    plain = RopeConfig(values["rope_theta"])
    logits, keys = {}, {}
    for name, config in {"scaled": rope, "plain": plain}.items():
        model = random_llama(tiny_config(rope=config, num_hidden_layers=1, max_position_embeddings=32768))
        tokens = jnp.asarray(tokens_of(3))
        positions = jnp.asarray([0, 20000, 20001], jnp.int32)
        dense = call(model, tokens[None], positions=positions[None])[0]
        spec = cache_spec_for(model, num_pages=1, page_size=4)
        metadata = build_metadata(
            [SequenceSlice([0], 0, 3)],
            page_size=4,
            num_pages=1,
            max_num_tokens=3,
            max_num_seqs=1,
            max_pages_per_seq=1,
            logits="all",
        )
        metadata = metadata.__class__(**{**vars(metadata), "positions": positions})
        model.init_cache(spec)
        step = CompiledStep(model)
        np.testing.assert_allclose(step(tokens, metadata), dense, rtol=0, atol=2e-3)
        logits[name] = dense
        keys[name] = np.asarray(step.module().layers[0].self_attn.attention.kv_cache[0, :3, ::2])
    if rope_type != "default":
        assert np.abs(keys["scaled"][1] - keys["plain"][1]).max() > 0.1
        assert np.abs(logits["scaled"] - logits["plain"]).max() > 0.01
    # Nothing turns at position 0; yarn scales there too.
    scale = attention_factor(rope, 32768)
    np.testing.assert_allclose(keys["scaled"][0], scale * keys["plain"][0], rtol=1e-5)


def test_logits_rows():
    model = random_llama(tiny_config())
    tokens, other = tokens_of(6), tokens_of(3, seed=1)
    run = PagedRun(model, [6, 3], max_num_seqs=4)
    last = run({0: tokens, 1: other}, logits="last")
    assert set(last) == {0, 1}
    np.testing.assert_allclose(last[0], dense_logits(model, tokens)[-1], **EXACT)
    np.testing.assert_allclose(last[1], dense_logits(model, other)[-1], **EXACT)


def test_without_a_cache_the_batch_attends_to_itself():
    model = random_llama(tiny_config(rope=RopeConfig(rope_type="dynamic", factor=4.0), max_position_embeddings=8))
    tokens, other = tokens_of(12), tokens_of(5, seed=1)
    metadata = build_metadata(
        [SequenceSlice([0, 1, 2], 0, 12), SequenceSlice([3, 4], 0, 5)],
        page_size=4,
        num_pages=5,
        max_num_tokens=20,
        max_num_seqs=3,
        max_pages_per_seq=3,
        logits="all",
    )
    flat = np.zeros(20, np.int32)
    flat[:17] = [*tokens, *other]
    out = call(model, flat, metadata)
    np.testing.assert_allclose(out[:12], dense_logits(model, tokens), **EXACT)
    np.testing.assert_allclose(out[12:17], dense_logits(model, other), **EXACT)


@pytest.mark.parametrize("rope_type", ["default", "dynamic"])
def test_rows_and_packed_segments_are_independent(rope_type):
    """A row of a batch equals the row alone; sequences packed into one row equal the sequences apart."""
    parameters = rope_of_every_type()[rope_type]
    config = tiny_config(rope=RopeConfig.from_hf({"rope_parameters": parameters}), max_position_embeddings=4)
    model = random_llama(config)
    a, b = tokens_of(9), tokens_of(9, seed=1)
    together = call(model, jnp.stack([a, b]))
    np.testing.assert_allclose(together[0], dense_logits(model, a), **EXACT)
    np.testing.assert_allclose(together[1], dense_logits(model, b), **EXACT)
    packed = call(
        model,
        jnp.asarray([[*a, *b[:4]]]),
        positions=jnp.asarray([[*range(9), *range(4)]], jnp.int32),
        segment_ids=jnp.asarray([[1] * 9 + [2] * 4], jnp.int32),
    )
    np.testing.assert_allclose(packed[0, :9], dense_logits(model, a), **EXACT)
    np.testing.assert_allclose(packed[0, 9:], dense_logits(model, b[:4]), **EXACT)


def test_the_future_is_not_seen():
    model = random_llama(tiny_config())
    tokens = tokens_of(10)
    changed = tokens.copy()
    changed[6:] = (changed[6:] + 1) % 97
    np.testing.assert_allclose(dense_logits(model, changed)[:6], dense_logits(model, tokens)[:6], rtol=0, atol=1e-5)
    assert np.abs(dense_logits(model, changed)[6] - dense_logits(model, tokens)[6]).max() > 0.1


@pytest.mark.parametrize("kind", KINDS)
def test_every_parameter_has_a_gradient(kind):
    model = random_llama(tiny_config(**KINDS[kind]))
    tokens = jnp.asarray(tokens_of(20)).reshape(2, 10)

    def loss(model):
        logprobs = jax.nn.log_softmax(model(tokens[:, :-1]))
        return -jnp.take_along_axis(logprobs, tokens[:, 1:, None], axis=-1).mean()

    gradients = nnx.jit(nnx.grad(loss))(model)
    flat = nnx.to_flat_state(gradients)
    assert {path for path, _ in flat} == {path for path, _ in nnx.to_flat_state(nnx.state(model, nnx.Param))}
    for path, gradient in flat:
        value = np.asarray(gradient[...])
        assert np.isfinite(value).all(), path
        assert np.abs(value).max() > 1e-6, path


def test_gradient_equals_finite_differences():
    model = random_llama(tiny_config(attention_bias=True, mlp_bias=True, num_hidden_layers=1))
    tokens = jnp.asarray(tokens_of(8))[None]
    graphdef, state = nnx.split(model)
    loss = jax.jit(lambda state: jnp.mean(jnp.tanh(nnx.merge(graphdef, state)(tokens))))
    keys = iter(jax.random.split(jax.random.key(0), 100))
    direction = jax.tree.map(lambda x: jax.random.normal(next(keys), x.shape) / x.size**0.5, state)
    slope = sum(jnp.vdot(g, d) for g, d in zip(*map(jax.tree.leaves, (jax.grad(loss)(state), direction)), strict=True))
    step = 1e-2
    ends = [loss(jax.tree.map(lambda x, d, s=s: x + s * step * d, state, direction)) for s in (1, -1)]
    np.testing.assert_allclose((ends[0] - ends[1]) / (2 * step), slope, rtol=2e-2)


def test_the_module_holds_parameters_and_caches_and_nothing_else():
    model = random_llama(tiny_config(tie_word_embeddings=True, attention_bias=True, qk_norm=True))
    hash(nnx.graphdef(model))
    flat = nnx.to_flat_state(nnx.state(model))
    for path, variable in flat:
        assert type(variable) is nnx.Param, path
        axes = variable.get_metadata()["logical_axes"]
        assert len(axes) == variable.ndim
        assert set(axes) <= set(LOGICAL_AXIS_RULES), path
    # Tied by use, not by a shared Variable: one table, of which jax.tree.map makes one.
    assert not any("lm_head" in path for path, _ in flat)
    assert len({id(variable) for _, variable in flat}) == len(flat)
    model.init_cache(cache_spec_for(model, num_pages=3, page_size=4))
    caches = nnx.to_flat_state(nnx.state(model, KVCache))
    assert len(caches) == 2
    model.drop_cache()
    assert not nnx.to_flat_state(nnx.state(model, KVCache))


def test_tied_logits_move_with_the_table():
    model = random_llama(tiny_config(tie_word_embeddings=True))
    before = dense_logits(model, tokens_of(4))
    model.embed_tokens.weight[...] = model.embed_tokens.weight[...].at[5].set(0.0)
    after = dense_logits(model, np.where(tokens_of(4) == 5, 6, tokens_of(4)))
    np.testing.assert_array_equal(after[:, 5], 0)
    assert before.shape == after.shape


@pytest.mark.parametrize("where", ["jit", "nnx.jit", "grad", "vmap"])
def test_no_tracer_is_left_behind(where):
    model = random_llama(tiny_config(rope=RopeConfig(rope_type="dynamic", factor=2.0), num_hidden_layers=1))
    tokens = jnp.asarray(tokens_of(8)).reshape(2, 4)
    expected = call(model, tokens)
    with jax.checking_leaks():
        if where == "jit":
            out = jax.jit(lambda tokens: model(tokens))(tokens)
        elif where == "nnx.jit":
            out = nnx.jit(lambda model, tokens: model(tokens))(model, tokens)
        elif where == "grad":
            nnx.grad(lambda model: model(tokens).sum())(model)
            out = expected
        else:
            out = jax.vmap(lambda row: model(row[None])[0])(tokens)
    np.testing.assert_allclose(out, expected, **EXACT)
    assert not leaves_hold_tracers(model)


def test_a_cache_is_written_under_nnx_jit_without_a_leak():
    model = random_llama(tiny_config(num_hidden_layers=1))
    run = PagedRun(random_llama(tiny_config(num_hidden_layers=1)), [8], max_num_tokens=8)
    model.init_cache(cache_spec_for(model, num_pages=len(run.pages[0]) + 3, page_size=4))
    metadata = build_metadata([SequenceSlice(run.pages[0].tolist(), 0, 8)], logits="all", **run.shape)
    with jax.checking_leaks():
        out = nnx.jit(lambda model, tokens, metadata: model(tokens, metadata))(
            model, jnp.asarray(tokens_of(8)), jax.tree.map(jnp.asarray, metadata)
        )
    np.testing.assert_allclose(out, dense_logits(random_llama(tiny_config(num_hidden_layers=1)), tokens_of(8)), **EXACT)
    assert not leaves_hold_tracers(model)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=str)
@pytest.mark.parametrize("num_tokens", [1, 8, 56])
def test_the_compiled_step_neither_copies_weights_nor_repeats_the_tables(dtype, num_tokens):
    """No weight is copied, transposed or widened, and cos and sin are computed once (in two branches)."""
    config = tiny_config(num_hidden_layers=3, tie_word_embeddings=True)
    run = PagedRun(random_llama(config, dtype=dtype), [64], max_num_tokens=num_tokens)
    metadata = build_metadata([SequenceSlice(run.pages[0].tolist(), 0, num_tokens)], **run.shape)
    text = run.step.lower(tokens_of(num_tokens), metadata).compile().as_text()
    shapes = {array.shape for path, array in flat_arrays(random_llama(config)).items() if array.ndim == 2}
    entry = text[text.index("ENTRY") :]
    for a, b in (order for shape in shapes for order in (shape, shape[::-1])):
        assert not re.search(rf" = \w+\[{a},{b}\]\S* (?!parameter)", entry), (a, b)
    assert 1 <= text.count(" cosine(") <= 2
    assert 1 <= text.count(" sine(") <= 2


def test_dtype_of_parameters_is_dtype_of_activations():
    for dtype in (jnp.float32, jnp.bfloat16):
        model = random_llama(tiny_config(attention_bias=True), dtype=dtype)
        assert {x.dtype for x in jax.tree.leaves(nnx.state(model))} == {jnp.dtype(dtype)}
        block = model.layers[0]
        seen = []
        call = type(block.mlp).__call__
        type(block.mlp).__call__ = lambda self, x, *args: (seen.append(x.dtype), call(self, x, *args))[1]  # noqa: B023
        try:
            assert model(jnp.asarray(tokens_of(4))[None]).dtype == jnp.float32
        finally:
            type(block.mlp).__call__ = call
        assert set(seen) == {jnp.dtype(dtype)}


def test_batch_of_one_bfloat16_token():
    """The row that XLA:CPU would multiply slowly is padded; the result is that of a longer bucket."""
    model = random_llama(tiny_config(), dtype=jnp.bfloat16)
    outs = []
    for bucket in (1, 4):
        run = PagedRun(random_llama(tiny_config(), dtype=jnp.bfloat16), [4], max_num_tokens=bucket)
        outs.append([run({0: [t]}, logits="last")[0] for t in tokens_of(4)])
    np.testing.assert_allclose(outs[0], outs[1], atol=0.05)
    np.testing.assert_allclose(outs[0], dense_logits(model, tokens_of(4)), atol=0.2)


def test_scale_comes_from_head_dim():
    model = random_llama(tiny_config(hidden_size=64, head_dim=32))
    layer = model.layers[0].self_attn.attention
    assert isinstance(layer, PagedAttention)
    assert layer.scale == 32**-0.5
    assert cache_spec_for(model, num_pages=2, page_size=4).shape == (2, 4, 4, 32)


def test_a_cache_can_be_given_at_construction():
    config = tiny_config()
    spec = CacheSpec(2, 16, num_pages=3, page_size=4, dtype=jnp.float32)
    model = Llama(config, rngs=nnx.Rngs(0), cache=spec)
    assert len(jax.tree.leaves(nnx.state(model, KVCache))) == 2
    with pytest.raises(ValueError, match="but the layer needs"):
        Llama(config, rngs=nnx.Rngs(0), cache=CacheSpec(3, 16, num_pages=3, page_size=4))


def test_the_abstract_model_costs_nothing():
    big = tiny_config(vocab_size=128256, hidden_size=8192, intermediate_size=28672, num_hidden_layers=3, head_dim=128)
    leaves = jax.tree.leaves(nnx.state(abstract_llama(big)))
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)


def test_shapes_that_do_not_fit_are_refused():
    model = random_llama(tiny_config(num_hidden_layers=1))
    run = PagedRun(random_llama(tiny_config(num_hidden_layers=1)), [8], max_num_tokens=8)
    metadata = build_metadata([SequenceSlice(run.pages[0].tolist(), 0, 8)], **run.shape)
    tokens = jnp.asarray(tokens_of(8))
    with pytest.raises(ValueError, match=r"tokens has shape \(7,\), metadata.positions \(8,\)"):
        model(tokens[:7], metadata)
    with pytest.raises(ValueError, match=r"tokens has shape \(8,\); expected \[B, L\]"):
        model(tokens)
    with pytest.raises(ValueError, match="belong to the dense form"):
        model(tokens, metadata, positions=tokens)
