"""What a language model tells about itself: every decision, every stage, every loss."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import piecegraph
from piecegraph.llm.run.model_step import ModelStep, StepKey
from tests.cases.llm_shelf import Shelf

GOLDEN = Path(__file__).parents[1] / "golden" / "llm.txt"
PROMPTS = [[5, 6, 7], [8, 9], [10, 11, 12, 13]]


def without_measures(text: str) -> str:
    """Seconds and how much the self-check found differ from run to run."""
    return re.sub(r"differ by [\d.e-]+", "differ by #", re.sub(r" +\d+\.\d+ s\b", " # s", text))


def test_explain(models: Shelf) -> None:
    llm = models.load(
        "gemma3",
        attention="reference",
        max_num_seqs=2,
        max_batch_tokens=8,
        capture_sizes=[1, 2, 4],
        options={"graph_device": "simulated", "cache_tokens": 512},
    )
    llm.generate(PROMPTS, max_new_tokens=4, ignore_eos=True)
    text = without_measures(llm.explain()) + "\n"
    if os.environ.get("UPDATE_GOLDEN"):
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text()


def test_a_report_to_share(models: Shelf, tmp_path: Path) -> None:
    llm = models.load("llama", attention="reference", capture_sizes=[1, 2, 4], options={"graph_device": "simulated"})
    llm.generate(PROMPTS, max_new_tokens=2, ignore_eos=True)
    html = llm.report(tmp_path / "llm.html").read_text()
    stats = llm.stats()
    assert html.count('<li class="piece') == stats["num_pieces"]
    assert f"<title>How {llm.path} runs</title>" in html
    for words in ("steps replayed", "piecegraph::attention", "weights", "cache", "graphs", "self check", "mixed"):
        assert words in html, words
    data = json.loads(html.partition('id="data">')[2].partition("</script>")[0])
    assert data["stats"]["num_steps"] == stats["num_steps"]


def test_stages_add_up(models: Shelf) -> None:
    models.path("llama")
    start = time.perf_counter()
    llm = models.load("llama")
    wall = time.perf_counter() - start
    stages = llm.stats()["stages"]
    assert {"import", "load", "kernels", "measure", "record", "check"} <= stages.keys()
    assert 0.98 * wall - 0.01 < sum(stages.values()) - stages["import"] <= wall


def test_steps_are_those_of_requests(models: Shelf) -> None:
    llm = models.load("llama")
    assert llm.stats()["num_steps"] == 0, "the self-check is not counted"
    llm.generate(PROMPTS, max_new_tokens=4, ignore_eos=True)
    assert llm.stats()["num_steps"] == 4


def test_a_step_above_the_largest_size_is_counted(models: Shelf) -> None:
    llm = models.load("llama", capture_sizes=[2, 16], max_num_seqs=3, options={"graph_device": "simulated"})
    answers = llm.generate(PROMPTS, max_new_tokens=[4, 4, 2], ignore_eos=True)
    (loss,) = llm.stats()["fallbacks"].items()
    assert loss == ("PG503 a decode step: decode 3 tokens runs the compiled pieces without graphs", 1)
    assert "  1 x PG503 a decode step: decode 3 tokens" in llm.explain()
    assert [answer.metrics.graph_coverage for answer in answers] == [3 / 4, 3 / 4, 1 / 2]


def test_a_size_without_memory_is_dropped_once(models: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[StepKey] = []
    ways = ModelStep.ways

    def fail_for_sampled(self: ModelStep, key: StepKey) -> Any:
        tried.append(key)
        if key.sampling != "greedy" and key.bucket.kind == "decode":
            raise torch.OutOfMemoryError("no memory left. Much more text")
        return ways(self, key)

    monkeypatch.setattr(ModelStep, "ways", fail_for_sampled)
    llm = models.load("llama", capture_sizes=[4], options={"graph_device": "simulated", "look_ahead": True})
    sampled = llm.generate(PROMPTS[0], max_new_tokens=6, temperature=0.5, seed=1, ignore_eos=True)
    lost = {
        "PG402 decode 4 tokens, plain: no memory left": 1,
        "PG402 decode 4 tokens, truncated: no memory left": 1,
        "PG402 decode 4 tokens, 4096 adjusted logits, truncated: no memory left": 1,
        "PG402 decode 4 tokens, 4096 adjusted logits, masks, truncated: no memory left": 1,
        "PG503 a decode step: decode 4 tokens, plain runs the compiled pieces without graphs": 5,
    }
    assert llm.stats()["fallbacks"] == lost
    llm.generate(PROMPTS[0], max_new_tokens=6, temperature=0.5, seed=1, ignore_eos=True)
    lost["PG503 a decode step: decode 4 tokens, plain runs the compiled pieces without graphs"] = 10
    assert llm.stats()["fallbacks"] == lost
    assert sum(key.sampling == "plain" and key.bucket.kind == "decode" for key in tried) == 1
    monkeypatch.undo()
    plain = models.load("llama").generate(PROMPTS[0], max_new_tokens=6, temperature=0.5, seed=1, ignore_eos=True)
    assert sampled[0].token_ids == plain[0].token_ids


@pytest.mark.parametrize(
    ("arguments", "decision"),
    [
        ({"max_model_len": 32}, "max_model_len: 32 (asked for)"),
        ({}, "max_model_len: 512 (the model was made for 512 tokens)"),
        ({"prefix_cache": False}, "prefix cache: off (asked for)"),
        ({"options": {"look_ahead": True}}, "look ahead: on (asked for)"),
        ({"cudagraph_mode": "none"}, "decode steps: direct (asked for)"),
        ({"attention": "reference"}, "attention: reference (asked for by name)"),
    ],
)
def test_choices_and_their_reasons(arguments: dict[str, Any], decision: str, models: Shelf) -> None:
    assert f"\n  {decision}\n" in models.load("llama", **arguments).explain()


def test_what_a_recurrent_model_cannot_have(models: Shelf) -> None:
    decision = "prefix cache: off (blocks of keys and values do not bring back a recurrent state)"
    assert decision in models.load("mamba2").explain()


def test_full_graphs_are_refused_where_a_kernel_cannot_be_captured(models: Shelf) -> None:
    with pytest.raises(piecegraph.errors.ConfigError, match="PG301 decode steps cannot be one graph: cpu attention"):
        models.load("llama", cudagraph_mode="full", options={"graph_device": "simulated"})
