"""Models of random weights."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import piecegraph
from llm import shapes
from vocabulary import make_tokenizer


@contextmanager
def loaded(model: str, max_model_len: int, arguments: dict[str, Any], *, makes_text: bool) -> Iterator[piecegraph.LLM]:
    """One of ``llm.py``, or of a folder with a config.json.

    Args:
        model: which.
        max_model_len: of the longest request.
        arguments: of LLM.
        makes_text: whether it has a tokenizer, a made-up one. Its files are there inside the block.
    """
    defaults: dict[str, Any] = {"load_format": "dummy", "prefix_cache": False, "max_model_len": max_model_len}
    if not torch.cuda.is_available():
        defaults["backend"] = "eager"
    with tempfile.TemporaryDirectory() as folder:
        write_model(model, max_model_len, Path(folder), makes_text=makes_text)
        with piecegraph.LLM(folder, **{**defaults, **arguments}) as llm:
            yield llm


def write_model(model: str, max_model_len: int, folder: Path, *, makes_text: bool) -> None:
    """The files of a model, but for its weights."""
    config = config_of(model)
    config.max_position_embeddings = max(config.max_position_embeddings, max_model_len)
    # Other engines ask for it: a configuration alone does not say that it is of a model that writes.
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    config.save_pretrained(folder)
    if makes_text:
        make_tokenizer(config.vocab_size).save_pretrained(folder)


def config_of(model: str) -> Any:
    return transformers.AutoConfig.from_pretrained(model) if Path(model).is_dir() else shapes()[model].config
