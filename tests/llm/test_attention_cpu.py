"""Attention for a CPU against its definition: keys in one piece and scattered, with masks and without."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from piecegraph.llm.kernels.attention import cpu
from piecegraph.llm.specs import AttentionBatch, AttentionLayer, Rejected
from tests.cases.attention import Problem, Sequences, assert_close, check, layer, problem, run
from tests.llm.test_attention_reference import DECODE, LAYERS, MIXED, PADDED_DECODE, SEQUENCES


@pytest.mark.parametrize("sequences", SEQUENCES, ids=lambda s: s.name)
@pytest.mark.parametrize("spec", LAYERS.values(), ids=LAYERS.keys())
def test_matches_the_definition(spec: Any, sequences: Sequences) -> None:
    check(cpu.KERNEL, spec, sequences)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sequences", [DECODE, MIXED], ids=lambda s: s.name)
@pytest.mark.parametrize("name", ["gqa", "sinks", "latent"])
def test_half_types(name: str, sequences: Sequences, dtype: torch.dtype) -> None:
    check(cpu.KERNEL, LAYERS[name], sequences, dtype)


@pytest.mark.parametrize("name", ["gqa", "window", "chunk", "softcap, sinks, chunk"])
@pytest.mark.parametrize("sequences", SEQUENCES, ids=lambda s: s.name)
def test_keys_in_one_piece_are_read_where_they_lie(
    name: str, sequences: Sequences, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = LAYERS[name]
    assert isinstance(spec, AttentionLayer)
    case = in_one_piece(problem(spec, sequences, torch.float32))
    monkeypatch.setattr(cpu, "_FEW_KEYS", 0)
    monkeypatch.setattr(torch.Tensor, "index_select", lambda *_: pytest.fail("nothing is gathered"))
    run(cpu.KERNEL, case)
    assert_close(case.arguments["out"], case.expected, torch.float32)


def test_a_step_of_decoding_has_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    masks = []
    original = F.scaled_dot_product_attention

    def watched(*args: Any, attn_mask: torch.Tensor | None, **kwargs: Any) -> torch.Tensor:
        masks.append(attn_mask)
        return original(*args, attn_mask=attn_mask, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    monkeypatch.setattr(cpu, "_FEW_KEYS", 0)
    check(cpu.KERNEL, layer(4, 2, 16, window=5), DECODE)
    assert masks == [None] * len(DECODE.spans)


@pytest.mark.parametrize("sequences", [DECODE, PADDED_DECODE], ids=lambda s: s.name)
@pytest.mark.parametrize("name", LAYERS)
def test_short_sequences_decode_one_by_one_alike(
    name: str, sequences: Sequences, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "_FEW_KEYS", 0)
    check(cpu.KERNEL, LAYERS[name], sequences)


def test_short_sequences_decode_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    original = F.scaled_dot_product_attention

    def watched(*args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(args[0].shape[0])
        return original(*args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    check(cpu.KERNEL, layer(4, 2, 16), DECODE)
    assert calls == [len(DECODE.spans)]


def test_what_was_read_of_a_batch_serves_all_layers_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [problem(layer(4, 2, 16, window=5), MIXED, torch.float32, seed=seed) for seed in range(2)]
    assert torch.equal(cases[0].batch.seq_lens, cases[1].batch.seq_lens)
    assert cpu.KERNEL.read_batch is not None
    for case in cases:
        batch = case.batch
        read = dataclasses.replace(batch, host=cpu.KERNEL.read_batch(batch))
        case.arguments["batch"] = read
        run(cpu.KERNEL, case)
        assert_close(case.arguments["out"], case.expected, torch.float32)
        monkeypatch.setattr(cpu, "_read_spans", lambda *_: pytest.fail("the batch is read once"))
        run(cpu.KERNEL, case)
        monkeypatch.undo()


def test_it_is_for_a_cpu() -> None:
    assert isinstance(cpu.KERNEL.supports(layer(4, 2, 16), torch.float32, torch.device("cuda")), Rejected)


def in_one_piece(case: Problem) -> Problem:
    """The same with the blocks of each sequence one behind the other."""
    batch: AttentionBatch = case.batch
    table, size = batch.block_table, batch.block_size
    moved = {}
    for row in range(len(table)):
        for column, block in enumerate(table[row].tolist()):
            if block < len(case.arguments["key_cache"]):
                moved[block] = 1 + row * table.shape[1] + column
    for name in ("key_cache", "value_cache"):
        cache = torch.full_like(case.arguments[name], float("nan"))
        for old, new in moved.items():
            cache[new] = case.arguments[name][old]
        case.arguments[name] = cache
    slots = [moved.get(slot // size, 0) * size + slot % size for slot in batch.slots.tolist()]
    batch.slots.copy_(torch.tensor(slots))
    table.copy_(torch.tensor([[moved.get(block, block) for block in row] for row in table.tolist()]))
    return case
