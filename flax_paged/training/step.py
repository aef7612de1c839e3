"""One step of training or evaluation, compiled."""

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from flax_paged.cache import KVCache
from flax_paged.step import CompiledStep
from flax_paged.training.losses import LossSums, next_token_loss

LossFunction = Callable[[nnx.Module, Any], LossSums]


class TrainStep:
    """Takes one optimizer step over a batch: `metrics = step(batch)`.

        optimizer = nnx.Optimizer(model, optax.adamw(1e-5), wrt=nnx.Param)   # or wrt=nnx.LoRAParam
        step = TrainStep(model, optimizer)
        for batch in batches:
            metrics = step(batch)            # model and optimizer now hold the new arrays
        engine.update_weights(model)         # an engine over the same model serves them, without compiling again

    The model and the optimizer that were given are updated in place. The optimizer's old arrays are donated; the
    model's are not, since an engine or another handle may still use them.

    Gradients and the optimizer's state have the dtype of the parameters, which must be float32: Adam's averages and
    small updates vanish in 16 bits. To multiply in bfloat16, set `compute_dtype`.

    Args:
        model: The module to train.
        optimizer: Its `wrt` says which Variables are trained; all others stay.
        loss: `loss(model, batch) -> LossSums`, traced by `jax.jit`.
        num_micro_batches: Gradients of that many parts of the batch are added up before the update, in the memory of
            one. As losses and weights are sums, the result is that of the whole batch.
        compute_dtype: Dtype that the parameters are cast to for the forward and backward pass; None for their own.

    Raises:
        ValueError: A trained parameter is not float32, nothing is trained, or `num_micro_batches` is less than 1.
    """

    def __init__(
        self,
        model: nnx.Module,
        optimizer: nnx.Optimizer,
        loss: LossFunction = next_token_loss,
        *,
        num_micro_batches: int = 1,
        compute_dtype: Any = None,
    ):
        if num_micro_batches < 1:
            raise ValueError(f"TrainStep({num_micro_batches=}): expected at least 1.")
        self._model, self._optimizer, self._loss = model, optimizer, loss
        self._num_micro_batches = num_micro_batches
        self._compute_dtype = compute_dtype
        # Trained; changed by running, such as random state; neither.
        self._filters = (optimizer.wrt, nnx.Not(nnx.Any(nnx.Param, KVCache)), ...)
        self._graphdef, trained, _, _ = nnx.split(model, *self._filters)
        self._optimizer_graphdef = nnx.graphdef(optimizer)
        _check_trained(trained, optimizer.wrt)
        self._jitted = jax.jit(self._step, donate_argnums=(1, 3))
        self._num_traces = 0

    def __call__(self, batch: Any) -> dict[str, jax.Array]:
        """Take one step.

        Args:
            batch: A pytree of arrays [B, ...], B a multiple of `num_micro_batches`. New shapes compile anew.

        Returns:
            f32[] by name, on the device: `loss`, `weight` (of the batch), `grad_norm` (before clipping), and the
            metrics of the loss function. Reading one waits for the step.

        Raises:
            ValueError: B is no multiple of `num_micro_batches`.
        """
        num_rows = jax.tree.leaves(batch)[0].shape[0]
        if num_rows % self._num_micro_batches:
            raise ValueError(
                f"The batch has {num_rows} rows; expected a multiple of num_micro_batches={self._num_micro_batches}."
            )
        trained, carried, frozen = nnx.state(self._model, *self._filters)
        trained, carried, optimizer, metrics = self._jitted(trained, carried, frozen, nnx.state(self._optimizer), batch)
        nnx.update(self._model, trained, carried)
        nnx.update(self._optimizer, optimizer)
        return metrics

    @property
    def num_traces(self) -> int:
        """How often the step has been traced, once a set of batch shapes."""
        return self._num_traces

    def _step(self, trained, carried, frozen, optimizer_state, batch):
        self._num_traces += 1
        gradients = functools.partial(self._gradients, trained, frozen)
        if self._num_micro_batches == 1:
            (carried, sums), grads = gradients(carried, batch)
        else:
            (carried, sums), grads = self._accumulate(gradients, carried, batch)
        scale = jnp.where(sums.weight > 0, 1 / jnp.where(sums.weight > 0, sums.weight, 1.0), 0.0)
        grads = jax.tree.map(lambda grad: grad * scale.astype(grad.dtype), grads)
        model = nnx.merge(self._graphdef, trained, carried, frozen)
        optimizer = nnx.merge(self._optimizer_graphdef, optimizer_state)
        # Optax mixes dtypes and ranks, whatever the caller has made of JAX's rules for that.
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            optimizer.update(model, grads)
        metrics = {
            "loss": sums.sum * scale,
            "weight": sums.weight,
            "grad_norm": optax.tree.norm(jax.tree.leaves(grads)),
            **jax.tree.map(lambda total: total * scale, sums.metrics),
        }
        return nnx.state(model, self._filters[0]), carried, nnx.state(optimizer), metrics

    def _gradients(self, trained, frozen, carried, batch):
        """Return ((carried, sums), gradient of the sum) of one micro-batch."""

        def loss_sum(trained):
            # Mapped over, so that the Variables are of this trace: Flax lets no other change them.
            state = jax.tree.map(lambda x: x, (trained, carried, frozen))
            model = nnx.merge(self._graphdef, *cast(state, self._compute_dtype))
            sums = self._loss(model, batch)
            return sums.sum, (nnx.state(model, *self._filters)[1], sums)

        grads, aux = jax.grad(loss_sum, has_aux=True)(trained)
        return aux, grads

    def _accumulate(self, gradients, carried, batch):
        """Run the micro-batches one after another and add up what comes."""
        num_parts = self._num_micro_batches
        parts = jax.tree.map(lambda x: x.reshape(num_parts, x.shape[0] // num_parts, *x.shape[1:]), batch)
        part = jax.tree.map(lambda x: x[0], parts)
        (_, sums), grads = jax.eval_shape(gradients, carried, part)
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), (sums, grads))

        def body(carry, part):
            carried, total = carry
            (carried, sums), grads = gradients(carried, part)
            return (carried, jax.tree.map(jnp.add, total, (sums, grads))), None

        (carried, (sums, grads)), _ = jax.lax.scan(body, (carried, zeros), parts)
        return (carried, sums), grads


