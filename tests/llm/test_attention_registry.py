"""Which attention kernel serves a model, and why."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import pytest
import torch

from piecegraph.errors import ConfigError
from piecegraph.llm.cache.memory import Memory
from piecegraph.llm.kernels.attention import cpu, reference
from piecegraph.llm.kernels.attention.registry import (
    attention_kernels,
    choose_kernel,
    register_attention,
    unregister_attention,
)
from piecegraph.llm.specs import Accepted, AttentionBatch, AttentionLayer, LatentLayer, Rejected, Support
from tests.cases.attention import Sequences, latent_layer, layer, problem

CPU = torch.device("cpu")


@pytest.fixture
def narrow() -> Iterator[str]:
    """A kernel of a user, for narrow layers, that ``auto`` tries first."""

    def supports(spec: AttentionLayer | LatentLayer, dtype: torch.dtype, device: torch.device) -> Support:
        return Accepted() if isinstance(spec, AttentionLayer) and spec.key_width <= 16 else Rejected("too wide")

    register_attention(
        "narrow", supports=supports, capture_safe=lambda kind: Accepted(), attend=reference.attend, automatic=True
    )
    yield "narrow"
    unregister_attention("narrow")


def test_every_kernel_passed_over_is_explained() -> None:
    kernel, reason = choose_kernel("auto", [layer(4, 2, 16)], torch.float32, CPU)
    assert kernel is cpu.KERNEL
    for other in itertools.takewhile(lambda each: each is not kernel, attention_kernels()):
        assert f"{other.name} (attention layer 0: " in reason


def test_one_layer_that_is_not_supported_is_enough(narrow: str) -> None:
    assert choose_kernel("auto", [layer(4, 2, 16)], torch.float32, CPU)[0].name == narrow
    layers = [layer(4, 2, 16), layer(4, 2, 32, index=1)]
    kernel, reason = choose_kernel("auto", layers, torch.float32, CPU)
    assert kernel is cpu.KERNEL
    assert "narrow (attention layer 1: too wide)" in reason


def test_a_kernel_without_latent_form_is_passed_over(narrow: str) -> None:
    _, reason = choose_kernel("auto", [latent_layer(2, 8, 4, 4, 4)], torch.float32, CPU)
    assert "narrow (attention layer 0: it has no latent form)" in reason


def test_asked_for_by_name(narrow: str) -> None:
    kernel, reason = choose_kernel("reference", [layer(4, 2, 16)], torch.float32, CPU)
    assert (kernel.name, reason) == ("reference", "asked for by name")
    with pytest.raises(ConfigError, match=r"PG101.*'narrow' cannot serve this model: attention layer 0: too wide"):
        choose_kernel(narrow, [layer(4, 2, 32)], torch.float32, CPU)
    with pytest.raises(ConfigError, match=r"PG101 there is no attention kernel 'nonsense': known: auto, narrow, "):
        choose_kernel("nonsense", [], torch.float32, CPU)


def test_a_name_is_taken_once(narrow: str) -> None:
    for name in (narrow, "auto", "reference"):
        with pytest.raises(ConfigError, match="the name is taken"):
            register_attention(
                name, supports=reference.KERNEL.supports, capture_safe=lambda kind: Accepted(), attend=reference.attend
            )


def test_a_kernel_that_is_not_automatic_is_used_by_name_only() -> None:
    arguments = {"supports": reference.KERNEL.supports, "attend": reference.attend}
    register_attention("mine", capture_safe=lambda kind: Accepted(), **arguments)  # type: ignore[arg-type]
    try:
        assert choose_kernel("auto", [layer(4, 2, 16)], torch.float32, CPU)[0] is cpu.KERNEL
        assert choose_kernel("mine", [layer(4, 2, 16)], torch.float32, CPU)[0].name == "mine"
    finally:
        unregister_attention("mine")


def test_a_kernel_of_a_user_allocates_what_it_keeps_before_a_layer_runs() -> None:
    prepared: list[tuple[Sequence[AttentionLayer | LatentLayer], torch.device]] = []
    kernel = register_attention(
        "mine",
        supports=reference.KERNEL.supports,
        capture_safe=lambda kind: Accepted(),
        attend=reference.attend,
        prepare=lambda layers, device: prepared.append((layers, device)),
    )
    unregister_attention("mine")
    layers = (layer(4, 2, 16), layer(4, 2, 32, index=1))
    Memory(layers, kernel, (), None, dtype=torch.float32, device=CPU, block_size=16)
    assert prepared == [(layers, CPU)]


def test_what_reads_lengths_on_the_host_may_not_be_captured() -> None:
    for kernel in (reference.KERNEL, cpu.KERNEL):
        assert isinstance(kernel.capture_safe("decode"), Rejected)


def test_a_batch_is_read_once_for_all_layers_of_a_step() -> None:
    read: list[AttentionBatch] = []
    seen: list[object] = []
    kernel = register_attention(
        "mine",
        supports=reference.KERNEL.supports,
        capture_safe=reference.KERNEL.capture_safe,
        attend=lambda *arguments: seen.append(arguments[-1].host),
        read_batch=lambda batch: (read.append(batch), len(read))[1],
    )
    unregister_attention("mine")
    layers = (layer(4, 2, 16), layer(4, 2, 16, index=1))
    memory = Memory(layers, kernel, (), None, dtype=torch.float32, device=CPU, block_size=16)
    memory.allocate([2])
    batch = problem(layers[0], Sequences(name="one", spans=((1, 3),)), torch.float32).batch
    for _ in range(2):
        memory.use_batch([batch], lambda: pytest.fail("there are no states"))
        for site in range(2):
            memory.run("attention", site, ())
    assert (read, seen) == ([batch, batch], [1, 1, 2, 2])
