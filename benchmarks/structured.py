"""What structured output adds to a step: a batch that decodes freely, and one whose answers are JSON of a schema.

The model has random weights and a made-up tokenizer of its vocabulary. Prompts and lengths are the same in both. Random
weights end no text, so half of the requests write one text to their end, and the others records of numbers and names
from a list, more than an answer has room for. ``--bounded`` instead asks all for texts of at most 12 and 24 characters:
near the end of such a text llguidance tries every token of the vocabulary, which takes a millisecond for each request.
Both run in turns, the first round is not counted, and all steps that it missed are recorded behind it. Every answer is
read by its schema once more before anything is told. What the host does for it, by itself: ``masks.py``.

python benchmarks/structured.py
python benchmarks/structured.py --model llama-8b --batches 1,8,64 --temperature 1
python benchmarks/structured.py --tiny --rounds 2
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import piecegraph
from llm import Prompts, shapes
from piecegraph.bench.machine import hardware
from piecegraph.bench.ours import step_seconds
from piecegraph.bench.result import Timing
from piecegraph.bench.show import aligned
from piecegraph.llm import SamplingParams, StructuredOutputsParams
from piecegraph.llm.run.structured import Guides, take_tokens
from random_weights import loaded

KINDS = ["person", "company", "club", "other"]
RECORD = {
    "type": "object",
    "properties": {
        "kind": {"enum": KINDS},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "is_member": {"type": "boolean"},
        "place": {
            "type": "object",
            "properties": {"x": {"type": "number"}, "y": {"type": "number"}, "name": {"enum": ["here", "there"]}},
            "required": ["x", "y", "name"],
            "additionalProperties": False,
        },
    },
    "required": ["kind", "age", "is_member", "place"],
    "additionalProperties": False,
}
TEXT = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 4},
        "kind": {"enum": KINDS},
    },
    "required": ["name", "tags", "kind"],
    "additionalProperties": False,
}


def form(item: dict[str, Any]) -> StructuredOutputsParams:
    """More of what is given than an answer has room for."""
    schema = {"type": "array", "items": item, "minItems": 10_000, "x-guidance": {"whitespace_flexible": False}}
    return StructuredOutputsParams(json=schema)


def check(
    guides: Guides, forms: list[StructuredOutputsParams], answers: list[piecegraph.Completion], num_new: int
) -> None:
    """Every answer has its length, and goes along with its form."""
    for wanted, answer in zip(forms, answers, strict=True):
        guide = guides.make(wanted)
        for token in answer.token_ids:
            take_tokens([(guide, token)])
        if guide.error is not None or len(answer.token_ids) != num_new:
            raise SystemExit(f"an answer is not of its form: {answer.text!r:.200}")


def measure(llm: piecegraph.LLM, guides: Guides, batch: int, options: argparse.Namespace) -> list[str]:
    """A row of the table."""
    prompts = Prompts(llm.started.limits.vocab_size)
    items = [PERSON] if options.bounded else [TEXT, RECORD]
    wanted = [form(items[number % len(items)]) for number in range(batch)]
    steps_ms: dict[str, list[float]] = {"free": [], "JSON": []}
    for _ in range(1 + options.rounds):
        asked = prompts.make(batch, options.context)
        for name, taken in steps_ms.items():
            shared = {"max_new_tokens": options.new, "ignore_eos": True, "temperature": options.temperature}
            forms = wanted if name == "JSON" else [None] * batch
            answers = llm.generate(asked, [SamplingParams(structured_outputs=each, **shared) for each in forms])
            taken.append(step_seconds(answers) * 1e3)
            if name == "JSON":
                check(guides, wanted, answers, options.new)
        llm.record_missing()
    free, guided = (Timing.of(each[1:]) for each in steps_ms.values())
    shown = [f"{each.median_ms:.3f} ({each.p10_ms:.3f} to {each.p90_ms:.3f})" for each in (free, guided)]
    added = guided.median_ms / free.median_ms - 1
    return [str(batch), *shown, f"{added:+.1%}", f"{llm.stats()['coverage']:.0%}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-0.6b", help=f"a folder, or one of {', '.join(shapes())}")
    parser.add_argument("--batches", default="64", help="requests at once, comma-separated (64)")
    parser.add_argument("--context", type=int, default=128, help="tokens of a prompt (128)")
    parser.add_argument("--new", type=int, default=128, help="tokens of an answer (128)")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--bounded", action="store_true", help="JSON whose texts have a length")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, and few tokens")
    options = parser.parse_args()
    if options.tiny:
        options.model, options.context, options.new = "tiny", 8, 24
    batches = [int(batch) for batch in options.batches.split(",")]
    arguments = {"max_num_seqs": max(batches)}
    with loaded(options.model, options.context + options.new, arguments, makes_text=True) as llm:
        guides = Guides(llm.tokenizer, llm.started.limits.vocab_size, ())
        rows = [measure(llm, guides, batch, options) for batch in batches]
        print(llm.explain(), file=sys.stderr)
    head = ["requests", "free, ms a step (p10 to p90)", "JSON, ms a step (p10 to p90)", "added", "coverage"]
    print(f"{hardware()}\n{options.model}, temperature {options.temperature:g}\n{aligned([head, *rows])}")


if __name__ == "__main__":
    main()
