"""A process that sends requests and reads their answers, as one of several: by asyncio, and the standard library alone.

What to do comes by standard input, what became of it goes to standard output, both pickled; see :mod:`sending`.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import http.client
import os
import pickle
import ssl
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from piecegraph.bench.answers import Answer, AnswerReader
from piecegraph.bench.client import Target

READY = "ready"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What one of the processes has to do."""

    target: Target
    requests: Sequence[bytes]
    """Of all processes."""
    numbers: int
    """A file that all processes read from: each reads the number of the next request that nobody has sent."""
    moments_s: Sequence[float] | None
    """When each is to be sent, counted from when all begin; None for as soon as there is room."""
    concurrency: int
    """Requests that this process has open at once at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What one of the processes did."""

    answers: dict[int, Answer]
    """By the number of the request."""
    seconds: float
    """From when all began until its last answer."""
    busy: float
    """The share of that in which it used a core."""


def main() -> None:
    """Do what standard input says."""
    job: Job = pickle.load(sys.stdin.buffer)
    gc.freeze()
    _tell(READY)
    if os.read(sys.stdin.fileno(), 1):  # all begin together
        _tell(asyncio.run(_send(job)))


def _tell(message: str | Share) -> None:
    pickle.dump(message, sys.stdout.buffer)
    sys.stdout.buffer.flush()


async def _send(job: Job) -> Share:
    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), os._exit, 1)  # whoever wanted this is gone
    tls = None if job.target.tls_name is None else ssl.create_default_context()
    room = asyncio.Semaphore(job.concurrency)
    answers: dict[int, Answer] = {}
    start, cpu_start = time.perf_counter(), time.process_time()

    async def complete(number: int, asked_s: float) -> None:
        answers[number] = await _complete(job.target, tls, job.requests[number], asked_s)
        room.release()
        _tell(answers[number].status)

    async with asyncio.TaskGroup() as tasks:
        while await room.acquire() and (number := _next_number(job)) is not None:
            # One that is late has waited already: its user would not have known that there was no room.
            asked_s = time.perf_counter() if job.moments_s is None else start + job.moments_s[number]
            await asyncio.sleep(max(0.0, asked_s - time.perf_counter()))
            tasks.create_task(complete(number, asked_s))
    seconds = time.perf_counter() - start
    return Share(answers=answers, seconds=seconds, busy=(time.process_time() - cpu_start) / seconds)


def _next_number(job: Job) -> int | None:
    """Taken from all processes alike: their place in the file is one and the same."""
    found = os.read(job.numbers, 4)
    return int.from_bytes(found, sys.byteorder) if found else None


async def _complete(target: Target, tls: ssl.SSLContext | None, request: bytes, asked_s: float) -> Answer:
    """Send a request, and read the parts of its answer as they come."""
    stream = _Stream(request, AnswerReader(asked_s), target.timeout_s)
    try:
        async with asyncio.timeout(target.timeout_s):
            await _connect(target, tls, stream)
        return await stream.done
    except (OSError, http.client.HTTPException) as error:
        return Answer(status=type(error).__name__)
    finally:
        stream.close()


async def _connect(target: Target, tls: ssl.SSLContext | None, stream: _Stream) -> None:
    loop = asyncio.get_running_loop()
    *others, last = target.addresses
    name = target.tls_name
    for address in others:
        with contextlib.suppress(OSError):
            await loop.create_connection(lambda: stream, address, target.port, ssl=tls, server_hostname=name)
            return
    await loop.create_connection(lambda: stream, last, target.port, ssl=tls, server_hostname=name)


class _Stream(asyncio.Protocol):
    """One connection.

    Args:
        request: what is sent.
        reader: of the answer.
        timeout_s: without anything that comes.
    """

    def __init__(self, request: bytes, reader: AnswerReader, timeout_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self.done: asyncio.Future[Answer] = self._loop.create_future()
        self._request, self._reader, self._timeout_s = request, reader, timeout_s
        self._last_s = time.perf_counter()
        self._watch = self._loop.call_later(timeout_s, self._look)
        self._transport: asyncio.Transport | None = None

    def close(self) -> None:
        self._watch.cancel()
        if self._transport is not None:
            self._transport.abort()  # a TLS connection would wait for the other's goodbye

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._last_s = now_s = time.perf_counter()
        try:
            self._reader.feed(data, now_s)
        except http.client.HTTPException as error:
            self._fail(error)
        if self._reader.answer is not None and not self.done.done():
            self.done.set_result(self._reader.answer)

    def connection_lost(self, error: Exception | None) -> None:
        try:
            self._reader.end()
        except http.client.HTTPException as cut_off:
            self._fail(error or cut_off)

    def _look(self) -> None:
        """Whether anything has come; not asked for each part, which would take longer than to read it."""
        left_s = self._last_s + self._timeout_s - time.perf_counter()
        if left_s <= 0:
            self._fail(TimeoutError())
        else:
            self._watch = self._loop.call_later(left_s, self._look)

    def _fail(self, error: Exception) -> None:
        if not self.done.done():
            self.done.set_exception(error)
