"""Faults that users of such kernels reported, each widened to its kind, on both portable implementations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import assert_close, make_ragged_batch, ragged_paged_attention_oracle

from flax_paged.ops import ragged_paged_attention
from flax_paged.ops.ragged_paged_attention import xla

IMPLEMENTATIONS = ("reference", "xla")
# Shared, so that cases of equal shapes and options compile once.
RUN = jax.jit(ragged_paged_attention, static_argnames=("implementation", "sliding_window", "soft_cap", "max_query_len"))


def batch_of(lengths, **options):
    sizes = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 16, "page_size": 4}
    return make_ragged_batch(lengths, **{**sizes, **options})


def attend(implementation, batch, kv_pages=None, **options):
    args = list(batch.args)
    args[1] = batch.kv_pages if kv_pages is None else kv_pages
    return np.asarray(RUN(*args, implementation=implementation, **options))


def with_value(batch, seq, position, value, page_size=4):
    """The pool with the values (not the keys) of one token replaced."""
    pages = batch.kv_pages.copy()
    pages[batch.block_tables[seq, position // page_size], position % page_size, 1::2] = value
    return pages


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("query_len", [16, 3, 1], ids=["one_shot", "chunk", "decode"])
@pytest.mark.parametrize("window", [1, 4, 6])
def test_window_holds_exactly_its_keys(implementation, query_len, window):
    batch = batch_of(((query_len, 16), (2, 5)))
    base = attend(implementation, batch, sliding_window=window)
    for row in range(query_len):
        position = 16 - query_len + row
        for key, is_seen in ((position - window, False), (position - window + 1, True), (position + 1, False)):
            if 0 <= key < 16:
                out = attend(implementation, batch, with_value(batch, 0, key, 9.0), sliding_window=window)
                assert (out[row] != base[row]).any() == is_seen, f"{position=} {key=}"


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("window", [None, 3])
def test_soft_cap_comes_before_the_mask(implementation, window):
    batch = batch_of(((8, 16), (1, 5)), sharpness=30.0)
    options = {"soft_cap": 5.0, "sliding_window": window}
    base = attend(implementation, batch, **options)
    assert_close(base, ragged_paged_attention_oracle(*batch.args, **options), np.float32)
    out = attend(implementation, batch, with_value(batch, 0, 15, 1e4), **options)
    np.testing.assert_array_equal(out[:7], base[:7])
    assert np.abs(out[7]).max() > 10


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf, 1e30])
@pytest.mark.parametrize("lengths", [((5, 5), (4, 8)), ((1, 5), (1, 8), (1, 1))], ids=["prefill", "decode"])
def test_dead_slots_never_leak(implementation, poison, lengths):
    """Page tails, dead pages, padding rows of q: bit-equal to a pool of zeros."""
    hint = max(query_len for query_len, _ in lengths)
    for options in ({}, {"soft_cap": 5.0, "sliding_window": 2}):
        outs = []
        for fill in (poison, 0.0):
            batch = batch_of(lengths, poison=fill)
            outs.append(attend(implementation, batch, max_query_len=hint, **options))
        assert np.isfinite(outs[0]).all()
        np.testing.assert_array_equal(*outs)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_pages_before_the_window_may_be_given_away(implementation):
    """An engine that frees pages left of the window lets others write there: NaN in them must not leak."""
    batch = batch_of(((1, 30), (1, 9)))
    base = attend(implementation, batch, sliding_window=6)
    pages = batch.kv_pages.copy()
    pages[batch.block_tables[0, :6]] = np.nan
    np.testing.assert_array_equal(attend(implementation, batch, pages, sliding_window=6), base)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_neighbours_do_not_matter(implementation):
    """Other sequences' content changes: row by row bit-exact."""
    batch = batch_of(((3, 9), (1, 6), (4, 4)))
    pages = batch.kv_pages.copy()
    for seq, num_pages in ((1, 2), (2, 1)):
        pages[batch.block_tables[seq, :num_pages]] *= np.float32(3)
    out = attend(implementation, batch, pages)
    np.testing.assert_array_equal(out[:3], attend(implementation, batch)[:3])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_context_length_is_not_seq_len(implementation):
    """The two conventions must not be interchangeable unnoticed."""
    batch = batch_of(((3, 9), (1, 6)))
    base = attend(implementation, batch)
    batch.seq_lens[:2] -= [3, 1]
    assert np.nanmax(np.abs(attend(implementation, batch) - base)) > 0.1


@pytest.mark.parametrize("hint", [None, 1])
def test_new_lengths_do_not_recompile(hint):
    run = jax.jit(lambda *a: ragged_paged_attention(*a, implementation="xla", max_query_len=hint))
    batch = batch_of(((1, 40), (1, 6)))
    for lengths in ((40, 6), (1, 2), (17, 17)):
        batch.seq_lens[:2] = lengths
        run(*batch.args)
    assert run._cache_size() == 1


