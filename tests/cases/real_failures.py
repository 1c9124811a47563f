"""Failures that this machine really produces, each with the known issue that explains it."""

from __future__ import annotations

import asyncio
import ctypes
import datetime
import json
import multiprocessing
import multiprocessing.spawn
import resource
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

Failing = Callable[[Path], object]
"""Takes an empty folder and raises."""
REAL: list[tuple[str, Failing]] = []


def explained_by(name: str, *, happens_here: bool = True) -> Callable[[Failing], Failing]:
    def remember(failing: Failing) -> Failing:
        if happens_here:
            REAL.append((name, failing))
        return failing

    return remember


def compiled(function: Callable[..., Any], backend: Any = "eager", **options: Any) -> Callable[..., Any]:
    torch.compiler.reset()
    return torch.compile(function, backend=backend, **options)


@contextmanager
def taken_port() -> Iterator[int]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield taken.getsockname()[1]


@explained_by("dynamo-graph-break")
def print_while_tracing(folder: Path) -> None:
    def shout(x: torch.Tensor) -> torch.Tensor:
        print("x")
        return x + 1

    compiled(shout, fullgraph=True)(torch.ones(2))


@explained_by("dynamo-data-dependent")
def branch_on_data(folder: Path) -> None:
    compiled(lambda x: x if x.sum() > 0 else -x, fullgraph=True)(torch.ones(2))


