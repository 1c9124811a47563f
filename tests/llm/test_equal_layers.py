"""A language model of which only some layers were traced answers as transformers does; see tests/graph."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import piecegraph
from tests.cases.checkpoints import save_checkpoint

PROMPT = [5, 9, 17, 33, 21, 8, 90, 44, 3]


@pytest.mark.parametrize(
    ("family", "told"),
    [("gpt_oss", "4 of 6 traced"), ("deepseek_v3", "3 of 5 traced")],
    ids=["windows and experts", "one layer without experts"],
)
def test_answers_are_those_of_all_layers(family: str, told: str, tmp_path: Path) -> None:
    reference, tokens = save_checkpoint(family, tmp_path, num_layers=int(told.split()[2])), list(PROMPT)
    with torch.inference_mode():
        for _ in range(8):
            tokens.append(int(reference(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    with piecegraph.LLM(tmp_path, backend="eager", device="cpu", options={"progress": False}) as llm:
        (answer,) = llm.generate([PROMPT], max_new_tokens=8, ignore_eos=True)
        assert answer.token_ids == tokens[len(PROMPT) :]
        assert f"layers: {told} (the others are equal to them but for their weights)" in llm.explain()
