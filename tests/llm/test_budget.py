"""What is kept free besides the cache: states, sampling, log-probabilities."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from piecegraph.errors import ModelError
from piecegraph.llm import parts, startup
from piecegraph.llm.run.sampling import logprobs_bytes, rows_at_once
from piecegraph.llm.run.scheduler import SchedulerLimits
from piecegraph.llm.run.sizing import choose_step_sizes
from tests.cases.llm_shelf import Shelf

NUM_SEQS = 16
STATE_BYTES = 4 * (160 * 4 + 8 * 16 * 16)
"""What the one layer of the model keeps of a sequence: 160 channels of 4 inputs, and 8 heads of 16 by 16."""


def test_states_of_modules_in_opaque_form_are_kept_free(models: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    free = NUM_SEQS * STATE_BYTES + 100_000
    monkeypatch.setattr(parts, "free_host_bytes", lambda: free)
    monkeypatch.setattr(parts, "free_bytes", lambda device: free)
    monkeypatch.setattr(startup, "free_bytes_twice", lambda device: 2**30)  # the buffers of steps are not the question
    llm = models.load("bamba", max_num_seqs=NUM_SEQS, memory_fraction=1.0)
    stats = llm.stats()
    assert stats["state_bytes"] == NUM_SEQS * STATE_BYTES
    assert 50_000 < stats["cache_bytes"] <= 100_000
    assert "  0.2 MiB for the states of 16 sequences\n" in llm.explain()
    with pytest.raises(ModelError, match="PG665 there is no room for the cache in 0 MiB"):
        models.load("bamba", max_num_seqs=2 * NUM_SEQS, memory_fraction=1.0)


def test_states_in_fine_form_are_told(models: Shelf) -> None:
    llm = models.load("qwen3_next", max_num_seqs=3)
    # Slot 0 belongs to nobody. Two layers: 96 channels of 3 inputs, and 4 heads of 16 by 8.
    assert llm.stats()["state_bytes"] == 4 * 2 * 4 * (96 * 3 + 4 * 16 * 8)
    assert "for the states of 3 sequences\n" in llm.explain()
    assert models.load("llama").stats()["state_bytes"] == 0


def test_the_step_that_samples_from_a_sorted_vocabulary_is_measured() -> None:
    limits = SchedulerLimits(max_num_seqs=64, max_batch_tokens=512, max_model_len=128, vocab_size=1000)
    sizes = choose_step_sizes("auto", has_graphs=True, max_num_seqs=64, max_batch_tokens=512, max_model_len=8192)
    decode, mixed = parts._largest_steps(sizes.largest(limits))
    assert (decode.bucket.kind, decode.bucket.num_seqs, decode.sampling) == ("decode", 64, "truncated")
    assert (mixed.bucket.kind, mixed.bucket.num_tokens) == ("mixed", 512)


def test_rows_of_prompts_are_looked_at_by_their_bytes() -> None:
    for vocab_size in (128, 32_000, 262_144, 2**30):
        rows = rows_at_once(vocab_size)
        assert rows == 1 or rows * vocab_size * 4 <= 128 * 2**20
        assert logprobs_bytes(1, vocab_size) == 3 * 4 * rows * vocab_size
    assert logprobs_bytes(1024, 262_144) == 3 * 4 * 1024 * 262_144


def test_prompt_log_probabilities_in_parts_are_the_same(models: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = torch.Generator().manual_seed(0)
    prompt = torch.randint(4, 128, (13,), generator=numbers).tolist()
    llm = models.load("llama")

    def logprobs() -> list[float]:
        (answer,) = llm.generate([prompt], max_new_tokens=1, prompt_logprobs=0)
        return [entry.logprob for entry in answer.prompt_logprobs[1:]]

    whole = logprobs()
    monkeypatch.setattr("piecegraph.llm.run.sampling._TABLE_BYTES", 5 * 4 * 128)
    assert rows_at_once(128) == 5
    assert logprobs() == pytest.approx(whole, abs=1e-5)


class Gpu:
    """The memory of a device, on which recording the largest steps takes 100 MiB."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free, self.num_recorded, self.noted = 8 << 30, 0, dict[str, Any]()
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (self.free, 10 << 30))
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
        properties = SimpleNamespace(name="a GPU", total_memory=10 << 30)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)

    def start(self, max_num_seqs: int = 4) -> int:
        """The budget of a process that finds what others have noted; its own memory is free again afterwards."""
        limits = SchedulerLimits(max_num_seqs=max_num_seqs, max_batch_tokens=64, max_model_len=128, vocab_size=100)
        library = SimpleNamespace(session=contextlib.nullcontext, record=self._record, forget=lambda: None, dropped={})
        sizes = choose_step_sizes("auto", has_graphs=True, max_num_seqs=4, max_batch_tokens=64, max_model_len=8192)
        pipeline = SimpleNamespace(recall=self.noted.get, note=self.noted.__setitem__)
        options = SimpleNamespace(provenance=False)
        fields = {
            "config": SimpleNamespace(
                device=torch.device("cuda"),
                cudagraph_mode="auto",
                deterministic=False,
                options=options,
                memory_fraction=1,
            ),
            "model": SimpleNamespace(pipeline=pipeline, reaches=()),
            "limits": limits,
            "memory": SimpleNamespace(allocate=lambda blocks: None),
            "forward": SimpleNamespace(library=library, sizes=sizes),
            "buffers": SimpleNamespace(limits=()),
            **{"states": None, "device": self, "events": None, "kernels": (), "ranks": None},
        }
        before = self.free
        found = parts.Parts(**fields)._measure_budget()  # type: ignore[arg-type]
        self.free = before
        return found

    def _record(self, keys: Any, *, tidies: bool) -> None:
        self.num_recorded += 1
        self.free -= 100 << 20


def test_the_largest_steps_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(monkeypatch)
    first = gpu.start()
    assert gpu.start() == first
    assert gpu.num_recorded == 1
    gpu.free -= 300 << 20  # another process takes it
    assert gpu.start() == first - (300 << 20)
    assert gpu.num_recorded == 1
    gpu.start(max_num_seqs=3)
    assert gpu.num_recorded == 2, "other steps take other memory"
