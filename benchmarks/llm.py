"""Whole ``generate`` calls of language models with random weights: scheduler, batch, replay and sampler together.

Prefill is a call for one new token; a decode step is what each further token of a longer call takes. Before anything is
timed, the model has been compared with transformers (the self check), and captured steps with uncaptured ones.

python benchmarks/llm.py
python benchmarks/llm.py --models qwen3-0.6b --new 64
python benchmarks/llm.py --tiny
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

import piecegraph
from piecegraph.bench.machine import hardware
from piecegraph.bench.ours import step_seconds
from piecegraph.bench.result import Timing
from piecegraph.bench.shapes import shape_config
from piecegraph.bench.timing import Effort, measure
from results import Contender, save, table


@dataclass(frozen=True)
class Shape:
    """A model to be made of random numbers."""

    config: Any
    prefill: tuple[int, ...] = (16, 256, 1024, 4096)
    decode: tuple[int, ...] = (1, 8, 64)
    context: int = 128
    """Tokens of each prompt that is decoded from."""


def shapes() -> dict[str, Shape]:
    """Built-in shapes, and a few layers of large ones."""
    return {
        **{name: Shape(shape_config(name)) for name in ("qwen3-0.6b", "llama-1b", "llama-8b")},
        "qwen3-moe": Shape(shape_config("qwen3-30b-a3b", num_hidden_layers=6)),
        "qwen3-next": Shape(
            transformers.Qwen3NextConfig(
                vocab_size=151936,
                hidden_size=2048,
                intermediate_size=5120,
                num_hidden_layers=8,
                num_attention_heads=16,
                num_key_value_heads=2,
                head_dim=256,
                num_experts=64,
                num_experts_per_tok=10,
                dtype="bfloat16",
            ),
            prefill=(16, 256, 1024),
        ),
        "gpt-oss": Shape(transformers.GptOssConfig(num_hidden_layers=8, num_local_experts=32, dtype="bfloat16")),
        "deepseek-v3": Shape(
            transformers.DeepseekV3Config(
                num_hidden_layers=4,
                first_k_dense_replace=1,
                n_routed_experts=64,
                max_position_embeddings=8192,
                dtype="bfloat16",
            ),
        ),
        "tiny": Shape(shape_config("tiny"), prefill=(16, 64), decode=(1, 4), context=16),
    }


class Prompts:
    """Random prompts, never the same twice: the prefix cache must not help."""

    def __init__(self, vocab_size: int) -> None:
        self._numbers = torch.Generator().manual_seed(0)
        self._vocab_size = vocab_size

    def make(self, count: int, length: int) -> list[list[int]]:
        return torch.randint(self._vocab_size, (count, length), generator=self._numbers).tolist()


def compare_captured(llm: piecegraph.LLM, folder: str, prompts: Prompts, arguments: dict[str, Any]) -> float:
    """The share of tokens that captured and uncaptured steps agree on."""
    asked = prompts.make(4, 32)
    captured = llm.generate(asked, max_new_tokens=16, ignore_eos=True)
    plain = piecegraph.LLM(
        folder, **arguments, cudagraph_mode="none", memory_fraction=0.8, options={"self_check": False}
    )
    plain.started.loaded.model.load_state_dict(llm.started.loaded.model.state_dict())
    expected = plain.generate(asked, max_new_tokens=16, ignore_eos=True)
    pairs = [
        (a, b) for x, y in zip(captured, expected, strict=True) for a, b in zip(x.token_ids, y.token_ids, strict=True)
    ]
    return sum(a == b for a, b in pairs) / len(pairs)


def time_decode(llm: piecegraph.LLM, prompts: Prompts, batch: int, context: int, new: int) -> Timing:
    """Milliseconds of one decode step while the whole batch runs."""
    steps = [
        step_seconds(llm.generate(prompts.make(batch, context), max_new_tokens=new, ignore_eos=True)) * 1e3
        for _ in range(4)
    ]
    return Timing.of(steps[1:])


def run(name: str, shape: Shape, options: argparse.Namespace) -> Contender:
    arguments: dict[str, Any] = {"load_format": "dummy", "max_model_len": 6144 if name != "tiny" else 256}
    with tempfile.TemporaryDirectory() as folder:
        shape.config.save_pretrained(folder)
        start = time.perf_counter()
        llm = piecegraph.LLM(folder, **arguments, memory_fraction=0.4 if options.compare else None)
        build = time.perf_counter() - start
        prompts = Prompts(shape.config.vocab_size)
        notes: dict[str, Any] = {"start s": f"{build:.1f}"}
        if options.compare:
            notes["same tokens"] = f"{compare_captured(llm, folder, prompts, arguments):.0%}"
    timings = {}
    for length in shape.prefill:
        asked = iter(prompts.make(400, length))
        timings[f"prefill {length}"] = measure(
            lambda asked=asked: llm.generate([next(asked)], max_new_tokens=1, ignore_eos=True),
            Effort(repeats=options.repeats),
        )
    for batch in shape.decode:
        timings[f"decode {batch}"] = time_decode(llm, prompts, batch, shape.context, options.new)
    notes["coverage"] = f"{llm.stats()['coverage']:.0%}"
    print(f"\n{name}\n{llm.explain()}", file=sys.stderr)
    return Contender(name, timings, notes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="qwen3-0.6b,llama-8b", help=f"comma list of {', '.join(shapes())}")
    parser.add_argument("--tiny", action="store_true", help="the model tiny alone")
    parser.add_argument("--new", type=int, default=128, help="tokens to decode")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--compare", action="store_true", help="compare captured with uncaptured steps first")
    parser.add_argument("-o", "--output", type=Path, help="write JSON")
    options = parser.parse_args()
    names = ["tiny"] if options.tiny else options.models.split(",")
    contenders = []
    for name in names:
        contenders.append(run(name, shapes()[name], options))
        print(f"{hardware()}\n{table(contenders[-1:])}", flush=True)
    if options.output:
        save(options.output, contenders)


if __name__ == "__main__":
    main()
