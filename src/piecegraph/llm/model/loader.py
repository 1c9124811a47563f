"""From a path to a model on its device, with our plugs in it, and what is refused before any time is spent."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import pickle
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import transformers

from piecegraph.base.plan import Decision
from piecegraph.errors import ModelError
from piecegraph.llm.model import plug
from piecegraph.llm.model.refusals import no_interface, refuse_family, refuse_model

LoadFormat = Literal["auto", "dummy"]


_HUB_NAME = re.compile(r"\w[\w.-]{0,95}(/\w[\w.-]{0,95})?")
"""What may be asked for on the hub: everything else can only be a folder."""


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
    is_folder = os.path.exists(path)
    if is_folder:
        _check_files(Path(path))
    elif not _HUB_NAME.fullmatch(path):
        raise _no_model(path, "there is no such folder", 'give a folder, or a name on the hub such as "org/model"')
    try:
        config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=False)
    except Exception as error:  # values that a family cannot work with fail in its own code
        place = "its config.json cannot be used" if is_folder else "no such folder, and no name that transformers finds"
        raise _no_model(path, f"{place}: {_reason(error)}", "give the folder of a transformers model") from error
    _check_counts(path, config)
    return config


def _check_files(folder: Path) -> None:
    """What transformers would trip over without saying where."""
    if not (folder / "config.json").is_file():
        raise _no_model(str(folder), "it holds no config.json", "give the folder that save_pretrained wrote")
    for name in ("config.json", "generation_config.json"):
        file = folder / name
        try:
            is_fine = not file.is_file() or isinstance(json.loads(file.read_bytes()), dict)
            why = "it is no JSON object"
        except (OSError, ValueError, RecursionError) as error:
            is_fine, why = False, _reason(error)
        if not is_fine:
            raise _no_model(str(folder), f"its {name} cannot be read: {why}", "check that the file is complete")


def _check_counts(path: str, config: Any) -> None:
    """Without layers or words there is nothing to run."""
    of_text = config.get_text_config()
    for name in ("num_hidden_layers", "hidden_size", "vocab_size"):
        count = getattr(of_text, name, None)
        if isinstance(count, int) and count < 1:
            raise _no_model(path, f"its config.json says {name} is {count}", "check that the file is complete")


def _no_model(path: str, why: str, hint: str) -> ModelError:
    return ModelError("PG661", f"{path} is no model", why=why, hint=hint)


def _reason(error: Exception) -> str:
    """What transformers, or what it calls, says in many lines or in none."""
    if "trust_remote_code" in str(error):
        return "it needs code that comes with the model, and such code is not run"
    if isinstance(error, (pickle.UnpicklingError, EOFError)):
        return "a file of weights is no checkpoint of PyTorch"
    first, *others = str(error).strip().splitlines() or [""]
    told = f"{first} {others[0].strip()}" if first.endswith(":") and others else first
    return f"{type(error).__name__}: {told}" if told else type(error).__name__


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
    how = {
        "attn_implementation": _for_text(config, plug.NAME),
        "experts_implementation": plug.NAME,
        "trust_remote_code": False,
    }
    try:
        if load_format == "dummy":
            return _make_dummy(config, dtype, device, how), []
        load: Any = _class_for(config).from_pretrained
        # Weights of another shape are told by us: transformers would print a report, and raise an error without them.
        model, found = load(path, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True, **how)
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:  # damaged files fail in whatever reads them: pickle, JSON, the family's own code
        if isinstance(error, KeyError) and error.args == (plug.NAME,):
            # Older families look their attention up in a table of their own.
            raise no_interface(f"a model of family {config.model_type!r}") from error
        hint = f"check {_file_names(path)}, or load it with transformers to see more"
        raise _not_loaded(path, _reason(error), hint) from error
    _check_complete(path, found["missing_keys"], found["mismatched_keys"])
    return model, _unused_weights(found["unexpected_keys"])


def _check_complete(path: str, missing: Collection[str], mismatched: Collection[tuple[str, Any, Any]]) -> None:
    """Transformers would fill what is missing, or of another shape, with random numbers."""
    hint = "check that the files are complete and of this kind of model"
    if mismatched:
        name, stored, expected = min(mismatched)
        many = f" ({len(mismatched) - 1} more like it)" if len(mismatched) > 1 else ""
        why = f"{name} is of shape {tuple(stored)} in its files, and of {tuple(expected)} by its config.json{many}"
        raise _not_loaded(path, why, hint)
    if missing:
        raise _not_loaded(path, f"its files lack {_some(missing)}", hint)


def _not_loaded(path: str, why: str, hint: str) -> ModelError:
    return ModelError("PG661", f"the model at {path} cannot be loaded", why=why, hint=hint)


def _file_names(path: str) -> str:
    """The files that a model was made from, where they can be named."""
    kinds = ("config.json", "*.safetensors", "*.bin")
    names = [file.name for kind in kinds for file in Path(path).glob(kind)] if os.path.isdir(path) else []
    return f"its files ({_some(names)})" if names else "its files"


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


def _make_dummy(config: Any, dtype: torch.dtype | str, device: torch.device, how: dict[str, Any]) -> Any:
    """A model of the right shapes, made on its device without touching a disk."""
    config = copy.deepcopy(config)  # from_config writes the plugs into it
    wanted = config.dtype if dtype == "auto" else dtype
    with torch.device("meta"):
        known = _class_for(config) if _sees_images(config) else transformers.AutoModelForCausalLM
        make: Any = known.from_config
        model = make(config, dtype=wanted or torch.float32, **how)
    model.to_empty(device=device)
    model.init_weights()
    return model


def _read_tokenizer(path: str) -> tuple[Any | None, str]:
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(path, trust_remote_code=False)
        # transformers makes one up where there are no files for it; some of these have a piece besides the marks.
        is_empty = len(tokenizer) <= len(tokenizer.all_special_ids) + 1
    except Exception as error:  # noqa: BLE001 - tokenizers raise plain Exceptions, too; it is told when one is needed
        return None, _reason(error)
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
