"""Language models from the cache: a new process traces nothing, answers the same, and is checked all the same."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.fx.experimental import symbolic_shapes

import piecegraph
from piecegraph.engine import plan_cache
from piecegraph.errors import ModelError
from piecegraph.llm import startup
from tests.cases.checkpoints import save_checkpoint
from tests.cases.forked import ForkServer

PROMPTS = [[5, 6, 7, 8], [9, 10, 11]]

PROGRAM = """
import json, sys, time
import torch, torch._dynamo.convert_frame, torch._inductor.compile_fx
import piecegraph

def refuse(*args, **kwargs):
    raise AssertionError("a compiler was called")

if sys.argv[2] == "refused":
    torch._dynamo.convert_frame.fullgraph_capture = torch._inductor.compile_fx.compile_fx = refuse
start = time.perf_counter()
with piecegraph.LLM(sys.argv[1], backend="eager", device="cpu", options={"progress": False}) as llm:
    wall = time.perf_counter() - start
    tokens = [done.token_ids for done in llm.generate(json.loads(sys.argv[3]), max_new_tokens=6, ignore_eos=True)]
    cache = [str(decision) for decision in llm.started.decisions if decision.subject == "cache"]
    print(json.dumps({"tokens": tokens, "cache": cache, "stages": llm.stats()["stages"], "wall": wall}))
"""


def load(path: Path) -> Any:
    return piecegraph.LLM(path, backend="eager", device="cpu", options={"progress": False})


def told(llm: Any) -> str:
    return next(str(decision) for decision in llm.started.decisions if decision.subject == "cache")


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and a cache that has it."""
    folder = tmp_path_factory.mktemp("kept")
    save_checkpoint("llama", folder / "model", num_layers=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIECEGRAPH_CACHE", str(folder / "cache"))
        load(folder / "model").close()
    return folder


@pytest.fixture
def model(once: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same, in a folder of its own."""
    shutil.copytree(once, tmp_path, dirs_exist_ok=True)
    monkeypatch.setenv("PIECEGRAPH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "model"


def test_a_new_process_traces_nothing(forked: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIECEGRAPH_CACHE", str(tmp_path / "cache"))
    save_checkpoint("qwen3", tmp_path / "model", num_layers=1)

    def run(compilers: str) -> Any:
        words = ("-c", PROGRAM, str(tmp_path / "model"), compilers, json.dumps(PROMPTS))
        done = forked.run(*words, cwd=tmp_path, environment=dict(os.environ))
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    cold, warm = run("allowed"), run("refused")
    assert cold["cache"] == ["cache: cold (nothing is kept of Qwen3ForCausalLM yet)"]
    assert warm["cache"][0].startswith("cache: warm (")
    assert warm["tokens"] == cold["tokens"]
    for found in (cold, warm):
        expected = ["import", "load", "trace", "split", "compile", "kernels", "measure", "record", "check"]
        assert list(found["stages"]) == expected
        assert 0.98 * found["wall"] < sum(found["stages"].values()) <= found["wall"]


def test_what_a_start_has_measured_is_kept(model: Path) -> None:
    found: list[int | None] = []
    for noted in (12, None):
        with load(model) as llm:
            pipeline = llm.started.model.pipeline
            found.append(pipeline.recall("bytes"))
            pipeline.note("bytes", noted)
            pipeline.keep(llm.started.model.traced)
    with load(model) as llm:
        found.append(llm.started.model.pipeline.recall("bytes"))
    assert found == [None, 12, None]


def test_an_edited_configuration_is_a_miss(model: Path) -> None:
    with load(model) as llm:
        assert "cache: warm" in told(llm)
        assert "cache: warm" in llm.explain()
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-3}))
    with load(model) as llm:
        assert "variance_epsilon was 1e-06, is 0.001" in told(llm)


def test_a_plan_is_not_to_blame_for_the_weights(model: Path) -> None:
    file = model / "model.safetensors"
    weights = load_file(file)
    save_file({**weights, "model.norm.weight": weights["model.norm.weight"] * torch.nan}, file, {"format": "pt"})
    with pytest.raises(ModelError, match="PG664 .* and so does transformers"):
        load(model)
    save_file(weights, file, {"format": "pt"})
    with load(model) as llm:
        assert "cache: warm" in told(llm)


def test_what_fails_the_self_check_is_made_anew(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check, failures = startup.self_check, [ModelError("PG664", "it answers differently", why="logits differ")]

    def fail_once(*args: Any) -> Any:
        if failures:
            raise failures.pop()
        return check(*args)

    monkeypatch.setattr(startup, "self_check", fail_once)
    with load(model) as llm:
        assert re.fullmatch(r"cache: cold \(entry \w+ cannot be used: logits differ\)", told(llm))
        assert "PG674 cache entry" in llm.explain()
        assert not failures
        assert llm.generate(PROMPTS, max_new_tokens=2, ignore_eos=True)[0].token_ids
    with load(model) as llm:
        assert "cache: warm" in told(llm)


def test_nothing_of_torch_export_is_imported_to_read_a_trace(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch does so to find the line of the user's that a size comes from."""

    def refuse() -> Any:
        raise AssertionError("all of torch.export is imported")

    monkeypatch.setattr(symbolic_shapes, "uninteresting_files", refuse)
    with load(model) as llm:
        assert "cache: warm" in told(llm)


def test_a_model_that_is_wrong_is_told_however_often_its_plan_comes_back(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process writes the plan again while this one makes it anew."""

    def fail(*args: Any) -> Any:
        raise ModelError("PG664", "it answers differently", why="logits differ")

    monkeypatch.setattr(plan_cache, "_refused", {})
    monkeypatch.setattr(plan_cache, "remove_entry", lambda key: None)
    monkeypatch.setattr(startup, "self_check", fail)
    with pytest.raises(ModelError, match="PG664"):
        load(model)
