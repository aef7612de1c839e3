"""One optimizer step: accumulation, clipping, dtypes, what is trained, and engines that share the weights."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

sys.path.insert(0, str(Path(__file__).parents[1] / "models" / "llama"))
from llama_tools import flat_arrays, random_llama, tiny_config, tokens_of

from flax_paged import Engine, SamplingParams
from flax_paged.checkpoint.orbax import load_weights, save_weights
from flax_paged.training import (
    Evaluator,
    Example,
    LossSums,
    TokenBatch,
    TrainStep,
    adamw,
    cross_entropy,
    evaluation_batches,
    learning_rate_schedule,
    next_token_loss,
    pad_examples,
    token_logprobs,
)
from flax_paged.training.checkpoints import open_checkpoints


class TinyModel(nnx.Module):
    """Logits from the token alone: compiles in no time."""

    def __init__(self, *, dtype=jnp.float32, dropout=0.0, seed=0):
        rngs = nnx.Rngs(seed, dropout=seed)
        self.embedding = nnx.Param(jax.random.normal(rngs.params(), (13, 8)).astype(dtype))
        self.head = nnx.Param(jax.random.normal(rngs.params(), (8, 13)).astype(dtype))
        self.dropout = nnx.Dropout(dropout, rngs=rngs) if dropout else None

    def __call__(self, tokens, *, segment_ids=None, positions=None):
        hidden = self.embedding[...][tokens]
        return (hidden if self.dropout is None else self.dropout(hidden)) @ self.head[...]


def rows_of(*lengths, max_length=None, seed=0):
    examples = [
        Example(tokens_of(n, seed=seed + i, vocab_size=13), np.ones(n, np.float32)) for i, n in enumerate(lengths)
    ]
    return pad_examples(examples, max_length or max(lengths))


def new_step(model, transform=None, wrt=nnx.Param, **options):
    optimizer = nnx.Optimizer(model, transform or optax.sgd(1.0), wrt=wrt)
    return TrainStep(model, optimizer, **options), optimizer


def assert_same_params(model, other, atol=1e-6):
    for name, array in flat_arrays(other).items():
        np.testing.assert_allclose(flat_arrays(model)[name], array, atol=atol, rtol=0, err_msg=name)


def test_loss_is_that_of_numpy():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(2, 5, 7)).astype(np.float32)
    targets = rng.integers(0, 7, (2, 5)).astype(np.int32)
    weights = rng.random((2, 5)).astype(np.float32)
    wide = logits.astype(np.float64)
    lse = np.log(np.exp(wide).sum(-1))
    logp = wide - lse[..., None]
    nll = -np.take_along_axis(logp, targets[..., None], -1)[..., 0]
    smooth = 0.9 * nll + 0.1 * -logp.mean(-1) + 0.01 * lse**2
    got = cross_entropy(logits, targets, weights, label_smoothing=0.1, z_loss=0.01)
    assert float(got.sum) == pytest.approx((weights * smooth).sum(), rel=1e-5)
    assert float(got.metrics["nll"]) == pytest.approx((weights * nll).sum(), rel=1e-5)
    assert float(got.metrics["accuracy"]) == pytest.approx((weights * (logits.argmax(-1) == targets)).sum(), rel=1e-5)
    assert float(got.weight) == pytest.approx(weights.sum(), rel=1e-5)
    np.testing.assert_allclose(token_logprobs(logits, targets), -nll, atol=1e-5)


@pytest.mark.parametrize("options", [{"label_smoothing": 1.0}, {"label_smoothing": -0.1}, {"z_loss": -1.0}], ids=str)
def test_loss_options_are_checked(options):
    with pytest.raises(ValueError, match="expected 0 or more"):
        cross_entropy(jnp.zeros((1, 3)), jnp.zeros(1, jnp.int32), jnp.ones(1), **options)


def test_four_micro_batches_of_two_are_a_batch_of_eight():
    model, other = random_llama(tiny_config()), random_llama(tiny_config())
    batch = rows_of(11, 3, 9, 5, 8, 12, 2, 7)
    # The micro-batches have 12, 12, 18 and 7 tokens that count: the mean of their means is wrong.
    whole, _ = new_step(model, adamw(1e-2))
    parts, _ = new_step(other, adamw(1e-2), num_micro_batches=4)
    for _ in range(2):
        expected, got = whole(batch), parts(batch)
        assert got.keys() == expected.keys()
        for name, value in expected.items():
            assert float(got[name]) == pytest.approx(float(value), rel=1e-5), name
    assert_same_params(other, model, atol=2e-5)


def test_long_and_short_examples_weigh_by_token():
    """Of 11 and 101 tokens, as in transformers issue 24725."""
    model, other = TinyModel(), TinyModel()
    batch = rows_of(11, 101)
    a, _ = new_step(model)
    b, _ = new_step(other, num_micro_batches=2)
    assert float(a(batch)["loss"]) == pytest.approx(float(b(batch)["loss"]), rel=1e-6)
    assert_same_params(other, model)
    # More padding, and a micro-batch of nothing else.
    third = TinyModel()
    c, _ = new_step(third, num_micro_batches=3)
    padded = jax.tree.map(lambda x: np.pad(x, ((0, 1), (0, 9))), batch)
    assert float(c(padded)["weight"]) == 110
    assert_same_params(third, model)


def test_nothing_to_learn_gives_zero():
    model = TinyModel()
    step, _ = new_step(model)
    metrics = step(jax.tree.map(np.zeros_like, rows_of(5, 6)))
    assert set(metrics) == {"loss", "weight", "grad_norm", "nll", "accuracy"}
    assert all(float(value) == 0 for value in metrics.values())
    assert_same_params(model, TinyModel(), atol=0)


def test_padding_may_hold_nan():
    def loss(model, batch):
        logits = model(batch.tokens)
        return cross_entropy(jnp.where((batch.weights > 0)[..., None], logits, jnp.nan), batch.targets, batch.weights)

    step, _ = new_step(TinyModel(), loss=loss)
    assert np.isfinite(float(step(rows_of(5, 6))["loss"]))


def test_gradients_are_clipped_by_their_norm_together():
    model, batch = TinyModel(), rows_of(9, 6)
    before = flat_arrays(model)
    step, _ = new_step(model, optax.chain(optax.clip_by_global_norm(0.01), optax.sgd(1.0)))
    norm = float(step(batch)["grad_norm"])
    moved = np.sqrt(sum(((array - before[name]) ** 2).sum() for name, array in flat_arrays(model).items()))
    assert norm > 0.1 and moved == pytest.approx(0.01, rel=1e-3)


def test_16_bit_parameters_are_refused_and_16_bit_products_learn():
    """bfloat16(0.999) is 1: Adam's averages would never change."""
    with pytest.raises(ValueError, match="embedding is bfloat16: expected float32 for what is trained"):
        new_step(TinyModel(dtype=jnp.bfloat16))
    batch, losses = rows_of(30, 30), {}
    for compute_dtype in (None, "bfloat16"):
        step, optimizer = new_step(TinyModel(), adamw(1e-2), compute_dtype=compute_dtype)
        losses[compute_dtype] = [float(step(batch)["loss"]) for _ in range(50)]
        assert {leaf.dtype.name for leaf in jax.tree.leaves(nnx.state(optimizer.opt_state)) if leaf.ndim} == {"float32"}
    assert losses[None][-1] < 0.7 * losses[None][0]
    assert losses["bfloat16"][-1] == pytest.approx(losses[None][-1], rel=0.05)


