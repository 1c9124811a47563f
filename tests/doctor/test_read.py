"""Reading a machine: parsers against recorded texts, programs that fail or hang, a torch whose import crashes."""

from __future__ import annotations

import os
import stat
import time
from pathlib import Path

import pytest

from piecegraph.doctor import read_host, read_packages, read_programs
from piecegraph.doctor.commands import Shell, refused_preloads
from piecegraph.doctor.machine import Gpu, InstalledProgram
from piecegraph.doctor.read import VARIABLES, read_machine

H200_ROW = "NVIDIA H200, 9.0, 143771, Enabled, 1980, 1980, Default, 580.159.04\n"  # as its machine printed it
PLAN = """\
#$ _NVVM_BRANCH_=nvvm
#$ _HERE_=/usr/local/cuda-13.0/bin
#$ TOP=/usr/local/cuda-13.0/bin/..
#$ gcc -D__CUDA_ARCH_LIST__=750 -E -x c++ -D__CUDACC__ -D__NVCC__  "-I/usr/local/cuda-13.0/include"
"""


def program(folder: Path, name: str, script: str) -> Path:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def shell(folder: Path, limit_s: float = 20, **environ: str) -> Shell:
    return Shell({"PATH": f"{folder}:/usr/bin:/bin", **environ}, limit_s)


def package(folder: Path, name: str, code: str) -> dict[str, str]:
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text(code)
    return dict(os.environ) | {"PYTHONPATH": str(folder)}


# --- GPUs


def test_a_recorded_h200() -> None:
    gpus, driver = read_host.parse_gpus(H200_ROW)
    assert driver == "580.159.04"
    assert gpus == (
        Gpu(
            name="NVIDIA H200",
            architecture=90,
            memory_bytes=143771 * 2**20,
            persistence=True,
            clock_mhz=1980,
            max_clock_mhz=1980,
            compute_mode="Default",
        ),
    )


def test_what_the_tool_does_not_tell_is_none() -> None:
    row = "Tesla M60, [N/A], [Not Supported], [N/A], [Unknown Error], [N/A], [N/A], 470.1\n"
    assert read_host.parse_gpus(row) == ((Gpu(name="Tesla M60", architecture=None),), "470.1")
    assert read_host.parse_gpus("NVIDIA B300, 10.3, 1, Disabled, 1, 1, Default, 590.1\n")[0][0].architecture == 103


@pytest.mark.parametrize(
    "text", ["", "No devices were found\n", 'Field "compute_cap" is not a valid field to query.\n']
)
def test_text_that_is_no_table_gives_no_gpus(text: str) -> None:
    assert read_host.parse_gpus(text) == ((), "")


def test_the_tool_is_asked_for_what_the_parser_expects(tmp_path: Path) -> None:
    fields = ",".join(read_host.GPU_FIELDS)
    program(tmp_path, "nvidia-smi", f'[ "$1" = "--query-gpu={fields}" ] || exit 9\nprintf "{H200_ROW}{H200_ROW}"')
    gpus, driver, trouble = read_host.read_gpus(shell(tmp_path))
    assert (len(gpus), driver, trouble) == (2, "580.159.04", "")


def test_a_tool_that_is_missing_fails_or_hangs_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = tmp_path / "version"
    monkeypatch.setattr(read_host, "DRIVER_FILE", module)
    assert read_host.read_gpus(shell(tmp_path)) == ((), "", "nvidia-smi is not installed")
    module.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\n")
    program(tmp_path, "nvidia-smi", "echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18")
    gpus, driver, trouble = read_host.read_gpus(shell(tmp_path))
    assert (gpus, driver) == ((), "580.95.05")
    assert trouble == "nvidia-smi failed with code 18: Failed to initialize NVML: Driver/library version mismatch"
    program(tmp_path, "nvidia-smi", "sleep 60")
    assert read_host.read_gpus(shell(tmp_path, 0.3))[2] == "nvidia-smi did not end within 0.3 s"


# --- commands


def test_a_hanging_wrapper_is_ended_with_its_children(tmp_path: Path) -> None:
    mark = tmp_path / "alive"
    hanging = program(tmp_path, "hang", f"(sleep 2; touch {mark}) &\nwait")
    began = time.monotonic()
    answer = shell(tmp_path, 0.3).run([str(hanging)])
    assert (answer.code, answer.trouble) == (None, "did not end within 0.3 s")
    assert time.monotonic() - began < 2, "waited for the child that held the pipe"
    time.sleep(2.2)
    assert not mark.exists()


