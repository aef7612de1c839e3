"""`Scheduler`: which sequences compute how many tokens in the next step, and who gets pages. Pure Python."""

import collections
import dataclasses
import heapq

from flax_paged.generation.pages import PagePool
from flax_paged.generation.sequence import Sequence, Status


@dataclasses.dataclass(frozen=True)
class ScheduledSequence:
    """One sequence's share of a step.

    Fields:
        sequence: The sequence.
        context_len: Tokens in its cache before the step.
        num_new_tokens: Tokens that the step computes.
        samples: Whether the step computes its last token, so that a new one is sampled.
        previous_row: Row of the previous step that sampled its last token, if the host does not know it yet.
        draft_token_ids: Guesses, the last of the new tokens; a token is sampled after each, too, to verify them.
        page_copies: (source, destination) pages to copy before the step.
    """

    sequence: Sequence
    context_len: int
    num_new_tokens: int
    samples: bool
    previous_row: int = 0
    draft_token_ids: tuple[int, ...] = ()
    page_copies: tuple[tuple[int, int], ...] = ()

    @property
    def is_decode(self) -> bool:
        """Whether it is one token after which one is sampled, and nothing else is asked."""
        return self.num_new_tokens == 1 and self.samples and not self.reports_prompt

    @property
    def reports_prompt(self) -> bool:
        """Whether the step has prompt tokens whose log-probabilities are wanted."""
        sequence = self.sequence
        return sequence.params.prompt_logprobs is not None and self.context_len + 1 < sequence.prompt_len


@dataclasses.dataclass
class Schedule:
    """What a step does, or several decode steps in one call.

    Fields:
        items: The sequences' shares, in row order.
        preempted: Sequences that lost their pages and wait again.
        swap_outs: (page, slot) of pages to copy to host memory before anything is written. None if there are swap_ins.
        swap_ins: (slot, page) of pages to bring back from there before the step.
        num_tokens: Tokens of one step.
        num_decode_steps: Steps of the call; more than 1 only if every item is one token after which one is sampled.
    """

    items: list[ScheduledSequence] = dataclasses.field(default_factory=list)
    preempted: list[Sequence] = dataclasses.field(default_factory=list)
    swap_outs: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    swap_ins: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    num_tokens: int = 0
    num_decode_steps: int = 1

    def append(self, item: ScheduledSequence) -> None:
        """Add an item."""
        self.items.append(item)
        self.num_tokens += item.num_new_tokens

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence's item out, if it has one."""
        self.items = [item for item in self.items if item.sequence is not sequence]
        self.num_tokens = sum(item.num_new_tokens for item in self.items)


