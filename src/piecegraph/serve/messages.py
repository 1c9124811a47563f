"""``/v1/messages``: the same conversations as Anthropic's API has them, so that its clients need no proxy."""

from __future__ import annotations

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


class CacheControl(Body):
    """What is to be kept of a prompt: all of it is, as long as there is room."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class TextBlock(Body):
    """A part of what is said."""

    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None


class Turn(Body):
    """One turn of a conversation."""

    role: Literal["user", "assistant"]
    content: str | list[TextBlock]


class Metadata(Body):
    """Who asks."""

    user_id: str | None = None


class Thinking(Body):
    """Whether a model shows what it thinks."""

    type: Literal["disabled"]


class CountBody(Body):
    """Of ``/v1/messages/count_tokens``."""

    model: str
    messages: list[Turn] = Field(min_length=1)
    system: str | list[TextBlock] | None = None
    thinking: Thinking | None = None

    def conversation(self) -> list[dict[str, Any]]:
        """As chat templates have it."""
        first = [] if self.system is None else [{"role": "system", "content": _text(self.system)}]
        return [*first, *({"role": turn.role, "content": _text(turn.content)} for turn in self.messages)]


class MessagesBody(CountBody):
    """Of ``/v1/messages``."""

    max_tokens: int = Field(ge=1)
    stop_sequences: list[str] | None = Field(None, max_length=64)
    temperature: float | None = Field(None, ge=0, le=1)
    top_p: float | None = None
    top_k: int | None = Field(None, ge=0)
    stream: bool | None = None
    metadata: Metadata | None = None


def _text(content: str | list[TextBlock]) -> str:
    return content if isinstance(content, str) else "".join(block.text for block in content)


class MessagesCall:
    """One call, once its conversation is asked for."""

    def __init__(self, service: Service, record: Record, asked: Answers, num_prompt: int) -> None:
        self._service, self._record = service, record
        self.asked = [asked]
        self._num_prompt = num_prompt
        self._head = {
            "id": f"msg_{record.id}",
            "type": "message",
            "role": "assistant",
            "model": service.name,
        }

    @staticmethod
    async def ask(service: Service, record: Record, body: MessagesBody) -> MessagesCall:
        """Read the conversation and ask for its answer."""
        prompt = await read(service, body)
        given = {"temperature": body.temperature, "top_p": body.top_p, "top_k": body.top_k, "stop": body.stop_sequences}
        params = sampling_params(service.defaults, given, max_new_tokens=body.max_tokens)
        return MessagesCall(service, record, service.ask(prompt, params, record, streams=body.stream), len(prompt))

    async def whole(self) -> dict[str, Any]:
        """The answer in one."""
        (answer,) = await self._service.whole(self.asked, self._record)
        content = [{"type": "text", "text": answer.text}]
        return {**self._head, "content": content, **_ending(answer), "usage": Usage.of([answer]).for_anthropic()}

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The answer as it comes."""
        begun: dict[str, Any] = {**self._head, "content": [], "stop_reason": None, "stop_sequence": None}
        usage = Usage(self._num_prompt, 0, 0).for_anthropic()
        yield _event("message_start", message={**begun, "usage": usage})
        yield _event("content_block_start", index=0, content_block={"type": "text", "text": ""})
        try:
            async for _, chunk in self._service.stream(self.asked, self._record):
                if chunk.text:
                    yield _event("content_block_delta", index=0, delta={"type": "text_delta", "text": chunk.text})
                if chunk.finished is not None:
                    yield _event("content_block_stop", index=0)
                    usage = Usage.of([chunk.finished]).for_anthropic()
                    yield _event("message_delta", delta=_ending(chunk.finished), usage=usage)
        except ApiError as error:
            self._record.cut(error.message)
            yield event(error.body("/v1/messages"), "error")
        else:
            yield _event("message_stop")


async def read(service: Service, body: CountBody) -> list[int]:
    """The tokens of a conversation."""
    return await service.chat_prompt(body.conversation(), {})


def _event(name: str, **data: Any) -> bytes:
    return event({"type": name, **data}, name)


def _ending(answer: Completion) -> dict[str, Any]:
    if isinstance(answer.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": answer.stop_reason}
    reason = "max_tokens" if answer.finish_reason == "length" else "end_turn"
    return {"stop_reason": reason, "stop_sequence": None}
