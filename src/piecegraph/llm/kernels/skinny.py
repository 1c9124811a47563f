"""Linears of few rows, and what stands around them: which kernel is launched, and with which tiles.

A decode step reads every weight once, and cuBLAS often takes two or three times as long as that. What is computed is
said in plain torch by :func:`plain`; kernels keep float32 between its parts, as compilers do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F

from piecegraph.llm.kernels import many_rows
from piecegraph.llm.kernels.chip import Chip, chip
from piecegraph.llm.kernels.early_launch import chained_constants

MOST_ROWS = 64
"""With more, cuBLAS is as good, but for what is behind it: see ``many_rows.py``."""
_MOST_FUSED = 16
"""Up to so many rows, kernels for few are best."""
_SMALL_WEIGHT = 2**24
"""In bytes. A larger one that is fetched early takes the place of what is still needed."""
_GATE_BLOCK = 1024


class Tile(NamedTuple):
    """How a kernel is cut: columns and depth of a program's tile, warps, and stages of its pipeline.

    For one row, the stages are the blocks that are read before the row is there.
    """

    kernel: Literal["one_row", "narrow", "some_rows"]
    columns: int
    depth: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class Linear:
    """A linear and what is around it."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    gain: torch.Tensor | None = None
    """Of the norm before it (of root mean squares); None if there is none."""
    eps: float = 0.0
    """Of the norm."""
    residual: torch.Tensor | None = None
    """Added to what comes out."""
    is_gated: bool = False
    """Whether what comes out is the SiLU of the first half of its columns, times the second."""

    @property
    def num_columns(self) -> int:
        return self.weight.shape[0] // 2 if self.is_gated else self.weight.shape[0]


def choose_tile(rows: int, columns: int, depth: int, *, has_norm: bool = False, is_gated: bool = False) -> Tile | None:
    """The tile for a linear, or None where cuBLAS is as good. Measured on an H200 in bfloat16, in microseconds:

    ==============  ====  ======  =====   ==============  ====  ======  =====
    columns, depth  rows  cuBLAS  ours    columns, depth  rows  cuBLAS  ours
    ==============  ====  ======  =====   ==============  ====  ======  =====
    4096, 1024      1     5.3     3.2     4096, 4096      1     12.7    9.0
    1024, 2048      1     12.7    2.3     4096, 4096      8     13.4    11.6
    1024, 2048      8     5.9     3.3     28672, 4096     1     56.5    54.8
    1024, 2048      32    5.9     4.1     28672, 4096     8     62.2    56.2
    1024, 3072      1     7.4     2.8     4096, 14336     1     31.9    28.0
    1024, 3072      8     7.5     4.4     4096, 14336     8     32.9    32.7
    1024, 3072      32    7.8     5.3     4096, 14336     32    34.5    38.2
    4096, 1024      8     5.3     5.3     6144, 1024      1     6.0     3.9
    4096, 1024      32    5.3     7.9     6144, 1024      8     6.1     6.7
    ==============  ====  ======  =====   ==============  ====  ======  =====

    Ours include a residual or a norm and a gate, and begin early; cuBLAS's would be two or three kernels with them.
    Where the gain is small, what it takes to compile one more kernel is not worth it. The table is of linears alone;
    in layers as they follow each other, tiles of 16 columns have four stages: Llama-8B with 8 rows takes 132.2 us
    instead of 140.0, with 16 rows 136.7 instead of 146.2; Qwen3-0.6B with 64 rows 42.0 instead of 43.7 (8 columns).

    >>> choose_tile(1, 1024, 2048), choose_tile(65, 1024, 2048)
    (Tile(kernel='one_row', columns=2, depth=1024, num_warps=4, num_stages=2), None)
    >>> choose_tile(8, 1024, 2048), choose_tile(8, 4096, 1024)
    (Tile(kernel='narrow', columns=8, depth=128, num_warps=4, num_stages=3), None)
    >>> choose_tile(8, 4096, 1024, has_norm=True)
    Tile(kernel='narrow', columns=32, depth=256, num_warps=4, num_stages=1)
    """
    if rows == 1:
        return _tile_of_one_row(columns, depth, has_norm=has_norm, is_gated=is_gated)
    if rows > MOST_ROWS:
        return None
    if has_norm or is_gated:
        return _tile_of_fused(rows, depth, is_gated=is_gated)
    is_narrow = columns <= 2048 or (columns <= 4096 and depth >= 4096 and rows <= 16)
    if is_narrow and depth % 512 == 0:
        return Tile("narrow", 8, 128, 4, 3) if columns <= 2048 and rows <= 16 else Tile("narrow", 16, 128, 4, 4)
    if rows > 32:
        return None
    if columns >= 16384:
        return Tile("some_rows", 64, 128, 4, 4)
    if columns == 4096 and depth == 4096:
        return Tile("some_rows", 32, 256, 4, 4)
    return None


