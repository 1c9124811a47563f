"""Logits processors of the caller's own: Python that changes a row of logits before a token is chosen from it.

No graph holds them. A step runs as it is recorded, with a token for every row; of rows with processors that token is
thrown away, and another is chosen from what the processors made of the logits, by the same rules and random numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from piecegraph.errors import RequestError
from piecegraph.llm.kernels.race import random_keys
from piecegraph.llm.run.request import Request
from piecegraph.llm.run.sampling import mode_of, sample


def choose_token(request: Request, logits: torch.Tensor) -> int:
    """The next token of a request that has processors.

    Args:
        request: whose last token the logits are of.
        logits: [vocabulary], as the model gave them. They are left as they are.

    Raises:
        RequestError: PG650, a processor failed, or gave back something else than a row of logits; PG655, one that no
            token can be chosen from.
    """
    params, row = request.params, logits.float().clone()
    is_row = _has_choice(row)  # if not, that is the model's fault, and is told as such
    for processor in params.logits_processors:
        try:
            given = _call(processor, request, row)
        except Exception as error:
            raise _failed(processor, f"{type(error).__name__}: {error}") from error
        if not isinstance(given, torch.Tensor) or given.shape != row.shape:
            shape = list(given.shape) if isinstance(given, torch.Tensor) else type(given).__name__
            raise _failed(processor, f"it gave back {shape} for a row of {list(row.shape)}")
        row = given.to(row)
        if is_row and not _has_choice(row):
            what = f"the logits of request {request.id!r} are not numbers"
            why = f"the logits processor {_name(processor)} gave NaN, or forbade every token"
            raise RequestError("PG655", what, why=why)
    keys = random_keys(np.array([request.seed], np.uint64), np.array([len(request.tokens)]))

    def one(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.tensor([value], dtype=dtype, device=row.device)

    chosen = sample(
        row.unsqueeze(0),
        one(params.temperature),
        one(params.top_k, torch.int64),
        one(params.top_p),
        torch.from_numpy(keys).to(row.device),
        min_p=one(params.min_p),
        mode=mode_of(params),
    )
    return int(chosen)


def _has_choice(row: torch.Tensor) -> bool:
    """Whether one of the logits is the largest, and no token is forbidden by it."""
    return bool(row.max() > -torch.inf)


def _call(processor: Callable[..., Any], request: Request, row: torch.Tensor) -> Any:
    """As vLLM calls them; those of transformers are given a batch of one, prompt and all."""
    from transformers import LogitsProcessor

    if not isinstance(processor, LogitsProcessor):
        return processor(request.generated, row)
    tokens = torch.tensor([list(request.tokens)], device=row.device)
    batch = processor(tokens, row.unsqueeze(0))
    return batch[0] if isinstance(batch, torch.Tensor) and batch.dim() == 2 else batch


def _failed(processor: Callable[..., Any], why: str) -> RequestError:
    return RequestError("PG650", f"the logits processor {_name(processor)} failed", why=why)


def _name(processor: Callable[..., Any]) -> str:
    return str(getattr(processor, "__name__", type(processor).__name__))