@explained_by("dynamo-data-dependent")
def export_a_branch_on_a_number(folder: Path) -> None:
    class Branch(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1 if x.item() > 3 else x - 1

    torch.export.export(Branch(), (torch.tensor(4),), strict=False)


@explained_by("dynamo-recompile-limit")
def too_many_sizes(folder: Path) -> None:
    with torch._dynamo.config.patch(recompile_limit=1):
        double = compiled(lambda x: x * 2, fullgraph=True, dynamic=False)
        for size in range(2, 6):
            double(torch.ones(size))


@explained_by("dynamo-constraint-violated")
def dynamic_yet_fixed(folder: Path) -> None:
    x = torch.ones(3, 4)
    torch._dynamo.mark_dynamic(x, 0)
    compiled(lambda x: x.view(3, 4) + 1, fullgraph=True)(x)


@explained_by("backend-compiler-failed")
def failing_backend(folder: Path) -> None:
    def backend(module: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        raise KeyError("no lowering")

    compiled(lambda x: x + 1, backend=backend)(torch.ones(2))


@explained_by("c-compiler-missing")
def no_cxx(folder: Path) -> None:
    from torch._inductor.cpp_builder import cpp_compiler_search

    cpp_compiler_search(("/nowhere/g++",))


@explained_by("nvcc-missing")
def no_cuda_home(folder: Path) -> None:
    from torch.utils import cpp_extension

    previous, cpp_extension.CUDA_HOME = cpp_extension.CUDA_HOME, None
    try:
        cpp_extension._join_cuda_home("bin", "nvcc")
    finally:
        cpp_extension.CUDA_HOME = previous


@explained_by("torch-without-cuda", happens_here=torch.version.cuda is None)
def cuda_on_a_cpu_build(folder: Path) -> None:
    torch.ones(1).to("cuda")


@explained_by("port-in-use")
def store_on_a_taken_port(folder: Path) -> None:
    with taken_port() as port:
        torch.distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)


@explained_by("port-in-use")
def server_on_a_taken_port(folder: Path) -> None:
    with taken_port() as port:
        asyncio.run(asyncio.start_server(lambda reader, writer: None, "127.0.0.1", port))


@explained_by("rendezvous-timeout")
def alone_at_the_meeting_point(folder: Path) -> None:
    torch.distributed.TCPStore("127.0.0.1", 0, 2, is_master=True, timeout=datetime.timedelta(seconds=1))


@explained_by("master-unreachable")
def nobody_at_the_meeting_point(folder: Path) -> None:
    torch.distributed.TCPStore("127.0.0.1", 1, 2, is_master=False, timeout=datetime.timedelta(seconds=1))


@explained_by("weight-shape-mismatch")
def other_shape(folder: Path) -> None:
    nn.Linear(2, 3).load_state_dict(nn.Linear(4, 3).state_dict())


@explained_by("state-dict-keys")
def other_names(folder: Path) -> None:
    nn.Linear(2, 3).load_state_dict({f"module.{name}": value for name, value in nn.Linear(2, 3).state_dict().items()})


@explained_by("token-id-out-of-range")
def unknown_token(folder: Path) -> None:
    nn.Embedding(3, 4)(torch.tensor([9]))


@explained_by("torch-load-weights-only")
def pointer_instead_of_weights(folder: Path) -> None:
    path = folder / "pytorch_model.bin"
    path.write_text("version https://git-lfs.github.com/spec/v1\n")
    torch.load(path)


@explained_by("safetensors-header")
def pointer_instead_of_safetensors(folder: Path) -> None:
    from safetensors.torch import load_file

    path = folder / "model.safetensors"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\n")
    load_file(path)


@explained_by("safetensors-header")
def half_of_a_safetensors_file(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    save_file({"weight": torch.ones(100)}, path)
    path.write_bytes(path.read_bytes()[:-50])
    load_file(path)


@explained_by("flashinfer-missing", happens_here=find_spec("flashinfer") is None)
def no_flashinfer(folder: Path) -> None:
    import flashinfer  # noqa: F401


@explained_by("package-missing")
def no_package(folder: Path) -> None:
    import no_such_package_here  # noqa: F401


@explained_by("shared-library-missing")
def no_library(folder: Path) -> None:
    ctypes.CDLL("libnowhere.so.12")


@explained_by("too-many-open-files")
def too_many_files(folder: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
    try:
        while True:
            opened.append(tempfile.TemporaryFile())  # noqa: SIM115
    finally:
        for file in opened:
            file.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@explained_by("disk-full")
def full_disk(folder: Path) -> None:
    with open("/dev/full", "wb", buffering=0) as full:
        full.write(b"x")


@explained_by("spawn-without-main-guard")
def spawn_while_importing(folder: Path) -> None:
    process = multiprocessing.current_process()
    process._inheriting = True  # type: ignore[attr-defined]
    try:
        multiprocessing.spawn.get_preparation_data("child")
    finally:
        del process._inheriting  # type: ignore[attr-defined]


def model_folder(folder: Path, **config: Any) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@explained_by("transformers-version")
def name_that_is_gone(folder: Path) -> None:
    from transformers import NoSuchModelHere  # type: ignore[attr-defined]  # noqa: F401


@explained_by("transformers-unknown-architecture")
def unknown_architecture(folder: Path) -> None:
    from transformers import AutoConfig

    AutoConfig.from_pretrained(model_folder(folder, model_type="llama99"))


@explained_by("remote-code-not-allowed")
def remote_code(folder: Path) -> None:
    from transformers import AutoConfig

    AutoConfig.from_pretrained(
        model_folder(folder, model_type="x", auto_map={"AutoConfig": "c.C"}), trust_remote_code=False
    )


@explained_by("model-folder-incomplete")
def no_config(folder: Path) -> None:
    from transformers import AutoConfig

    AutoConfig.from_pretrained(str(folder))


@explained_by("tokenizer-files-missing")
def no_tokenizer(folder: Path) -> None:
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(model_folder(folder, model_type="llama"))


@explained_by("tokenizer-file-too-new")
def newer_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer

    Tokenizer.from_str('{"version": "1.0", "added_tokens": [], "model": {"type": "FromTheFuture"}}')


@explained_by("chat-template-missing")
def no_template(folder: Path) -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE())).apply_chat_template(
        [{"role": "user", "content": "x"}]
    )


@explained_by("hf-no-network")
def model_that_is_not_here(folder: Path) -> None:
    from transformers import AutoConfig

    AutoConfig.from_pretrained("nobody/nothing-here", cache_dir=str(folder), local_files_only=True)


@explained_by("weight-shape-mismatch")
def other_vocabulary(folder: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=32, **sizes)).save_pretrained(folder)
    LlamaForCausalLM.from_pretrained(folder, vocab_size=48)


