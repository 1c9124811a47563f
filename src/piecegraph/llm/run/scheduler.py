"""Which tokens run next: continuous batching with chunked prefill, prefix reuse and preemption.

Requests come in; :meth:`Scheduler.schedule` says what the next step computes, :meth:`Scheduler.commit` takes the tokens
that were chosen. Both are plain Python on numbers; no tensor is seen here.

Note [Arrival order]
~~~~~~~~~~~~~~~~~~~~
Requests are admitted strictly in the order of their arrival, and preempted in the opposite order. So everything that
runs arrived before everything that waits, the running list is in order of arrival, and only its last request can be in
the middle of its prompt. Hence: the victim of a preemption is the end of the running list, a preempted request goes to
the front of the queue, and nobody is overtaken, neither a long prompt by short ones nor an old request by new ones.

Note [Progress]
~~~~~~~~~~~~~~~
Every step moves on. The first running request is never preempted for another, and alone it always fits, because a
request that would not fit alone is refused when it arrives. The tokens of a step are at least as many as the sequences
that may run, so a prompt gets at least one token of every step, however many others decode.

Note [Full steps]
~~~~~~~~~~~~~~~~~
A step is padded to the next of the sizes that are recorded, and padding takes as long as tokens do. So while requests
are waiting for a place, a step has no more tokens of prompts than fill such a size, and the rest goes on in the next
step. Then a few sizes serve as well as many. Nobody is served later for that but those who are in their prompts, by a
step or two: if too little of them would be computed, the step is padded. Where nobody waits, a request has its first
token soonest if its prompt is not cut.

Note [Several answers]
~~~~~~~~~~~~~~~~~~~~~~
Of several answers to one prompt, the first computes it, and the others are let in when it is in the cache, where they
find it. Until then nobody is let in behind them either: the prompt takes all tokens of a step but those of its last.

Note [Scheduling ahead]
~~~~~~~~~~~~~~~~~~~~~~~
The step behind one that has not been committed is known but for its tokens: which requests reach their length is known,
too, and who takes their places. A request that ends otherwise, at a token nobody could foresee, is computed once too
often, and ``commit`` ignores it. Until the step before is committed, those that end with it are still in the running
list and hold their blocks; their places are given away already. Nobody is preempted ahead: without blocks there is no
such step. Whatever is freed in between may be given to a later step at once, as the device runs one after the other.
"""

from __future__ import annotations

import bisect
import itertools
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from piecegraph.errors import ConfigError, RequestError
from piecegraph.llm.cache.paged import PagedCache
from piecegraph.llm.run.endings import Endings, bad_token
from piecegraph.llm.run.request import FinishReason, Request
from piecegraph.llm.run.step import MAX_PROMPTS, StepPlan, Work
from piecegraph.llm.run.stop import IncrementalText

