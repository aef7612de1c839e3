"""`JsonGrammars` and `Grammar`: which tokens may come next if an answer is to be JSON of a schema. Host side."""

import collections
import threading
from collections.abc import Collection
from typing import Any

import numpy as np

from flax_paged.generation.text import Tokenizer

# Whitespace may be longer in JSON, but a model that lost its thread would say nothing else until its tokens are spent.
_WHITESPACE = r"[ \n\r\t]{0,20}"
# Schemas whose compiled form is kept: it takes from a millisecond to a second to make.
_NUM_KEPT = 32


class Grammar:
    """What one answer may say next. It follows the answer token by token.

    Args:
        matcher: llguidance's matcher, at the beginning of the answer.
        vocab_size: V, the model's.

    Attributes:
        allowed: i32[ceil(V / 32)]. Token i may come next if bit i % 32 of word i // 32 is set. End-of-sequence ids are
            among them where the answer may end, and alone where it must.
        error: Why the answer cannot go on, such as a limit on the grammar's complexity; "" if it can.
    """

    def __init__(self, matcher: Any, vocab_size: int):
        self._matcher = matcher
        self.allowed = np.zeros(-(-vocab_size // 32), np.int32)
        self._look_ahead()

    def advance(self, token_id: int) -> None:
        """Take the answer's next token."""
        self._matcher.consume_token(token_id)
        self._look_ahead()

    def _look_ahead(self) -> None:
        self._matcher.unsafe_compute_mask_ptr(self.allowed.ctypes.data, self.allowed.nbytes)
        self.error = self._matcher.get_error()


class JsonGrammars:
    """Makes grammars of JSON schemas for one vocabulary. Threads may share it.

    Args:
        tokenizer: The model's.
        vocab_size: V, the model's; it may be larger than the tokenizer's.
        eos_token_ids: Ids that end an answer.

    Raises:
        ImportError: llguidance is not installed.
        ValueError: There is no tokenizer or no end-of-sequence id, or the tokenizer's tokens are not bytes.
    """

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, eos_token_ids: Collection[int]):
        try:
            import llguidance
        except ImportError:
            raise ImportError("json_schema needs llguidance: pip install 'flax-paged[grammar]'") from None
        if tokenizer is None or tokenizer.token_bytes(0) is None:
            raise ValueError("json_schema needs an engine with a tokenizer whose tokens are bytes, such as a BPE's.")
        if not eos_token_ids:
            raise ValueError("json_schema needs an engine with end-of-sequence ids, as the answer ends with one.")
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        self._compiled: collections.OrderedDict[str, Any] = collections.OrderedDict()  # the last used one comes last
        self._matchers = llguidance.LLMatcher
        self._tokenizer = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(_Vocabulary(tokenizer, vocab_size, eos_token_ids)),
            n_vocab=vocab_size,
            eos_token=sorted(eos_token_ids),
            slices=llguidance.LLTokenizer.json_slices(),
        )

    def compile(self, schema: str) -> Grammar:
        """Return a grammar at the beginning of an answer.

        Args:
            schema: A JSON schema, as JSON.

        Raises:
            ValueError: It is no schema, no answer could fit it, it uses a keyword that is not supported, or it is too
                complex.
        """
        with self._lock:
            matcher = self._compiled.pop(schema, None)
        if matcher is None:
            matcher = self._compile(schema)  # outside of the lock, as it may take long
        with self._lock:
            self._compiled[schema] = matcher
            if len(self._compiled) > _NUM_KEPT:
                self._compiled.popitem(last=False)
            grammar = Grammar(matcher.deep_copy(), self._vocab_size)
        if grammar.error:
            raise ValueError(f"json_schema: {grammar.error}")
        return grammar

    def _compile(self, schema: str) -> Any:
        # These options win over any that the schema has, as "x-guidance".
        options = {"whitespace_pattern": _WHITESPACE, "lenient": False}
        try:
            text = self._matchers.grammar_from_json_schema(schema, overrides=options)
        except ValueError as error:
            raise ValueError(f"json_schema: {error}") from None
        matcher = self._matchers(self._tokenizer, text, log_level=0)  # what is wrong is not for stderr
        if error := matcher.get_error():
            raise ValueError(f"json_schema: {error}")
        return matcher


class _Vocabulary:
    """A tokenizer in the form that llguidance takes."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Collection[int]):
        self._tokenizer = tokenizer
        self.eos_token_id = min(eos_token_ids)
        self.bos_token_id = tokenizer.bos_token_id
        self.special_token_ids = sorted(
            index for index in {*tokenizer.special_token_ids, *eos_token_ids} if index < vocab_size
        )
        self.tokens = [tokenizer.token_bytes(index) for index in range(vocab_size)]

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)
