"""Inductor: compiling a graph, the source it generates, the folder it keeps things in, its settings."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import importlib.util
import json
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.fx


def is_compiler(module: str) -> bool:
    """Whether a module is part of what torch traces and compiles with."""
    return module.startswith(("torch._dynamo", "torch._functorch", "torch._inductor"))


def import_inductor() -> None:
    """Import what compiles, and what loads compiled code: it takes seconds, of whoever comes first."""
    is_new = "torch._inductor.select_algorithm" not in sys.modules  # which has the templates
    with _templates_compiled_late() if is_new else contextlib.nullcontext():
        importlib.import_module("torch._inductor.compile_fx")


@contextlib.contextmanager
def _templates_compiled_late() -> Iterator[None]:
    """Inside, Inductor's templates of kernels are read, and compiled when one of them is first used.

    They are some twenty, take a third of the time of Inductor's import, and few graphs use any.
    """
    kinds: Any = importlib.import_module("torch._inductor.codegen.common").KernelTemplate
    original = vars(kinds)["_template_from_string"]
    kinds._template_from_string = staticmethod(lambda source: _LateTemplate(original.__func__, source))
    try:
        yield
    finally:
        kinds._template_from_string = original


class _LateTemplate:
    """A template that is compiled when something of it is asked for."""

    def __init__(self, compile_source: Callable[[str], Any], source: str) -> None:
        self._make = functools.cache(functools.partial(compile_source, source))

    def __getattr__(self, name: str) -> Any:
        if name == "_make":  # of a copy that is being made
            raise AttributeError(name)
        return getattr(self._make(), name)


@functools.cache
def hash_triton() -> threading.Thread | None:
    """Have Triton hash its own files, which are part of keys of Inductor's, while something else runs.

    They are 400 MB, and a second in which Python is free. Who asks before the hash is there begins anew, so what
    compiles waits for it. To load what was compiled for a CPU nobody asks. None if there is no Triton.
    """
    from torch._inductor.runtime.triton_compat import HAS_TRITON, triton_key

    return _begin_hash(triton_key) if HAS_TRITON else None


@functools.cache
def hash_torch() -> threading.Thread:
    """Likewise torch its own, which are 2,300 and take half as long. Imports Inductor."""
    from torch._inductor.codecache import torch_key

    return _begin_hash(torch_key)


def _begin_hash(compute: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=compute, name="piecegraph hash", daemon=True)
    thread.start()
    return thread


def wait_for_hashes() -> None:
    """Before something asks for them: several threads that do would compute them several times."""
    for thread in (hash_triton(), hash_torch()):
        if thread is not None:
            thread.join()


@dataclass(frozen=True, slots=True)
class CompiledSource:
    """The Python that Inductor generated for a graph: allocations, and one launch after the other."""

    file: str
    """The ``co_filename`` of the frames that run it."""
    code: str
    provenance: str | None
    """Inductor's map of kernels to graph nodes, as JSON; None unless asked for."""


PlaceSource = Callable[[str], str | None]
"""Puts generated source into a file and returns its name; None if it cannot."""


@dataclass(frozen=True, slots=True)
class CompiledGraph:
    """What Inductor made of a graph."""

    function: Callable[..., Any]
    source: CompiledSource | None
    """None where Inductor generated no Python."""
    artifact: str | None = None
    """What :func:`load_compiled` finds it by; None if Inductor keeps nothing of it."""


def inductor_compile(
    graph_module: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    fake_mode: Any,
    settings: Mapping[str, Any],
    *,
    provenance: bool = False,
    place: PlaceSource | None = None,
) -> CompiledGraph:
    """Compile a graph for the symbolic sizes of its fake inputs. The graph must return a tuple.

    With ``provenance``, the generated source comes with Inductor's map of kernels to graph nodes, and is sure to have
    been generated for a graph whose nodes have the same names. With ``place``, what runs is loaded from the file that
    the source is put into.
    """
    from torch._guards import TracingContext, tracing
    from torch._inductor import standalone_compile

    wait_for_hashes()
    patches, salted = dict(settings), contextlib.nullcontext()
    if provenance:
        patches["trace.provenance_tracking_level"] = 1
        patches["cpp.enable_kernel_profile"] = True  # kernels of a CPU are seen by profilers, as those of a GPU are
        salted = _salted_cache(graph_module)
    with torch.no_grad(), tracing(TracingContext(fake_mode)), salted, _generated_sources(place) as sources:
        function = standalone_compile(
            graph_module,
            list(example_inputs),
            dynamic_shapes="from_tracing_context",
            options={"config_patches": patches},
        )
    return CompiledGraph(function, sources[-1] if sources else None, _artifact_of(function))


