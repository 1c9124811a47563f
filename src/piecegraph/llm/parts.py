"""A compiled model is given what it needs to run: memory, buffers, modes, and a cache of the size that is left."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from piecegraph.base.events import EventLog
from piecegraph.base.plan import Decision
from piecegraph.base.progress import Progress
from piecegraph.engine.mode import choose_mode, make_graph_device
from piecegraph.llm.cache.memory import Memory
from piecegraph.llm.cache.paged import CacheGroup, PagedCache
from piecegraph.llm.cache.states import StateMemory, choose_states, state_bytes
from piecegraph.llm.config import LLMConfig
from piecegraph.llm.kernels.attention.kernel import AttentionKernel
from piecegraph.llm.kernels.attention.registry import choose_kernel
from piecegraph.llm.kernels.decode_pieces import short_seqs
from piecegraph.llm.model.head import decoder_of
from piecegraph.llm.model.loader import LoadedModel
from piecegraph.llm.model.traced_model import TracedModel
from piecegraph.llm.ranks.group import Ranks
from piecegraph.llm.run.adjustment_buffers import SHORTEST
from piecegraph.llm.run.batch import BatchBuffers, BatchLimits
from piecegraph.llm.run.engine import LLMEngine
from piecegraph.llm.run.forward import EmbedsModel, Forward
from piecegraph.llm.run.model_step import ModelStep, StepKey
from piecegraph.llm.run.sampling import logprobs_bytes
from piecegraph.llm.run.scheduler import Scheduler, SchedulerLimits
from piecegraph.llm.run.sizing import (
    CacheNeeds,
    StepSizes,
    check_states,
    choose_step_sizes,
    free_bytes,
    free_host_bytes,
    size_cache,
)
from piecegraph.llm.run.step import Bucket
from piecegraph.llm.specs import Accepted, Rejected, StepKind, Support
from piecegraph.provenance.ledger import ledgers
from piecegraph.tape.device import GraphDevice
from piecegraph.tape.library import TapeLibrary

KINDS: tuple[StepKind, ...] = ("decode", "mixed")

_SPARE_BYTES = 256 * 2**20
"""Left free on a GPU besides what was measured: libraries allocate workspaces of their own."""


@dataclass(frozen=True)
class Parts:
    """All that a compiled model runs with."""

    config: LLMConfig
    model: TracedModel
    limits: SchedulerLimits
    memory: Memory
    states: StateMemory | None
    buffers: BatchBuffers
    device: GraphDevice | None
    forward: Forward
    events: EventLog
    kernels: tuple[Decision, ...]
    ranks: Ranks | None

    @staticmethod
    def make(
        loaded: LoadedModel,
        model: TracedModel,
        config: LLMConfig,
        limits: SchedulerLimits,
        trace_embeds: Callable[[], TracedModel],
        events: EventLog,
        ranks: Ranks | None,
    ) -> Parts:
        dtype, options = loaded.model.dtype, config.options
        kernel, why = choose_kernel(
            config.attention, model.layers, dtype, config.device, deterministic=config.deterministic
        )
        block_size = block_size_for(kernel, config)
        state_kernels, of_states = choose_states(model.states, dtype, config.device)
        num_slots = limits.max_num_seqs + 1
        check_states(state_bytes(model.states, num_slots), limits.max_num_seqs, free_bytes(config.device))
        states = (
            StateMemory(model.states, decoder_of(loaded.model), state_kernels, num_slots, config.device)
            if model.states
            else None
        )
        memory = Memory(
            model.layers,
            kernel,
            loaded.experts,
            states,
            dtype=dtype,
            device=config.device,
            block_size=block_size,
        )
        has_mrope = model.position_rows > 1
        buffers = BatchBuffers(
            batch_limits(loaded, block_size, limits, len(model.reaches), has_mrope=has_mrope), config.device
        )
        safe = {kind: _capture_safe(kind, kernel, states, loaded.experts, dtype) for kind in KINDS}
        if ranks is not None and config.device.type != "cuda":
            safe = dict.fromkeys(KINDS, Rejected("what ranks add up is sent by the host"))
        modes = {kind: _mode(kind, config, safe[kind]) for kind in KINDS}
        device = make_graph_device(modes["decode"].choice, config.device)
        few_rows = 0 if model.few is None else model.few.num_rows
        sizes = step_sizes(config, limits, has_graphs=device is not None, few_rows=few_rows)
        progress, make_ledger = Progress(options.progress), ledgers(options.provenance)

        def make_library(step: ModelStep) -> TapeLibrary[StepKey]:
            watch = step.decoder.watch
            return TapeLibrary(step, device, events, make_ledger=make_ledger, progress=progress, watch=watch)

        step = ModelStep(model, memory, buffers, modes, events)
        if config.deterministic:
            step.head = model.head.fixed(limits.max_num_seqs)
        forward = Forward(
            model,
            step,
            buffers,
            device,
            sizes,
            EmbedsModel(trace_embeds),
            events,
            make_library,
            ranks=ranks,
            records_at_need=options.provenance,  # who looks at kernels wants to see those of graphs
        )
        attention = (Decision("attention", kernel.name, why),) if model.layers else ()
        kernels = (*attention, *of_states)
        return Parts(config, model, limits, memory, states, buffers, device, forward, events, kernels, ranks)

    def give_memory(self) -> tuple[CacheGroup, ...]:
        """Size the cache by what is left once the largest steps are recorded, and allocate it."""
        options = self.config.options
        needs = CacheNeeds(
            reaches=self.model.reaches,
            bytes_per_block=tuple(self.memory.bytes_per_block(group) for group in range(len(self.model.reaches))),
            block_size=self.buffers.limits.block_size,
            max_num_seqs=self.limits.max_num_seqs,
            max_model_len=self.limits.max_model_len,
            max_batch_tokens=self.limits.max_batch_tokens,
            max_tokens=None if options.cache_tokens == "auto" else options.cache_tokens,
        )
        budget = self._measure_budget()
        blocks = size_cache(needs, budget if self.ranks is None else self.ranks.least(budget))
        self.memory.allocate(blocks)
        return tuple(
            CacheGroup(num_blocks=num, window=reach.window, chunk=reach.chunk)
            for num, reach in zip(blocks, self.model.reaches, strict=True)
        )

    def make_engine(self, name: str, cache: PagedCache, *, eos_token_ids: set[int], looks_ahead: bool) -> LLMEngine:
        """Put the parts together."""
        scheduler = Scheduler(
            self.limits,
            cache,
            sizes=self.forward.unpadded_sizes if self.config.options.full_steps else tuple,
            eos_token_ids=eos_token_ids,
            needs_state=self.states is not None,
            release_state=self.states.release if self.states is not None else None,
        )
        return LLMEngine(
            name, self.forward, scheduler, self.buffers, self.events, looks_ahead=looks_ahead, ranks=self.ranks
        )

    def cache_bytes(self, groups: tuple[CacheGroup, ...]) -> int:
        return sum(group.num_blocks * self.memory.bytes_per_block(i) for i, group in enumerate(groups))

    @property
    def state_bytes(self) -> int:
        states = self.states
        return 0 if states is None else states.num_bytes + states.unallocated_bytes(self.limits.max_num_seqs)

    def _measure_budget(self) -> int:
        """Bytes for the cache.

        On a GPU the largest steps are recorded with a cache of two blocks: what they take is measured, not estimated.
        Their graphs are dropped, as they read the small cache, and recorded again; their memory stays with the pool.
        What they took is kept with the plan: the next start need only ask what is free, whoever else uses the device.
        """
        of_states = self.states.unallocated_bytes(self.limits.max_num_seqs) if self.states is not None else 0
        if self.config.device.type != "cuda":
            # All of them on this machine, as far as is known.
            num_ranks = self.config.tensor_parallel_size * self.config.data_parallel_size
            return int(free_host_bytes() * self.config.memory_fraction) // num_ranks - of_states
        torch.cuda.empty_cache()  # what loading and tracing needed is free, too
        free, total = torch.cuda.mem_get_info(self.config.device)
        taken = self._recall_taken()
        if taken is None:
            taken = self._measure_taken()
            self.model.pipeline.note(self._taken_by, taken)
            free = torch.cuda.mem_get_info(self.config.device)[0] + taken
        # The smaller steps share the memory of the largest, but every graph also takes some of the driver's. How much
        # all of them will take is not known yet: an eighth of what the largest took is kept for it.
        kept = taken + taken // 8 + of_states + _SPARE_BYTES
        kept += logprobs_bytes(self.limits.max_num_seqs, self.limits.vocab_size)
        return free - int(total * (1 - self.config.memory_fraction)) - kept

    @property
    def _taken_by(self) -> str:
        """What the memory of the largest steps depends on, besides the plan."""
        found = torch.cuda.get_device_properties(self.config.device)
        allocator = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""), os.environ.get("PYTORCH_ALLOC_CONF", "")
        asked = (self.config.cudagraph_mode, self.config.deterministic, self.config.options.provenance)
        parts = (self.limits, self.forward.sizes, self.kernels, self.buffers.limits, asked, allocator)
        return f"bytes of the largest steps: {found.name}, {found.total_memory}, {parts}"

    def _recall_taken(self) -> int | None:
        """What the largest steps took an earlier start; with ranks, only if all of them know."""
        taken = self.model.pipeline.recall(self._taken_by)
        if self.ranks is not None and not self.ranks.are_all(taken is not None):
            return None
        return taken

    def _measure_taken(self) -> int:
        self.memory.allocate([2] * len(self.model.reaches))
        largest = _largest_steps(self.forward.sizes.largest(self.limits))
        with self.forward.library.session():
            pass  # tidied first: what tracing left behind is not to be measured
        before = torch.cuda.mem_get_info(self.config.device)[0]
        if self.device is not None:
            self.forward.library.record(largest, tidies=False)
            self.forward.library.forget()
        else:
            self.forward.warm_up(largest)
        return before - torch.cuda.mem_get_info(self.config.device)[0]

    def check_memory(self) -> None:
        """If what is recorded did not fit, what an earlier start has measured is wrong by now: it is measured again."""
        if self.config.device.type == "cuda" and self.forward.library.dropped:
            self.model.pipeline.note(self._taken_by, None)


def _largest_steps(buckets: Sequence[Bucket]) -> list[StepKey]:
    """The steps that need most memory. To truncate what each sequence draws from takes a table as wide as its logits,
    in single precision, and to adjust these one more.
    """
    return [StepKey(bucket, "truncated", num_adjusted=SHORTEST, has_masks=True) for bucket in buckets]


def step_sizes(config: LLMConfig, limits: SchedulerLimits, *, has_graphs: bool, few_rows: int) -> StepSizes:
    """The sizes that steps are padded to.

    Args:
        config: what was asked for.
        limits: of steps.
        has_graphs: whether steps are recorded.
        few_rows: up to how many rows decoding has pieces of its own.
    """
    return choose_step_sizes(
        config.capture_sizes,
        has_graphs=has_graphs,
        max_num_seqs=limits.max_num_seqs,
        max_batch_tokens=limits.max_batch_tokens,
        max_model_len=limits.max_model_len,
        deterministic=config.deterministic,
        short_seqs=short_seqs(few_rows),
    )


def block_size_for(kernel: AttentionKernel, config: LLMConfig) -> int:
    """Tokens in a block of the cache."""
    wish = config.options.block_size
    return kernel.block_size if wish == "auto" else wish


def batch_limits(
    loaded: LoadedModel, block_size: int, limits: SchedulerLimits, num_groups: int, *, has_mrope: bool
) -> BatchLimits:
    """How large the buffers of steps are."""
    return BatchLimits(
        max_tokens=limits.max_batch_tokens,
        max_seqs=limits.max_num_seqs,
        max_model_len=limits.max_model_len,
        block_size=block_size,
        num_groups=num_groups,
        vocab_size=limits.vocab_size,
        has_mrope=has_mrope,
        embed_width=loaded.model.get_input_embeddings().weight.shape[1],
        embed_dtype=loaded.model.dtype,
    )


def _capture_safe(
    kind: StepKind,
    kernel: AttentionKernel,
    states: StateMemory | None,
    experts: Sequence[torch.nn.Module],
    dtype: torch.dtype,
) -> Support:
    """Whether everything between the pieces may be captured with them."""
    of_states = states.capture_safe(kind) if states is not None else Accepted()
    if isinstance(of_states, Rejected):
        return of_states
    if experts and dtype != torch.bfloat16:
        return Rejected(f"experts in {str(dtype).removeprefix('torch.')} read on the host how many tokens each has")
    verdict = kernel.capture_safe(kind)
    return verdict if isinstance(verdict, Accepted) else Rejected(f"{kernel.name} attention: {verdict.reason}")


def _mode(kind: StepKind, config: LLMConfig, safe: Support) -> Decision:
    return choose_mode(
        f"{kind} steps",
        config.cudagraph_mode,
        config.device,
        config.options.graph_device,
        best="full",
        reason="all that a step needs to know of its batch is read on the device",
        why_not_full=safe.reason if isinstance(safe, Rejected) else "",
    )
