"""Dense attention on a TPU: JAX's splash attention kernel behind our arguments. `dense_attention` chooses it."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel_lib
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as mask_lib

_LANES = 128
_BLOCK_SIZES = (512, 256, 128)


def unsupported_reason(
    q, k, *, sliding_window, alibi_slopes, attention_chunk_size, causal, same_positions
) -> str | None:
    """Return why the kernel cannot do what `dense_attention` is asked for, or None if it can.

    Args:
        q: [B, L, H, D].
        k: [B, M, KV, D].
        sliding_window: As in `dense_attention`, like the next three.
        alibi_slopes: Likewise.
        attention_chunk_size: Likewise.
        causal: Likewise.
        same_positions: Whether queries and keys are the same tokens.
    """
    if alibi_slopes is not None:
        return "it has no ALiBi"
    if q.dtype == jnp.float16 or k.dtype == jnp.float16:
        return "a TPU has no float16"
    has_distance = causal or sliding_window is not None or attention_chunk_size is not None
    if has_distance and not (same_positions and q.shape[1] == k.shape[1]):
        return "its masks need queries and keys at the same positions"
    return None


def splash_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    sm_scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    sinks: jax.Array | None,
    attention_chunk_size: int | None,
    causal: bool,
    segment_ids: jax.Array | None,
    positions: jax.Array | None,
    interpret: bool = False,
) -> jax.Array:
    """Attend as `dense_attention` does, whose arguments these are; scores never reach main memory.

    The kernel masks by a token's place in its row, so within a segment, whose tokens must be neighbours, `positions`
    must not fall, nor skip any if there is a window or chunks. Where they do, the whole row of the batch is NaN.

    Args:
        q: [B, L, H, D], float32 or bfloat16.
        k: [B, M, KV, D] of the same dtype.
        v: Like `k`.
        sm_scale: Factor on the scores.
        sliding_window: As in `dense_attention`, like the rest.
        soft_cap: Likewise.
        sinks: Likewise.
        attention_chunk_size: Likewise.
        causal: Likewise.
        segment_ids: Likewise.
        positions: i32[B, L] of queries and keys alike, or None.
        interpret: Run the kernel's code without a TPU.

    Returns:
        [B, L, H, D] in q's dtype.

    Reference: `jax.experimental.pallas.ops.tpu.splash_attention`.
    """
    num_queries, num_keys = q.shape[1], k.shape[1]
    # Tokens of one chunk are nearer to each other than its size, so a window lets the kernel skip the other blocks.
    limits = [limit for limit in (sliding_window, attention_chunk_size) if limit is not None]
    kernel = _make_kernel(
        q.shape[2], num_queries, num_keys, causal, min(limits, default=None), soft_cap, interpret
    )  # fmt: skip
    ids = segment_ids
    if attention_chunk_size is not None:
        ids = _chunk_ids(ids, positions, attention_chunk_size, q.shape[:2])
    segments = _pad_ids(ids, q.shape[0], num_queries, num_keys)
    heads_first = [
        _pad_rows((q * sm_scale).astype(q.dtype), num_queries),
        _pad_rows(k, num_keys),
        _pad_rows(v, num_keys),
    ]

    def attend(sinks, segments, *qkv):
        return jax.vmap(lambda segments, *qkv: kernel(*qkv, segments, sinks))(segments, *qkv)

    sinks = None if sinks is None else sinks.astype(jnp.float32)
    out = _with_exact_gradient(attend, q.dtype)(sinks, segments, *heads_first)
    out = out[:, :, :num_queries].swapaxes(1, 2)
    if positions is None:
        return out
    follows = _positions_follow(positions, segment_ids, may_skip=not limits)
    return jnp.where(follows[:, None, None, None], out, jnp.nan)


def _with_exact_gradient(attend, dtype):
    """Wrap `attend(sinks, ...)` to multiply float32 in float32, forward and backward: the kernel has no option for it.

    JAX before 0.12 gives the sinks' gradient in the dtype of the queries, which is set right here too.
    """
    precision = "highest" if dtype == jnp.float32 else None

    @jax.custom_vjp
    def run(*args):
        with jax.default_matmul_precision(precision):
            return attend(*args)

    def forward(*args):
        with jax.default_matmul_precision(precision):
            return jax.vjp(attend, *args)

    def backward(vjp, cotangent):
        with jax.default_matmul_precision(precision):
            sinks, *others = vjp(cotangent)
        return (None if sinks is None else sinks.astype(jnp.float32), *others)

    run.defvjp(forward, backward)
    return run


@functools.lru_cache(maxsize=32)
def _make_kernel(num_heads, num_queries, num_keys, causal, window, soft_cap, interpret):
    """Return the kernel for one row; the mask's blocks are found once for each shape, on the host."""
    shape = (_padded(num_queries), _padded(num_keys))
    if window is not None:
        mask = mask_lib.LocalMask(shape, (window - 1, 0 if causal else window - 1), offset=0)
    elif causal:
        mask = mask_lib.CausalMask(shape)
    else:
        mask = mask_lib.FullMask(shape)
    block_q, block_kv = (next(size for size in _BLOCK_SIZES if length % size == 0) for length in shape)
    block_sizes = kernel_lib.BlockSizes(
        block_q=block_q, block_kv=block_kv, block_q_dkv=block_q, block_kv_dkv=block_kv, block_q_dq=block_q,
        block_kv_dq=block_kv,
    )  # fmt: skip
    # Its arrays are kept, so they must not belong to the program that is being traced.
    with jax.ensure_compile_time_eval():
        return kernel_lib.make_splash_mha_single_device(
            mask=mask_lib.MultiHeadMask([mask] * num_heads), block_sizes=block_sizes, attn_logits_soft_cap=soft_cap,
            interpret=interpret,
        )  # fmt: skip


