"""A model on several ranks answers as in one process, and ranks end together. Real processes on gloo."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import piecegraph
from piecegraph.errors import ConfigError, ModelError
from piecegraph.llm.model.shards import TRIED, Part, slices_to_read, split_model
from tests.cases.forked import ForkServer
from tests.cases.llms import tiny_model
from tests.cases.once import once_for_all_workers
from tests.cases.rank_job import ENDS, FAMILIES

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def job(forked: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    code = "import sys; from tests.cases.rank_job import main; main()"

    def run() -> dict[str, Any]:
        done = forked.run("-c", code, str(tmp_path_factory.mktemp("models")), cwd=ROOT, seconds=900)
        assert done.returncode == 0, done.stderr[-4000:]
        return {**json.loads(done.stdout.splitlines()[-1]), "stderr": done.stderr}

    found: dict[str, Any] = once_for_all_workers(tmp_path_factory, "rank_job", run)
    return found


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_answer_as_one_process_does(job: dict[str, Any], num_ranks: int) -> None:
    ranks = job[f"{num_ranks} ranks"]
    assert [rank["code"] for rank in ranks] == [0] * num_ranks, [rank["result"] for rank in ranks]
    for rank in ranks:
        for name in FAMILIES:
            check_alike(rank["result"][name]["answers"], job["alone"][name])


def check_alike(found: list[dict[str, Any]], alone: list[dict[str, Any]]) -> None:
    """Up to rounding: what an Intel CPU makes of a row depends on where it lies in memory, in the last bit."""
    assert [each["tokens"] for each in found] == [each["tokens"] for each in alone]
    for each, expected in zip(found, alone, strict=True):
        assert each["logprobs"] == pytest.approx(expected["logprobs"], abs=1e-4)


def test_heads_are_shared_out_and_those_of_keys_are_kept_twice_where_they_are_few(job: dict[str, Any]) -> None:
    """All families have 4 heads; of keys and values there are 2, or one latent."""
    for num_ranks, expected in ((2, [2, 1]), (4, [1, 1])):
        for rank in job[f"{num_ranks} ranks"]:
            heads = {name: rank["result"][name]["heads"] for name in FAMILIES}
            assert heads.pop("deepseek_v3") == [expected[0], None]
            assert set(map(tuple, heads.values())) == {tuple(expected)}


def test_calls_of_all_kinds_are_followed(job: dict[str, Any]) -> None:
    first, second = (rank["result"] for rank in job["calls"])
    assert first["answers"] == second["answers"]
    assert first["answers"][0]["tokens"] == job["alone"]["llama"][0]["tokens"]
    stop = first["whole"][0][2]
    assert first["stopped"][0] == first["whole"][0].partition(stop)[0]
    assert first["refused"] == second["refused"] == "PG652"
    assert first["processors"] == second["processors"] == "PG108"
    assert (first["chunks"], second["chunks"]) == (6, 0), "chunks are the first rank's"
    assert first["own scheduler"] == second["own scheduler"] == first["answers"][0]["tokens"][:3]
    assert first["asyncio"] == [each["tokens"] for each in first["answers"]]
    assert first["afterwards"] == second["afterwards"]
    for name in ("whole", "stopped", "sampled", "stats"):
        assert first[name] == second[name], name


def test_steps_are_recorded_and_cut_where_the_host_sends(job: dict[str, Any]) -> None:
    told = job["calls"][0]["result"]
    assert told["stats"]["coverage"] == 1.0
    assert not told["stats"]["fallbacks"]
    assert "2 cuts at piecegraph_ranks::all_reduce: is sent to other ranks by the host" in told["explain"]
    assert "decode steps: piecewise (what ranks add up is sent by the host)" in told["explain"]
    if importlib.util.find_spec("accelerate") is not None:
        assert "weights: read in slices (each rank reads its own)" in told["explain"]


def test_a_job_of_one_process_goes_the_way_of_several(job: dict[str, Any]) -> None:
    (rank,) = job["single"]
    assert rank["code"] == 0, rank["result"]
    check_alike(rank["result"]["answers"], job["alone"]["llama"])
    assert "tensor parallel: rank 0 of 1 (100% of the weights" in rank["result"]["explain"]
    assert "2 cuts at piecegraph_ranks::all_reduce" in rank["result"]["explain"]


def test_a_module_with_a_collective_is_cut_there(job: dict[str, Any]) -> None:
    for rank in job["module"]:
        assert rank["code"] == 0, rank["result"]
        assert rank["result"]["differences"] == pytest.approx([0, 0, 0], abs=1e-6)
        (cut,) = rank["result"]["cuts"]
        assert cut == ["_c10d_functional::all_reduce and 1 more", "is sent to other ranks by the host"]
        assert rank["result"]["coverage"] == 1.0
    assert [rank["result"]["dump"] for rank in job["module"]] == ["look/rank0", "look/rank1"]


def test_a_job_may_have_several_models_beside_each_other(job: dict[str, Any]) -> None:
    found = [rank["result"] for rank in job["neighbours"]]
    assert [each["place"] for each in found] == [[0, 2], [1, 2], [0, 2], [1, 2]]
    assert [each["first"] for each in found] == [each["least"] for each in found] == [0, 0, 2, 2]
    assert [each["sum"] for each in found] == [3.0, 3.0, 7.0, 7.0]
    assert found[3]["differ"] == "PG684 numbers differ from rank to rank: rank 0 has 2, and rank 1 has 3"
    assert not any("three" in each for each in found), "no multiple of three"


def test_more_families_are_the_same_in_parts(job: dict[str, Any]) -> None:
    for rank in job["neighbours"]:
        parts = rank["result"]["parts"]
        assert max(parts.values()) < 1e-5, parts
        named = {"gemma3": "gemma3_text"}
        assert {named.get(name, name) for name in (*parts, *FAMILIES)} == TRIED


def test_weights_of_ranks_are_those_of_one_process(job: dict[str, Any]) -> None:
    for rank in job["neighbours"]:
        assert rank["result"]["dummy"]
        told = "weights: read whole (what the ranks make is compared with what the whole makes)"
        assert told in rank["result"]["untried"]
        assert rank["result"]["wrong"].startswith("PG682 LlamaForCausalLM cannot be shared out to ranks: their logits")


@pytest.mark.parametrize("end", [" ".join(end) for end in ENDS])
def test_ranks_end_together(job: dict[str, Any], end: str) -> None:
    first, second = job[end]
    is_killed = "killed" in end
    assert second["code"] == (-9 if is_killed else 70)
    assert first["code"] == 1
    assert abs(first["time"] - second["time"]) < 15, "seconds"
    told = "PG683 rank 1 of 2 is gone: its process has ended" if is_killed else "PG683 rank 1 of 2 failed: "
    if first["result"] is None:  # it was busy and heard of nothing, so its watch ended it
        assert f"error: {told}" in job["stderr"]
    else:
        assert first["result"].startswith(told)
        assert "busy" not in end
    assert job["stderr"].count("loading a model failed on rank 1 of 2") == 1, "one report"


def test_a_process_of_its_own_is_no_rank(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="PG681 there are no other ranks"):
        piecegraph.LLM(tmp_path, device="cpu", tensor_parallel_size=2)
    with pytest.raises(ConfigError, match="PG101 tensor_parallel_size is 0"):
        piecegraph.LLM(tmp_path, device="cpu", tensor_parallel_size=0)
    with pytest.raises(ConfigError, match="tensor_parallel_size"):
        piecegraph.LLM(tmp_path, device="cpu", tp_size=2)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "size", "why"),
    [
        ("gpt2", 2, "transformers has no plan for the family 'gpt2'"),
        ("phi3", 2, "its plan leaves every weight whole"),
        ("llama", 3, "it has 4 heads, and there are 3 ranks"),
        ("llama", 8, "it has 4 heads, and there are 8 ranks"),
    ],
)
def test_what_cannot_be_shared_out_is_refused(name: str, size: int, why: str) -> None:
    with pytest.raises(ModelError, match=f"PG682 .*{why}"):
        split_model(tiny_model(name), Part(0, size, "nobody"))


@pytest.mark.parametrize("name", ["gpt2", "mamba", "llama"])
def test_one_rank_keeps_all_of_any_family(name: str) -> None:
    whole, model = dict(tiny_model(name).named_parameters()), tiny_model(name)
    split_model(model, Part(0, 1, "nobody"))
    found = dict(model.named_parameters())
    assert found.keys() == whole.keys()
    assert all(torch.equal(weight, whole[path]) for path, weight in found.items())


def test_torn_sizes_are_refused() -> None:
    model = tiny_model("llama", num_layers=1)
    model.model.layers[0].mlp.gate_proj = torch.nn.Linear(64, 97, bias=False)
    with pytest.raises(ModelError, match=r"PG682 the weight model.layers.0.mlp.gate_proj.weight .*97.* 2 ranks"):
        split_model(model, Part(0, 2, "nobody"))


def test_parts_of_all_ranks_are_the_whole() -> None:
    whole = dict(tiny_model("qwen3_moe", num_layers=1).named_parameters())
    parts = []
    for rank in range(2):
        model = tiny_model("qwen3_moe", num_layers=1)
        (decision,) = split_model(model, Part(rank, 2, "nobody"))
        assert decision.choice == f"rank {rank} of 2"
        parts.append(dict(model.named_parameters()))
    layer = "model.layers.0."
    for name, dim in ((f"{layer}self_attn.q_proj.weight", 0), (f"{layer}self_attn.o_proj.weight", 1)):
        assert torch.equal(torch.cat([part[name] for part in parts], dim), whole[name])
    gate_up = f"{layer}mlp.experts.gate_up_proj"
    gates, ups = zip(*(part[gate_up].chunk(2, 1) for part in parts), strict=True)
    assert torch.equal(torch.cat((*gates, *ups), 1), whole[gate_up])
    for part in parts:
        assert torch.equal(part["model.embed_tokens.weight"], whole["model.embed_tokens.weight"])
        assert torch.equal(part[f"{layer}mlp.gate.weight"], whole[f"{layer}mlp.gate.weight"])


def test_what_is_read_in_slices() -> None:
    plan = slices_to_read(tiny_model("llama", num_layers=1), 4)
    layer = "model.layers.*.self_attn."
    assert plan[f"{layer}q_proj"] == "colwise"
    assert plan[f"{layer}o_proj"] == "rowwise"
    assert plan[f"{layer}k_proj"] == plan["lm_head"] == "moe_tp_experts", "two heads for four ranks are cut later"
