"""From a path to a model on its device, with our plugs in it, and what is refused before any time is spent."""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from safetensors import SafetensorError

from piecegraph.errors import ModelError
from piecegraph.llm import plug
from piecegraph.llm.refusals import no_interface, refuse_family, refuse_model
from piecegraph.plan import Decision

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
    path = os.path.expanduser(path)
    config = _read_config(path)
    refuse_family(config)
    dtype, precision = _precision(config, dtype, device)
    with without_bars():
        made, unused = _make(path, config, dtype, load_format, device)
    model = made.to(device).eval().requires_grad_(False)
    refuse_model(model)
    decisions = (*precision, *unused)
    tokenizer, tokenizer_error = _read_tokenizer(path)
    plug.note_windows(model)
    experts = plug.number_experts(model)
    return LoadedModel(model, tokenizer, tokenizer_error, experts, _max_positions(config), decisions)


def _max_positions(config: Any) -> int:
    """Some have no limit, or say -1."""
    told = getattr(config.get_text_config(), "max_position_embeddings", None) or 0
    return int(told) if told > 0 else 2048


def _read_config(path: str) -> Any:
    folder = Path(path)
    if folder.exists() and not (folder / "config.json").is_file():
        raise ModelError(
            "PG661",
            f"{path} is no model",
            why="it holds no config.json",
            hint="give the folder that save_pretrained wrote",
        )
    try:
        return transformers.AutoConfig.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(
            "PG661",
            f"{path} is no model",
            why=str(error).strip().splitlines()[0],
            hint="give the folder of a transformers model",
        ) from error


def _precision(
    config: Any, dtype: torch.dtype | Literal["auto"], device: torch.device
) -> tuple[torch.dtype | Literal["auto"], tuple[Decision, ...]]:
    """Which dtype ``"auto"`` means: where a CPU has no instructions for half precision, it takes many times as long."""
    stored = getattr(config.get_text_config(), "dtype", None)
    if dtype != "auto" or device.type != "cpu" or stored not in (torch.bfloat16, torch.float16):
        return dtype, ()
    name = str(stored).removeprefix("torch.")
    return torch.float32, (Decision("dtype", "float32", f"the checkpoint's {name} is slow on many CPUs"),)


def _make(
    path: str, config: Any, dtype: torch.dtype | str, load_format: LoadFormat, device: torch.device
) -> tuple[Any, list[Decision]]:
    plugs = {"attn_implementation": _for_text(config, plug.NAME), "experts_implementation": plug.NAME}
    try:
        if load_format == "dummy":
            return _make_dummy(config, dtype, device, plugs), []
        load: Any = _class_for(config).from_pretrained
        model, found = load(path, dtype=dtype, output_loading_info=True, **plugs)
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        if isinstance(error, KeyError) and error.args == (plug.NAME,):
            # Older families look their attention up in a table of their own.
            raise no_interface(f"a model of family {config.model_type!r}") from error
        raise ModelError(
            "PG661",
            f"the model at {path} cannot be loaded",
            why=f"{type(error).__name__}: {str(error).strip().splitlines()[0]}",
            hint="check that the files are complete, or load it with transformers to see more",
        ) from error
    _check_complete(path, found["missing_keys"])
    return model, _unused_weights(found["unexpected_keys"])


def _check_complete(path: str, missing: Collection[str]) -> None:
    """Transformers would fill what is missing with random numbers."""
    if missing:
        raise ModelError(
            "PG661",
            f"the model at {path} cannot be loaded",
            why=f"its files lack {_some(missing)}",
            hint="check that the files are complete and of this kind of model",
        )


def _unused_weights(unused: Collection[str]) -> list[Decision]:
    return [Decision("unused weights", _some(unused), "the model has no place for them")] if unused else []


def _some(names: Collection[str]) -> str:
    first = sorted(names)[:3]
    return ", ".join(first) + (f" and {len(names) - len(first)} more" if len(names) > len(first) else "")


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


def _make_dummy(config: Any, dtype: torch.dtype | str, device: torch.device, plugs: dict[str, Any]) -> Any:
    """A model of the right shapes, made on its device without touching a disk."""
    config = copy.deepcopy(config)  # from_config writes the plugs into it
    wanted = config.dtype if dtype == "auto" else dtype
    with torch.device("meta"):
        known = _class_for(config) if _sees_images(config) else transformers.AutoModelForCausalLM
        make: Any = known.from_config
        model = make(config, dtype=wanted or torch.float32, **plugs)
    model.to_empty(device=device)
    model.init_weights()
    return model


def _read_tokenizer(path: str) -> tuple[Any | None, str]:
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        # transformers makes one up where there are no files for it; some of these have a piece besides the marks.
        is_empty = len(tokenizer) <= len(tokenizer.all_special_ids) + 1
    except (OSError, ValueError, KeyError, ImportError, TypeError, AttributeError) as error:
        return None, f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
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
