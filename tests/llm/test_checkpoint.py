"""What lies at a path: models, and what people take for one. A folder needs no network, and a name does not wait."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
import transformers as hf

from piecegraph.errors import ModelError
from piecegraph.llm.model.checkpoint import find_checkpoint
from piecegraph.llm.model.loader import load
from tests.cases.checkpoints import save_checkpoint

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 988097824\n"


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Every host that is looked for; none is found."""
    asked: list[Any] = []

    def look_up(host: Any, *_: Any, **__: Any) -> None:
        asked.append(host)
        raise socket.gaierror(-3, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    return asked


def test_a_folder_needs_no_network(tmp_path: Path, requests: list[Any]) -> None:
    save_checkpoint("llama", tmp_path)
    loaded = load(str(tmp_path), dtype="auto", device=torch.device("cpu"), load_format="auto")
    assert loaded.tokenizer is not None
    assert requests == []


def test_a_name_without_a_network_is_refused_at_once(requests: list[Any]) -> None:
    begun = time.perf_counter()
    with pytest.raises(ModelError, match="PG661 my-model is no model: there is no such folder, and https://.* cannot"):
        find_checkpoint("my-model")
    assert len(requests) <= 2, "one request, for either kind of address"
    assert time.perf_counter() - begun < 10


def test_a_name_that_was_fetched_before_needs_no_network(
    tmp_path: Path, requests: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    repository, commit = tmp_path / "models--org--tiny", "a" * 40
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    save_checkpoint("llama", repository / "snapshots" / commit)
    assert find_checkpoint("org/tiny").files("*.safetensors") == [
        repository / "snapshots" / commit / "model.safetensors"
    ]
    loaded = load("org/tiny", dtype="auto", device=torch.device("cpu"), load_format="auto")
    assert loaded.tokenizer is not None
    (repository / "snapshots" / commit / "hf_quant_config.json").write_text("{}")
    with pytest.raises(ModelError, match="PG669"):
        load("org/tiny", dtype="auto", device=torch.device("cpu"), load_format="auto")


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_pointers_of_git_lfs(name: str, tmp_path: Path) -> None:
    save_checkpoint("llama", tmp_path)
    (tmp_path / name).write_text(POINTER)
    with pytest.raises(ModelError, match=f"PG661 .*: its {name} is a pointer of git-lfs, .* hint: run `git lfs pull`"):
        find_checkpoint(str(tmp_path))


def test_gguf(tmp_path: Path) -> None:
    (tmp_path / "tiny-q4.gguf").write_bytes(b"GGUF")
    for path in (tmp_path, tmp_path / "tiny-q4.gguf"):
        with pytest.raises(
            ModelError, match="PG661 .* is no model: it is in GGUF, .* hint: .*gguf_file='tiny-q4.gguf'"
        ):
            find_checkpoint(str(path))


@pytest.mark.parametrize("has_model", [False, True])
def test_an_adapter(has_model: bool, tmp_path: Path) -> None:
    if has_model:
        save_checkpoint("llama", tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    with pytest.raises(ModelError, match="PG661 .* is no model: it holds an adapter .* hint: merge it"):
        find_checkpoint(str(tmp_path))


def test_an_encoder_with_a_decoder(tmp_path: Path) -> None:
    hf.T5Config(d_model=8, d_ff=8, num_layers=1, num_heads=2, vocab_size=32).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="PG662 models of family 't5' are refused: it is an encoder-decoder"):
        load(str(tmp_path), dtype="auto", device=torch.device("cpu"), load_format="auto")
