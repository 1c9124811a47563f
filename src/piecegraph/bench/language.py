"""A language model as a subject: its modes, its prompts, and what eager answers to them."""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from piecegraph.bench import shapes
from piecegraph.bench.config import PEER_MODES, BenchConfig, Cell
from piecegraph.bench.ours import LLMRunner
from piecegraph.bench.peers import TransformersRunner
from piecegraph.bench.result import Comparison, Mode, Phase, Verdict
from piecegraph.bench.runner import Runner, UnavailableError
from piecegraph.errors import ConfigError
from piecegraph.llm.llm import LLM
from piecegraph.llm.model.loader import load, unplug
from piecegraph.llm.ranks.group import start_job
from piecegraph.llm.run.agreement import Finding, findings, jittered, row_errors, widened

_MEMORY_SHARE = 0.8
"""Of a GPU, that the weights of all modes may take together."""


@dataclass(frozen=True)
class Reference:
    """What eager answers in one cell."""

    prompts: torch.Tensor
    tokens: torch.Tensor
    """[prompts, new tokens], the most likely ones."""
    logits: tuple[torch.Tensor, ...]
    """[prompts, vocabulary] behind the prompts, and behind each token but the last; on the host."""
    of_rounding: Mapping[str, torch.Tensor]
    """By how much of their norm these differ if the model's embeddings are rounded otherwise; empty in float32."""


@dataclass(frozen=True, slots=True)
class WeightBytes:
    """What a step reads at least."""

    total: int
    dense: int
    """Of what every token needs."""
    experts: int
    chosen_share: float
    """Of the experts, that one token is sent to."""
    vocab_size: int

    def read(self, num_tokens: int) -> int:
        return self.dense + int(self.experts * min(1.0, self.chosen_share * num_tokens))


class LanguageModel:
    """Of transformers: a folder, a name, or a built-in shape with random weights."""

    phases: tuple[Phase, ...] = ("prefill", "decode")

    def __init__(self, config: BenchConfig) -> None:
        self._config = config
        if config.num_replicas > 1:
            start_job(config.device.type)  # they agree on what is measured next
        self._path = shapes.shape_folder(config.model) if config.model in shapes.NAMES else config.model
        start = time.perf_counter()
        torch.manual_seed(0)  # random weights are then those of every other mode
        loaded = load(self._path, dtype=config.dtype, device=config.device, load_format=config.load_format)
        self._load_s = time.perf_counter() - start
        self._max_positions = loaded.max_positions
        _check_length(config, self._max_positions)
        unplug(loaded.model)
        self._model: Any = loaded.model
        """As long as a mode of transformers is to be opened."""
        self._unopened = set(config.modes)
        self._weights = weight_bytes(self._model)
        self._references = {cell: self._reference(cell) for cell in config.cells}
        self._release_model()

    @property
    def groups(self) -> tuple[tuple[Mode, ...], ...]:
        modes = self._config.modes
        ours = tuple(mode for mode in modes if mode not in PEER_MODES)
        if self._config.device.type != "cuda" or self._fits(1 + len(ours)):
            return (modes,)
        theirs = tuple(mode for mode in modes if mode in PEER_MODES)
        return (*filter(None, (theirs,)), *((mode,) for mode in ours))

    def open(self, mode: Mode) -> Runner:
        model = self._model
        self._unopened.discard(mode)
        self._release_model()
        reason = self._config.why_not(mode)
        if reason:
            raise UnavailableError(reason)
        if mode in PEER_MODES:
            return TransformersRunner(mode, model, self._load_s, self._config.output_len)
        return LLMRunner(mode, self._path, self._config, self._max_positions, **_ranks_arguments(self._config))

    def inputs(self, cell: Cell, number: int) -> torch.Tensor:
        """Random prompts, never the same twice: no cache of prefixes must help."""
        numbers = torch.Generator().manual_seed(number)
        shape = (cell.batch_size, cell.input_len)
        return torch.randint(self._weights.vocab_size, shape, generator=numbers).to(self._config.device)

    def judge(self, runner: Any, cell: Cell) -> Mapping[Phase, Verdict]:
        if runner.mode == "eager":
            return dict.fromkeys(self.phases, Verdict(state="reference", reason=runner.ran_as))
        reference = self._references[cell]
        found = runner.logits(reference.prompts, reference.tokens)
        errors = _errors(found, reference.logits)
        if isinstance(runner, LLMRunner) and self._config.tensor_parallel_size == 1:
            runner.record_missed()  # several ranks record inside of calls, which all of them make
        judged = findings(errors, reference.logits[0].dtype)
        if reference.of_rounding:
            judged = widened(judged, reference.of_rounding)
        return {phase: _verdict([each for each in judged if each.kind == phase]) for phase in self.phases}

    def num_tokens(self, cell: Cell, phase: Phase) -> int:
        return cell.batch_size * (cell.input_len if phase == "prefill" else 1)

    def read_bytes(self, cell: Cell, phase: Phase) -> int:
        return self._weights.read(self.num_tokens(cell, phase)) // self._config.tensor_parallel_size

    def close(self) -> None:
        self._model = None

    def _reference(self, cell: Cell) -> Reference:
        eager = TransformersRunner("eager", self._model, self._load_s, cell.output_len)
        prompts = self.inputs(cell, 0)
        tokens = eager.greedy(prompts)
        logits = tuple(rows.cpu() for rows in eager.logits(prompts, tokens))
        of_rounding: Mapping[str, torch.Tensor] = {}
        if self._model.dtype.itemsize <= 2:
            with jittered(self._model):
                of_rounding = _errors(eager.logits(prompts, tokens), logits)
        return Reference(prompts, tokens, logits, of_rounding)

    def _release_model(self) -> None:
        if not self._unopened & set(PEER_MODES):
            self._model = None

    def _fits(self, num_models: int) -> bool:
        """Whether so many models find room on the GPU at once."""
        total = torch.cuda.get_device_properties(self._config.device).total_memory
        return num_models * self._weights.total <= _MEMORY_SHARE * total


