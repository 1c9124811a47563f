"""Ranks as real processes: forked from one that has loaded a model already, so that none of them imports or warms up.

``python -m tests.cases.rank_job FOLDER``: prints one line of JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from torch import distributed

import piecegraph
from piecegraph.base.config import Options
from piecegraph.base.job import leave_job
from piecegraph.dumps.target import target_of
from piecegraph.engine.pipeline import Pipeline
from piecegraph.errors import PiecegraphError
from piecegraph.llm import startup
from piecegraph.llm.model import loader
from piecegraph.llm.model.shards import Part, split_model
from piecegraph.llm.ranks import collectives
from piecegraph.llm.ranks.group import Ranks, join, start_job
from piecegraph.llm.run.forward import Forward
from piecegraph.llm.run.request import Request
from piecegraph.llm.run.sampling_params import SamplingParams
from piecegraph.tape.library import TapeLibrary
from tests.cases.checkpoints import save_checkpoint
from tests.cases.llms import tiny_model

FAMILIES = {"llama": 1, "qwen3_moe": 1, "qwen3_next": 2, "deepseek_v3": 2, "gpt_oss": 2}
"""With the layers they are given: one of each kind."""
PROMPTS = [[5, 9, 17, 33, 21, 8, 90], [4, 8, 15, 16, 23, 42, 77, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21]]
_DEADLINE_S = 120


def load(folder: Path, name: str, num_ranks: int = 1, **arguments: Any) -> piecegraph.LLM:
    options = {"progress": False, "cache": False, **arguments.pop("options", {})}
    return piecegraph.LLM(
        folder / name,
        backend="eager",
        device="cpu",
        max_model_len=128,
        max_num_seqs=2,
        max_batch_tokens=32,
        tensor_parallel_size=num_ranks,
        options=options,
        **arguments,
    )


def answers(llm: piecegraph.LLM) -> list[dict[str, Any]]:
    """Greedy tokens and their log-probabilities."""
    found = llm.generate(PROMPTS, max_new_tokens=6, logprobs=0, ignore_eos=True)
    return [{"tokens": each.token_ids, "logprobs": [token.logprob for token in each.logprobs or ()]} for each in found]


def run_ranks(num_ranks: int, work: Callable[[int], Any]) -> list[dict[str, Any]]:
    """Fork ranks; what each of them returned or raised, how it ended, and when, counted from the first end."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    gc.freeze()  # a model that is closed collects: what ranks share is none of theirs
    pipes = [os.pipe() for _ in range(num_ranks)]
    children = {}
    for rank, (_, written) in enumerate(pipes):
        child = os.fork()
        if not child:
            _become(rank, num_ranks, port, work, written)
        children[child] = rank
    ended = [{} for _ in range(num_ranks)]
    while children:
        child, status = os.wait()
        rank = children.pop(child)
        ended[rank] = {"code": os.waitstatus_to_exitcode(status), "time": time.monotonic()}
    first = min(each["time"] for each in ended)
    for rank, (read, written) in enumerate(pipes):
        os.close(written)
        with os.fdopen(read) as file:
            text = file.read()
        ended[rank] |= {"result": json.loads(text) if text else None, "time": ended[rank]["time"] - first}
    return ended


def _become(rank: int, num_ranks: int, port: int, work: Callable[[int], Any], written: int) -> None:
    signal.alarm(_DEADLINE_S)
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(num_ranks), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    code = 0
    try:
        result = work(rank)
    except PiecegraphError as error:
        result, code = str(error), error.exit_code
    except Exception:
        result, code = traceback.format_exc(), 70
    os.write(written, json.dumps(result, default=str).encode())
    with contextlib.suppress(RuntimeError):
        leave_job()
    os._exit(code)


def _share_plans(folder: Path) -> None:
    """The first job of llama on two ranks traces for those that come later."""
    os.environ["PIECEGRAPH_CACHE"] = str(folder / "plans")


# -- stories


def _families(folder: Path, num_ranks: int, rank: int) -> dict[str, Any]:
    """What each family answers, and how many heads a rank has of it."""
    found: dict[str, Any] = {}
    _share_plans(folder)
    for name in FAMILIES:
        is_known = name == "llama" and num_ranks == 2
        with load(folder, name, num_ranks, options={"self_check": is_known, "cache": is_known}) as llm:
            layer: Any = llm.started.model.layers[0]
            heads = [layer.num_heads, getattr(layer, "num_kv_heads", None)]
            found[name] = {"answers": answers(llm), "heads": heads}
    return found


