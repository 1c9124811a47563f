"""From a path to a running engine, stage by stage, each of them timed."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from piecegraph.base.config import Options
from piecegraph.base.events import EventLog
from piecegraph.base.plan import Decision
from piecegraph.base.progress import Progress
from piecegraph.errors import ConfigError, ModelError
from piecegraph.llm.cache.memory import Memory
from piecegraph.llm.cache.paged import CacheGroup, PagedCache
from piecegraph.llm.cache.states import StateMemory, choose_states, state_bytes
from piecegraph.llm.config import LLMConfig
from piecegraph.llm.kernels.attention.kernel import AttentionKernel
from piecegraph.llm.kernels.attention.registry import choose_kernel
from piecegraph.llm.model import demo_model
from piecegraph.llm.model.decoder import Decoder
from piecegraph.llm.model.loader import LoadedModel, load
from piecegraph.llm.model.refusals import refuse_attention, refuse_embeddings
from piecegraph.llm.model.rotations import hold_rotations, short_length
from piecegraph.llm.model.trace_cache import TraceCache, cache_for
from piecegraph.llm.model.traced_model import TracedModel, TracedSites, decoder_of, trace_model
from piecegraph.llm.run.batch import BatchBuffers, BatchLimits
from piecegraph.llm.run.early_kernels import EarlyKernels, linear_shapes
from piecegraph.llm.run.engine import Engine
from piecegraph.llm.run.forward import Forward, StepKey
from piecegraph.llm.run.sampling import logprobs_bytes
from piecegraph.llm.run.scheduler import Scheduler, SchedulerLimits
from piecegraph.llm.run.self_check import self_check
from piecegraph.llm.run.sizing import (
    CacheNeeds,
    StepSizes,
    check_batch,
    check_states,
    choose_step_sizes,
    largest_buckets,
    size_cache,
)
from piecegraph.llm.specs import StepKind
from piecegraph.llm.support import Accepted, Rejected, Verdict
from piecegraph.tape.device import CudaGraphs, GraphDevice
from piecegraph.tape.simulated import SimulatedGraphs

_SPARE_BYTES = 256 * 2**20
"""Left free on a GPU besides what was measured: libraries allocate workspaces of their own."""


_DEFAULT_LEN = 32768
"""The longest sequence unless it is asked for: every sequence may need as many blocks."""


@dataclass(frozen=True)
class Started:
    """A model that is ready to serve."""

    loaded: LoadedModel
    model: TracedModel
    engine: Engine
    limits: SchedulerLimits
    cache_groups: tuple[CacheGroup, ...]
    cache_bytes: int
    state_bytes: int
    """What layers with a state keep if as many sequences run as may."""
    decisions: tuple[Decision, ...]
    stages: Mapping[str, float]
    """Seconds of each stage; their sum is the time it took."""


class _Stages:
    def __init__(self) -> None:
        self._last = time.perf_counter()
        self.seconds: dict[str, float] = {}

    def done(self, stage: str) -> None:
        now = time.perf_counter()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + now - self._last
        self._last = now


def start(path: str, config: LLMConfig, events: EventLog) -> Started:
    """Load, trace, compile, measure, allocate, record, check."""
    stages, progress, options = _Stages(), Progress(config.options.progress), config.options
    choose_kernel(config.attention, (), torch.float32, config.device)  # a wrong name is told before anything is done
    if path == demo_model.NAME:
        path = str(demo_model.demo_folder(progress))
        stages.done("demo model")
    with progress.bar("load", 1) as bar:
        loaded = load(path, dtype=config.dtype, device=config.device, load_format=config.load_format)
        bar.advance(path)
    limits, length = _limits(loaded, config)
    # How many groups of layers there are is not known yet; one at least, and most models have no more.
    check_batch(_batch_limits(loaded, config, limits, 1, has_mrope=False), _free_bytes_twice(config.device))
    rotations = hold_rotations(loaded.model, limits.max_model_len)
    stages.done("load")
    model, cache, early = _trace_and_compile(loaded, config, limits, events)
    stages.done("trace and compile")
    parts = _Parts.make(loaded, model, config, limits, _embeds_tracer(loaded, model, cache, config, events), events)
    groups = parts.give_memory(progress)
    with torch.inference_mode():
        rows = parts.forward.choose_rows(min((group.num_blocks for group in groups), default=1))
    stages.done("measure and allocate")
    parts.forward.record([StepKey(bucket, "greedy") for bucket in parts.sizes.at_start()], progress)
    stages.done("record")
    prefix_cache, look_ahead = _prefix_cache(config, model), _look_ahead(config)
    engine = parts.make_engine(
        PagedCache(groups, block_size=options.block_size, prefix_cache=prefix_cache.choice == "on"),
        eos_token_ids=_eos_token_ids(loaded),
        looks_ahead=look_ahead.choice == "on",
    )
    decisions = [*loaded.decisions, *rotations, *model.decisions, rows, length]
    decisions += [*parts.kernels, *early, prefix_cache, look_ahead]
    if options.self_check:
        with progress.bar("self check", 1), _uncounted(engine):
            decisions.append(self_check(loaded.model, engine))
        stages.done("self check")
    return Started(
        loaded,
        model,
        engine,
        limits,
        groups,
        cache_bytes=parts.cache_bytes(groups),
        state_bytes=parts.state_bytes,
        decisions=tuple(decisions),
        stages=stages.seconds,
    )


def _trace_and_compile(
    loaded: LoadedModel, config: LLMConfig, limits: SchedulerLimits, events: EventLog
) -> tuple[TracedModel, TraceCache, list[Decision]]:
    """The compiled model, what stood for its cache, and what became of the kernels that are compiled meanwhile."""
    options = config.options
    early: list[EarlyKernels] = []

    def on_traced(sites: TracedSites) -> None:
        early.extend(_start_early(sites, loaded, config, limits))

    with torch.no_grad():
        cache = cache_for(
            decoder_of(loaded.model), linear_attention=options.linear_attention, latent_cache=options.latent_cache
        )
        if not cache.keeps_state:
            refuse_attention(loaded.model)
        core_options = Options(
            fuse_linears=options.fuse_linears,
            inductor=options.inductor,
            provenance=options.provenance,
            progress=options.progress,
        )
        backend = config.backend
        model = trace_model(
            loaded.model, cache, backend=backend, options=core_options, events=events, on_traced=on_traced
        )
    _check_sizes(loaded, model, limits)
    return model, cache, [kernels.wait() for kernels in early]


@dataclass(frozen=True)
class _Parts:
    """What the stages behind compilation share."""

    config: LLMConfig
    model: TracedModel
    limits: SchedulerLimits
    sizes: StepSizes
    memory: Memory
    states: StateMemory | None
    buffers: BatchBuffers
    device: GraphDevice | None
    forward: Forward
    events: EventLog
    kernels: tuple[Decision, ...]

    @staticmethod
    def make(
        loaded: LoadedModel,
        model: TracedModel,
        config: LLMConfig,
        limits: SchedulerLimits,
        trace_embeds: Callable[[], Decoder],
        events: EventLog,
    ) -> _Parts:
        dtype, options = loaded.model.dtype, config.options
        kernel, why = choose_kernel(config.attention, model.layers, dtype, config.device)
        state_kernels, of_states = choose_states(model.states, dtype, config.device)
        num_slots = limits.max_num_seqs + 1
        check_states(state_bytes(model.states, num_slots), limits.max_num_seqs, _free_bytes(config.device))
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
            block_size=options.block_size,
        )
        has_mrope = model.position_rows > 1
        batch_limits = _batch_limits(loaded, config, limits, len(model.reaches), has_mrope=has_mrope)
        buffers = BatchBuffers(batch_limits, config.device)
        device = _graph_device(config)
        sizes = _step_sizes(config, limits, has_graphs=device is not None)
        kinds: tuple[StepKind, ...] = ("decode", "mixed")
        safety = {kind: _capture_safe(kind, kernel, states, loaded.experts, dtype) for kind in kinds}
        modes = {kind: _mode(kind, config, device, safety[kind]) for kind in kinds}
        provenance = config.options.provenance
        forward = Forward(model, memory, buffers, device, modes, trace_embeds, events, provenance=provenance)
        kernels = (Decision("attention", kernel.name, why), *of_states)
        return _Parts(config, model, limits, sizes, memory, states, buffers, device, forward, events, kernels)

    def give_memory(self, progress: Progress) -> tuple[CacheGroup, ...]:
        """Size the cache by what is left once the largest steps are recorded, and allocate it."""
        options = self.config.options
        needs = CacheNeeds(
            reaches=self.model.reaches,
            bytes_per_block=tuple(self.memory.bytes_per_block(group) for group in range(len(self.model.reaches))),
            block_size=options.block_size,
            max_num_seqs=self.limits.max_num_seqs,
            max_model_len=self.limits.max_model_len,
            max_batch_tokens=self.limits.max_batch_tokens,
            max_tokens=None if options.cache_tokens == "auto" else options.cache_tokens,
        )
        blocks = size_cache(needs, self._measure_budget(progress))
        self.memory.allocate(blocks)
        return tuple(
            CacheGroup(num_blocks=num, window=reach.window, chunk=reach.chunk)
            for num, reach in zip(blocks, self.model.reaches, strict=True)
        )

    def make_engine(self, cache: PagedCache, *, eos_token_ids: set[int], looks_ahead: bool) -> Engine:
        """Put the parts together."""
        scheduler = Scheduler(
            self.limits,
            cache,
            eos_token_ids=eos_token_ids,
            needs_state=self.states is not None,
            release_state=self.states.release if self.states is not None else None,
        )

        def record_unseen(key: StepKey) -> None:
            self.forward.record([key], Progress(False))

        return Engine(
            self.forward,
            scheduler,
            self.buffers,
            self.sizes,
            self.events,
            record_unseen=record_unseen if self.device is not None else None,
            looks_ahead=looks_ahead,
        )

    def cache_bytes(self, groups: tuple[CacheGroup, ...]) -> int:
        return sum(group.num_blocks * self.memory.bytes_per_block(i) for i, group in enumerate(groups))

    @property
    def state_bytes(self) -> int:
        states = self.states
        return 0 if states is None else states.num_bytes + states.unallocated_bytes(self.limits.max_num_seqs)

    def _measure_budget(self, progress: Progress) -> int:
        """Bytes for the cache.

        On a GPU the largest steps are recorded with a cache of two blocks: what they take is measured, not estimated.
        Their graphs are dropped, as they read the small cache, and recorded again; their memory stays with the pool.
        """
        of_states = self.states.unallocated_bytes(self.limits.max_num_seqs) if self.states is not None else 0
        if self.config.device.type != "cuda":
            return int(_free_host_bytes() * self.config.memory_fraction) - of_states
        self.memory.allocate([2] * len(self.model.reaches))
        largest = _dearest_steps(self.limits)
        free_before = torch.cuda.mem_get_info(self.config.device)[0]
        if self.device is not None:
            self.forward.record(largest, progress, tidies=True)  # what tracing left behind is not to be measured
            self.forward.forget()
        else:
            self.forward.warm_up(largest)
        free, total = torch.cuda.mem_get_info(self.config.device)
        # The smaller steps share the memory of the largest, but every graph also takes some of the driver's. How much
        # all of them will take is not known yet: an eighth of what the largest took is kept for it.
        graphs = (free_before - free) // 8
        kept = graphs + of_states + logprobs_bytes(self.limits.max_num_seqs, self.limits.vocab_size) + _SPARE_BYTES
        return free - int(total * (1 - self.config.memory_fraction)) - kept


def _dearest_steps(limits: SchedulerLimits) -> list[StepKey]:
    """The steps that need most memory. Sorting a vocabulary for each sequence takes several times its logits."""
    decode, mixed = largest_buckets(limits)
    return [StepKey(decode, "truncated"), StepKey(mixed, "greedy")]


def _start_early(
    sites: TracedSites, loaded: LoadedModel, config: LLMConfig, limits: SchedulerLimits
) -> list[EarlyKernels]:
    """Have the kernels compiled that the recorded steps will launch, where there are such."""
    if config.device.type != "cuda" or config.backend == "eager":  # nothing to do meanwhile
        return []
    dtype = loaded.model.dtype
    sizes = _step_sizes(config, limits, has_graphs=config.cudagraph_mode != "none")
    early = EarlyKernels(
        choose_kernel(config.attention, sites.layers, dtype, config.device)[0],
        sites.layers,
        (sites.states, choose_states(sites.states, dtype, config.device)[0]),
        linear_shapes(sites.graph),
        buckets=dict.fromkeys((*largest_buckets(limits), *sizes.at_start())),
        limits=_batch_limits(loaded, config, limits, len(sites.reaches), has_mrope=False),
        dtype=dtype,
        device=config.device,
    )
    early.start()
    return [early]


def _step_sizes(config: LLMConfig, limits: SchedulerLimits, *, has_graphs: bool) -> StepSizes:
    return choose_step_sizes(
        config.capture_sizes,
        has_graphs=has_graphs,
        max_num_seqs=limits.max_num_seqs,
        max_batch_tokens=limits.max_batch_tokens,
    )


def _batch_limits(
    loaded: LoadedModel, config: LLMConfig, limits: SchedulerLimits, num_groups: int, *, has_mrope: bool
) -> BatchLimits:
    return BatchLimits(
        max_tokens=limits.max_batch_tokens,
        max_seqs=limits.max_num_seqs,
        max_model_len=limits.max_model_len,
        block_size=config.options.block_size,
        num_groups=num_groups,
        vocab_size=limits.vocab_size,
        has_mrope=has_mrope,
        embed_width=loaded.model.get_input_embeddings().weight.shape[1],
        embed_dtype=loaded.model.dtype,
    )


def _limits(loaded: LoadedModel, config: LLMConfig) -> tuple[SchedulerLimits, Decision]:
    most = loaded.max_positions
    wanted = config.max_model_len
    if wanted is None:
        length = _default_length(most, short_length(loaded.model))
    elif wanted > most:
        raise ConfigError(
            "PG101",
            f"max_model_len is {wanted}",
            why=f"the model was made for {most} tokens",
            hint=f"ask for at most {most}",
        )
    else:
        length = Decision("max_model_len", str(wanted), "asked for")
    limits = SchedulerLimits(
        max_num_seqs=config.max_num_seqs,
        max_batch_tokens=config.max_batch_tokens,
        max_model_len=int(length.choice),
        vocab_size=loaded.model.get_input_embeddings().weight.shape[0],
    )
    return limits, length


def _default_length(most: int, short: int | None) -> Decision:
    """See Note [Two sets of frequencies]."""
    if short is not None and short < min(most, _DEFAULT_LEN):
        reason = f"longer sequences are rotated differently, all of their tokens; up to {most} may be asked for"
        return Decision("max_model_len", str(short), reason)
    return Decision("max_model_len", str(min(most, _DEFAULT_LEN)), f"the model was made for {most} tokens")


def _embeds_tracer(
    loaded: LoadedModel, model: TracedModel, cache: TraceCache, config: LLMConfig, events: EventLog
) -> Callable[[], Decoder]:
    """What makes the decoder that takes embeddings. Its weights stay where they are: they are not joined again."""
    options = Options(inductor=config.options.inductor, progress=config.options.progress)

    def trace_embeds() -> Decoder:
        refuse_embeddings(loaded.model)
        traced = trace_model(
            loaded.model,
            cache,
            backend=config.backend,
            options=options,
            events=events,
            takes_embeds=True,
            position_rows=model.position_rows,
        )
        assert (traced.layers, traced.states) == (model.layers, model.states), "the same calls in the same order"
        return traced.decoder

    return trace_embeds


def _check_sizes(loaded: LoadedModel, model: TracedModel, limits: SchedulerLimits) -> None:
    """One trace serves steps of every size. See Note [Dropped guards]."""
    for size in (1, 2, limits.max_batch_tokens):
        reason = model.decoder.violated(size)
        if reason is not None:
            raise ModelError("PG662", f"{type(loaded.model).__name__} cannot run steps of {size} tokens", why=reason)


def _graph_device(config: LLMConfig) -> GraphDevice | None:
    if config.cudagraph_mode == "none":
        return None
    if config.options.graph_device == "simulated":
        return SimulatedGraphs()
    return CudaGraphs(config.device) if config.device.type == "cuda" else None


def _capture_safe(
    kind: StepKind,
    kernel: AttentionKernel,
    states: StateMemory | None,
    experts: Sequence[torch.nn.Module],
    dtype: torch.dtype,
) -> Verdict:
    """Whether everything between the pieces may be captured with them."""
    of_states = states.capture_safe(kind) if states is not None else Accepted()
    if isinstance(of_states, Rejected):
        return of_states
    if experts and dtype != torch.bfloat16:
        return Rejected(f"experts in {str(dtype).removeprefix('torch.')} read on the host how many tokens each has")
    verdict = kernel.capture_safe(kind)
    return verdict if isinstance(verdict, Accepted) else Rejected(f"{kernel.name} attention: {verdict.reason}")


def _mode(kind: StepKind, config: LLMConfig, device: GraphDevice | None, verdict: Verdict) -> Decision:
    subject = f"{kind} steps"
    if device is None:
        reason = "asked for" if config.cudagraph_mode == "none" else f"{config.device.type} has no graphs"
        return Decision(subject, "direct", reason)
    if config.cudagraph_mode == "piecewise":
        return Decision(subject, "piecewise", "asked for")
    if isinstance(verdict, Accepted):
        return Decision(subject, "full", "all that a step needs to know of its batch is read on the device")
    if config.cudagraph_mode == "full":
        hint = 'use cudagraph_mode="auto"'
        raise ConfigError("PG301", f"{kind} steps cannot be one graph", why=verdict.reason, hint=hint)
    return Decision(subject, "piecewise", verdict.reason)


def _prefix_cache(config: LLMConfig, model: TracedModel) -> Decision:
    if config.prefix_cache and model.states:
        return Decision("prefix cache", "off", "blocks of keys and values do not bring back a recurrent state")
    return Decision("prefix cache", "on" if config.prefix_cache else "off", "asked for")


def _look_ahead(config: LLMConfig) -> Decision:
    wish = config.options.look_ahead
    if wish != "auto":
        return Decision("look ahead", "on" if wish else "off", "asked for")
    if config.device.type == "cuda":
        return Decision("look ahead", "on", "the device need not wait for the host between two steps of decoding")
    return Decision("look ahead", "off", "the host computes, too")


@contextlib.contextmanager
def _uncounted(engine: Engine) -> Iterator[None]:
    """Steps that are nobody's are neither told nor counted."""
    forward, events = engine.forward, engine.events
    counts = forward.num_steps, forward.num_replays
    engine.events = EventLog("ignore")
    try:
        yield
    finally:
        engine.events = events
        forward.num_steps, forward.num_replays = counts


def _eos_token_ids(loaded: LoadedModel) -> set[int]:
    found: set[int] = set()
    config = loaded.model.config
    for source in (config, config.get_text_config(), loaded.model.generation_config):
        ids = getattr(source, "eos_token_id", None)
        found.update(token for token in (ids if isinstance(ids, (list, tuple)) else [ids]) if isinstance(token, int))
    return found


def _free_bytes_twice(device: torch.device) -> int:
    """What is left for something that lies both on the host and on the device."""
    if device.type != "cuda":
        return _free_host_bytes() // 2
    return min(_free_host_bytes(), _free_bytes(device))


def _free_bytes(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else _free_host_bytes()


def _free_host_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
