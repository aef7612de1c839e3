"""`Request`: a prompt and the answers to it."""

import time

from flax_paged.generation.answer import Answer
from flax_paged.generation.outputs import CompletionOutput, LogprobsOfToken, RequestMetrics, RequestOutput
from flax_paged.generation.sequence import Sequence
from flax_paged.generation.text import Tokenizer


class Request:
    """A prompt and its answers.

    Args:
        request_id: Its name.
        prompt: The prompt's text, or None if it was given as token ids.
        sequences: One for each answer.
        tokenizer: Turns tokens into text; None for no text.
    """

    def __init__(self, request_id: str, prompt: str | None, sequences: list[Sequence], tokenizer: Tokenizer | None):
        self.request_id = request_id
        self.prompt = prompt
        self.answers = [Answer(sequence, tokenizer) for sequence in sequences]
        self.metrics = RequestMetrics(arrival_time=time.monotonic())
        self.is_polled = False  # whether `Engine.step` reports it, rather than the call that made it
        self._prompt_logprobs: list[LogprobsOfToken | None] = [None]
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

    def append(self, sequence: Sequence, token_id: int, logprobs: LogprobsOfToken | None = None) -> None:
        """Give a sequence its next token; sets the sequence's finish reason if it is the last."""
        now = time.monotonic()
        self.metrics.first_token_time = self.metrics.first_token_time or now
        self.answers[sequence.index].append(token_id, logprobs)
        if sequence.finish_reason:
            self.metrics.finished_time = now

    def add_prompt_logprobs(self, position: int, logprobs: LogprobsOfToken) -> None:
        """Take those of the prompt token at a position; a prompt computed again brings nothing new."""
        if position == len(self._prompt_logprobs):
            self._prompt_logprobs.append(logprobs)

    def output(self) -> RequestOutput:
        """Return all there is so far."""
        return self._output([answer.output() for answer in self.answers])

    def increment(self) -> RequestOutput:
        """Return what is new since the last call: each answer's new text and tokens."""
        self._finish_was_reported = self.is_finished
        return self._output([answer.increment() for answer in self.answers if answer.has_news])

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
            prompt_logprobs=self._prompt_logprobs if first.params.prompt_logprobs is not None else None,
        )
