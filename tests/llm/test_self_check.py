"""The comparison with transformers: what it finds, what it lets pass, and what it does with little room."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from piecegraph.errors import ModelError
from piecegraph.llm import startup
from piecegraph.llm.cache.paged import CacheGroup, PagedCache
from piecegraph.llm.kernels.attention import reference
from piecegraph.llm.run import agreement, self_check
from tests.cases.llm_shelf import Shelf

pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
"""On a CPU without instructions for half precision."""

ATTEND = reference._attend_cached


def damage(patch: pytest.MonkeyPatch, *, decode: bool, factor: float) -> None:
    """Scale what attention gives in one kind of step."""

    def attend(query: Any, out: torch.Tensor, sinks: Any, keys: Any, values: Any, layer: Any, batch: Any) -> None:
        ATTEND(query, out, sinks, keys, values, layer, batch)
        if decode == (batch.max_query_len == 1):
            out.mul_(factor)

    patch.setattr(reference, "_attend_cached", attend)


@pytest.mark.parametrize("family", ["llama", "mixtral", "deepseek_v3"])
@pytest.mark.parametrize("decode", [True, False], ids=["decode", "prompts"])
def test_attention_that_is_a_little_wrong_is_found_in_half_precision(
    family: str, decode: bool, models: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    damage(monkeypatch, decode=decode, factor=0.8)
    with pytest.raises(ModelError, match="PG664 .* its logits of .* differ by") as raised:
        models.load(family, dtype="bfloat16", attention="reference")
    if decode:
        assert "its logits of decode steps" in str(raised.value)


@pytest.mark.parametrize("family", ["llama", "mixtral", "gpt_oss", "deepseek_v3", "qwen3_next"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rounding_is_no_mistake(family: str, dtype: str, models: Shelf) -> None:
    assert "self check: passed" in models.load(family, dtype=dtype).explain()


def test_one_sequence_of_two_that_is_wrong_is_found(models: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    def attend(query: Any, out: torch.Tensor, sinks: Any, keys: Any, values: Any, layer: Any, batch: Any) -> None:
        ATTEND(query, out, sinks, keys, values, layer, batch)
        out[1:2] *= 0.5 if batch.max_query_len == 1 else 1

    monkeypatch.setattr(reference, "_attend_cached", attend)
    with pytest.raises(ModelError, match="PG664 .* its logits of decode steps"):
        models.load("llama", dtype="bfloat16", attention="reference")


def engine_with(cache: PagedCache, max_model_len: int = 512) -> Any:
    return SimpleNamespace(scheduler=SimpleNamespace(limits=SimpleNamespace(max_model_len=max_model_len), cache=cache))


@pytest.mark.parametrize(
    ("reach", "longest"),
    [({}, 18), ({"window": 5}, 18), ({"window": 128}, 250), ({"chunk": 240}, 250), ({"window": 1024}, 18)],
)
def test_a_prompt_is_longer_than_a_window_if_that_is_short(reach: dict[str, int], longest: int) -> None:
    cache = PagedCache([CacheGroup(num_blocks=40), CacheGroup(num_blocks=40, **reach)], block_size=16)
    assert self_check._choose_lengths(engine_with(cache), has_others=False) == ([6, longest], 8)


def test_kernels_for_many_rows_are_tried_too() -> None:
    cache = PagedCache([CacheGroup(num_blocks=40)], block_size=16)
    assert self_check._choose_lengths(engine_with(cache), has_others=True) == ([6, 250], 8)


@pytest.mark.parametrize(
    ("num_blocks", "max_model_len", "lengths", "num_new"),
    [(2, 512, [2, 2], 3), (3, 512, [4, 4], 5), (7, 512, [6, 17], 8), (40, 2, [1, 1], 1), (40, 16, [6, 8], 8)],
)
def test_prompts_are_as_long_as_there_is_room(
    num_blocks: int, max_model_len: int, lengths: list[int], num_new: int
) -> None:
    cache = PagedCache([CacheGroup(num_blocks=num_blocks)], block_size=4)
    assert self_check._choose_lengths(engine_with(cache, max_model_len), has_others=False) == (lengths, num_new)


@pytest.mark.parametrize(("cache_tokens", "block_size"), [(8, 4), (1, 1)])
def test_a_small_cache_is_enough(cache_tokens: int, block_size: int, models: Shelf) -> None:
    llm = models.load("llama", options={"cache_tokens": cache_tokens, "block_size": block_size})
    assert "self check: passed" in llm.explain()


def test_few_rows_behind_a_window_are_judged_by_themselves() -> None:
    errors = torch.zeros(257)
    errors[243:250] = 0.3
    generation: Any = SimpleNamespace(request=SimpleNamespace(num_prompt=250))
    kinds = self_check._in_kinds(errors, generation, reach=243)
    found = agreement.findings(kinds, torch.bfloat16)
    assert {finding.kind for finding in found if finding.severity > 1} == {"prompts behind a window"}


def test_numbers_that_are_none_are_far_off() -> None:
    rows = torch.ones(3, 4)
    rows[1, 2] = torch.nan
    assert (agreement.row_errors(torch.ones(3, 4), rows) > 1).tolist() == [False, True, False]


def test_an_error_leaves_counts_and_events_as_they_were(models: Shelf) -> None:
    llm = models.load("llama")
    engine = llm.started.engine
    llm.generate([[5, 6, 7]], max_new_tokens=3, ignore_eos=True)
    events, num_steps = engine.events, engine.counts.num_steps

    def fail() -> None:
        with startup._uncounted(engine):
            assert engine.events is not events
            engine.counts.add("decode", 5, 5, is_replayed=True, is_larger=False)
            raise ModelError("PG664", "wrong")

    with pytest.raises(ModelError):
        fail()
    assert (engine.events, engine.counts.num_steps) == (events, num_steps)


def test_in_float32_single_rows_may_differ_by_more_than_most() -> None:
    """As those of Zamba2 do, whose layers compute one token by another formula than many."""

    def is_right(*rows: float) -> bool:
        findings = agreement.findings({"decode steps": torch.tensor(rows)}, torch.float32)
        return all(finding.severity <= 1 for finding in findings)

    assert is_right(1e-4, 7e-4, 8e-4, 2.2e-3)
    assert not is_right(1e-4, 3e-3, 3e-3, 3e-3)
    assert not is_right(1e-4, 1e-4, 1e-4, 2e-2)
