"""`SamplingInputs`: what the device needs to know of each row to sample its token; built on the host."""

import dataclasses
import functools
from collections.abc import Sequence as Sequences
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flax_paged.generation.sequence import Sequence


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SamplingInputs:
    """Parameters of N rows, a row being one token to sample. Padding rows are greedy, with all else turned off.

    Fields:
        temperature: f32[N]; below 1e-5 is greedy.
        top_k: i32[N]; 0 keeps all.
        top_p: f32[N]; 1 keeps all.
        min_p: f32[N]; 0 keeps all.
        seeds: u32[N, 2]. High and low half of each row's 64-bit seed.
        counters: u32[N]. Place of the token in its answer; with the seed it makes the row's random number.
        repetition_penalty: f32[N]; 1 is off.
        presence_penalty: f32[N]; 0 is off.
        frequency_penalty: f32[N]; 0 is off.
        history: i32[N, L]. Tokens before the sampled one, for the penalties. The last of them is not read from here but
            from the step's tokens, as the host may not know it.
        num_history: i32[N]. Live tokens of `history`.
        num_prompt: i32[N]. How many of them are the prompt.
        entry_ids: i32[N, B]. Tokens whose logit is changed.
        entry_values: f32[N, B]. What is added to it; minus infinity bans the token.
        entry_conditions: i32[N, B]. The entry counts only after this token; after any if negative.
        entry_allows: bool[N, B]. Whether the entry's token is allowed in a restricted row.
        is_restricted: bool[N]. Whether only allowed tokens can be sampled.
        grammar_masks: i32[N, ceil(V / 32)]. Tokens that the row's grammar allows, a bit each; see `Grammar.allowed`.
        has_grammar: bool[N].
        target_ids: i32[N]. Tokens whose log-probability is wanted, instead of the sampled one's, where `has_target`.
        has_target: bool[N].
        wants_logprobs: bool[1]. Whether any row's log-probabilities are wanted.
    """

    temperature: Any  # f32[N]
    top_k: Any  # i32[N]
    top_p: Any  # f32[N]
    min_p: Any  # f32[N]
    seeds: Any  # u32[N, 2]
    counters: Any  # u32[N]
    repetition_penalty: Any  # f32[N]
    presence_penalty: Any  # f32[N]
    frequency_penalty: Any  # f32[N]
    history: Any  # i32[N, L]
    num_history: Any  # i32[N]
    num_prompt: Any  # i32[N]
    entry_ids: Any  # i32[N, B]
    entry_values: Any  # f32[N, B]
    entry_conditions: Any  # i32[N, B]
    entry_allows: Any  # bool[N, B]
    is_restricted: Any  # bool[N]
    grammar_masks: Any  # i32[N, ceil(V / 32)]
    has_grammar: Any  # bool[N]
    target_ids: Any  # i32[N]
    has_target: Any  # bool[N]
    wants_logprobs: Any  # bool[1]


@dataclasses.dataclass(frozen=True)
class SamplingRow:
    """A token to sample.

    Fields:
        row: Its row.
        sequence: Its sequence.
        num_tokens: Tokens before it, pending and draft ones included.
        draft_token_ids: The last of them, where they are only guessed.
        target_id: The token that is known to follow, if this row is inside the prompt; nothing is sampled then.
    """

    row: int
    sequence: Sequence
    num_tokens: int
    draft_token_ids: Sequences[int] = ()
    target_id: int | None = None


def build_sampling_inputs(
    rows: Sequences[SamplingRow], num_rows: int, *, max_history: int, max_entries: int, vocab_size: int
) -> SamplingInputs:
    """Lay rows out in arrays.

    Args:
        rows: The live rows.
        num_rows: N.
        max_history: L, at least the longest sequence.
        max_entries: B, at least the most entries of a row.
        vocab_size: V.

    Returns:
        SamplingInputs of numpy arrays; large ones that no row needs are constants that stay on the device.
    """
    arrays = _off(num_rows, max_history, max_entries, vocab_size)
    sampled = [row for row in rows if row.target_id is None]
    for row in sampled:
        _set_sampler(arrays, row)
    if any(row.sequence.params.has_penalties for row in sampled):
        arrays["history"] = np.zeros((num_rows, max_history), np.int32)
        for row in sampled:
            _set_history(arrays, row)
    entries = {row.row: row.sequence.logit_entries(row.num_tokens, row.draft_token_ids) for row in sampled}
    if any(entries.values()):
        _set_entries(arrays, entries, (num_rows, max_entries))
    for row in sampled:
        arrays["is_restricted"][row.row] = row.sequence.params.allowed_token_ids is not None
    _set_grammars(arrays, [row for row in sampled if row.sequence.grammar is not None])
    for row in rows:
        if row.target_id is not None:
            arrays["target_ids"][row.row], arrays["has_target"][row.row] = row.target_id, True
    arrays["wants_logprobs"][0] = any(
        row.sequence.params.logprobs is not None or row.target_id is not None for row in rows
    )
    return SamplingInputs(**arrays)