class Evaluator:
    """Measures the loss of a model over batches, without changing it: `evaluator(batches)["perplexity"]`.

    Each call takes the weights that the model has then. Layers that act at random while training are as the model's
    `eval()` or `train()` left them.

    Args:
        model: The module, without caches.
        loss: As in `TrainStep`.
        compute_dtype: As in `TrainStep`.
    """

    def __init__(self, model: nnx.Module, loss: LossFunction = next_token_loss, *, compute_dtype: Any = None):
        def sums_of(model, batch):
            graphdef, state = nnx.split(model)
            return loss(nnx.merge(graphdef, cast(state, compute_dtype)), batch)

        self._model = model
        self._step = CompiledStep(model, sums_of, name="evaluate")

    def __call__(self, batches: Iterable[Any]) -> dict[str, float]:
        """Return `loss`, `perplexity`, `weight` and the loss function's metrics, each over all batches together.

        Raises:
            ValueError: No token of any batch counts.
        """
        self._step.update_weights(self._model)
        total: LossSums | None = None
        for batch in batches:
            # Sums of many batches in float64, on the host.
            sums = jax.tree.map(np.float64, jax.device_get(self._step(batch)))
            total = sums if total is None else jax.tree.map(np.add, total, sums)
        if total is None or not total.weight:
            raise ValueError("There is nothing to evaluate: no token of the batches has a weight.")
        metrics = {name: float(value / total.weight) for name, value in total.metrics.items()}
        loss = float(total.sum / total.weight)
        perplexity = math.exp(min(metrics.get("nll", loss), 700.0))  # exp(710) is more than a float holds
        return {"loss": loss, "perplexity": perplexity, "weight": float(total.weight), **metrics}


def cast(tree: Any, dtype: Any) -> Any:
    """Return a pytree whose floating-point arrays have a dtype; None leaves them."""
    if dtype is None:
        return tree
    return jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree)


def _check_trained(trained: nnx.State, wrt: Any) -> None:
    flat = nnx.to_flat_state(trained)
    if not flat:
        raise ValueError(f"The model has no Variables of the optimizer's wrt={wrt}; add_lora makes LoRAParams.")
    for path, variable in flat:
        if variable.dtype != jnp.float32:
            raise ValueError(
                f"{'.'.join(map(str, path))} is {variable.dtype}: expected float32 for what is trained, since small"
                " updates vanish in 16 bits. Load the model with dtype='float32' and set compute_dtype='bfloat16'."
            )
