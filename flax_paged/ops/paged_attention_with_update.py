"""Attention that writes the step's keys and values itself: one kernel launch where the pair takes two."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from flax_paged.ops import dispatch
from flax_paged.ops.kv_cache_update import kv_cache_update
from flax_paged.ops.kv_cache_update.api import in_cache_dtype
from flax_paged.ops.ragged_paged_attention import ragged_paged_attention
from flax_paged.ops.ragged_paged_attention.api import missing_in_kernel


def paged_attention_with_update(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    kv_pages: jax.Array,
    slot_mapping: jax.Array,
    num_kv_update_slices: jax.Array,
    seq_lens: jax.Array,
    block_tables: jax.Array,
    query_start_loc: jax.Array,
    num_seqs: jax.Array,
    *,
    implementation: str | None = None,
    **options: Any,
) -> tuple[jax.Array, jax.Array]:
    """Write new keys and values into the cache, then attend over it.

    The same as `kv_cache_update` followed by `ragged_paged_attention`, which is also how the portable implementations
    do it. The Pallas kernel copies the slices into their pages before it fetches the first one: every token of
    `slot_mapping` is written, whether or not a query attends to it.

    Args:
        q: [T, H, D].
        k: [T, KV, D].
        v: Like `k`.
        kv_pages: [num_pages, page_size, 2 * KV, padded D] or in the TPU's layout (`ops.page_layout`); donate it, and
            the result is the same buffer.
        slot_mapping: i32[3, U], as in `kv_cache_update`.
        num_kv_update_slices: i32[1].
        seq_lens: i32[S], as in `ragged_paged_attention`.
        block_tables: i32[S, P].
        query_start_loc: i32[S + 1].
        num_seqs: i32[1].
        implementation: As in `ragged_paged_attention`.
        **options: Further options of `ragged_paged_attention`; k_scale and v_scale hold for the update too.

    Returns:
        The attention's result, as `ragged_paged_attention` returns it, and the updated cache.

    Raises:
        ValueError: Shapes or options that do not fit, or an implementation that cannot run here.
        TypeError: A dtype that is not supported.
        NotImplementedError: The implementation asked for does not have a feature.
    """
    update = [jnp.asarray(x) for x in (k, v, slot_mapping, num_kv_update_slices)]
    attention = [jnp.asarray(x) for x in (seq_lens, block_tables, query_start_loc, num_seqs)]
    lacking = missing_in_kernel(q, kv_pages, **options)
    kernel_can = kv_pages.shape[-1] % 128 == 0 and not lacking
    chosen = dispatch.choose_implementation(implementation, kernel_can=kernel_can)
    if not chosen.startswith("pallas"):
        return _update_then_attend(q, kv_pages, update, attention, implementation=chosen, **options)
    if lacking:
        raise NotImplementedError(f"implementation={chosen!r} does not have: {lacking}. Use 'xla'.")
    # Checks all arguments as the pair does, without computing anything.
    jax.eval_shape(
        functools.partial(_update_then_attend, implementation="reference", **options), q, kv_pages, update, attention
    )
    kv_pages = jnp.asarray(kv_pages)
    for i, name in enumerate(("k_scale", "v_scale")):
        update[i] = in_cache_dtype(update[i], options.get(name), kv_pages.dtype)
    # Pallas takes a second to import; only those who run it pay.
    from flax_paged.ops.ragged_paged_attention.tpu import ragged_paged_attention_tpu

    return ragged_paged_attention_tpu(
        jnp.asarray(q),
        kv_pages,
        *attention,
        update=tuple(update),
        interpret=chosen == "pallas_tpu_interpret",
        **{name: value for name, value in options.items() if value is not None},
    )


def _update_then_attend(q, kv_pages, update, attention, *, implementation, **options):
    scales = {name: options.get(name) for name in ("k_scale", "v_scale")}
    kv_pages = kv_cache_update(kv_pages, *update, **scales, implementation=implementation)
    return ragged_paged_attention(q, kv_pages, *attention, implementation=implementation, **options), kv_pages
