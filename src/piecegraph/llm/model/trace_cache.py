"""What stands where a model would use its cache, while it is traced and never again.

No cache object is made. Layers that would have asked one emit ops instead, each in the finest form that is known to be
right for it; :func:`cache_for` decides and says why.

- *Fine form* (gated delta nets, short convolutions): the functions that mix tokens are globals of the modeling file.
  They are replaced by functions that emit one op each; projections, gates and norms stay in compiled pieces.
- *Opaque form* (every other layer with a state): the whole module is one op, which runs the module as it is.
- *Latent cache* (multi-head latent attention): what a layer would expand to keys and values reaches the attention op as
  it is.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from transformers.models.qwen3_next import modeling_qwen3_next

from piecegraph.base.plan import Decision
from piecegraph.errors import ModelError
from piecegraph.llm.model.plug import LATENT, UnsupportedCallError, source_in_transformers

LinearForm = Literal["auto", "fine", "opaque"]

_CONVOLUTION = "causal_conv1d_fn"
_DELTA_RULE = "torch_chunk_gated_delta_rule"


@dataclass(frozen=True)
class TraceCache:
    """What to replace while tracing. Empty for a model whose attention is all that remembers."""

    fine: tuple[torch.nn.Module, ...] = ()
    opaque: tuple[tuple[str, torch.nn.Module], ...] = ()
    """With their paths in the decoder. An op is traced with the number of its module in here."""
    latent: tuple[torch.nn.Module, ...] = ()
    decisions: tuple[Decision, ...] = ()

    @property
    def keeps_state(self) -> bool:
        """Whether there are layers that remember by themselves."""
        return bool(self.fine or self.opaque)

    @property
    def factors(self) -> dict[str, str]:
        """What a trace depends on that is made while this is installed: see ``factors`` of the pipeline."""
        opaque = ", ".join(path for path, _ in self.opaque)
        return {"layers with a state": f"{len(self.fine)} fine; opaque: {opaque}", "latent": str(len(self.latent))}

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """While tracing; afterwards the model and its modeling file are as they were."""
        with contextlib.ExitStack() as replaced:
            for module in self.fine:
                names = _globals_of(module)
                for name, emit in ((_CONVOLUTION, _emit_convolution), (_DELTA_RULE, _emit_delta_rule)):
                    if name in names:
                        replaced.enter_context(_replaced(names, name, emit))
            for number, (_, module) in enumerate(self.opaque):
                replaced.enter_context(_replaced(module.__dict__, "forward", _emit_stateful(module, number)))
            for module in self.latent:
                replaced.enter_context(_replaced(module.__dict__, "expand_kv", _keep_latent))
                replaced.enter_context(_replaced(module.__dict__, LATENT, True))
            yield


def cache_for(
    decoder: torch.nn.Module, *, linear_attention: LinearForm = "auto", latent_cache: bool = True
) -> TraceCache:
    """Decide the form of every layer of a loaded decoder that keeps something for later tokens.

    Args:
        decoder: the model without its head.
        linear_attention: ``"fine"`` refuses a model that has layers without a fine form.
        latent_cache: whether to keep latents where that is possible.
    """
    fine: list[torch.nn.Module] = []
    opaque: list[tuple[str, torch.nn.Module]] = []
    latent: list[torch.nn.Module] = []
    decisions: dict[type, Decision] = {}
    for path, module in decoder.named_modules():
        kind = type(module)
        if _keeps_state(kind):
            reason = _why_opaque(kind) if linear_attention != "opaque" else "asked for"
            if reason:
                _check_may_be_opaque(path, kind, linear_attention, reason)
                opaque.append((path, module))
            else:
                fine.append(module)
            decisions.setdefault(kind, _linear_decision(kind, reason))
        elif hasattr(module, "expand_kv") and isinstance(getattr(module, "kv_b_proj", None), torch.nn.Linear):
            reason = _why_expanded(module) if latent_cache else "asked for"
            if not reason:
                latent.append(module)
            decisions.setdefault(kind, _latent_decision(module, reason))
    return TraceCache(tuple(fine), tuple(opaque), tuple(latent), tuple(decisions.values()))


@contextlib.contextmanager
def _replaced(names: dict[str, Any], name: str, value: Any) -> Iterator[None]:
    missing = object()
    before = names.get(name, missing)
    names[name] = value
    try:
        yield
    finally:
        if before is missing:
            del names[name]
        else:
            names[name] = before


# Layers with a state


def _keeps_state(kind: type) -> bool:
    source = source_in_transformers(kind)
    return "update_conv_state" in source or "update_recurrent_state" in source


def _why_opaque(kind: Any) -> str:
    """Why the layers of a class have no fine form; empty if they have one."""
    forward = inspect.unwrap(kind.forward)
    used, source = forward.__code__.co_names, source_in_transformers(kind)
    for update, function in (("update_conv_state", _CONVOLUTION), ("update_recurrent_state", _DELTA_RULE)):
        if update not in source:
            continue
        if update not in used or function not in used:
            return "its recurrence has no op of its own"
        theirs = inspect.unwrap(forward.__globals__[function])
        if inspect.getsource(theirs) != inspect.getsource(inspect.unwrap(getattr(modeling_qwen3_next, function))):
            return f"its {function} is not the known one"
    return ""


def _linear_decision(kind: type, why_opaque: str) -> Decision:
    if why_opaque:
        reason = f"{kind.__name__}: {why_opaque}; the module runs as it is, one sequence after the other"
        return Decision("linear attention", "opaque form", reason)
    reason = f"{kind.__name__}: only what mixes tokens is cut out, the rest is compiled"
    return Decision("linear attention", "fine form", reason)


def _check_may_be_opaque(path: str, kind: Any, form: LinearForm, why_opaque: str) -> None:
    why, hint = "", ""
    if form == "fine":
        why, hint = f"it has no fine form: {why_opaque}", 'use linear_attention="auto"'
    elif list(inspect.signature(kind.forward).parameters)[1:2] != ["hidden_states"]:
        why = "it keeps a state, and its input is not hidden states"
    elif _returns_many(kind):
        why = "it keeps a state, and makes several tensors from its hidden states"
    if why:
        raise ModelError("PG662", f"a layer of class {kind.__name__} cannot be run", where=path, why=why, hint=hint)


def _returns_many(kind: Any) -> bool:
    """Whether a module returns more than its hidden states and a second value, which is None or attention weights."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(kind.forward))))
    returned = [node.value for node in ast.walk(tree) if isinstance(node, ast.Return)]
    return any(isinstance(value, ast.Tuple) and len(value.elts) > 2 for value in returned)


