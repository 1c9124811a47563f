"""Text of tokens by many kinds of tokenizers: the same in pieces of any size, and nothing of it is lost."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import pytest
import tokenizers
import transformers as hf
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from piecegraph.errors import RequestError
from piecegraph.llm.run.detokenizer import CleanedText, Detokenizer
from piecegraph.llm.run.generation import text_behind
from piecegraph.llm.run.sampling_params import SamplingParams
from piecegraph.llm.run.stop import IncrementalText
from tests.cases.byte_llm import byte_tokenizer
from tests.cases.checkpoints import make_tokenizer

MARKS = ["<s>", "</s>", "<unk>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
SPACED = ["▁", "▁▁", "▁a", "b", "▁.", "'", "s", "\ufffd"]
WORDS = ["a", "n", "t", "s", "ve", ".", ",", "'", "'s", "n't", "##a", "##.", "##'s"]


def wrapped(raw: tokenizers.Tokenizer, decoder: Any = None, **settings: Any) -> Any:
    if decoder is not None:
        raw.decoder = decoder
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=raw, bos_token="<s>", eos_token="</s>", unk_token="<unk>", **settings
    )


def of_pieces(words: Sequence[str], *steps: Any, **settings: Any) -> Any:
    vocabulary = {word: number for number, word in enumerate([*MARKS, *words])}
    raw = tokenizers.Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback="<0x00>" in words))
    return wrapped(raw, decoders.Sequence(list(steps)), **settings)


def of_words(model: Any, decoder: Any = None, **settings: Any) -> Any:
    vocabulary = {word: number for number, word in enumerate([*MARKS, *WORDS])}
    return wrapped(tokenizers.Tokenizer(model(vocabulary, unk_token="<unk>")), decoder, **settings)


LIKE_LLAMA_2 = (decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0))
MAKERS: dict[str, Callable[[], Any]] = {
    "byte-level": byte_tokenizer,
    "byte-fallback": lambda: of_pieces(SPACED + BYTES, *LIKE_LLAMA_2),
    "byte-fallback-metaspace": lambda: of_pieces(SPACED + BYTES, decoders.ByteFallback(), decoders.Metaspace()),
    "metaspace": lambda: of_pieces(SPACED, decoders.Metaspace()),
    "metaspace-never": lambda: of_pieces(SPACED, decoders.Metaspace(prepend_scheme="never")),
    "suffix": lambda: of_pieces(["a", "b</w>", ".</w>"], decoders.BPEDecoder()),
    "word-piece": lambda: of_words(models.WordPiece, decoders.WordPiece(cleanup=False)),
    "word-piece-clean": lambda: of_words(models.WordPiece, decoders.WordPiece(cleanup=True)),
    "words": lambda: of_words(models.WordLevel),
    "words-clean": lambda: of_words(models.WordLevel, clean_up_tokenization_spaces=True),
    "pieces-unclean": lambda: of_pieces(SPACED, *LIKE_LLAMA_2, clean_up_tokenization_spaces=True),
}
KINDS = [kind for kind in MAKERS if kind.startswith("byte")]


@functools.cache
def tokenizer_of(kind: str) -> Any:
    return MAKERS[kind]()


@functools.cache
def tokens_of_byte(kind: str) -> list[int]:
    if kind == "byte-level":
        return [tokenizer_of(kind).convert_tokens_to_ids(character) for character in byte_characters()]
    return list(tokenizer_of(kind).convert_tokens_to_ids(BYTES))


def byte_characters() -> list[str]:
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    names = bytes_to_unicode()
    return [names[byte] for byte in range(256)]


def said(kind: str, text: str) -> list[int]:
    return [tokens_of_byte(kind)[byte] for byte in text.encode()]


def read(kind: str, prompt: Sequence[int], tokens: Sequence[int], size: int, **params: Any) -> tuple[str, list[str]]:
    """All of the text, and the pieces in which it was told."""
    params = SamplingParams(**params)
    detokenizer = Detokenizer(tokenizer_of(kind), skip_special_tokens=params.skip_special_tokens)
    text = text_behind(prompt, params, detokenizer)
    told = [text.add(tokens[first : first + size]) for first in range(0, len(tokens), size)]
    told.append(text.finish())
    return text.text, told


@st.composite
def sequences(draw: st.DrawFn) -> tuple[str, list[int], list[int]]:
    """A tokenizer, a prompt and an answer: tokens of any kind, and characters of several, whole or not."""
    kind = draw(st.sampled_from(list(MAKERS)))
    parts = st.integers(0, len(tokenizer_of(kind)) - 1).map(lambda token: [token])
    if kind in KINDS:
        texts = st.text("é€日😀a", min_size=1, max_size=3)
        cuts = st.tuples(texts, st.integers(0, 3))
        parts |= cuts.map(lambda cut: (found := said(kind, cut[0]))[: max(1, len(found) - cut[1])])
    listed = st.lists(parts, max_size=6).map(lambda found: [token for part in found for token in part])
    return kind, draw(listed), draw(listed)


@settings(max_examples=400, deadline=None)
@given(sequences(), st.integers(1, 4), st.booleans())
def test_a_text_is_the_same_in_pieces(found: tuple[str, list[int], list[int]], size: int, skips: bool) -> None:
    kind, prompt, tokens = found
    whole, _ = read(kind, prompt, tokens, max(1, len(tokens)), skip_special_tokens=skips)
    again, told = read(kind, prompt, tokens, size, skip_special_tokens=skips)
    assert again == whole == "".join(told)
    tokenizer = tokenizer_of(kind)
    before, behind = (tokenizer.decode(each, skip_special_tokens=skips) for each in (prompt, prompt + tokens))
    if "clean" not in kind and "\ufffd" not in before + behind:
        assert before + whole == behind


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stop", [(), ("日x",), ("€日",)])
def test_characters_are_told_as_they_come(kind: str, stop: tuple[str, ...]) -> None:
    text = "é😀é€日b"
    expected = text.partition("€日")[0] if stop == ("€日",) else text
    whole, told = read(kind, said(kind, "日"), said(kind, text), 1, stop=stop)
    assert whole == "".join(told) == expected
    assert told[1] == "é"
    assert told[5] == "😀"


@pytest.mark.parametrize("kind", KINDS)
def test_a_broken_character_takes_no_other_with_it(kind: str) -> None:
    for size in (1, 99):
        whole, _ = read(kind, said(kind, "日"), said(kind, "é😀日")[:-1] + said(kind, "€")[:2], size)
        assert whole.startswith("é😀\ufffd")
        assert whole.rstrip("\ufffd") == "é😀"
    detokenizer = Detokenizer(tokenizer_of(kind))
    assert detokenizer.whole([*said(kind, "é"), *said(kind, "日")[:1], *said(kind, "€")]) == "é\ufffd€"
    mark = tokenizer_of(kind).bos_token_id
    assert detokenizer.whole([said(kind, "€")[0], mark, *said(kind, "€")[1:], said(kind, "€")[0]]) == "€\ufffd"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 99])
def test_a_character_that_the_answer_completes_is_its_own(kind: str, size: int) -> None:
    for begun in (1, 2, 3):
        tokens = said(kind, "a日😀é!")
        prompt, answer = tokens[: 4 + begun], tokens[4 + begun :]
        assert read(kind, prompt, answer, size)[0] == "😀é!"
        assert read(kind, prompt, said(kind, "é!"), size)[0] == "é!", "it stays broken, in the prompt"


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("num_special", [1, 8, 100])
def test_special_tokens_keep_no_word_from_its_neighbour(kind: str, num_special: int) -> None:
    """A space before the first word depends on what is before it, however many hidden tokens are between them."""
    tokenizer = tokenizer_of(kind)
    words, marks = [len(MARKS) + 2, len(MARKS) + 3], [tokenizer.bos_token_id, tokenizer.eos_token_id] * num_special
    expected = tokenizer.decode(words * 2, skip_special_tokens=True)
    before = tokenizer.decode(words, skip_special_tokens=True)
    assert before + read(kind, words + marks, words, 1)[0] == expected
    assert read(kind, marks, words, 1)[0] == before, "there is none before it"


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_bytes_that_are_no_text_are_not_decoded_again_and_again(kind: str, data: st.DataObject) -> None:
    broken = st.sampled_from([b"\x80", b"\xf0", b"\xf0\x9f\x98", b"\xe2\x82", "€".encode(), b""])
    parts = data.draw(st.lists(broken, min_size=100, max_size=200))
    mark = tokenizer_of(kind).bos_token_id
    tokens = [token for part in parts for token in ([tokens_of_byte(kind)[byte] for byte in part] or [mark])]
    detokenizer = Detokenizer(tokenizer_of(kind))
    longest = 0

    def decode(ids: list[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return detokenizer(ids)

    text = IncrementalText(decode, prompt=tokens[:1])
    told = [text.add([token]) for token in tokens[1:]]
    assert longest < 150
    assert "".join(told) + text.finish() == read(kind, tokens[:1], tokens[1:], 9999)[0]


def test_what_clean_up_takes_out_is_never_told() -> None:
    clean = tokenizer_of("words-clean").clean_up_tokenization
    for length in range(1, 7):
        for characters in product(" 'ntve.x", repeat=length):
            whole = "".join(characters)
            text = CleanedText(clean)
            told = "".join(text.add(character, is_last=False) for character in whole) + text.add("", is_last=True)
            assert told == clean(whole)


@pytest.mark.parametrize("kind", MAKERS)
def test_texts_are_those_that_transformers_makes(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    for first in range(len(tokenizer)):
        tokens = [first, 1, (first * 7) % len(tokenizer), 2]
        expected = tokenizer.decode(tokens, skip_special_tokens=True)
        if "\ufffd" not in expected:
            assert Detokenizer(tokenizer).whole(tokens) == expected


def test_tokens_that_are_no_text() -> None:
    with pytest.raises(RequestError, match="PG650 the tokenizer makes no text of the answer: OverflowError"):
        Detokenizer(make_tokenizer())([2**70])