def weight_bytes(model: Any) -> WeightBytes:
    """Of a language model. A row of the embeddings is looked up; all of them are read if the head has them, too."""
    config = model.config.get_text_config()
    embeddings = model.get_input_embeddings().weight
    head = model.get_output_embeddings()
    is_tied = head is not None and head.weight is embeddings
    sizes = {name: parameter.nbytes for name, parameter in model.named_parameters()}
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    num_experts = next((count for name in names if (count := getattr(config, name, None))), 0)
    chosen = getattr(config, "num_experts_per_tok", 0) or 0
    return WeightBytes(
        total=sum(sizes.values()),
        dense=sum(sizes.values()) - experts - (0 if is_tied else embeddings.nbytes),
        experts=experts,
        chosen_share=chosen / num_experts if num_experts else 0.0,
        vocab_size=embeddings.shape[0],
    )


def _errors(found: Iterable[torch.Tensor], expected: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """By how much rows differ: those behind the prompts, and those behind new tokens."""
    steps = [row_errors(ours, theirs.to(ours.device)) for ours, theirs in zip(found, expected, strict=True)]
    return {"prefill": steps[0].cpu(), "decode": torch.cat(steps[1:]).cpu()}


def _verdict(judged: Sequence[Finding]) -> Verdict:
    worst = max(judged, key=lambda finding: finding.severity)
    reason = f"logits differ by {worst.difference:.2g} of their norm, {worst.allowed:.2g} is allowed"
    state: Comparison = "same" if worst.severity <= 1 else "differs"
    return Verdict(state=state, reason=reason, difference=worst.difference, allowed=worst.allowed)


def _check_length(config: BenchConfig, most: int) -> None:
    longest = max(config.input_lens) + config.output_len
    if longest > most:
        why = f"the model was made for {most} tokens"
        raise ConfigError("PG101", f"input and output are {longest} tokens", why=why, hint="ask for less")


def _ranks_arguments(config: BenchConfig) -> dict[str, Any]:
    if config.tensor_parallel_size == 1:
        return {}
    name = "tensor_parallel_size"
    if name not in inspect.signature(LLM).parameters:
        raise ConfigError("PG101", f"{name} is {config.tensor_parallel_size}", why="LLM runs on one GPU")
    return {name: config.tensor_parallel_size}
