"""From tokens to text, by a model's tokenizer.

Note [Broken characters]
~~~~~~~~~~~~~~~~~~~~~~~~
A token of byte fallback (``<0xE2>``) is one byte of a character that has no token. Of a row of such tokens, Hugging
Face's tokenizers make U+FFFD for every byte if one character of the row is not whole: an answer that is cut within its
last character would lose all before, and what a stream has shown would be taken back with every new character. So, as
SentencePiece itself does, a byte that belongs to no character becomes U+FFFD alone: in its place the tokenizer is given
the bytes of that character.

Note [Clean-up of a growing text]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Some tokenizers have transformers take spaces out of a text: of `` .`` and `` 's``. That changes text behind which more
has come, so it is done here, to the answer's own text, and an end that it may yet change is held back until it cannot.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from piecegraph.errors import RequestError

_BROKEN = "\ufffd"
_LONE_BYTES = re.compile("[\udc80-\udcff]")
"""How Python writes bytes that belong to no character."""
_OPEN_END = re.compile(r"(?: [ ']*(?:n[ ']*)?[vr]?)?\Z")
"""What clean-up may yet change, of a space and what it changes behind one: ``.?!,``, ``'``, ``n't``, ``'m``, ``'s``,
``'ve``, ``'re``.
"""

_tokens_of_bytes: WeakKeyDictionary[Any, list[int]] = WeakKeyDictionary()
"""Of tokenizers: to look for them takes a millisecond, and there is a detokenizer for each request."""
_special_tokens: WeakKeyDictionary[Any, frozenset[int]] = WeakKeyDictionary()
"""The same, of those that mark parts of a text."""


class Detokenizer:
    """Makes text of tokens. What the tokenizer raises is an error of their request alone.

    Args:
        tokenizer: of the model.
        skip_special_tokens: whether tokens that mark parts of a text are left out of it.
    """

    def __init__(self, tokenizer: Any, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer, self._skips = tokenizer, skip_special_tokens
        self.clean: Callable[[str], str] | None = tokenizer.clean_up_tokenization if _cleans_up(tokenizer) else None
        """What becomes of the text besides."""
        self._decode = _backend_of(tokenizer).decode
        if self.clean is not None:
            self._decode = functools.partial(tokenizer.decode, clean_up_tokenization_spaces=False)

    def __call__(self, tokens: list[int]) -> str:
        """The text of tokens, before clean-up."""
        try:
            text = self._text_of(tokens)
            return self._text_of(self._mended(tokens)) if _BROKEN in text and self._bytes else text
        except Exception as error:
            what, why = "the tokenizer makes no text of the answer", f"{type(error).__name__}: {error}"
            raise RequestError("PG650", what, why=why) from error

    def whole(self, tokens: Sequence[int]) -> str:
        """The text of tokens that are all there are."""
        text = self(list(tokens))
        return text if self.clean is None else self.clean(text)

    def _text_of(self, tokens: list[int]) -> str:
        return str(self._decode(tokens, skip_special_tokens=self._skips))

    def _mended(self, tokens: list[int]) -> list[int]:
        """Tokens with the same text but for broken characters. See Note [Broken characters]."""
        found: list[int] = []
        hidden = self.hidden
        shown = [token for token in tokens if token not in hidden]
        for is_byte, row in itertools.groupby(shown, key=self._bytes.__contains__):
            if is_byte:
                text = bytes(map(self._bytes.__getitem__, row)).decode(errors="surrogateescape")
                found += [self._token_of_byte[byte] for byte in _LONE_BYTES.sub(_BROKEN, text).encode()]
            else:
                found += row
        return found

    @functools.cached_property
    def _token_of_byte(self) -> list[int]:
        """Of all 256; empty if the tokenizer has none, or does not make characters of them."""
        found = _tokens_of_bytes.get(self._tokenizer)
        if found is None:
            found = _tokens_of_bytes[self._tokenizer] = self._find_bytes()
        return found

    def _find_bytes(self) -> list[int]:
        names = [f"<0x{byte:02X}>" for byte in range(256)]
        found = self._tokenizer.convert_tokens_to_ids(names)
        if None in found or self._tokenizer.convert_ids_to_tokens(found) != names:
            return []
        return list(found) if self._text_of([found[byte] for byte in "é".encode()]) == "é" else []

    @functools.cached_property
    def _bytes(self) -> dict[int, int]:
        return {token: byte for byte, token in enumerate(self._token_of_byte)}

    @property
    def hidden(self) -> frozenset[int]:
        """Tokens that are left out: what stands before them and behind are neighbours, or even one character."""
        if not self._skips:
            return frozenset()
        found = _special_tokens.get(self._tokenizer)
        if found is None:
            added = self._tokenizer.added_tokens_decoder.items()
            found = _special_tokens[self._tokenizer] = frozenset(number for number, token in added if token.special)
        return found


class CleanedText:
    """Clean-up of a text that grows. See Note [Clean-up of a growing text].

    Args:
        clean: what is done to all of it.

    >>> text = CleanedText(lambda text: text.replace(" .", "."))
    >>> text.add("one ", is_last=False), text.add(".", is_last=True)
    ('one', '.')
    """

    def __init__(self, clean: Callable[[str], str]) -> None:
        self._clean = clean
        self._open = ""

    def add(self, new: str, *, is_last: bool) -> str:
        """Take what follows; returns what has become certain."""
        text = self._open + new
        found = None if is_last else _OPEN_END.search(text)
        end = len(text) if found is None else found.start()
        self._open = text[end:]
        return self._clean(text[:end])


def _cleans_up(tokenizer: Any) -> bool:
    """Whether transformers does, which for tokenizers of the kind BPE takes another word."""
    if not getattr(tokenizer, "clean_up_tokenization_spaces", False):
        return False
    kind = type(getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)).__name__
    return kind != "BPE" or bool(tokenizer.clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output)


def _backend_of(tokenizer: Any) -> Any:
    """What transformers has tokens decoded by, if it does nothing else to the text but clean-up: in a third of the
    time, which counts for every token of a stream.
    """
    known = _known_decode()
    is_known = known is not None and getattr(type(tokenizer), "_decode", None) is known
    return tokenizer.backend_tokenizer if is_known else tokenizer


@functools.cache  # whoever imports from transformers waits for a search through its modules
def _known_decode() -> Any:
    from transformers import PreTrainedTokenizerFast

    return getattr(PreTrainedTokenizerFast, "_decode", None)
