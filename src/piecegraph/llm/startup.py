"""From a path to a running engine, stage by stage, each of them timed."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from piecegraph.base import torch_compat
from piecegraph.base.collector import collect_all, collector_paused
from piecegraph.base.config import Options
from piecegraph.base.events import EventLog
from piecegraph.base.plan import Decision
from piecegraph.base.progress import Progress, StageClock, all_stages
from piecegraph.dumps.target import target_of
from piecegraph.errors import ConfigError, ModelError
from piecegraph.graph.fuse import place_by_copy
from piecegraph.llm.cache.paged import CacheGroup, PagedCache
from piecegraph.llm.cache.states import choose_states
from piecegraph.llm.config import LLMConfig
from piecegraph.llm.kernels.attention.registry import choose_kernel
from piecegraph.llm.kernels.decode_pieces import describe, most_rows
from piecegraph.llm.kernels.fused_linear import find_gated
from piecegraph.llm.kernels.linear import has_gated_kernel, linear_passes
from piecegraph.llm.model import demo_model
from piecegraph.llm.model.head import decoder_of
from piecegraph.llm.model.loader import LoadedModel, load
from piecegraph.llm.model.refusals import refuse_attention, refuse_deterministic, refuse_embeddings
from piecegraph.llm.model.rotations import hold_rotations, short_length
from piecegraph.llm.model.shards import Part
from piecegraph.llm.model.trace_cache import TraceCache, cache_for
from piecegraph.llm.model.traced_model import TracedModel, TracedSites, trace_model
from piecegraph.llm.model.weight_stream import WeightsRead
from piecegraph.llm.parts import Parts, batch_limits, block_size_for, step_sizes
from piecegraph.llm.ranks.group import Ranks
from piecegraph.llm.ranks.one_shot import choose_all_reduce
from piecegraph.llm.run.early_kernels import EarlyKernels, Shapes, shapes_of
from piecegraph.llm.run.engine import LLMEngine
from piecegraph.llm.run.forward import TRIED_TOKENS
from piecegraph.llm.run.row_check import check_rows
from piecegraph.llm.run.scheduler import SchedulerLimits
from piecegraph.llm.run.self_check import BrokenModelError, self_check
from piecegraph.llm.run.sizing import check_batch, free_bytes_twice
from piecegraph.llm.run.step import Bucket, StepCounts

_DEFAULT_LEN = 32768
"""The longest sequence unless it is asked for: every sequence may need as many blocks."""

_RECORD_SECONDS = 1.0
"""On a GPU; a small model has all powers of two by then."""


@dataclass(frozen=True)
class Started:
    """A model that is ready to serve."""

    loaded: LoadedModel
    model: TracedModel
    engine: LLMEngine
    limits: SchedulerLimits
    cache_groups: tuple[CacheGroup, ...]
    cache_bytes: int
    state_bytes: int
    """What layers with a state keep if as many sequences run as may."""
    decisions: tuple[Decision, ...]
    stages: Mapping[str, float]
    """Seconds of each stage; their sum is the time it took."""
    weights: WeightsRead | None
    """How weights came from their files to the device; None if they stayed where they were."""


def start(path: str, config: LLMConfig, events: EventLog, ranks: Ranks | None, clock: StageClock) -> Started:
    """Load, trace, compile, measure, allocate, record, check. The clock runs since the user's call."""
    clock.lap("load")  # a GPU that nobody used was started to ask for it
    with torch_compat.as_in_a_new_thread(), collector_paused(), _told_what_lacks_memory(config.device):
        _give_up_garbage(config.device)
        while (started := _start_unless_wrong(path, config, events, ranks, clock)) is None:
            gc.collect()  # what it held of the device
    clock.lap("compile")
    return replace(started, stages=all_stages(clock.seconds, of="piecegraph.llm.llm"))


def _give_up_garbage(device: torch.device) -> None:
    """The cache will take all that is free, and an earlier model may lie in a circle: as an error does with the frames
    that it went through.
    """
    if device.type == "cuda" and torch.cuda.memory_allocated(device):
        collect_all()
        torch.cuda.empty_cache()


@contextlib.contextmanager
def _told_what_lacks_memory(device: torch.device) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ModelError(
            "PG665",
            f"there is no room for the model on {device}",
            why=str(error).partition(" Of the allocated memory")[0],
            hint="close() what else holds memory there, or spread the model over several GPUs (tensor_parallel_size)",
        ) from error


class _WrongPlanError(Exception):
    """What was loaded from the cache did not pass the self check, and is refused from now on."""