class Scheduler:
    """Continuous batching under a token budget, with chunked prefill and preemption.

    Each step first serves the running sequences, those that decode before those still in their prompt, and then admits
    waiting ones in order of rank (priority, then arrival) while budget, rows and pages last. The head of the queue is
    never overtaken. When pages run out, the running sequence of the worst rank gives up its pages and waits: so the
    sequence of the best rank always advances, and none starves. What it had computed is kept in host memory if there
    are slots for all of its pages, and else computed again, generated tokens included.

    A call runs several decode steps only if every sequence in it decodes, none can reach its length limit before the
    last of them, no one's logit rules change between them, and there are pages for all of them that nobody holds.

    Args:
        pool: The pages.
        max_num_seqs: Most sequences in a step.
        max_num_batched_tokens: Most tokens in a step.
        max_prefill_chunk: Most tokens of one prompt in a step; None for the whole budget.
        decode_steps_per_call: Most decode steps in one compiled call.
        num_swap_slots: Pages of preempted sequences that host memory may hold.

    Raises:
        ValueError: A count is too small, or the budget cannot decode every sequence at once.
    """

    def __init__(
        self,
        pool: PagePool,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_prefill_chunk: int | None = None,
        decode_steps_per_call: int = 1,
        num_swap_slots: int = 0,
    ):
        if max_num_seqs < 1:
            raise ValueError(f"{max_num_seqs=}: expected at least 1.")
        if max_num_batched_tokens < max_num_seqs:
            raise ValueError(
                f"{max_num_batched_tokens=} is less than {max_num_seqs=}; a decode step takes one token of every"
                " sequence. Raise the first or lower the second."
            )
        if max_prefill_chunk is not None and max_prefill_chunk < 1:
            raise ValueError(f"{max_prefill_chunk=}: expected at least 1, or None.")
        if decode_steps_per_call < 1:
            raise ValueError(f"{decode_steps_per_call=}: expected at least 1.")
        if num_swap_slots < 0:
            raise ValueError(f"{num_swap_slots=}: expected 0 or more.")
        self.pool = pool
        self.decode_steps_per_call = decode_steps_per_call
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_chunk = max_prefill_chunk or max_num_batched_tokens
        self.running: list[Sequence] = []
        self.waits_for: str | None = None  # the limit that kept the head of the queue out of the last step
        self.counts: collections.Counter[str] = collections.Counter()  # for `EngineStats`
        self._waiting: list[tuple[tuple, Sequence]] = []  # heap by rank
        self._num_swap_slots = num_swap_slots
        self._free_slots = list(range(num_swap_slots))

    @property
    def num_waiting(self) -> int:
        """Sequences that hold no pages and wait for a place."""
        return len(self._waiting)

    @property
    def num_swapped_pages(self) -> int:
        """Pages of waiting sequences that host memory holds."""
        return self._num_swap_slots - len(self._free_slots)

    @property
    def has_unfinished(self) -> bool:
        """Whether any sequence is not finished."""
        return bool(self.running or self._waiting)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence.

        Raises:
            ValueError: The whole pool could not hold it.
        """
        self.check_fits(sequence)
        if sequence.leader is not None:
            sequence.leader.forks.append(sequence)
        else:
            self._enqueue(sequence)

    def check_fits(self, sequence: Sequence) -> None:
        """Refuse a sequence that could never run.

        Raises:
            ValueError: The whole pool could not hold it.
        """
        # The last token is sampled but never written to the cache.
        num_cached = sequence.max_num_tokens - 1
        num_needed = self.pool.pages_for(num_cached)
        if num_needed > self.pool.num_pages:
            raise ValueError(
                f"The request can never run: {sequence.prompt_len} prompt tokens and up to"
                f" {sequence.max_num_tokens - sequence.prompt_len} new ones keep {num_cached} tokens in the cache,"
                f" which takes {num_needed} pages of {self.pool.page_size}, but num_pages={self.pool.num_pages}."
                " Lower max_tokens or give the engine more pages."
            )

    def schedule(self) -> Schedule:
        """Choose the next step's sequences, give them pages, and count their tokens as computed."""
        schedule = Schedule()
        for sequence in sorted(self.running, key=lambda s: (s.num_uncomputed_tokens != 1, s.rank)):
            if sequence.status is Status.RUNNING:  # not preempted for one before it
                self._schedule_running(sequence, schedule)
        for item in schedule.items:
            self._commit(item)
        self.waits_for = "num_pages" if schedule.preempted else self._admit(schedule)
        self._add_decode_steps(schedule)
        for item in schedule.items:
            # Not before the end: a fork copies its leader's last page, which this step may still have to compute.
            if item.sequence.num_computed_tokens >= item.sequence.prompt_len:
                self._release_forks(item.sequence)
        for row, item in enumerate(schedule.items):
            if item.samples:
                item.sequence.num_pending_tokens += schedule.num_decode_steps
                item.sequence.previous_row = row
        self._count(schedule)
        return schedule

    def finish(self, sequence: Sequence, reason: str) -> None:
        """End a sequence in whatever state it is, and give its pages back."""
        sequence.finish_reason = sequence.finish_reason or reason
        if sequence.status is Status.RUNNING:
            self.running.remove(sequence)
            self._release(sequence)
        elif sequence.status is Status.WAITING:
            self._dequeue(sequence)
            self._free_swap_slots(sequence)
        sequence.status = Status.FINISHED
        self._release_forks(sequence)

    def preempt(self, sequence: Sequence, schedule: Schedule | None = None) -> None:
        """Take a running sequence's pages; it waits, to be computed again from its first token or swapped in.

        Args:
            sequence: The sequence.
            schedule: The step that needs the pages, which may copy them to host memory first; None to lose them.
        """
        self.running.remove(sequence)
        if schedule is None or not self._swap_out(sequence, schedule):
            sequence.num_computed_tokens = 0
        self._release(sequence)
        sequence.num_preemptions += 1
        sequence.status = Status.WAITING
        self._enqueue(sequence)

    def reject_drafts(self, sequence: Sequence, num_tokens: int) -> None:
        """Take back the last computed tokens, which were guessed wrongly; their place in the cache is written again."""
        sequence.num_computed_tokens -= num_tokens

    def preempt_all(self) -> None:
        """Preempt every running sequence and forget every cached page, because the cache is no longer valid."""
        for sequence in list(self.running):
            self.preempt(sequence)
        for _, sequence in self._waiting:
            if sequence.swap_slots:
                sequence.num_computed_tokens = 0
                self._free_swap_slots(sequence)
        self.pool.forget_all()

    def _schedule_running(self, sequence: Sequence, schedule: Schedule) -> None:
        budget = self.max_num_batched_tokens - schedule.num_tokens
        num_new = min(sequence.num_uncomputed_tokens, budget, self.max_chunk)
        if num_new < 1:
            return
        drafts = self._affordable_drafts(sequence, schedule)
        num_new += len(drafts)
        while self._num_pages_missing(sequence, num_new) > self.pool.num_available:
            victim = max(self.running, key=lambda s: s.rank)
            self.preempt(victim, schedule)
            schedule.preempted.append(victim)
            schedule.remove(victim)
            if victim is sequence:
                return
        self._place(sequence, num_new, schedule, drafts)

    def _add_decode_steps(self, schedule: Schedule) -> None:
        """Give the call as many decode steps as it may have, and their pages."""
        sequences = [item.sequence for item in schedule.items]
        if not sequences or not all(item.is_decode for item in schedule.items):
            return
        num_steps = min(self.decode_steps_per_call, *(sequence.num_decode_steps for sequence in sequences))
        # The pages that hold the first step's tokens are writable already; those of the others are new.
        while num_steps > 1 and self.pool.num_available < sum(
            self._num_pages_missing(sequence, num_steps - 1) for sequence in sequences
        ):
            num_steps -= 1
        for sequence in sequences:
            sequence.num_computed_tokens += num_steps - 1
            while len(sequence.pages) < self.pool.pages_for(sequence.num_computed_tokens):
                sequence.pages.append(self.pool.allocate())
        schedule.num_decode_steps = num_steps

    def _affordable_drafts(self, sequence: Sequence, schedule: Schedule) -> tuple[int, ...]:
        """Guess tokens within what the others leave of the budget, and without taking a page from anybody."""
        drafts = sequence.draft()
        if not drafts:
            return ()
        num_decoding = len(self.running) - len(schedule.items)
        drafts = drafts[: max(self.max_num_batched_tokens - schedule.num_tokens - num_decoding, 0)]
        while drafts and self._num_pages_missing(sequence, 1 + len(drafts)) > self.pool.num_available:
            drafts = drafts[:-1]
        return drafts

    def _admit(self, schedule: Schedule) -> str | None:
        """Admit waiting sequences; returns the name of the limit that keeps the next one out."""
        while self._waiting:
            sequence = self._waiting[0][1]
            budget = self.max_num_batched_tokens - schedule.num_tokens
            if len(self.running) >= self.max_num_seqs:
                return "max_num_seqs"
            if budget < 1:
                return "max_num_batched_tokens"
            if not self._start(sequence, schedule):
                return "num_pages"
            heapq.heappop(self._waiting)
            self.running.append(sequence)
            sequence.status = Status.RUNNING
            self._place(sequence, min(sequence.num_uncomputed_tokens, budget, self.max_chunk), schedule)
            # At once, so that the next one admitted can share its pages: within a step every layer writes all keys and
            # values before it reads any.
            self._commit(schedule.items[-1])
        return None

    def _count(self, schedule: Schedule) -> None:
        self.counts["num_steps"] += schedule.num_decode_steps if schedule.items else 0
        self.counts["num_computed_tokens"] += schedule.num_tokens * schedule.num_decode_steps
        self.counts["num_preemptions"] += len(schedule.preempted)
        self.counts["num_draft_tokens"] += sum(len(item.draft_token_ids) for item in schedule.items)
        if self.waits_for:
            self.counts[f"steps waited for {self.waits_for}"] += 1

    def _start(self, sequence: Sequence, schedule: Schedule) -> bool:
        """Give a waiting sequence what is there of its tokens, if the rest of them has pages too."""
        if self._can_fork(sequence, schedule):
            return self._fork(sequence)
        # At least one token is computed, for its logits. All of the prompt are, if it is asked how likely they were.
        matchable = sequence.token_ids[: sequence.num_tokens - 1]
        if sequence.swap_slots:
            matchable = sequence.token_ids[: sequence.num_computed_tokens]
        elif sequence.params.prompt_logprobs is not None:
            matchable = []
        nodes = self.pool.match(matchable, sequence.salt)
        num_revived = sum(self.pool.num_users(node.page) == 0 for node in nodes)
        num_missing = self.pool.pages_for(sequence.num_tokens) - len(nodes)
        if num_missing > self.pool.num_available - num_revived:
            return False
        for node in nodes:
            self.pool.share(node.page)
        sequence.pages = [node.page for node in nodes]
        sequence.prefix_node = nodes[-1] if nodes else self.pool.root
        sequence.num_remembered_pages = len(nodes)
        if sequence.swap_slots:
            self._swap_in(sequence, schedule)
            return True
        sequence.num_computed_tokens = len(nodes) * self.pool.page_size
        if sequence.num_preemptions == 0:
            self._count_cached(sequence, sequence.num_computed_tokens)
        return True

    def _swap_out(self, sequence: Sequence, schedule: Schedule) -> bool:
        """Have a sequence's computed pages copied to host memory, if there are slots for all of them."""
        pages = sequence.pages[: self.pool.pages_for(sequence.num_computed_tokens)]
        if len(pages) > len(self._free_slots):
            return False
        # A copy that was scheduled for its sake is not made any more.
        copies = [copy for item in schedule.items if item.sequence is sequence for copy in item.page_copies]
        originals = {destination: source for source, destination in copies}
        sequence.swap_slots = [self._free_slots.pop() for _ in pages]
        schedule.swap_outs += [
            (originals.get(page, page), slot) for page, slot in zip(pages, sequence.swap_slots, strict=True)
        ]
        self.counts["num_swapped_out_pages"] += len(pages)
        return True

    def _swap_in(self, sequence: Sequence, schedule: Schedule) -> None:
        """Bring back a sequence's pages that the prefix cache has lost meanwhile."""
        slots = sequence.swap_slots[len(sequence.pages) :]
        pages = [self.pool.allocate() for _ in slots]
        sequence.pages += pages
        schedule.swap_ins += zip(slots, pages, strict=True)
        self.counts["num_swapped_in_pages"] += len(pages)
        self._free_swap_slots(sequence)

    def _free_swap_slots(self, sequence: Sequence) -> None:
        self._free_slots += sequence.swap_slots
        sequence.swap_slots = []

    def _can_fork(self, sequence: Sequence, schedule: Schedule) -> bool:
        """Whether a sequence's leader holds the whole prompt, computed in an earlier step."""
        leader = sequence.leader
        if leader is None or leader.status is not Status.RUNNING or sequence.output_token_ids or sequence.swap_slots:
            return False
        # After a preemption the leader may be in its prompt again.
        is_computing = any(item.sequence is leader and item.context_len < leader.prompt_len for item in schedule.items)
        return leader.num_computed_tokens >= leader.prompt_len and not is_computing

    def _fork(self, sequence: Sequence) -> bool:
        """Give a sequence its leader's prompt pages. Only the last prompt token is computed again, for its logits."""
        if self.pool.num_available < 1:  # for the copy of the last page
            return False
        sequence.pages = sequence.leader.pages[: self.pool.pages_for(sequence.prompt_len)]
        for page in sequence.pages:
            self.pool.share(page)
        nodes = self.pool.match(sequence.token_ids, sequence.salt)
        sequence.prefix_node = nodes[-1] if nodes else self.pool.root
        sequence.num_remembered_pages = len(nodes)
        sequence.num_computed_tokens = sequence.prompt_len - 1
        self._count_cached(sequence, sequence.num_computed_tokens)
        return True

    def _count_cached(self, sequence: Sequence, num_tokens: int) -> None:
        sequence.num_cached_tokens = num_tokens
        self.counts["num_cached_tokens"] += num_tokens

    def _enqueue(self, sequence: Sequence) -> None:
        heapq.heappush(self._waiting, (sequence.rank, sequence))

    def _dequeue(self, sequence: Sequence) -> None:
        if sequence.leader is not None and sequence in sequence.leader.forks:
            sequence.leader.forks.remove(sequence)
        else:
            self._waiting.remove((sequence.rank, sequence))
            heapq.heapify(self._waiting)

    def _release_forks(self, leader: Sequence) -> None:
        forks, leader.forks = leader.forks, []
        for fork in forks:
            self._enqueue(fork)

    def _num_pages_missing(self, sequence: Sequence, num_new: int) -> int:
        """Pages to allocate before the sequence can compute its next tokens, copies of shared ones included."""
        num_missing = self.pool.pages_for(sequence.num_computed_tokens + num_new) - len(sequence.pages)
        first = sequence.num_computed_tokens // self.pool.page_size
        if first < len(sequence.pages) and not self.pool.is_writable(sequence.pages[first]):
            num_missing += 1
        return num_missing

    def _place(self, sequence: Sequence, num_new: int, schedule: Schedule, drafts: tuple[int, ...] = ()) -> None:
        context_len = sequence.num_computed_tokens
        first = context_len // self.pool.page_size
        copy = self.pool.make_writable(sequence.pages, first) if first < len(sequence.pages) else None
        while len(sequence.pages) < self.pool.pages_for(context_len + num_new):
            sequence.pages.append(self.pool.allocate())
        samples = context_len + num_new == sequence.num_tokens + len(drafts)
        copies = (copy,) if copy else ()
        row = sequence.previous_row
        schedule.append(ScheduledSequence(sequence, context_len, num_new, samples, row, drafts, copies))

    def _commit(self, item: ScheduledSequence) -> None:
        """Count an item's tokens as computed and enter the pages they fill into the prefix tree."""
        sequence, size = item.sequence, self.pool.page_size
        sequence.num_computed_tokens += item.num_new_tokens
        num_full = min(sequence.num_computed_tokens, len(sequence.token_ids)) // size
        for i in range(sequence.num_remembered_pages, num_full):
            tokens = sequence.token_ids[i * size : (i + 1) * size]
            sequence.prefix_node = self.pool.remember(sequence.prefix_node, tokens, sequence.pages[i], sequence.salt)
        sequence.num_remembered_pages = max(num_full, sequence.num_remembered_pages)

    def _release(self, sequence: Sequence) -> None:
        self.pool.release(sequence.pages)
        sequence.pages = []
        sequence.prefix_node = None
        sequence.num_remembered_pages = 0
