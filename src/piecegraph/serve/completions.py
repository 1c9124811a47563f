"""``/v1/completions``."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

from piecegraph.llm.run.detokenizer import Detokenizer
from piecegraph.llm.run.generation import text_behind
from piecegraph.llm.run.results import Chunk, Completion
from piecegraph.llm.run.stop import IncrementalText
from piecegraph.serve.bodies import CompletionBody, prompts_of
from piecegraph.serve.failures import ApiError, unsupported
from piecegraph.serve.logprobs import TextOffsets, TokenTexts
from piecegraph.serve.record import Record
from piecegraph.serve.service import Service
from piecegraph.serve.streams import HOLE, Template, event
from piecegraph.serve.usage import Usage


class CompletionCall:
    """One call; its prompts are asked for when it is made."""

    def __init__(self, service: Service, record: Record, body: CompletionBody) -> None:
        body.check()
        if body.echo and body.stream and body.logprobs is not None:
            raise unsupported("echo", "log-probabilities of a prompt are told at the end, and not in a stream")
        self._service, self._body, self._record = service, body, record
        self._each = body.n or 1
        self._has_new = body.max_tokens > 0
        self._params = body.sampling(
            service.defaults,
            max_new_tokens=max(body.max_tokens, 1),  # of a prompt alone, log-probabilities can be asked for
            logprobs=body.logprobs,
            prompt_logprobs=body.logprobs if body.echo else None,
        )
        self._texts = TokenTexts(service.llm.tokenizer_if_any, skip_special_tokens=self._params.skip_special_tokens)
        self._prompts = prompts_of(body.prompt)
        self._unechoed: dict[int, list[int]] = {n: [] for n in range(len(self._prompts) * self._each) if body.echo}
        """What is known of answers whose prompt the stream has not had yet."""
        self.asked = service.ask_all(self._prompts, self._params, record, streams=body.stream, priority=body.priority)
        self._head = {
            "id": f"cmpl-{record.id}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": service.name,
        }

    async def whole(self) -> dict[str, Any]:
        """The answer in one."""
        answers = await self._service.whole(self.asked, self._record, each=self._each, has_new=self._has_new)
        choices = [self._choice(index, answer) for index, answer in enumerate(answers)]
        return {**self._head, "choices": choices, "usage": Usage.of(answers, self._each).for_openai()}

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The answer as it comes."""
        ended: list[Completion] = []
        offsets: dict[int, TextOffsets | None] = {}
        plain: dict[int, Template] = {}
        try:
            chunks = self._service.stream(self.asked, self._record, each=self._each, has_new=self._has_new)
            async for index, chunk in chunks:
                if index in plain and chunk.finished is None:
                    yield plain[index].event(chunk.text)
                    continue
                yield event({**self._head, "choices": [self._part(index, chunk, offsets)]})
                if self._body.logprobs is None and index not in self._unechoed:
                    plain[index] = Template({**self._head, "choices": [_choice_part(index, HOLE)]})
                if chunk.finished is not None:
                    ended.append(chunk.finished)
        except ApiError as error:
            self._record.cut(error.message)
            yield event(error.body("/v1/completions"))
        else:
            if self._body.stream_options is not None and self._body.stream_options.include_usage:
                yield event({**self._head, "choices": [], "usage": Usage.of(ended, self._each).for_openai()})
        yield b"data: [DONE]\n\n"

    def _choice(self, index: int, answer: Completion) -> dict[str, Any]:
        before = self._echo(index, answer.token_ids) if self._body.echo else ""
        return {
            "index": index,
            "text": before + (answer.text or ""),
            "logprobs": None if answer.logprobs is None else self._logprobs(index, answer, len(before)),
            **_end(answer),
        }

    def _logprobs(self, index: int, answer: Completion, begin: int) -> dict[str, Any]:
        tokens, entries = answer.token_ids, list[Any](answer.logprobs or ())
        behind = self._offsets(answer.prompt_token_ids, begin)
        before, offsets = behind.before, behind.of(tokens)
        if self._body.echo:
            of_prompt = self._texts.offsets_in_prompt(self._prompt(index), answer.prompt_token_ids)
            tokens, entries = answer.prompt_token_ids + tokens, [*(answer.prompt_logprobs or ()), *entries]
            before, offsets = None, of_prompt + offsets
        return self._texts.for_completions(tokens, entries, offsets, before)

    def _offsets(self, prompt: list[int], begin: int = 0) -> TextOffsets:
        """Of new tokens; those of a stop text have one, too."""
        tokenizer = self._service.llm.tokenizer_if_any
        if tokenizer is None:
            return TextOffsets(IncrementalText(lambda _: ""), self._texts, begin)
        detokenizer = Detokenizer(tokenizer, skip_special_tokens=self._params.skip_special_tokens)
        text = text_behind(prompt, replace(self._params, stop=()), detokenizer)
        return TextOffsets(text, self._texts, begin, self._texts.last_of(prompt))

    def _part(self, index: int, chunk: Chunk, offsets: dict[int, TextOffsets | None]) -> dict[str, Any]:
        logprobs = None
        if index not in offsets:
            prompt = self.asked[index // self._each].prompt_token_ids
            offsets[index] = None if chunk.logprobs is None else self._offsets(prompt)
        if chunk.logprobs is not None and (behind := offsets[index]) is not None:
            tokens, before = chunk.token_ids, behind.before
            logprobs = self._texts.for_completions(tokens, chunk.logprobs, behind.of(tokens), before)
        part = _choice_part(index, self._echo_before(index, chunk) + chunk.text, logprobs)
        if chunk.finished is not None:
            part |= _end(chunk.finished)
        return part

    def _prompt(self, index: int) -> str | list[int]:
        return self._prompts[index // self._each]

    def _echo(self, index: int, answer: list[int]) -> str:
        prompt = self._prompt(index)
        return prompt if isinstance(prompt, str) else self._texts.of_prompt(prompt, answer)

    def _echo_before(self, index: int, chunk: Chunk) -> str:
        """The prompt, before the first text: until then its last character may be completed."""
        if index not in self._unechoed:
            return ""
        self._unechoed[index] += chunk.token_ids
        if not chunk.text and chunk.finished is None:
            return ""
        return self._echo(index, self._unechoed.pop(index))


def _end(answer: Completion) -> dict[str, Any]:
    return {"finish_reason": answer.finish_reason, "stop_reason": answer.stop_reason}


def _choice_part(index: int, text: str, logprobs: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": None, "stop_reason": None}
