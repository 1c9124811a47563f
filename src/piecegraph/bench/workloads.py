"""Requests as a service gets them: random prompts with nothing in common, the same for the same seed."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Request:
    """A prompt, and how many tokens to go on for."""

    prompt: list[int]
    num_new: int


@dataclass(frozen=True)
class Workload:
    """How long prompts and answers are."""

    num_requests: int
    prompt: tuple[int, int]
    """Shortest and longest. The logarithm is uniform: short prompts are as many as long ones are few."""
    new: tuple[int, int] = (32, 256)
    """The same for answers, uniform."""

    @property
    def max_model_len(self) -> int:
        return self.prompt[1] + self.new[1]

    def make(self, vocab_size: int, seed: int = 0) -> list[Request]:
        """The requests. They depend on the arguments alone."""
        numbers = random.Random(seed)
        shortest, longest = self.prompt
        made = []
        for _ in range(self.num_requests):
            length = min(longest, int(shortest * math.exp(numbers.random() * math.log((longest + 1) / shortest))))
            prompt = [numbers.randrange(vocab_size) for _ in range(length)]
            made.append(Request(prompt, numbers.randint(*self.new)))
        return made


WORKLOADS = {
    "chat": Workload(1000, (32, 1024)),
    "long": Workload(100, (4096, 32768)),
    "tiny": Workload(24, (4, 48), (2, 12)),
}