def _padded(length: int) -> int:
    return -(-length // _LANES) * _LANES


def _pad_rows(x: jax.Array, length: int) -> jax.Array:
    """Bring [B, L, H, D] to [B, H, padded L, D]."""
    return jnp.pad(x.swapaxes(1, 2), ((0, 0), (0, 0), (0, _padded(length) - length), (0, 0)))


def _pad_ids(ids, batch: int, num_queries: int, num_keys: int) -> kernel_lib.SegmentIds | None:
    """Return segment ids that hide padding keys, or None if nothing needs them."""
    if ids is None and num_keys == _padded(num_keys):
        return None

    def pad(length):
        own = jnp.zeros((batch, length), jnp.int32) if ids is None else ids
        return jnp.pad(own, ((0, 0), (0, _padded(length) - length)), constant_values=-1)

    return kernel_lib.SegmentIds(pad(num_queries), pad(num_keys))


def _chunk_ids(segment_ids, positions, chunk_size, shape) -> jax.Array:
    """Number the chunks of all segments of each row: i32[B, L]."""
    if positions is None:
        positions = jnp.broadcast_to(jnp.arange(shape[1], dtype=jnp.int32), shape)
    chunks = positions // chunk_size
    begins = chunks[:, 1:] != chunks[:, :-1]
    if segment_ids is not None:
        begins |= segment_ids[:, 1:] != segment_ids[:, :-1]
    return jnp.pad(jnp.cumsum(begins, axis=1, dtype=jnp.int32), ((0, 0), (1, 0)))


def _positions_follow(positions, segment_ids, *, may_skip) -> jax.Array:
    """Return bool[B]: whether masking by place equals masking by position. Padding may repeat a position."""
    steps = positions[:, 1:] - positions[:, :-1]
    follows = (steps >= 0) if may_skip else (steps >= 0) & (steps <= 1)
    if segment_ids is not None:
        follows |= segment_ids[:, 1:] != segment_ids[:, :-1]
    return follows.all(axis=1)
