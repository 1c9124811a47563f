"""Our modes: a language model through :class:`piecegraph.LLM`, with its scheduler, batches, replays and sampler."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from piecegraph.bench.config import BenchConfig
from piecegraph.bench.result import Fallback, Mode, Phase
from piecegraph.bench.runner import Counts, UnavailableError
from piecegraph.bench.timing import wait
from piecegraph.llm import Request, SamplingParams
from piecegraph.llm.llm import LLM
from piecegraph.llm.run.results import Completion
from piecegraph.llm.specs import StepKind

_HOW: dict[Mode, dict[str, Any]] = {
    "breakable": {"backend": "eager", "cudagraph_mode": "piecewise"},
    "piecewise": {"backend": "inductor", "cudagraph_mode": "piecewise"},
    "full": {"backend": "inductor", "cudagraph_mode": "full"},
}
"""A capture that is broken at what no graph can hold, without a compiler, is eager pieces between the cuts."""

_SPARE_TOKENS = 256
"""A request is admitted if as many blocks are left as there are running ones: the cache is a block larger for each."""

_KINDS: dict[Phase, StepKind] = {"prefill": "mixed", "decode": "decode"}


class LLMRunner:
    """One of our modes.

    Args:
        mode: ``breakable``, ``piecewise`` or ``full``.
        path: of the model.
        config: what is measured.
        max_positions: tokens of a sequence that the model was made for.
        arguments: more for :class:`piecegraph.LLM`.
    """

    weight_bytes = 0

    def __init__(self, mode: Mode, path: str, config: BenchConfig, max_positions: int, **arguments: Any) -> None:
        self.mode = mode
        torch.manual_seed(0)  # random weights are then those of every other mode
        options = {"progress": False, "graph_device": config.graph_device}
        self.llm = LLM(
            path,
            dtype=config.dtype,
            device=config.device,
            load_format=config.load_format,
            max_model_len=min(max(config.input_lens) + config.output_len + _SPARE_TOKENS, max_positions),
            max_num_seqs=max(config.batch_sizes),
            prefix_cache=False,
            options=options,
            **_HOW[mode],
            **arguments,
        )
        self._output_len = config.output_len
        self.stages_s: dict[str, float] = dict(self.llm.started.stages)
        modes = self.llm.started.engine.forward.modes
        steps = {kind: modes[kind].choice for kind in ("decode", "mixed")}
        pieces = f"{_HOW[mode]['backend']} pieces"
        self.ran_as = f"{pieces}, {steps['decode']}" if config.has_graphs else f"direct: {pieces}, no graphs on a CPU"

    def logits(self, prompts: torch.Tensor, tokens: torch.Tensor) -> Iterator[torch.Tensor]:
        """Logits behind prompts and behind each of given tokens but the last, as the steps of ``generate`` compute
        them. The tokens that the model itself would choose are not looked at.
        """
        scheduler = self.llm.make_scheduler(prefix_cache=False)
        params = SamplingParams(max_new_tokens=tokens.shape[1], ignore_eos=True)
        given = {str(row): tokens[row].tolist() for row in range(len(tokens))}
        for row, prompt in enumerate(prompts.tolist()):
            scheduler.add(Request(str(row), prompt, params))
        found: list[dict[int, torch.Tensor]] = [{} for _ in range(tokens.shape[1])]
        num_told = 0
        while plan := scheduler.schedule():
            result = self.llm.forward(plan)
            chosen = []
            for row, work in enumerate(plan.works):
                number = len(work.request.tokens) - work.request.num_prompt
                chosen.append(given[work.request.id][number])
                if work.samples:
                    found[number][int(work.request.id)] = result.logits[row].clone()
            scheduler.commit(plan, chosen)
            while num_told < len(found) and len(found[num_told]) == len(prompts):
                rows = found[num_told]
                yield torch.stack([rows[row] for row in range(len(prompts))])
                rows.clear()
                num_told += 1

    def sample_s(self, phase: Phase, inputs: torch.Tensor) -> float:
        prompts = inputs.tolist()
        if phase == "prefill":
            # Not until the call is over: what it may record behind the last token is nobody's waiting.
            return max(answer.metrics.total_s for answer in self._generate(prompts, 1))
        return step_seconds(self._generate(prompts, self._output_len))

    def record_missed(self) -> None:
        """Record the steps that ran larger than needed, or without graphs: a server does it when it is idle."""
        with self.llm.lock, torch.inference_mode():
            for key in self.llm.started.engine.forward.missed:
                self.llm.started.engine.record_idle(key)

    def counts(self, phase: Phase) -> Counts:
        of_kind = self.llm.started.engine.counts.kinds[_KINDS[phase]]
        return Counts(of_kind.num_steps, of_kind.num_replays, of_kind.num_tokens, of_kind.num_padding)

    @property
    def fallbacks(self) -> tuple[Fallback, ...]:
        return tuple(
            Fallback(code=event.code, subject=event.subject, reason=event.reason, count=count)
            for event, count in self.llm.events.distinct
        )

    def close(self) -> None:
        self.llm.close()

    def _generate(self, prompts: list[list[int]], num_new: int) -> list[Completion]:
        wait()
        return self.llm.generate(prompts, max_new_tokens=num_new, ignore_eos=True)


def step_seconds(answers: Sequence[Completion]) -> float:
    """Seconds of a step of decoding while all requests ran.

    Prompts that do not fit into one step begin to decode one behind the other. So steps are counted from the last first
    token to the first last one.

    Raises:
        UnavailableError: there was no such step.
    """
    times = [answer.metrics.token_times_s for answer in answers]
    begun, ended = max(each[0] for each in times), min(each[-1] for each in times)
    last = max(times, key=lambda each: each[0])
    num_steps = sum(begun < moment <= ended for moment in last)
    if num_steps == 0:
        raise UnavailableError("the first request ended before the last began: a longer --output-len is needed")
    return (ended - begun) / num_steps
