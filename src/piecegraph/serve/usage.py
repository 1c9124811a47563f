"""How many tokens a call had, as each API has it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from piecegraph.llm.run.results import Completion


@dataclass(frozen=True, slots=True)
class Usage:
    """Of all answers of a call."""

    num_prompt: int
    """A prompt with several answers counts once."""
    num_cached: int
    num_new: int

    @staticmethod
    def of(answers: Sequence[Completion], each: int = 1) -> Usage:
        """Of answers of which each prompt has so many, or has had so many so far."""
        return Usage(
            sum(answer.metrics.num_prompt_tokens for answer in answers) // each,
            sum(answer.metrics.num_cached_tokens for answer in answers) // each,
            sum(answer.metrics.num_new_tokens for answer in answers),
        )

    def for_openai(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.num_prompt,
            "completion_tokens": self.num_new,
            "total_tokens": self.num_prompt + self.num_new,
            "prompt_tokens_details": {"cached_tokens": self.num_cached},
        }

    def for_responses(self) -> dict[str, Any]:
        return {
            "input_tokens": self.num_prompt,
            "input_tokens_details": {"cached_tokens": self.num_cached, "cache_write_tokens": 0},
            "output_tokens": self.num_new,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": self.num_prompt + self.num_new,
        }

    def for_anthropic(self) -> dict[str, Any]:
        """What was found in the cache is counted apart there."""
        return {
            "input_tokens": self.num_prompt - self.num_cached,
            "cache_read_input_tokens": self.num_cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": self.num_new,
        }
