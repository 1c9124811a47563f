"""Requests of asyncio: answers are those of the same requests alone, and whoever goes away leaves nothing behind."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest
import torch

import piecegraph
from piecegraph.errors import ConfigError, RequestError
from piecegraph.llm import Chunk, SamplingParams
from piecegraph.llm.run.answers import Answers, Inbox
from tests.cases.llm_shelf import Shelf
from tests.cases.tiny_llm import write_tiny_llm

PROMPTS = [[(7 * i + 3 * j) % 100 + 5 for i in range(4 + j)] for j in range(8)]
LONG = 400


@pytest.fixture(scope="module")
def llm(models: Shelf) -> piecegraph.LLM:
    return models.load("llama", max_num_seqs=4, options={"block_size": 4})


def params(num_new: int = 12, **others: Any) -> SamplingParams:
    return SamplingParams(max_new_tokens=num_new, ignore_eos=True, **others)


def serve(
    llm: piecegraph.LLM, task: Callable[[piecegraph.AsyncLLM], Coroutine[Any, Any, Any]], **arguments: Any
) -> Any:
    """Run a task with a service of its own; everything must be given back in the end."""

    async def run() -> Any:
        async with piecegraph.AsyncLLM(llm, **arguments) as service:
            found = await asyncio.wait_for(task(service), 60)
        with pytest.raises(ConfigError, match="PG106"):
            service.generate(PROMPTS[0])
        return found

    found = asyncio.run(run())
    scheduler = llm.started.engine.scheduler
    scheduler.check()
    assert (scheduler.num_unfinished, scheduler.cache.usage) == (0, 0.0)
    return found


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


def test_answers_are_those_of_the_requests_alone(llm: piecegraph.LLM, models: Shelf) -> None:
    async def task(service: piecegraph.AsyncLLM) -> list[Any]:
        async def stream(prompt: list[int]) -> list[int]:
            tokens: list[int] = []
            async for chunk in service.generate(prompt, params()):
                tokens += chunk.token_ids
                finished = chunk.finished
            assert finished is not None
            assert finished.token_ids == tokens
            return tokens

        async def whole(prompt: list[int]) -> list[int]:
            (answer,) = await service.generate(prompt, max_new_tokens=12, ignore_eos=True)
            return answer.token_ids

        return await asyncio.gather(*map(stream, PROMPTS), *map(whole, PROMPTS))

    expected = [models.greedy("llama", prompt, 12) for prompt in PROMPTS]
    assert serve(llm, task) == expected * 2


def test_several_answers_to_a_prompt(llm: piecegraph.LLM) -> None:
    drawn = params(n=3, temperature=1.0, seed=7)

    async def task(service: piecegraph.AsyncLLM) -> tuple[Any, Any]:
        streamed: dict[int, list[int]] = {}
        async for chunk in service.generate(PROMPTS[0], drawn):
            streamed.setdefault(chunk.index, []).extend(chunk.token_ids)
        return streamed, [answer.token_ids for answer in await service.generate(PROMPTS[0], drawn)]

    streamed, whole = serve(llm, task)
    alone = [llm.generate([PROMPTS[0]], params(temperature=1.0, seed=7 + i))[0].token_ids for i in range(3)]
    assert whole == alone == [streamed[i] for i in range(3)]
    assert len(set(map(tuple, alone))) == 3
    both = llm.generate(PROMPTS[:2], drawn)
    assert [answer.token_ids for answer in both[:3]] == alone
    assert [answer.prompt_token_ids for answer in both] == [PROMPTS[0]] * 3 + [PROMPTS[1]] * 3


def test_several_answers_read_their_prompt_once(llm: piecegraph.LLM) -> None:
    prompt, drawn = [(11 * i) % 100 + 5 for i in range(30)], params(n=3, temperature=1.0, seed=7)
    before = llm.stats()["steps"]["mixed"]["num_tokens"]
    answers = llm.generate([prompt], drawn)
    assert [answer.metrics.num_cached_tokens for answer in answers] == [0, 28, 28]
    assert llm.stats()["steps"]["mixed"]["num_tokens"] - before < 2 * len(prompt)
    alone = [llm.generate([prompt], params(temperature=1.0, seed=7 + i))[0].token_ids for i in range(3)]
    assert [answer.token_ids for answer in answers] == alone


def test_a_thread_that_calls_the_model_meanwhile(llm: piecegraph.LLM, models: Shelf) -> None:
    async def task(service: piecegraph.AsyncLLM) -> list[list[int]]:
        others = asyncio.to_thread(llm.generate, PROMPTS, params())
        mine = asyncio.gather(*(service.generate(prompt, params())._all() for prompt in PROMPTS))
        return [answer.token_ids for answer in await others] + [answer.token_ids for (answer,) in await mine]

    assert serve(llm, task) == [models.greedy("llama", prompt, 12) for prompt in PROMPTS] * 2


async def close(answers: Any) -> None:
    await answers.aclose()


async def cancel(answers: Any) -> None:
    task = asyncio.ensure_future(answers._all())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def leave_a_block(answers: Any) -> None:
    async with answers:
        pass


@pytest.mark.parametrize("leave", [close, cancel, leave_a_block, None])
def test_a_client_that_goes_away_frees_its_blocks_within_a_step(
    llm: piecegraph.LLM, leave: Callable[[Any], Awaitable[None]] | None
) -> None:
    engine = llm.started.engine

    async def task(service: piecegraph.AsyncLLM) -> int:
        answers: Any = service.generate(PROMPTS[0], params(LONG))
        await anext(answers)
        assert engine.scheduler.cache.num_sequences == 1
        before = engine.counts.num_steps
        if leave is not None:
            await leave(answers)
        else:
            del answers  # forgotten
        await until(lambda: engine.scheduler.num_unfinished == 0)
        return engine.counts.num_steps - before

    # Those that ran before the event loop came to it are not the engine's fault.
    assert serve(llm, task) < 20


def test_one_that_goes_away_while_it_waits(llm: piecegraph.LLM) -> None:
    async def task(service: piecegraph.AsyncLLM) -> None:
        running = [service.generate(prompt, params(LONG)) for prompt in PROMPTS[:4]]
        await anext(running[0])
        for _ in range(100):
            await service.generate(PROMPTS[5], params()).aclose()
        await until(lambda: service.load().num_waiting == 0)
        assert len(service._waiting) < 20
        for answers in running:
            await answers.aclose()

    serve(llm, task)


def test_a_queue_that_is_full(llm: piecegraph.LLM, models: Shelf) -> None:
    async def task(service: piecegraph.AsyncLLM) -> list[int]:
        running = [service.generate(prompt, params(LONG)) for prompt in PROMPTS[:4]]
        for answers in running:
            await anext(answers)
        waiting = [service.generate(PROMPTS[4], params()) for _ in range(3)]
        with pytest.raises(RequestError, match="PG658 the queue is full: there are 3 waiting, and max_queue is 4"):
            service.generate(PROMPTS[5], params(n=2))
        waiting.append(service.generate(PROMPTS[5], params()))
        with pytest.raises(RequestError, match="PG658"):
            service.generate(PROMPTS[6], params())
        assert (service.load().num_running, service.load().num_waiting) == (4, 4)
        for answers in running:
            await answers.aclose()
        (answer,) = await waiting[3]
        return answer.token_ids

    assert serve(llm, task, max_queue=4) == models.greedy("llama", PROMPTS[5], 12)


def test_a_lower_number_is_let_in_first(models: Shelf) -> None:
    llm = models.load("llama", max_num_seqs=1)

    async def task(service: piecegraph.AsyncLLM) -> list[int]:
        ended: list[int] = []

        async def ask(priority: int) -> None:
            await service.generate(PROMPTS[0], params(2), priority=priority)
            ended.append(priority)

        first = service.generate(PROMPTS[1], params(LONG))
        await anext(first)
        tasks = [asyncio.ensure_future(ask(priority)) for priority in (2, 0, 1, 0, -5)]
        await until(lambda: service.load().num_waiting == 5)
        await first.aclose()
        await asyncio.gather(*tasks)
        return ended

    assert serve(llm, task) == [-5, 0, 0, 1, 2]


def test_what_has_ended_is_not_kept_until_its_deadline(llm: piecegraph.LLM) -> None:
    async def task(service: piecegraph.AsyncLLM) -> int:
        for _ in range(3):
            asked = (service.generate(PROMPTS[0], params(1), timeout_s=600)._all() for _ in range(40))
            await asyncio.gather(*asked)
        return len(service._deadlines)

    assert serve(llm, task) <= 16


def test_deadlines(models: Shelf) -> None:
    llm = models.load("llama", max_num_seqs=1)

    async def task(service: piecegraph.AsyncLLM) -> None:
        running = service.generate(PROMPTS[0], params(LONG), timeout_s=0.2)
        waiting = service.generate(PROMPTS[1], params(), timeout_s=0.1)
        later = service.generate(PROMPTS[2], params(), timeout_s=60)
        with pytest.raises(RequestError, match="PG659 the request is not done in time"):
            await waiting
        assert (await anext(running)).token_ids
        with pytest.raises(RequestError, match="PG659"):
            await running
        (answer,) = await later
        assert answer.token_ids == models.greedy("llama", PROMPTS[2], 12)

    step = llm.started.engine.step

    def slow_step() -> bool:
        time.sleep(0.01)
        return step()

    llm.started.engine.step = slow_step  # type: ignore[method-assign]
    serve(llm, task)


def test_a_step_that_fails_fails_its_requests_and_not_the_service(
    models: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = models.load("llama", max_num_seqs=2)
    engine, fails = llm.started.engine, threading.Event()
    run_step = engine.forward.run_step

    def failing(key: Any) -> Any:
        if fails.is_set():
            fails.clear()
            raise torch.OutOfMemoryError("no memory")
        return run_step(key)

    monkeypatch.setattr(engine.forward, "run_step", failing)

    async def task(service: piecegraph.AsyncLLM) -> list[Any]:
        asked = [service.generate(prompt, params())._all() for prompt in PROMPTS[:4]]
        fails.set()
        found = await asyncio.gather(*asked, return_exceptions=True)
        assert (service.load().num_failed_steps, service.load().is_healthy) == (1, True)
        return found

    found = serve(llm, task)
    for error in found[:2]:
        assert isinstance(error, RequestError)
        assert "PG650 a step with the request failed: OutOfMemoryError: no memory" in str(error)
    assert [answer.token_ids for (answer,) in found[2:]] == [models.greedy("llama", each, 12) for each in PROMPTS[2:4]]


def test_a_device_that_does_not_come_back_is_told(models: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = models.load("llama", max_num_seqs=2)

    def failing(key: Any) -> Any:
        raise RuntimeError("an illegal memory access was encountered")

    async def task(service: piecegraph.AsyncLLM) -> None:
        with monkeypatch.context() as broken:
            broken.setattr(llm.started.engine.forward, "run_step", failing)
            for _ in range(3):
                assert service.load().is_healthy
                with pytest.raises(RequestError, match="PG650"):
                    await service.generate(PROMPTS[0], params())
        assert not service.load().is_healthy
        await service.generate(PROMPTS[0], params())
        assert service.load().is_healthy

    serve(llm, task)


def test_what_is_refused(llm: piecegraph.LLM) -> None:
    async def task(service: piecegraph.AsyncLLM) -> None:
        refusals: list[tuple[Any, dict[str, Any], str]] = [
            ([], {}, "PG651 the prompt is empty"),
            ([1] * 600, {}, "PG652 the prompt has 600 tokens"),
            ([10**6], {}, "PG653 the prompt holds token 1000000"),
            ("\ud800", {}, "PG653 the prompt is no text"),
        ]
        for prompt, how, reason in refusals:
            for read in (Answers.accepted, Answers._all):
                with pytest.raises(piecegraph.errors.PiecegraphError, match=reason):
                    await read(service.generate(prompt, **how))
        for how in ({"timeout_s": 0}, {"priority": 0.5}, {"temprature": 1}):
            with pytest.raises(ConfigError, match="PG101"):
                service.generate(PROMPTS[0], **how)  # type: ignore[arg-type]

    serve(llm, task, max_queue=1)
    for arguments in ({"max_queue": 0}, {"dtype": "float32"}):
        with pytest.raises(ConfigError, match="PG101"):
            piecegraph.AsyncLLM(llm, **arguments)


@pytest.mark.parametrize("stop", [None, "y"])
def test_answers_that_are_not_streamed_come_in_one_chunk(llm: piecegraph.LLM, stop: str | None) -> None:
    async def task(service: piecegraph.AsyncLLM) -> list[Chunk]:
        return [chunk async for chunk in service.generate(PROMPTS[0], params(stop=stop, logprobs=0), stream=False)]

    (expected,) = llm.generate([PROMPTS[0]], params(stop=stop))
    (chunk,) = serve(llm, task)
    assert (chunk.text, chunk.token_ids) == (expected.text, expected.token_ids)
    assert len(chunk.logprobs) == len(expected.token_ids)


def test_a_slow_reader_holds_no_more_than_its_answer(llm: piecegraph.LLM, models: Shelf) -> None:
    async def task(service: piecegraph.AsyncLLM) -> list[Chunk]:
        answers = service.generate(PROMPTS[0], params(logprobs=1))
        await until(lambda: answers._inbox.is_done)
        return [chunk async for chunk in answers]

    (chunk,) = serve(llm, task)
    assert chunk.token_ids == models.greedy("llama", PROMPTS[0], 12)
    assert [each.token_id for each in chunk.logprobs] == chunk.token_ids
    assert chunk.finished.logprobs == chunk.logprobs


@pytest.mark.parametrize("drain", [True, False])
def test_the_end(llm: piecegraph.LLM, drain: bool) -> None:
    async def run() -> list[Any]:
        service = piecegraph.AsyncLLM(llm)
        asked = [asyncio.ensure_future(service.generate(prompt, params(40))._all()) for prompt in PROMPTS]
        await until(lambda: service.load().num_running > 0)
        await service.close(drain=drain, timeout_s=30)
        assert not service._thread.is_alive()
        return [(await each)[0] for each in asked]

    reasons = [answer.finish_reason for answer in asyncio.run(run())]
    assert reasons == ["length" if drain else "abort"] * len(PROMPTS)


def test_a_thread_without_requests_waits_for_an_order(llm: piecegraph.LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    async def task(service: piecegraph.AsyncLLM) -> int:
        await service.generate(PROMPTS[0], params(2))
        looks = 0
        carry_out = service._send_new

        def counted() -> None:
            nonlocal looks
            looks += 1
            carry_out()

        monkeypatch.setattr(service, "_send_new", counted)
        await asyncio.sleep(0.05)
        return looks

    assert serve(llm, task) <= 1


def test_what_is_missing_is_recorded_while_there_are_no_requests(models: Shelf) -> None:
    llm = models.load("llama", max_num_seqs=4, max_batch_tokens=64, options={"graph_device": "simulated"})
    forward = llm.started.engine.forward

    async def task(service: piecegraph.AsyncLLM) -> float:
        assert forward.missing
        (answer,) = await service.generate(PROMPTS[0], params(temperature=1.0))
        await until(lambda: not forward.missing)
        return answer.metrics.graph_coverage

    assert serve(llm, task, records_idle=True) == 1
    assert forward.num_recorded_idle > 0


def test_an_event_loop_that_ends_with_requests_in_it(llm: piecegraph.LLM) -> None:
    service = piecegraph.AsyncLLM(llm)
    inboxes: list[Inbox] = []

    async def forget() -> None:
        answers = service.generate(PROMPTS[0], params(LONG))
        inboxes.append(answers._inbox)
        answers._close = lambda: None  # type: ignore[method-assign]

    asyncio.run(forget())
    asyncio.run(until(lambda: not service._calls))
    asyncio.run(service.close())
    assert llm.started.engine.scheduler.num_unfinished == 0


def test_a_model_that_others_close(models: Shelf) -> None:
    llm = models.load("llama", max_num_seqs=1)

    async def run() -> None:
        service = piecegraph.AsyncLLM(llm)
        running, waiting = (service.generate(prompt, params(LONG)) for prompt in PROMPTS[:2])
        await anext(running)
        await asyncio.to_thread(llm.close)
        (answer,) = await running
        assert answer.finish_reason == "abort"
        with pytest.raises(RequestError, match="PG650 the engine has ended"):
            await waiting
        with pytest.raises(ConfigError, match="PG106"):
            service.generate(PROMPTS[0])
        await service.close()

    asyncio.run(run())


# ------------------------------------------------------------------ with a tokenizer


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> piecegraph.LLM:
    folder = write_tiny_llm(tmp_path_factory.mktemp("tiny"))
    return piecegraph.LLM(folder, backend="eager", max_num_seqs=2, options={"progress": False})


def test_texts(words: piecegraph.LLM) -> None:
    async def task(service: piecegraph.AsyncLLM) -> str:
        answers = service.generate("ax by", max_new_tokens=12)
        await answers.accepted()
        cancelled = service.generate("ax by cz", max_new_tokens=12)
        del cancelled
        gc.collect()
        return "".join([chunk.text async for chunk in answers])

    assert serve(words, task) == words.generate("ax by", max_new_tokens=12)[0].text


@pytest.mark.parametrize("stage", ["_tokens", "prepare"])
def test_whatever_is_raised_while_a_prompt_is_read_leaves_nothing(
    words: piecegraph.LLM, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    """A place in the queue that is never given back is lost for all, and nobody could wait for its end."""

    def fail(*_: Any, **__: Any) -> None:
        raise LookupError("nobody knows")

    async def task(service: piecegraph.AsyncLLM) -> Any:
        with monkeypatch.context() as broken:
            broken.setattr(service if stage == "_tokens" else service.llm.running, stage, fail)
            for _ in range(3):
                with pytest.raises(RequestError, match="PG650 the prompt could not be read: LookupError: nobody knows"):
                    await service.generate("ax", n=2)
        assert service.load().num_waiting == 0
        return await service.generate("ax by", max_new_tokens=3)

    assert len(serve(words, task, max_queue=2)[0].token_ids) == 3


def test_a_tokenizer_that_fails_fails_its_request_alone(words: piecegraph.LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = words.generate("ax by", max_new_tokens=12)[0].text
    decode = words.tokenizer.decode

    def failing(ids: list[int], **how: Any) -> str:
        if ids[0] == words.tokenizer.convert_tokens_to_ids("gz"):
            raise Exception("no such text")
        return str(decode(ids, **how))

    monkeypatch.setattr(words.tokenizer, "decode", failing)
    monkeypatch.setattr(words.tokenizer, "clean_up_tokenization_spaces", True)  # or it is not asked

    async def task(service: piecegraph.AsyncLLM) -> list[Any]:
        both = (service.generate(prompt, max_new_tokens=12)._all() for prompt in ("gz", "ax by"))
        return await asyncio.gather(*both, return_exceptions=True)

    error, (answer,) = serve(words, task)
    assert "PG650 the tokenizer makes no text of the answer: Exception: no such text" in str(error)
    assert answer.text == expected