def warm_up_inductor(device: torch.device) -> None:
    """Have all that Inductor does once for a GPU done: a driver, tables of patterns, modules that are imported late."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    if device.type != "cuda":
        return
    graph, mode = torch.fx.Graph(), FakeTensorMode()
    x = graph.placeholder("x")
    graph.output((graph.call_function(torch.relu, (graph.call_function(torch.mm, (x, x)),)),))
    with mode:
        example = torch.empty(64, 64, device=device, dtype=torch.bfloat16)
    inductor_compile(torch.fx.GraphModule(torch.nn.Module(), graph), [example], mode, {"force_disable_caches": True})


def _artifact_of(compiled: Any) -> str | None:
    """The name of a compiled graph in Inductor's cache. A graph of several, or none, cannot be loaded again."""
    if compiled._artifacts is None or not compiled.is_saveable():
        return None
    name: str = compiled._artifacts[1].aot_autograd_artifacts[0]
    return name


def _salted_cache(graph_module: torch.fx.GraphModule) -> Any:
    """Entries of Inductor's caches that are for graphs with these node names only, and compiled with provenance.

    The key of a cached graph is taken after node names were replaced: source compiled for ``x.view`` serves
    ``x.reshape``, and its comments name a node that is not there. On torch 2.11 the level of provenance is not part of
    the key either.
    """
    names = " ".join(node.name for node in graph_module.graph.nodes)
    salt = f"piecegraph provenance {hashlib.sha256(names.encode()).hexdigest()[:16]}"
    config = torch.compiler.config
    return config.patch(cache_key_tag=f"{config.cache_key_tag} {salt}".strip())  # type: ignore[attr-defined]


_watching_sources = threading.RLock()
"""Held while Inductor's class is patched, so that two threads do not undo each other's patch."""


@contextlib.contextmanager
def _generated_sources(place: PlaceSource | None) -> Iterator[list[CompiledSource]]:
    """Collects the source of what is compiled, or loaded from a cache, inside.

    ``post_compile`` runs last in both cases. It may put other callables around the generated function, so that is
    looked at first.
    """
    from torch._inductor.output_code import CompiledFxGraph

    found: list[CompiledSource] = []
    original = CompiledFxGraph.post_compile

    def post_compile(graph: Any, example_inputs: Any, constants: Any, *args: Any, **kwargs: Any) -> None:
        text = getattr(graph, "source_code", None)
        file = place(text) if place is not None and text else None
        if file is not None:
            _load_source(graph, file, constants)
        code = getattr(graph.current_callable, "__code__", None)
        if code is not None and text:
            provenance = getattr(graph, "inductor_provenance_mapping_str", None)
            found.append(CompiledSource(code.co_filename, text, provenance))
        original(graph, example_inputs, constants, *args, **kwargs)

    with _watching_sources:
        CompiledFxGraph.post_compile = post_compile  # type: ignore[method-assign,assignment]
        try:
            yield found
        finally:
            CompiledFxGraph.post_compile = original  # type: ignore[method-assign]


def _load_source(graph: Any, file: str, constants: Any) -> None:
    """Let a compiled graph run what a file holds, as torch 2.11 to 2.13 do with a file of their cache."""
    from torch._inductor.codecache import PyCodeCache

    loaded = PyCodeCache.load_by_key_path(graph.cache_key, file, graph.cache_linemap, constants.unwrap(graph))
    graph.current_callable = loaded.call
    graph.recursively_apply_fns = getattr(loaded, "recursively_apply_fns", None)
    graph.compiled_fn_runner = getattr(loaded, "runner", None)


_in_folder = threading.RLock()
"""Held while compilers write to a folder of ours, which is a matter of the whole process."""


@contextlib.contextmanager
def compiler_folder(folder: str) -> Iterator[None]:
    """Inside, Inductor and Triton keep all that they write, and find what they look for, in a folder.

    torch 2.11 to 2.13: both read the environment at every use; Inductor's caches in memory go by paths in the folder.
    All kernels are assembled by Triton's own ptxas there. Inductor would have that of torch in some processes, and its
    version is part of the name of a kernel: what one process has compiled, another would not find.
    """
    with _in_folder:
        places = {
            "TORCHINDUCTOR_CACHE_DIR": folder,
            "TRITON_CACHE_DIR": os.path.join(folder, "triton"),
            **_assembler(os.environ.get(_PTXAS)),
        }
        before = {name: os.environ.get(name) for name in places}
        if before == places:
            yield
            return
        os.environ.update(places)
        _forget_places(had_other_ptxas=bool(before.get(_PTXAS)))
        try:
            yield
        finally:
            for name, place in before.items():
                if place is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = place
            _forget_places(had_other_ptxas=bool(before.get(_PTXAS)))


