"""Small models for the engine's tests: one that attends, and one whose logits follow a script."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
from flax import nnx

from flax_paged.attention import PagedAttention
from flax_paged.generation.text import _BYTE_OF_CHARACTER, Tokenizer
from flax_paged.metadata import SequenceSlice, build_metadata

VOCAB_SIZE = 61


class ToyModel(nnx.Module):
    """A decoder of two layers with sharp, position-dependent attention; enough that every kind of mix-up shows."""

    def __init__(self, seed: int = 0, *, vocab_size: int = VOCAB_SIZE, dtype=jnp.float32):
        rngs = nnx.Rngs(seed)

        def param(*shape, scale=1.0):
            return nnx.Param((jax.random.normal(rngs.params(), shape) * scale).astype(dtype))

        self.embedding = param(vocab_size, 16, scale=2.0)
        self.qkv = nnx.List([param(16, 4 * 8 + 4 * 8, scale=1.0) for _ in range(2)])
        self.out = nnx.List([param(4 * 8, 16, scale=1.5) for _ in range(2)])
        self.head = param(16, vocab_size, scale=1.0)
        self.attention = nnx.List([PagedAttention(4, 2, 8) for _ in range(2)])

    def __call__(self, tokens, metadata):
        frequencies = jnp.exp2(-jnp.arange(8, dtype=jnp.float32))
        phase = metadata.positions.astype(jnp.float32)[:, None] * frequencies[None]
        x = self.embedding[...][tokens] + jnp.concatenate([jnp.sin(phase), jnp.cos(phase)], 1).astype(self.head.dtype)
        for qkv, out, attention in zip(self.qkv, self.out, self.attention, strict=True):
            q, k, v = jnp.split(_normalized(x) @ qkv[...], [32, 48], axis=1)
            x = x + attention(q, k, v, metadata) @ out[...]
        # Columns of equal length, or one long one would win nearly always.
        return _normalized(x)[metadata.logits_rows()] @ _normalized(self.head[...].T).T


def _normalized(x):
    return x / jnp.sqrt(jnp.mean(jnp.square(x), axis=1, keepdims=True))


class ScriptedModel(nnx.Module):
    """Says `script[p]` after the token at position p, whatever the tokens are; else the lowest id it may."""

    def __init__(self, script, *, vocab_size: int = VOCAB_SIZE):
        table = np.tile(-0.01 * np.arange(vocab_size, dtype=np.float32), (len(script), 1))
        table[np.arange(len(script)), script] = 5
        self.table = nnx.Param(jnp.asarray(table))
        self.attention = PagedAttention(1, 1, 4)

    def __call__(self, tokens, metadata):
        q = jnp.zeros((tokens.shape[0], 1, 4), jnp.float32)
        self.attention(q, q, q, metadata)
        positions = jnp.minimum(metadata.positions[metadata.logits_rows()], self.table.shape[0] - 1)
        return self.table[...][positions]


def letter_tokenizer(adds_bos: bool = True) -> Tokenizer:
    """Token id i is chr(64 + i), so "AB" is [1, 2]; 0 begins a sequence, 60 ends one, and neither has text."""
    vocab = {"<s>": 0, **{chr(64 + i): i for i in range(1, 60)}, "</s>": 60}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    config = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": adds_bos}
    return Tokenizer({"tokenizer.json": backend.to_str(), "tokenizer_config.json": json.dumps(config)})


def byte_tokenizer() -> Tokenizer:
    """Token id i is the byte i; some longer tokens follow, which no text is encoded to but a model may say."""
    character_of = {byte: character for character, byte in _BYTE_OF_CHARACTER.items()}
    longer = ['{"', '":', '": ', '", "', '"}', "\n  ", "ab", "12", ".5", "true", "null", "é", "😀", "}\n"]
    tokens = [bytes([byte]) for byte in range(256)] + [text.encode() for text in longer]
    vocab = {"".join(character_of[byte] for byte in token): index for index, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>", "<pad>"])
    config = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}
    return Tokenizer({"tokenizer.json": backend.to_str(), "tokenizer_config.json": json.dumps(config)})


def greedy_reference(model, prompt, num_tokens):
    """Tokens of the most likely continuation, by computing everything again at each step, without cache or engine."""
    graphdef, state = nnx.split(model)
    size = len(prompt) + num_tokens

    @jax.jit
    def logits(state, tokens, metadata):
        return nnx.merge(graphdef, state)(tokens, metadata)

    token_ids = list(prompt)
    for _ in range(num_tokens):
        metadata = build_metadata(
            [SequenceSlice([0], 0, len(token_ids))],
            page_size=size,
            num_pages=1,
            max_num_tokens=size,
            max_num_seqs=1,
            max_pages_per_seq=1,
        )
        tokens = np.zeros(size, np.int32)
        tokens[: len(token_ids)] = token_ids
        token_ids.append(int(np.argmax(logits(state, tokens, metadata)[0])))
    return token_ids[len(prompt) :]
