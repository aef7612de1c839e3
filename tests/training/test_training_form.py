"""The dense form of a model under `jax.grad`: against PyTorch, packed against unpacked, and rematerialised."""

import dataclasses
import functools
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

sys.path.insert(0, str(Path(__file__).parents[1] / "models" / "llama"))
from llama_tools import MemorySource, PagedRun, abstract_llama, random_llama, tiny_config, tokens_of

from flax_paged.checkpoint.assign import assign
from flax_paged.models import find_family
from flax_paged.training import TokenBatch, next_token_loss, pack_examples, pad_examples


def examples(lengths=(11, 7, 5, 9), vocab_size=97):
    """Tokens and which of them count."""
    rng = np.random.default_rng(1)
    return [
        (tokens_of(length, seed=length, vocab_size=vocab_size), (rng.random(length) < 0.7).astype(np.float32))
        for length in lengths
    ]


@functools.partial(jax.jit, static_argnums=(0, 3))
def _grads(graphdef, state, batch, remat):
    def mean_loss(state):
        loss = next_token_loss(nnx.merge(graphdef, state), batch, remat=remat)
        return loss.sum / loss.weight

    return jax.value_and_grad(mean_loss)(state)


def loss_and_grads(model, batch, remat=None):
    loss, grads = _grads(*nnx.split(model), batch, remat)
    flat = {".".join(map(str, path)): np.asarray(leaf.get_value()) for path, leaf in nnx.to_flat_state(grads)}
    return float(loss), flat


def assert_close(got, expected, atol):
    assert abs(got[0] - expected[0]) <= atol
    assert got[1].keys() == expected[1].keys()
    for name, grad in expected[1].items():
        scale = np.abs(grad).max()
        assert scale > 0, name
        np.testing.assert_allclose(got[1][name], grad, atol=atol * max(scale, 1), rtol=0, err_msg=name)


CONFIGS = {
    "Llama": {"vocab_size": 97},
    "Qwen3": {"tie_word_embeddings": True, "head_dim": 16},
    "Mistral": {"sliding_window": 4},
}


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", CONFIGS)
def test_gradients_are_those_of_torch(name):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4}
    fields = {"vocab_size": 97, **sizes, "num_key_value_heads": 2, "initializer_range": 0.2, **CONFIGS[name]}
    config = getattr(transformers, f"{name}Config")(**fields, attn_implementation="eager")
    theirs = getattr(transformers, f"{name}ForCausalLM")(config).float()
    values = {**theirs.config.to_dict(), "architectures": [type(theirs).__name__]}
    family = find_family(values)
    rules = family.hf_rules(family.config_from_hf(values))
    tensors = {name: tensor.detach().numpy() for name, tensor in theirs.state_dict().items()}
    model = assign(abstract_llama(family.config_from_hf(values)), MemorySource(tensors), rules, progress=False)

    batch = pad_examples(examples(), max_length=11)
    targets = np.where(batch.weights > 0, batch.targets, -100)
    logits = theirs(torch.tensor(batch.tokens).long(), attention_mask=torch.tensor(batch.segment_ids > 0)).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.tensor(targets).long().flatten())
    loss.backward()
    grads = {path: theirs.get_parameter(rule.name).grad.numpy() for path, rule in rules.items()}
    assert_close(loss_and_grads(model, batch), (loss.item(), grads), atol=2e-5)


def test_gradient_is_the_slope():
    """Central differences along random directions, in float64 arithmetic of the difference only."""
    model = random_llama(tiny_config())
    batch = pad_examples(examples(), max_length=12)
    _, grads = loss_and_grads(model, batch)
    graphdef, state = nnx.split(model)
    flat = nnx.to_flat_state(state)
    rng = np.random.default_rng(0)
    direction = {".".join(map(str, path)): rng.normal(size=leaf.shape).astype(np.float32) for path, leaf in flat}

    def moved(step):
        leaves = [(path, leaf.replace(leaf[...] + step * direction[".".join(map(str, path))])) for path, leaf in flat]
        return loss_and_grads(nnx.merge(graphdef, nnx.from_flat_state(leaves)), batch)[0]

    slope = (moved(1e-3) - moved(-1e-3)) / 2e-3
    assert slope == pytest.approx(sum((grads[name] * direction[name]).sum() for name in grads), rel=2e-2)


def test_packed_equals_unpacked():
    model = random_llama(tiny_config(sliding_window=6))
    unpacked = pad_examples(examples(), max_length=11)
    packed = pack_examples(examples(), max_length=18)
    assert packed.tokens.shape[0] == 2 and (packed.segment_ids.max(axis=1) == 2).all()
    assert_close(loss_and_grads(model, packed), loss_and_grads(model, unpacked), atol=1e-5)


def test_padding_contributes_nothing():
    model = random_llama(tiny_config())
    short = pad_examples(examples(), max_length=11)
    expected = loss_and_grads(model, short)
    columns = pad_examples(examples(), max_length=16)
    assert_close(loss_and_grads(model, columns), expected, atol=1e-5)
    # Other tokens in the padding, and a row of padding alone.
    noisy = dataclasses.replace(columns, tokens=np.where(columns.segment_ids == 0, 55, columns.tokens))
    noisy = jax.tree.map(lambda x: np.pad(x, ((0, 1), (0, 0))), noisy)
    assert_close(loss_and_grads(model, noisy), expected, atol=1e-5)


@pytest.mark.parametrize("remat", ["dots", "full"])
def test_rematerialisation_changes_memory_only(remat):
    model = random_llama(tiny_config())
    batch = pack_examples(examples(), max_length=18)
    assert_close(loss_and_grads(model, batch, remat), loss_and_grads(model, batch), atol=1e-5)

    def num_residuals(remat):
        graphdef, state = nnx.split(model)
        _, pullback = jax.vjp(lambda s: next_token_loss(nnx.merge(graphdef, s), batch, remat=remat).sum, state)
        return sum(leaf.size for leaf in jax.tree.leaves(pullback))

    assert num_residuals("full") < num_residuals("dots") < num_residuals(None)


def test_remat_is_checked():
    model = random_llama(tiny_config())
    with pytest.raises(ValueError, match="remat='some': expected None or one of"):
        model(jnp.zeros((1, 4), jnp.int32), remat="some")


def test_paged_log_probabilities_are_the_dense_ones():
    """Of a packed row, against each sequence served alone in pieces."""
    model = random_llama(tiny_config())
    packed = pack_examples(examples((11, 7)), max_length=18)
    logits = model(packed.tokens, segment_ids=packed.segment_ids, positions=packed.positions)
    dense = np.asarray(jax.nn.log_softmax(logits, axis=-1))[0]  # the last token of each is only a target
    run = PagedRun(model, [11, 7])
    first, second = (tokens[:-1] for tokens, _ in examples((11, 7)))
    steps = [run({0: first[:6]}), run({0: first[6:], 1: second})]
    paged = np.concatenate([steps[0][0], steps[1][0], steps[1][1]])
    np.testing.assert_allclose(jax.nn.log_softmax(paged, axis=-1), dense[: len(paged)], atol=1e-4, rtol=0)


def test_token_batch_is_a_pytree():
    batch = pad_examples(examples(), max_length=12)
    assert isinstance(jax.tree.map(jnp.asarray, batch), TokenBatch)
