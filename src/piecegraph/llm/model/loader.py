"""From a path to a model on its device, with our plugs in it, and what is refused before any time is spent."""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
import transformers

from piecegraph.base.plan import Decision
from piecegraph.errors import ModelError
from piecegraph.llm.model import plug
from piecegraph.llm.model.checkpoint import Checkpoint, find_checkpoint, reason_of
from piecegraph.llm.model.quantisation import make_one_precision, quantisation_of
from piecegraph.llm.model.refusals import no_interface, refuse_family, refuse_model
from piecegraph.llm.model.weights import check_weights

LoadFormat = Literal["auto", "dummy"]


@dataclass(frozen=True)
class LoadedModel:
    """A model as transformers gives it."""

    model: Any
    tokenizer: Any | None
    tokenizer_error: str
    """Why there is no tokenizer."""
    experts: tuple[torch.nn.Module, ...]
    max_positions: int
    """Tokens of a sequence that the model was made for."""
    decisions: tuple[Decision, ...]


def load(
    path: str, *, dtype: torch.dtype | Literal["auto"], device: torch.device, load_format: LoadFormat
) -> LoadedModel:
    """Load a causal language model and its tokenizer.

    Args:
        path: a folder with a model, or a name that transformers can find.
        dtype: of the weights; ``"auto"`` takes the checkpoint's, on a CPU float32 in place of half precision.
        device: where to put it.
        load_format: ``"dummy"`` fills the weights with small random numbers and needs only the configuration.
    """
    checkpoint = find_checkpoint(os.path.expanduser(path))
    config = checkpoint.config
    refuse_family(config)
    dtype, precision = _precision(config, dtype, device)
    with without_bars():
        is_dummy = load_format == "dummy"
        made, loading = _make_dummy(checkpoint, dtype, device) if is_dummy else _load_weights(checkpoint, dtype)
    model = made.to(device).eval().requires_grad_(False)
    refuse_model(model)
    decisions = (*precision, *loading)
    tokenizer, tokenizer_error = _read_tokenizer(checkpoint.path, is_local=checkpoint.is_local)
    plug.note_windows(model)
    experts = plug.number_experts(model)
    return LoadedModel(model, tokenizer, tokenizer_error, experts, _max_positions(config), decisions)


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


def _load_weights(checkpoint: Checkpoint, dtype: torch.dtype | str) -> tuple[Any, tuple[Decision, ...]]:
    """A model with the weights of its files: all of them, and no others."""
    path, quantisation = checkpoint.path, quantisation_of(checkpoint)
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
            **_plugs(checkpoint.config),
        )
    unused = check_weights(checkpoint, model, told, is_quantised=bool(quantisation.method))
    if quantisation.arguments:
        make_one_precision(model)
    return model, (*quantisation.decisions, *unused)


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
    config = copy.deepcopy(checkpoint.config)  # from_config writes the plugs into it
    wanted = config.dtype if dtype == "auto" else dtype
    with _told_in_one_line(checkpoint):
        with torch.device("meta"):
            known = _class_for(config) if _sees_images(config) else transformers.AutoModelForCausalLM
            make: Any = known.from_config
            model = make(config, dtype=wanted or torch.float32, **_plugs(config))
        model.to_empty(device=device)
        model.init_weights()
    return model, ()


def _read_tokenizer(path: str, *, is_local: bool) -> tuple[Any | None, str]:
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(path, trust_remote_code=False, local_files_only=is_local)
        # transformers makes one up where there are no files for it; some of these have a piece besides the marks.
        is_empty = len(tokenizer) <= len(tokenizer.all_special_ids) + 1
    except Exception as error:  # noqa: BLE001 - tokenizers raise plain Exceptions, too; it is told when one is needed
        return None, reason_of(error)
    return (None, "its folder has no vocabulary") if is_empty else (tokenizer, "")


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