def test_a_program_that_cannot_be_run_or_dies(tmp_path: Path) -> None:
    here = shell(tmp_path)
    assert "cannot be run" in here.run([str(tmp_path / "none")]).trouble
    assert here.run([str(program(tmp_path, "abort", "kill -ABRT $$"))]).trouble == "died of SIGABRT"
    assert here.run([str(program(tmp_path, "quiet", "exit 3"))]).trouble == "failed with code 3"
    assert "\ufffd" in here.run([str(program(tmp_path, "binary", r"printf '\377'"))]).out


# --- programs


@pytest.mark.parametrize(
    ("text", "version", "family"),
    [
        ("gcc (Ubuntu 13.3.0-6ubuntu2~24.04) 13.3.0\nCopyright (C) 2023 Free Software Foundation", "13.3.0", "gcc"),
        ("gcc (GCC) 11.5.0 20240719 (Red Hat 11.5.0-2)\n... Free Software Foundation", "11.5.0", "gcc"),
        ("Ubuntu clang version 18.1.3 (1ubuntu1)\nTarget: x86_64-pc-linux-gnu", "18.1.3", "clang"),
        ("rustc 1.95.0 (59807616e 2026-04-14)", "1.95.0", ""),
        ("ptxas: NVIDIA (R) Ptx\nCuda compilation tools, release 12.8, V12.8.93", "12.8", ""),
        ("", "", ""),
    ],
)
def test_versions(text: str, version: str, family: str) -> None:
    assert read_programs.parse_version(text) == (version, family)


def test_a_toolkit_behind_a_wrapper(tmp_path: Path) -> None:
    header = tmp_path / "cuda" / "targets" / "x86_64-linux" / "include" / "crt" / "host_config.h"
    header.parent.mkdir(parents=True)
    header.write_text("#if __GNUC__ > 12\n#error -- unsupported GNU version!\n#endif\n")
    program(tmp_path, "gcc", "echo 'gcc (x) 13.3.0'; echo 'Free Software Foundation'")
    (tmp_path / "plan").write_text(PLAN.replace("/usr/local/cuda-13.0/bin/..", str(tmp_path / "cuda")))
    script = f"""case $1 in
    --version) echo 'Cuda compilation tools, release 12.1, V12.1.105';;
    --list-gpu-arch) printf 'compute_80\\ncompute_90\\n';;
    --dryrun) cat {tmp_path}/plan >&2;;
    esac"""
    program(tmp_path, "nvcc", script)
    found = read_programs.read_toolkit(shell(tmp_path))
    assert found is not None
    assert (found.nvcc.version, found.architectures, found.highest_gcc) == ("12.1", (80, 90), 12)
    assert found.host_compiler == InstalledProgram(path=str(tmp_path / "gcc"), version="13.3.0", family="gcc")


def test_cuda_home_comes_before_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_programs, "CUDA_FOLDER", tmp_path / "usual")
    path, home = tmp_path / "path", tmp_path / "home" / "bin"
    for folder, release in ((path, "12.1"), (home, "12.8")):
        folder.mkdir(parents=True)
        program(folder, "nvcc", f"echo release {release},")
    only_path = Shell({"PATH": str(path)}, 20)
    assert read_programs.read_toolkit(only_path).nvcc.version == "12.1"  # type: ignore[union-attr]
    both = Shell({"PATH": str(path), "CUDA_HOME": str(tmp_path / "home")}, 20)
    assert read_programs.read_toolkit(both).nvcc.version == "12.8"  # type: ignore[union-attr]
    assert read_programs.read_toolkit(Shell({"PATH": str(tmp_path)}, 20)) is None


def test_the_plan_with_a_host_compiler_that_was_chosen() -> None:
    chosen = PLAN.replace("#$ gcc", '#$ "/usr/bin"/g++-12')
    assert read_programs.parse_plan(chosen) == ("/usr/bin/g++-12", "/usr/local/cuda-13.0/bin/..")
    assert read_programs.parse_plan("nvcc fatal") == ("", "")


def test_compilers_named_by_variables(tmp_path: Path) -> None:
    program(tmp_path, "mycc", "echo 'clang version 18.1.3'")
    found = read_programs.read_c_compiler(shell(tmp_path, CC="ccache mycc -m64"))
    assert found == InstalledProgram(path=str(tmp_path / "mycc"), version="18.1.3", family="clang")
    missing = read_programs.read_cxx_compiler(shell(tmp_path, CXX="icpx"))
    assert missing == InstalledProgram(path="icpx", trouble="is not there, but CXX names it")
    assert read_programs.read_c_compiler(shell(tmp_path, CC="'open"))


def test_no_compiler_at_all(tmp_path: Path) -> None:
    bare = Shell({"PATH": str(tmp_path)}, 20)
    assert read_programs.read_c_compiler(bare) is None
    assert read_programs.read_cxx_compiler(bare) is None
    assert read_programs.read_older_gccs(bare) == {}


