"""From tokens to text, piece by piece, and where it ends.

Note [Safe text]
~~~~~~~~~~~~~~~~
Text is shown only once nothing that follows can change it. Three things can: a character whose bytes are spread over
several tokens, of which the tokenizer makes U+FFFD until the last has come (Note [Broken characters]); clean-up (Note
[Clean-up of a growing text]); and a stop text that has begun and may yet be completed, in which case it is not part of
the answer. All are held back.

An answer is what follows the prompt's text. A character that the prompt has begun and the answer completes is the
answer's; if it never is completed, its bytes are U+FFFD in the prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from piecegraph.llm.run.detokenizer import CleanedText

_UNFINISHED = "\ufffd"
_MOST_UNFINISHED = 3
"""So many bytes a character can lack its last one for, each shown as U+FFFD; those before are what the model meant."""
_NUM_NEAR = 32
"""Tokens that are enough to see some whole characters, if only such as are U+FFFD."""


class IncrementalText:
    """The text of a growing list of tokens.

    Args:
        decode: the text of a list of tokens, without the special ones.
        stop: texts at which the answer ends.
        prompt: the last tokens of the prompt, for tokenizers to which the first word of a text is special.
        min_tokens: a stop text counts only if it is completed behind so many tokens.
        includes_stop: whether the stop text is part of the answer.
        clean: what becomes of the text besides, as a whole.

    >>> words = ["one ", "two S", "TOP three"]
    >>> text = IncrementalText(lambda tokens: "".join(words[token] for token in tokens), stop=["STOP"])
    >>> text.add([0]), text.add([1]), text.add([2]), text.is_stopped
    ('one ', 'two ', '', True)
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        stop: Sequence[str] = (),
        prompt: Sequence[int] = (),
        *,
        min_tokens: int = 0,
        includes_stop: bool = False,
        clean: Callable[[str], str] | None = None,
    ) -> None:
        self._decode = decode
        self._cleaned = None if clean is None else CleanedText(clean)
        self._stop = tuple(stop)
        self._tokens = list(prompt)
        self._searched_from = len(self._tokens) + min_tokens
        self._includes_stop = includes_stop
        self._first = 0
        """Decoding begins here: some tokens before the new ones, because a token's text depends on its neighbours."""
        self._read = len(self._tokens)
        """Tokens whose text has been taken as a whole."""
        self._num_taken = 0
        """Characters taken from the text of later tokens, the last of which is unfinished."""
        self._held = ""
        """Text that may be the beginning of a stop text."""
        self.text = ""
        """All that was safe so far."""
        self.stopped_at: str | None = None
        """The stop text that was found; what follows it is dropped."""

    @property
    def is_stopped(self) -> bool:
        return self.stopped_at is not None

    def add(self, tokens: Sequence[int]) -> str:
        """Take new tokens; returns the text that became safe."""
        if self.is_stopped:
            return ""
        self._tokens.extend(tokens)
        return self._release(self._new_text(is_last=False), is_last=False)

    def finish(self) -> str:
        """Nothing follows: returns what was held back."""
        if self.is_stopped:
            return ""
        return self._release(self._new_text(is_last=True), is_last=True)

    def _new_text(self, *, is_last: bool) -> str:
        new = self._new_decoded(is_last=is_last)
        return new if self._cleaned is None else self._cleaned.add(new, is_last=is_last)

    def _new_decoded(self, *, is_last: bool) -> str:
        if self._read == len(self._tokens):
            return ""
        before = self._decode(self._tokens[self._first : self._read])
        text = self._decode(self._tokens[self._first :])
        start = num_common(before, text) + self._num_taken
        num_unfinished = min(len(text) - len(text.rstrip(_UNFINISHED)), _MOST_UNFINISHED)
        if num_unfinished == 0 or is_last:
            if len(text) > start:  # a special token has no text, and what follows must not lose its neighbour
                self._first = self._read
            self._read, self._num_taken = len(self._tokens), 0
            return text[start:]
        end = max(start, len(text) - num_unfinished)
        self._num_taken += end - start
        if len(self._tokens) - self._read > 2 * _NUM_NEAR:
            self._move_on(len(text) - end)
        return text[start:end]

    def _move_on(self, num_open: int) -> None:
        """Decode fewer tokens from here on. Of bytes that are no text the last are never finished, and to decode all
        of them with every new one would take longer and longer.

        Args:
            num_open: characters at the end that were not taken.
        """
        read = len(self._tokens) - _NUM_NEAR
        first = read - _NUM_NEAR
        before, text = self._decode(self._tokens[first:read]), self._decode(self._tokens[first:])
        num_taken = len(text) - num_open - num_common(before, text)
        if num_taken > _MOST_UNFINISHED:  # otherwise most have no text, and what is open may begin before them
            self._first, self._read, self._num_taken = first, read, num_taken

    def _release(self, new: str, *, is_last: bool) -> str:
        if not self._stop:  # as most are, and there is a call a token
            self.text += new
            return new
        text = self._held + new
        found = self._first_stop(text) if len(self._tokens) > self._searched_from else None
        if found is not None:
            end, self.stopped_at = found
            safe, self._held = text[: end + len(self.stopped_at) * self._includes_stop], ""
        else:
            num_held = 0 if is_last else _longest_beginning(text, self._stop)
            safe, self._held = text[: len(text) - num_held], text[len(text) - num_held :]
        self.text += safe
        return safe

    def _first_stop(self, text: str) -> tuple[int, str] | None:
        """Where the first stop text begins, and which it is."""
        found = [(position, stop) for stop in self._stop if (position := text.find(stop)) >= 0]
        return min(found, key=lambda each: each[0], default=None)


def num_common(before: str, text: str) -> int:
    """How many characters of a text still are as they were before: of a prompt, the last may not have been whole."""
    if text.startswith(before):
        return len(before)
    pairs = enumerate(zip(before, text, strict=False))
    return next((number for number, (one, other) in pairs if one != other), len(text))


def _longest_beginning(text: str, stop: Sequence[str]) -> int:
    """How many characters at the end of the text may be the beginning of a stop text.

    >>> _longest_beginning("wait: S", ["STOP", "END"])
    1
    """
    longest = min(max(map(len, stop), default=1) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if any(s.startswith(text[-n:]) for s in stop if len(s) > n)), 0)
