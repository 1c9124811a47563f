"""What reaches torch's ``varlen_attn``, with a stand-in of the same meaning: torch's own runs on a GPU alone."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from piecegraph.llm.kernels.attention import varlen
from piecegraph.llm.specs import Accepted, Rejected
from tests.cases.attention import Sequences, check, latent_layer, layer, problem, run
from tests.llm.test_attention_reference import DECODE, LAYERS, MIXED, PADDED_DECODE, PREFILL


def stand_in(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    query_starts: torch.Tensor,
    key_starts: torch.Tensor | None,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool = False,
    seqused_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
) -> torch.Tensor:
    assert enable_gqa == (q.shape[1] != k.shape[-2])
    rows = []
    for i, (start, end) in enumerate(zip(query_starts.tolist(), query_starts.tolist()[1:], strict=False)):
        if block_table is not None and seqused_k is not None:
            length = int(seqused_k[i])
            blocks = block_table[i, : -(-length // k.shape[1])].long()
            keys, values = (cache[blocks].flatten(0, 1)[:length] for cache in (k, v))
        else:
            assert key_starts is not None
            keys, values = (rows[key_starts[i] : key_starts[i + 1]] for rows in (k, v))
        assert end - start <= max_q
        assert len(keys) <= max_k
        position = torch.arange(len(keys) - (end - start), len(keys))[:, None]
        visible = torch.arange(len(keys)) <= position
        if window_size[0] >= 0:
            visible &= torch.arange(len(keys)) >= position - window_size[0]
        by_head = [tensor.transpose(0, 1)[None] for tensor in (q[start:end], keys, values)]
        result = torch.nn.functional.scaled_dot_product_attention(
            *by_head, attn_mask=visible, scale=scale, enable_gqa=enable_gqa
        )
        rows.append(result[0].transpose(0, 1))
    return torch.cat(rows)


@pytest.mark.parametrize("sequences", [DECODE, PADDED_DECODE, PREFILL, MIXED], ids=lambda s: s.name)
@pytest.mark.parametrize("name", ["plain", "gqa", "window"])
def test_gathered(name: str, sequences: Sequences, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varlen, "varlen_attn", stand_in)
    check(varlen.KERNEL, LAYERS[name], sequences)


@pytest.mark.parametrize("sequences", [DECODE, PADDED_DECODE, MIXED], ids=lambda s: s.name)
def test_cache_read_in_place(sequences: Sequences, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> torch.Tensor:
        raise AssertionError("nothing is gathered")

    monkeypatch.setattr(varlen, "varlen_attn", stand_in)
    monkeypatch.setattr(varlen, "_reads_blocks", lambda: True)
    monkeypatch.setattr(varlen, "_gather", never)
    check(varlen.KERNEL, LAYERS["gqa"], sequences)


def test_a_batch_of_padding_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    sequences = Sequences(name="real", spans=((1, 3),), padded_tokens=1, padded_seqs=1)
    monkeypatch.setattr(varlen, "varlen_attn", stand_in)
    case = problem(layer(2, 2, 16), sequences, torch.float32)
    case.batch.query_starts.zero_()
    case.batch.seq_lens.zero_()
    case.batch.slots.zero_()
    run(varlen.KERNEL, case)
    assert torch.equal(case.arguments["out"], torch.zeros(2, 2, 16))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (layer(4, 2, 64, softcap=1.0), "softcap"),
        (layer(4, 2, 64, has_sinks=True), "sinks"),
        (layer(4, 2, 64, chunk=4), "chunks"),
        (layer(4, 2, 64, value_width=32), "one width"),
        (layer(4, 2, 100), "not 100"),
        (layer(4, 2, 512), "not 512"),
        (latent_layer(2, 8, 4, 4, 4), "latent"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_rejects_what_flash_attention_cannot_do(spec: Any, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    cuda = torch.device("cuda")
    verdict = varlen.KERNEL.supports(spec, torch.bfloat16, cuda)
    assert isinstance(verdict, Rejected)
    assert reason in verdict.reason
    good = dataclasses.replace(layer(4, 2, 64), window=5)
    assert varlen.KERNEL.supports(good, torch.bfloat16, cuda) == Accepted()
    assert isinstance(varlen.KERNEL.supports(good, torch.float32, cuda), Rejected)
    assert isinstance(varlen.KERNEL.supports(good, torch.bfloat16, torch.device("cpu")), Rejected)