# -- tensors and training


@explained_by("nan-when-sampling")
def sample_of_nothing(folder: Path) -> None:
    torch.multinomial(torch.tensor([float("nan"), 1.0]), 1)


@explained_by("tensor-on-meta-device")
def move_what_was_never_loaded(folder: Path) -> None:
    nn.Linear(2, 2, device="meta").to("cpu")


@explained_by("tensor-on-meta-device")
def add_what_was_never_loaded(folder: Path) -> None:
    torch.ones(2) + torch.ones(2, device="meta")


@explained_by("tensor-types-differ")
def half_into_float(folder: Path) -> None:
    nn.Linear(2, 2)(torch.ones(2, 2).half())


@explained_by("tensor-types-differ")
def half_into_convolution(folder: Path) -> None:
    nn.Conv2d(1, 1, 1)(torch.ones(1, 1, 2, 2).half())


@explained_by("custom-op-missing")
def op_that_was_not_loaded(folder: Path) -> None:
    _ = torch.ops.nobody_loaded_this.scale


@explained_by("custom-op-missing")
def class_that_was_not_loaded(folder: Path) -> None:
    _ = torch.classes.nobody_loaded_this.Scalar


@explained_by("backward-twice")
def backward_again(folder: Path) -> None:
    loss = (torch.ones(2, requires_grad=True) ** 2).sum()
    loss.backward()
    loss.backward()


@explained_by("backward-inplace")
def backward_over_written(folder: Path) -> None:
    value = torch.ones(2, requires_grad=True).exp()
    value.add_(1)
    value.sum().backward()


@explained_by("loss-without-graph")
def frozen(folder: Path) -> None:
    torch.ones(2).sum().backward()


@explained_by("amp-scaled-half")
def scaler_of_half(folder: Path) -> None:
    layer, scaler = nn.Linear(1, 1).half(), torch.amp.GradScaler("cpu")
    scaler.scale(layer(torch.ones(1, 1).half()).sum()).backward()
    scaler.unscale_(torch.optim.SGD(layer.parameters(), 1.0))


@explained_by("process-group-missing")
def barrier_of_nobody(folder: Path) -> None:
    torch.distributed.barrier()


@explained_by("launcher-missing")
def no_launcher(folder: Path) -> None:
    torch.distributed.init_process_group("gloo")


@explained_by("worker-cannot-pickle")
def lambda_for_a_worker(folder: Path) -> None:
    multiprocessing.get_context("spawn").Process(target=lambda: None).start()


@explained_by("process-killed")
def killed_subprocess(folder: Path) -> None:
    subprocess.run(["sh", "-c", "kill -9 $$"], check=True)


@explained_by("circular-import")
def modules_in_a_circle(folder: Path) -> None:
    (folder / "circle_a.py").write_text("from circle_b import there\nhere = 1\n")
    (folder / "circle_b.py").write_text("from circle_a import here\nthere = 1\n")
    sys.path.insert(0, str(folder))
    try:
        import circle_a  # noqa: F401
    finally:
        sys.path.remove(str(folder))


@explained_by("name-resolution")
def host_of_no_name(folder: Path) -> None:
    socket.create_connection(("no-such-host.invalid", 80))


@explained_by("hf-model-not-found")
def path_that_is_no_name(folder: Path) -> None:
    from huggingface_hub import hf_hub_download

    hf_hub_download("no/such/folder", "config.json")


@explained_by("padding-token-missing")
def batch_without_padding(folder: Path) -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))
    tokenizer(["a", "b"], padding=True)
