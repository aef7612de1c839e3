"""AdamW with warm-up, decay and clipping: what nearly every fine-tuning run uses."""

import math
from collections.abc import Callable

import jax
import optax

SCHEDULES = ("constant", "linear", "cosine")


def learning_rate_schedule(
    peak: float, num_steps: int, *, kind: str = "cosine", num_warmup_steps: int = 0, final_fraction: float = 0.0
) -> Callable[[int], jax.Array]:
    """Return step -> learning rate: from 0 up to `peak` in a line, then constant or down to the last step.

    Args:
        peak: Largest learning rate.
        num_steps: Steps of the whole run.
        kind: "constant", "linear" or "cosine".
        num_warmup_steps: Steps of the rise.
        final_fraction: Where "linear" and "cosine" end, as a fraction of `peak`.

    Raises:
        ValueError: An argument out of range.
    """
    if kind not in SCHEDULES:
        raise ValueError(f"{kind=}: expected one of {SCHEDULES}.")
    if not (math.isfinite(peak) and peak > 0):
        raise ValueError(f"{peak=}: expected a positive learning rate.")
    if not 0 <= num_warmup_steps < num_steps:
        raise ValueError(f"{num_warmup_steps=}: expected 0 or more and less than {num_steps=}.")
    num_decay_steps = num_steps - num_warmup_steps
    after = {
        "constant": lambda: optax.constant_schedule(peak),
        "linear": lambda: optax.linear_schedule(peak, peak * final_fraction, num_decay_steps),
        "cosine": lambda: optax.cosine_decay_schedule(peak, num_decay_steps, final_fraction),
    }[kind]()
    if not num_warmup_steps:
        return after
    # The first step of all would learn nothing at a rate of exactly 0.
    rise = optax.linear_schedule(peak / num_warmup_steps, peak, max(num_warmup_steps - 1, 1))
    return optax.join_schedules([rise, after], [num_warmup_steps])


def adamw(
    learning_rate: optax.ScalarOrSchedule,
    *,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    max_grad_norm: float | None = 1.0,
) -> optax.GradientTransformation:
    """Return AdamW behind clipping by the norm of all gradients together.

    Weight decay goes to matrices only, not to norms and biases.

    Args:
        learning_rate: A number, or step -> number.
        b1: Decay of the average of gradients.
        b2: Decay of the average of their squares.
        eps: Added to the root.
        weight_decay: Fraction of a weight, times the learning rate, taken off at each step.
        max_grad_norm: Gradients of a larger norm are scaled down to it; None for no clipping.
    """

    def is_matrix(params):
        return jax.tree.map(lambda x: x.ndim >= 2, params)

    adam = optax.adamw(learning_rate, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay, mask=is_matrix)
    if max_grad_norm is None:
        return adam
    if not max_grad_norm > 0:
        raise ValueError(f"{max_grad_norm=}: expected a positive norm, or None.")
    return optax.chain(optax.clip_by_global_norm(max_grad_norm), adam)