def test_small_learning_rates_are_not_lost_in_bfloat16():
    model = TinyModel()
    before = flat_arrays(model)["head"]
    step, _ = new_step(model, adamw(1e-5), compute_dtype=jnp.bfloat16)
    for _ in range(3):
        step(rows_of(30, 30))
    assert np.abs(flat_arrays(model)["head"] - before).max() == pytest.approx(3e-5, rel=0.1)


def test_random_state_goes_on_and_weights_that_are_not_trained_stay():
    model = TinyModel(dropout=0.5)
    before = flat_arrays(model)
    step, optimizer = new_step(model, wrt=lambda path, value: path[-1] == "head" and isinstance(value, nnx.Param))
    first = float(step(rows_of(9, 9))["loss"])
    assert int(model.dropout.rngs.count[...]) == 1 and int(optimizer.step[...]) == 1
    np.testing.assert_array_equal(flat_arrays(model)["embedding"], before["embedding"])
    assert float(step(rows_of(9, 9))["loss"]) != first and step.num_traces == 1


def test_random_state_is_saved_and_not_needed_to_serve(tmp_path):
    """As in orbax issue 2540: keys go into a checkpoint and come back, into abstract states too."""
    batch, model = rows_of(9, 9), TinyModel(dropout=0.5)
    step, optimizer = new_step(model, adamw(0.1))
    step(batch)
    with open_checkpoints(tmp_path / "run") as checkpoints:
        checkpoints.save(1, model, optimizer)
    save_weights(tmp_path / "served", model)
    served = load_weights(tmp_path / "served", nnx.eval_shape(TinyModel))
    assert_same_params(served, model, atol=0)
    assert not jax.tree.leaves(nnx.state(served, nnx.RngState))
    expected = [float(step(batch)["loss"]) for _ in range(3)]
    other = TinyModel(dropout=0.5, seed=7)
    other_step, other_optimizer = new_step(other, adamw(0.1))
    with open_checkpoints(tmp_path / "run") as checkpoints:
        checkpoints.restore(1, other, other_optimizer)
    assert [float(other_step(batch)["loss"]) for _ in range(3)] == expected and len(set(expected)) == 3


