"""`LogitRules`: which tokens a sequence may, must not or should rather say next. Pure Python."""

import dataclasses
import math
import sys
from collections.abc import Collection
from collections.abc import Sequence as Tokens

from flax_paged.generation.sampling_params import SamplingParams

_AFTER_ANY = -1


@dataclasses.dataclass(frozen=True)
class LogitEntry:
    """One change to one token's logit.

    Fields:
        token_id: The token.
        value: Added to its logit.
        condition: The entry counts only if this token comes right before; after any if negative.
        allows: The token is one of those a restricted sequence may say.
    """

    token_id: int
    value: float
    condition: int = _AFTER_ANY
    allows: bool = False


class LogitRules:
    """The entries of one sequence: logit bias, allowed tokens, min_tokens and bad words.

    Args:
        params: The request's parameters.
        stop_token_ids: Every id that would end the answer; banned until there are `min_tokens`.
        bad_words: Token sequences that must not appear in the answer.
    """

    def __init__(
        self, params: SamplingParams, stop_token_ids: Collection[int] = (), bad_words: Tokens[Tokens[int]] = ()
    ):
        self._always = [LogitEntry(token_id, value) for token_id, value in (params.logit_bias or {}).items()]
        self._always += [LogitEntry(token_id, 0.0, allows=True) for token_id in params.allowed_token_ids or ()]
        self._min_tokens = params.min_tokens
        self._stops = [LogitEntry(token_id, -math.inf) for token_id in sorted(set(stop_token_ids))]
        self._bad_words = [tuple(word) for word in bad_words]

    @property
    def max_entries(self) -> int:
        """Most entries that a token can have."""
        return len(self._always) + len(self._stops) * (self._min_tokens > 0) + len(self._bad_words)

    def num_steps_alike(self, num_output: int) -> int:
        """Return how many tokens, from the one after `num_output` on, have the same entries whatever is said."""
        if any(len(word) > 1 for word in self._bad_words):
            return 1
        return self._min_tokens - num_output if num_output < self._min_tokens else sys.maxsize

    def entries(self, output: Tokens[int], num_output: int) -> list[LogitEntry]:
        """Return the entries for the next token.

        Args:
            output: The answer's tokens before it, as far as the host knows them.
            num_output: How many there are; one more than known if the last is pending.
        """
        entries = list(self._always)
        if num_output < self._min_tokens:
            entries += self._stops
        for word in self._bad_words:
            if (entry := _completing(word, output, num_output)) is not None:
                entries.append(entry)
        return entries


def _completing(word: tuple[int, ...], output: Tokens[int], num_output: int) -> LogitEntry | None:
    """Ban the last token of a bad word, if the answer ends, or may end, with the tokens before it."""
    begin = num_output - (len(word) - 1)
    if begin < 0:
        return None
    known = tuple(output[begin:num_output])
    if known != word[: len(known)]:
        return None
    is_pending = len(known) < len(word) - 1
    return LogitEntry(word[-1], -math.inf, condition=word[-2] if is_pending else _AFTER_ANY)