def _globals_of(module: torch.nn.Module) -> dict[str, Any]:
    names: dict[str, Any] = inspect.unwrap(type(module).forward).__globals__
    return names


def _emit_convolution(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """Hidden states are ``[1, channels, tokens]``."""
    rows = hidden_states.squeeze(0).t().contiguous()
    out = torch.empty_like(rows)
    torch.ops.piecegraph.causal_conv(rows, weight, bias, out, activation or "", 0)
    return out.t().unsqueeze(0)


def _emit_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Queries, keys and values are ``[1, tokens, heads, width]``, decay and beta ``[1, tokens, heads]``."""
    rows = [tensor.squeeze(0).contiguous() for tensor in (query, key, value, g, beta)]
    # The rule returns what it computed in the dtype of the query.
    out = torch.empty_like(rows[2], dtype=query.dtype)
    torch.ops.piecegraph.delta_rule(*rows, out, use_qk_l2norm_in_kernel, 0)
    return out.unsqueeze(0), None


def _emit_stateful(module: torch.nn.Module, number: int) -> Callable[..., torch.Tensor]:
    kind = type(module).__name__
    names = tuple(inspect.signature(type(module).forward).parameters)[2:]

    def forward(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        for name, value in (*zip(names, args, strict=False), *kwargs.items()):
            if name in names and isinstance(value, torch.Tensor):
                raise UnsupportedCallError(f"{kind} keeps a state and takes {name} besides its hidden states")
        rows = hidden_states.squeeze(0).contiguous()
        out = torch.empty_like(rows)
        torch.ops.piecegraph.stateful(rows, out, number)
        return out.unsqueeze(0)

    return forward


# Latent attention


def _keep_latent(latent: torch.Tensor, rope: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """In the place of expanding: the attention function is given the latents as key and value."""
    return latent, rope


@torch.no_grad()
def _why_expanded(module: Any) -> str:
    """Why keys and values must be kept instead of latents; empty if the latents will do.

    They will if each head's key is its part of the projected latent followed by the rotated key that all heads share.
    Tried on one token, since only the module's code knows.
    """
    weight = module.kv_b_proj.weight
    if module.kv_b_proj.bias is not None:
        return "its expansion adds a bias"
    latent = torch.linspace(-1, 1, weight.shape[1]).to(weight).view(1, 1, 1, -1)
    rope = torch.linspace(1, 2, module.qk_rope_head_dim).to(weight).view(1, 1, 1, -1)
    key, value = module.expand_kv(latent, rope)
    nope_width = key.shape[3] - rope.shape[3]
    expanded = torch.nn.functional.linear(latent, weight).view(1, 1, key.shape[1], -1).transpose(1, 2)
    expected = torch.cat((expanded[..., :nope_width], rope.expand(-1, key.shape[1], -1, -1)), -1)
    if expected.shape != key.shape or not torch.allclose(expected, key):
        return "its keys are not the projected latents"
    if value.shape != expanded[..., nope_width:].shape or not torch.allclose(value, expanded[..., nope_width:]):
        return "its values are not the projected latents"
    return ""


def _latent_decision(module: Any, why_expanded: str) -> Decision:
    kind = type(module).__name__
    if why_expanded:
        return Decision("MLA", "expanded cache", f"{kind}: {why_expanded}")
    rope_width, projection = module.qk_rope_head_dim, module.kv_b_proj
    num_heads = projection.out_features // (module.qk_nope_head_dim + module.v_head_dim)
    latent, expanded = projection.in_features + rope_width, projection.out_features + num_heads * rope_width
    return Decision("MLA", "latent cache", f"{kind}: {latent} numbers for a token instead of {expanded}")
