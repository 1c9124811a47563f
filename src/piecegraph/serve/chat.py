"""``/v1/chat/completions``."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from piecegraph.llm.run.answers import Answers
from piecegraph.llm.run.results import Chunk, Completion, TokenLogprob
from piecegraph.serve.bodies import ChatBody, conversation_of
from piecegraph.serve.failures import ApiError
from piecegraph.serve.logprobs import TokenTexts
from piecegraph.serve.parsing import ParsedAnswer, deltas
from piecegraph.serve.record import Record
from piecegraph.serve.service import Service
from piecegraph.serve.streams import HOLE, Template, event
from piecegraph.serve.usage import Usage


class ChatCall:
    """One call, once its conversation is asked for."""

    def __init__(
        self, service: Service, record: Record, body: ChatBody, asked: Answers, prompt: list[int], texts: TokenTexts
    ) -> None:
        self._service, self._body, self._record, self._texts = service, body, record, texts
        self.asked = [asked]
        self._each = body.n or 1
        self._before = [texts.last_of(prompt)] * self._each
        """What the next token of each answer is behind."""
        use, has_form = body.tool_use(), body.form() is not None
        self._parsers = [service.reader(use, prompt, has_form=has_form) for _ in range(self._each)]
        self._head = {
            "id": f"chatcmpl-{record.id}",
            "created": int(time.time()),
            "model": service.name,
        }

    @staticmethod
    async def ask(service: Service, record: Record, body: ChatBody) -> ChatCall:
        """Read the conversation and ask for its answers."""
        body.check()
        use = body.tool_use()
        prompt = await service.chat_prompt(conversation_of(body.messages), body.template_values(), record, use)
        params = body.sampling(
            service.defaults,
            max_new_tokens=body.num_new or service.most_new(len(prompt)),
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            structured_outputs=body.form(),
            **service.marks_are_text(body.skip_special_tokens),
        )
        asked = service.ask(prompt, params, record, streams=body.stream, priority=body.priority)
        texts = TokenTexts(service.llm.tokenizer, skip_special_tokens=params.skip_special_tokens)
        return ChatCall(service, record, body, asked, prompt, texts)

    async def whole(self) -> dict[str, Any]:
        """The answer in one."""
        answers = await self._service.whole(self.asked, self._record, each=self._each)
        usage = Usage.of(answers, self._each).for_openai()
        choices = [self._choice(index, answer) for index, answer in enumerate(answers)]
        return {**self._head, "object": "chat.completion", "choices": choices, "usage": usage}

    def _choice(self, index: int, answer: Completion) -> dict[str, Any]:
        parsed = ParsedAnswer()
        for delta in deltas(self._parsers[index], answer.text or "", is_last=True):
            parsed.add(delta)
        return {
            "index": index,
            "message": parsed.message(),
            "logprobs": None if answer.logprobs is None else self._logprobs(index, answer.logprobs),
            "finish_reason": self._finish_reason(index, answer),
            "stop_reason": answer.stop_reason,
        }

    def _logprobs(self, index: int, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        """Of the next tokens of an answer."""
        before = self._before[index]
        self._before[index] = self._texts.last_of([entry.token_id for entry in entries], before)
        return self._texts.for_chat(entries, before)

    def _finish_reason(self, index: int, answer: Completion) -> str:
        parser = self._parsers[index]
        has_called = parser is not None and parser.num_calls > 0
        return "tool_calls" if has_called and answer.finish_reason == "stop" else answer.finish_reason

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The answer as it comes."""
        head, options = {**self._head, "object": "chat.completion.chunk"}, self._body.stream_options
        ended: list[Completion] = []
        for index in range(self._each):
            delta = {"role": "assistant", "content": "", "refusal": None}
            yield event({**head, "choices": [_part(index, delta)]})
        said = [Template({**head, "choices": [_part(index, {"content": HOLE})]}) for index in range(self._each)]
        try:
            async for index, chunk in self._service.stream(self.asked, self._record, each=self._each):
                if chunk.finished is None and chunk.logprobs is None and self._parsers[index] is None:
                    if chunk.text:
                        yield said[index].event(chunk.text)
                    continue
                if events := [event({**head, "choices": [part]}) for part in self._parts(index, chunk)]:
                    yield b"".join(events)
                if chunk.finished is not None:
                    ended.append(chunk.finished)
        except ApiError as error:
            self._record.cut(error.message)
            yield event(error.body("/v1/chat/completions"))
        else:
            if options is not None and options.include_usage:
                yield event({**head, "choices": [], "usage": Usage.of(ended, self._each).for_openai()})
        yield b"data: [DONE]\n\n"

    def _parts(self, index: int, chunk: Chunk) -> list[dict[str, Any]]:
        """What a chunk tells of its answer."""
        answer = chunk.finished
        found = deltas(self._parsers[index], chunk.text, is_last=answer is not None)
        logprobs = None if chunk.logprobs is None else self._logprobs(index, chunk.logprobs)
        if logprobs is not None and not found:
            found = [{"content": ""}]
        parts = [_part(index, delta) for delta in found]
        if logprobs is not None:
            parts[0]["logprobs"] = logprobs
        if answer is not None:
            ending = {"finish_reason": self._finish_reason(index, answer), "stop_reason": answer.stop_reason}
            parts.append(_part(index, {}) | ending)
        return parts


def _part(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, "stop_reason": None}
