"""``/v1/messages``: the same conversations as Anthropic's API has them, so that its clients need no proxy."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from piecegraph.llm.run.answers import Answers
from piecegraph.llm.run.prompts import unread_value
from piecegraph.llm.run.results import Completion
from piecegraph.serve.bodies import Body, sampling_params
from piecegraph.serve.conversation import Conversation, wrong_role
from piecegraph.serve.failures import ApiError, unsupported
from piecegraph.serve.parsing import arguments_text
from piecegraph.serve.parts import Happening, Part, Parts, happenings, parts_of
from piecegraph.serve.record import Record
from piecegraph.serve.service import Service
from piecegraph.serve.streams import event
from piecegraph.serve.tool_choice import ToolUse
from piecegraph.serve.usage import Usage


class CacheControl(Body):
    """What is to be kept of a prompt: all of it is, as long as there is room."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class TextBlock(Body):
    """A part of what is said."""

    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None


class ToolUseBlock(Body):
    """A call of an earlier answer."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    cache_control: CacheControl | None = None


class ToolResultBlock(Body):
    """What came of a call."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[TextBlock] = ""
    is_error: bool = False
    cache_control: CacheControl | None = None


class ThinkingBlock(Body):
    """What a model thought before an earlier answer."""

    type: Literal["thinking"]
    thinking: str
    signature: str = ""


Block = Annotated[TextBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock, Field(discriminator="type")]


class Turn(Body):
    """One turn of a conversation."""

    role: Literal["user", "assistant"]
    content: str | list[Block]

    def add_to(self, said: Conversation, place: str) -> None:
        """As chat templates have it: what came of calls is said by tools, each in a turn of its own."""
        if isinstance(self.content, str):
            said.add({"role": self.role, "content": self.content}, f"{place}.content")
            return
        message: dict[str, Any] = {"role": self.role, "content": _text(self.content)}
        thought, calls, has_results = "", dict[str, dict[str, Any]](), False
        for number, block in enumerate(self.content):
            where = f"{place}.content[{number}]"
            if not isinstance(block, TextBlock) and self.role != _ROLES[block.type]:
                raise wrong_role(where, self.role, _ROLES[block.type])
            if isinstance(block, ToolResultBlock):
                said.add(_result(block), where)
                has_results = True
            elif isinstance(block, ToolUseBlock):
                calls[where] = _call(block)
            elif isinstance(block, ThinkingBlock):
                thought += block.thinking
        if thought:
            message["reasoning_content"] = thought
        if calls:
            message["tool_calls"] = list(calls.values())
        if message["content"] or len(message) > 2 or not has_results:
            said.add(message, f"{place}.content", calls=list(calls))


_ROLES = {"tool_use": "assistant", "tool_result": "user", "thinking": "assistant"}


