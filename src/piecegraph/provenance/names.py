"""Names as tables show them: of kernels, and of modules with their layers folded.

A kernel's name has three levels: whole, short (what tables show), and family (what groups are mined by). Whole is what
the driver tells, demangled. Short leaves out the return type, the parameters and the template arguments, unless the
name that matters is one of these. Family also leaves out what a library chooses for each shape: tiles, transposes,
numbers that change from one compile to the next.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator

_COPIES = ("Memset", "Memcpy")
"""How profilers begin the names of what is no kernel: ``Memcpy HtoD (Pageable -> Device)``."""

_UNNAMED = re.compile(r"(\(anonymous namespace\)|<unnamed>|\{anonymous\})::")
_CONDITIONAL_RETURN = re.compile(r"^(?:typename )?std::enable_if.*?>::type\s+")
"""Profilers write its condition with brackets that do not match."""
_VERSIONED = re.compile(r"\b(?:CUB_\w+_NS|THRUST_\w+_NS|at_cuda_detail)::|(?<=thrust)::_V_\w+")
_DROPPED_SPACES = ("at::native::", "at::cuda::")
_CLONE = re.compile(r"( \[clone [^\]]*\]|\.kd)$")

_WRAPPER = re.compile(r"(cutlass::(device_kernel|Kernel2?)|(.*::)?(enable_sm\w+|_kernel_agent))$")
"""Kernels that only call their first argument."""

_CLOSED_BY = {">": "<", ")": "(", "]": "[", "}": "{"}
_PLAIN_TYPES = frozenset({"float", "double", "int", "long", "bool", "char", "Half", "BFloat16"})
_TAKES_FUNCTOR = re.compile(r"elementwise|(?<![a-zA-Z])reduce_kernel$|multi_tensor_apply")
_FUNCTOR = re.compile(r"functor|ops$|_kernel|_cuda|_impl$|_out$|^launch_", re.IGNORECASE)
_CARRIES_FUNCTOR = re.compile(
    r"gpu_kernel|gpu_index_kernel|func_wrapper|opmath_(symmetric_)?gpu_kernel|[AB]?UnaryFunctor$|BinaryFunctor$"
    r"|launch_(legacy|vectorized|unrolled)|binary_internal|TensorListMetadata|(elementwise|nullary|unary)_kernel$"
)
"""Names inside the arguments that lead to the functor, and are none."""

_TILE = re.compile(r"_(?:(?:tilesize)?\d+x\d+(?:x\d+)?|knob_\d+)(?=_|$)")
_LIBRARY_GEMM = re.compile(r"(sm\d+_|ampere_|volta_|turing_|hopper_|maxwell_|cutlass\d?x?_|cudnn_|fmha_cutlass)")
_SPLIT_K = re.compile(r"split_?k(?!reduce)", re.IGNORECASE)
_NVJET_CHOICE = re.compile(r"\d+(x\d+)*|[vh]|[NT]{2,4}|[bc]z|coop[AB]*|tma[AB]*")
_INDUCTOR = re.compile(r"(triton_[a-z]{2,4}_fused(?:_.*)?|triton_(?:mm|bmm|mm_plus_mm)|cpp_fused(?:_.*)?)_\d+")


@functools.lru_cache(maxsize=65536)
def short(name: str) -> str:
    """What a table shows.

    >>> short("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, Arrays>(int)")
    'vectorized_elementwise_kernel[CUDAFunctor_add]'
    >>> short("void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90<Mainloop<2>, 128> > >(Params)")
    'flash::FlashAttnFwdSm90'
    >>> short("void cublasLt::splitKreduce_kernel<32, 16, int, float>(cublasLt::cublasSplitKParams<float>, float*)")
    'cublasLt::splitKreduce_kernel'
    >>> short("_paged_decode_kernel")
    '_paged_decode_kernel'
    """
    if name.startswith(_COPIES):
        return name
    if name.startswith("_Z"):
        return "::".join(_mangled_path(name)) or name
    name = _CLONE.sub("", name)
    if "(" not in name and "<" not in name:
        return name
    cleaned = _CONDITIONAL_RETURN.sub("", _VERSIONED.sub("", _UNNAMED.sub("", name)))
    path, arguments = _split(cleaned)
    path = path.rpartition(" ")[2]
    if not path:
        return name
    if _WRAPPER.match(path) and arguments:
        return short(arguments[0])
    return _named(path, arguments)


@functools.lru_cache(maxsize=65536)
def family(name: str) -> str:
    """What stays the same when a library chooses another variant for another shape.

    >>> family("nvjet_sm90_tst_64x16_64x16_2x1_v_bz_splitK_TNT")
    'nvjet_sm90_tst_splitK'
    >>> family("triton_poi_fused_add_mul_0")
    'triton_poi_fused_add_mul'
    >>> family("ampere_bf16_s16816gemm_bf16_64x64_sliced1x2_ldg8_f2f_stages_64x5_tn")
    'ampere_bf16_s16816gemm_bf16'
    """
    name = short(name)
    if name.startswith(_COPIES):
        return name.partition(" (")[0]
    if name.startswith("nvjet_"):
        return "_".join(part for part in name.split("_") if not _NVJET_CHOICE.fullmatch(part))
    if name.startswith("Cijk_"):
        return name.partition("_MT")[0]
    if compiled := _INDUCTOR.fullmatch(name):
        return compiled[1]
    if _LIBRARY_GEMM.match(name):
        return _without_tiles(name)
    return name


def _mangled_path(name: str) -> Iterator[str]:
    """The parts of a name that torch could not demangle, as far as they are spelled out."""
    at = 3 if name.startswith("_ZN") else 2
    while length := re.match(r"\d+", name[at:]):
        at += length.end()
        part = name[at : at + int(length[0])]
        at += int(length[0])
        if not part.startswith(("_GLOBAL__N", "_INTERNAL_")):
            yield part


def _split(name: str) -> tuple[str, list[str]]:
    """What stands outside of all brackets before the parameters, and the last template arguments there.

    >>> _split("void a::b<X<(A)1, 2>, f(int)::{lambda(int)#1}>(int)")
    ('void a::b', ['X<(A)1, 2>', 'f(int)::{lambda(int)#1}'])
    """
    path = ""
    arguments = [""]
    for char, depth in _depths(name):
        if depth == 1 and char == "(":
            break
        if depth == 0:
            path += char
        elif depth == 1 and char == "<":
            arguments = [""]
        elif depth == 1 and char == ",":
            arguments.append("")
        elif not (depth == 1 and char == ">"):
            arguments[-1] += char
    return path.strip(), [argument.strip() for argument in arguments if argument.strip()]


def _depths(text: str) -> Iterator[tuple[str, int]]:
    """Every character with how many brackets are open there; a bracket counts itself."""
    opened: list[str] = []
    before = ""
    for char in text:
        depth = len(opened)
        if char in _CLOSED_BY.values():
            opened.append(char)
            depth += 1
        # A bracket inside others may be no bracket at all, as in `(a > b)` and `->`: it closes only its own kind.
        elif _CLOSED_BY.get(char) in opened and (char != ">" or (opened[-1] == "<" and before != "-")):
            depth = len(opened) - opened[::-1].index(_CLOSED_BY[char])
            del opened[depth - 1 :]
        yield char, depth
        before = char


def _named(path: str, arguments: list[str]) -> str:
    last = path.rpartition("::")[2]
    if _TAKES_FUNCTOR.search(last):
        functor = _functor(arguments)
        return f"{last}[{functor}]" if functor else last
    if path.startswith("cub::"):
        return f"cub::{last}"
    for space in _DROPPED_SPACES:
        path = path.removeprefix(space)
    return path


def _functor(arguments: list[str]) -> str:
    """What an elementwise kernel computes: the first name among its arguments that looks like a function."""
    for word in re.findall(r"[A-Za-z_]\w*", " ".join(arguments)):
        if _FUNCTOR.search(word) and not _CARRIES_FUNCTOR.search(word):
            return str(word)
    types = (_split(argument)[0].rpartition("::")[2] for argument in arguments)
    return next((name for name in types if name and not name[0].isdigit() and name not in _PLAIN_TYPES), "")


def _without_tiles(name: str) -> str:
    tile = _TILE.search(name)
    if tile is None:
        return name
    head = re.sub(r"(_[nt]{1,3})+$", "", name[: tile.start()])
    return f"{head}_splitK" if _SPLIT_K.search(name, tile.start()) else head


def fold_layers(module: str) -> str:
    """A module's path without numbers.

    >>> fold_layers("model.layers.3.mlp.experts.17.up")
    'model.layers.*.mlp.experts.*.up'
    """
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", module)
