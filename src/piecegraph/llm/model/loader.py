"""From a path to a model on its device, with our plugs in it, and what is refused before any time is spent."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
import transformers
from transformers.distributed.configuration_utils import DistributedConfig

from piecegraph.base.plan import Decision
from piecegraph.errors import ModelError
from piecegraph.llm.model import plug
from piecegraph.llm.model.checkpoint import Checkpoint, find_checkpoint, reason_of
from piecegraph.llm.model.quantisation import make_one_precision, quantisation_of
from piecegraph.llm.model.refusals import no_interface, refuse_family, refuse_model
from piecegraph.llm.model.shards import TRIED, Part, slices_to_read, split_model
from piecegraph.llm.model.tokenizer import read_tokenizer
from piecegraph.llm.model.weight_stream import WeightStream, stream_weights
from piecegraph.llm.model.weights import check_weights

LoadFormat = Literal["auto", "dummy"]

_TRIED_TOKENS, _MOST_DIFFERENCE = 8, 0.05
"""How a model in parts is compared with the whole, and by how much of their norm its logits may differ."""


@dataclass(frozen=True)
class LoadedModel:
    """A model as transformers gives it."""

    model: Any
    tokenizer: Any | None
    tokenizer_error: str
    """Why there is no tokenizer."""
    tokenizer_path: str
    """Where it was looked for,"""
    is_local: bool
    """and whether on this machine alone."""
    experts: tuple[torch.nn.Module, ...]
    max_positions: int
    """Tokens of a sequence that the model was made for."""
    decisions: tuple[Decision, ...]
    weights: WeightStream | None = None
    """What is still on its way; None if all weights are there."""


def load(
    path: str,
    *,
    dtype: torch.dtype | Literal["auto"],
    device: torch.device,
    load_format: LoadFormat,
    part: Part | None = None,
) -> LoadedModel:
    """Load a causal language model and its tokenizer.

    Args:
        path: a folder with a model, or a name that transformers can find.
        dtype: of the weights; ``"auto"`` takes the checkpoint's, on a CPU float32 in place of half precision.
        device: where to put it.
        load_format: ``"dummy"`` fills the weights with small random numbers and needs only the configuration.
        part: which part of the model to keep; None for all of it.
    """
    checkpoint = find_checkpoint(os.path.expanduser(path))
    config = checkpoint.config
    refuse_family(config)
    dtype, precision = _precision(config, dtype, device)
    with without_bars():
        is_dummy = load_format == "dummy"
        made, loading = (
            _make_dummy(checkpoint, dtype, device) if is_dummy else _load_weights(checkpoint, dtype, device, part)
        )
    made.eval().requires_grad_(False)
    is_untried = part is not None and part.size > 1 and config.get_text_config().model_type not in TRIED
    expected = _few_logits(made) if is_untried else None
    of_ranks = split_model(made, part) if part is not None else ()
    weights = stream_weights(made, device) if expected is None else None
    model = made.to(device)
    refuse_model(model)
    if expected is not None:
        _check_parts(model, expected)
    decisions = (*precision, *loading, *of_ranks)
    tokenizer, tokenizer_error = read_tokenizer(checkpoint.path, is_local=checkpoint.is_local)
    plug.note_windows(model)
    experts = plug.number_experts(model)
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        tokenizer_error=tokenizer_error,
        tokenizer_path=checkpoint.path,
        is_local=checkpoint.is_local,
        experts=experts,
        max_positions=_max_positions(config),
        decisions=decisions,
        weights=weights,
    )


@torch.no_grad()
def _few_logits(model: Any) -> torch.Tensor:
    """What transformers makes of a few tokens."""
    tokens = torch.arange(1, _TRIED_TOKENS + 1, device=model.device)[None]
    with without_plugs(model):
        logits: torch.Tensor = model(input_ids=tokens, use_cache=False).logits
    return logits.float().cpu()


def _check_parts(model: Any, expected: torch.Tensor) -> None:
    """Raise if what ranks make together is not what the whole makes: plans are only as good as they were tried."""
    difference = float((_few_logits(model) - expected).norm() / expected.norm())
    if not difference <= _MOST_DIFFERENCE:
        why = f"their logits differ from those of the whole by {difference:.1%} of their norm"
        raise ModelError("PG682", f"{type(model).__name__} cannot be shared out to ranks", why=why)


def _max_positions(config: Any) -> int:
    """Some have no limit, or say -1."""
    told = getattr(config.get_text_config(), "max_position_embeddings", None) or 0
    return int(told) if told > 0 else 2048


def _precision(
    config: Any, dtype: torch.dtype | Literal["auto"], device: torch.device
) -> tuple[torch.dtype | Literal["auto"], tuple[Decision, ...]]:
    """Which dtype ``"auto"`` means: where a CPU has no instructions for half precision, it takes many times as long."""
    stored = getattr(config.get_text_config(), "dtype", None)
    if dtype != "auto" or device.type != "cpu" or stored not in (torch.bfloat16, torch.float16):
        return dtype, ()
    name = str(stored).removeprefix("torch.")
    return torch.float32, (Decision("dtype", "float32", f"the checkpoint's {name} is slow on many CPUs"),)


def _load_weights(
    checkpoint: Checkpoint, dtype: torch.dtype | str, device: torch.device, part: Part | None
) -> tuple[Any, tuple[Decision, ...]]:
    """A model with the weights of its files: all of them, and no others."""
    path, quantisation = checkpoint.path, quantisation_of(checkpoint)
    slices, of_slices = _slices(checkpoint, part, device, is_quantised=bool(quantisation.method))
    with _told_in_one_line(checkpoint):
        load: Any = _class_for(checkpoint.config).from_pretrained
        # Weights of another shape are told by us: transformers would print a report, and raise an error without them.
        model, told = load(
            path,
            dtype=dtype,
            local_files_only=checkpoint.is_local,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **quantisation.arguments,
            **slices,
            **_plugs(checkpoint.config),
        )
    unused = check_weights(checkpoint, model, told, is_quantised=bool(quantisation.method))
    if quantisation.arguments:
        make_one_precision(model)
    if slices:
        _forget_loader(model, _without_weights(checkpoint))
    return model, (*quantisation.decisions, *of_slices, *unused)


def _slices(
    checkpoint: Checkpoint, part: Part | None, device: torch.device, *, is_quantised: bool
) -> tuple[dict[str, Any], tuple[Decision, ...]]:
    """What makes transformers read the slices of one rank alone, where it can; otherwise all is read and cut."""
    if part is None or part.size == 1:
        return {}, ()
    why = ""
    if checkpoint.config.get_text_config().model_type not in TRIED:
        why = "what the ranks make is compared with what the whole makes"
    elif is_quantised:
        why = "weights are unpacked first"
    elif part.size != torch.distributed.get_world_size():
        why = "there are several models in the job, which transformers' loader does not know"
    elif importlib.util.find_spec("accelerate") is None:
        why = "transformers' loader of slices needs accelerate, which is not installed"
    elif device.type != (torch.accelerator.current_accelerator() or torch.device("cpu")).type:
        why = "transformers' loader of slices would put them on another device"
    if why:
        return {}, (Decision("weights", "read whole", why),)
    config = DistributedConfig(tp_size=part.size, tp_plan=slices_to_read(_without_weights(checkpoint), part.size))
    return {"distributed_config": config}, (Decision("weights", "read in slices", "each rank reads its own"),)


def _forget_loader(model: Any, like: Any) -> None:
    """What transformers' loader of slices leaves behind is not needed: forwards and plan are those of any model."""
    model._tp_plan = like.tp_plan
    for module in model.modules():
        for name in ("forward", "_is_hooked", "_device_mesh", "_mesh_manager", "_tp_size", "_fsdp_size"):
            module.__dict__.pop(name, None)
    for config in {id(each): each for each in (model.config, model.config.get_text_config())}.values():
        config.__dict__.pop("distributed_config", None)


