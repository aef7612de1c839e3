"""Prompts as users write them: texts or token ids, one or many; checked."""

import numbers
from collections.abc import Sequence as Sequences

from flax_paged.generation.text import Tokenizer

Prompt = str | Sequences[int]


def as_list_of_prompts(prompts: Prompt | Sequences[Prompt]) -> list[Prompt]:
    """Return one prompt, or several, as a list of prompts."""
    if isinstance(prompts, str):
        return [prompts]
    prompts = list(prompts)
    is_one_prompt = bool(prompts) and all(isinstance(token, numbers.Integral) for token in prompts)
    return [prompts] if is_one_prompt else prompts


def tokenize_prompt(
    prompt: Prompt, tokenizer: Tokenizer | None, *, vocab_size: int, max_model_len: int
) -> tuple[str | None, list[int]]:
    """Return a prompt's text, if it is one, and its token ids.

    Args:
        prompt: A text or token ids.
        tokenizer: For texts; None if there is none.
        vocab_size: Token ids are below it.
        max_model_len: Most tokens of a sequence, of which the answer needs one.

    Raises:
        ValueError: No tokens or too many, an id that is not one, or a text without a tokenizer.
    """
    if isinstance(prompt, str):
        if tokenizer is None:
            raise ValueError("The prompt is text, but the engine has no tokenizer; give token ids or a tokenizer.")
        text, token_ids = prompt, list(tokenizer.encode(prompt))
    else:
        text, token_ids = None, list(prompt)
    if not token_ids:
        raise ValueError("The prompt has no tokens; expected at least one.")
    for token_id in token_ids:
        if not isinstance(token_id, numbers.Integral):
            raise ValueError(f"The prompt holds {token_id!r}; expected text or a list of integer token ids.")
        if not 0 <= token_id < vocab_size:
            raise ValueError(f"The prompt holds token id {token_id}; expected 0 <= id < {vocab_size}.")
    if len(token_ids) >= max_model_len:
        raise ValueError(
            f"The prompt has {len(token_ids)} tokens and max_model_len={max_model_len} must hold at least one"
            " more; shorten the prompt or raise max_model_len."
        )
    return text, [int(token_id) for token_id in token_ids]