def _calls(folder: Path, rank: int) -> dict[str, Any]:
    """Calls of many kinds, of steps that are recorded."""
    found: dict[str, Any] = {}
    _share_plans(folder)
    options = {"graph_device": "simulated", "record_seconds": 0.2, "self_check": False, "cache": True}
    with load(folder, "llama", 2, options=options) as llm:
        found["answers"] = answers(llm)
        found["whole"] = [each.text for each in llm.generate(["ab", "cd"], max_new_tokens=6, ignore_eos=True)]
        stop = found["whole"][0][2]
        found["stopped"] = [each.text for each in llm.generate(["ab", "cd"], max_new_tokens=6, stop=stop)]
        sampled = llm.generate([PROMPTS[0]] * 3, max_new_tokens=4, temperature=1.0, seed=[1, 2, 3], n=1)
        found["sampled"] = [each.token_ids for each in sampled]
        found["chunks"] = sum(1 for _ in llm.generate(PROMPTS, max_new_tokens=3, stream=True))
        try:
            llm.generate([list(range(4)) * 200])
        except PiecegraphError as error:
            found["refused"] = error.code
        try:
            llm.generate(PROMPTS[0], logits_processors=[lambda tokens, logits: logits])
        except PiecegraphError as error:
            found["processors"] = error.code
        scheduler = llm.make_scheduler()
        own = Request("own", PROMPTS[0], SamplingParams(max_new_tokens=3, ignore_eos=True))
        scheduler.add(own)
        while plan := scheduler.schedule():
            scheduler.commit(plan, llm.forward(plan).tokens.tolist())
        found["own scheduler"] = own.generated
        found["asyncio"] = asyncio.run(_asyncio(llm)) if rank == 0 else None
        found["afterwards"] = answers(llm)
        found["stats"] = {name: llm.stats()[name] for name in ("coverage", "num_recorded", "fallbacks")}
        found["explain"] = llm.explain()
    return found


async def _asyncio(llm: piecegraph.LLM) -> list[list[int]]:
    """Requests of an event loop, one of which is given up."""

    async def ask(prompt: list[int]) -> list[int]:
        chunks = [chunk async for chunk in model.generate(prompt, max_new_tokens=6, ignore_eos=True)]
        return [token for chunk in chunks for token in chunk.token_ids]

    async with piecegraph.AsyncLLM(llm, records_idle=True) as model:
        gone = asyncio.create_task(ask(PROMPTS[0]))
        await asyncio.sleep(0)
        found = await asyncio.gather(*map(ask, PROMPTS))
        gone.cancel()
    return found


def _single(folder: Path, rank: int) -> dict[str, Any]:
    """A job of one process goes the way of several."""
    start_job("cpu")
    with load(folder, "llama", options={"self_check": False}) as llm:
        return {"answers": answers(llm), "explain": llm.explain()}


class _Summed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.linear(x)
        distributed.all_reduce(found)
        return torch.relu(found) + 1


@torch.no_grad()
def _module(rank: int) -> dict[str, Any]:
    """A module with torch's own collective through ``compile``."""
    distributed.init_process_group("gloo")
    torch.manual_seed(0)
    module, differences = _Summed(), []
    fast = piecegraph.compile(module, backend="eager", capture_sizes=[4], options={"graph_device": "simulated"})
    for num_rows in (4, 3, 4):
        x = torch.randn(num_rows, 8, generator=torch.Generator().manual_seed(rank))
        differences.append(float((module(x) - fast(x)).abs().max()))
    cuts = [[cut.op, cut.reason] for cut in fast.plan.cuts]
    dump = target_of(Options(dump="look"))
    assert dump is not None
    return {
        "differences": differences,
        "cuts": cuts,
        "coverage": fast.stats()["coverage"],
        "dump": str(dump.folder),
    }


def _plain_models() -> Iterator[tuple[str, Any]]:
    """Models of more families that are not compared when they are loaded, with weights of one seed."""
    for name in ("qwen3", "mixtral", "gemma2", "gemma3"):
        yield name, tiny_model(name, num_layers=2)
    small: dict[str, Any] = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
    small |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    for config in (hf.MistralConfig(**small), hf.Qwen2Config(**small)):
        model: Any = hf.AutoModelForCausalLM.from_config(config).eval()
        numbers = torch.Generator().manual_seed(0)
        for weight in model.parameters():
            weight.copy_(torch.randn(weight.shape, generator=numbers) * 0.2)
        yield config.model_type, model


@torch.no_grad()
def _parts(ranks: Ranks) -> dict[str, float]:
    """By how much the logits of ranks differ from those of the whole, as transformers makes them."""
    found, tokens = {}, torch.arange(3, 15)[None]
    for name, model in _plain_models():
        whole = model(input_ids=tokens, use_cache=False).logits
        split_model(model, Part(ranks.rank, ranks.size, ranks.label))
        difference = model(input_ids=tokens, use_cache=False).logits - whole
        found[name] = float(difference.norm() / whole.norm())
    return found


