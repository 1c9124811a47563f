"""Whether a request ends with its newest token, and why: at a token, a text, the end of a form, or its length."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from piecegraph.errors import RequestError
from piecegraph.llm.run.request import FinishReason, Request
from piecegraph.llm.run.sampling import NO_TOKEN
from piecegraph.llm.run.step import Work
from piecegraph.llm.run.stop import IncrementalText
from piecegraph.llm.run.structured import take_tokens


class Ending(NamedTuple):
    """Why a request ends."""

    reason: FinishReason
    error: RequestError | None = None


class Endings:
    """What ends requests.

    Args:
        text_of: what reads the text of a request with stop texts, token by token; raises if that cannot be done. None:
            somebody else looks for them.
    """

    def __init__(self, text_of: Callable[[Request], IncrementalText] | None) -> None:
        self._text_of = text_of
        self._texts: dict[str, IncrementalText] = {}
        """Of requests that end at a stop text."""
        self._guided: set[str] = set()
        """Requests whose answer has a form, and ends when that is complete."""
        self.watched: set[str] = set()
        """All of these: others end at a token of theirs or at their length."""

    def watch(self, request: Request) -> None:
        """Begin with a request. Raises a ModelError if it has stop texts, and there is no tokenizer."""
        if request.params.stop and self._text_of is not None:
            self._texts[request.id] = self._text_of(request)
            self.watched.add(request.id)
        if request.guide is not None:
            self._guided.add(request.id)
            self.watched.add(request.id)

    def forget(self, request: Request) -> None:
        """It has ended."""
        self._texts.pop(request.id, None)
        self._guided.discard(request.id)
        self.watched.discard(request.id)

    def take_in_forms(self, works: Sequence[Work], tokens: Sequence[int], vocab_size: int) -> None:
        """Go on in the forms of answers by their newest tokens, in all of them at once."""
        if not self._guided:
            return
        take_tokens(
            [
                (request.guide, token)
                for (request, _, _, samples), token in zip(works, tokens, strict=True)
                if samples and request.guide is not None and request.blocks is not None and 0 <= token < vocab_size
            ]
        )

    def ending_of(self, request: Request, token: int, eos_token_ids: Collection[int]) -> Ending | None:
        """Why a request ends with the token that it was just given; None if it goes on.

        Args:
            request: one that has the token already.
            token: the newest.
            eos_token_ids: those that end answers of the model.
        """
        if request.id in self._guided:
            assert request.guide is not None
            if request.guide.error is not None:
                return Ending("error", request.guide.error)
            if request.guide.is_complete:
                return Ending("stop")
        if token in request.stop_ids or (request.id in self._texts and self._is_stopped(request)):
            if request.stop_reason is None and (token not in eos_token_ids or request.params.ignore_eos):
                request.stop_reason = token  # it was asked for, and is none of the model's own
            return Ending("stop")
        return Ending("length") if len(request.tokens) >= request.max_len else None

    def _is_stopped(self, request: Request) -> bool:
        """Whether the newest token completes a stop text, or may do so with what is held back at the end."""
        text = self._texts[request.id]
        text.add(request.tokens[-1:])
        if len(request.tokens) >= request.max_len:
            text.finish()
        request.stop_reason = text.stopped_at
        return text.is_stopped


def bad_token(request: Request, token: int) -> RequestError:
    """Why there is no token, or none of the vocabulary."""
    limits = request.params.token_limits
    if token == NO_TOKEN and limits:
        what, why = f"no token may follow in the answer of request {request.id!r}", f"{' and '.join(limits)} forbid all"
        return RequestError("PG660", what, why=why, hint="ask for less")
    if token < 0:
        return RequestError(
            "PG655",
            f"the logits of request {request.id!r} are not numbers",
            why="the model gave NaN or infinity",
            hint="check the weights, or use another dtype",
        )
    return RequestError(
        "PG653",
        f"request {request.id!r} was given token {token}",
        why="the vocabulary has none of that number",
        hint="choose from the logits of the step",
    )
