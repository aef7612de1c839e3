"""The public function: checks its arguments and chooses an implementation."""

from typing import Any

import jax
import jax.numpy as jnp

from flax_paged.ops import dispatch
from flax_paged.ops.kv_cache_update import reference, xla
from flax_paged.ops.quantization import is_quantized, quantize


def kv_cache_update(
    kv_pages: jax.Array,
    k: jax.Array,
    v: jax.Array,
    slot_mapping: jax.Array,
    num_kv_update_slices: jax.Array,
    *,
    k_scale: Any = None,
    v_scale: Any = None,
    num_slices_per_kv_cache_update_block: int | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Write new keys and values into the cache.

    Within a jit that donates `kv_pages` the result is the same buffer: the cost follows the tokens written and does not
    depend on the size of the cache. Tokens are cast to the cache's dtype; lanes past head_dim are filled with zeros. An
    int8 or float8 cache stores k / k_scale, rounded and saturated.

    Args:
        kv_pages: [num_pages, page_size, 2 * num_kv_heads, padded_head_dim], of a dtype of `CacheSpec`. Combined head
            2h is K of kv head h and 2h + 1 its V. Or a pool in the TPU's layout (`ops.page_layout`), which has five
            dimensions.
        k: [num_tokens, num_kv_heads, head_dim], floating point, or numbers already in the cache's dtype.
        v: Like `k`.
        slot_mapping: i32[3, U]; rows are the first slot in the flattened cache (page * page_size + offset), the first
            new token, and the length. A slice never crosses a page and a token is in one slice at most; the order of
            the columns does not matter. Tokens in no slice are not written.
        num_kv_update_slices: i32[1], live columns of `slot_mapping`; the others are not looked at.
        k_scale: Of an int8 or float8 cache: a number or [num_kv_heads], the same as the attention gets; None is 1.
        v_scale: Likewise for the values.
        num_slices_per_kv_cache_update_block: Copies that the TPU kernel keeps in flight; None lets it choose.
        implementation: None (Pallas on a TPU where it takes the cache, else "xla"), "reference", "xla", "pallas_tpu" or
            "pallas_tpu_interpret".

    Returns:
        The updated cache.

    Raises:
        ValueError: Shapes that do not fit, or an implementation that cannot run here.
        TypeError: A dtype that is not supported.
    """
    dispatch.check_shape("k", k, ("num_tokens", "num_kv_heads", "head_dim"))
    dispatch.check_shape("v", v, k.shape)
    dispatch.check_dtype("k", k, (*dispatch.FLOAT_DTYPES, kv_pages.dtype))
    dispatch.check_dtype("v", v, (k.dtype,))
    layout = dispatch.check_kv_pages(kv_pages, k.shape[1], k.shape[2])
    if layout.num_pages * layout.page_size >= 2**31:
        raise ValueError(
            f"kv_pages has {layout.num_pages} pages of {layout.page_size} tokens: expected fewer than 2**31 slots,"
            " which slot_mapping numbers in int32."
        )
    dispatch.check_shape("slot_mapping", slot_mapping, (3, "U"))
    dispatch.check_shape("num_kv_update_slices", num_kv_update_slices, (1,))
    dispatch.check_int32(slot_mapping=slot_mapping, num_kv_update_slices=num_kv_update_slices)

    k, v = (in_cache_dtype(x, scale, kv_pages.dtype) for x, scale in ((k, k_scale), (v, v_scale)))
    # Metadata often comes as numpy arrays, which tracers cannot index.
    arguments = [jnp.asarray(a) for a in (kv_pages, k, v, slot_mapping, num_kv_update_slices)]
    kernel_can = kv_pages.shape[-1] % 128 == 0 and not (is_quantized(kv_pages.dtype) and layout.is_standard)
    chosen = dispatch.choose_implementation(implementation, kernel_can=kernel_can)
    if chosen == "reference":
        return reference.kv_cache_update(*arguments)
    if chosen == "xla":
        return xla.kv_cache_update(*arguments)
    # Pallas takes a second to import; only those who run it pay.
    from flax_paged.ops.kv_cache_update.tpu import kv_cache_update_tpu

    return kv_cache_update_tpu(
        *arguments,
        num_slices_per_kv_cache_update_block=num_slices_per_kv_cache_update_block,
        interpret=chosen == "pallas_tpu_interpret",
    )


def in_cache_dtype(x: jax.Array, scale: Any, dtype: Any) -> jax.Array:
    """Quantise new tokens [T, KV, D] if the cache is quantised and they are not yet.

    Args:
        x: Keys or values.
        scale: A number, f32[KV] or None.
        dtype: The cache's dtype.

    Raises:
        ValueError: A scale without a quantised cache, or of another shape.
    """
    if not is_quantized(dtype):
        if scale is not None:
            raise ValueError(f"k_scale and v_scale belong to an int8 or float8 cache, but kv_pages is {dtype.name}.")
        return x
    if x.dtype == dtype:
        return x
    scale = jnp.asarray(1.0 if scale is None else scale, jnp.float32)
    if scale.shape not in ((), x.shape[1:2]):
        raise ValueError(f"scale of shape {scale.shape}: expected a number or [{x.shape[1]}], one for each kv head.")
    return quantize(x, dtype, scale.reshape(1, -1, 1))