def _weights(folder: Path, part: Part, ranks: Ranks) -> dict[str, Any]:
    """Dummy weights, and a family that nobody has tried."""
    place: dict[str, Any] = {"dtype": torch.float32, "device": torch.device("cpu")}
    path, found = str(folder / "llama"), {}
    torch.manual_seed(distributed.get_rank())
    ranks.share_random_state(torch.device("cpu"))
    state = torch.get_rng_state()
    mine = loader.load(path, load_format="dummy", part=part, **place).model
    torch.set_rng_state(state)
    whole = loader.load(path, load_format="dummy", **place).model
    own, of_all = (model.model.layers[0].mlp.gate_proj.weight for model in (mine, whole))
    is_same = ranks.of_first(of_all.sum().item()) == of_all.sum().item()
    found["dummy"] = is_same and torch.equal(own, of_all.chunk(2)[part.rank])
    loader.TRIED = frozenset()
    found["untried"] = [
        str(decision) for decision in loader.load(path, load_format="auto", part=part, **place).decisions
    ]
    collectives.sum_over_ranks.__code__ = (lambda group, module, args, output: output).__code__
    try:
        loader.load(path, load_format="auto", part=part, **place)
    except PiecegraphError as error:
        found["wrong"] = str(error)
    return found


def _neighbours(folder: Path, rank: int) -> dict[str, Any]:
    """Two groups of two, which agree by themselves."""
    ranks = join(2, torch.device("cpu"))
    assert ranks is not None
    found: dict[str, Any] = {
        "place": [ranks.rank, ranks.size],
        "first": ranks.of_first(rank),
        "least": ranks.least(rank),
    }
    tensor = torch.tensor([float(rank + 1)])
    torch.ops.piecegraph_ranks.all_reduce(tensor, ranks.label)
    found["sum"] = tensor.item()
    try:
        ranks.check_same("numbers", str(rank))
    except PiecegraphError as error:
        found["differ"] = str(error)
    found["parts"] = _parts(ranks)
    found |= _weights(folder, Part(ranks.rank, 2, ranks.label), ranks)
    with contextlib.suppress(PiecegraphError):
        join(3, torch.device("cpu"))
        found["three"] = "joined"
    ranks.close()
    return found


STAGES: dict[str, tuple[Any, str]] = {
    "load": (startup, "load"),
    "compile": (Pipeline, "cut"),
    "record": (TapeLibrary, "record"),
    "replay": (Forward, "run_step"),
}
"""What is called at each stage."""
ENDS = [("replay", "killed"), ("load", "killed"), ("compile", "killed"), ("record", "killed")]
ENDS += [("compile", "raised"), ("replay", "raised"), ("compile", "killed beside one that is busy")]


def _end_at(folder: Path, stage: str, way: str, rank: int) -> str:
    """The last of two ranks ends at a stage: it is killed, or something is raised."""
    owner, name = STAGES[stage]
    if rank == 1 and stage != "replay":
        setattr(owner, name, functools.partial(_end_now, way))
    elif way == "killed beside one that is busy":
        setattr(owner, name, lambda *args: time.sleep(_DEADLINE_S))
    _share_plans(folder)
    options = {"graph_device": "simulated", "self_check": False, "cache": True}
    llm = load(folder, "llama", 2, capture_sizes=[2, 32], options=options)
    if rank == 1:
        setattr(owner, name, functools.partial(_end_now, way))
    answers(llm)
    return "answered"


def _end_now(way: str, *args: Any, **kwargs: Any) -> None:
    if way.startswith("killed"):
        os.kill(os.getpid(), signal.SIGKILL)
    raise RuntimeError("out of order")


def main() -> None:
    torch.set_num_threads(1)
    gc.disable()  # ranks end soon, and a collection would copy the pages that they share
    folder, alone = Path(sys.argv[1]), {}
    for name, num_layers in FAMILIES.items():
        save_checkpoint(name, folder / name, num_layers=num_layers)
        with load(folder, name, options={"self_check": False}) as llm:
            alone[name] = answers(llm)
    told = {
        "alone": alone,
        "single": run_ranks(1, functools.partial(_single, folder)),
        "module": run_ranks(2, _module),
        "neighbours": run_ranks(4, functools.partial(_neighbours, folder)),
        "calls": run_ranks(2, functools.partial(_calls, folder)),
        **{f"{num} ranks": run_ranks(num, functools.partial(_families, folder, num)) for num in (2, 4)},
        **{f"{stage} {way}": run_ranks(2, functools.partial(_end_at, folder, stage, way)) for stage, way in ENDS},
    }
    print(json.dumps(told))


if __name__ == "__main__":
    main()
