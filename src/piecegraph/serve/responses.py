"""``/v1/responses``: OpenAI's newer endpoint. Nothing is stored, so a conversation comes whole with every request."""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Any, Literal

from pydantic import Field

from piecegraph.llm.run.answers import Answers
from piecegraph.llm.run.results import Completion
from piecegraph.serve.bodies import Body, Effort, sampling_params
from piecegraph.serve.conversation import Conversation, past_call
from piecegraph.serve.failures import ApiError, unsupported
from piecegraph.serve.parts import Happening, Part, Parts, happenings, parts_of
from piecegraph.serve.record import Record
from piecegraph.serve.service import Service
from piecegraph.serve.streams import event
from piecegraph.serve.tool_choice import ToolUse
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

    def add_to(self, said: Conversation, place: str) -> None:
        """As chat templates have it."""
        content = self.content
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        said.add({"role": self.role, "content": text}, f"{place}.content", joins=True)


class CallItem(Body):
    """A call of an earlier answer."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: Literal["completed", "incomplete"] | None = None

    def add_to(self, said: Conversation, place: str) -> None:
        """As chat templates have it."""
        call = past_call(self.call_id, self.name, self.arguments, f"{place}.arguments")
        said.add({"role": "assistant", "content": "", "tool_calls": [call]}, place, calls=[place], joins=True)


class CallOutputItem(Body):
    """What came of it."""

    type: Literal["function_call_output"]
    call_id: str
    output: str
    id: str | None = None
    status: Literal["completed", "incomplete"] | None = None

    def add_to(self, said: Conversation, place: str) -> None:
        """As chat templates have it."""
        said.add({"role": "tool", "tool_call_id": self.call_id, "content": self.output}, f"{place}.output")


class ReasoningText(Body):
    """What was thought."""

    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(Body):
    """What was thought before an earlier answer."""

    type: Literal["reasoning"]
    id: str | None = None
    summary: list[Any] = Field(default=[], max_length=0)
    content: list[ReasoningText] | None = None
    status: Literal["completed", "incomplete"] | None = None

    def add_to(self, said: Conversation, place: str) -> None:
        """As chat templates have it."""
        text = "".join(part.text for part in self.content or ())
        said.add({"role": "assistant", "content": "", "reasoning_content": text}, place, joins=True)


class FunctionTool(Body):
    """A function that may be called."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedFunction(Body):
    """The function that is to be called."""

    type: Literal["function"]
    name: str


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


class Reasoning(Body):
    """How a model is to think."""

    effort: Effort | None = None


class ResponsesBody(Body):
    """Of ``/v1/responses``."""

    model: str
    input: str | list[InputItem | CallItem | CallOutputItem | ReasoningItem] = Field(min_length=1)
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    text: TextConfig = TextConfig()
    reasoning: Reasoning = Reasoning()
    store: Literal[False] | None = None
    background: Literal[False] | None = None
    truncation: Literal["disabled"] | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | None = None
    parallel_tool_calls: bool | None = None

    def conversation(self) -> Conversation:
        """As chat templates have it: what a model thought, said and called is one turn."""
        said = Conversation()
        if self.instructions is not None:
            said.add({"role": "system", "content": self.instructions}, "instructions")
        if isinstance(self.input, str):
            said.add({"role": "user", "content": self.input}, "input")
        else:
            for number, item in enumerate(self.input):
                item.add_to(said, f"input[{number}]")
        return said

    def names(self) -> dict[str, str]:
        """See :attr:`piecegraph.serve.record.Record.names`."""
        return {
            "prompt": "input",
            "max_new_tokens": "input" if self.max_output_tokens is None else "max_output_tokens",
            "structured_outputs": "tools" if self.tool_use().is_forced else "text.format",
            "template.reasoning_effort": "reasoning.effort",
        }

    def tool_use(self) -> ToolUse:
        """What is said of tools."""
        named = self.tool_choice.name if isinstance(self.tool_choice, NamedFunction) else None
        choice = "required" if isinstance(self.tool_choice, NamedFunction) else self.tool_choice or "auto"
        functions = [tool.model_dump(exclude_none=True, exclude={"type"}) for tool in self.tools or ()]
        return ToolUse(
            functions=functions,
            choice=choice,
            named=named,
            several=self.parallel_tool_calls is not False,
            name_of_strict="tools[{}].strict",
        )

    def form(self) -> dict[str, Any] | None:
        """Of the answer, for the engine; None for any text."""
        of_text, use = self.text.format.form(), self.tool_use()
        if of_text is not None and use.values:
            raise unsupported("text.format", "an answer has one form, and tools were given, too")
        return use.form() or of_text