def _assembler(chosen: str | None) -> dict[str, str]:
    """The setting of Triton's own, unless the user has chosen another: a path in torch is Inductor's choice."""
    is_asked_for = chosen is not None and not chosen.startswith(_TORCH_FOLDER)
    ours = None if is_asked_for else _assembler_of_triton()
    return {} if ours is None else {_PTXAS: ours}


@functools.cache
def _assembler_of_triton() -> str | None:
    """None if there is no Triton, or it has none for NVIDIA's GPUs."""
    found = importlib.util.find_spec("triton")
    folders = (found.submodule_search_locations or ()) if found is not None else ()
    paths = (os.path.join(folder, "backends", "nvidia", "bin", "ptxas") for folder in folders)
    return next(filter(os.path.exists, paths), None)


def compiler_places() -> dict[str, str]:
    """Where compilers write and find things now."""
    return {name: os.environ[name] for name in _SETTINGS_OF_PLACES if name in os.environ}


def use_compiler_places(places: Mapping[str, str]) -> None:
    """Have the compilers of this process write and find things where those of another do, from now on."""
    if compiler_places() != places:
        for name in _SETTINGS_OF_PLACES:
            os.environ.pop(name, None)
        os.environ.update(places)
        _forget_places(had_other_ptxas=True)


def settle_kernels(folder: str) -> None:
    """Make Triton find the kernels in a :func:`compiler_folder` that was copied here from elsewhere.

    Triton 3.6 and 3.7: which files a kernel consists of is written beside them, with whole paths; those that are not
    there are not missed but compiled.
    """
    for listing in Path(folder, "triton").glob("*/__grp__*"):
        children = json.loads(listing.read_text())["child_paths"]
        here = {name: str(listing.parent / Path(path).name) for name, path in children.items()}
        listing.write_text(json.dumps({"child_paths": here}))


def _forget_places(*, had_other_ptxas: bool) -> None:
    """Make Inductor forget in which files things are, and Triton the version of the ptxas it had until now.

    Importing them takes seconds, and is for those who need it.
    """
    utils: Any = sys.modules.get("torch._inductor.utils")
    if utils is not None:
        utils.clear_caches()
    backend: Any = sys.modules.get("triton.backends.nvidia.compiler")
    if backend is not None and had_other_ptxas:
        backend.get_ptxas_version.cache_clear()


def choose_vector_units() -> None:
    """Have Inductor find out, once for all processes, for which vector units of the CPU it can compile.

    It compiles a test for that, which would otherwise be compiled again in every :func:`compiler_folder`.
    """
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    bool(pick_vec_isa())  # asking is what compiles


def load_compiled(artifact: str) -> CompiledGraph:
    """What :func:`inductor_compile` made, from the :func:`compiler_folder` that it was made in. Nothing is compiled.

    Not by ``CompiledArtifact.load``, which takes a folder for each graph, and spends a third of a second on a hash of
    torch's own files.
    """
    import torch._inductor.config
    from torch._inductor.standalone_compile import CacheCompiledArtifact

    if hash_torch.cache_info().currsize:
        wait_for_hashes()  # kernels of Triton are asked for by them
    # With one thread no worker processes are started, for nothing.
    settings = torch._inductor.config.patch({"cpp.vec_isa_ok": True, "compile_threads": 1})  # type: ignore[attr-defined]
    with torch.no_grad(), settings, _generated_sources(None) as sources, _without_trials(), _settled_tuning():
        function = CacheCompiledArtifact._load_impl(contextlib.nullcontext(), artifact)
    return CompiledGraph(function, sources[-1] if sources else None)


