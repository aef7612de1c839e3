"""Attention without a cache, over a batch of equally long rows: training and memory profiling."""

import jax
import jax.numpy as jnp
from jax import lax

from flax_paged.ops import dispatch
from flax_paged.ops.ragged_paged_attention.rules import AttentionRules
from flax_paged.ops.splash_attention import splash_attention, unsupported_reason

IMPLEMENTATIONS = ("xla", "splash_tpu", "splash_tpu_interpret")


def dense_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    sm_scale: float = 1.0,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    alibi_slopes: jax.Array | None = None,
    attention_chunk_size: int | None = None,
    causal: bool = True,
    segment_ids: jax.Array | None = None,
    q_positions: jax.Array | None = None,
    kv_positions: jax.Array | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Attend each row of a batch over its own keys; the same numbers as the paged form.

        out[b, i] = softmax_j(cap(sm_scale * q[b, i] . k[b, j]) - alibi_slope * |distance|) @ v[b]

    over the keys j of the same segment where, distance being q_positions[i] - kv_positions[j], distance >= 0 if causal,
    |distance| < sliding_window, and both are in the same chunk, as far as these are asked for. Softmax and accumulation
    are in float32. A query that sees no key gives zeros.

    "splash_tpu" is JAX's splash attention, which never writes the scores to memory, forward or backward. It masks by a
    token's place in its row: the tokens of a segment must be neighbours and their positions must not fall, nor skip any
    if there is a window or chunks. A row where they do gives NaN; "xla" takes any positions.

    Args:
        q: [B, L, H, D], floating point.
        k: [B, M, KV, D], KV divides H. M is L unless positions say otherwise.
        v: Like `k`.
        sm_scale: Factor on the scores.
        sliding_window: Keys that a query sees, its own included; None for all.
        soft_cap: Cap on the scaled scores, `soft_cap * tanh(s / soft_cap)`, applied before the mask.
        sinks: f32[H], one more logit a head in the softmax's denominator, without a value; None for none.
        alibi_slopes: f32[H]; None for none.
        attention_chunk_size: A query sees keys of its own chunk only; None for all.
        causal: Whether later keys are hidden.
        segment_ids: i32[B, L]. Tokens attend within their own segment; needs M == L.
        q_positions: i32[B, L]; None means 0, 1, 2, ...
        kv_positions: i32[B, M]; None means 0, 1, 2, ... Give both the same array in self-attention.
        implementation: None ("splash_tpu" on a TPU where it does the job, else "xla"), "xla", "splash_tpu" or
            "splash_tpu_interpret", which runs the kernel's code without a TPU.

    Returns:
        [B, L, H, D] in q's dtype.

    Raises:
        ValueError: Shapes that do not fit, or an implementation that cannot run here.
        NotImplementedError: The implementation asked for does not have a feature; "xla" has all.
    """
    _check(q, k, v, segment_ids, q_positions, kv_positions)
    reason = unsupported_reason(
        q, k, sliding_window=sliding_window, alibi_slopes=alibi_slopes, attention_chunk_size=attention_chunk_size,
        causal=causal, same_positions=q_positions is kv_positions,
    )  # fmt: skip
    implementation = _choose_implementation(implementation, reason)
    if implementation != "xla":
        dtype = dispatch.product_dtype(q, k)
        return splash_attention(
            q.astype(dtype),
            k.astype(dtype),
            v.astype(dtype),
            sm_scale=sm_scale,
            sliding_window=sliding_window,
            soft_cap=soft_cap,
            sinks=sinks,
            attention_chunk_size=attention_chunk_size,
            causal=causal,
            segment_ids=segment_ids,
            positions=q_positions,
            interpret=implementation == "splash_tpu_interpret",
        ).astype(q.dtype)
    batch, num_queries, num_q_heads, head_dim = q.shape
    num_keys, num_kv_heads = k.shape[1:3]
    q_positions = _positions(q_positions, batch, num_queries)[:, :, None]
    kv_positions = _positions(kv_positions, batch, num_keys)[:, None, :]
    rules = AttentionRules(sm_scale, sliding_window, soft_cap, attention_chunk_size, causal)
    mask = rules.is_visible(q_positions, kv_positions)
    if segment_ids is not None:
        mask &= segment_ids[:, :, None] == segment_ids[:, None, :]
    mask = mask[:, None, None]

    dtype = dispatch.product_dtype(q, k)
    precision = lax.Precision.HIGHEST if dtype == jnp.float32 else None
    grouped_q = q.astype(dtype).reshape(batch, num_queries, num_kv_heads, num_q_heads // num_kv_heads, head_dim)
    scores = jnp.einsum(
        "blkgd,bmkd->bkglm", grouped_q, k.astype(dtype), precision=precision, preferred_element_type=jnp.float32
    )
    per_head = (1, num_kv_heads, num_q_heads // num_kv_heads, 1, 1)
    slopes = None if alibi_slopes is None else alibi_slopes.reshape(per_head)
    scores = rules.scores(scores, mask, slopes, (q_positions - kv_positions)[:, None, None])
    # The mask is finite and applied again: rows that see nothing give zeros, and their gradient is zero, not NaN.
    if sinks is None:
        weights = jax.nn.softmax(scores, axis=-1)
    else:
        sink = jnp.broadcast_to(sinks.astype(jnp.float32).reshape(per_head), (*scores.shape[:-1], 1))
        weights = jax.nn.softmax(jnp.concatenate([scores, sink], axis=-1), axis=-1)[..., :-1]
    weights = jnp.where(mask, weights, 0.0)
    out = jnp.einsum(
        "bkglm,bmkd->blkgd", weights.astype(dtype), v.astype(dtype), precision=precision,
        preferred_element_type=jnp.float32,
    )  # fmt: skip
    return out.reshape(q.shape).astype(q.dtype)


def _choose_implementation(implementation, unsupported) -> str:
    if implementation is None:
        return "splash_tpu" if jax.default_backend() == "tpu" and unsupported is None else "xla"
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation={implementation!r}: expected None or one of {', '.join(IMPLEMENTATIONS)}.")
    if implementation != "xla" and unsupported is not None:
        raise NotImplementedError(f"{implementation=} cannot do this: {unsupported}; use 'xla'.")
    if implementation == "splash_tpu" and jax.default_backend() != "tpu":
        raise ValueError(
            f"implementation='splash_tpu' needs a TPU, but the backend is {jax.default_backend()!r}; use 'xla', or"
            " 'splash_tpu_interpret' to run the kernel's code without one."
        )
    return implementation


def _positions(positions, batch, num_tokens):
    if positions is not None:
        return positions
    return jnp.broadcast_to(jnp.arange(num_tokens, dtype=jnp.int32)[None], (batch, num_tokens))


def _check(q, k, v, segment_ids, q_positions, kv_positions):
    if q.ndim != 4 or k.ndim != 4 or k.shape != v.shape or (q.shape[0], q.shape[3]) != (k.shape[0], k.shape[3]):
        raise ValueError(
            f"q {q.shape}, k {k.shape}, v {v.shape}: expected q [B, L, H, D] and k, v [B, M, KV, D] with equal B and D."
        )
    if k.shape[2] < 1 or q.shape[2] % k.shape[2]:
        raise ValueError(f"q has {q.shape[2]} heads and k {k.shape[2]}: expected a multiple.")
    expected = {"segment_ids": (segment_ids, q), "q_positions": (q_positions, q), "kv_positions": (kv_positions, k)}
    for name, (array, tokens) in expected.items():
        if array is not None and array.shape != tokens.shape[:2]:
            raise ValueError(f"{name} has shape {array.shape}: expected {tokens.shape[:2]}, one for each token.")
    if segment_ids is not None and q.shape[1] != k.shape[1]:
        raise ValueError(f"segment_ids need as many keys as queries, got {k.shape[1]} and {q.shape[1]}.")