def _call(block: ToolUseBlock) -> dict[str, Any]:
    return {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": block.input}}


def _result(block: ToolResultBlock) -> dict[str, Any]:
    text = block.content if isinstance(block.content, str) else _text(block.content)
    said = f"Error: {text}" if block.is_error else text
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": said}


class ToolBody(Body):
    """A tool that may be called."""

    type: Literal["custom"] = "custom"
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    cache_control: CacheControl | None = None


class ToolChoice(Body):
    """Whether it is to be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class Metadata(Body):
    """Who asks."""

    user_id: str | None = None


class Thinking(Body):
    """Whether a model thinks before it answers, where its chat template can tell it so."""

    type: Literal["disabled", "adaptive"]


class CountBody(Body):
    """Of ``/v1/messages/count_tokens``."""

    model: str
    messages: list[Turn] = Field(min_length=1)
    system: str | list[TextBlock] | None = None
    thinking: Thinking | None = None
    tools: list[ToolBody] | None = None
    tool_choice: ToolChoice | None = None

    def conversation(self) -> Conversation:
        """As chat templates have it."""
        said = Conversation()
        if self.system is not None:
            said.add({"role": "system", "content": _text(self.system)}, "system")
        for number, turn in enumerate(self.messages):
            turn.add_to(said, f"messages[{number}]")
        return said

    def names(self) -> dict[str, str]:
        """See :attr:`piecegraph.serve.record.Record.names`."""
        return {
            "prompt": "messages",
            "max_new_tokens": "max_tokens",
            "stop": "stop_sequences",
            "structured_outputs": "tools",
            "template.enable_thinking": "thinking",
        }

    def template_values(self) -> dict[str, Any]:
        """What the chat template is given besides."""
        return {} if self.thinking is None else {"enable_thinking": self.thinking.type != "disabled"}

    def tool_use(self) -> ToolUse:
        """What is said of tools."""
        given = self.tool_choice or ToolChoice(type="auto")
        if (given.name is not None) != (given.type == "tool"):
            raise ApiError(400, "tool_choice: a name comes with 'tool', and only with that", param="tool_choice")
        functions = [
            {"name": tool.name, "parameters": tool.input_schema}
            | ({} if tool.description is None else {"description": tool.description})
            for tool in self.tools or ()
        ]
        choice = {"any": "required", "tool": "required"}.get(given.type, given.type)
        return ToolUse(
            functions=functions,
            choice=choice,
            named=given.name,
            several=not given.disable_parallel_tool_use,
            name_of_several="tool_choice.disable_parallel_tool_use",
        )


class MessagesBody(CountBody):
    """Of ``/v1/messages``."""

    max_tokens: int = Field(ge=1)
    stop_sequences: list[str] | None = Field(None, max_length=64)
    temperature: float | None = Field(None, ge=0, le=1)
    top_p: float | None = None
    top_k: int | None = Field(None, ge=0)
    stream: bool | None = None
    metadata: Metadata | None = None


def _text(content: str | Sequence[Body]) -> str:
    return (
        content if isinstance(content, str) else "".join(each.text for each in content if isinstance(each, TextBlock))
    )


class MessagesCall:
    """One call, once its conversation is asked for."""

    def __init__(self, service: Service, record: Record, body: MessagesBody, asked: Answers, prompt: list[int]) -> None:
        self._service, self._record = service, record
        self.asked = [asked]
        self._num_prompt = len(prompt)
        self._reader = service.reader(body.tool_use(), prompt, has_form=False)
        self._head = {"id": f"msg_{record.id}", "type": "message", "role": "assistant", "model": service.name}

    @staticmethod
    async def ask(service: Service, record: Record, body: MessagesBody) -> MessagesCall:
        """Read the conversation and ask for its answer."""
        prompt = await read(service, record, body)
        given = {"temperature": body.temperature, "top_p": body.top_p, "top_k": body.top_k, "stop": body.stop_sequences}
        params = sampling_params(
            service.defaults,
            given,
            max_new_tokens=body.max_tokens,
            structured_outputs=body.tool_use().form(),
            **service.marks_are_text(),
        )
        asked = service.ask(prompt, params, record, streams=body.stream)
        return MessagesCall(service, record, body, asked, prompt)

    async def whole(self) -> dict[str, Any]:
        """The answer in one."""
        (answer,) = await self._service.whole(self.asked, self._record)
        content = [_block(part) for part in parts_of(self._reader, answer.text or "")]
        ending = _ending(answer, has_called=any(block["type"] == "tool_use" for block in content))
        return {**self._head, "content": content, **ending, "usage": Usage.of([answer]).for_anthropic()}

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The answer as it comes."""
        begun: dict[str, Any] = {**self._head, "content": [], "stop_reason": None, "stop_sequence": None}
        parts, usage = Parts(), Usage(self._num_prompt, 0, 0).for_anthropic()
        yield _event("message_start", message={**begun, "usage": usage})
        try:
            async for _, chunk in self._service.stream(self.asked, self._record):
                for happening in happenings(parts, self._reader, chunk.text, is_last=chunk.finished is not None):
                    yield _block_event(happening)
                if chunk.finished is not None:
                    usage = Usage.of([chunk.finished]).for_anthropic()
                    ending = _ending(chunk.finished, has_called=any(part.kind == "call" for part in parts.all))
                    yield _event("message_delta", delta=ending, usage=usage)
        except ApiError as error:
            self._record.cut(error.message)
            yield event(error.body("/v1/messages"), "error")
        else:
            yield _event("message_stop")


def _ending(answer: Completion, *, has_called: bool) -> dict[str, Any]:
    if isinstance(answer.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": answer.stop_reason}
    reason = "max_tokens" if answer.finish_reason == "length" else "tool_use" if has_called else "end_turn"
    return {"stop_reason": reason, "stop_sequence": None}


def _block(part: Part) -> dict[str, Any]:
    """A part as far as it is said. Arguments that no object can hold, whose text is JSON all the same, are text."""
    if part.kind == "call" and (given := _object(part.text)) is not None:
        return {"type": "tool_use", "id": f"toolu_{part.number}", "name": part.name, "input": given}
    if part.kind == "reasoning":
        return {"type": "thinking", "thinking": part.text, "signature": ""}
    return {"type": "text", "text": part.text}


def _block_event(happening: Happening) -> bytes:
    what, part, text = happening
    if what == "begin":
        return _event("content_block_start", index=part.index, content_block=_block(part))
    if what == "end":
        return _event("content_block_stop", index=part.index)
    kind, field = {
        "call": ("input_json_delta", "partial_json"),
        "reasoning": ("thinking_delta", "thinking"),
        "text": ("text_delta", "text"),
    }[part.kind]
    return _event("content_block_delta", index=part.index, delta={"type": kind, field: text})


def _object(text: str) -> dict[str, Any] | None:
    """Arguments by name; None if nothing holds them. Those that were cut off are none."""
    try:
        found: dict[str, Any] = json.loads(arguments_text(text))
    except json.JSONDecodeError:
        return {}
    except ValueError:
        return None
    return found


async def read(service: Service, record: Record, body: CountBody) -> list[int]:
    """The tokens of a conversation."""
    use = body.tool_use()
    use.check()
    if body.messages[-1].role == "assistant":
        raise unsupported("messages", "the last turn is the assistant's, and answers are not gone on with")
    said, values = body.conversation(), body.template_values()
    record.names = {**record.names, **said.names}
    if values.get("enable_thinking") is False and unread_value(service.llm.tokenizer, values) is not None:
        values = {}  # a template without such a switch turns nothing on
    return await service.chat_prompt(said.messages, values, record, use)


def _event(name: str, **data: Any) -> bytes:
    return event({"type": name, **data}, name)
