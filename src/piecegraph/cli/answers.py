"""Answers as they come in: shown in the order of their prompts, then told as a line or as a document."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from piecegraph.base.text import count_of

if TYPE_CHECKING:
    from piecegraph.llm.llm import LLM
    from piecegraph.llm.run.results import Chunk, Completion


class Answers:
    """Collects what is generated; one prompt's text is shown as it comes, that of the later ones when it is their turn.

    Args:
        prompts: what was asked. With several of them each answer has a heading.
        prints: whether to show anything.
    """

    def __init__(self, prompts: Sequence[str], *, prints: bool) -> None:
        self.prompts = list(prompts)
        self.completions: list[Completion | None] = [None] * len(prompts)
        self.begun = self.ended = time.perf_counter()
        self._prints = prints
        self._held = [""] * len(prompts)
        self._shown = 0
        """The prompt whose answer is being shown."""
        self._heading()

    def add(self, chunk: Chunk) -> None:
        """Take new text."""
        self.completions[chunk.index] = chunk.finished
        self.ended = time.perf_counter()
        if not self._prints:
            return
        self._held[chunk.index] += chunk.text
        self._release()
        while self.completions[self._shown] is not None:
            click.echo()
            self._shown += 1
            if self._shown == len(self.prompts):
                return
            self._heading()
            self._release()

    def tell_errors(self) -> int:
        """Say on standard error which prompts were not answered, and how many they are."""
        failed = [(number, done) for number, done in enumerate(self.completions, 1) if done is None or done.error]
        for number, done in failed:
            place = f"prompt {number}: " if len(self.prompts) > 1 else ""
            click.echo(f"error: {place}{done.error if done is not None else 'it was not answered'}", err=True)
        return len(failed)

    def _release(self) -> None:
        text, self._held[self._shown] = self._held[self._shown], ""
        if text:
            click.echo(text, nl=False)

    def _heading(self) -> None:
        if self._prints and len(self.prompts) > 1:
            prompt = " ".join(self.prompts[self._shown].split())
            shown = prompt if len(prompt) <= 60 else f"{prompt[:57]}..."
            click.echo(f"{'' if self._shown == 0 else chr(10)}[{self._shown + 1}] {shown}")


def summary(llm: LLM, answers: Answers) -> str:
    """What it cost, in one line."""
    done = [completion for completion in answers.completions if completion is not None]
    num_new, seconds = sum(c.metrics.num_new_tokens for c in done), answers.ended - answers.begun
    first = [c.metrics.time_to_first_token_s for c in done if c.metrics.time_to_first_token_s is not None]
    parts = [f"{num_new} tokens in {seconds:.2f} s ({num_new / max(seconds, 1e-9):.1f} tokens/s)"]
    if first:
        parts.append(f"the first after {min(first):.2f} s")
    parts.append(f"graph coverage {_coverage(done):.0%}{_why_no_graphs(llm)}")
    num_fallbacks = sum(llm.stats()["fallbacks"].values())
    parts.append(count_of(num_fallbacks, "fallback") if num_fallbacks else "no fallbacks")
    return ", ".join(parts)


def document(model: str, llm: LLM, answers: Answers, *, explains: bool) -> dict[str, Any]:
    """Everything for programs."""
    stats = llm.stats()
    done = [completion for completion in answers.completions if completion is not None]
    found: dict[str, Any] = {
        "model": model,
        "architecture": stats["model"],
        "device": stats["device"],
        "dtype": stats["dtype"],
        "backend": str(llm.config.backend),
        "answers": [
            _answer(prompt, completion) for prompt, completion in zip(answers.prompts, answers.completions, strict=True)
        ],
        "stages_s": {**stats["stages"], "generate": answers.ended - answers.begun},
        "coverage": _coverage(done),
        "fallbacks": stats["fallbacks"],
    }
    return found | {"explain": llm.explain()} if explains else found


def _answer(prompt: str, completion: Completion | None) -> dict[str, Any]:
    assert completion is not None, "every prompt ends with an answer or an error"
    error = completion.error
    return {
        "prompt": prompt,
        "prompt_token_ids": completion.prompt_token_ids,
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "error": {"code": error.code, "message": str(error)} if error is not None else None,
        "metrics": dataclasses.asdict(completion.metrics),
    }


def _coverage(done: Sequence[Completion]) -> float:
    """The share of steps that were replayed, over all prompts."""
    return sum(c.metrics.graph_coverage for c in done) / len(done) if done else 0.0


def _why_no_graphs(llm: LLM) -> str:
    mode = llm.started.engine.forward.modes["decode"]
    return f" ({mode.reason})" if mode.choice == "direct" else ""
