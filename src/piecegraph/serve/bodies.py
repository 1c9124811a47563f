"""What the bodies of requests hold. A field that is not here is refused by name, never ignored. Null says nothing.

Fields that vLLM's server knows beside OpenAI's have the same names here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from piecegraph.llm.run.sampling_params import SamplingParams
from piecegraph.serve.conversation import past_call, wrong_role
from piecegraph.serve.failures import ApiError, unsupported
from piecegraph.serve.tool_choice import ToolUse

_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "n",
    "seed",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "ignore_eos",
    "min_tokens",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "bad_words",
    "structured_outputs",
)
"""Fields that :class:`SamplingParams` has by the same name."""


_MOST_STOPS = 64
"""Texts that are looked for at every token."""
_MOST_DIGITS = 20
"""Of a token's number."""
_MOST_TOKENS = 1024
"""Tokens that a request names."""


class Body(BaseModel):
    """A body, or a part of one."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        """Clients write null for what they do not say, also where the default is something else."""
        if not isinstance(given, dict):
            return given
        optional = {name for name, field in cls.model_fields.items() if not field.is_required()}
        return {name: value for name, value in given.items() if value is not None or name not in optional}


class StreamOptions(Body):
    """What else a stream tells."""

    include_usage: bool = False


class SamplingBody(Body):
    """How tokens are chosen, and when an answer ends: what the endpoints that generate have in common."""

    model: str
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = Field(None, ge=1, le=128)
    stop: str | Annotated[list[str], Field(max_length=_MOST_STOPS)] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = Field(None, max_length=_MOST_TOKENS)
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    user: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: list[int] | None = Field(None, max_length=_MOST_TOKENS)
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    bad_words: list[str] | None = Field(None, max_length=_MOST_STOPS)
    structured_outputs: dict[str, Any] | None = None
    priority: int = 0

    def names(self) -> dict[str, str]:
        """See :attr:`piecegraph.serve.record.Record.names`."""
        return {"max_new_tokens": "max_tokens", "prompt_logprobs": "logprobs"}

    def sampling(self, defaults: dict[str, Any], *, max_new_tokens: int, **others: Any) -> SamplingParams:
        """The same for the engine.

        Args:
            defaults: of the model, for what is not given.
            max_new_tokens: of an answer.
            **others: further fields of :class:`SamplingParams`.
        """
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options is only for streams", code="invalid_value", param="stream_options")
        given = {name: getattr(self, name) for name in _SAMPLING}
        if self.seed is not None:
            given["seed"] = self.seed % 2**64
        if self.logit_bias is not None:
            given["logit_bias"] = _biases(self.logit_bias)
        return sampling_params(defaults, given, max_new_tokens=max_new_tokens, **others)


def sampling_params(defaults: dict[str, Any], given: dict[str, Any], **others: Any) -> SamplingParams:
    """How a request goes on from its prompt.

    Args:
        defaults: of the model, for what is not given.
        given: what the body says; None where it says nothing.
        **others: further fields of :class:`SamplingParams`.
    """
    said = {name: value for name, value in given.items() if value is not None}
    row = defaults | said | others
    if row["temperature"] == 0:  # always the most likely token: there is nothing to choose from
        of_draws = ("top_p", "top_k", "min_p")
        SamplingParams(temperature=1.0, **{name: said[name] for name in of_draws if name in said})  # but it is checked
        row = {name: value for name, value in row.items() if name not in of_draws}
    return SamplingParams(**row)


def _biases(given: dict[str, float]) -> dict[int, float]:
    if not all(token.isascii() and token.isdecimal() and len(token) < _MOST_DIGITS for token in given):
        raise ApiError(400, "logit_bias must be by token ids", code="invalid_value", param="logit_bias")
    found: dict[int, float] = {}
    for token, bias in given.items():
        if found.setdefault(int(token), bias) != bias:
            message = f"logit_bias has token {int(token)} twice, with different values, however it is written"
            raise ApiError(400, message, code="invalid_value", param="logit_bias")
    return found


Texts = str | list[str] | list[int] | list[list[int]]
"""One or several, as texts or as tokens."""


def prompts_of(given: Texts) -> list[str | list[int]]:
    """One or several, in either form.

    >>> prompts_of("a"), prompts_of([1, 2]), prompts_of(["a", "b"]), prompts_of([[1], [2]])
    (['a'], [[1, 2]], ['a', 'b'], [[1], [2]])
    """
    if isinstance(given, str):
        return [given]
    tokens = [each for each in given if isinstance(each, int)]
    return [tokens] if tokens else [each for each in given if not isinstance(each, int)]


class CompletionBody(SamplingBody):
    """Of ``/v1/completions``."""

    prompt: Texts
    max_tokens: int = Field(16, ge=0)
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool = False
    best_of: int | None = None
    suffix: str | None = None

    def check(self) -> None:
        """Raise what is known and not supported."""
        if self.best_of not in (None, 1) or (self.best_of == 1 and (self.n or 1) > 1):
            raise unsupported("best_of", "answers would be generated to be thrown away; ask for n answers")
        if self.suffix is not None:
            raise unsupported("suffix", "a decoder goes on from a text, and cannot fill one in")
        if self.max_tokens == 0 and not self.echo:
            raise ApiError(400, "max_tokens is 0: only with echo", code="invalid_value", param="max_tokens")
        if not self.prompt:
            raise ApiError(400, "prompt is empty", code="invalid_value", param="prompt")


class TextPart(Body):
    """A part of what is said."""

    type: Literal["text"]
    text: str


class CalledFunction(Body):
    """What a model called, and with what."""

    name: str
    arguments: str


class ToolCall(Body):
    """A call of an earlier answer."""

    id: str
    type: Literal["function"]
    function: CalledFunction
    index: int | None = None


_ROLES = {"tool_calls": "assistant", "reasoning_content": "assistant", "tool_call_id": "tool"}
"""Of fields that only one role has."""


class Message(Body):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: None = None

    def for_template(self, place: str) -> dict[str, Any]:
        """As chat templates have it: text is one text.

        Args:
            place: of the message in the request.
        """
        for name, role in _ROLES.items():
            if getattr(self, name) is not None and self.role != role:
                raise wrong_role(f"{place}.{name}", self.role, role)
        content = self.content
        text = "".join(part.text for part in content) if isinstance(content, list) else content
        named = {name: getattr(self, name) for name in ("name", "tool_call_id", "reasoning_content")}
        said = {"role": self.role, "content": text or "", **{name: value for name, value in named.items() if value}}
        if self.tool_calls:
            said["tool_calls"] = [
                past_call(
                    call.id,
                    call.function.name,
                    call.function.arguments,
                    f"{place}.tool_calls[{number}].function.arguments",
                )
                for number, call in enumerate(self.tool_calls)
            ]
        return said


def conversation_of(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """As chat templates have it."""
    return [message.for_template(f"messages[{number}]") for number, message in enumerate(messages)]


class Function(Body):
    """What a model may call. How its arguments are to look is told to the model, and forced upon it with the call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """A function that a model may call."""

    type: Literal["function"]
    function: Function