def test_older_gccs_are_found_by_name(tmp_path: Path) -> None:
    for name in ("gcc-12", "gcc-9", "gcc-ar-12", "gcc-nm"):
        program(tmp_path, name, "")
    found = read_programs.read_older_gccs(Shell({"PATH": f"{tmp_path}:"}, 20))
    assert found == {"12": str(tmp_path / "gcc-12"), "9": str(tmp_path / "gcc-9")}


def test_a_wrong_path_to_ptxas_is_trouble(tmp_path: Path) -> None:
    found = read_programs.read_triton_ptxas(shell(tmp_path, TRITON_PTXAS_PATH="/no/ptxas"))
    assert found == InstalledProgram(path="/no/ptxas", trouble="is not there")


# --- imports


@pytest.mark.parametrize(
    ("code", "state", "error"),
    [
        ("import os; os.abort()", "crashed", "died of SIGABRT"),
        ("import time; time.sleep(60)", "timed out", "did not end within 1 s"),
        (
            "raise ImportError('libcudart.so.13: cannot open shared object file')",
            "failed",
            "ImportError: libcudart.so.13",
        ),
        ("import os; os._exit(0)", "failed", "ended before it told anything"),
        ("", "failed", "AttributeError"),
    ],
)
def test_a_torch_that_does_not_import(tmp_path: Path, code: str, state: str, error: str) -> None:
    found, gpus = read_packages.read_torch(Shell(package(tmp_path, "torch", code), 20), 1 if "sleep" in code else 60)
    assert (found.state, gpus) == (state, ())
    assert error in found.error


FAKE_TORCH = """
print("hello from a plugin")
import atexit, types
atexit.register(print, "goodbye")
__version__ = "2.8.0a0+gitba56102"
version = types.SimpleNamespace(cuda="12.8", hip=None)
compiled_with_cxx11_abi = lambda: True
properties = types.SimpleNamespace(name="NVIDIA H200", major=9, minor=0, total_memory=2**30)
def fail():
    raise RuntimeError("no driver\\nhint")
cuda = types.SimpleNamespace(
    is_available=lambda: {available}, get_arch_list=lambda: ["sm_90"], device_count=lambda: 2,
    get_device_properties=lambda index: properties, init=fail,
)
"""


def test_a_self_built_torch_on_a_gpu(tmp_path: Path) -> None:
    for name in ("setup.py", "CMakeLists.txt"):
        (tmp_path / name).touch()
    environ = package(tmp_path, "torch", FAKE_TORCH.format(available=True))
    found, gpus = read_packages.read_torch(Shell(environ, 20))
    assert (found.state, found.version, found.cuda, found.architectures) == (
        "ok",
        "2.8.0a0+gitba56102",
        "12.8",
        ("sm_90",),
    )
    assert found.is_checkout
    assert gpus == (Gpu(name="NVIDIA H200", architecture=90, memory_bytes=2**30),) * 2


def test_a_torch_that_cannot_use_the_gpu_says_why(tmp_path: Path) -> None:
    environ = package(tmp_path, "torch", FAKE_TORCH.format(available=False))
    found, gpus = read_packages.read_torch(Shell(environ, 20))
    assert (found.can_use_cuda, found.cuda_error, found.is_checkout, gpus) == (False, "no driver", False, ())


def test_cuda_bindings(tmp_path: Path) -> None:
    environ = package(tmp_path, "cuda", "")
    (tmp_path / "cuda" / "bindings").mkdir()
    (tmp_path / "cuda" / "bindings" / "__init__.py").touch()
    runtime = tmp_path / "cuda" / "bindings" / "runtime.py"
    runtime.write_text("cudaStreamGetCaptureInfo = cudaGraphGetNodes = cudaDriverGetVersion = None")
    found = read_packages.read_bindings(Shell(environ, 20))
    assert (found.state, found.missing) == ("ok", ("cudaGraphNodeGetType",))
    runtime.write_text("raise ImportError('libcuda.so.1')")
    assert read_packages.read_bindings(Shell(environ, 20)).error == "ImportError: libcuda.so.1"


# --- the host


def test_exact_requirements() -> None:
    assert read_packages.parse_pin(["pytorch-triton==3.7.0+git1", "x"], "triton") == "3.7.0+git1"
    assert read_packages.parse_pin(["torch (==2.11.0)"], "torch") == "2.11.0"
    assert read_packages.parse_pin(["torch>=2.11", "torchvision==0.1"], "torch") == ""


