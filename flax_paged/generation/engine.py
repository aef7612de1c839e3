"""`Engine`: continuous batching of many requests over one module."""

import dataclasses
import functools
import itertools
import logging
import random
import time
from collections.abc import Collection, Iterator
from collections.abc import Sequence as Sequences
from typing import Any

from flax import nnx
from tqdm import tqdm

from flax_paged.generation.drafts import NgramDrafter
from flax_paged.generation.grammar import JsonGrammars
from flax_paged.generation.outputs import LogprobsOfToken, RequestOutput
from flax_paged.generation.pages import PagePool
from flax_paged.generation.prompts import Prompt, as_list_of_prompts, tokenize_prompt
from flax_paged.generation.request import Request
from flax_paged.generation.runner import LaunchedStep, ModelRunner, StepResult
from flax_paged.generation.sampling_params import SamplingParams
from flax_paged.generation.scheduler import Schedule, Scheduler
from flax_paged.generation.sequence import Sequence
from flax_paged.generation.stats import EngineStats
from flax_paged.generation.text import Tokenizer

_LOGGER = logging.getLogger(__name__)


class Engine:
    """Generates text with any module that can be called as `model(tokens, metadata) -> logits`.

        engine = Engine(model, tokenizer, num_pages=1024)
        for output in engine.generate(["The capital of France is"], SamplingParams(temperature=0)):
            print(output.outputs[0].text)

    Requests are batched continuously: each step decodes the running ones and fills the rest of its token budget with
    pieces of waiting prompts. The host prepares a step while the one before runs on the device.

    The module is not changed. The engine has its own module over the same weight arrays, with its own cache, so several
    engines can share one model; after training steps, `update_weights` brings the new weights in.

    Args:
        model: An `nnx.Module` with `PagedAttention` layers, called as `model(tokens, metadata) -> logits`: i32[T] to
            [N, V].
        tokenizer: For prompts and answers as text; None for token ids only.
        num_pages: Pages in the pool; None for as many as every sequence needs at full length, within 1 GiB.
        page_size: Tokens in a page.
        max_num_seqs: Most sequences in a step.
        max_num_batched_tokens: Most tokens in a step.
        max_model_len: Most tokens of a sequence, prompt and answer.
        max_prefill_chunk: Most tokens of one prompt in a step; None for the whole budget.
        enable_prefix_caching: Reuse pages of earlier prompts that begin with the same tokens.
        num_speculative_tokens: Guess up to this many next tokens of a decoding sequence from what it said before, and
            verify them in one step. No token changes; text that repeats itself comes faster. 0 is off. With it, the
            host no longer works ahead of the device.
        decode_steps_per_call: Run up to this many decode steps in one compiled call. No token changes; the host has
            less to do, but new requests and tokens wait for the end of a call, and what a call computes past the end of
            an answer is lost. See `Scheduler` for when it runs fewer.
        max_logprobs: Most `logprobs` and `prompt_logprobs` a request may ask for.
        max_logit_entries: Most tokens of a request whose logits are changed one by one: logit_bias, allowed_token_ids,
            bad_words, and the ids that min_tokens bans.
        eos_token_ids: Ids that end an answer; None for the tokenizer's.
        kv_cache_dtype: Dtype of the cache; None for that of the model.
        swap_space: Bytes of host memory for the pages of preempted sequences, which are then copied there and back
            instead of being computed again; a sequence that does not fit any more is computed again. 0 always computes
            again: right on a CPU, where the same memory serves better as more pages.
        seed: Makes the seeds of unseeded requests, drawn in order of arrival, reproducible.

    Raises:
        ValueError: Sizes that cannot work together, or a model that does not return logits `[N, V]`.
    """

    def __init__(
        self,
        model: nnx.Module,
        tokenizer: Tokenizer | None = None,
        *,
        num_pages: int | None = None,
        page_size: int = 16,
        max_num_seqs: int = 32,
        max_num_batched_tokens: int = 512,
        max_model_len: int = 2048,
        max_prefill_chunk: int | None = None,
        enable_prefix_caching: bool = True,
        num_speculative_tokens: int = 0,
        decode_steps_per_call: int = 1,
        max_logprobs: int = 20,
        max_logit_entries: int = 512,
        eos_token_ids: Collection[int] | None = None,
        kv_cache_dtype: Any = None,
        swap_space: int = 0,
        seed: int | None = None,
    ):
        if max_model_len < 2:
            raise ValueError(f"Engine({max_model_len=}): expected at least 2, a prompt token and a new one.")
        if page_size < 1:
            raise ValueError(f"Engine({page_size=}): expected at least 1.")
        for name, value in (
            ("num_speculative_tokens", num_speculative_tokens),
            ("max_logprobs", max_logprobs),
            ("max_logit_entries", max_logit_entries),
            ("swap_space", swap_space),
        ):
            if value < 0:
                raise ValueError(f"Engine({name}={value}): expected 0 or more.")
        if decode_steps_per_call > 1 and num_speculative_tokens:
            raise ValueError(
                f"Engine({decode_steps_per_call=}, {num_speculative_tokens=}): expected one of the two; guesses are"
                " made on the host, between steps."
            )
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len
        self.eos_token_ids = frozenset(_eos_token_ids(tokenizer, eos_token_ids))
        self._runner = ModelRunner(
            model,
            num_pages=num_pages,
            page_size=page_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            max_logprobs=max_logprobs,
            max_logit_entries=max_logit_entries,
            has_drafts=num_speculative_tokens > 0,
            decode_steps_per_call=decode_steps_per_call,
            kv_cache_dtype=kv_cache_dtype,
            swap_space=swap_space,
        )
        self.vocab_size = self._runner.vocab_size
        if not all(0 <= token_id < self.vocab_size for token_id in eos_token_ids or ()):
            raise ValueError(f"Engine({eos_token_ids=}): expected ids of the vocabulary, below {self.vocab_size}.")
        self.scheduler = Scheduler(
            PagePool(self._runner.num_pages, page_size, prefix_caching=enable_prefix_caching),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_prefill_chunk=max_prefill_chunk,
            decode_steps_per_call=decode_steps_per_call,
            num_swap_slots=self._runner.num_swap_slots,
        )
        self._requests: dict[str, Request] = {}
        self._num_speculative_tokens = num_speculative_tokens
        self._max_logit_entries = max_logit_entries
        self._news: dict[str, Request] = {}  # requests of add_request that `step` has to report
        self._in_flight: LaunchedStep | None = None
        self._seeds = random.Random(seed)
        self._arrivals = itertools.count()

    # Requests

    def generate(
        self,
        prompts: Prompt | Sequences[Prompt],
        sampling_params: SamplingParams | Sequences[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Answer prompts and return when all are done.

        Args:
            prompts: A text, a list of token ids, or a list of such prompts.
            sampling_params: For all prompts, or a list with one for each; None for the defaults.
            progress: Show a progress bar on stderr, if that is a terminal.

        Returns:
            One RequestOutput a prompt, in the order of the prompts.

        Raises:
            ValueError: A prompt cannot be run; then none has been.
        """
        requests = self._submit(prompts, sampling_params)
        quiet = None if progress else True  # None: quiet where stderr is not a terminal
        with tqdm(total=len(requests), desc="Generating", unit="prompt", disable=quiet) as bar:
            for _ in self._run(requests):
                if news := sum(request.is_finished for request in requests) - bar.n:
                    bar.update(news)
        return [request.output() for request in requests]

    def stream(
        self,
        prompts: Prompt | Sequences[Prompt],
        sampling_params: SamplingParams | Sequences[SamplingParams] | None = None,
    ) -> Iterator[RequestOutput]:
        """Answer prompts piece by piece.

        Each RequestOutput holds what is new since the last one of the same request: `outputs[i].text` and
        `outputs[i].token_ids` are increments, to be joined. The last one of a request has `finished` set. Closing the
        iterator aborts what is not finished.

        Args:
            prompts: As in `generate`.
            sampling_params: As in `generate`.

        Returns:
            An iterator. Its requests are numbered: a later prompt has a larger `int(request_id)`.

        Raises:
            ValueError: A prompt cannot be run; then none has been.
        """
        requests = self._submit(prompts, sampling_params)
        return self._stream(requests)

    def add_request(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> str:
        """Queue one request, for a loop of your own over `step`.

        Args:
            prompt: A text or a list of token ids.
            sampling_params: None for the defaults.
            request_id: Its name; None for a number.
            priority: Requests of a lower value go first.
            cache_salt: Only requests of the same salt share cached prefixes, so that nobody learns from the speed of an
                answer what others asked.

        Returns:
            The request's name.

        Raises:
            ValueError: The request cannot be run; the others go on.
        """
        request = self._make_request(prompt, sampling_params or SamplingParams(), request_id, priority, cache_salt)
        request.is_polled = True
        self._enqueue(request)
        return request.request_id

    def compile_json_schema(self, schema: str) -> None:
        """Compile the schema of a request to come, which takes up to a second; any thread may call this.

        Args:
            schema: As `SamplingParams.json_schema` holds it.

        Raises:
            ValueError: The schema cannot be followed.
        """
        self._grammars.compile(schema)

    def abort(self, request_id: str) -> None:
        """End a request now; its pages are free at once. Names of finished or unknown requests are ignored."""
        self._news.pop(request_id, None)
        request = self._requests.pop(request_id, None)
        if request is not None:
            for answer in request.answers:
                if not answer.sequence.is_finished:
                    self.scheduler.finish(answer.sequence, "abort")
            request.metrics.finished_time = time.monotonic()

    def is_waiting(self, request_id: str) -> bool:
        """Whether a request has not been part of any step yet. Finished and unknown requests do not wait."""
        request = self._requests.get(request_id)
        return request is not None and request.metrics.first_scheduled_time is None

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether any request is not finished, or its end not yet returned by `step`."""
        return bool(self._requests or self._news)

    # Steps

    def step(self) -> list[RequestOutput]:
        """Launch the next step, and return what the one before it brought to the requests of `add_request`.

        Returns:
            Each request's new text and tokens; the last of a request has `finished` set.

        Raises:
            RuntimeError: The step failed. The engine is usable: its requests are waiting, to be computed again.
        """
        self._advance()
        news, self._news = self._news, {}
        return [request.increment() for request in news.values() if request.has_news]

    def warmup(self, *, progress: bool = True) -> None:
        """Compile every bucket, so that no later step has to wait for the compiler.

        Args:
            progress: Show a progress bar on stderr, if that is a terminal.
        """
        self._runner.warmup(progress=progress)

    @property
    def num_traces(self) -> int:
        """How many step shapes have been compiled."""
        return self._runner.num_traces

    def stats(self) -> EngineStats:
        """Return counts of what the engine is doing and has done, and what waiting requests wait for."""
        scheduler, pool = self.scheduler, self.scheduler.pool
        counts = scheduler.counts
        limits = ("max_num_seqs", "max_num_batched_tokens", "num_pages")
        return EngineStats(
            num_running=len(scheduler.running),
            num_waiting=scheduler.num_waiting,
            waits_for=scheduler.waits_for if scheduler.num_waiting else None,
            num_steps_waited={limit: counts[f"steps waited for {limit}"] for limit in limits},
            num_free_pages=pool.num_available - pool.num_cached,
            num_cached_pages=pool.num_cached,
            num_live_pages=pool.num_live,
            num_steps=counts["num_steps"],
            num_computed_tokens=counts["num_computed_tokens"],
            num_cached_tokens=counts["num_cached_tokens"],
            num_sampled_tokens=counts["num_sampled_tokens"],
            num_preemptions=counts["num_preemptions"],
            num_swapped_pages=scheduler.num_swapped_pages,
            num_swapped_out_pages=counts["num_swapped_out_pages"],
            num_swapped_in_pages=counts["num_swapped_in_pages"],
            num_draft_tokens=counts["num_draft_tokens"],
            num_right_draft_tokens=counts["num_right_draft_tokens"],
        )

    def update_weights(self, weights: nnx.Module | nnx.State) -> None:
        """Take new weights without compiling again. Cached prefixes are forgotten and running requests recomputed.

        Args:
            weights: A module of the model's structure, or the `nnx.State` of its weights.

        Raises:
            ValueError: The weights do not fit the model; nothing is changed then.
        """
        self._runner.update_weights(weights)
        self._settle()
        self.scheduler.preempt_all()

    def _advance(self) -> None:
        """Schedule and launch a step, and read the one before."""
        try:
            schedule = self._schedule()
            self._runner.swap(schedule)
            launched = self._launch(schedule) if schedule.items else None
            finished, self._in_flight = self._in_flight, launched
            if finished:
                self._postprocess(finished)
            if self._num_speculative_tokens or any(item.sequence.grammar for item in schedule.items):
                self._settle()  # what to guess, or may be said, next depends on what was said
        except Exception:
            self._recover()
            raise

    def _schedule(self) -> Schedule:
        """Schedule a step, and log it when what requests wait for changes or one is preempted."""
        waited_for = self.scheduler.waits_for
        schedule = self.scheduler.schedule()
        if schedule.preempted or self.scheduler.waits_for not in (None, waited_for):
            stats = self.stats()
            _LOGGER.info(
                "%d sequences wait for %s; %d running, %d of %d pages live, preempted: %s",
                stats.num_waiting,
                stats.waits_for,
                stats.num_running,
                stats.num_live_pages,
                self.scheduler.pool.num_pages,
                [sequence.request_id for sequence in schedule.preempted],
                extra={"engine": dataclasses.asdict(stats)},
            )
        return schedule

    def _launch(self, schedule: Schedule) -> LaunchedStep:
        now = time.monotonic()
        for item in schedule.items:
            metrics = self._requests[item.sequence.request_id].metrics
            metrics.first_scheduled_time = metrics.first_scheduled_time or now
        return self._runner.launch(schedule)

    def _postprocess(self, launched: LaunchedStep) -> None:
        for result in launched.results():
            sequence = result.item.sequence
            if sequence.is_finished:
                continue
            request = self._requests[sequence.request_id]
            if result.item.reports_prompt:
                self._report_prompt(request, result)
            if result.item.samples:
                self._report_tokens(request, result)
            if request.is_polled:
                self._news[request.request_id] = request
            if request.is_finished:
                del self._requests[request.request_id]

    def _report_tokens(self, request: Request, result: StepResult) -> None:
        """Give a sequence its tokens, up to the first that ends it."""
        sequence = result.item.sequence
        num_top = sequence.params.logprobs
        num_new = 0
        for row, token_id in result.accepted():
            logprobs = None if num_top is None else self._with_texts(result.logprobs(row, token_id, num_top))
            request.append(sequence, token_id, logprobs)
            num_new += 1
            if sequence.finish_reason:
                break
        self.scheduler.counts["num_sampled_tokens"] += num_new
        if num_drafts := len(result.item.draft_token_ids):
            self.scheduler.reject_drafts(sequence, num_drafts - (num_new - 1))
            self.scheduler.counts["num_right_draft_tokens"] += num_new - 1
        if sequence.finish_reason:
            self.scheduler.finish(sequence, sequence.finish_reason)

    def _report_prompt(self, request: Request, result: StepResult) -> None:
        item, sequence = result.item, result.item.sequence
        row = result.rows[0] + 1 - item.num_new_tokens
        for position in range(
            item.context_len + 1, min(item.context_len + item.num_new_tokens + 1, sequence.prompt_len)
        ):
            logprobs = result.logprobs(row, sequence.token_ids[position], sequence.params.prompt_logprobs)
            request.add_prompt_logprobs(position, self._with_texts(logprobs))
            row += 1

    def _with_texts(self, logprobs: LogprobsOfToken) -> LogprobsOfToken:
        if self.tokenizer is None:
            return logprobs
        return {
            token_id: dataclasses.replace(entry, decoded_token=self.tokenizer.decode([token_id], False))
            for token_id, entry in logprobs.items()
        }

    def _settle(self) -> None:
        """Read the step in flight, so that the host knows every token."""
        launched, self._in_flight = self._in_flight, None
        if launched:
            self._postprocess(launched)

    def _recover(self) -> None:
        """After a failed step: an empty cache, and every unfinished request to be computed again."""
        self._in_flight = None
        self._runner.reset()
        self.scheduler.preempt_all()
        for request in self._requests.values():
            for answer in request.answers:
                answer.sequence.num_pending_tokens = 0

    # Requests, inside

    def _run(self, requests: list[Request]) -> Iterator[None]:
        """Step until the requests are finished; abort them if the caller stops or a step fails."""
        try:
            yield  # before the first step: others' steps may have finished them already
            while not all(request.is_finished for request in requests):
                self._advance()
                yield
        finally:
            for request in requests:
                self.abort(request.request_id)

    def _stream(self, requests: list[Request]) -> Iterator[RequestOutput]:
        for _ in self._run(requests):
            for request in requests:
                if request.has_news:
                    yield request.increment()
        # What others' steps brought while the caller held the last piece.
        yield from (request.increment() for request in requests if request.has_news)

    def _submit(
        self, prompts: Prompt | Sequences[Prompt], sampling_params: SamplingParams | Sequences[SamplingParams] | None
    ) -> list[Request]:
        prompts = as_list_of_prompts(prompts)
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            sampling_params = [sampling_params or SamplingParams()] * len(prompts)
        if len(sampling_params) != len(prompts):
            raise ValueError(
                f"{len(prompts)} prompts but {len(sampling_params)} sampling_params; expected one for each."
            )
        requests = []
        for i, (prompt, params) in enumerate(zip(prompts, sampling_params, strict=True)):
            try:
                requests.append(self._make_request(prompt, params))
            except ValueError as error:
                raise ValueError(f"prompts[{i}]: {error}") from error
        for request in requests:
            self._enqueue(request)
        return requests

    def _enqueue(self, request: Request) -> None:
        self._requests[request.request_id] = request
        for answer in request.answers:
            self.scheduler.add(answer.sequence)

    def _make_request(
        self,
        prompt: Prompt,
        params: SamplingParams,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> Request:
        if not isinstance(params, SamplingParams):
            raise TypeError(f"sampling_params={params!r}: expected SamplingParams.")
        text, token_ids = tokenize_prompt(
            prompt, self.tokenizer, vocab_size=self.vocab_size, max_model_len=self.max_model_len
        )
        arrival = next(self._arrivals)
        request_id = str(arrival) if request_id is None else request_id
        if request_id in self._requests:
            raise ValueError(f"request_id={request_id!r} is in use by a request that is not finished.")
        self._check_params(params)
        grammars = [self._grammars.compile(params.json_schema) for _ in range(params.n)] if params.json_schema else []
        seed = self._seeds.getrandbits(64) if params.seed is None else params.seed
        max_num_tokens = self.max_model_len
        if params.max_tokens is not None:
            max_num_tokens = min(len(token_ids) + params.max_tokens, max_num_tokens)
        sequences = [
            Sequence(
                request_id,
                token_ids,
                params,
                seed=(seed + index) % 2**64,
                max_num_tokens=max_num_tokens,
                eos_token_ids=() if params.ignore_eos else self.eos_token_ids,
                priority=priority,
                arrival=arrival,
                index=index,
                salt=(cache_salt, params.adapter_id),
                bad_words=self._bad_words(params),
                grammar=grammars[index] if grammars else None,
            )
            for index in range(params.n)
        ]
        self.scheduler.check_fits(sequences[0])
        if (num_entries := sequences[0].rules.max_entries) > self._max_logit_entries:
            raise ValueError(
                f"logit_bias, allowed_token_ids, bad_words and min_tokens change the logits of {num_entries} tokens,"
                f" more than the engine's max_logit_entries={self._max_logit_entries}."
            )
        for sequence in sequences:
            sequence.leader = sequences[0] if sequence.index else None
            if self._num_speculative_tokens and sequence.grammar is None:
                sequence.drafter = NgramDrafter(self._num_speculative_tokens)
        return Request(request_id, text, sequences, self.tokenizer)

    def _check_params(self, params: SamplingParams) -> None:
        """Check what depends on the engine."""
        for name in ("logprobs", "prompt_logprobs"):
            if (getattr(params, name) or 0) > self._runner.max_logprobs:
                limit = self._runner.max_logprobs
                raise ValueError(f"{name}={getattr(params, name)} is more than the engine's max_logprobs={limit}.")
        if params.adapter_id > self._runner.num_adapters:
            raise ValueError(
                f"adapter_id={params.adapter_id}: the model has {self._runner.num_adapters} stacked adapters (see"
                " flax_paged.training.stack_lora); expected at most that, or 0 for the model alone."
            )
        if params.prompt_logprobs is not None and not self._runner.buckets.has_all_logits:
            raise ValueError("prompt_logprobs needs an engine with max_logprobs of at least 1.")
        if self.tokenizer is None and (params.stop or params.bad_words):
            raise ValueError("stop and bad_words are texts, but the engine has no tokenizer; use stop_token_ids.")
        named = (*params.stop_token_ids, *(params.logit_bias or ()), *(params.allowed_token_ids or ()))
        for token_id in named:
            if token_id >= self.vocab_size:
                raise ValueError(f"The sampling params name token id {token_id}; expected less than {self.vocab_size}.")

    @functools.cached_property
    def _grammars(self) -> JsonGrammars:
        return JsonGrammars(self.tokenizer, self.vocab_size, self.eos_token_ids)

    def _bad_words(self, params: SamplingParams) -> list[tuple[int, ...]]:
        """Token ids of each bad word, as it is written at the beginning of a text and after a space."""
        words = [text for word in params.bad_words for text in (word, " " + word.lstrip())]
        encoded = {tuple(self.tokenizer.encode(word, add_special_tokens=False)) for word in words}
        return sorted(ids for ids in encoded if ids)


def _eos_token_ids(tokenizer: Tokenizer | None, eos_token_ids: Collection[int] | None) -> Collection[int]:
    if eos_token_ids is not None:
        return eos_token_ids
    return tokenizer.eos_token_ids if tokenizer is not None else ()