def _plugs(config: Any) -> dict[str, Any]:
    return {
        "attn_implementation": _for_text(config, plug.NAME),
        "experts_implementation": plug.NAME,
        "trust_remote_code": False,
    }


@contextlib.contextmanager
def _told_in_one_line(checkpoint: Checkpoint) -> Iterator[None]:
    """Say what stopped transformers. Damaged files fail in whatever reads them: pickle, JSON, the family's own code."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:
        if isinstance(error, KeyError) and error.args == (plug.NAME,):
            # Older families look their attention up in a table of their own.
            raise no_interface(f"a model of family {checkpoint.config.model_type!r}") from error
        hint = f"check {_file_names(checkpoint)}, or load it with transformers to see more"
        if isinstance(error, ImportError):
            hint = "install what is missing"
        what = f"the model at {checkpoint.path} cannot be loaded"
        raise ModelError("PG661", what, why=reason_of(error), hint=hint) from error


def _file_names(checkpoint: Checkpoint) -> str:
    """The files that a model was made from, where they can be named."""
    names = [file.name for kind in ("config.json", "*.safetensors", "*.bin") for file in checkpoint.files(kind)]
    return f"its files ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})" if names else "its files"


def _class_for(config: Any) -> Any:
    """What loads a model: the text part of some models has a configuration that the automatic class does not know."""
    named = (config.architectures or [""])[0]
    if _sees_images(config):
        return transformers.AutoModelForImageTextToText
    if type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING or not named.endswith("ForCausalLM"):
        return transformers.AutoModelForCausalLM
    return getattr(transformers, named, transformers.AutoModelForCausalLM)


def _sees_images(config: Any) -> bool:
    """Whether a model is known only together with what reads images for it. Its decoder of text is run."""
    is_known = type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    has_images = type(config) in transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    return has_images and not is_known and not config.is_encoder_decoder


def _for_text(config: Any, implementation: str) -> Any:
    """An implementation for the decoder alone: what reads images keeps its own, so that callers can use it."""
    return {"text_config": implementation} if _sees_images(config) else implementation


def _make_dummy(
    checkpoint: Checkpoint, dtype: torch.dtype | str, device: torch.device
) -> tuple[Any, tuple[Decision, ...]]:
    """A model of the right shapes, made on its device without touching a disk."""
    wanted = checkpoint.config.dtype if dtype == "auto" else dtype
    with _told_in_one_line(checkpoint):
        model = _without_weights(checkpoint, wanted or torch.float32)
        model.to_empty(device=device)
        model.init_weights()
    return model, ()


def _without_weights(checkpoint: Checkpoint, dtype: torch.dtype | str = torch.float32) -> Any:
    config = copy.deepcopy(checkpoint.config)  # from_config writes the plugs into it
    with torch.device("meta"):
        known = _class_for(config) if _sees_images(config) else transformers.AutoModelForCausalLM
        make: Any = known.from_config
        return make(config, dtype=dtype, **_plugs(config))


@contextlib.contextmanager
def without_bars() -> Iterator[None]:
    """Keep transformers' own progress bars out of ours."""
    logging: Any = transformers.logging
    had_bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if had_bars:
            logging.enable_progress_bar()


@contextlib.contextmanager
def without_plugs(model: Any) -> Iterator[None]:
    """Run a model as transformers would: for comparison."""
    model.set_attn_implementation(_for_text(model.config, "eager"))
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(_for_text(model.config, plug.NAME))
        if hasattr(model, "set_experts_implementation"):
            model.set_experts_implementation(plug.NAME)


def unplug(model: Any) -> None:
    """Have a model run as transformers runs it if it is not told otherwise: for benchmarks."""
    set_experts: Any = getattr(model, "set_experts_implementation", None)
    for choose, names in ((model.set_attn_implementation, ("sdpa", "eager")), (set_experts, ("grouped_mm", "eager"))):
        for name in names if choose else ():
            with contextlib.suppress(ValueError):  # not every model has both
                choose(_for_text(model.config, name))
                break
