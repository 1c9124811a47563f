"""One line for each request: what it was, what became of it and what it cost. Nothing of what was said."""

from __future__ import annotations

import json
import logging
import sys
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from piecegraph.llm.run.results import Completion

logger = logging.getLogger("piecegraph.serve.requests")


def log_to_stderr() -> None:
    """One line for each request, on standard error."""
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logger.addHandler(logging.StreamHandler(sys.stderr))


@dataclass
class Record:
    """Filled in while a request is served."""

    method: str
    path: str
    client: str
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    begun: float = field(default_factory=time.perf_counter)
    names: Mapping[str, str] = field(default_factory=dict)
    """What the request calls what errors are about: settings of the engine, ``prompt``, values of the chat template as
    ``template.VALUE``, and places in the messages that the template is given. What is not here is called the same.
    """
    status: int = 0
    """0: the client went away before it was told anything."""
    error: str | None = None
    is_cut: bool = False
    """Whether the client went away, or the stream ended with an error."""
    has_begun: bool = False
    """Whether something was generated."""
    num_answers: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_new_tokens: int = 0
    first_token_s: float | None = None
    finish_reasons: list[str] = field(default_factory=list)

    def note(self, answer: Completion) -> None:
        """One of the answers has come to its end."""
        metrics = answer.metrics
        self.num_prompt_tokens += metrics.num_prompt_tokens
        self.num_cached_tokens += metrics.num_cached_tokens
        self.num_new_tokens += metrics.num_new_tokens
        self.finish_reasons.append(answer.finish_reason)
        if self.first_token_s is None:
            self.first_token_s = metrics.time_to_first_token_s

    def cut(self, error: str) -> None:
        """A stream ends with an error."""
        self.error, self.is_cut = error, True

    def write(self) -> None:
        """Write the line."""
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "id": self.id,
            "client": self.client,
            "request": f"{self.method} {self.path}",
            "status": self.status,
            "seconds": round(time.perf_counter() - self.begun, 4),
        }
        if self.num_answers:
            line |= {"prompt_tokens": self.num_prompt_tokens, "cached_tokens": self.num_cached_tokens}
            line |= {"new_tokens": self.num_new_tokens, "finish": self.finish_reasons}
        if self.first_token_s is not None:
            line["first_token_seconds"] = round(self.first_token_s, 4)
        if self.error is not None:
            line["error"] = self.error
        if self.is_cut:
            line["is_cut"] = True
        is_probe = self.method == "GET" and self.status == 200
        logger.log(logging.DEBUG if is_probe else logging.INFO, "%s", json.dumps(line))
