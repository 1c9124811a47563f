"""``/v1/embeddings``: hidden states of the same decoder, one vector for each text."""

from __future__ import annotations

import base64
from typing import Any, Literal

import torch

from piecegraph.llm.run.results import Completion
from piecegraph.llm.run.sampling_params import SamplingParams
from piecegraph.serve.bodies import Body, Texts, prompts_of
from piecegraph.serve.failures import ApiError
from piecegraph.serve.record import Record
from piecegraph.serve.service import Service

Pooling = Literal["mean", "last", "cls"]

_PARAMS = SamplingParams(max_new_tokens=1, return_hidden_states=True)
"""One token is generated for nothing: what a model makes of a prompt ends with what it would go on with."""


class EmbeddingBody(Body):
    """Of ``/v1/embeddings``."""

    model: str
    input: Texts
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    user: str | None = None
    pooling: Pooling = "last"
    normalize: bool = True

    def names(self) -> dict[str, str]:
        """See :attr:`piecegraph.serve.record.Record.names`."""
        return {"prompt": "input", "max_new_tokens": "input"}


class EmbeddingCall:
    """One call; its texts are read when it is made."""

    def __init__(self, service: Service, record: Record, body: EmbeddingBody) -> None:
        prompts = prompts_of(body.input)
        if not prompts:
            raise ApiError(400, "input is empty", code="invalid_value", param="input")
        self._service, self._body, self._record = service, body, record
        self.asked = service.ask_all(prompts, _PARAMS, record, streams=False)

    async def whole(self) -> dict[str, Any]:
        """One vector for each text."""
        answers = await self._service.whole(self.asked, self._record, has_new=False)
        num_tokens = sum(answer.metrics.num_prompt_tokens for answer in answers)
        return {
            "object": "list",
            "model": self._service.name,
            "data": [
                {"object": "embedding", "index": index, "embedding": self._encoded(answer)}
                for index, answer in enumerate(answers)
            ],
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        }

    def _encoded(self, answer: Completion) -> list[float] | str:
        assert answer.hidden_states is not None
        vector = pooled(answer.hidden_states, self._body.pooling)
        if self._body.dimensions not in (None, len(vector)):
            message = f"dimensions is {self._body.dimensions}: the model's vectors have {len(vector)}"
            raise ApiError(400, message, code="unsupported_parameter", param="dimensions")
        if self._body.normalize:
            vector = torch.nn.functional.normalize(vector, dim=0)
        if self._body.encoding_format == "base64":
            return base64.b64encode(vector.numpy().astype("<f4").tobytes()).decode()
        found: list[float] = vector.tolist()
        return found


def pooled(hidden: torch.Tensor, pooling: Pooling) -> torch.Tensor:
    """One vector of the hidden states of all tokens, float32.

    >>> pooled(torch.tensor([[1.0, 2.0], [3.0, 6.0]]), "mean").tolist()
    [2.0, 4.0]
    """
    rows = hidden.float()
    return rows.mean(dim=0) if pooling == "mean" else rows[-1 if pooling == "last" else 0]
