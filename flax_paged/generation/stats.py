"""`EngineStats`: what an engine is doing, what it has done, and what waiting requests wait for."""

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class EngineStats:
    """A snapshot of an engine.

    Fields:
        num_running: Sequences that hold pages.
        num_waiting: Sequences that do not.
        waits_for: The limit that kept the first of them out of the last step, by the name of the engine's option:
            "max_num_seqs", "max_num_batched_tokens" or "num_pages"; None if nobody waits.
        num_steps_waited: Steps in which somebody waited for each limit.
        num_free_pages: Pages that hold nothing of use.
        num_cached_pages: Pages that nobody holds but whose prefix may be asked for again.
        num_live_pages: Pages that a sequence holds.
        num_steps: Steps launched.
        num_computed_tokens: Tokens computed, prompts and recomputed ones included.
        num_cached_tokens: Prompt tokens found in the prefix cache, and so not computed.
        num_sampled_tokens: Tokens given to requests.
        num_preemptions: Times a sequence lost its pages.
        num_swapped_pages: Pages of preempted sequences that host memory holds.
        num_swapped_out_pages: Pages copied to host memory.
        num_swapped_in_pages: Pages copied back from there.
        num_draft_tokens: Tokens guessed.
        num_right_draft_tokens: Tokens guessed rightly.
    """

    num_running: int
    num_waiting: int
    waits_for: str | None
    num_steps_waited: Mapping[str, int]
    num_free_pages: int
    num_cached_pages: int
    num_live_pages: int
    num_steps: int
    num_computed_tokens: int
    num_cached_tokens: int
    num_sampled_tokens: int
    num_preemptions: int
    num_swapped_pages: int
    num_swapped_out_pages: int
    num_swapped_in_pages: int
    num_draft_tokens: int
    num_right_draft_tokens: int
