"""The compiled step: in place, no retraces, no weight copies, hot swap, stale handles."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from flax_paged.attention import PagedAttention, init_cache
from flax_paged.cache import CacheSpec, KVCache
from flax_paged.metadata import SequenceSlice, build_metadata
from flax_paged.step import CompiledStep

SPEC = CacheSpec(2, 8, num_pages=6, page_size=4, dtype=jnp.float32)


class TinyDecoder(nnx.Module):
    """Two attention layers and a table: enough to have weights, caches and the call form."""

    def __init__(self, rngs: nnx.Rngs):
        self.table = nnx.Param(jax.random.normal(rngs.params(), (11, 32)))
        self.attention = nnx.List([PagedAttention(4, 2, 8) for _ in range(2)])

    def __call__(self, tokens, metadata):
        x = self.table[...][tokens]
        for attention in self.attention:
            x = x + attention(x, x[:, :16], x[:, 16:], metadata)
        return x[metadata.logits_rows()] @ self.table[...].T


def make_model(seed=0, cache=SPEC):
    model = TinyDecoder(nnx.Rngs(seed))
    if cache is not None:
        init_cache(model, cache)
    return model


def batch(pages, context_len, tokens):
    metadata = build_metadata(
        [SequenceSlice(pages, context_len, len(tokens))],
        page_size=4,
        num_pages=6,
        max_num_tokens=8,
        max_num_seqs=2,
        max_pages_per_seq=3,
    )
    padded = np.zeros(8, np.int32)
    padded[: len(tokens)] = tokens
    return padded, metadata


def test_token_by_token_equals_the_whole_prompt():
    tokens = [3, 1, 4, 1, 5, 9, 2]
    whole = CompiledStep(make_model())(*batch([5, 0], 0, tokens))
    step = CompiledStep(make_model())
    for i, token in enumerate(tokens):
        logits = step(*batch([5, 0], i, [token]))
    np.testing.assert_allclose(logits[0], whole[0], rtol=1e-5, atol=1e-5)
    assert step.num_traces == 1


def test_the_cache_is_aliased_and_never_copied():
    lowered = CompiledStep(make_model()).lower(*batch([1], 0, [3]))
    compiled = lowered.compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= 2 * SPEC.nbytes
    shape = "f32[" + ",".join(map(str, SPEC.shape)) + "]"
    copies = [line for line in compiled.as_text().splitlines() if f"= {shape}" in line and " copy(" in line]
    assert not copies, copies


def test_weights_are_not_donated_returned_or_copied():
    model = make_model()
    table = model.table[...]
    step = CompiledStep(model)
    for i in range(3):
        step(*batch([1], i, [3]))
    assert not table.is_deleted()
    assert step.module().table[...] is table
    out, caches = jax.eval_shape(step._jitted, step._leaves.weights, step._leaves.caches, *batch([1], 0, [3]))
    assert out.shape == (2, 11)
    assert [leaf.shape for leaf in caches] == [SPEC.shape] * 2


def test_live_memory_does_not_grow_with_steps():
    step = CompiledStep(make_model())
    jax.block_until_ready(step(*batch([1], 0, [3])))
    gc.collect()
    before = len(jax.live_arrays())
    for i in range(1, 4):
        jax.block_until_ready(step(*batch([1], i, [3])))
    gc.collect()
    assert len(jax.live_arrays()) == before


def test_new_weights_change_the_output_without_compiling():
    model = make_model()
    step = CompiledStep(model)
    first = step(*batch([1], 0, [3, 4]))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    optimizer.update(model, jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param)))
    step.update_weights(model)
    second = step(*batch([1], 0, [3, 4]))
    fresh_model = make_model(cache=None)
    fresh_model.table[...] = model.table[...]
    init_cache(fresh_model, SPEC)
    expected = CompiledStep(fresh_model)(*batch([1], 0, [3, 4]))
    assert not np.allclose(first, second)
    np.testing.assert_array_equal(second, expected)
    step.update_weights(nnx.state(fresh_model, nnx.Param))
    assert step.num_traces == 1


def test_weights_that_do_not_fit_are_refused_and_nothing_changes():
    step = CompiledStep(make_model())
    before = step.module().table[...]
    wrong_shape = make_model()
    wrong_shape.table = nnx.Param(jnp.ones((12, 32)))
    with pytest.raises(ValueError, match=r"table: expected float32\[11, 32\], got float32\[12, 32\]"):
        step.update_weights(wrong_shape)
    wrong_dtype = make_model()
    wrong_dtype.table = nnx.Param(jnp.ones((11, 32), jnp.bfloat16))
    with pytest.raises(ValueError, match=r"got bfloat16\[11, 32\]"):
        step.update_weights(wrong_dtype)
    extra = make_model()
    extra.bias = nnx.Param(jnp.ones(3))
    with pytest.raises(ValueError, match="unexpected bias"):
        step.update_weights(extra)
    missing = make_model()
    del missing.table
    with pytest.raises(ValueError, match="missing table"):
        step.update_weights(nnx.state(missing, nnx.Param))
    assert step.module().table[...] is before


def test_the_original_handle_is_stale_and_says_so():
    model = make_model()
    step = CompiledStep(model)
    step(*batch([1], 0, [3]))
    with pytest.raises(RuntimeError, match="stale: its array was donated"):
        model(*jax.tree.map(jnp.asarray, batch([1], 1, [4])))
    with pytest.raises(RuntimeError, match=r"cache attention.0.kv_cache was donated to another compiled step"):
        CompiledStep(model)
    init_cache(model, SPEC)
    CompiledStep(model)(*batch([1], 0, [3]))
    assert step.module().attention[0].kv_cache[...].shape == SPEC.shape


def test_two_steps_over_one_set_of_weights_keep_their_own_caches():
    model = make_model()
    twin = nnx.merge(*nnx.split(model))
    init_cache(twin, SPEC)
    one, two = CompiledStep(model), CompiledStep(twin)
    for i, token in enumerate([3, 1, 4]):
        a = one(*batch([1], i, [token]))
        b = two(*batch([2], i, [token]))
        np.testing.assert_array_equal(a[0], b[0])
    assert one.module().table[...] is two.module().table[...]


def test_functions_that_share_the_cache_see_each_others_writes_and_weights():
    step = CompiledStep(make_model())
    greedy = step.with_function(lambda model, *args: jnp.argmax(model(*args), -1), name="greedy")
    step(*batch([1], 0, [3, 4, 5]))
    token = greedy(*batch([1], 3, [6]))
    expected = CompiledStep(make_model())(*batch([1], 0, [3, 4, 5, 6]))
    assert int(token[0]) == int(jnp.argmax(expected[0]))
    assert (step.num_traces, greedy.num_traces) == (1, 1)
    greedy.update_weights(make_model(seed=1))
    assert step.module().table[...] is greedy.module().table[...]


def test_a_step_that_cannot_be_traced_leaves_the_cache_usable():
    step = CompiledStep(make_model())
    first = step(*batch([1], 0, [3]))
    tokens, metadata = batch([1], 1, [4])
    with pytest.raises(ValueError, match="padded number of tokens"):
        step(tokens[:4], metadata)
    np.testing.assert_array_equal(step(*batch([1], 0, [3])), first)


def test_a_step_that_fails_while_running_asks_for_a_new_cache():
    step = CompiledStep(make_model())
    first = step(*batch([1], 0, [3]))
    jax.block_until_ready(jax.tree.leaves(step._leaves.caches))
    for cache in step._leaves.caches:
        cache.delete()  # what a failed execution does to donated arguments
    with pytest.raises(RuntimeError, match=r"call reset_cache\(\)"):
        step(*batch([1], 0, [3]))
    step.reset_cache()
    np.testing.assert_array_equal(step(*batch([1], 0, [3])), first)


def test_time_and_memory_of_the_step_do_not_know_the_pool_size():
    """The compiled step of a 16 times larger pool has the same temporaries."""
    sizes = []
    for num_pages in (64, 1024):
        spec = CacheSpec(2, 8, num_pages=num_pages, page_size=4, dtype=jnp.float32)
        step = CompiledStep(make_model(cache=spec))
        sizes.append(step.lower(*batch([1], 0, [3])).compile().memory_analysis().temp_size_in_bytes)
    assert sizes[0] == sizes[1]


def test_no_tracer_survives_a_step():
    with jax.checking_leaks():
        step = CompiledStep(make_model())
        step(*batch([1], 0, [3]))
    for leaf in jax.tree.leaves(nnx.state(step.module())):
        assert not isinstance(leaf, jax.core.Tracer)
    assert len(jax.tree.leaves(nnx.state(step.module(), KVCache))) == 2


def test_only_modules_are_taken():
    with pytest.raises(TypeError, match="expected an nnx.Module"):
        CompiledStep(lambda x: x)
