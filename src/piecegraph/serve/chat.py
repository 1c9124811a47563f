"""``/v1/chat/completions``."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from typing import Any

from piecegraph.llm.run.answers import Answers
from piecegraph.llm.run.results import Completion
from piecegraph.serve.bodies import ChatBody
from piecegraph.serve.failures import ApiError
from piecegraph.serve.logprobs import TokenTexts
from piecegraph.serve.record import Record
from piecegraph.serve.service import Service
from piecegraph.serve.streams import event
from piecegraph.serve.usage import Usage


class ChatCall:
    """One call, once its conversation is asked for."""

    def __init__(self, service: Service, record: Record, body: ChatBody, asked: Answers) -> None:
        self._service, self._body, self._record = service, body, record
        self.asked = [asked]
        self._each = body.n or 1
        self._texts = TokenTexts(service.llm.llm.tokenizer)
        self._head = {
            "id": f"chatcmpl-{record.id}",
            "created": int(time.time()),
            "model": service.settings.model_name,
        }

    @staticmethod
    async def ask(service: Service, record: Record, body: ChatBody) -> ChatCall:
        """Read the conversation and ask for its answers."""
        body.check()
        service.check_model(body.model)
        prompt = await service.chat_prompt([each.for_template() for each in body.messages], body.template_values())
        params = body.sampling(
            service.defaults,
            max_new_tokens=body.num_new or service.most_new(len(prompt)),
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        )
        asked = service.ask(prompt, params, record, streams=body.stream, priority=body.priority)
        return ChatCall(service, record, body, asked)

    async def whole(self) -> dict[str, Any]:
        """The answer in one."""
        answers = await self._service.whole(self.asked, self._record, each=self._each)
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": answer.text, "refusal": None},
                "logprobs": None if answer.logprobs is None else self._texts.for_chat(answer.logprobs),
                "finish_reason": answer.finish_reason,
                "stop_reason": answer.stop_reason,
            }
            for index, answer in enumerate(answers)
        ]
        usage = Usage.of(answers, self._each).for_openai()
        return {**self._head, "object": "chat.completion", "choices": choices, "usage": usage}

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The answer as it comes."""
        head, options = {**self._head, "object": "chat.completion.chunk"}, self._body.stream_options
        ended: list[Completion] = []
        for index in range(self._each):
            delta = {"role": "assistant", "content": "", "refusal": None}
            yield event({**head, "choices": [_part(index, delta)]})
        try:
            async for index, chunk in self._service.stream(self.asked, self._record, each=self._each):
                logprobs = None if chunk.logprobs is None else self._texts.for_chat(chunk.logprobs)
                if chunk.text or logprobs is not None:
                    yield event({**head, "choices": [_part(index, {"content": chunk.text}, logprobs=logprobs)]})
                if chunk.finished is not None:
                    ended.append(chunk.finished)
                    yield event({**head, "choices": [_part(index, {}, ended=chunk.finished)]})
        except ApiError as error:
            self._record.cut(error.message)
            yield event(error.body("/v1/chat/completions"))
        else:
            if options is not None and options.include_usage:
                yield event({**head, "choices": [], "usage": Usage.of(ended, self._each).for_openai()})
        yield b"data: [DONE]\n\n"


def _part(
    index: int, delta: dict[str, Any], *, logprobs: dict[str, Any] | None = None, ended: Completion | None = None
) -> dict[str, Any]:
    return {
        "index": index,
        "delta": delta,
        "logprobs": logprobs,
        "finish_reason": None if ended is None else ended.finish_reason,
        "stop_reason": None if ended is None else ended.stop_reason,
    }
