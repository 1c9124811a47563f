"""Conversations as chat templates have them, and where in the request each part of them stands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from piecegraph.llm.run.left_out import place_of_call
from piecegraph.serve.failures import ApiError
from piecegraph.serve.strict_json import read_json


class Conversation:
    """Filled in turn by turn, for APIs whose turns are no messages."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.names: dict[str, str] = {}
        """What the request calls what an error has as ``messages[1].content``."""

    def add(self, message: dict[str, Any], place: str, *, calls: Sequence[str] = (), joins: bool = False) -> None:
        """One more message.

        Args:
            message: as chat templates have it.
            place: where it is said in the request.
            calls: the same of each of its calls.
            joins: whether it goes on with the message before, if both are the model's.
        """
        before = self.messages[-1] if self.messages else {}
        if joins and message["role"] == before.get("role") == "assistant":
            first_call = len(before.get("tool_calls", ()))
            self.messages[-1] = _joined(before, message)
        else:
            first_call = 0
            self.messages.append(message)
            self.names[f"messages[{len(self.messages) - 1}].content"] = place
        for number, each in enumerate(calls, first_call):
            self.names[place_of_call(len(self.messages) - 1, number)] = each


def _joined(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Two turns of a model as one."""
    joined = {**before, **after, "content": before["content"] + after["content"]}
    for name in ("reasoning_content", "tool_calls"):
        if name in before and name in after:
            joined[name] = before[name] + after[name]
    return joined


def past_call(number: str, name: str, arguments: str, place: str) -> dict[str, Any]:
    """A call of an earlier answer as chat templates have it: with arguments by name.

    Args:
        number: its id.
        name: of the function.
        arguments: as JSON. A model may have named one of them twice.
        place: where these stand in the request.
    """
    try:
        given = read_json(arguments or "{}", last_wins=True)
    except ValueError as error:
        raise ApiError(400, f"{place} is not JSON: {error}", code="invalid_value", param=place) from error
    if not isinstance(given, dict):
        raise ApiError(400, f"{place} is no JSON object", code="invalid_value", param=place)
    return {"id": number, "type": "function", "function": {"name": name, "arguments": given}}


def wrong_role(place: str, role: str, right: str) -> ApiError:
    """Something is said by somebody who cannot have said it."""
    message = f"{place} comes in a message of role {right}, and this is one of role {role}"
    return ApiError(400, message, code="invalid_value", param=place)