def _off(num_rows: int, max_history: int, max_entries: int, vocab_size: int) -> dict[str, Any]:
    return {
        "temperature": np.zeros(num_rows, np.float32),
        "top_k": np.zeros(num_rows, np.int32),
        "top_p": np.ones(num_rows, np.float32),
        "min_p": np.zeros(num_rows, np.float32),
        "seeds": np.zeros((num_rows, 2), np.uint32),
        "counters": np.zeros(num_rows, np.uint32),
        "repetition_penalty": np.ones(num_rows, np.float32),
        "presence_penalty": np.zeros(num_rows, np.float32),
        "frequency_penalty": np.zeros(num_rows, np.float32),
        "history": _zeros((num_rows, max_history), "int32"),
        "num_history": np.zeros(num_rows, np.int32),
        "num_prompt": np.zeros(num_rows, np.int32),
        "entry_ids": _zeros((num_rows, max_entries), "int32"),
        "entry_values": _zeros((num_rows, max_entries), "float32"),
        "entry_conditions": _zeros((num_rows, max_entries), "int32"),
        "entry_allows": _zeros((num_rows, max_entries), "bool"),
        "is_restricted": np.zeros(num_rows, bool),
        "grammar_masks": _zeros((num_rows, -(-vocab_size // 32)), "int32"),
        "has_grammar": np.zeros(num_rows, bool),
        "target_ids": np.zeros(num_rows, np.int32),
        "has_target": np.zeros(num_rows, bool),
        "wants_logprobs": np.zeros(1, bool),
    }


def _set_sampler(arrays: dict[str, Any], row: SamplingRow) -> None:
    i, params = row.row, row.sequence.params
    if not params.is_greedy:
        arrays["temperature"][i] = params.temperature
        arrays["top_k"][i] = max(params.top_k, 0)
        arrays["top_p"][i] = params.top_p
        arrays["min_p"][i] = params.min_p
        arrays["seeds"][i] = row.sequence.seed >> 32, row.sequence.seed & 0xFFFFFFFF
        arrays["counters"][i] = row.num_tokens - row.sequence.prompt_len


def _set_history(arrays: dict[str, Any], row: SamplingRow) -> None:
    i, sequence, params = row.row, row.sequence, row.sequence.params
    if not params.has_penalties:
        return
    known = [*sequence.token_ids, *row.draft_token_ids][: row.num_tokens]
    arrays["history"][i, : len(known)] = known
    arrays["num_history"][i] = row.num_tokens
    arrays["num_prompt"][i] = sequence.prompt_len
    arrays["repetition_penalty"][i] = params.repetition_penalty
    arrays["presence_penalty"][i] = params.presence_penalty
    arrays["frequency_penalty"][i] = params.frequency_penalty


def _set_entries(arrays: dict[str, Any], entries: dict[int, list], shape: tuple[int, int]) -> None:
    names = ("entry_ids", "entry_values", "entry_conditions", "entry_allows")
    for name, dtype in zip(names, (np.int32, np.float32, np.int32, bool), strict=True):
        arrays[name] = np.zeros(shape, dtype)
    for i, listed in entries.items():
        for column, entry in enumerate(listed):
            for name, value in zip(names, dataclasses.astuple(entry), strict=True):
                arrays[name][i, column] = value


def _set_grammars(arrays: dict[str, Any], rows: list[SamplingRow]) -> None:
    if rows:
        arrays["grammar_masks"] = np.zeros(arrays["grammar_masks"].shape, np.int32)
    for row in rows:
        arrays["grammar_masks"][row.row] = row.sequence.grammar.allowed
        arrays["has_grammar"][row.row] = True


@functools.lru_cache(maxsize=256)
def _zeros(shape: tuple[int, int], dtype: str) -> jax.Array:
    return jnp.zeros(shape, dtype)
