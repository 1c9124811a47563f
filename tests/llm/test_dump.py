"""The dump of a language model: by the same code as that of a module."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import torch.fx

import piecegraph
from piecegraph.graph.fx_nodes import op_name
from tests.cases.llm_shelf import shelf

PROMPT = [5, 6, 7, 8]


def test_a_language_model_is_dumped(tmp_path: Path) -> None:
    options = {"graph_device": "simulated", "dump": tmp_path / "dump", "provenance": True, "self_check": False}
    with shelf(tmp_path / "models") as models:
        llm = models.load("llama", capture_sizes=[1, 8], max_num_seqs=2, options=options)
        answer = llm.generate([PROMPT], max_new_tokens=4, ignore_eos=True)[0]
        assert answer.token_ids == models.greedy("llama", PROMPT, 4)
    folder = tmp_path / "dump" / "LlamaForCausalLM"
    index = (folder / "index.md").read_text()
    assert "4 pieces, 3 distinct (each compiled once), 3 cuts; complete" in index
    assert "reads the batch and the cache" in index
    assert "## Recorded sizes" in index
    assert "aten::linear" in (folder / "kernels.md").read_text()
    repros = sorted(folder.glob("piece_*.py"))
    assert [repro.name for repro in repros] == ["piece_00.py", "piece_02.py", "piece_06.py"]
    for repro in repros:
        scope = runpy.run_path(str(repro))
        results = scope["make_piece"]()(*scope["make_inputs"](scope["Maker"]("cpu"), (5,)))
        assert 5 in results[0].shape, "it runs, at another size"


def without_silu(module: torch.fx.GraphModule, inputs: list[Any]) -> Any:
    """A compiler that knows all but one op."""
    if any(op_name(node) == "aten::silu" for node in module.graph.nodes):
        raise KeyError("silu")
    return module.forward


def test_a_piece_of_a_language_model_that_fails(tmp_path: Path) -> None:
    """Steps are called directly here."""
    with shelf(tmp_path / "models") as models, piecegraph.dump(tmp_path / "dump"):
        llm = models.load("llama", backend=without_silu, options={"self_check": False})
        answer = llm.generate([PROMPT], max_new_tokens=2, ignore_eos=True)[0]
        assert answer.token_ids == models.greedy("llama", PROMPT, 2)
    folder = tmp_path / "dump" / "LlamaForCausalLM"
    text = (folder / "piece_00.py").read_text()
    assert "# weight " in text
    assert "maker.tensor((size0,), (1,), torch.int64, 0, 1)" not in text, "the tokens that were seen"
    smallest = (folder / "piece_02_smallest.py").read_text()
    assert re.search(r"def forward\(.*\n.*\n +silu: .*silu\(.*\n +return \(silu,\)", smallest)
    assert f"python {folder / 'piece_02_smallest.py'} --check" in llm.events.distinct[0][0].hint