class FunctionName(Body):
    """Which function."""

    name: str


class NamedTool(Body):
    """The tool that is to be called."""

    type: Literal["function"]
    function: FunctionName


class JsonSchema(Body):
    """What an answer in JSON looks like. It is always kept, strict or not."""

    name: str
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """Of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    def form(self) -> dict[str, Any] | None:
        """The same for the engine; None for any text."""
        if (self.json_schema is not None) != (self.type == "json_schema"):
            message = f"response_format is {self.type!r}: a json_schema comes with 'json_schema', and only with that"
            raise ApiError(400, message, code="invalid_value", param="response_format.json_schema")
        if self.json_schema is not None:
            return {"json": self.json_schema.schema_}
        return {"json_object": True} if self.type == "json_object" else None


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
"""How long a model is to think, where its chat template can tell it so."""


class ChatBody(SamplingBody):
    """Of ``/v1/chat/completions``."""

    messages: list[Message] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    response_format: ResponseFormat | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    store: Literal[False] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    def check(self) -> None:
        """Raise what contradicts itself."""
        both = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(both) > 1:
            raise ApiError(
                400, "max_tokens and max_completion_tokens are one", code="invalid_value", param="max_tokens"
            )
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs", code="invalid_value", param="top_logprobs")
        self.tool_use().check()
        forms = {
            "response_format": self.response_format is not None and self.response_format.form() is not None,
            "structured_outputs": self.structured_outputs is not None,
            "tools": bool(self.tool_use().values),
        }
        if len(given := [name for name, is_given in forms.items() if is_given]) > 1:
            raise unsupported(given[0], f"an answer has one form, and {' and '.join(given)} were given")

    def names(self) -> dict[str, str]:
        given = [name for name in ("max_completion_tokens", "max_tokens") if getattr(self, name) is not None]
        form = "response_format" if self.structured_outputs is None else "structured_outputs"
        found = {
            "prompt": "messages",
            "max_new_tokens": given[0] if given else "messages",
            "logprobs": "top_logprobs",
            "structured_outputs": "tools" if self.tool_use().is_forced else form,
        }
        return found | ({} if self.reasoning_effort is None else {"template.reasoning_effort": "reasoning_effort"})

    def tool_use(self) -> ToolUse:
        """What is said of tools."""
        named = self.tool_choice.function.name if isinstance(self.tool_choice, NamedTool) else None
        choice = "required" if isinstance(self.tool_choice, NamedTool) else self.tool_choice or "auto"
        functions = [tool.function.model_dump(exclude_none=True) for tool in self.tools or ()]
        return ToolUse(functions=functions, choice=choice, named=named, several=self.parallel_tool_calls is not False)

    def form(self) -> dict[str, Any] | None:
        """Of the answer, for the engine; None for any text."""
        if (of_calls := self.tool_use().form()) is not None:
            return of_calls
        if self.structured_outputs is not None:
            return self.structured_outputs
        return None if self.response_format is None else self.response_format.form()

    @property
    def num_new(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    def template_values(self) -> dict[str, Any]:
        """What the chat template is given besides the messages."""
        names = ("add_generation_prompt", "continue_final_message", "reasoning_effort")
        named = {name: getattr(self, name) for name in names}
        return {
            **(self.chat_template_kwargs or {}),
            **{name: value for name, value in named.items() if value is not None},
        }


class TokenizeBody(Body):
    """Of ``/tokenize``: a text or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def names(self) -> dict[str, str]:
        """See :attr:`piecegraph.serve.record.Record.names`."""
        return {} if self.messages is None else {"prompt": "messages"}

    def check(self) -> None:
        """Raise for what is said of the other."""
        if self.messages is None and self.chat_template_kwargs is not None:
            raise unsupported("chat_template_kwargs", "a prompt has no template")
        if self.messages is not None and self.add_special_tokens is not None:
            raise unsupported("add_special_tokens", "the chat template says which there are")


class DetokenizeBody(Body):
    """Of ``/detokenize``."""

    model: str | None = None
    tokens: list[int]
