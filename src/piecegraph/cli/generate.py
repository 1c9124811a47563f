"""``piecegraph generate``: a language model answers in the terminal."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from piecegraph.base.progress import is_terminal
from piecegraph.cli.answers import Answers, document, summary
from piecegraph.cli.loading import load_model, model_options, ranks_option, shared, this_rank

if TYPE_CHECKING:
    from piecegraph.llm.llm import LLM

_INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class _Sampling:
    max_new_tokens: int
    temperature: float
    top_p: float
    top_k: int
    seed: int | None

    def arguments(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


@click.command()
@click.argument("model")
@click.argument("prompts", nargs=-1, metavar="[PROMPT]...")
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=256, show_default=True, help="Of each answer.")
@click.option(
    "--temperature", type=click.FloatRange(min=0), default=0.0, show_default=True, help="0: most likely token."
)
@click.option("--top-p", type=click.FloatRange(0, 1, min_open=True), default=1.0, show_default=True, help="Nucleus.")
@click.option("--top-k", type=click.IntRange(min=0), default=0, show_default=True, help="Most likely tokens; 0: all.")
@click.option("--seed", type=click.IntRange(min=0), help="Fixes what is sampled.")
@click.option("--raw", is_flag=True, help="Go on from the prompt as it is, without the chat template.")
@model_options
@ranks_option
@click.option("--max-model-len", type=click.IntRange(min=2), help="Tokens of prompt and answer at most.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document, at the end.")
@click.option("--explain", "explains", is_flag=True, help="Tell how the model was run, on standard error.")
def generate(
    model: str,
    prompts: tuple[str, ...],
    max_new_tokens: int,
    temperature: float,
    top_p: float,
    top_k: int,
    seed: int | None,
    raw: bool,
    as_json: bool,
    explains: bool,
    **how: Any,
) -> None:
    """Let a language model answer, token by token.

    MODEL is a folder with a transformers model, a name that transformers can find, or "demo": a small model from a
    package. Prompts run together. A prompt that is "-", or no prompt at all, is read from standard input.

    Ends with 0; with 1 if the model or a prompt was refused, and with 2 if it was called wrongly, with a code.
    """
    sampling = _Sampling(max_new_tokens, temperature, top_p, top_k, seed)
    try:
        read = _read_prompts(prompts)
        llm = _load(model, len(read), sampling, how)
        if llm.follows:
            llm.follow()
            return
        answers = _answer(llm, read, sampling, raw=raw, prints=not as_json)
    except KeyboardInterrupt:
        click.echo(err=True)
        sys.exit(_INTERRUPTED)
    if as_json:
        from piecegraph.base.text import to_json

        click.echo(to_json(document(model, llm, answers, explains=explains)))
    else:
        click.echo(summary(llm, answers), err=True)
        if explains:
            click.echo(f"\n{llm.explain()}", err=True)
    llm.close()  # the other ranks, if there are any, end with it
    sys.exit(1 if answers.tell_errors() else 0)


def _read_prompts(prompts: tuple[str, ...]) -> list[str]:
    if not prompts and is_terminal(sys.stdin):
        raise click.UsageError("Missing argument 'PROMPT': give a prompt, or pipe one in.")
    wanted = prompts or ("-",)
    if wanted.count("-") > 1:
        raise click.UsageError("Only one prompt can be read from standard input.")
    if this_rank():  # the first rank reads them, and the others need to know how many there are
        return ["-"] * len(wanted)
    read = [_standard_input() if prompt == "-" else prompt for prompt in wanted]
    if not any(read):
        raise click.UsageError("The prompt is empty.")
    for number, prompt in enumerate(read, 1):
        if not prompt.isprintable() and any("\ud800" <= character <= "\udfff" for character in prompt):
            raise click.UsageError(f"Prompt {number} is not UTF-8.")
    return read


def _standard_input() -> str:
    if sys.stdin is None:  # so Python says that it was closed by who started us
        raise click.UsageError("Standard input is closed: give a prompt, or pipe one in.")
    try:
        return sys.stdin.buffer.read().decode().rstrip("\n")
    except UnicodeDecodeError as error:
        raise click.UsageError(f"Standard input is not UTF-8: {error}.") from error
    except OSError as error:
        raise click.UsageError(f"Standard input cannot be read: {error.strerror}.") from error


def _load(model: str, num_prompts: int, sampling: _Sampling, how: dict[str, Any]) -> LLM:
    from piecegraph.llm import SamplingParams  # from there importing is timed

    params = SamplingParams(**sampling.arguments())  # a wrong number is told before the model is loaded
    if params.without_effect:
        option = f"--{params.without_effect[0].replace('_', '-')}"
        raise click.UsageError(f"{option} has no effect without --temperature.")
    ranks: dict[str, Any] = shared(how["device"], how.pop("tensor_parallel_size"))
    # A command that is over soon has no use for sizes that only some requests need.
    return load_model(model, num_prompts=num_prompts, options={"record_seconds": 0}, **how, **ranks)


def _answer(llm: LLM, prompts: list[str], sampling: _Sampling, *, raw: bool, prints: bool) -> Answers:
    from piecegraph.llm.run.prompts import has_chat_template
    from piecegraph.llm.run.sampling_params import SamplingParams

    is_chat = not raw and has_chat_template(llm.tokenizer)
    answers = Answers(prompts, prints=prints)
    # An empty prompt is refused alone, whatever a template or a tokenizer would make of it.
    asked = [(llm.chat_prompt(prompt) if is_chat else prompt) if prompt else [] for prompt in prompts]
    for chunk in llm.generate(asked, SamplingParams(**sampling.arguments()), stream=True, on_error="return"):
        answers.add(chunk)
    return answers
