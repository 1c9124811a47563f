"""What passes between the processes of a server, as plain values and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, fields
from typing import Any

import torch

from piecegraph import errors
from piecegraph.errors import PiecegraphError
from piecegraph.llm.asking import Asked
from piecegraph.llm.run.results import Ending, News, RequestMetrics, TokenLogprob
from piecegraph.llm.run.sampling_params import SamplingParams
from piecegraph.llm.run.structured import StructuredOutputsParams
from piecegraph.serve.failures import ApiError

_DEFAULTS = {each.name: each.default for each in fields(SamplingParams) if each.default is not MISSING}
_METRICS = tuple(each.name for each in fields(RequestMetrics))
_ERROR_FIELDS = ("where", "why", "hint", *errors.PLACE)


def asked_to_wire(asked: Asked) -> tuple[Any, ...]:
    """How a prompt is to be answered: what is as it is by default is left out. Times are the machine's."""
    params = {name: found for name, value in _DEFAULTS.items() if (found := getattr(asked.params, name)) != value}
    form = asked.params.structured_outputs
    if form is not None:
        params["structured_outputs"] = {
            each.name: found for each in fields(form) if (found := getattr(form, each.name)) not in (None, False)
        }
    return params, asked.priority, asked.arrival_time, asked.deadline, asked.is_streamed


def asked_from_wire(wire: tuple[Any, ...]) -> Asked:
    """The inverse of :func:`asked_to_wire`."""
    params, priority, arrival_time, deadline, is_streamed = wire
    return Asked(
        params=_params_from_wire(params),
        priority=priority,
        arrival_time=arrival_time,
        deadline=deadline,
        is_streamed=is_streamed,
    )


def _params_from_wire(given: dict[str, Any]) -> SamplingParams:
    """They were validated where they come from: to do it again takes longer than all else that a request needs here."""
    if (form := given.get("structured_outputs")) is not None:
        given["structured_outputs"] = StructuredOutputsParams(**form)
    found = object.__new__(SamplingParams)
    for name, value in _DEFAULTS.items():
        object.__setattr__(found, name, given.get(name, value))
    return found


def news_to_wire(news: Sequence[News]) -> list[tuple[Any, ...]]:
    """What is new of answers. Most of it is plain as it is."""
    return [each if each[3] is None and each[4] is None else _detailed_to_wire(*each) for each in news]


def _detailed_to_wire(key: Any, index: int, tokens: list[int], logprobs: Any, ending: Any) -> tuple[Any, ...]:
    told = None
    if isinstance(ending, PiecegraphError):
        told = ("error", error_to_wire(ending))
    elif ending is not None:
        told = ("ending", _ending_to_wire(ending))
    return key, index, tokens, _logprobs_to_wire(logprobs), told


def details_from_wire(
    logprobs: Any, told: tuple[str, Any] | None
) -> tuple[list[TokenLogprob] | None, Ending | PiecegraphError | None]:
    """The last two parts of news that have them."""
    ending: Any = None
    if told is not None:
        kind, value = told
        ending = error_from_wire(value) if kind == "error" else _ending_from_wire(value)
    found: Any = _logprobs_from_wire(logprobs)
    return found, ending


def _ending_to_wire(ending: Ending) -> tuple[Any, ...]:
    return (
        ending.finish_reason,
        ending.stop_reason,
        None if ending.error is None else error_to_wire(ending.error),
        metrics_to_wire(ending.metrics),
        ending.ends_with_mark,
        _logprobs_to_wire(ending.prompt_logprobs),
        None if ending.hidden_states is None else _tensor_to_wire(ending.hidden_states),
    )


def _ending_from_wire(wire: tuple[Any, ...]) -> Ending:
    finish_reason, stop_reason, error, metrics, ends_with_mark, prompt_logprobs, hidden_states = wire
    return Ending(
        finish_reason=finish_reason,
        stop_reason=stop_reason,
        error=None if error is None else error_from_wire(error),
        metrics=metrics_from_wire(metrics),
        ends_with_mark=ends_with_mark,
        prompt_logprobs=_logprobs_from_wire(prompt_logprobs),
        hidden_states=None if hidden_states is None else _tensor_from_wire(hidden_states),
    )


def metrics_to_wire(metrics: RequestMetrics) -> tuple[Any, ...]:
    """What a request cost."""
    return tuple(getattr(metrics, name) for name in _METRICS)


def metrics_from_wire(wire: tuple[Any, ...]) -> RequestMetrics:
    """The inverse of :func:`metrics_to_wire`."""
    return RequestMetrics(**dict(zip(_METRICS, wire, strict=True)))


def _logprobs_to_wire(logprobs: Sequence[TokenLogprob | None] | None) -> list[tuple[Any, ...] | None] | None:
    if logprobs is None:
        return None
    return [None if each is None else (each.token_id, each.logprob, each.top) for each in logprobs]


def _logprobs_from_wire(wire: Sequence[tuple[Any, ...] | None] | None) -> list[TokenLogprob | None] | None:
    return None if wire is None else [None if each is None else TokenLogprob(*each) for each in wire]


def _tensor_to_wire(tensor: torch.Tensor) -> tuple[str, tuple[int, ...], bytes]:
    name = str(tensor.dtype).removeprefix("torch.")
    return name, tuple(tensor.shape), tensor.contiguous().view(torch.uint8).numpy().tobytes()


def _tensor_from_wire(wire: tuple[str, tuple[int, ...], bytes]) -> torch.Tensor:
    name, shape, data = wire
    return torch.frombuffer(bytearray(data), dtype=getattr(torch, name)).reshape(shape)


def error_to_wire(error: PiecegraphError | ApiError) -> tuple[Any, ...]:
    """An error, with its code and its words."""
    if isinstance(error, ApiError):
        return "ApiError", error.status, error.message, error.code, error.param
    told = {name: found for name in _ERROR_FIELDS if (found := getattr(error, name)) not in ("", None)}
    return type(error).__name__, error.code, error.what, told


def error_from_wire(wire: tuple[Any, ...]) -> Any:
    """The inverse of :func:`error_to_wire`."""
    if wire[0] == "ApiError":
        _, status, message, code, param = wire
        return ApiError(status, message, code=code, param=param)
    name, code, what, told = wire
    kind: type[PiecegraphError] = getattr(errors, name)
    return kind(code, what, **told)