def fits_chip(tile: Tile, rows: int, here: Chip, *, is_gated: bool = False) -> bool:
    """Whether a chip holds what a tile has under way, all stages but one: tiles were measured on one that holds much.

    >>> [fits_chip(Tile("narrow", 16, 128, 4, 4), 64, Chip(128, kib << 10)) for kib in (228, 164, 100)]
    [True, True, False]
    """
    if tile.kernel == "one_row":
        return True  # in registers
    most_rows, parts = (32, tile.num_warps) if tile.kernel == "narrow" else (64, 1)
    width = tile.columns * (2 if is_gated else 1) + min(max(_power_of_two(rows), 16), most_rows)
    return 2 * width * tile.depth * parts * max(tile.num_stages - 1, 1) < here.shared_bytes


def _tile_of_fused(rows: int, depth: int, *, is_gated: bool) -> Tile | None:
    """With a norm before it or a gate behind it; None if these are kernels of their own.

    A norm alone is not worth it with more than 8 rows (a layer of Qwen3-0.6B on an H200, 16 rows: 38.4 against 34.2
    us). Norms are part of narrow tiles alone: wider ones take longer with them than behind a kernel of their own (the
    same with 64 rows: 47.4 against 45.5 us; with cuBLAS 50.2; a layer of Llama-8B 152.0 against 159.3). A gate is part
    of few columns of a deep weight, too (a layer of Llama-8B, 8 rows: 130.8 against 132.2 us, 2 rows 125.4 and 126.4).
    """
    if rows <= _MOST_FUSED:
        if depth in (512, 1024):
            is_one_step = is_gated or rows <= 8
            return Tile("narrow", 16 if is_gated else 32, depth // 4, 4, 1) if is_one_step else None
        return Tile("some_rows", 32, 128, 4, 4) if is_gated and depth > 2048 else None
    if not is_gated:
        return Tile("some_rows", 64, 128, 4, 4)
    return Tile("some_rows", 32, 256, 4, 3) if depth <= 2048 else Tile("some_rows", 64, 128, 8, 3)


def _tile_of_one_row(columns: int, depth: int, *, has_norm: bool, is_gated: bool) -> Tile:
    """Measured in layers as they follow each other, not alone: what is read ahead is read while another kernel ends."""
    if columns >= 65536:  # a head: enough of a weight for each program, or there are too many of them
        return Tile("one_row", 8, 1024, 4, 1) if depth <= 1024 else Tile("one_row", 4, 2048, 4, 1)
    if not has_norm:
        return Tile("one_row", 2, 1024 if depth <= 3072 else 2048, 4, 2)
    if depth > 3072:
        return Tile("one_row", 2, 2048, 8, 2)
    return Tile("one_row", 4, 512 if is_gated else 1024, 4, 1)


def multiply(x: torch.Tensor, linear: Linear, *, early: bool = False) -> torch.Tensor:
    """What :func:`plain` computes, by the kernels that are best for the number of rows.

    Args:
        x: [..., depth].
        linear: what to compute.
        early: whether kernels begin early: see Note [Early launches].
    """
    depth = linear.weight.shape[1]
    rows = x.numel() // depth
    if (rows > MOST_ROWS and not linear.is_gated) or not _fits(x, linear):
        return plain(x, linear)
    flat = x.reshape(rows, depth)
    added = None if linear.residual is None else linear.residual.reshape(rows, -1)
    out = x.new_empty(rows, linear.num_columns)
    if rows == 1:
        _launch_one_row(flat, linear, added, out, early=early)
    elif (tiles := _tiles_of_many(flat, linear, early=early)) is not None:
        many_rows.launch(flat, linear.weight, out, tiles)
    else:
        _launch_rows(flat, linear, added, out, early=early)
    return out.view(*x.shape[:-1], linear.num_columns)


def launch_once(linear: Linear, rows: int, *, early: bool) -> None:
    """Launch the kernels of ours that :func:`multiply` would, on dummies; none of cuBLAS's."""
    depth = linear.weight.shape[1]
    x = linear.weight.new_zeros(rows, depth)
    if _tile(rows, linear) is not None or _tiles_of_many(x, linear, early=early) is not None:
        multiply(x, linear, early=early)
    elif rows <= MOST_ROWS or linear.is_gated:
        if linear.gain is not None:
            _normed(x, linear.gain, linear.eps, early=early)
        if linear.is_gated:
            _gate(x.new_zeros(rows, linear.weight.shape[0]), x.new_empty(rows, linear.num_columns), early=early)
        if _tile(rows, Linear(linear.weight)) is not None:
            multiply(x, Linear(linear.weight, linear.bias, residual=linear.residual), early=early)


def plain(x: torch.Tensor, linear: Linear) -> torch.Tensor:
    """A linear and what is around it."""
    if linear.gain is not None:
        x = _plain_norm(x, linear.gain, linear.eps)
    out = F.linear(x, linear.weight, linear.bias)
    if linear.is_gated:
        gate, up = out.chunk(2, -1)
        out = F.silu(gate) * up
    return out if linear.residual is None else linear.residual + out


def _plain_norm(x: torch.Tensor, gain: torch.Tensor, eps: float) -> torch.Tensor:
    """In float32, whatever the gain is in: models differ."""
    wide = x.float()
    return (gain * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps))).to(x.dtype)


