"""`Request`: a prompt, the sequences that answer it, and the text they have become so far."""

import time

from flax_paged.generation.outputs import CompletionOutput, RequestMetrics, RequestOutput
from flax_paged.generation.sampling_params import SamplingParams
from flax_paged.generation.sequence import Sequence
from flax_paged.generation.text import IncrementalDetokenizer, Tokenizer


class Request:
    """A prompt and its answers.

    Args:
        request_id: Its name.
        prompt: The prompt's text, or None if it was given as token ids.
        params: How to sample, and when to stop.
        sequences: One for each answer.
        tokenizer: Turns tokens into text; None for no text.
    """

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        params: SamplingParams,
        sequences: list[Sequence],
        tokenizer: Tokenizer | None,
    ):
        self.request_id = request_id
        self.prompt = prompt
        self.params = params
        self.metrics = RequestMetrics(arrival_time=time.monotonic())
        self.answers = [_Answer(sequence, params, tokenizer) for sequence in sequences]
        self.is_polled = False  # whether `Engine.step` reports it, rather than the call that made it
        self._finish_was_reported = False

    @property
    def is_finished(self) -> bool:
        """Whether every answer is complete."""
        return all(answer.sequence.is_finished for answer in self.answers)

    @property
    def has_news(self) -> bool:
        """Whether `increment` would have something to tell."""
        if self.is_finished:
            return not self._finish_was_reported
        return any(answer.has_news for answer in self.answers)

    def append(self, sequence: Sequence, token_id: int) -> None:
        """Give a sequence its next token, and its text the piece that the token makes."""
        now = time.monotonic()
        self.metrics.first_token_time = self.metrics.first_token_time or now
        self.answers[sequence.index].append(token_id)
        if sequence.finish_reason:
            self.metrics.finished_time = now

    def output(self) -> RequestOutput:
        """Return all there is so far."""
        return self._output([answer.output() for answer in self.answers])

    def increment(self) -> RequestOutput:
        """Return what is new since the last call: each answer's new text and tokens."""
        self._finish_was_reported = self.is_finished
        changed = [answer for answer in self.answers if answer.has_news]
        return self._output([answer.increment() for answer in changed])

    def _output(self, outputs: list[CompletionOutput]) -> RequestOutput:
        first = self.answers[0].sequence
        self.metrics.num_preemptions = sum(answer.sequence.num_preemptions for answer in self.answers)
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=first.token_ids[: first.prompt_len],
            outputs=outputs,
            finished=self.is_finished,
            num_cached_tokens=first.num_cached_tokens,
            metrics=self.metrics,
        )


class _Answer:
    """One sequence's text, and how much of it has been reported."""

    def __init__(self, sequence: Sequence, params: SamplingParams, tokenizer: Tokenizer | None):
        self.sequence = sequence
        self.text = ""
        self._detokenizer = (
            IncrementalDetokenizer(tokenizer, skip_special_tokens=params.skip_special_tokens) if tokenizer else None
        )
        self._num_reported_tokens = 0
        self._num_reported_chars = 0
        self._was_finished = False

    @property
    def has_news(self) -> bool:
        return (
            len(self.sequence.token_ids) - self.sequence.prompt_len > self._num_reported_tokens
            or len(self.text) > self._num_reported_chars
            or bool(self.sequence.finish_reason) > self._was_finished
        )

    def append(self, token_id: int) -> None:
        self.sequence.append(token_id)
        if self._detokenizer is None:
            return
        if self.sequence.finish_reason != "stop":  # the token that stops it is not text
            self.text += self._detokenizer.add(token_id)
        if self.sequence.finish_reason:
            self.text += self._detokenizer.finish()

    def output(self) -> CompletionOutput:
        return self._since(0, 0)

    def increment(self) -> CompletionOutput:
        output = self._since(self._num_reported_tokens, self._num_reported_chars)
        self._num_reported_tokens += len(output.token_ids)
        self._num_reported_chars += len(output.text)
        self._was_finished = bool(self.sequence.finish_reason)
        return output

    def _since(self, num_tokens: int, num_chars: int) -> CompletionOutput:
        sequence = self.sequence
        return CompletionOutput(
            index=sequence.index,
            text=self.text[num_chars:],
            token_ids=sequence.token_ids[sequence.prompt_len + num_tokens :],
            finish_reason=sequence.finish_reason,
            stop_reason=sequence.stop_reason,
        )
