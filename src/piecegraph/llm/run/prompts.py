"""The prompts of one call of ``generate``: how they are given, chats among them, and what is wrong with one of them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from piecegraph.base.coerce import as_list
from piecegraph.errors import ConfigError, ModelError, PiecegraphError, RequestError
from piecegraph.llm.run.left_out import REFUSALS, left_out
from piecegraph.llm.run.results import Completion, RequestMetrics

_OF_ENDS = frozenset({"add_generation_prompt", "continue_final_message"})
"""How a conversation ends for the model to go on,"""
_OF_EVERY_TEMPLATE = _OF_ENDS | {"chat_template"}
"""and what else transformers itself reads, whatever the template does."""

_REQUEST_ID = re.compile(r"^request '\d+'| of request '\d+'")
"""How errors name a request. The engine numbers those of ``generate``; nobody else knows the number."""


def one_for_each(prompts: Any) -> list[Any]:
    """A list of prompts, also where one was given. Tensors and arrays become lists."""
    if isinstance(prompts, str):
        return [prompts]
    given = as_list(prompts)
    if given is None:
        why = "it must be a text, a list of token ids, or a list of these"
        raise ConfigError("PG101", f"prompts is {prompts!r}", why=why)
    if set(map(type, given)) == {int}:  # most often, and each of what follows looks at token by token
        return [given]
    # Of a list the first is enough: a prompt has thousands of tokens, and what else is wrong with it is told later.
    if any(_is_message(item) or (isinstance(item, list) and item and _is_message(item[0])) for item in given):
        why = "messages with a role and a content are a conversation, not a prompt"
        raise ConfigError("PG101", "prompts holds messages", why=why, hint="llm.chat answers conversations")
    found = [item.tolist() if hasattr(item, "tolist") else item for item in given]
    return [found] if found and all(isinstance(item, int) for item in found) else found


def conversations_of(messages: Any) -> list[Any]:
    """Several conversations, also where one was given. Whether they are any is seen one by one."""
    listed = as_list(messages)
    has_several = listed and all(isinstance(each, str) or as_list(each) is not None for each in listed)
    return listed if listed and has_several else [messages]


def _is_message(given: Any) -> bool:
    return isinstance(given, Mapping) and "role" in given


def raise_first(answers: Iterable[Completion]) -> None:
    """Raise the error of the first answer that has one."""
    for answer in answers:
        if answer.error is not None:
            raise answer.error


def check_lengths(lists: Mapping[str, list[Any]], num_prompts: int) -> None:
    """Raise if a list does not have a value for each prompt."""
    for name, values in lists.items():
        if len(values) != num_prompts:
            raise ConfigError("PG108", f"{name} has {len(values)} values", why=f"there are {num_prompts} prompts")


def tokens_of(
    text: str, tokenizer: Any, *, add_special_tokens: bool = True, named: str = "the prompt"
) -> Sequence[int]:
    """The tokens of a prompt, or of another text by its name, or an error of this request alone."""
    try:
        found: Sequence[int] = tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]
    except Exception as error:  # tokenizers raise plain Exceptions, too
        raise RequestError(
            "PG653",
            f"{named} is no text that the tokenizer takes",
            why=f"{type(error).__name__}: {error}",
            hint="a text must be valid Unicode",
        ) from error
    return found


def tokens_of_word(word: str, tokenizer: Any) -> Sequence[int]:
    """The tokens of one of ``bad_words``."""
    return tokens_of(word, tokenizer, add_special_tokens=False, named="bad_words")


def name_prompt(error: PiecegraphError, index: int | None) -> PiecegraphError:
    """The same error, of a prompt and not of a request; of one of several, if it has an index."""
    if not isinstance(error, RequestError) and error.code != "PG108":
        return error  # no prompt's: the model has no tokenizer, or was closed
    what = _REQUEST_ID.sub(lambda found: "the request" if found.start() == 0 else "", error.what)
    where = error.where if index is None else f"prompts[{index}]"
    worded = type(error)(error.code, what, where=where, why=error.why, hint=error.hint)
    worded.__cause__ = error.__cause__
    return worded


def refusal_of(error: Exception) -> PiecegraphError:
    """What the only prompt of a call is refused with, whatever was raised while it was read."""
    if isinstance(error, PiecegraphError):
        return name_prompt(error, None)
    found = RequestError("PG650", "the prompt could not be read", why=f"{type(error).__name__}: {error}")
    found.__cause__ = error
    return found


def refused(prompt: Any, error: PiecegraphError) -> Completion:
    """The answer to a prompt that cannot be served."""
    given = prompt if isinstance(prompt, (list, tuple)) else ()
    tokens = [token for token in given if isinstance(token, int)]
    metrics = RequestMetrics(
        num_prompt_tokens=len(tokens),
        num_new_tokens=0,
        num_cached_tokens=0,
        num_preemptions=0,
        time_to_first_token_s=None,
        seconds_per_token=None,
        total_s=0.0,
        token_times_s=(),
        graph_coverage=0.0,
    )
    return Completion(
        prompt=prompt if isinstance(prompt, str) else None,
        prompt_token_ids=tokens,
        text=None,
        token_ids=[],
        finish_reason="error",
        stop_reason=None,
        error=error,
        logprobs=None,
        prompt_logprobs=None,
        hidden_states=None,
        metrics=metrics,
    )


def tokenizer_or_error(tokenizer: Any | None, path: str, why: str) -> Any:
    """The tokenizer of a model. Raises if it has none.

    Args:
        tokenizer: itself, if there is one.
        path: of the model.
        why: there is none.
    """
    if tokenizer is None:
        raise ModelError(
            "PG666",
            f"the model at {path} has no tokenizer",
            why=why,
            hint="give prompts as lists of token ids; piecegraph trace has --prompt-tokens",
        )
    return tokenizer


def has_chat_template(tokenizer: Any) -> bool:
    """Whether a tokenizer knows how conversations are written for its model."""
    return bool(getattr(tokenizer, "chat_template", None))


def conversation_tokens(
    tokenizer: Any, conversation: Any, tools: Sequence[Any] | None, values: Mapping[str, Any]
) -> list[int]:
    """The tokens of a conversation: of what the user says, or of messages, as for :func:`chat_tokens`."""
    said = [{"role": "user", "content": conversation}] if isinstance(conversation, str) else as_list(conversation)
    if said is None or not all(isinstance(message, Mapping) for message in said):
        why = "it must be a text, or a list of messages with a role and a content each"
        raise ConfigError("PG101", f"conversation is {conversation!r}", why=why)
    return chat_tokens(tokenizer, said, tools, values)


def chat_tokens(
    tokenizer: Any, conversation: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None, values: Mapping[str, Any]
) -> list[int]:
    """The tokens of a conversation, up to where the model's answer begins.

    Args:
        tokenizer: whose template is used.
        conversation: messages with a ``role`` and a ``content`` each.
        tools: functions that the model may ask for, as transformers takes them.
        values: what else the template is given.

    Raises:
        ModelError: PG667, there is no template, it refuses the conversation, or leaves out what is said.
        ConfigError: PG101, the template does not read one of the values.
    """
    if not has_chat_template(tokenizer) and "chat_template" not in values:
        raise _cannot_apply("the tokenizer has none")
    begins_answer = {"add_generation_prompt": not values.get("continue_final_message", False)}
    try:
        if (unread := unread_value(tokenizer, values, tools)) is not None:
            raise _unknown(unread)
        described = None if tools is None else [_described(tool) for tool in tools]
        _check_shown(tokenizer, conversation, described, values)
        tokens = tokenizer.apply_chat_template(
            list(conversation), tools=described, return_dict=False, **begins_answer | dict(values)
        )
    except PiecegraphError:
        raise
    except REFUSALS as error:
        raise _cannot_apply(f"{type(error).__name__}: {error}") from error
    return [int(token) for token in tokens]


def _described(tool: Any) -> Any:
    """A function as templates are shown it."""
    from transformers.utils import get_json_schema

    return get_json_schema(tool) if callable(tool) else tool


def _check_shown(
    tokenizer: Any, conversation: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None, values: Mapping[str, Any]
) -> None:
    """Raise if the template leaves out what was said. See Note [What a template shows]."""
    given = {name: value for name, value in values.items() if name not in _OF_ENDS}

    def write(messages: Sequence[Mapping[str, Any]], marked: Sequence[Any] | None) -> str:
        return str(
            tokenizer.apply_chat_template(
                list(messages), tools=marked, tokenize=False, add_generation_prompt=True, **given
            )
        )

    place = left_out(write, conversation, tools)
    if place is not None:
        raise ModelError(
            "PG667",
            "the chat template of the model leaves out what is said",
            where=place,
            why="the model would not see it",
            hint="use a model that was taught to read it, or say it in what the user says",
        )


def unread_value(tokenizer: Any, values: Mapping[str, Any], tools: Sequence[Any] | None = None) -> str | None:
    """A value that the chat template would leave out without a word: one that it knows nothing of, or a typo."""
    own = values.get("chat_template")
    names = sorted(set(values) - _OF_EVERY_TEMPLATE)
    return next((name for name in names if not template_has(tokenizer, name, tools, own)), None)


def template_has(tokenizer: Any, word: str, tools: Sequence[Any] | None = None, own: str | None = None) -> bool:
    """Whether a word is in the chat template. Where there is no template it is: whoever applies it is told.

    Args:
        tokenizer: whose template it is.
        word: a role, or the name of a value.
        tools: that are given: some tokenizers have a template for that.
        own: in the place of the tokenizer's.
    """
    try:
        template = tokenizer.get_chat_template(own, tools)
    except ValueError:
        return True
    return re.search(rf"\b{re.escape(word)}\b", template) is not None


def _unknown(name: str) -> ConfigError:
    return ConfigError(
        "PG101",
        f"unknown argument {name!r}",
        why="it is no setting of sampling, and the chat template does not read it",
        hint="llm.tokenizer.chat_template shows what it reads",
    )


def _cannot_apply(why: str) -> ModelError:
    return ModelError(
        "PG667", "the chat template cannot be applied", why=why, hint="write the prompt as the model was taught it"
    )