def test_folders_follow_their_variables(tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    environ = {"HOME": str(tmp_path), "TMPDIR": str(tmp_path / "tmp"), "TRITON_HOME": "/big", "HF_HOME": "/models"}
    folders = {folder.what: folder for folder in read_host.read_folders(environ, {"flashinfer-python": "0.6"})}
    assert {what: folder.path for what, folder in folders.items()} == {
        "temporary files": f"{tmp_path}/tmp",
        "Inductor cache": f"{tmp_path}/tmp/torchinductor_{read_host._user()}",
        "Triton cache": "/big/.triton/cache",
        "Hugging Face": "/models",
        "FlashInfer cache": f"{tmp_path}/.cache/flashinfer",
    }
    assert len(read_host.read_folders(environ, {})) == 4


def test_a_folder_for_temporary_files_that_is_not_there_is_told_once(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing")
    program(tmp_path, "needy", 'echo "TMPDIR=${TMPDIR-none}"')
    assert shell(tmp_path, TMPDIR=missing).run(["needy"]).out == "TMPDIR=none\n"
    assert shell(tmp_path, TMPDIR=str(tmp_path)).run(["needy"]).out == f"TMPDIR={tmp_path}\n"
    folders = {folder.what: folder for folder in read_host.read_folders({"TMPDIR": missing}, {})}
    assert not folders["temporary files"].exists
    assert folders["Inductor cache"].path.startswith("/tmp/"), "Python does not use it either"


def test_libraries_that_the_loader_refuses(tmp_path: Path) -> None:
    program(tmp_path, "failing", "echo why >&2; exit 3")
    preloading = shell(tmp_path, LD_PRELOAD="/no/a.so")
    assert refused_preloads(preloading) == ("/no/a.so: cannot open shared object file",)
    assert refused_preloads(shell(tmp_path)) == ()
    found = preloading.run(["failing"])
    assert (found.err, found.trouble) == ("why\n", "failed with code 3: why")


def test_who_may_write_to_a_folder(tmp_path: Path) -> None:
    def look(path: Path) -> tuple[bool, bool, bool]:
        folder = read_host.read_folder("x", path, "X")
        return folder.exists, folder.is_writable, folder.others_may_write

    open_to_all, sticky, file, dangling = (tmp_path / name for name in ("open", "sticky", "file", "dangling"))
    for folder, mode in ((open_to_all, 0o777), (sticky, 0o777 | stat.S_ISVTX)):
        folder.mkdir()
        folder.chmod(mode)
    file.touch()
    dangling.symlink_to("/no/such/folder")
    assert look(open_to_all) == (True, True, True)
    assert look(sticky) == (True, True, False)
    assert look(open_to_all / "not" / "there") == (False, True, False)
    assert look(file) == (True, False, False)
    assert look(dangling) == (True, False, False)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_not_be_written(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert not read_host.read_folder("x", tmp_path / "new", "X").is_writable


def test_a_container_has_the_memory_it_is_given(tmp_path: Path) -> None:
    whole = read_host.read_memory_bytes(tmp_path)
    limit = tmp_path / "sys" / "fs" / "cgroup" / "memory.max"
    limit.parent.mkdir(parents=True)
    limit.write_text("max\n")
    assert read_host.read_memory_bytes(tmp_path) == whole
    limit.write_text("1073741824\n")
    assert read_host.read_memory_bytes(tmp_path) == 2**30


def test_shared_memory_that_is_not_there(tmp_path: Path) -> None:
    assert read_host.read_shm_bytes(tmp_path / "none") is None
    assert read_host.read_shm_bytes(tmp_path)


# --- the whole


def test_a_machine_with_nothing_that_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TMPDIR"):  # Inductor sets the first for the process it runs in
        monkeypatch.delenv(name, raising=False)
    for name in ("nvidia-smi", "nvcc", "gcc", "g++", "ptxas", "rustc"):
        program(tmp_path, name, "/bin/sleep 60")
    environ = package(tmp_path, "torch", "import time; time.sleep(60)") | {"PATH": str(tmp_path), "HF_TOKEN": "secret"}
    environ |= {"CUDA_VISIBLE_DEVICES": "", "CUDA_HOME": str(tmp_path)}
    began = time.monotonic()
    machine = read_machine(environ, limit_s=0.5, import_limit_s=2)
    assert time.monotonic() - began < 20
    assert machine.torch.state == "timed out"
    assert machine.c_compiler == InstalledProgram(path=str(tmp_path / "gcc"), trouble="did not end within 0.5 s")
    assert machine.gpu_trouble == "nvidia-smi did not end within 0.5 s"
    assert machine.variables == {"CUDA_VISIBLE_DEVICES": "", "CUDA_HOME": str(tmp_path)}
    assert "secret" not in repr(machine)


def test_no_variable_is_read_that_may_hold_a_secret() -> None:
    assert not [name for name in VARIABLES if any(word in name for word in ("TOKEN", "KEY", "SECRET", "PASS"))]
