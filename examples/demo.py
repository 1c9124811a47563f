"""The main job on what this machine has: a small transformer through the tape, then a real language model.

    python examples/demo.py

On a GPU the tape is CUDA graphs with the attention op between them; on a CPU the same compiled pieces are called one
after the other.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import piecegraph
from piecegraph.base.compare import relative_error
from piecegraph.bench.machine import hardware
from piecegraph.bench.result import Timing
from piecegraph.bench.timing import Effort, measure

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))
from results import Contender, table

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
WIDTH, HEADS, LAYERS, SIZES = (1024, 16, 12, [16, 64, 256]) if DEVICE.type == "cuda" else (256, 4, 6, [16, 64, 128])
REPEATS = 60 if DEVICE.type == "cuda" else 15  # on a CPU each takes tens of milliseconds


@torch.library.custom_op("demo::attention", mutates_args=())
def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention over [tokens, heads, width]: the op that stays outside the graphs."""
    q, k, v = (tensor.transpose(0, 1)[None] for tensor in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)[0].transpose(0, 1).contiguous()


@attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.empty_like(q)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).view(x.shape[0], 3, HEADS, -1).unbind(1)
        x = x + self.out(attention(q, k, v).reshape(x.shape))
        return x + self.down(F.silu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, WIDTH)
        self.layers = nn.ModuleList([Layer() for _ in range(LAYERS)])

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return x


def compare() -> None:
    """A small transformer: eager, compiled, and through the tape."""
    torch.manual_seed(0)
    model = Transformer().to(DEVICE).eval()
    arguments = {"splitting_ops": [attention], "capture_sizes": SIZES}
    compiled = piecegraph.compile(model, **arguments, cudagraph_mode="none")
    fast = piecegraph.compile(model, **arguments)
    with torch.inference_mode():
        print("compiling ...", flush=True)
        start = time.perf_counter()
        fast.capture(torch.randint(0, 1000, (max(SIZES),), device=DEVICE))
        print(f"compiled and recorded in {time.perf_counter() - start:.1f} s")
        contenders = [Contender(name, {}) for name in ("eager", "compiled pieces", "tape")]
        for size in SIZES:
            tokens = torch.randint(0, 1000, (size,), device=DEVICE)
            expected = model(tokens)
            for contender, way in zip(contenders, (model, compiled, fast), strict=True):
                error = relative_error(way(tokens), expected)
                assert error < 1e-2, f"{contender.name} differs from eager by {error:.2g}"
                timing: Timing = measure(lambda way=way, tokens=tokens: way(tokens), Effort(repeats=REPEATS))
                contender.timings[f"{size} tokens"] = timing
        contenders[2].notes["coverage"] = f"{fast.stats()['coverage']:.0%}"
    print(f"\n{hardware()}\n{table(contenders)}\n\n{fast.explain()}")


def ask(question: str) -> None:
    """A real language model answers, token by token."""
    print("\nloading a language model (the first time it is converted, which takes some ten seconds) ...", flush=True)
    # On a CPU, compiling would take longer than answering. Float32: rounding matters to a model this small.
    backend = "inductor" if DEVICE.type == "cuda" else "eager"
    llm = piecegraph.LLM("demo", backend=backend, dtype="float32", max_model_len=1024, max_num_seqs=4)
    print(f"{llm.explain()}\n\n> {question}")
    for chunk in llm.generate(llm.chat_prompt(question), max_new_tokens=32, stream=True):
        print(chunk.text, end="", flush=True)
    print()


if __name__ == "__main__":
    compare()
    ask("Answer in one sentence: what is the capital of France?")
