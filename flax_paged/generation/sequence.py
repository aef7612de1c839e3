"""`Sequence`: the host's record of one answer being generated."""

import enum
from collections.abc import Collection, Hashable
from collections.abc import Sequence as Tokens

from flax_paged.generation.drafts import NgramDrafter
from flax_paged.generation.grammar import Grammar
from flax_paged.generation.logit_rules import LogitEntry, LogitRules
from flax_paged.generation.pages import PrefixNode
from flax_paged.generation.sampling_params import SamplingParams


class Status(enum.Enum):
    """Where a sequence stands."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Sequence:
    """Tokens, pages and progress of one answer.

    Every token is in one of three states. *Computed*: its keys and values are in the cache, or will be when the steps
    that have been launched are through. *Known*: the host has its id. *Pending*: it was sampled by a launched call
    whose result the host has not read; the next step takes the last one's id from the device.

    Args:
        request_id: The request's name.
        prompt_token_ids: At least one token id.
        params: How to sample, and when to stop.
        seed: Seed of the sequence's random numbers, below 2**64.
        max_num_tokens: Most tokens in all, prompt included, at least one more than the prompt.
        eos_token_ids: Ids that end the answer; empty to ignore them.
        priority: Sequences of a lower value go first.
        arrival: Orders sequences of equal priority.
        index: Number of the answer within its request.
        salt: Only sequences of equal salt share cached prefixes.
        bad_words: Token sequences that must not appear in the answer.
        grammar: What the answer may say; None for anything.
    """

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Tokens[int],
        params: SamplingParams,
        *,
        seed: int = 0,
        max_num_tokens: int,
        eos_token_ids: Collection[int] = (),
        priority: int = 0,
        arrival: int = 0,
        index: int = 0,
        salt: Hashable = None,
        bad_words: Tokens[Tokens[int]] = (),
        grammar: Grammar | None = None,
    ):
        self.request_id = request_id
        self.index = index
        self.params = params
        self.seed = seed
        self.max_num_tokens = max_num_tokens
        self.eos_token_ids = frozenset(eos_token_ids)
        self.rules = LogitRules(params, self.eos_token_ids | set(params.stop_token_ids), bad_words)
        self.grammar = grammar
        self.rank = (priority, arrival, index)  # lower goes first and is preempted last
        self.token_ids = list(prompt_token_ids)
        self.prompt_len = len(self.token_ids)
        self.status = Status.WAITING
        self.pages: list[int] = []
        self.swap_slots: list[int] = []  # host copies of its first pages, while it waits after a preemption
        self.num_computed_tokens = 0
        self.num_pending_tokens = 0
        self.previous_row = 0  # row of the last launched step that samples the pending token
        self.leader: Sequence | None = None  # answers the same prompt, whose pages this one shares once they are there
        self.forks: list[Sequence] = []  # those that wait for this one's prompt to be computed
        self.drafter: NgramDrafter | None = None
        self.salt = salt
        self.prefix_node: PrefixNode | None = None  # of the last page entered into the prefix tree
        self.num_remembered_pages = 0
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens known or pending."""
        return len(self.token_ids) + self.num_pending_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens that a next step could compute; 0 when the last token it may have is already there or pending."""
        if self.num_tokens >= self.max_num_tokens:
            return 0
        return self.num_tokens - self.num_computed_tokens

    @property
    def num_decode_steps(self) -> int:
        """Steps that it can decode in one call, at least 1: up to its last token, while its rules stay the same."""
        if self.params.has_penalties or self.grammar is not None:
            return 1  # they follow from tokens that the host must know
        num_same = self.rules.num_steps_alike(self.num_tokens - self.prompt_len)
        return max(min(num_same, self.max_num_tokens - self.num_tokens), 1)

    def draft(self) -> tuple[int, ...]:
        """Guess tokens that may follow the known ones, if the sequence is decoding and may have them."""
        is_decoding = self.num_uncomputed_tokens == 1 and not self.num_pending_tokens
        if self.drafter is None or not is_decoding:
            return ()
        # The last token it may have is sampled, never guessed.
        return self.drafter.propose(self.token_ids)[: self.max_num_tokens - 1 - self.num_tokens]

    @property
    def output_token_ids(self) -> list[int]:
        """The answer's known tokens."""
        return self.token_ids[self.prompt_len :]

    @property
    def is_finished(self) -> bool:
        """Whether the answer is complete or aborted."""
        return self.status is Status.FINISHED

    def logit_entries(self, num_tokens: int, draft_token_ids: Tokens[int] = ()) -> list[LogitEntry]:
        """Return how the logits of the token after the first `num_tokens` are changed.

        Args:
            num_tokens: Tokens before it, pending and draft ones included.
            draft_token_ids: Guesses that follow the known tokens.
        """
        output = [*self.token_ids[self.prompt_len :], *draft_token_ids]
        num_output = num_tokens - self.prompt_len
        return self.rules.entries(output[:num_output], num_output)

    def append(self, token_id: int) -> None:
        """Take a sampled token, and set the finish reason if it is the last."""
        self.num_pending_tokens = max(self.num_pending_tokens - 1, 0)
        self.token_ids.append(token_id)
        if token_id in self.eos_token_ids:
            self.finish_reason = "stop"
        elif token_id in self.params.stop_token_ids:
            self.finish_reason, self.stop_reason = "stop", token_id
        elif len(self.token_ids) >= self.max_num_tokens:
            self.finish_reason = "length"
        elif self.grammar is not None:
            self.grammar.advance(token_id)
            self.finish_reason = "error" if self.grammar.error else None

    def __repr__(self):
        return (
            f"Sequence({self.request_id!r}, {self.status.value}, {self.num_tokens} tokens,"
            f" {self.num_computed_tokens} computed, {len(self.pages)} pages)"
        )
