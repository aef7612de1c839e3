"""`NgramDrafter`: guesses the next tokens of a sequence from what it said before. Pure Python."""

from collections.abc import Sequence as Tokens

# Longest and shortest ends of a sequence that are looked up, the longest first.
_LONGEST, _SHORTEST = 4, 2


class NgramDrafter:
    """Prompt lookup: what followed the last few tokens when they came up before, is likely to follow again.

    Each n-gram's latest place is kept, so a guess costs no search.

    Args:
        num_tokens: Tokens to guess at a time.

    Reference: Saxena 2023, "Prompt Lookup Decoding".
    """

    def __init__(self, num_tokens: int):
        self.num_tokens = num_tokens
        self._next_of: dict[tuple[int, ...], int] = {}  # n-gram -> the position after it
        self._num_seen = 0

    def propose(self, token_ids: Tokens[int]) -> tuple[int, ...]:
        """Return up to `num_tokens` guesses of what follows, none if the end of the sequence is new.

        Args:
            token_ids: The whole sequence; each call's must begin with that of the call before.
        """
        # The n-grams that end before the last token: the last one's own follower is what is asked for.
        for end in range(max(self._num_seen, _SHORTEST), len(token_ids)):
            for size in range(_SHORTEST, _LONGEST + 1):
                if size <= end:
                    self._next_of[tuple(token_ids[end - size : end])] = end
        self._num_seen = len(token_ids)
        for size in range(_LONGEST, _SHORTEST - 1, -1):
            begin = self._next_of.get(tuple(token_ids[-size:]))
            if begin is not None and size <= len(token_ids):
                return tuple(token_ids[begin : begin + self.num_tokens])
        return ()