def _start_unless_wrong(
    path: str, config: LLMConfig, events: EventLog, ranks: Ranks | None, clock: StageClock
) -> Started | None:
    """None if a plan was wrong, of this process or of another rank: there is one less to be wrong the next time."""
    try:
        return _start(path, config, events, ranks, clock)
    except _WrongPlanError:
        return None


def _start(path: str, config: LLMConfig, events: EventLog, ranks: Ranks | None, clock: StageClock) -> Started:
    progress = Progress(config.options.progress)
    if config.device.type == "cuda" and config.backend == "inductor":
        torch_compat.hash_triton()
        clock.lap("import")
    # A wrong name is told before anything is done.
    choose_kernel(config.attention, (), torch.float32, config.device, deterministic=config.deterministic)
    if path == demo_model.NAME:
        path = str(demo_model.demo_folder(progress))
    part: Part | None = None
    sums: tuple[Decision, ...] = ()
    if ranks is not None:
        part = Part(ranks.rank, ranks.size, ranks.label)
        sums = choose_all_reduce(ranks, config.device, config.options.one_shot_bytes, events)
    with progress.bar("load", 1) as bar:
        loaded = load(path, dtype=config.dtype, device=config.device, load_format=config.load_format, part=part)
        bar.advance(path)
    if loaded.weights is not None and target_of(Options(dump=config.options.dump)) is not None:
        loaded.weights.wait()  # a dump tells of numbers, too
    limits, length = _limits(loaded, config)
    # How many groups of layers there are is not known yet; one at least, and most models have no more.
    check_batch(batch_limits(loaded, 16, limits, 1, has_mrope=False), free_bytes_twice(config.device))
    rotations = hold_rotations(loaded.model, limits.max_model_len)
    clock.lap("load")
    model, cache, early = _trace_and_compile(loaded, config, limits, clock, events, part)
    weights = loaded.weights.wait() if loaded.weights is not None else None
    clock.lap("load")
    trace_embeds = _embeds_tracer(loaded, model, cache, config, events, part)
    parts = Parts.make(loaded, model, config, limits, trace_embeds, events, ranks)
    with model.pipeline.compiling():
        groups = parts.give_memory()
        with torch.inference_mode():
            rows = parts.forward.choose_rows(min((group.num_blocks for group in groups), default=1))
            threads = _threads(parts)
        clock.lap("measure")
        if parts.device is not None:
            parts.forward.record_at_start(_record_seconds(config))
            parts.check_memory()
        clock.lap("record")
    prefix_cache, look_ahead = _prefix_cache(config, model), _look_ahead(config)
    engine = parts.make_engine(
        path,
        PagedCache(groups, block_size=parts.buffers.limits.block_size, prefix_cache=prefix_cache.choice == "on"),
        eos_token_ids=_eos_token_ids(loaded),
        looks_ahead=look_ahead.choice == "on",
    )
    decisions = [*loaded.decisions, *sums, *rotations, *model.decisions, rows, length]
    decisions += [*parts.kernels, *early, *threads, prefix_cache, look_ahead]
    decisions += _checks(loaded, model, parts, engine, progress)
    clock.lap("check")
    model.pipeline.keep(model.traced)
    return Started(
        loaded,
        model,
        engine,
        limits,
        groups,
        cache_bytes=parts.cache_bytes(groups),
        state_bytes=parts.state_bytes,
        decisions=tuple(decisions),
        stages={},
        weights=weights,
    )


def _checks(
    loaded: LoadedModel, model: TracedModel, parts: Parts, engine: LLMEngine, progress: Progress
) -> list[Decision]:
    """A model must answer as transformers does; what was loaded from the cache, too, or it is made anew."""
    decisions = []
    with _uncounted(engine), parts.forward.recording_at_need(), model.pipeline.compiling():
        if parts.config.options.self_check:
            decisions.append(_self_check(loaded, model, parts, engine, progress))
        if parts.config.deterministic:
            decisions.append(check_rows(engine))
    return decisions


def _self_check(
    loaded: LoadedModel, model: TracedModel, parts: Parts, engine: LLMEngine, progress: Progress
) -> Decision:
    """See :func:`_checks`. If the plan of one rank is made anew, those of all are."""
    try:
        with progress.bar("self check", 1):
            found = self_check(loaded.model, engine)
    except ModelError as error:
        if isinstance(error, BrokenModelError) or not model.pipeline.refuse_kept(error.why):
            raise
        if parts.ranks is not None:
            parts.ranks.are_all(False)
        raise _WrongPlanError from error
    if parts.ranks is not None and not parts.ranks.are_all(True):
        raise _WrongPlanError
    return found