@contextlib.contextmanager
def _without_trials() -> Iterator[None]:
    """Inside, Inductor compiles nothing before it looks whether there is something to compile: no headers of kernels,
    and no tests of what the CPU has. That kernels were compiled shows that they can be; of VNNI and AMX, Inductor does
    not take the word of ``cpp.vec_isa_ok`` for it.
    """
    from torch._inductor import codecache
    from torch._inductor.cpu_vec_isa import VecISA

    header, check = codecache._precompile_header, VecISA.check_build
    codecache._precompile_header = lambda header, *args, **kwargs: ""  # type: ignore[assignment]
    VecISA.check_build = lambda self, code: True  # type: ignore[method-assign]
    try:
        yield
    finally:
        codecache._precompile_header = header
        VecISA.check_build = check  # type: ignore[method-assign]


@contextlib.contextmanager
def _settled_tuning() -> Iterator[None]:
    """Inside, kernels that are loaded look for what they were tuned to in the :func:`compiler_folder` of now.

    They are kept before they are tuned, with the path of the file that they were made in; what they were tuned to is
    in a file beside that. From a copy of the folder it would not be found: they would be tuned again, and write what
    they find to where the folder had been.
    """
    from torch._inductor.triton_bundler import TritonBundler

    original = vars(TritonBundler)["load_autotuners"]  # as it is, to be put back

    def load(cls: Any, autotuners: Any) -> Any:
        for autotuner in autotuners or ():
            _settle_tuner(autotuner.kernel)
        return original.__func__(cls, autotuners)

    TritonBundler.load_autotuners = classmethod(load)  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        TritonBundler.load_autotuners = original  # type: ignore[method-assign]


def _settle_tuner(kernel: Any) -> None:
    """See :func:`_settled_tuning`. Files of Inductor's are known by their names and those of their folders."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    if kernel.filename is None:
        return
    here = Path(cache_dir(), *Path(kernel.filename).parts[-2:])
    kernel.filename = str(here)
    tuned = getattr(kernel.save_cache_hook, "__self__", None)
    if tuned is not None and tuned.local_cache is not None:
        cache, path = tuned.local_cache
        tuned.local_cache = cache, str(here.parent / Path(path).name)


def compiler_settings() -> dict[str, str]:
    """Every setting of torch that changes what is traced or compiled and is not as torch is delivered, as text."""
    found: dict[str, str] = {}
    for name in ("torch._dynamo.config", "torch._functorch.config", "torch._inductor.config"):
        config: Any = sys.modules.get(name)  # nobody has changed one that is not imported
        for setting, value in config._get_dict(skip_default=True).items() if config is not None else ():
            if value != config._config[setting].default:  # it may have been changed, and changed back
                found[f"{name.removeprefix('torch.')}.{setting}"] = _setting_text(value)
    # What the environment says is part of their defaults.
    found |= {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(("TORCHINDUCTOR_", "TORCHDYNAMO_", "TORCH_COMPILE", "TRITON_"))
        and name not in _PLACES
        and not value.startswith(_TORCH_FOLDER)  # Inductor itself sets TRITON_PTXAS_PATH to what comes with torch
        and value != _assembler_of_triton()  # and so do we, to what comes with Triton
    }
    backends = torch.backends
    return found | {
        "default dtype": str(torch.get_default_dtype()),
        "float32 matmul precision": torch.get_float32_matmul_precision(),
        "deterministic algorithms": str(torch.are_deterministic_algorithms_enabled()),
        "cudnn": f"{backends.cudnn.enabled} {backends.cudnn.deterministic} {backends.cudnn.allow_tf32}",
    }


def _setting_text(value: Any) -> str:
    parts = sorted(map(repr, value)) if isinstance(value, (set, frozenset)) else value
    return re.sub(r" at 0x[0-9a-f]+", "", repr(parts))


_PTXAS = "TRITON_PTXAS_PATH"
_TORCH_FOLDER = os.path.dirname(torch.__file__) + os.sep
_SETTINGS_OF_PLACES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", _PTXAS)
_PLACES = frozenset({"TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_COMPILE_THREADS"})
"""Variables that say where and how fast, not what."""


def no_silent_eager() -> contextlib.AbstractContextManager[None]:
    """Have ``torch.compile`` compile for many sizes, and raise where it would give up and run eagerly."""
    import torch._dynamo

    settings: contextlib.AbstractContextManager[None] = torch._dynamo.config.patch(  # type: ignore[attr-defined]
        recompile_limit=64, fail_on_recompile_limit_hit=True
    )
    return settings


def num_skipped_cudagraphs() -> int:
    """How many graphs ``mode="reduce-overhead"`` has left out until now: such code is launched kernel by kernel."""
    from torch._dynamo.utils import counters

    return int(counters["inductor"]["cudagraph_skips"])
