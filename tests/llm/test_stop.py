"""Text piece by piece: nothing is shown that may still change, and nothing is lost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from piecegraph.llm.run.stop import IncrementalText


def decode_bytes(tokens: list[int]) -> str:
    """A tokenizer whose tokens are single bytes, the hardest case for characters."""
    return bytes(tokens).decode("utf-8", errors="replace")


def test_a_character_is_shown_when_its_last_byte_has_come() -> None:
    text = IncrementalText(decode_bytes)
    shown = [text.add([byte]) for byte in "aé😀!".encode()]
    assert shown == ["a", "", "é", "", "", "", "😀", "!"]
    assert text.text == "aé😀!"


def test_a_character_that_never_ends_is_told_at_the_end() -> None:
    text = IncrementalText(decode_bytes)
    assert text.add([0xF0, 0x9F]) == ""
    assert text.finish() == "\ufffd"


def test_bytes_that_are_no_text_do_not_hold_back_for_ever() -> None:
    text = IncrementalText(decode_bytes)
    assert "".join(text.add([0x80]) for _ in range(40)) != ""


@given(st.lists(st.sampled_from([0x80, 0xF0, 0x9F, 0x98, 0x61, 0xE2, 0x82, 0xAC]), max_size=24))
def test_broken_bytes_are_shown_as_they_are_told_at_once(tokens: list[int]) -> None:
    text = IncrementalText(decode_bytes)
    shown = "".join(text.add([token]) for token in tokens)
    assert shown + text.finish() == decode_bytes(tokens)


def test_a_first_word_keeps_its_space() -> None:
    """Sentencepiece drops the space before the first word it decodes; behind a prompt it is no first word."""

    def decode(tokens: list[int]) -> str:
        return " ".join(["", "alpha", "beta", "gamma"][token] for token in tokens)

    text = IncrementalText(decode, prompt=[1])
    assert text.add([2]) + text.add([3]) == " beta gamma"


@pytest.mark.parametrize(
    ("pieces", "stop", "expected"),
    [
        (["one ", "STOP", " two"], ["STOP"], "one "),
        (["one S", "T", "OP two"], ["STOP"], "one "),
        (["one ST", "AND"], ["STOP"], "one STAND"),
        (["aab"], ["ab", "aab"], ""),
        (["a", "a", "b"], ["ab"], "a"),
        (["xST", "ST", "OP"], ["STOP"], "xST"),
        (["no end"], ["end", "no"], ""),
        (["ST"], ["STOP"], "ST"),
    ],
)
def test_the_answer_ends_before_the_first_stop_text(pieces: list[str], stop: list[str], expected: str) -> None:
    text = IncrementalText(lambda tokens: "".join(pieces[token] for token in tokens), stop)
    shown = "".join(text.add([token]) for token in range(len(pieces))) + text.finish()
    assert shown == text.text == expected


@given(
    st.text(alphabet="abé😀", max_size=30),
    st.lists(st.text(alphabet="abé", min_size=1, max_size=4), max_size=3),
    st.data(),
)
def test_any_split_of_any_text_gives_the_same_answer(whole: str, stop: list[str], data: st.DataObject) -> None:
    tokens = list(whole.encode())
    text = IncrementalText(decode_bytes, stop)
    shown = ""
    while tokens and not text.is_stopped:
        count = data.draw(st.integers(1, 5))
        shown += text.add(tokens[:count])
        del tokens[:count]
        assert whole.startswith(shown)
    shown += text.finish()
    end = min((position for each in stop if (position := whole.find(each)) >= 0), default=len(whole))
    if text.is_stopped:
        assert shown == whole[: len(shown)]
        assert any(whole.startswith(each, len(shown)) for each in stop)
    else:
        assert shown == whole
    # Several stop texts may begin before the first is complete; the one that is complete first may begin later.
    assert len(shown) >= end
    assert text.is_stopped == (end < len(whole) or any(each in whole for each in stop))


def test_a_word_behind_a_token_without_text_keeps_its_space() -> None:
    words = {1: "one", 2: "two"}
    text = IncrementalText(lambda tokens: " ".join(words[token] for token in tokens if token in words))
    assert "".join([*(text.add([token]) for token in (1, 9, 2, 9, 9, 1)), text.finish()]) == "one two one"