def _fits(x: torch.Tensor, linear: Linear) -> bool:
    others = (linear.weight, linear.bias, linear.gain)
    return (
        x.is_cuda
        and x.dtype in (torch.bfloat16, torch.float16)
        and x.stride(-1) == 1
        and all(tensor.dtype == x.dtype and tensor.is_contiguous() for tensor in others if tensor is not None)
        and (linear.residual is None or (linear.residual.dtype == x.dtype and linear.residual.is_contiguous()))
    )


def _launch_rows(
    x: torch.Tensor, linear: Linear, added: torch.Tensor | None, out: torch.Tensor, *, early: bool
) -> None:
    """A norm and a gate are kernels of their own where there is much to read: each tile would compute them again."""
    tile = _tile(x.shape[0], linear)
    if tile is not None and tile.kernel == "narrow":
        _launch_narrow(x, linear, added, out, tile, early=early)
        return
    if linear.gain is not None:
        x = _normed(x, linear.gain, linear.eps, early=early)
    if tile is not None:
        launch_tiles(x, linear, added, out, tile, early=early)
    elif linear.is_gated:
        both = x.new_empty(x.shape[0], linear.weight.shape[0])
        _product(x, linear, None, both, early=early)
        _gate(both, out, early=early)
        if added is not None:
            out += added
    else:
        _product(x, linear, added, out, early=early)


def _tile(rows: int, linear: Linear) -> Tile | None:
    """For a linear with all that is around it; None if cuBLAS is as good, or the chip too small."""
    tile = choose_tile(
        rows,
        linear.num_columns,
        linear.weight.shape[1],
        has_norm=linear.gain is not None,
        is_gated=linear.is_gated,
    )
    here = chip(linear.weight.device)
    return tile if tile is not None and fits_chip(tile, rows, here, is_gated=linear.is_gated) else None


def _tiles_of_many(x: torch.Tensor, linear: Linear, *, early: bool) -> many_rows.Tiles | None:
    """For a linear with a gate and nothing else around it, in steps that launch nothing early, if there is a kernel."""
    others = (linear.bias, linear.gain, linear.residual)
    if early or not linear.is_gated or any(other is not None for other in others) or x.shape[0] <= _MOST_FUSED:
        return None
    return many_rows.tiles_for(x, linear.weight)


