"""`Answer`: one sequence's text, from token to token, and how much of it has been reported."""

from flax_paged.generation.outputs import CompletionOutput, LogprobsOfToken
from flax_paged.generation.sequence import Sequence
from flax_paged.generation.text import IncrementalDetokenizer, Tokenizer


class Answer:
    """The text that a sequence's tokens make. Text that may be the beginning of a stop text is held back.

    Args:
        sequence: The sequence.
        tokenizer: Turns tokens into text; None for no text.
    """

    def __init__(self, sequence: Sequence, tokenizer: Tokenizer | None):
        self.sequence = sequence
        self._params = sequence.params
        self._text = ""  # all there is
        self._num_safe_chars = 0  # of these, what no stop text can take back
        self._search_from = 0  # a stop text before this has been looked for, or comes too early
        self._logprobs: list[LogprobsOfToken] = []
        self._num_reported_tokens = 0
        self._num_reported_chars = 0
        self._finish_was_reported = False
        self._detokenizer = None
        if tokenizer is not None:
            skip = self._params.skip_special_tokens
            # The answer goes on where the prompt ends, so the space before its first word is part of it.
            self._detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip, continues_text=True)

    @property
    def has_news(self) -> bool:
        """Whether `increment` would have something to tell."""
        return (
            len(self.sequence.token_ids) - self.sequence.prompt_len > self._num_reported_tokens
            or self._num_safe_chars > self._num_reported_chars
            or bool(self.sequence.finish_reason) > self._finish_was_reported
        )

    def append(self, token_id: int, logprobs: LogprobsOfToken | None) -> None:
        """Take the next token; sets the sequence's finish reason if it is the last."""
        sequence = self.sequence
        sequence.append(token_id)
        if logprobs is not None:
            self._logprobs.append(logprobs)
        if self._detokenizer is None:
            return
        # The token that stops the answer is not part of its text.
        if sequence.finish_reason != "stop" or self._params.include_stop_str_in_output:
            self._text += self._detokenizer.add(token_id)
        if sequence.finish_reason:
            self._text += self._detokenizer.finish()
        self._look_for_stop()

    def output(self) -> CompletionOutput:
        """Return all there is so far."""
        return self._since(0, 0)

    def increment(self) -> CompletionOutput:
        """Return what is new since the last call."""
        output = self._since(self._num_reported_tokens, self._num_reported_chars)
        self._num_reported_tokens += len(output.token_ids)
        self._num_reported_chars += len(output.text)
        self._finish_was_reported = bool(self.sequence.finish_reason)
        return output

    def _look_for_stop(self) -> None:
        sequence, stops = self.sequence, self._params.stop
        num_output = len(sequence.token_ids) - sequence.prompt_len
        if num_output <= self._params.min_tokens:
            self._search_from = len(self._text)
        elif sequence.finish_reason != "stop" and (found := _first_stop(self._text, stops, self._search_from)):
            start, end, stop = found
            self._text = self._text[: end if self._params.include_stop_str_in_output else start]
            sequence.finish_reason, sequence.stop_reason = "stop", stop
        held = 0 if sequence.finish_reason else _num_chars_of_begun_stop(self._text[self._search_from :], stops)
        self._num_safe_chars = len(self._text) - held
        self._search_from = max(self._search_from, self._num_safe_chars)

    def _since(self, num_tokens: int, num_chars: int) -> CompletionOutput:
        sequence = self.sequence
        has_logprobs = self._params.logprobs is not None
        logprobs = self._logprobs[num_tokens:]
        token_ids = sequence.token_ids[sequence.prompt_len + num_tokens :]
        end = len(self._text) if sequence.is_finished else self._num_safe_chars
        return CompletionOutput(
            index=sequence.index,
            text=self._text[num_chars:end],
            token_ids=token_ids,
            finish_reason=sequence.finish_reason,
            stop_reason=sequence.stop_reason,
            logprobs=logprobs if has_logprobs else None,
            cumulative_logprob=sum(entry[t].logprob for t, entry in zip(token_ids, logprobs, strict=True))
            if has_logprobs
            else None,
        )


def _first_stop(text: str, stops: tuple[str, ...], start: int) -> tuple[int, int, str] | None:
    """Return (start, end, stop) of the stop text that is complete first; of several, the longest."""
    found = [(text.find(stop, start), stop) for stop in stops]
    ends = [(begin + len(stop), begin, stop) for begin, stop in found if begin >= 0]
    if not ends:
        return None
    end, begin, stop = min(ends)
    return begin, end, stop


def _num_chars_of_begun_stop(text: str, stops: tuple[str, ...]) -> int:
    """Length of the longest end of the text that is a beginning of a stop text."""
    longest = min(len(text), max(map(len, stops), default=1) - 1)
    for length in range(longest, 0, -1):
        if any(stop.startswith(text[-length:]) for stop in stops):
            return length
    return 0
