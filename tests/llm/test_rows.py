"""The last piece of a model is run on the rows that are asked for: see Note [Rows of the last piece]."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import piecegraph
from piecegraph.engine import mode
from piecegraph.errors import ModelError
from piecegraph.llm import Request, SamplingParams
from piecegraph.llm.model.decoder import Decoder
from piecegraph.tape.simulated import SimulatedGraphs
from tests.cases.llm_shelf import Shelf

PROMPTS = [[9] * 3 + [17, 80, 33], [40, 41, 60, 7] * 5, [100]]
SELECT = Decoder.select
GRAPHS: dict[str, Any] = {"capture_sizes": [4, 32], "options": {"graph_device": "simulated"}}


class RowsOfWeights(TorchDispatchMode):
    """How many rows each weight was multiplied with."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = {parameter.data_ptr(): name for name, parameter in model.named_parameters()}
        self.seen: dict[str, list[int]] = defaultdict(list)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for arg in args:
            if isinstance(arg, torch.Tensor) and arg.dim() == 2 and arg.data_ptr() in self._names:
                self.seen[self._names[arg.data_ptr()]].append(result.numel() // result.shape[-1])
        return result


def first_step(llm: piecegraph.LLM, **how: Any) -> Any:
    scheduler = llm.make_scheduler()
    for index, prompt in enumerate(PROMPTS):
        scheduler.add(Request(str(index), prompt, SamplingParams(max_new_tokens=1)))
    plan = scheduler.schedule()
    assert plan is not None
    assert plan.num_tokens == sum(map(len, PROMPTS))
    return llm.forward(plan, **how)


@pytest.mark.parametrize("settings", [{}, GRAPHS], ids=["direct", "graphs"])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "bamba"])
def test_rows_are_the_same_with_all_others_and_without_them(family: str, settings: Any, models: Shelf) -> None:
    llm = models.load(family, **settings)
    every = first_step(llm, hidden_states=True)
    few = first_step(llm)
    last = torch.tensor([len(prompt) for prompt in PROMPTS]).cumsum(0) - 1
    torch.testing.assert_close(few.hidden, every.hidden[last])
    torch.testing.assert_close(few.logits, every.logits)
    assert few.tokens.tolist() == every.tokens.tolist()
    for prompt, logits in zip(PROMPTS, few.logits, strict=True):
        torch.testing.assert_close(logits, models.logits(family, prompt)[-1], rtol=1e-3, atol=1e-3)


def test_the_last_layer_ends_with_a_row_for_each_sequence(models: Shelf) -> None:
    llm = models.load("llama")
    with RowsOfWeights(llm.started.loaded.model) as rows:
        first_step(llm)
    num_layers = llm.started.loaded.model.config.num_hidden_layers
    downs = [rows.seen[f"model.layers.{i}.mlp.down_proj.weight"] for i in range(num_layers)]
    assert downs == [*[[27]] * (num_layers - 1), [3]]
    assert "last piece: on rows with logits" in llm.explain()


def test_requests_for_all_rows_get_them_beside_others(models: Shelf) -> None:
    llm = models.load("llama", **GRAPHS)
    engine = llm.started.engine
    plain, with_rows = (
        engine.add(prompt, SamplingParams(max_new_tokens=3, ignore_eos=True, return_hidden_states=wanted), seed=0)
        for prompt, wanted in zip(PROMPTS[:2], (False, True), strict=True)
    )
    with torch.inference_mode():
        while engine.step():
            pass
    assert plain.hidden_states == []
    assert len(torch.cat(with_rows.hidden_states)) == len(PROMPTS[1]) + 2
    for prompt, answer in zip(PROMPTS[:2], (plain, with_rows), strict=True):
        assert answer.request.generated == models.greedy("llama", prompt, 3)


@pytest.mark.parametrize("settings", [{}, GRAPHS], ids=["direct", "graphs"])
def test_a_last_piece_that_needs_the_other_rows_is_run_on_all(
    models: Shelf, monkeypatch: pytest.MonkeyPatch, settings: Any
) -> None:
    monkeypatch.setattr(
        Decoder, "select", lambda self, values, rows: [value + 1 for value in SELECT(self, values, rows)]
    )
    llm = models.load("llama", **settings)
    assert "last piece: on all tokens (it makes something else of a row without the others)" in llm.explain()
    few = first_step(llm)
    assert len(few.hidden) == len(PROMPTS)
    for prompt, logits in zip(PROMPTS, few.logits, strict=True):
        torch.testing.assert_close(logits, models.logits("llama", prompt)[-1], rtol=1e-3, atol=1e-3)


def test_wrong_rows_of_plain_steps_are_found_by_the_self_check(models: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    # The one row that is tried before is the same from both ends.
    monkeypatch.setattr(Decoder, "select", lambda self, values, rows: SELECT(self, values, rows.flip(0)))
    with pytest.raises(ModelError, match="PG664 LlamaForCausalLM answers differently"):
        models.load("llama")


def test_a_last_piece_that_cannot_be_captured_runs_between_graphs(models: Shelf) -> None:
    def uncapturable(module: torch.fx.GraphModule, inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            if device.num_nodes() is not None:
                raise RuntimeError("operation not permitted when stream is capturing")
            return module(*args)

        return run

    device = SimulatedGraphs()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mode, "SimulatedGraphs", lambda: device)
        llm = models.load("llama", backend=uncapturable, **GRAPHS)
    (answer,) = llm.generate([PROMPTS[0]], max_new_tokens=3, ignore_eos=True)
    assert answer.token_ids == models.greedy("llama", PROMPTS[0], 3)
    assert any(loss.startswith("PG401 piece 6") for loss in llm.stats()["fallbacks"])


def test_rows_of_a_prompt_that_is_done_are_not_computed_for_others(models: Shelf) -> None:
    llm = models.load("llama", **GRAPHS)
    engine = llm.started.engine
    params = SamplingParams(max_new_tokens=8, ignore_eos=True, prompt_logprobs=1, return_hidden_states=True)
    told = engine.add(PROMPTS[0], params, seed=0)
    with torch.inference_mode():
        engine.step()
        plain = engine.add(PROMPTS[1], SamplingParams(max_new_tokens=2, ignore_eos=True), seed=0)
        keys, run = [], engine.forward.run_step
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine.forward, "run_step", lambda key: [keys.append(key), run(key)][1])
            while engine.step():
                pass
    assert [key.bucket.kind for key in keys[:2]] == ["mixed", "decode"]
    assert not any(key.every_row for key in keys)
    assert plain.request.generated == models.greedy("llama", PROMPTS[1], 2)
    assert told.request.generated == models.greedy("llama", PROMPTS[0], 8)
    again = llm.generate([PROMPTS[0]], max_new_tokens=8, ignore_eos=True, return_hidden_states=True)[0]
    torch.testing.assert_close(torch.cat(told.hidden_states), again.hidden_states)
