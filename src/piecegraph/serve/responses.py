"""``/v1/responses``: OpenAI's newer endpoint. Nothing is stored, so a conversation comes whole with every request."""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncGenerator
from typing import Any, Literal

from pydantic import Field

from piecegraph.llm.run.answers import Answers
from piecegraph.llm.run.results import Completion
from piecegraph.serve.bodies import Body, sampling_params
from piecegraph.serve.failures import ApiError
from piecegraph.serve.record import Record
from piecegraph.serve.service import Service
from piecegraph.serve.streams import event
from piecegraph.serve.usage import Usage


class InputPart(Body):
    """A part of what was said. What this server answered comes back as it was."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[Any] = Field(default=[], max_length=0)
    logprobs: list[Any] | None = None


class InputItem(Body):
    """One turn of a conversation."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[InputPart]
    id: str | None = None
    status: Literal["completed", "incomplete"] | None = None

    def for_template(self) -> dict[str, Any]:
        """As chat templates have it."""
        content = self.content
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        return {"role": self.role, "content": text}


class TextFormat(Body):
    """Of the answer. A schema is always kept, strict or not."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None

    def form(self) -> dict[str, Any] | None:
        """The same for the engine; None for any text."""
        has_schema = self.type == "json_schema"
        if (self.schema_ is not None) != has_schema or (self.name is not None) != has_schema:
            message = f"text.format is {self.type!r}: a name and a schema come with 'json_schema', and only with that"
            raise ApiError(400, message, code="invalid_value", param="text.format")
        if has_schema:
            return {"json": self.schema_}
        return {"json_object": True} if self.type == "json_object" else None


class TextConfig(Body):
    """Of the answer."""

    format: TextFormat = TextFormat()


class ResponsesBody(Body):
    """Of ``/v1/responses``."""

    model: str
    input: str | list[InputItem] = Field(min_length=1)
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    text: TextConfig = TextConfig()
    store: Literal[False] | None = None
    background: Literal[False] | None = None
    truncation: Literal["disabled"] | None = None
    tool_choice: Literal["none"] | None = None

    def conversation(self) -> list[dict[str, Any]]:
        """As chat templates have it."""
        first = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        if isinstance(self.input, str):
            return [*first, {"role": "user", "content": self.input}]
        return [*first, *(item.for_template() for item in self.input)]


class ResponsesCall:
    """One call, once its conversation is asked for."""

    def __init__(self, service: Service, record: Record, body: ResponsesBody, asked: Answers) -> None:
        self._service, self._record = service, record
        self.asked = [asked]
        self._item_id = f"msg_{record.id}"
        self._head = {
            "id": f"resp_{record.id}",
            "object": "response",
            "created_at": int(time.time()),
            "model": service.name,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "parallel_tool_calls": False,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "temperature": body.temperature,
            "text": body.text.model_dump(by_alias=True, exclude_none=True),
            "tool_choice": "none",
            "tools": [],
            "top_p": body.top_p,
            "truncation": "disabled",
            "user": body.user,
        }

    @staticmethod
    async def ask(service: Service, record: Record, body: ResponsesBody) -> ResponsesCall:
        """Read the conversation and ask for its answer."""
        prompt = await service.chat_prompt(body.conversation(), {})
        given = {"temperature": body.temperature, "top_p": body.top_p}
        num_new = body.max_output_tokens or service.most_new(len(prompt))
        params = sampling_params(
            service.defaults, given, max_new_tokens=num_new, structured_outputs=body.text.format.form()
        )
        return ResponsesCall(service, record, body, service.ask(prompt, params, record, streams=body.stream))

    async def whole(self) -> dict[str, Any]:
        """The answer in one."""
        (answer,) = await self._service.whole(self.asked, self._record)
        return self._response(answer)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The answer as it comes."""
        numbers, place = itertools.count(), {"output_index": 0, "item_id": self._item_id, "content_index": 0}

        def told(name: str, **data: Any) -> bytes:
            return event({"type": name, "sequence_number": next(numbers), **data}, name)

        begun = {**self._head, "status": "in_progress", "error": None, "incomplete_details": None, "output": []}
        yield told("response.created", response=begun)
        yield told("response.in_progress", response=begun)
        yield told("response.output_item.added", output_index=0, item=self._item("in_progress", []))
        yield told("response.content_part.added", **place, part=_part(""))
        try:
            async for _, chunk in self._service.stream(self.asked, self._record):
                if chunk.text:
                    yield told("response.output_text.delta", **place, delta=chunk.text, logprobs=[])
                if (answer := chunk.finished) is not None:
                    text, response = answer.text or "", self._response(answer)
                    yield told("response.output_text.done", **place, text=text, logprobs=[])
                    yield told("response.content_part.done", **place, part=_part(text))
                    yield told("response.output_item.done", output_index=0, item=response["output"][0])
                    yield told(f"response.{response['status']}", response=response)
        except ApiError as error:
            self._record.cut(error.message)
            failed = {"code": "server_error", "message": error.message}
            yield told("response.failed", response={**begun, "status": "failed", "error": failed})

    def _response(self, answer: Completion) -> dict[str, Any]:
        is_cut = answer.finish_reason == "length"
        status = "incomplete" if is_cut else "completed"
        return {
            **self._head,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": [self._item(status, [_part(answer.text or "")])],
            "usage": Usage.of([answer]).for_responses(),
        }

    def _item(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {"type": "message", "id": self._item_id, "role": "assistant", "status": status, "content": content}


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
