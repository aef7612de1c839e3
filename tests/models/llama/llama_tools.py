"""What the tests of the Llama family share: small configs, a checkpoint in memory, a driver of the paged form."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from flax_paged.attention import cache_spec_for
from flax_paged.metadata import SequenceSlice, build_metadata
from flax_paged.models.llama import Llama, LlamaConfig
from flax_paged.step import CompiledStep


def tiny_config(**changes):
    """A config in which every size differs from every other, so that a mix-up shows."""
    fields = {
        "vocab_size": 97,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 64,
        "initializer_range": 0.2,
    }
    return LlamaConfig(**{**fields, **changes})


def abstract_llama(config):
    """A model of shapes only."""
    return nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0)))


def random_llama(config, *, seed=0, dtype=jnp.float32):
    """A model of random weights, whose biases and norms are random too."""
    graphdef, state = nnx.split(abstract_llama(config))
    rng = np.random.default_rng(seed)
    arrays = []
    for path, variable in nnx.to_flat_state(state):
        scale = config.initializer_range if variable.ndim == 2 else 0.3
        value = rng.normal(1.0 if "norm" in str(path) else 0.0, scale, variable.shape)
        arrays.append((path, variable.replace(jnp.asarray(value.astype(np.float32).astype(dtype)))))
    return nnx.merge(graphdef, nnx.from_flat_state(arrays))


class MemorySource:
    """A checkpoint in memory."""

    def __init__(self, tensors):
        self.tensors = dict(tensors)

    def __str__(self):
        return "memory"

    def names(self):
        return list(self.tensors)

    def shape(self, name):
        return self.tensors[name].shape

    def dtype(self, name):
        return self.tensors[name].dtype

    def read(self, name):
        return np.array(self.tensors[name])


class PagedRun:
    """Drives the paged form of a model over a few sequences whose pages are permuted and full of NaN at first.

    Args:
        model: A Llama.
        max_lens: Longest length of each sequence.
        page_size: Tokens in a page.
        max_num_tokens: T of every step's bucket.
        max_num_seqs: S of every step's bucket; None for the number of sequences.
        spare_pages: Pages that belong to nobody.
    """

    def __init__(self, model, max_lens, *, page_size=4, max_num_tokens=32, max_num_seqs=None, spare_pages=3, seed=0):
        counts = [-(-n // page_size) for n in max_lens]
        order = np.random.default_rng(seed).permutation(sum(counts) + spare_pages)
        self.pages = np.split(order, np.cumsum(counts))[:-1]
        self.context = [0] * len(max_lens)
        self.shape = {
            "page_size": page_size,
            "num_pages": len(order),
            "max_num_tokens": max_num_tokens,
            "max_num_seqs": max_num_seqs or len(max_lens),
            "max_pages_per_seq": max(counts) + 1,
        }
        spec = cache_spec_for(model, num_pages=len(order), page_size=page_size)
        model = nnx.clone(model)
        model.init_cache(spec)
        for layer in model.layers:
            layer.self_attn.attention.kv_cache[...] = jnp.full(spec.shape, jnp.nan, spec.dtype)
        self.step = CompiledStep(model)

    def __call__(self, tokens, *, logits="all"):
        """Run one step; tokens maps a sequence to its new tokens. Returns each one's logits, in the same order."""
        slices = [SequenceSlice(self.pages[i].tolist(), self.context[i], len(new)) for i, new in tokens.items()]
        metadata = build_metadata(slices, logits=logits, **self.shape)
        flat = np.zeros(self.shape["max_num_tokens"], np.int32)
        flat[: sum(map(len, tokens.values()))] = np.concatenate(list(tokens.values()))
        out = np.asarray(self.step(flat, metadata))
        for i, new in tokens.items():
            self.context[i] += len(new)
        if logits == "last":
            return dict(zip(tokens, out, strict=False))
        ends = np.cumsum([len(new) for new in tokens.values()])
        return dict(zip(tokens, np.split(out, ends)[:-1], strict=True))


@functools.partial(jax.jit, static_argnums=0)
def _compiled(graphdef, state, args, options):
    return nnx.merge(graphdef, state)(*args, **options)


def call(model, *args, **options):
    """`model(*args, **options)`, compiled; models of one config share the compilation."""
    return np.asarray(_compiled(*nnx.split(model), args, options))


def dense_logits(model, tokens):
    """Logits [L, vocab] of one sequence by the dense form."""
    return call(model, jnp.asarray(tokens, jnp.int32)[None])[0]


def flat_arrays(model):
    """Parameters by their path joined with dots, as numpy arrays."""
    state = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return {".".join(map(str, path)): np.asarray(variable[...]) for path, variable in state}


def tokens_of(length, *, seed=0, vocab_size=97):
    """Random token ids."""
    return np.random.default_rng(seed).integers(0, vocab_size, length).astype(np.int32)


def rope_of_every_type():
    """Parameters of each rope type as config.json holds them, scaled so that a context of 50 tokens shows them."""
    theta, original = 10000.0, "original_max_position_embeddings"
    return {
        "default": {"rope_type": "default", "rope_theta": 5e5},
        "linear": {"rope_type": "linear", "rope_theta": theta, "factor": 4.0},
        "dynamic": {"rope_type": "dynamic", "rope_theta": theta, "factor": 4.0},
        "llama3": {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            original: 16,
        },
        "yarn": {"rope_type": "yarn", "rope_theta": theta, "factor": 4.0, original: 8},
        "yarn-fields": {
            "rope_type": "yarn",
            "rope_theta": theta,
            "factor": 4.0,
            original: 8,
            "attention_factor": 0.7,
            "beta_fast": 4.0,
            "beta_slow": 2.0,
            "truncate": False,
        },
        "yarn-mscale": {
            "rope_type": "yarn",
            "rope_theta": theta,
            "factor": 4.0,
            original: 8,
            "mscale": 0.7,
            "mscale_all_dim": 1.5,
        },
        "longrope": {
            "rope_type": "longrope",
            "rope_theta": theta,
            "factor": 4.0,
            original: 32,
            "short_factor": [1.0] * 4 + [1.5] * 4,
            "long_factor": [2.0] * 8,
        },
    }


def leaves_hold_tracers(module):
    """Whether a tracer stayed in a module."""
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(nnx.state(module)))
