"""Log-probabilities as OpenAI's two endpoints have them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from piecegraph.llm.run.detokenizer import Detokenizer
from piecegraph.llm.run.results import TokenLogprob
from piecegraph.llm.run.stop import IncrementalText, num_common


class TokenTexts:
    """The text of tokens one by one, special ones included: joined, they are the text of all of them.

    Args:
        tokenizer: None if there is none; then a token's name takes the place of its text.
        skip_special_tokens: whether the text of an answer is without them; then they are nobody's neighbours.
    """

    def __init__(self, tokenizer: Any, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = None if tokenizer is None else Detokenizer(tokenizer, skip_special_tokens=False)
        self._hidden = Detokenizer(tokenizer).hidden if tokenizer is not None and skip_special_tokens else frozenset()

    def __call__(self, token: int, before: int | None = None) -> str:
        """What a token adds to a text.

        Args:
            token: which.
            before: the token before it; None if it is the first of a text. A space between them may be of either.
        """
        alone = self.of_all([token])
        if before is None or token in self._hidden or "\ufffd" in alone:  # two parts of characters may be one
            return alone
        return self.of_all([before, token])[len(self.of_all([before])) :]

    def of_all(self, tokens: Sequence[int]) -> str:
        """Of all of them together: a character may have several."""
        if self._detokenizer is None:
            return "".join(f"token_id:{token}" for token in tokens)
        return self._detokenizer.whole(tokens)

    def last_of(self, tokens: Sequence[int], before: int | None = None) -> int | None:
        """The token that the next one is behind.

        Args:
            tokens: those so far.
            before: the one that they are behind.
        """
        return next((token for token in reversed(tokens) if token not in self._hidden), before)

    def of_prompt(self, tokens: Sequence[int], answer: Sequence[int]) -> str:
        """Of a prompt, without a character that it begins and the answer completes."""
        text = self.of_all(tokens)
        return text if not text.endswith("\ufffd") else text[: num_common(text, self.of_all([*tokens, *answer]))]

    def _each_behind(self, tokens: Sequence[int], before: int | None) -> list[int | None]:
        found = []
        for token in tokens:
            found.append(before)
            before = self.last_of([token], before)
        return found

    def for_chat(self, entries: Sequence[TokenLogprob], before: int | None) -> dict[str, Any]:
        """As ``/v1/chat/completions`` has them.

        Args:
            entries: one for each token.
            before: the token that the first of them is behind.
        """
        content = []
        behind = self._each_behind([entry.token_id for entry in entries], before)
        for entry, before in zip(entries, behind, strict=True):
            top = [self._one(token, logprob, before) for token, logprob in entry.top]
            content.append({**self._one(entry.token_id, entry.logprob, before), "top_logprobs": top})
        return {"content": content, "refusal": None}

    def _one(self, token: int, logprob: float, before: int | None) -> dict[str, Any]:
        text = self(token, before)
        # A token may be a part of a character: then its bytes are not known.
        return {"token": text, "logprob": logprob, "bytes": None if "\ufffd" in text else list(text.encode())}

    def for_completions(
        self,
        tokens: Sequence[int],
        entries: Sequence[TokenLogprob | None],
        offsets: Sequence[int],
        before: int | None,
    ) -> dict[str, Any]:
        """As ``/v1/completions`` has them.

        Args:
            tokens: of the text.
            entries: one for each of them; None for the first of a prompt.
            offsets: where each of them begins in the text.
            before: the token that the first of them is behind.
        """
        behind = self._each_behind(tokens, before)
        return {
            "tokens": [self(token, before) for token, before in zip(tokens, behind, strict=True)],
            "token_logprobs": [None if entry is None else entry.logprob for entry in entries],
            "top_logprobs": [
                # Parts of characters all have the same text: the most likely, which comes first, has its name.
                None if entry is None else {self(token, before): logprob for token, logprob in reversed(entry.top)}
                for entry, before in zip(entries, behind, strict=True)
            ],
            "text_offset": list(offsets),
        }

    def offsets_in_prompt(self, prompt: str | list[int], tokens: list[int]) -> list[int]:
        """Where the tokens of a prompt begin in its text, which is what was given, or what was made of tokens.

        Args:
            prompt: as it was given.
            tokens: of it, also such as the tokenizer adds.
        """
        if not isinstance(prompt, str):
            return TextOffsets(IncrementalText(self.of_all), self).of(tokens)
        if not getattr(self._tokenizer, "is_fast", False):  # it does not say; what it makes of them is most like it
            decode = Detokenizer(self._tokenizer)
            return [min(offset, len(prompt)) for offset in TextOffsets(IncrementalText(decode), self).of(tokens)]
        spans = self._tokenizer(prompt, return_offsets_mapping=True)["offset_mapping"]
        found, end = [], 0
        for first, last in spans:
            # What is between two tokens is the second's. A token that was added has no span; it is where it stands.
            found.append(end if first == last else min(first, end))
            end = max(end, last)
        return found


class TextOffsets:
    """Where tokens begin in a text that grows: of one that is a part of a character, where that begins.

    Args:
        text: what makes text of the tokens. It holds back characters of which a part is missing.
        texts: those of the tokens one by one.
        begin: how long the text before is.
        before: the token that the first of them is behind.
    """

    def __init__(self, text: IncrementalText, texts: TokenTexts, begin: int = 0, before: int | None = None) -> None:
        self._text, self._texts, self._begin = text, texts, begin
        self.before = before
        """The token that the next one is behind."""

    def of(self, tokens: Sequence[int]) -> list[int]:
        """Of tokens that come behind those before."""
        return [self._begin + self._next(token) for token in tokens]

    def _next(self, token: int) -> int:
        begin = len(self._text.text)
        new, own = self._text.add([token]), self._texts(token, self.before)
        self.before = self._texts.last_of([token], self.before)
        # What was held back, and is not completed by this token, is before it.
        return begin + len(new) - len(own) if len(new) > len(own) and new.endswith(own) else begin
