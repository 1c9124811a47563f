"""What structured output costs the host: microseconds to send the masks of a step, and to go on by its tokens.

Every request of a batch writes JSON of one schema, each at another place of it, with the demo model's vocabulary of
49,152 tokens, or with a made-up one of another size. The tokens are those of a text that is drawn beforehand, so that
both timed parts do what a server's steps do: all masks, then one token for each request. The first steps are not timed.
On a GPU the model runs meanwhile; only what is longer than the model's share of a step can be seen there, which
``structured.py`` measures.

python benchmarks/masks.py
python benchmarks/masks.py --batches 1,8,64 --steps 200
python benchmarks/masks.py --vocab-size 151936
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from types import SimpleNamespace

import torch
import transformers

from piecegraph.base.progress import Progress
from piecegraph.llm.model.demo_model import demo_folder
from piecegraph.llm.run.masks import MaskBuffers
from piecegraph.llm.run.structured import Guide, Guides, StructuredOutputsParams, take_tokens
from vocabulary import make_tokenizer

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "city": {"type": "string"}, "code": {"type": "string"}},
            "required": ["street", "city", "code"],
        },
        "kind": {"enum": ["person", "company", "other"]},
    },
    "required": ["name", "age", "tags", "address", "kind"],
}
WORDS = "the quick brown fox jumps over a lazy dog while seven wizards quietly draw boxes of jade".split()
WARMUP = 20


def text(seed: int) -> str:
    """JSON of the schema."""
    chance = random.Random(seed)

    def some(count: int) -> str:
        return " ".join(chance.choices(WORDS, k=count))

    address = {"street": some(4), "city": some(2), "code": str(chance.randrange(10**5))}
    tags = [some(2) for _ in range(6)]
    person = {"name": some(3), "age": chance.randrange(99), "tags": tags, "address": address, "kind": "person"}
    return json.dumps(person)


class Writer:
    """A request that writes one text after the other."""

    def __init__(self, guides: Guides, wanted: StructuredOutputsParams, tokenizer: object, seed: int) -> None:
        self._guides, self._wanted = guides, wanted
        self._tokens: list[int] = tokenizer(text(seed)).input_ids  # type: ignore[operator]
        self._place = 0
        self.guide = guides.make(wanted)
        for _ in range(seed % len(self._tokens)):
            take_tokens([self.next()])

    def next(self) -> tuple[Guide, int]:
        """The next token."""
        if self._place == len(self._tokens):
            self._place, self.guide = 0, self._guides.make(self._wanted)
        self._place += 1
        return self.guide, self._tokens[self._place - 1]


def measure(writers: list[Writer], vocab_size: int, steps: int) -> tuple[list[float], list[float]]:
    """Seconds of each step for masks, and for tokens."""
    masks = MaskBuffers(len(writers), vocab_size, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    of_masks, of_tokens = [], []
    for _ in range(WARMUP + steps):
        taken = [writer.next() for writer in writers]
        requests = [SimpleNamespace(guide=guide, is_done=False) for guide, _ in taken]
        masks.collect([SimpleNamespace(request=request, samples=True) for request in requests])  # type: ignore[misc]
        start = time.perf_counter()
        masks.send()
        middle = time.perf_counter()
        take_tokens(taken)
        of_masks.append(middle - start)
        of_tokens.append(time.perf_counter() - middle)
        assert all(guide.error is None for guide, _ in taken)
    return of_masks[WARMUP:], of_tokens[WARMUP:]


def spread(seconds: list[float], share: float = 1.0) -> str:
    """Median, 10th and 90th percentile, in microseconds."""
    low, *_, high = statistics.quantiles(seconds, n=10)
    return f"{statistics.median(seconds) * share * 1e6:.1f} ({low * share * 1e6:.1f} to {high * share * 1e6:.1f})"


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", default="1,8,64")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--vocab-size", type=int, help="of a made-up vocabulary, instead of the demo model's")
    given = parser.parse_args()
    if given.vocab_size:
        tokenizer = make_tokenizer(given.vocab_size)
    else:
        tokenizer = transformers.AutoTokenizer.from_pretrained(demo_folder(Progress(True)))
    start = time.perf_counter()
    guides = Guides(tokenizer, len(tokenizer), [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id])
    read = time.perf_counter()
    wanted = StructuredOutputsParams(json=SCHEMA)
    guides.make(wanted)
    made = time.perf_counter()
    guides.make(wanted)
    again = time.perf_counter()
    print(f"tokenizer {(read - start) * 1e3:.0f} ms, schema {(made - read) * 1e3:.1f} ms", end=", ")
    print(f"the same schema again {(again - made) * 1e3:.2f} ms")
    print(f"{'requests':>8}  {'masks of a step, us':>26}  {'of a request, us':>22}  {'tokens of a step, us':>24}")
    for batch in map(int, given.batches.split(",")):
        writers = [Writer(guides, wanted, tokenizer, seed) for seed in range(batch)]
        of_masks, of_tokens = measure(writers, len(tokenizer), given.steps)
        each = spread(of_masks, 1 / batch)
        print(f"{batch:>8}  {spread(of_masks):>26}  {each:>22}  {spread(of_tokens):>24}")


if __name__ == "__main__":
    main()
