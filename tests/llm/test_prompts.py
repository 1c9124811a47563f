"""Conversations by the template of a tokenizer: nothing that is given for it is left out without a word."""

from __future__ import annotations

from typing import Any

import pytest

from piecegraph.errors import ConfigError, ModelError
from piecegraph.llm.run.prompts import chat_tokens, conversations_of
from tests.cases.checkpoints import make_tokenizer

MESSAGES = [{"role": "user", "content": "to be"}]
TEMPLATE = (
    "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}{% if is_loud is defined %}!{% endif %}"
    "{% for message in messages %}{{ message.content }}{% endfor %}{% if add_generation_prompt %}:{% endif %}"
)


def look_up(word: str) -> str:
    """Look something up.

    Args:
        word: what.
    """
    return word


def written(**values: Any) -> str:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tools = values.pop("tools", None)
    return str(tokenizer.decode(chat_tokens(tokenizer, MESSAGES, tools, values)))


def test_what_the_template_is_given() -> None:
    assert written() == "to be:"
    assert written(tools=[look_up]) == "[look_up]to be:"
    assert written(is_loud=True) == "!to be:"
    assert written(continue_final_message=True) == written(add_generation_prompt=False) == "to be"
    assert written(chat_template="{{ messages[0].role }}") == "user"


def test_what_the_template_does_not_read_is_refused() -> None:
    with pytest.raises(ConfigError, match="PG101 unknown argument 'temprature': .* does not read it"):
        written(temprature=1)
    with pytest.raises(ModelError, match="PG667 .* leaves out what is said at tools"):
        written(tools=[look_up], chat_template="the word tools {{ messages }}")


def test_a_tokenizer_without_a_template_may_be_given_one() -> None:
    with pytest.raises(ModelError, match="PG667 .*: the tokenizer has none"):
        chat_tokens(make_tokenizer(), MESSAGES, None, {})
    assert chat_tokens(make_tokenizer(), MESSAGES, None, {"chat_template": "a"}) == make_tokenizer()("a")["input_ids"]


def test_one_conversation_or_several() -> None:
    assert conversations_of("to be") == ["to be"]
    assert conversations_of(MESSAGES) == [MESSAGES]
    assert conversations_of((MESSAGES, MESSAGES)) == [MESSAGES, MESSAGES]
