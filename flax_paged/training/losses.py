"""The next-token loss, as sums: they add up over micro-batches and devices, and are divided once."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from flax_paged.training.batches import TokenBatch


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LossSums:
    """What a loss function returns. The loss is `sum / weight`, both over the whole global batch.

    Fields:
        sum: f32[]. Sum of the weighted losses; the gradient is taken of this.
        weight: f32[]. Sum of the weights; no gradient goes through it.
        metrics: Further f32[] sums by name, reported divided by `weight`.
    """

    sum: Any  # f32[]
    weight: Any  # f32[]
    metrics: dict[str, Any]


def next_token_loss(
    model: nnx.Module,
    batch: TokenBatch,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    remat: str | None = None,
) -> LossSums:
    """Return the cross entropy of each token given those before it in its example.

        loss[t] = (1 - s) * nll[t] + s * mean_v(-log p[v]) + z * logsumexp(logits)^2

    Args:
        model: Called as `model(tokens, segment_ids=..., positions=...) -> logits [B, L, V]`.
        batch: Where `weights` is 0 nothing is learnt.
        label_smoothing: s, probability that is spread over all tokens.
        z_loss: z, which keeps the logits from drifting.
        remat: Passed to the model if given: what of each layer the backward pass computes again.

    Returns:
        LossSums with the metrics `nll` (without smoothing and z-loss) and `accuracy`.

    Raises:
        ValueError: `label_smoothing` is not in [0, 1), or `z_loss` is negative.
    """
    options = {} if remat is None else {"remat": remat}
    logits = model(batch.tokens, segment_ids=batch.segment_ids, positions=batch.positions, **options)
    return cross_entropy(logits, batch.targets, batch.weights, label_smoothing=label_smoothing, z_loss=z_loss)


def cross_entropy(
    logits: jax.Array, targets: jax.Array, weights: jax.Array, *, label_smoothing: float = 0.0, z_loss: float = 0.0
) -> LossSums:
    """Return the sums of `next_token_loss` for given logits.

    Args:
        logits: [..., V].
        targets: i32[...].
        weights: f32[...].
        label_smoothing: As in `next_token_loss`.
        z_loss: As in `next_token_loss`.
    """
    if not 0 <= label_smoothing < 1:
        raise ValueError(f"{label_smoothing=}: expected 0 or more, less than 1.")
    if z_loss < 0:
        raise ValueError(f"{z_loss=}: expected 0 or more.")
    logits = logits.astype(jnp.float32)
    log_normalizer = jax.nn.logsumexp(logits, axis=-1)  # [...]
    nll = log_normalizer - jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    loss = nll
    if label_smoothing:
        loss = (1 - label_smoothing) * nll + label_smoothing * (log_normalizer - jnp.mean(logits, axis=-1))
    if z_loss:
        loss = loss + z_loss * jnp.square(log_normalizer)
    is_right = (jnp.argmax(logits, axis=-1) == targets).astype(jnp.float32)
    metrics = {"nll": _weighted_sum(nll, weights), "accuracy": _weighted_sum(is_right, weights)}
    return LossSums(_weighted_sum(loss, weights), jnp.sum(weights), jax.lax.stop_gradient(metrics))


def token_logprobs(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Return f32[...], the log-probability of each target i32[...] under logits [..., V]."""
    logits = logits.astype(jnp.float32)
    return jnp.take_along_axis(jax.nn.log_softmax(logits, axis=-1), targets[..., None], axis=-1)[..., 0]


def _weighted_sum(values: jax.Array, weights: jax.Array) -> jax.Array:
    # Padding can hold anything, NaN included, and must not get through even multiplied by zero.
    return jnp.sum(jnp.where(weights != 0, weights * values, 0.0))