_LEAST_SHARE = 0.25
"""Of the tokens of prompts that a step could compute: see Note [Full steps]. If steps took as long as they have rows,
1000 requests would take 1.03 times as long where powers of two are recorded as where all sizes are; with half 1.05.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """What a step and a request may be at most."""

    max_num_seqs: int
    max_batch_tokens: int
    max_model_len: int
    """Tokens of a request, prompt and generated."""
    vocab_size: int

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_batch_tokens", "max_model_len", "vocab_size"):
            if getattr(self, name) < 1:
                raise ConfigError("PG101", f"{name} is {getattr(self, name)!r}", why="it must be a positive integer")
        if self.max_batch_tokens < self.max_num_seqs:
            raise ConfigError(
                "PG101",
                f"max_batch_tokens is {self.max_batch_tokens}, less than max_num_seqs ({self.max_num_seqs})",
                why="sequences that decode would take all tokens of a step, and prompts would wait for ever",
                hint="raise max_batch_tokens or lower max_num_seqs",
            )


class Scheduler:
    """Decides step by step what runs.

    Args:
        limits: see there.
        cache: the blocks of all groups; empty for a model without attention.
        sizes: tells which sizes steps are padded to now, in ascending order; see Note [Full steps].
        eos_token_ids: tokens that end a request.
        needs_state: give each running sequence a state slot from 1 to ``max_num_seqs`` (0 belongs to the padding).
        release_state: told of every slot that is free again.
        text_of: what reads the text of a request with stop texts, token by token; raises if that cannot be done. None:
            whoever commits looks for them, and calls :meth:`finish`.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        cache: PagedCache,
        *,
        sizes: Callable[[], Sequence[int]] = tuple,
        eos_token_ids: Collection[int] = (),
        needs_state: bool = False,
        release_state: Callable[[int], None] | None = None,
        text_of: Callable[[Request], IncrementalText] | None = None,
    ) -> None:
        if needs_state and cache.prefix_cache:
            raise ConfigError(
                "PG101",
                "prefix_cache is on for a model with recurrent state",
                why="blocks of keys and values do not bring back the state at the end of a prefix",
                hint="set prefix_cache=False",
            )
        self.limits = limits
        self.cache = cache
        self._sizes = sizes
        self.eos_token_ids = frozenset(eos_token_ids)
        self.running: list[Request] = []
        self.waiting: deque[Request] = deque()
        self._requests: dict[str, Request] = {}
        self.needs_state = needs_state
        self.release_state = release_state
        self.is_altered: Callable[[], bool] = lambda: False
        """Whether steps compute something else than the model, so that no prefix is taken from the cache."""
        self._endings = Endings(text_of)
        self._free_slots = self._all_slots()
        self._rows: list[Request] = []
        """The requests of the last plan in its order; see :func:`_keep_rows`."""
        self._is_steady = False
        """Nothing but decoding happened since the last plan, and nobody can be admitted."""
        self._blocked_at = -1
        """``cache.num_releases()`` when the front of the queue last did not fit."""

    @property
    def num_unfinished(self) -> int:
        return len(self._requests)

    @property
    def num_waiting(self) -> int:
        """Requests that have no place yet, or have lost it."""
        return len(self._requests) - len(self.running)

    # ------------------------------------------------------------------ requests come and go

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            RequestError: it can never be served. Nothing has changed; other requests are not touched.
            ModelError: it has stop texts, and there is no tokenizer.
        """
        if request.id in self._requests:
            raise RequestError("PG656", f"a request {request.id!r} is already there", hint="choose another id")
        if request.is_done:
            raise RequestError("PG656", f"request {request.id!r} has ended", hint="make a new one")
        self.check_fits(request)
        self._endings.watch(request)
        request.max_len = min(request.max_len, self.limits.max_model_len)
        if not request.params.ignore_eos:
            request.stop_ids |= self.eos_token_ids
        if request.adjustments is not None:
            request.adjustments.hold_back(request.stop_ids)
        self._requests[request.id] = request
        self.waiting.append(request)
        self._is_steady = False

    def check_fits(self, request: Request) -> None:
        """Raise a RequestError if a request can never be served. Any thread may ask."""
        limits, length = self.limits, request.num_prompt
        if length >= limits.max_model_len:
            raise RequestError(
                "PG652",
                f"the prompt of request {request.id!r} has {length} tokens",
                why=f"max_model_len is {limits.max_model_len}, and at least one token is to be generated",
                hint="shorten the prompt or raise max_model_len",
            )
        if not request.has_tokens_below(limits.vocab_size):
            ends = min(request.tokens), max(request.tokens)
            token = next(token for token in ends if not 0 <= token < limits.vocab_size)
            raise RequestError(
                "PG653",
                f"the prompt of request {request.id!r} holds token {token}",
                why=f"the vocabulary has tokens 0 to {limits.vocab_size - 1}",
                hint="use the tokenizer of this model",
            )
        for name, token in request.params.named_tokens.items():
            if token >= limits.vocab_size:
                why = f"the vocabulary has tokens 0 to {limits.vocab_size - 1}"
                raise RequestError("PG653", f"{name} of request {request.id!r} names token {token}", why=why)
        # The last token is never computed: nothing follows it.
        longest = min(request.max_len, limits.max_model_len) - 1
        if not self.cache.can_hold(longest):
            raise RequestError(
                "PG654",
                f"request {request.id!r} may need {longest} tokens of cache",
                why="the cache cannot hold as many, even for one request alone",
                hint="lower max_new_tokens or give the cache more memory",
            )

    def abort(self, request_id: str) -> bool:
        """End a request now; False if there is none of this id."""
        request = self._requests.get(request_id)
        if request is None:
            return False
        self.finish(request, "abort")
        return True

    def finish(self, request: Request, reason: FinishReason, error: RequestError | None = None) -> None:
        """End a request and free what it holds: at a stop text, by ``abort``, or with an error of its own."""
        if request.is_done:
            return
        was_running = request.state == "running"
        request.end(reason, error)
        self._endings.forget(request)
        del self._requests[request.id]
        if was_running:
            self._let_go(request)
            self.running.remove(request)
        self._blocked_at = -1
        # One that waits stays in the queue until it comes to the front: removing it there would take a search.
        self._is_steady = False

    def start_over(self) -> list[Request]:
        """Compute anew whatever runs, and return it: a step has failed, and what it left in caches and states is not
        known.

        It may have failed anywhere, also between two lines of this class (Ctrl-C). So nothing is read here but the
        requests themselves, which lie in order of arrival. Their tokens are kept, as in every preemption.
        """
        self._requests = {request.id: request for request in self._requests.values() if not request.is_done}
        ran = [request for request in self._requests.values() if request.state == "running"]
        for request in ran:
            request.num_preemptions += 1
        for request in self._requests.values():
            request.num_delivered = max(request.num_delivered, request.num_computed)
            request.state, request.blocks, request.num_computed, request.state_slot = "waiting", None, 0, 0
        self.waiting = deque(self._requests.values())
        self.running = []
        self._rows = []
        self._is_steady, self._blocked_at = False, -1
        self.cache.reset()
        self._free_slots = self._all_slots()
        if self.release_state is not None:
            for slot in self._free_slots or ():
                self.release_state(slot)
        return ran

    # ------------------------------------------------------------------ one step

    def schedule(self) -> StepPlan | None:
        """What to compute next, or None if there is nothing to do. Each plan is committed before the next is made."""
        if self._is_steady and self.cache.has_free(len(self.running)) and not self._may_admit():
            works = self._steady_decode()
            return StepPlan(works, len(works), "decode")
        return self._schedule_anew()

    def schedule_ahead(self, plan: StepPlan) -> StepPlan | None:
        """The step behind one that has not been committed yet, if it can be known: see Note [Scheduling ahead]."""
        works: list[Work] = []
        without_room: list[Work] = []
        in_prompt: Work | None = None
        num_ending = 0
        for work in plan.works:
            request, start, num_tokens, samples = work
            blocks = request.blocks
            if blocks is None:
                continue  # it has ended
            if not samples:
                in_prompt = work
            elif len(request.tokens) + 1 >= request.max_len:
                num_ending += 1
            else:
                following = Work(request, start + num_tokens, 1, True)
                works.append(following)
                if following.start >= blocks.capacity:
                    without_room.append(following)
        if len(works) + num_ending + (in_prompt is not None) < len(self.running):
            return None  # somebody waits for a block in the middle of a prompt
        num_decodes = len(works)
        num_left = 0 if in_prompt is None else len(in_prompt.request.tokens) - in_prompt.start - in_prompt.num_tokens
        budget = self._most_tokens(num_decodes, num_left, num_ending) - num_decodes
        if not self.cache.has_free(len(without_room) + self._blocks_for(in_prompt, budget)):
            return None
        for request, start, _, _ in without_room:
            self._make_room(request, start)
        if in_prompt is not None:
            start = in_prompt.start + in_prompt.num_tokens
            budget -= self._prefill(in_prompt.request, start, budget, works)
        self._admit_waiting(budget, works, num_decodes, num_ending)
        if not works:
            return None
        if num_decodes == len(works) == len(plan.works):  # as they were
            return StepPlan(tuple(works), num_decodes, "decode", range(num_decodes))
        return self._make_plan(works, num_decodes, len(self.running) - num_ending, behind=plan)

    def _blocks_for(self, in_prompt: Work | None, budget: int) -> int:
        """How many blocks the next part of a prompt takes of each group."""
        if in_prompt is None:
            return 0
        request, start, num_tokens, _ = in_prompt
        assert request.blocks is not None
        end = min(len(request.tokens), start + num_tokens + budget)
        return -(-max(0, end - request.blocks.capacity) // self.cache.block_size)

    def _may_admit(self, num_ending: int = 0) -> bool:
        """Whether it is worth trying to admit the front of the queue, in the place of those that are about to end."""
        return (
            len(self.waiting) > 0
            and len(self.running) - num_ending < self.limits.max_num_seqs
            and (not self.running or self._blocked_at != self.cache.num_releases())
        )

    def _steady_decode(self) -> tuple[Work, ...]:
        """The same sequences as before, one token each, in the same order."""
        works = []
        for request in self._rows:
            start, blocks = request.num_computed, request.blocks
            assert blocks is not None
            if start >= blocks.capacity:
                self._make_room(request, start)
            works.append(Work(request, start, 1, True))
        return tuple(works)

    def _make_room(self, request: Request, position: int) -> None:
        """For the next token of a request that decodes."""
        blocks = request.blocks
        assert blocks is not None
        self.cache.give_back(blocks, position)
        self.cache.extend(blocks, position + 1)

    def _schedule_anew(self) -> StepPlan | None:
        works, preempted = self._decodes()
        num_decodes = len(works)
        begun = self.running[-1] if num_decodes < len(self.running) else None
        num_left = 0 if begun is None else len(begun.tokens) - begun.num_computed
        budget = self._most_tokens(num_decodes, num_left) - num_decodes
        if begun is not None:
            budget -= self._prefill(begun, begun.num_computed, budget, works)
        self._admit_waiting(budget, works, num_decodes)
        if not works:
            assert not self._requests, "requests are left, but none can run"
            self._rows = []
            return None
        return self._make_plan(works, num_decodes, len(self.running), preempted=preempted)

    def _admit_waiting(self, budget: int, works: list[Work], num_decodes: int, num_ending: int = 0) -> None:
        """Let waiting requests fill the rest of a step.

        If a prompt stopped short for want of a block, or somebody was preempted for one, there is none for the next
        request either: admission asks for more than that.
        """
        while budget > 0 and len(works) - num_decodes < MAX_PROMPTS:
            if (request := self._next_waiting()) is None or self._is_being_computed(request):
                break
            if not self._may_admit(num_ending) or not self._admit(request):
                break
            budget -= self._prefill(request, request.num_computed, budget, works)

    def _most_tokens(self, num_decodes: int, num_left: int, num_ending: int = 0) -> int:
        """How many tokens the next step may have: see Note [Full steps].

        Args:
            num_decodes: sequences with one token each.
            num_left: tokens of the prompt that was begun with.
            num_ending: sequences whose places are given away.
        """
        most, sizes = self.limits.max_batch_tokens, self._sizes()
        num_places = self.limits.max_num_seqs - len(self.running) + num_ending
        if not sizes or len(self.waiting) <= num_places:
            return most
        if self._may_admit(num_ending):
            num_left += self._tokens_of_next(min(num_places, MAX_PROMPTS), most - num_decodes - num_left)
        place = bisect.bisect_right(sizes, min(num_decodes + num_left, most))
        size = sizes[place - 1] if place else 0
        return size if size - num_decodes > _LEAST_SHARE * num_left else most

    def _tokens_of_next(self, num_requests: int, enough: int) -> int:
        """How many tokens are to be computed of the prompts at the front of the queue; ``enough`` is not added to."""
        total = 0
        for request in itertools.islice(self.waiting, num_requests):
            if total >= enough or self._is_being_computed(request):
                break
            if not request.is_done:
                total += len(request.tokens) - self.cache.num_known_tokens(self._reusable_digests(request))
        return total

    def _make_plan(
        self,
        works: list[Work],
        num_decodes: int,
        num_running: int,
        *,
        behind: StepPlan | None = None,
        preempted: Sequence[Request] = (),
    ) -> StepPlan:
        """Give works their rows.

        Args:
            works: those that decode first.
            num_decodes: how many do.
            num_running: how many requests run in this step or will run in the next.
            behind: what is not committed yet.
            preempted: for whom there are no blocks.
        """
        # Those with one token come first: attention has a kernel for each kind.
        prompts = works[num_decodes:]
        rows = [*_keep_rows(self._rows, works[:num_decodes]), *prompts]
        self._rows = [work.request for work in rows]
        self._is_steady = num_decodes == len(rows) == num_running
        is_decode = all(work.num_tokens == 1 and work.start for work in prompts)
        num_tokens = num_decodes + sum(work.num_tokens for work in prompts)
        sources = None
        if behind is not None:
            row_of = {work.request: row for row, work in enumerate(behind.works) if work.samples}
            sources = tuple([row_of.get(request, -1) for request in self._rows])
        return StepPlan(tuple(rows), num_tokens, "decode" if is_decode else "mixed", sources, tuple(preempted))

    def _decodes(self) -> tuple[list[Work], list[Request]]:
        """One token for each request whose prompt is done, oldest first; the newest give way if blocks run out."""
        works: list[Work] = []
        preempted: list[Request] = []
        position = 0
        while position < len(self.running):
            request = self.running[position]
            start, blocks = request.num_computed, request.blocks
            assert blocks is not None
            if start + 1 < len(request.tokens):
                break  # in the middle of its prompt, so it is the last
            if start >= blocks.capacity:
                self.cache.give_back(blocks, start)
                while not self.cache.has_free(1) and request.state == "running":
                    preempted.append(self._preempt_newest())
                if request.state != "running":
                    break
                self.cache.extend(blocks, start + 1)
            works.append(Work(request, start, 1, True))
            position += 1
        return works, preempted

    def _prefill(self, request: Request, start: int, budget: int, works: list[Work]) -> int:
        """Plan as much of a prompt as budget and blocks allow; how many tokens that is."""
        blocks = request.blocks
        assert blocks is not None
        length = len(request.tokens)
        end = min(length, start + budget, self.cache.room(blocks))
        if end <= start:
            return 0
        self.cache.extend(blocks, end)
        works.append(Work(request, start, end - start, end == length))
        return end - start

    def _next_waiting(self) -> Request | None:
        while self.waiting:
            if not self.waiting[0].is_done:
                return self.waiting[0]
            self.waiting.popleft()
        return None

    def _is_being_computed(self, request: Request) -> bool:
        """Whether another request is about to put the prompt into the cache: see Note [Several answers]."""
        first = request.first_answer
        if first is None or first.is_done or first.num_computed >= first.num_prompt:
            return False
        return len(self._reusable_digests(request)) > 0

    def _admit(self, request: Request) -> bool:
        """Let the front of the queue run, if there is room for all its tokens and for one more block of each other.

        Room for all, although only a part is computed at once: a request that is let in and thrown out again has
        computed for nothing.
        """
        if self._free_slots is not None and not self._free_slots:
            return False  # all are held, some by requests that are about to end
        blocks = self.cache.begin(self._reusable_digests(request))
        missing = self.cache.num_missing(blocks, len(request.tokens))
        # Alone it fits, in small steps if need be.
        if self.running and not self.cache.has_free_each(missing, reserve=len(self.running)):
            self.cache.release(blocks)
            self._blocked_at = self.cache.num_releases()
            return False
        self.waiting.popleft()
        self.running.append(request)
        request.state = "running"
        request.blocks, request.num_computed = blocks, blocks.capacity
        if not request.num_preemptions:
            request.num_cached = blocks.capacity
        if self._free_slots is not None:
            request.state_slot = self._free_slots.pop()
        return True

    def _reusable_digests(self, request: Request) -> list[bytes]:
        """Digests of the blocks that need not be computed if they are known: the last token always is."""
        if not self.cache.prefix_cache or request.cache_key is None or self.is_altered():
            return []
        end = len(request.tokens) - 1
        if request.params.wants_every_row:
            end = min(end, request.num_delivered)
        digests = self.cache.digests(request.tokens, request.digests, request.cache_key, len(request.tokens))
        return digests[: end // self.cache.block_size]

    def _preempt_newest(self) -> Request:
        """See Note [Arrival order]. Nothing is lost but the cache: all tokens are kept and computed again."""
        request = self.running.pop()
        self._let_go(request)
        request.state = "waiting"
        request.num_delivered = max(request.num_delivered, request.num_computed)
        request.num_computed = 0
        request.num_preemptions += 1
        self.waiting.appendleft(request)
        self._blocked_at = -1
        return request

    def _all_slots(self) -> list[int] | None:
        return list(range(self.limits.max_num_seqs, 0, -1)) if self.needs_state else None

    def _let_go(self, request: Request) -> None:
        assert request.blocks is not None
        self.cache.release(request.blocks)
        request.blocks = None
        if self._free_slots is not None:
            self._free_slots.append(request.state_slot)
            if self.release_state is not None:
                self.release_state(request.state_slot)
            request.state_slot = 0

    # ------------------------------------------------------------------ the step has run

    def commit(self, plan: StepPlan, tokens: Sequence[int]) -> list[Request]:
        """Take the tokens of a step, one for each work: ignored where the work does not sample, negative where there is
        none (:data:`piecegraph.llm.run.sampling.BAD_LOGITS` and :data:`~piecegraph.llm.run.sampling.NO_TOKEN`).

        Returns:
            The requests that ended with this step.

        Raises:
            RequestError: there are more or fewer tokens than works. Nothing has changed.
        """
        if len(tokens) != len(plan.works):
            why = f"there are {len(tokens)} tokens for {len(plan.works)} sequences"
            raise RequestError("PG657", "the step cannot be committed", why=why, hint="give one token for each work")
        finished: list[Request] = []
        block_size, prefix_cache = self.cache.block_size, self.cache.prefix_cache
        vocab_size, watched, now = self.limits.vocab_size, self._endings.watched, time.perf_counter()
        if watched:
            self._endings.take_in_forms(plan.works, tokens, vocab_size)
        for work, token in zip(plan.works, tokens, strict=True):
            request, start, num_tokens, samples = work
            blocks = request.blocks
            if blocks is None:
                continue  # aborted while the step ran
            computed = request.num_computed = start + num_tokens
            request.num_steps += 1
            if prefix_cache and computed // block_size > blocks.num_registered:
                self._register(request)
            if num_tokens > 1 or not samples:  # one that decodes gives back when it needs its next block
                self.cache.give_back(blocks, computed)
            if samples:
                if not 0 <= token < vocab_size:
                    self.finish(request, "error", bad_token(request, token))
                    finished.append(request)
                    continue
                request.tokens.append(token)
                request.token_times.append(now)
                may_end = token in request.stop_ids or len(request.tokens) >= request.max_len
                if may_end or (watched and request.id in watched):
                    ending = self._endings.ending_of(request, token, self.eos_token_ids)
                    if ending is not None:
                        self.finish(request, *ending)
                        finished.append(request)
        return finished

    def _register(self, request: Request) -> None:
        if request.cache_key is not None and request.blocks is not None:
            num_blocks = request.num_computed // self.cache.block_size
            digests = self.cache.digests(request.tokens, request.digests, request.cache_key, request.num_computed)
            self.cache.register(request.blocks, digests[:num_blocks])

    def check(self) -> None:
        """Compare every record with every other, between two steps; for tests."""
        self.cache.check([request.blocks for request in self.running if request.blocks is not None])
        waiting = [request for request in self.waiting if not request.is_done]
        assert all(request.state == "running" for request in self.running)
        assert all(request.state == "waiting" and request.blocks is None for request in waiting)
        assert all(request.num_computed == 0 for request in waiting)
        assert {*self.running, *waiting} == set(self._requests.values())
        assert all(request.num_computed + 1 == len(request.tokens) for request in self.running[:-1])
        if self._free_slots is not None:
            slots = [*self._free_slots, *(request.state_slot for request in self.running)]
            assert sorted(slots) == list(range(1, self.limits.max_num_seqs + 1))


def _keep_rows(last: list[Request], works: list[Work]) -> list[Work]:
    """Order works so that a request keeps its row where it can: block tables are large, and a row that stays is not
    copied again.
    """
    left = {work.request: work for work in works}
    rows = [left.pop(request, None) for request in last[: len(works)]]
    rows += [None] * (len(works) - len(rows))
    rest = iter(left.values())
    return [work if work is not None else next(rest) for work in rows]
