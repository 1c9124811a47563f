"""Weights that go to their memory while other things are done. On a CPU, where nothing has to be pinned."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import piecegraph
from piecegraph.errors import ModelError
from piecegraph.llm.model import loader, weight_stream
from piecegraph.llm.model.weight_stream import WeightsRead, WeightStream
from tests.cases.checkpoints import save_checkpoint

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "llama"
    save_checkpoint("llama", folder)
    return folder


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_stream, "_BLOCK", 1000)


def read(folder: Path) -> Any:
    return loader.load(str(folder), dtype="auto", device=CPU, load_format="auto").model


def start(model: torch.nn.Module) -> WeightStream:
    moved = [(parameter, parameter.data) for parameter in model.parameters()]
    for parameter, host in moved:
        parameter.data = torch.full_like(host, float("nan"))
    return WeightStream(moved, CPU)


def same(model: torch.nn.Module, other: torch.nn.Module) -> bool:
    pairs = zip(model.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(one, two) for one, two in pairs)


def test_every_weight_is_read_from_its_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files: list[str] = []
    read_file = weight_stream._read_file
    monkeypatch.setattr(weight_stream, "_read_file", lambda *args: files.append(args[0]) or read_file(*args))
    model = read(folder)
    found = start(model).wait()
    assert same(model, read(folder))
    assert set(files) == {str(folder / "model.safetensors")}
    assert found.num_bytes == sum(parameter.nbytes for parameter in model.parameters())
    assert found.disk_bytes == 0, "it was written just now"


def test_what_was_written_to_behind_the_file_is_kept(folder: Path) -> None:
    model, expected = read(folder), read(folder)
    for each in (model, expected):
        each.model.norm.weight.data.fill_(7)  # in the mapping, by whoever loads
    stream = start(model)
    found = stream.wait()
    assert same(model, expected)
    assert stream.wait() == found
    assert not stream._weights, "the host's copy is not held on to"


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Nothing is read until it is open, but for the first block."""
    opened, first = threading.Event(), threading.Semaphore(1)
    read_file = weight_stream._read_file

    def wait_and_read(*args: Any) -> None:
        if not first.acquire(blocking=False):
            opened.wait()
        read_file(*args)

    monkeypatch.setattr(weight_stream, "_read_file", wait_and_read)
    yield opened
    opened.set()


def test_weights_may_move_before_and_while_they_are_read(folder: Path, gate: threading.Event) -> None:
    model = read(folder)
    stream = start(model)
    parameters = list(model.parameters())
    pending = [each for each in parameters if not stream._weights[id(each)].has_begun]
    begun = [each for each in parameters if stream._weights[id(each)].has_begun]
    assert pending
    memories = {id(each): torch.full_like(each, float("nan")) for each in parameters}
    for each in pending:
        stream.place(each, memories[id(each)])
    gate.set()
    for each in begun:
        stream.place(each, memories[id(each)])
    stream.wait()
    assert same(model, read(folder))
    assert all(each.data_ptr() == memories[id(each)].data_ptr() for each in parameters)


def test_a_file_that_becomes_shorter_is_an_error(folder: Path, tmp_path: Path, gate: threading.Event) -> None:
    copy = tmp_path / "copy"
    save_checkpoint("llama", copy, has_tokenizer=False)
    stream = start(read(copy))
    os.truncate(copy / "model.safetensors", 5000)
    gate.set()
    with pytest.raises(ModelError, match="PG661 .*model.safetensors cannot be read: it has become shorter"):
        stream.wait()


def test_a_model_starts_meanwhile_and_its_linears_are_joined(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = read(folder)
    monkeypatch.setattr(loader, "stream_weights", lambda model, device: start(model))
    with piecegraph.LLM(str(folder), backend="eager", dtype=torch.float32, max_model_len=64) as llm:
        assert same(llm.started.loaded.model, expected)
        weight = llm.started.loaded.model.model.layers[0].mlp.up_proj.weight
        assert weight.untyped_storage().nbytes() > weight.nbytes, "it shares the memory of gate_proj"
        assert llm.stats()["weights"]["num_bytes"] > 0
        assert "  weights: " in llm.explain()


def test_weights_on_a_cpu_stay_in_their_files(folder: Path) -> None:
    assert weight_stream.stream_weights(read(folder), CPU) is None


def test_the_disk_is_told_apart() -> None:
    warm, cold = WeightsRead(2 * 10**9, 0.5, 0.1, 0, 0.0), WeightsRead(2 * 10**9, 2.0, 1.5, 10**9, 1.0)
    assert str(warm) == "2.00 GB in 0.50 s (4.0 GB/s), all from memory; the start waited 0.10 s for them"
    assert str(cold).startswith("2.00 GB in 2.00 s (1.0 GB/s), 50% from the disk at 1.0 GB/s;")
