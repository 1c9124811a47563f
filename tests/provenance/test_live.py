"""Choosing kernels of graphs in use, leaving them out, timing and dumping them: on simulated graphs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import piecegraph
from piecegraph.errors import CallError, ConfigError, KernelError, SelectionError
from piecegraph.provenance.live import Selection
from piecegraph.tape.tape import GraphStep
from tests.cases.known_lines import SIZE, WIDTH, Layers, Remembers, compile_known, rows
from tests.cases.tiny_llm import write_tiny_llm

FRONTENDS = pytest.mark.parametrize("frontend", ["trace", "breakable"])


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def two_sizes() -> Any:
    with torch.no_grad():
        return compile_known(Layers(), capture_sizes=[8, SIZE]).capture(rows())


def ops(selection: Selection) -> list[str]:
    return [live.call.op for live in selection.kernels if live.call is not None]


def modules(selection: Selection) -> list[str]:
    return [live.call.origins[0].module for live in selection.kernels if live.call is not None]


# ---- choosing


def test_by_op(two_sizes: Any) -> None:
    assert ops(two_sizes.kernels.select(op="aten::tanh")) == ["aten::tanh"] * 4  # two layers, two sizes
    assert ops(two_sizes.kernels.select(op="aten.mul*")) == ["aten::mul_", "aten::mul"] * 4
    # What the model calls counts as well as what that runs.
    assert set(ops(two_sizes.kernels.select(op="aten::linear"))) == {"aten::t", "aten::mm", "aten::addmm"}


def test_by_module(two_sizes: Any) -> None:
    assert set(modules(two_sizes.kernels.select(module="layers.1.gate"))) == {"layers.1.gate", "layers.1.gate.proj"}
    assert set(modules(two_sizes.kernels.select(module="gate.proj"))) == {"layers.0.gate.proj", "layers.1.gate.proj"}


def test_by_line(two_sizes: Any) -> None:
    tanh = two_sizes.kernels.select(op="aten::tanh").kernels[0]
    line = tanh.call.origins[0].line
    assert ops(two_sizes.kernels.select(line=f"known_lines.py:{line.line}")) == ["aten::tanh"] * 4
    everything = two_sizes.kernels.select()
    assert len(two_sizes.kernels.select(line="cases/known_lines.py")) == len(everything)


def test_by_kernel_piece_and_size(two_sizes: Any) -> None:
    assert ops(two_sizes.kernels.select(kernel="aten::tan*", size=8)) == ["aten::tanh"] * 2
    first = two_sizes.kernels.select(piece=0)
    assert {live.inside.record.title for live in first.kernels} == {"piece 0"}
    assert {live.tape.phase for live in first.kernels} == {"8", str(SIZE)}
    assert {live.tape.phase for live in two_sizes.kernels.select(size=(8,)).kernels} == {"8"}


def test_all_that_is_said_must_hold(two_sizes: Any) -> None:
    chosen = two_sizes.kernels.select(op="aten::mul", module="layers.0.gate", piece=0, size="8", line="known_lines.py")
    assert len(chosen) == 1
    assert repr(chosen) == "1 kernels of Layers at sizes 8"
    assert repr(two_sizes.kernels.select(op="aten::tanh")) == f"4 kernels of Layers at sizes 8, {SIZE}"


@pytest.mark.parametrize(
    ("asked", "there"),
    [
        ({"op": "aten::cos"}, "there is no op like that.*op: .*aten::tanh"),
        ({"module": "attention"}, "there is no module like that.*layers.0.gate"),
        ({"line": "other.py"}, "there is no line like that.*known_lines.py:"),
        ({"kernel": "gemm"}, "there is no kernel like that.*kernel: .*aten::mm"),
        ({"piece": 7}, "there is no piece like that.*piece: 0, 2, 4"),
        ({"size": 16}, f"there is no size like that.*size: {SIZE}, 8"),
        ({"op": "aten::addmm", "module": "layers.0.gate"}, "no single kernel has all of it.*op: .*module: "),
        ({"op": "aten::cos", "size": 16}, "there is no op and no size like that"),
    ],
    ids=str,
)
def test_what_is_not_there(two_sizes: Any, asked: dict[str, Any], there: str) -> None:
    with pytest.raises(SelectionError, match=f"PG712 .*{there}"):
        two_sizes.kernels.select(**asked)


def test_an_op_between_graphs_is_no_kernel_of_one(two_sizes: Any) -> None:
    with pytest.raises(SelectionError, match=r"PG712 .*pgtest::unsafe runs between the graphs.*intercept\(\)"):
        two_sizes.kernels.select(op="pgtest::unsafe", module="layers.0")
    with pytest.raises(SelectionError, match="PG712 .*there is no op and no kernel like that"):
        two_sizes.kernels.select(op="pgtest::unsafe", kernel="unsafe")


def test_what_cannot_be_read(two_sizes: Any) -> None:
    with pytest.raises(SelectionError, match="PG713"):
        two_sizes.kernels.select(line="known_lines.py:eight")


def test_what_is_not_known() -> None:
    without = compile_known(Layers(), options={"provenance": False})
    with pytest.raises(KernelError, match="PG731 .*nothing is recorded yet.*capture"):
        without.kernels.select()
    without(rows())
    with pytest.raises(KernelError, match="PG731 .*none of its 3 graphs.*'provenance': True"):
        without.kernels.select()
    direct = piecegraph.compile(Layers(), backend="eager", dynamic_dims={"x": 0}, options={"provenance": True})
    direct(rows())
    with pytest.raises(KernelError, match="PG731 .*nothing is recorded yet"):
        direct.kernels.select()


# ---- leaving out


@FRONTENDS
def test_a_thousand_times_off_and_on(frontend: str) -> None:
    fast = compile_known(Layers(), frontend=frontend)
    x = rows()
    expected = fast(x)
    (tape,) = fast._engine.recorded.tapes()
    memory = tape._outputs[0]
    last = fast.kernels.select(op="aten::addmm", module="layers.1.out")
    for _ in range(1000):
        last.disable()
        memory.fill_(7.0)
        assert torch.equal(fast(x), torch.full_like(expected, 7.0))  # nobody has written to it
        last.enable()
        assert torch.equal(fast(x), expected)


def test_only_the_recorded_size_that_was_chosen() -> None:
    fast = compile_known(Layers(), capture_sizes=[8, SIZE]).capture(rows())
    few, many = fast(rows(SIZE)), fast(rows(8))
    with fast.kernels.select(op="aten::addmm", size=8).disable():
        assert torch.equal(fast(rows(SIZE)), few)
        assert not torch.equal(fast(rows(8)), many)
    assert torch.equal(fast(rows(8)), many)


def test_as_a_context_it_puts_back_what_it_changed() -> None:
    fast = compile_known(Layers())
    expected = fast(rows())
    gates, products = fast.kernels.select(module="gate"), fast.kernels.select(op="aten::mul")
    products.disable()
    with gates.disable() as chosen:
        assert chosen is gates
        assert not any(live.is_on for live in gates.kernels)
        assert "switched off" in repr(gates)
    assert [live.is_on for live in products.kernels] == [False, False]  # they were off before
    assert sum(live.is_on for live in gates.kernels) == len(gates) - 2
    products.enable()
    with pytest.raises(RuntimeError, match="the caller's"), gates.disable():
        raise RuntimeError("the caller's")
    assert all(live.is_on for live in gates.kernels)
    assert torch.equal(fast(rows()), expected)


def test_the_same_selection_inside_itself() -> None:
    fast = compile_known(Layers())
    expected = fast(rows())
    chosen = fast.kernels.select(module="gate")
    with chosen.disable():
        with chosen.disable():
            pass
        assert not any(live.is_on for live in chosen.kernels)
        chosen.enable()
        assert all(live.is_on for live in chosen.kernels)
    assert all(live.is_on for live in chosen.kernels)
    assert torch.equal(fast(rows()), expected)


# ---- what is gone


def test_after_close() -> None:
    fast = compile_known(Layers())
    fast(rows())
    chosen = fast.kernels.select(op="aten::tanh")
    with chosen.disable():  # leaving the block must not fail
        fast.close()
    for use in (chosen.disable, chosen.enable, chosen.time, fast.kernels.select):
        with pytest.raises(CallError, match="PG106 Layers was called after close"):
            use()


def test_after_the_weights_moved(tmp_path: Path) -> None:
    fast = compile_known(Layers())
    fast(rows())
    chosen = fast.kernels.select(op="aten::tanh")
    fast.double()
    for use in (chosen.disable, chosen.enable, chosen.time, lambda: chosen.dump(tmp_path)):
        with pytest.raises(
            KernelError, match=f"PG735 graphs of Layers .* are gone: those of sizes {SIZE}.*select again"
        ):
            use()
    fast(rows().double())
    assert len(fast.kernels.select(op="aten::tanh").disable().enable()) == 2


# ---- timing


@FRONTENDS
def test_time(frontend: str) -> None:
    fast = compile_known(Layers(), frontend=frontend)
    expected = fast(rows())
    chosen = fast.kernels.select(module="gate")
    costs = chosen.time(rounds=3)
    assert {cost.phase for cost in costs} == {str(SIZE)}
    titles = [cost.title for cost in costs]
    assert titles[-1] == "all of them"
    assert "aten::sigmoid in layers.*.gate" in titles
    assert sum(cost.num_kernels for cost in costs[:-1]) == costs[-1].num_kernels == len(chosen)
    for cost in costs:
        assert cost.with_us > 0
        assert cost.without_us > 0
        assert cost.spread_us >= 0
        assert cost.saved_us == cost.with_us - cost.without_us
        assert cost.title in str(cost)
    assert all(live.is_on for live in chosen.kernels)
    assert torch.equal(fast(rows()), expected)
    with pytest.raises(ConfigError, match="PG101 rounds is 0"):
        chosen.time(rounds=0)


@FRONTENDS
def test_time_leaves_the_models_state_alone(frontend: str) -> None:
    model = Remembers()
    fast = compile_known(model, frontend=frontend)
    fast(rows())
    before, random = model.total.clone(), torch.get_rng_state()
    (cost,) = fast.kernels.select(op="aten::tanh").time(rounds=2)
    assert cost.title == "aten::tanh"
    assert torch.equal(model.total, before)
    assert torch.equal(torch.get_rng_state(), random)
    expected = Remembers()
    expected(rows())
    torch.testing.assert_close(fast(rows(seed=1)), expected(rows(seed=1)))


def test_kernels_that_were_off_stay_off() -> None:
    fast = compile_known(Layers())
    fast(rows())
    chosen = fast.kernels.select(op="aten::tanh").disable()
    chosen.time(rounds=1)
    assert not any(live.is_on for live in chosen.kernels)


# ---- dumping


def seen_by_hooks(model: nn.Module, x: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """The truth: what goes into and comes out of every module of the original."""
    seen: dict[str, tuple[Tensor, Tensor]] = {}
    removes = [
        part.register_forward_hook(
            lambda _, given, gave, name=name: seen.update({name: (given[0].clone(), gave.clone())})
        )
        for name, part in model.named_modules()
    ]
    model(x)
    for remove in removes:
        remove.remove()
    return seen


@FRONTENDS
def test_dump_of_ops_in_graphs(frontend: str, tmp_path: Path) -> None:
    model = Layers().eval()
    fast = compile_known(model, frontend=frontend)
    fast(rows(seed=1))
    fast(rows())
    truth = seen_by_hooks(model, rows())
    matmul = "aten::linear" if frontend == "trace" else "aten::addmm"
    paths = fast.kernels.select(op=matmul, module="layers.*.out").dump(tmp_path / "new" / "folder")
    assert [path.parent.name for path in paths] == [str(SIZE)] * 2
    for number, path in enumerate(paths):
        saved = torch.load(path)
        given, gave = truth[f"layers.{number}.out"]
        assert (saved["op"], saved["module"]) == (matmul, f"layers.{number}.out")
        assert saved["line"].startswith("known_lines.py:")
        inputs = [leaf for leaf in saved["inputs"][0] if isinstance(leaf, Tensor)]
        assert any(leaf.shape == given.shape and torch.equal(leaf, given) for leaf in inputs)
        torch.testing.assert_close(saved["outputs"], gave)


@FRONTENDS
def test_dump_shows_inputs_as_they_were_before_the_op_wrote_to_them(frontend: str, tmp_path: Path) -> None:
    fast = compile_known(Layers(1), frontend=frontend)
    fast(rows())
    (path,) = fast.kernels.select(op="aten::mul_").dump(tmp_path)
    saved = torch.load(path)
    assert torch.equal(saved["outputs"], saved["inputs"][0][0] * 0.5)


@FRONTENDS
def test_dump_changes_nothing(frontend: str, tmp_path: Path) -> None:
    model = Remembers()
    fast = compile_known(model, frontend=frontend)
    fast(rows())
    before = model.total.clone()
    (path,) = fast.kernels.select(op="aten::tanh").dump(tmp_path)
    assert torch.equal(torch.load(path)["outputs"], torch.tanh(rows()))
    assert torch.equal(model.total, before)
    assert fast.stats()["coverage"] == 1.0


def test_dump_of_an_op_of_each_size(two_sizes: Any, tmp_path: Path) -> None:
    two_sizes(rows(8))
    two_sizes(rows(SIZE))
    paths = two_sizes.kernels.select(op="aten::tanh", module="layers.0").dump(tmp_path)
    assert [path.parent.name for path in paths] == ["8", str(SIZE)]
    assert [torch.load(path)["outputs"].shape for path in paths] == [(8, WIDTH), (SIZE, WIDTH)]


# ---- language models


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("llm")
    options = {"graph_device": "simulated", "provenance": True, "cache_tokens": 512}
    with piecegraph.LLM(
        write_tiny_llm(folder), backend="eager", options=options, capture_sizes=[1, 8], max_num_seqs=2
    ) as loaded:
        yield loaded


PROMPT = [5, 6, 7]


def generate(llm: Any) -> list[int]:
    (answer,) = llm.generate([PROMPT], max_new_tokens=6, ignore_eos=True, on_error="return")
    return list(answer.token_ids)


def test_every_node_of_a_language_model_has_a_call(llm: Any) -> None:
    steps = [step for tape in llm.started.engine.forward.library.tapes.values() for step in tape.steps]
    records = [step.inside.record for step in steps if isinstance(step, GraphStep) and step.inside is not None]
    assert len(records) >= 2
    assert all(node.call is not None for record in records for node in record.nodes)


def test_a_language_models_kernels(llm: Any, tmp_path: Path) -> None:
    before = generate(llm)
    queries = llm.kernels.select(op="aten::linear", module="layers.1.self_attn.q_proj")
    assert {module.endswith("layers.1.self_attn.q_proj") for module in modules(queries)} == {True}
    decode = llm.kernels.select(module="layers.*.mlp", size="decode 1 token")
    assert {live.tape.phase for live in decode.kernels} == {"decode 1 token"}
    with decode.disable():
        assert generate(llm) != before
    assert generate(llm) == before
    costs = decode.time(rounds=1)
    assert costs[-1].title == "all of them"
    assert all(cost.with_us > 0 for cost in costs)
    assert generate(llm) == before


def test_dump_of_the_last_step_of_a_language_model(llm: Any, tmp_path: Path) -> None:
    before = generate(llm)
    last = str(llm.started.engine.forward.step.last)
    module = "layers.0.mlp.down_proj"
    (path,) = llm.kernels.select(op="aten::linear", module=module, size=last).dump(tmp_path)
    saved = torch.load(path)
    assert saved["module"].endswith(module)
    assert saved["outputs"].isfinite().all()
    head = llm.kernels.select(module="lm_head", size=last).dump(tmp_path / "head")
    logits = torch.load(head[-1])["outputs"]
    assert int(logits.reshape(-1, logits.shape[-1])[-1].argmax()) == before[-1]
    assert generate(llm) == before


def test_dump_of_another_step_of_a_language_model(llm: Any, tmp_path: Path) -> None:
    generate(llm)
    forward = llm.started.engine.forward
    other = next(str(key) for key in forward.library.tapes if key != forward.step.last)
    with pytest.raises(KernelError, match=r"PG733 the inputs of .* are gone.*the last step was.*generate again"):
        llm.kernels.select(module="layers.0", size=other).dump(tmp_path)
    llm.kernels.select(module="layers.0.mlp", size=str(forward.step.last)).time(rounds=1)
    with pytest.raises(KernelError, match="PG733"):  # the timing ran on a batch of its own
        llm.kernels.select(module="layers.0").dump(tmp_path)


def test_a_language_model_that_is_closed(tmp_path: Path) -> None:
    options = {"graph_device": "simulated", "provenance": True}
    llm = piecegraph.LLM(write_tiny_llm(tmp_path), backend="eager", options=options, capture_sizes=[1], max_num_seqs=1)
    chosen = llm.kernels.select(module="layers.0")
    llm.close()
    for use in (chosen.disable, chosen.time, lambda: llm.kernels):
        with pytest.raises(ConfigError, match="PG106"):
            use()
