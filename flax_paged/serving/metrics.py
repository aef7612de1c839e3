"""`Metrics`: the server's numbers for Prometheus, the engine's among them."""

import time
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from flax_paged.generation.outputs import RequestMetrics
from flax_paged.generation.stats import EngineStats

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500)
_PER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5)
_GAUGES = {
    "num_running": ("running_sequences", "Sequences that hold pages."),
    "num_waiting": ("waiting_sequences", "Sequences that hold none."),
    "num_free_pages": ("free_pages", "Pages that hold nothing of use."),
    "num_cached_pages": ("cached_pages", "Pages that nobody holds but whose prefix may be asked for again."),
    "num_live_pages": ("live_pages", "Pages that a sequence holds."),
    "num_swapped_pages": ("swapped_pages", "Pages of preempted sequences that host memory holds."),
}
_COUNTERS = {
    "num_steps": ("steps", "Steps launched."),
    "num_computed_tokens": ("computed_tokens", "Tokens computed, prompts and recomputed ones included."),
    "num_cached_tokens": ("cached_tokens", "Prompt tokens found in the prefix cache."),
    "num_sampled_tokens": ("sampled_tokens", "Tokens given to requests."),
    "num_preemptions": ("preemptions", "Times a sequence lost its pages."),
    "num_swapped_out_pages": ("swapped_out_pages", "Pages copied to host memory."),
    "num_swapped_in_pages": ("swapped_in_pages", "Pages copied back from host memory."),
    "num_draft_tokens": ("draft_tokens", "Tokens guessed."),
    "num_right_draft_tokens": ("right_draft_tokens", "Tokens guessed rightly."),
}


class Metrics:
    """Counts and times of the requests, and the engine's statistics when they are read.

    Args:
        stats: Returns the engine's statistics; None while there is no engine.
    """

    def __init__(self, stats: Callable[[], EngineStats | None]):
        self._registry = CollectorRegistry()
        self._stats = stats
        self._registry.register(self)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"flax_paged_{name}", text, labels, registry=self._registry)

        def seconds(name: str, text: str, buckets: tuple[float, ...] = _SECONDS) -> Histogram:
            return Histogram(f"flax_paged_{name}_seconds", text, buckets=buckets, registry=self._registry)

        self._calls = counter("http_requests", "Calls by path and status.", "path", "status")
        self._answers = counter("answers", "Answers by what ended them.", "finish_reason")
        self._prompt_tokens = counter("prompt_tokens", "Tokens of prompts answered.")
        self._answer_tokens = counter("answer_tokens", "Tokens of answers.")
        self._queue = seconds("queue_time", "Until a prompt was part of a step.")
        self._first_token = seconds("time_to_first_token", "Until the first token.")
        self._per_token = seconds("time_per_output_token", "Between tokens of an answer, on average.", _PER_TOKEN)
        self._whole = seconds("request_time", "Until the last token.")

    def text(self) -> bytes:
        """Return everything in Prometheus' text format."""
        return generate_latest(self._registry)

    def count_call(self, path: str, status: int) -> None:
        """Count a response."""
        self._calls.labels(path, str(status)).inc()

    def count_prompt(self, num_prompt_tokens: int, num_tokens: list[int], reasons: list[str], times: RequestMetrics):
        """Count a prompt that has been answered.

        Args:
            num_prompt_tokens: Its tokens.
            num_tokens: Tokens of each answer.
            reasons: What ended each answer.
            times: When what happened.
        """
        self._prompt_tokens.inc(num_prompt_tokens)
        self._answer_tokens.inc(sum(num_tokens))
        for reason in reasons:
            self._answers.labels(reason).inc()
        end = times.finished_time or time.monotonic()
        self._whole.observe(end - times.arrival_time)
        if times.first_scheduled_time is not None:
            self._queue.observe(times.first_scheduled_time - times.arrival_time)
        if times.first_token_time is not None:
            self._first_token.observe(times.first_token_time - times.arrival_time)
            if max(num_tokens) > 1:
                self._per_token.observe((end - times.first_token_time) / (max(num_tokens) - 1))

    def count_unfinished(self, reason: str) -> None:
        """Count a prompt whose answers did not come to their end, by why."""
        self._answers.labels(reason).inc()

    def collect(self) -> Iterator[Metric]:
        """Yield the engine's statistics; Prometheus' client calls this."""
        stats = self._stats()
        if stats is None:
            return
        for field, (name, text) in _GAUGES.items():
            yield GaugeMetricFamily(f"flax_paged_{name}", text, value=getattr(stats, field))
        for field, (name, text) in _COUNTERS.items():
            yield CounterMetricFamily(f"flax_paged_{name}", text, value=getattr(stats, field))
        waited = CounterMetricFamily("flax_paged_waited_steps", "Steps in which somebody waited.", labels=["limit"])
        for limit, value in stats.num_steps_waited.items():
            waited.add_metric([limit], value)
        yield waited