def _product(x: torch.Tensor, linear: Linear, added: torch.Tensor | None, out: torch.Tensor, *, early: bool) -> None:
    tile = _tile(out.shape[0], Linear(linear.weight))
    if tile is not None and tile.kernel == "narrow":
        _launch_narrow(x, Linear(linear.weight, linear.bias), added, out, tile, early=early)
        return
    if tile is not None:
        launch_tiles(x, Linear(linear.weight, linear.bias), added, out, tile, early=early)
        return
    if linear.bias is not None:
        torch.addmm(linear.bias, x, linear.weight.t(), out=out)
    else:
        torch.mm(x, linear.weight.t(), out=out)
    if added is not None:
        out += added


def _launch_one_row(
    x: torch.Tensor, linear: Linear, added: torch.Tensor | None, out: torch.Tensor, *, early: bool
) -> None:
    from piecegraph.llm.kernels import skinny_kernels

    columns, tile = linear.num_columns, _tile(1, linear)
    assert tile is not None
    skinny_kernels.one_row_kernel[(-(-columns // tile.columns),)](
        x,
        linear.weight,
        linear.bias,
        linear.gain,
        added,
        out,
        columns,
        linear.eps,
        AHEAD=tile.num_stages,
        HAS_NORM=linear.gain is not None,
        HAS_RESIDUAL=added is not None,
        IS_GATED=linear.is_gated,
        **chained_constants(x.device, 1, is_wanted=early),
        **_constants(linear.weight, linear.bias, tile),
    )


def _launch_narrow(
    x: torch.Tensor, linear: Linear, added: torch.Tensor | None, out: torch.Tensor, tile: Tile, *, early: bool
) -> None:
    from piecegraph.llm.kernels import skinny_kernels

    (rows, columns), weight, gain = out.shape, linear.weight, linear.gain
    is_small = weight.nbytes <= _SMALL_WEIGHT and weight.shape[1] % 1024 == 0
    block_m = 16 if rows <= 16 else 32
    skinny_kernels.narrow_kernel[(-(-columns // tile.columns), -(-rows // block_m))](
        x,
        weight,
        linear.bias,
        gain,
        added,
        out,
        rows,
        columns,
        linear.eps,
        x.stride(0),
        0 if added is None else added.stride(0),
        out.stride(0),
        BLOCK_M=block_m,
        PARTS=tile.num_warps,
        NUM_STAGES=tile.num_stages,
        HAS_NORM=gain is not None,
        HAS_RESIDUAL=added is not None,
        IS_GATED=linear.is_gated,
        PREFETCHES=is_small,
        **chained_constants(x.device, rows, is_wanted=early),
        **_constants(weight, linear.bias, tile),
    )


def launch_tiles(
    x: torch.Tensor,
    linear: Linear,
    added: torch.Tensor | None,
    out: torch.Tensor,
    tile: Tile,
    *,
    early: bool = False,
    block_m: int | None = None,
) -> None:
    """A linear in tiles of columns and of rows, in which a row does not see the others; its norm is not computed.

    Args:
        x: [rows, depth].
        linear: what to compute.
        added: its residual, [rows, columns].
        out: [rows, columns], written to.
        tile: of one of the kernels for some rows.
        early: whether it begins early.
        block_m: rows of a tile; None for what there are.
    """
    from piecegraph.llm.kernels import skinny_kernels

    rows, columns = out.shape
    block_m = block_m or min(max(_power_of_two(rows), 16), 64)
    skinny_kernels.some_rows_kernel[(-(-columns // tile.columns), -(-rows // block_m))](
        x,
        linear.weight,
        linear.bias,
        added,
        out,
        rows,
        columns,
        x.stride(0),
        0 if added is None else added.stride(0),
        out.stride(0),
        BLOCK_M=block_m,
        HAS_RESIDUAL=added is not None,
        IS_GATED=linear.is_gated,
        NUM_STAGES=tile.num_stages,
        **chained_constants(x.device, rows, is_wanted=early),
        **_constants(linear.weight, linear.bias, tile),
    )


def _constants(weight: torch.Tensor, bias: torch.Tensor | None, tile: Tile) -> dict[str, Any]:
    return {
        "K": weight.shape[1],
        "BLOCK_N": tile.columns,
        "BLOCK_K": tile.depth,
        "HAS_BIAS": bias is not None,
        "num_warps": tile.num_warps,
    }


def _normed(x: torch.Tensor, gain: torch.Tensor, eps: float, *, early: bool) -> torch.Tensor:
    from piecegraph.llm.kernels import skinny_kernels

    rows, width = x.shape
    out = x.new_empty(rows, width)
    skinny_kernels.norm_kernel[(rows,)](
        x,
        gain,
        out,
        x.stride(0),
        out.stride(0),
        eps,
        WIDTH=width,
        BLOCK=_power_of_two(width),
        num_warps=8 if width >= 4096 else 4,
        **chained_constants(x.device, rows, is_wanted=early),
    )
    return out


def _gate(both: torch.Tensor, out: torch.Tensor, *, early: bool) -> None:
    from piecegraph.llm.kernels import skinny_kernels

    rows, columns = out.shape
    skinny_kernels.gate_kernel[(rows, -(-columns // _GATE_BLOCK))](
        both,
        out,
        columns,
        both.stride(0),
        out.stride(0),
        BLOCK=_GATE_BLOCK,
        num_warps=4,
        **chained_constants(both.device, rows, is_wanted=early),
    )


@dataclass(frozen=True, slots=True)
class Heads:
    """What is done to queries, keys and values on their way from the linears to attention."""

    cos: torch.Tensor
    """[..., tokens, width of a head], as ``sin``."""
    sin: torch.Tensor
    q_gain: torch.Tensor | None = None
    """Of the norm of each head, before it is turned; keys have one if queries have. None if there is none."""
    k_gain: torch.Tensor | None = None
    eps: float = 0.0


def rotate(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: Heads) -> Sequence[torch.Tensor]:
    """Queries, keys and values as attention takes them, [tokens, heads, width], of rows with heads side by side."""
    width, tokens = heads.cos.shape[-1], q.numel() // q.shape[-1]
    rows = [tensor.reshape(tokens, -1) for tensor in (q, k, v)]
    if not fits_heads(rows, heads):
        return plain_rotate(q, k, v, heads)
    from piecegraph.llm.kernels import skinny_kernels

    num_q, num_k, num_v = (tensor.shape[1] // width for tensor in rows)
    outs = [tensor.new_empty(tokens, tensor.shape[1] // width, width) for tensor in rows]
    skinny_kernels.heads_kernel[(tokens, num_q + num_k + num_v)](
        *rows,
        heads.q_gain,
        heads.k_gain,
        heads.cos,
        heads.sin,
        *outs,
        *(tensor.stride(0) for tensor in rows),
        width,
        heads.eps,
        WIDTH=width,
        Q_HEADS=num_q,
        K_HEADS=num_k,
        HAS_NORM=heads.q_gain is not None,
        num_warps=1,
        **chained_constants(q.device, tokens, is_wanted=tokens <= MOST_ROWS),
    )
    return outs


def plain_rotate(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: Heads) -> Sequence[torch.Tensor]:
    """See :func:`rotate`."""
    width, tokens = heads.cos.shape[-1], q.numel() // q.shape[-1]
    cos, sin = (turn.reshape(tokens, 1, width) for turn in (heads.cos, heads.sin))
    found = []
    for rows, gain in ((q, heads.q_gain), (k, heads.k_gain)):
        x = rows.reshape(tokens, -1, width)
        x = x if gain is None else _plain_norm(x, gain, heads.eps)
        first, second = x.chunk(2, -1)
        found.append(x * cos + torch.cat((-second, first), -1) * sin)
    return (*found, v.reshape(tokens, -1, width).contiguous())


def fits_heads(rows: Sequence[torch.Tensor], heads: Heads) -> bool:
    """Whether kernels can turn them: rows of queries, keys and values as :func:`rotate` takes them."""
    q = rows[0]
    width = heads.cos.shape[-1]
    given = (heads.cos, heads.sin, heads.q_gain, heads.k_gain)
    return (
        q.is_cuda
        and q.dtype in (torch.bfloat16, torch.float16)
        and _power_of_two(width) == width
        and rows[1].shape == rows[2].shape
        and all(tensor.dtype == q.dtype and tensor.stride(-1) == 1 for tensor in rows)
        and all(tensor.dtype == q.dtype and tensor.is_contiguous() for tensor in given if tensor is not None)
    )


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()