class ResponsesCall:
    """One call, once its conversation is asked for."""

    def __init__(
        self, service: Service, record: Record, body: ResponsesBody, asked: Answers, prompt: list[int]
    ) -> None:
        self._service, self._record = service, record
        self.asked = [asked]
        self._reader = service.reader(body.tool_use(), prompt, has_form=body.form() is not None)
        choice = body.tool_choice.model_dump() if isinstance(body.tool_choice, NamedFunction) else body.tool_choice
        self._head = {
            "id": f"resp_{record.id}",
            "object": "response",
            "created_at": int(time.time()),
            "model": service.name,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": body.reasoning.effort, "summary": None},
            "store": False,
            "temperature": body.temperature,
            "text": body.text.model_dump(by_alias=True, exclude_none=True),
            "tool_choice": choice or "auto",
            "tools": [{"parameters": None, "strict": None, **tool.model_dump()} for tool in body.tools or ()],
            "top_p": body.top_p,
            "truncation": "disabled",
            "user": body.user,
        }

    @staticmethod
    async def ask(service: Service, record: Record, body: ResponsesBody) -> ResponsesCall:
        """Read the conversation and ask for its answer."""
        use = body.tool_use()
        use.check()
        effort = body.reasoning.effort
        values = {} if effort is None else {"reasoning_effort": effort}
        said = body.conversation()
        record.names = {**record.names, **said.names}
        prompt = await service.chat_prompt(said.messages, values, record, use)
        given = {"temperature": body.temperature, "top_p": body.top_p}
        num_new = body.max_output_tokens or service.most_new(len(prompt))
        params = sampling_params(
            service.defaults, given, max_new_tokens=num_new, structured_outputs=body.form(), **service.marks_are_text()
        )
        return ResponsesCall(service, record, body, service.ask(prompt, params, record, streams=body.stream), prompt)

    async def whole(self) -> dict[str, Any]:
        """The answer in one."""
        (answer,) = await self._service.whole(self.asked, self._record)
        return self._response(answer, parts_of(self._reader, answer.text or ""))

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The answer as it comes."""
        numbers, parts = itertools.count(), Parts()

        def told(name: str, **data: Any) -> bytes:
            return event({"type": name, "sequence_number": next(numbers), **data}, name)

        begun = {**self._head, "status": "in_progress", "error": None, "incomplete_details": None, "output": []}
        yield told("response.created", response=begun)
        yield told("response.in_progress", response=begun)
        try:
            async for _, chunk in self._service.stream(self.asked, self._record):
                status = "incomplete" if chunk.finished and chunk.finished.finish_reason == "length" else "completed"
                for happening in happenings(parts, self._reader, chunk.text, is_last=chunk.finished is not None):
                    for name, data in self._part_events(happening, status):
                        yield told(f"response.{name}", **data)
                if chunk.finished is not None:
                    response = self._response(chunk.finished, parts.all)
                    yield told(f"response.{response['status']}", response=response)
        except ApiError as error:
            self._record.cut(error.message)
            failed = {"code": "server_error", "message": error.message}
            yield told("response.failed", response={**begun, "status": "failed", "error": failed})

    def _part_events(self, happening: Happening, status: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """The events of what happens to a part, each with its name."""
        what, part, text = happening
        kind = {"text": "output_text", "reasoning": "reasoning_text", "call": "function_call_arguments"}[part.kind]
        place: dict[str, Any] = {"output_index": part.index, "item_id": self._item_id(part)}
        content = {} if part.kind == "call" else {"content_index": 0}
        logprobs: dict[str, Any] = {"logprobs": []} if part.kind == "text" else {}
        if what == "more":
            yield f"{kind}.delta", {**place, **content, "delta": text, **logprobs}
        elif what == "begin":
            yield "output_item.added", {"output_index": part.index, "item": self._item(part, "in_progress")}
            if content:
                yield "content_part.added", {**place, **content, "part": _content(part)}
        else:
            done = {"arguments": part.text} if part.kind == "call" else {"text": part.text}
            yield f"{kind}.done", {**place, **content, **done, **logprobs}
            if content:
                yield "content_part.done", {**place, **content, "part": _content(part)}
            yield "output_item.done", {"output_index": part.index, "item": self._item(part, status)}

    def _response(self, answer: Completion, parts: Sequence[Part]) -> dict[str, Any]:
        is_cut = answer.finish_reason == "length"
        statuses = ["completed"] * (len(parts) - 1) + ["incomplete" if is_cut else "completed"]
        return {
            **self._head,
            "status": statuses[-1],
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": [self._item(part, status) for part, status in zip(parts, statuses, strict=True)],
            "usage": Usage.of([answer]).for_responses(),
        }

    def _item_id(self, part: Part) -> str:
        prefix = {"text": "msg", "reasoning": "rs", "call": "fc"}[part.kind]
        return f"{prefix}_{self._record.id}_{part.index}"

    def _item(self, part: Part, status: str) -> dict[str, Any]:
        """A part as an item of the output. What has only begun has no content yet."""
        head = {"id": self._item_id(part), "status": status}
        if part.kind == "call":
            call_id = f"call_{part.number}"
            return {"type": "function_call", **head, "call_id": call_id, "name": part.name, "arguments": part.text}
        content = [] if status == "in_progress" else [_content(part)]
        if part.kind == "reasoning":
            return {"type": "reasoning", **head, "summary": [], "content": content}
        return {"type": "message", **head, "role": "assistant", "content": content}


def _content(part: Part) -> dict[str, Any]:
    if part.kind == "reasoning":
        return {"type": "reasoning_text", "text": part.text}
    return {"type": "output_text", "text": part.text, "annotations": [], "logprobs": []}