def test_batch_that_does_not_split():
    step, _ = new_step(TinyModel(), num_micro_batches=3)
    with pytest.raises(ValueError, match="The batch has 2 rows; expected a multiple of num_micro_batches=3"):
        step(rows_of(4, 4))


def test_engine_serves_between_steps():
    """Engine and training share arrays; the engine keeps the weights it has until it is given new ones."""
    model = random_llama(tiny_config())
    options = {"num_pages": 32, "page_size": 4, "max_num_seqs": 2, "max_num_batched_tokens": 16, "max_model_len": 32}
    engine = Engine(model, **options)
    prompt, params = tokens_of(9).tolist(), SamplingParams(temperature=0, max_tokens=6, logprobs=0)
    step, _ = new_step(model, adamw(0.05))

    def answer(engine):
        output = engine.generate([prompt], params)[0]
        return output.outputs[0].token_ids, output.num_cached_tokens, output.outputs[0].logprobs

    old = answer(engine)
    num_traces = engine.num_traces
    for _ in range(3):
        step(rows_of(12, 12))
    assert answer(engine)[0] == old[0]  # still the old weights
    engine.update_weights(model)
    new = answer(engine)
    assert new[0] == answer(Engine(model, **options))[0] and new[0] != old[0]
    assert new[1] == 0 and engine.num_traces == num_traces
    # What the engine reports of its tokens is what training computes of them.
    tokens = np.array([prompt + new[0]], np.int32)
    dense = np.asarray(token_logprobs(model(tokens[:, :-1]), tokens[:, 1:]))[0, len(prompt) - 1 :]
    served = [logprobs[token].logprob for logprobs, token in zip(new[2], new[0], strict=True)]
    np.testing.assert_allclose(served, dense, atol=1e-4, rtol=0)


def test_evaluation():
    model, rows = TinyModel(), rows_of(11, 5, 8)
    evaluator = Evaluator(model)
    found = evaluator(evaluation_batches(rows, 2))
    whole = next_token_loss(model, jax.tree.map(jnp.asarray, rows))
    assert found["weight"] == 21
    assert found["loss"] == pytest.approx(float(whole.sum / whole.weight), rel=1e-6)
    assert found["perplexity"] == pytest.approx(np.exp(found["loss"]), rel=1e-6)
    new_step(model)[0](rows)
    assert evaluator(evaluation_batches(rows, 2))["loss"] < found["loss"]  # the weights it has now
    with pytest.raises(ValueError, match="nothing to evaluate"):
        evaluator([])


def test_loss_of_ones_own():
    def loss(model, batch):
        return LossSums(jnp.sum(model.head[...] ** 2), jnp.float32(2), {"size": jnp.float32(4)})

    model = TinyModel()
    step, _ = new_step(model, optax.sgd(0.5), loss=loss)
    metrics = step({"unused": np.zeros((2, 1), np.float32)})
    assert float(metrics["size"]) == 2
    np.testing.assert_allclose(flat_arrays(model)["head"], 0.5 * flat_arrays(TinyModel())["head"], rtol=1e-6)


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
@jax.numpy_dtype_promotion("standard")
def test_schedules(kind):
    rate = learning_rate_schedule(1.0, 20, kind=kind, num_warmup_steps=5, final_fraction=0.1)
    values = [float(rate(i)) for i in range(20)]
    np.testing.assert_allclose(values[:5], [0.2, 0.4, 0.6, 0.8, 1.0], atol=1e-6)
    assert values[5] == pytest.approx(1.0) and values[5:] == sorted(values[5:], reverse=True)
    assert float(rate(20)) == pytest.approx(1.0 if kind == "constant" else 0.1)


@pytest.mark.parametrize(
    "arguments",
    [{"peak": 0.0}, {"num_steps": 0}, {"kind": "steps"}, {"num_warmup_steps": 20}, {"peak": float("nan")}],
    ids=str,
)
def test_schedule_arguments_are_checked(arguments):
    with pytest.raises(ValueError, match="expected"):
        learning_rate_schedule(**{"peak": 1.0, "num_steps": 20, **arguments})


@jax.numpy_dtype_promotion("standard")
def test_weight_decay_spares_vectors():
    params = {"matrix": jnp.ones((2, 2)), "norm": jnp.ones(2)}
    transform = adamw(0.1, weight_decay=0.5)
    updates, _ = transform.update(jax.tree.map(jnp.zeros_like, params), transform.init(params), params)
    np.testing.assert_allclose(updates["matrix"], -0.05)
    np.testing.assert_allclose(updates["norm"], 0)


def test_batch_fields_go_through_jit():
    assert isinstance(jax.jit(lambda batch: batch)(rows_of(3, 3)), TokenBatch)
