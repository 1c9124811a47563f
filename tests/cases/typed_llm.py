"""What a type checker knows of an answer. Never run: mypy reads it (see ``files`` in pyproject.toml)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import assert_type

import piecegraph
from piecegraph.llm import Chunk, Completion, SamplingParams


def answers(llm: piecegraph.LLM, mixed: list[str | list[int]], is_stream: bool) -> None:
    assert_type(llm.generate("one"), list[Completion])
    assert_type(llm.generate(["one", "two"]), list[Completion])
    assert_type(llm.generate(mixed, SamplingParams(max_tokens=3)), list[Completion])
    assert_type(llm.generate([1, 2], max_tokens=3, top_p=[0.5], on_error="return"), list[Completion])
    assert_type(llm.generate("one", stream=True), Iterator[Chunk])
    assert_type(llm.generate("one", stream=is_stream), list[Completion] | Iterator[Chunk])
    assert_type(llm.chat([{"role": "user", "content": "one"}], enable_thinking=False), list[Completion])
    assert_type(llm.chat("one", stream=True), Iterator[Chunk])


def mistakes(llm: piecegraph.LLM) -> None:
    llm.generate("one", max_new_token=3)  # type: ignore[call-overload]
    llm.generate("one", stream="yes")  # type: ignore[call-overload]
    llm.generate("one", on_error="ignore")  # type: ignore[call-overload]
    piecegraph.LLM("path", gpu_memory_utilization=0.5)  # type: ignore[arg-type]
