"""Log-probabilities as OpenAI's two endpoints have them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from piecegraph.llm.run.results import TokenLogprob


class TokenTexts:
    """The text of tokens one by one, special ones included."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __call__(self, token: int) -> str:
        return str(self._tokenizer.decode([token])) if self._tokenizer is not None else f"token_id:{token}"

    def of_all(self, tokens: Sequence[int]) -> str:
        """Of all of them together: a character may have several."""
        if self._tokenizer is None:
            return "".join(map(self, tokens))
        return str(self._tokenizer.decode(list(tokens)))

    def for_chat(self, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        """As ``/v1/chat/completions`` has them."""
        content = []
        for entry in entries:
            top = [self._one(token, logprob) for token, logprob in entry.top]
            content.append({**self._one(entry.token_id, entry.logprob), "top_logprobs": top})
        return {"content": content, "refusal": None}

    def _one(self, token: int, logprob: float) -> dict[str, Any]:
        text = self(token)
        # A token may be a part of a character: then its bytes are not known.
        return {"token": text, "logprob": logprob, "bytes": None if "\ufffd" in text else list(text.encode())}

    def for_completions(
        self, tokens: Sequence[int], entries: Sequence[TokenLogprob | None], offset: int
    ) -> tuple[dict[str, Any], int]:
        """As ``/v1/completions`` has them, and where the text of the next token begins.

        Args:
            tokens: of the text.
            entries: one for each of them; None for the first of a prompt.
            offset: where the text of the first of them begins.
        """
        texts = [self(token) for token in tokens]
        offsets = []
        for text in texts:
            offsets.append(offset)
            offset += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [None if entry is None else entry.logprob for entry in entries],
            "top_logprobs": [
                # Parts of characters all have the same text: the most likely, which comes first, has its name.
                None if entry is None else {self(token): logprob for token, logprob in reversed(entry.top)}
                for entry in entries
            ],
            "text_offset": offsets,
        }, offset