def _trace_and_compile(
    loaded: LoadedModel,
    config: LLMConfig,
    limits: SchedulerLimits,
    clock: StageClock,
    events: EventLog,
    part: Part | None,
) -> tuple[TracedModel, TraceCache, list[Decision]]:
    """The compiled model, what stood for its cache, and what became of the kernels that are compiled meanwhile."""
    options = config.options
    early: list[EarlyKernels] = []
    decisions: list[Decision] = []
    decode = _decode_pieces(loaded, config)
    with torch.no_grad(), contextlib.ExitStack() as compiling:

        def on_traced(sites: TracedSites) -> None:
            compiling.enter_context(sites.pipeline.compiling())
            on_gpu, pipeline = config.device.type == "cuda", sites.pipeline
            compiling.callback(pipeline.aside.close)  # behind the kernels, which take longer than to end does
            compiling.enter_context(pipeline.compilers(on_gpu=on_gpu, are_kept=pipeline.is_kept))
            early.extend(_start_early(sites, loaded, config, limits, has_decode_pieces=decode.choice == "their own"))
            decisions.extend(_gates(sites, config))
            clock.lap("compile")  # on a CPU, the test of its vector units: six seconds, once for all models

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
            cache=options.cache,
            dump=options.dump,
            dump_inputs=options.dump_inputs,
        )
        model = trace_model(
            loaded.model,
            cache,
            backend=config.backend,
            options=core_options,
            events=events,
            on_traced=on_traced,
            deterministic=config.deterministic,
            decode_pieces=decode.choice == "their own",
            fuse_gates=options.fuse_gates,
            part=part,
            clock=clock,
            place_weight=place_by_copy if loaded.weights is None else loaded.weights.place,
        )
        _check_sizes(loaded, model, limits)
        if config.deterministic:
            refuse_deterministic(loaded.model, model.traced.graph, model.states, loaded.experts)
        decisions += [kernels.wait() for kernels in early]
    if model.few is not None:
        what = f"up to {model.few.num_rows} sequences; part of other kernels: {describe(model.traced.graph)}"
        decode = replace(decode, reason=f"{decode.reason}; {what}" if decode.reason else what)
    clock.lap("kernels")
    is_told = config.device.type == "cuda" or options.decode_pieces != "auto"
    return model, cache, [decode, *decisions] if is_told else decisions


def _decode_pieces(loaded: LoadedModel, config: LLMConfig) -> Decision:
    """Whether steps of decoding run pieces of their own."""
    wish, subject = config.options.decode_pieces, "pieces of decode steps"
    if wish != "auto" and not config.deterministic:
        return Decision(subject, "their own" if wish else "those of all steps", "asked for")
    if config.deterministic:
        return Decision(subject, "those of all steps", "with deterministic=True all steps run alike")
    if not linear_passes(config.device) or config.backend != "inductor":
        return Decision(subject, "those of all steps", "kernels for few rows need a GPU and Inductor")
    if loaded.model.dtype not in (torch.bfloat16, torch.float16):
        return Decision(subject, "those of all steps", "kernels for few rows are for half precision")
    return Decision(subject, "their own", "")


def _gates(sites: TracedSites, config: LLMConfig) -> Iterator[Decision]:
    """Where gates are computed, if there are any on a GPU."""
    count = len(find_gated(sites.graph)) if config.device.type == "cuda" and not config.deterministic else 0
    if not count:
        return
    subject = "gates of linears"
    if not config.options.fuse_gates:
        yield Decision(subject, "kernels of their own", "asked for")
    elif not has_gated_kernel(config.device):
        yield Decision(
            subject, "kernels of their own", "what computes them in linears is for Hopper GPUs and Triton 3.6"
        )
    else:
        yield Decision(subject, "part of them", f"{count} of them, in steps of sizes for which that is quicker")