def count_blocks(monkeypatch, batch, **options):
    """Blocks of keys that a step really reads, counted as it runs."""
    reads, read = [], xla.PageReader.read

    def counting_read(cache, seqs, first_keys, last_keys, num_keys):
        jax.debug.callback(lambda n: reads.append(len(n)), seqs)
        return read(cache, seqs, first_keys, last_keys, num_keys)

    with monkeypatch.context() as patch:
        patch.setattr(xla.PageReader, "read", counting_read)
        patch.setattr(xla, "_GATHER_BYTES", 0)
        # A function of its own: what `RUN` has compiled before does not count.
        jax.jit(lambda *a: ragged_paged_attention(*a, implementation="xla", **options))(*batch.args)
        jax.effects_barrier()
    return sum(reads)


@pytest.mark.parametrize("num_padding_pages", [0, 500])
def test_cost_follows_live_tokens(monkeypatch, num_padding_pages):
    options = {"num_padding_pages": num_padding_pages, "page_size": 16, "num_padding_seqs": 5}
    decode = batch_of(((1, 1000), (1, 130), (1, 5)), **options)
    for window, live_keys in ((None, (1000, 130, 5)), (100, (100, 100, 5))):
        num_blocks = sum(-(-n // xla._DECODE_KEYS_PER_BLOCK) for n in live_keys)
        num_read = count_blocks(monkeypatch, decode, max_query_len=1, sliding_window=window)
        assert num_blocks <= num_read < num_blocks + xla._ITEMS_PER_TURN  # the last turn is filled up
    prefill = batch_of(((256, 256), (3, 300)), **options)
    assert count_blocks(monkeypatch, prefill) == 1 + 2 + 3  # two blocks of queries up to the causal edge, one of 3
    assert count_blocks(monkeypatch, prefill, sliding_window=10) == 1 + 2 + 1


def test_temporaries_do_not_grow_with_the_table():
    def temporary_bytes(pages_per_seq, num_pages):
        f32, i32 = jnp.float32, jnp.int32
        shapes = [((8, 9, 64), f32), ((num_pages, 16, 6, 64), f32), ((8,), i32), ((8, pages_per_seq), i32), ((9,), i32)]
        args = [jax.ShapeDtypeStruct(*s) for s in [*shapes, ((1,), i32)]]
        run = jax.jit(lambda *a: ragged_paged_attention(*a, implementation="xla", max_query_len=1))
        return run.lower(*args).compile().memory_analysis().temp_size_in_bytes

    assert temporary_bytes(2048, 20_000) < 8 * 2**20
    assert temporary_bytes(2048, 20_000) < 1.1 * temporary_bytes(256, 2000)


@pytest.mark.parametrize(
    "lengths, hint, expected",
    [
        (((1, 30), (1, 9)), 1, {"_decode_short"}),
        (((1, 3000), (1, 9)), 1, {"_decode_long"}),
        (((1, 30), (1, 9)), None, {"_decode_long", "_prefill"}),
        (((5, 30), (1, 9)), 5, {"_decode_long", "_prefill"}),
    ],
)
def test_each_path_is_really_taken(monkeypatch, lengths, hint, expected):
    taken = set()
    for name in ("_decode_short", "_decode_long", "_prefill"):
        original = getattr(xla, name)
        monkeypatch.setattr(xla, name, lambda *a, name=name, original=original: taken.add(name) or original(*a))
    batch = batch_of(lengths, num_q_heads=16, num_kv_heads=8, head_dim=64)
    run = jax.jit(lambda *a: ragged_paged_attention(*a, implementation="xla", max_query_len=hint, sm_scale=0.125))
    out = run(*batch.args)
    assert taken == expected
    assert_close(out, ragged_paged_attention_oracle(*batch.args, sm_scale=0.125), np.float32)


@pytest.mark.parametrize("hint", [None, 1])
def test_index_arithmetic_of_a_huge_pool(hint):
    """A pool of more than 2**31 rows of head_dim: no index into it may be a single int32."""
    f32, i32 = jnp.float32, jnp.int32
    shapes = [((8, 16, 64), f32), ((2**22, 256, 16, 64), f32), ((8,), i32), ((8, 64), i32), ((9,), i32), ((1,), i32)]
    run = lambda *a: ragged_paged_attention(*a, implementation="xla", max_query_len=hint)  # noqa: E731
    jaxpr = jax.make_jaxpr(run)(*(jax.ShapeDtypeStruct(*s) for s in shapes))
    pools = [aval for aval in _avals(jaxpr.jaxpr) if getattr(aval, "size", 0) >= 2**31]
    assert pools and all(max(aval.shape) < 2**31 for aval in pools)


def _avals(jaxpr):
    for equation in jaxpr.eqns:
        yield from (variable.aval for variable in [*equation.invars, *equation.outvars])
        for parameter in equation.params.values():
            for inner in parameter if isinstance(parameter, tuple) else (parameter,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from _avals(inner)