def _start_early(
    sites: TracedSites, loaded: LoadedModel, config: LLMConfig, limits: SchedulerLimits, *, has_decode_pieces: bool
) -> list[EarlyKernels]:
    """Have the kernels compiled that the recorded steps will launch, where there are such."""
    if config.device.type != "cuda" or config.backend == "eager":  # nothing to do meanwhile
        return []
    dtype = loaded.model.dtype
    few_rows = most_rows(sites.graph) if has_decode_pieces else 0
    sizes = step_sizes(config, limits, has_graphs=config.cudagraph_mode != "none", few_rows=few_rows)
    kernel, _ = choose_kernel(config.attention, sites.layers, dtype, config.device, deterministic=config.deterministic)
    tried = Bucket(min(TRIED_TOKENS, limits.max_batch_tokens), 1)
    early = EarlyKernels(
        kernel,
        sites.layers,
        (sites.states, choose_states(sites.states, dtype, config.device)[0]),
        Shapes()
        if config.deterministic
        else shapes_of(
            sites.graph,
            has_decode_pieces=has_decode_pieces,
            fuses_gates=config.options.fuse_gates and has_gated_kernel(config.device),
        ),
        getattr(loaded.model.get_output_embeddings(), "weight", None),
        buckets=dict.fromkeys((*sizes.largest(limits), *sizes.of_kernels(), tried)),
        limits=batch_limits(loaded, block_size_for(kernel, config), limits, len(sites.reaches), has_mrope=False),
        dtype=dtype,
        device=config.device,
        are_kept=sites.pipeline.is_kept,
    )
    early.start()
    return [early]


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
    loaded: LoadedModel,
    model: TracedModel,
    cache: TraceCache,
    config: LLMConfig,
    events: EventLog,
    part: Part | None,
) -> Callable[[], TracedModel]:
    """What makes the model whose decoder takes embeddings. Its weights stay where they are, not joined again."""
    given = config.options
    options = Options(
        inductor=given.inductor,
        progress=given.progress,
        cache=given.cache,
        dump=given.dump,
        dump_inputs=given.dump_inputs,
    )

    def trace_embeds() -> TracedModel:
        refuse_embeddings(loaded.model)
        traced = trace_model(
            loaded.model,
            cache,
            backend=config.backend,
            options=options,
            events=events,
            takes_embeds=True,
            position_rows=model.position_rows,
            fuse_gates=given.fuse_gates,
            part=part,
        )
        traced.pipeline.keep(traced.traced)
        assert (traced.layers, traced.states) == (model.layers, model.states), "the same calls in the same order"
        return traced

    return trace_embeds


def _check_sizes(loaded: LoadedModel, model: TracedModel, limits: SchedulerLimits) -> None:
    """One trace serves steps of every size. See Note [Dropped guards]."""
    for size in (1, 2, limits.max_batch_tokens):
        reason = model.decoder.violated(size)
        if reason is not None:
            raise ModelError("PG662", f"{type(loaded.model).__name__} cannot run steps of {size} tokens", why=reason)


def _threads(parts: Parts) -> list[Decision]:
    """How many threads run a step, where the host computes."""
    if parts.config.device.type != "cpu" or parts.device is not None:
        return []
    return [parts.forward.choose_threads(parts.config.options.num_threads)]


def _prefix_cache(config: LLMConfig, model: TracedModel) -> Decision:
    if config.prefix_cache and model.states:
        return Decision("prefix cache", "off", "blocks of keys and values do not bring back a recurrent state")
    return Decision("prefix cache", "on" if config.prefix_cache else "off", "asked for")


def _look_ahead(config: LLMConfig) -> Decision:
    wish = config.options.look_ahead
    if wish != "auto":
        return Decision("look ahead", "on" if wish else "off", "asked for")
    if config.device.type == "cuda":
        return Decision("look ahead", "on", "the device need not wait for the host between two steps")
    return Decision("look ahead", "off", "the host computes, too")


def _record_seconds(config: LLMConfig) -> float:
    """How long sizes are recorded, if more are left than are needed in any case."""
    wish = config.options.record_seconds
    if wish != "auto":
        return wish
    # With provenance steps wait until they are recorded anyway.
    return _RECORD_SECONDS if config.device.type == "cuda" and not config.options.provenance else 0.0


@contextlib.contextmanager
def _uncounted(engine: LLMEngine) -> Iterator[None]:
    """Steps that are nobody's are neither told nor counted."""
    events, counts = engine.events, engine.counts
    engine.events, engine.counts = EventLog("ignore"), StepCounts()
    try:
        yield
    finally:
        engine.events, engine.counts = events, counts


def _eos_token_ids(loaded: LoadedModel) -> set[int]:
    found: set[int] = set()
    config = loaded.model.config
    for source in (config, config.get_text_config(), loaded.model.generation_config):
        ids = getattr(source, "eos_token_id", None)
        found.update(token for token in (ids if isinstance(ids, (list, tuple)) else [ids]) if isinstance(token, int))
    return found
