# ruff: noqa: E501 - messages stand here as they are printed
"""Printed failures: what the catalogue of known issues must name, and what it must leave alone."""

from __future__ import annotations

SITE = "/usr/lib/python3.12/site-packages"
ASYNC = "\nCUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect."

EXAMPLES: list[tuple[str, str, list[str]]] = [
    # id, "Type: message", frames as "file:function", outermost first
    (
        "capture-unsafe-operation",
        "torch.AcceleratorError: CUDA error: operation not permitted when stream is capturing\nSearch for "
        "`cudaErrorStreamCaptureUnsupported' in https://docs.nvidia.com/cuda/ for more information." + ASYNC,
        ["/srv/model.py:forward"],
    ),
    (
        "capture-unsafe-operation",
        "RuntimeError: Triton Error [CUDA]: operation not permitted when stream is capturing",
        [f"{SITE}/triton/runtime/jit.py:run"],
    ),
    (
        "capture-unpinned-copy",
        "RuntimeError: Cannot copy between CPU and CUDA tensors during CUDA graph capture unless the CPU tensor is pinned. "
        "Please use tensor.pin_memory() or allocate the tensor with pin_memory=True.",
        ["/srv/model.py:forward"],
    ),
    (
        "capture-unjoined-stream",
        "Exception: Capture cuda graph failed: CUDA error: capturing stream has unjoined work" + ASYNC,
        ["/opt/sglang/srt/model_executor/cuda_graph_runner.py:__init__"],
    ),
    (
        "capture-uncaptured-dependency",
        "RuntimeError: CUDA error: dependency created on uncaptured work in another stream" + ASYNC,
        [f"{SITE}/torch/cuda/streams.py:wait_event"],
    ),
    (
        "capture-legacy-stream",
        "RuntimeError: CUDA error: operation would make the legacy stream depend on a capturing blocking stream"
        + ASYNC,
        [f"{SITE}/torch/autograd/graph.py:_engine_run_backward"],
    ),
    (
        "capture-invalidated",
        "RuntimeError: CUDA error: operation failed due to a previous error during capture" + ASYNC,
        [f"{SITE}/torch/cuda/graphs.py:capture_end"],
    ),
    (
        "capture-rng-offset",
        "RuntimeError: Offset increment outside graph capture encountered unexpectedly.",
        ["/srv/sample.py:step"],
    ),
    (
        "capture-out-of-memory",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 594.00 MiB. GPU 0 has a total capacity of 79.11 GiB of "
        "which 321.12 MiB is free.",
        [f"{SITE}/vllm/v1/worker/gpu_model_runner.py:capture_model", f"{SITE}/torch/nn/functional.py:linear"],
    ),
    (
        "capture-out-of-memory",
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
        ["/sglang/srt/model_executor/cuda_graph_runner.py:capture_one_batch_size", "/srv/model.py:forward"],
    ),
    (
        "replay-stale-pointer",
        "RuntimeError: CUDA error: an illegal memory access was encountered" + ASYNC,
        ["/srv/serve.py:step", f"{SITE}/torch/cuda/graphs.py:replay"],
    ),
    (
        "cudagraph-output-overwritten",
        "RuntimeError: Error: accessing tensor output of CUDAGraphs that has been overwritten by a subsequent run. Stack trace: ",
        ["/srv/train.py:step"],
    ),
    (
        "sglang-piecewise-recompiled",
        "AssertionError: PCG capture stream is not set, please check if runtime recompilation happened",
        ["/data/sglang/srt/compilation/cuda_piecewise_backend.py:__call__"],
    ),
    (
        "cuda-out-of-memory",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 7.00 GiB. GPU 3 has a total capacity of 23.64 GiB",
        ["/srv/model.py:forward"],
    ),
    (
        "cuda-illegal-address",
        "torch.AcceleratorError: CUDA error: an illegal memory access was encountered" + ASYNC,
        ["/srv/model.py:forward"],
    ),
    (
        "cuda-device-side-assert",
        "RuntimeError: CUDA error: device-side assert triggered" + ASYNC,
        [f"{SITE}/torch/nn/functional.py:embedding"],
    ),
    ("cuda-misaligned-address", "RuntimeError: CUDA error: misaligned address" + ASYNC, ["/srv/kernel.py:launch"]),
    (
        "cuda-launch-resources",
        "RuntimeError: CUDA error: too many resources requested for launch" + ASYNC,
        ["/srv/kernel.py:launch"],
    ),
    (
        "cuda-no-kernel-image",
        "RuntimeError: CUDA error: no kernel image is available for execution on the device" + ASYNC,
        ["/srv/model.py:forward"],
    ),
    (
        "cuda-driver-too-old",
        "RuntimeError: The NVIDIA driver on your system is too old (found version 12040). Please update your GPU driver",
        [f"{SITE}/torch/cuda/__init__.py:_lazy_init"],
    ),
    (
        "cuda-no-driver",
        "RuntimeError: Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU",
        [f"{SITE}/torch/cuda/__init__.py:_lazy_init"],
    ),
    (
        "torch-without-cuda",
        "AssertionError: Torch not compiled with CUDA enabled",
        [f"{SITE}/torch/cuda/__init__.py:_lazy_init"],
    ),
    (
        "cuda-forked-process",
        "RuntimeError: Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must use the "
        "'spawn' start method",
        [f"{SITE}/torch/cuda/__init__.py:_lazy_init"],
    ),
    (
        "cuda-invalid-device",
        "RuntimeError: CUDA error: invalid device ordinal" + ASYNC,
        [f"{SITE}/torch/cuda/__init__.py:set_device"],
    ),
    (
        "cuda-fabric-manager",
        "RuntimeError: Unexpected error from cudaGetDeviceCount(). Error 802: system not yet initialized",
        [f"{SITE}/torch/cuda/__init__.py:_lazy_init"],
    ),
    (
        "cuda-devices-busy",
        "RuntimeError: CUDA error: CUDA-capable device(s) is/are busy or unavailable" + ASYNC,
        ["/srv/main.py:main"],
    ),
    ("cuda-ecc-error", "RuntimeError: CUDA error: uncorrectable ECC error encountered" + ASYNC, ["/srv/main.py:main"]),
    (
        "nvml-version-mismatch",
        "pynvml.NVMLError_LibRmVersionMismatch: RM has detected an NVML/RM version mismatch.",
        [f"{SITE}/pynvml.py:_nvmlCheckReturn"],
    ),
    (
        "cublas-init-failed",
        "RuntimeError: CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
        [f"{SITE}/torch/nn/modules/linear.py:forward"],
    ),
    (
        "cublas-not-supported",
        "RuntimeError: CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasGemmEx( handle, opa, opb, m, n, k, &falpha`",
        [f"{SITE}/torch/nn/modules/linear.py:forward"],
    ),
    (
        "fp8-unsupported-gpu",
        'triton.compiler.errors.CompilationError: at 1:0:\ndef fused_moe_kernel(\n^\nValueError("type fp8e4nv not supported in '
        "this architecture. The supported fp8 dtypes are ('fp8e4b15', 'fp8e5')\")",
        [f"{SITE}/triton/compiler/compiler.py:make_ir"],
    ),
    (
        "bf16-unsupported-gpu",
        "ValueError: Bfloat16 is only supported on GPUs with compute capability of at least 8.0. Your Tesla T4 GPU has 7.5.",
        [f"{SITE}/vllm/worker/worker.py:_check_if_gpu_supports_dtype"],
    ),
    (
        "flash-attention-unsupported-gpu",
        "RuntimeError: FlashAttention only supports Ampere GPUs or newer.",
        [f"{SITE}/flash_attn/flash_attn_interface.py:_flash_attn_forward"],
    ),
    (
        "thunder-cuda-stream",
        "torch._dynamo.exc.BackendCompilerFailed: backend='<thunder.dynamo.compiler.ThunderCompiler object at 0x7f0c42>' raised:"
        "\nNotImplementedError: argument of type: <class 'torch.cuda.streams.Stream'>",
        [
            f"{SITE}/torch/_dynamo/output_graph.py:_call_user_compiler",
            "/opt/pytorch/lightning-thunder/thunder/dynamo/splitter.py:_splitter",
            f"{SITE}/torch/fx/proxy.py:create_arg",
        ],
    ),
    (
        "triton-missing",
        "torch._inductor.exc.TritonMissing: Cannot find a working triton installation. Either the package is not installed",
        [f"{SITE}/torch/_inductor/scheduler.py:create_backend"],
    ),
    (
        "c-compiler-missing",
        "torch._inductor.exc.InductorError: RuntimeError: Failed to find C compiler. Please specify via CC environment variable.",
        [f"{SITE}/torch/_inductor/compile_fx.py:compile_fx", f"{SITE}/triton/runtime/build.py:_build"],
    ),
    (
        "triton-launcher-build-failed",
        "subprocess.CalledProcessError: Command '['/usr/bin/gcc', '/tmp/tmpx/cuda_utils.c', '-O3', '-shared', '-fPIC', '-lcuda']' "
        "returned non-zero exit status 1.",
        [f"{SITE}/triton/runtime/build.py:_build", "/usr/lib/python3.12/subprocess.py:check_call"],
    ),
    (
        "python-headers-missing",
        "torch._inductor.exc.CppCompileError: C++ compile error\n\nOutput:\n/tmp/a.cpp:2:10: fatal error: Python.h: No such file "
        "or directory",
        [f"{SITE}/torch/_inductor/cpp_builder.py:run_compile_cmd"],
    ),
    (
        "ptxas-missing",
        "RuntimeError: Cannot find ptxas",
        [f"{SITE}/triton/backends/nvidia/compiler.py:_path_to_binary"],
    ),
    (
        "ptxas-unknown-gpu",
        "triton.runtime.errors.PTXASError: PTXAS error: Internal Triton PTX codegen error\n`ptxas` stderr:\nptxas fatal   : "
        "Value 'sm_121a' is not defined for option 'gpu-name'",
        [f"{SITE}/triton/backends/nvidia/compiler.py:make_cubin"],
    ),
    (
        "triton-out-of-resources",
        "triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 131072, Hardware limit: 101376. "
        "Reducing block sizes or `num_stages` may help.",
        [f"{SITE}/triton/compiler/compiler.py:_init_handles"],
    ),
    (
        "nvcc-missing",
        "RuntimeError: Could not find nvcc and default cuda_home='/usr/local/cuda' doesn't exist",
        [f"{SITE}/flashinfer/jit/cpp_ext.py:get_cuda_path"],
    ),
    (
        "nvcc-missing",
        "FileNotFoundError: [Errno 2] No such file or directory: '/usr/local/cuda/bin/nvcc'",
        ["/usr/lib/python3.12/subprocess.py:_execute_child"],
    ),
    (
        "cuda-toolkit-mismatch",
        "RuntimeError: \nThe detected CUDA version (11.8) mismatches the version that was used to compile\nPyTorch (12.4).",
        [f"{SITE}/torch/utils/cpp_extension.py:_check_cuda_version"],
    ),
    (
        "ninja-missing",
        "FileNotFoundError: [Errno 2] No such file or directory: 'ninja'",
        [f"{SITE}/flashinfer/jit/cpp_ext.py:run_ninja", "/usr/lib/python3.12/subprocess.py:_execute_child"],
    ),
    (
        "nvcc-gcc-too-new",
        "RuntimeError: Error building extension 'k': [1/2] nvcc -c k.cu\n/usr/local/cuda/include/crt/host_config.h:143:2: error: "
        "#error -- unsupported GNU version! gcc versions later than 13 are not supported! The nvcc flag",
        [f"{SITE}/torch/utils/cpp_extension.py:_run_ninja_build"],
    ),
    (
        "extension-build-failed",
        "subprocess.CalledProcessError: Command '['ninja', '-v', '-j', '64']' returned non-zero exit status 1.",
        [f"{SITE}/torch/utils/cpp_extension.py:_run_ninja_build", "/usr/lib/python3.12/subprocess.py:run"],
    ),
    (
        "checkpoint-not-written",
        "RuntimeError: [enforce fail at inline_container.cc:626] . unexpected pos 2221367680 vs 2221367568",
        [f"{SITE}/torch/serialization.py:__exit__"],
    ),
    (
        "cuda-no-kernel-image",
        "RuntimeError: HIP error: invalid device function\nHIP kernel errors might be asynchronously reported at some other API call",
        ["/srv/generate.py:<module>"],
    ),
    (
        "disk-full",
        'safetensors_rust.SafetensorError: Error while serializing: IoError(Os { code: 28, kind: StorageFull, message: "No space left on device" })',
        [f"{SITE}/safetensors/torch.py:save_file"],
    ),
    (
        "segmentation-fault",
        "Windows fatal exception: access violation",
        ["C:/app/main.py:<module>"],
    ),
    (
        "nvcc-unknown-architecture",
        "RuntimeError: Error building extension 'k': nvcc fatal   : Unsupported gpu architecture 'compute_90a'",
        [f"{SITE}/torch/utils/cpp_extension.py:_run_ninja_build"],
    ),
    ("package-missing", "ModuleNotFoundError: No module named 'sgl_kernel.elementwise'", ["/srv/main.py:<module>"]),
    ("flashinfer-missing", "ModuleNotFoundError: No module named 'flashinfer.jit'", ["/srv/main.py:<module>"]),
    (
        "torchvision-mismatch",
        "RuntimeError: operator torchvision::nms does not exist",
        [f"{SITE}/torchvision/_meta_registrations.py:<module>", f"{SITE}/torch/library.py:register"],
    ),
    (
        "extension-built-for-other-torch",
        f"ImportError: {SITE}/flash_attn_2_cuda.cpython-312-x86_64-linux-gnu.so: undefined symbol: "
        "_ZN3c105ErrorC2ENS_14SourceLocationENSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE",
        [f"{SITE}/flash_attn/flash_attn_interface.py:<module>"],
    ),
    (
        "cuda-libraries-mixed",
        f"ImportError: {SITE}/torch/lib/../../nvidia/cusparse/lib/libcusparse.so.12: undefined symbol: "
        "__nvJitLinkComplete_12_4, version libnvJitLink.so.12",
        [f"{SITE}/torch/__init__.py:<module>"],
    ),
    (
        "shared-library-missing",
        "ImportError: libcudart.so.12: cannot open shared object file: No such file or directory",
        ["/srv/main.py:<module>"],
    ),
    (
        "libstdcxx-too-old",
        "ImportError: /lib/x86_64-linux-gnu/libstdc++.so.6: version `GLIBCXX_3.4.32' not found (required by k.so)",
        ["/srv/main.py:<module>"],
    ),
    (
        "library-on-noexec-mount",
        "ImportError: /tmp/torchinductor_me/k.so: failed to map segment from shared object",
        ["/srv/main.py:<module>"],
    ),
    (
        "numpy-abi-mismatch",
        "ValueError: numpy.dtype size changed, may indicate binary incompatibility. Expected 96 from C header, got 88",
        ["/srv/main.py:<module>"],
    ),
    (
        "weight-shape-mismatch",
        "AssertionError: Attempted to load weight (torch.Size([125696, 4096])) into parameter (torch.Size([62848, 4096]))",
        [f"{SITE}/vllm/model_executor/model_loader/weight_utils.py:default_weight_loader"],
    ),
    (
        "checkpoint-truncated",
        "RuntimeError: PytorchStreamReader failed reading zip archive: failed finding central directory",
        [f"{SITE}/torch/serialization.py:__init__"],
    ),
    (
        "hf-gated-model",
        "huggingface_hub.errors.GatedRepoError: 403 Client Error.\n\nCannot access gated repo for url https://huggingface.co/a/b.",
        [f"{SITE}/huggingface_hub/utils/_http.py:hf_raise_for_status"],
    ),
    (
        "hf-model-not-found",
        "huggingface_hub.errors.RepositoryNotFoundError: 401 Client Error. Repository Not Found for url: https://huggingface.co/a",
        [f"{SITE}/huggingface_hub/utils/_http.py:hf_raise_for_status"],
    ),
    (
        "nccl-init-failed",
        "torch.distributed.DistBackendError: NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.hpp:317, unhandled system "
        "error (run with NCCL_DEBUG=INFO for details), NCCL version 2.26.2\nLast error:\nsocketStartConnect: Connect failed",
        [f"{SITE}/torch/distributed/distributed_c10d.py:barrier"],
    ),
    (
        "nccl-init-failed",
        "RuntimeError: NCCL error: unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
        [f"{SITE}/vllm/distributed/device_communicators/pynccl_wrapper.py:NCCL_CHECK"],
    ),
    (
        "nccl-duplicate-gpu",
        "torch.distributed.DistBackendError: NCCL error in: /pytorch/NCCLUtils.cpp:94, invalid usage, NCCL version 2.27.3\n"
        "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.\nLast error:\nDuplicate GPU detected : rank 1 and "
        "rank 0 both on CUDA device 1000",
        [f"{SITE}/torch/distributed/distributed_c10d.py:all_reduce"],
    ),
    (
        "nccl-version-mismatch",
        "torch.distributed.DistBackendError: NCCL error in: /pytorch/NCCLUtils.cpp:94, invalid usage, NCCL version 2.27.3\n"
        "Last error:\nMismatched NCCL version detected : rank 1 version 22703 rank 0 version 22602",
        [f"{SITE}/torch/distributed/distributed_c10d.py:all_reduce"],
    ),
    (
        "nccl-peer-access",
        "torch.distributed.DistBackendError: NCCL error in: /pytorch/NCCLUtils.cpp:94, unhandled cuda error, NCCL version 2.27.3\n"
        "Last error:\nCuda failure 217 'peer access is not supported between these two devices'",
        [f"{SITE}/torch/distributed/distributed_c10d.py:all_reduce"],
    ),
    (
        "nccl-no-interface",
        "torch.distributed.DistBackendError: NCCL error in: /pytorch/NCCLUtils.cpp:94, invalid usage, NCCL version 2.27.3\n"
        "Last error:\nBootstrap : no socket interface found",
        [f"{SITE}/torch/distributed/distributed_c10d.py:barrier"],
    ),
    (
        "nccl-timeout",
        "torch.distributed.DistBackendError: [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=808, "
        "OpType=ALLREDUCE, NumelIn=9801523, Timeout(ms)=600000) ran for 600020 milliseconds before timing out.",
        [],
    ),
    (
        "nccl-remote-error",
        "torch.distributed.DistBackendError: NCCL error in: ../NCCLUtils.hpp:219, remote process exited or there was a network "
        "error, NCCL version 2.20.5\nncclRemoteError: A call failed possibly due to a network error",
        [f"{SITE}/torch/distributed/distributed_c10d.py:all_reduce"],
    ),
    (
        "gloo-connect-failed",
        "RuntimeError: Gloo connectFullMesh failed with [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:152] timed out "
        "connecting: SO_ERROR: Connection refused, remote=[127.0.0.1]:4031",
        [f"{SITE}/torch/distributed/distributed_c10d.py:_new_process_group_helper"],
    ),
    (
        "gloo-peer-lost",
        "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.4]:4031",
        [f"{SITE}/torch/distributed/distributed_c10d.py:barrier"],
    ),
    ("port-in-use", "zmq.error.ZMQError: Address already in use (addr='tcp://127.0.0.1:5557')", ["/srv/main.py:bind"]),
    (
        "host-oom-killed",
        "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.\nMemory on the node was 63 GB",
        [f"{SITE}/ray/_private/worker.py:get"],
    ),
    (
        "process-killed",
        "RuntimeError: DataLoader worker (pid 17) is killed by signal: Killed. ",
        [f"{SITE}/torch/utils/data/_utils/signal_handling.py:handler"],
    ),
    (
        "shared-memory-too-small",
        "RuntimeError: DataLoader worker (pid 17) is killed by signal: Bus error. It is possible that dataloader's workers are "
        "out of shared memory. Please try to raise your shared memory limit.",
        [f"{SITE}/torch/utils/data/_utils/signal_handling.py:handler"],
    ),
    (
        "shared-memory-too-small",
        "torch.distributed.DistBackendError: NCCL error in: /pytorch/NCCLUtils.cpp:94, unhandled system error, NCCL version "
        "2.27.3\nLast error:\nError while creating shared memory segment /dev/shm/nccl-cjY8K5 (size 10617216), error: No space "
        "left on device (28)",
        [f"{SITE}/torch/distributed/distributed_c10d.py:all_reduce"],
    ),
    ("thread-limit", "RuntimeError: can't start new thread", ["/usr/lib/python3.12/threading.py:start"]),
    (
        "tensor-parallel-not-divisible",
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for VllmConfig\n  Value error, Total number of "
        "attention heads (40) must be divisible by tensor parallel size (3).",
        [f"{SITE}/vllm/engine/arg_utils.py:create_engine_config"],
    ),
    (
        "tensor-parallel-not-divisible",
        "AssertionError: 25 is not divisible by 2",
        ["/sglang/srt/distributed/utils.py:ensure_divisibility"],
    ),
    (
        "vllm-context-exceeds-kv-cache",
        "ValueError: To serve at least one request with the models's max seq len (40960), (4.38 GiB KV cache is needed, which is "
        "larger than the available KV cache memory (1.0 GiB). Based on the available memory, the estimated maximum",
        [f"{SITE}/vllm/v1/core/kv_cache_utils.py:check_enough_kv_cache_memory"],
    ),
    (
        "vllm-context-exceeds-kv-cache",
        "ValueError: The model's max seq len (4096) is larger than the maximum number of tokens that can be stored in KV cache "
        "(3664). Try increasing `gpu_memory_utilization`",
        [f"{SITE}/vllm/worker/worker.py:raise_if_cache_size_invalid"],
    ),
    (
        "vllm-no-kv-cache-memory",
        "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`",
        [f"{SITE}/vllm/v1/core/kv_cache_utils.py:check_enough_kv_cache_memory"],
    ),
    (
        "vllm-memory-taken",
        "ValueError: Free memory on device cuda:0 (2.6/121.63 GiB) on startup is less than desired GPU memory utilization (0.08)",
        [f"{SITE}/vllm/v1/worker/gpu_worker.py:init_device"],
    ),
    (
        "vllm-context-exceeds-model",
        "ValueError: User-specified max_model_len (65536) is greater than the derived max_model_len (max_position_embeddings=32768)",
        [f"{SITE}/vllm/config/model.py:_get_and_verify_max_len"],
    ),
    (
        "vllm-engine-died",
        "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}",
        [f"{SITE}/vllm/v1/engine/utils.py:wait_for_engine_startup"],
    ),
    (
        "sglang-static-memory",
        "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.",
        ["/sglang/srt/model_executor/model_runner.py:init_memory_pool"],
    ),
    (
        "sglang-kv-pool-full",
        "RuntimeError: Decode out of memory. Try to lower your batch size.\nTry to allocate 4 tokens.",
        ["/sglang/srt/managers/schedule_batch.py:alloc_token_slots"],
    ),
    (
        "process-killed",
        "RuntimeError: DataLoader worker (pid(s) 4242) exited\nDataLoader worker (pid 4242) is killed by signal: Killed. ",
        ["/srv/train.py:main"],
    ),
    ("process-killed", "SIGKILL: sent by no recorded process", []),
    (
        "hung-up",
        "torch.distributed.elastic.multiprocessing.api.SignalException: Process 4242 got signal: 1",
        [f"{SITE}/torch/distributed/elastic/multiprocessing/api.py:_terminate_process_handler"],
    ),
    (
        "terminated",
        "torch.distributed.elastic.multiprocessing.api.SignalException: Process 4242 got signal: 15",
        [f"{SITE}/torch/distributed/elastic/multiprocessing/api.py:_terminate_process_handler"],
    ),
    ("bus-error", "Fatal Python error: Bus error", ["/srv/data.py:__getitem__"]),
    ("segmentation-fault", "Fatal Python error: Segmentation fault", ["/srv/model.py:forward"]),
    (
        "nccl-init-segfault",
        "Fatal Python error: Segmentation fault",
        ["/srv/vllm/distributed/device_communicators/pynccl_wrapper.py:ncclCommInitRank"],
    ),
    ("illegal-instruction", "Fatal Python error: Illegal instruction", [f"{SITE}/faiss/swigfaiss.py:<module>"]),
    (
        "ray-actor-died",
        "ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.\n\tclass_name: W",
        [f"{SITE}/ray/_private/worker.py:get"],
    ),
    (
        "sglang-child-failed",
        "RuntimeError: Rank 0 scheduler died during initialization (exit code: -9).",
        ["/sgl/sglang/srt/entrypoints/engine.py:_wait_for_scheduler_ready"],
    ),
    (
        "tensors-on-different-devices",
        "RuntimeError: Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!",
        ["/srv/model.py:forward"],
    ),
    (
        "tensors-on-different-devices",
        "RuntimeError: Input type (torch.cuda.FloatTensor) and weight type (torch.FloatTensor) should be the same",
        [f"{SITE}/torch/nn/modules/conv.py:_conv_forward"],
    ),
    (
        "tensors-on-different-devices",
        "RuntimeError: Input type (CUDABFloat16Type) and weight type (torch.FloatTensor) should be the same",
        [f"{SITE}/torch/nn/modules/conv.py:_conv_forward"],
    ),
    (
        "tensors-on-different-devices",
        "RuntimeError: Input and parameter tensors are not at the same device, found input tensor at cuda:0 and parameter tensor at cpu",
        [f"{SITE}/torch/nn/modules/rnn.py:forward"],
    ),
    (
        "cuda-memory-fragmented",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 96.00 MiB. GPU 0 has a total capacity of 79.11 GiB of which 12.00 MiB is free. Process 7 has 79.09 GiB memory in use. Of the allocated memory 61.02 GiB is allocated by PyTorch, and 17.11 GiB is reserved by PyTorch but unallocated.",
        ["/srv/m.py:f"],
    ),
    (
        "cuda-memory-limit",
        "torch.OutOfMemoryError: Allocation on device 0 would exceed allowed memory. (out of memory)\nCurrently allocated     : 14.94 GiB",
        ["/srv/unet.py:forward"],
    ),
    (
        "triton-pass-failed",
        "torch._inductor.exc.InductorError: RuntimeError: PassManager::run failed",
        [f"{SITE}/torch/_inductor/compile_fx.py:compile_fx", f"{SITE}/triton/backends/nvidia/compiler.py:make_llir"],
    ),
    (
        "cuda-invalid-image",
        "RuntimeError: Triton Error [CUDA]: device kernel image is invalid",
        [f"{SITE}/triton/compiler/compiler.py:_init_handles"],
    ),
    (
        "loss-scale-too-small",
        "Exception: Current loss scale already at minimum - cannot decrease scale anymore. Exiting run.",
        [f"{SITE}/deepspeed/runtime/fp16/loss_scaler.py:update_scale"],
    ),
    (
        "ddp-unused-parameters",
        "RuntimeError: Expected to have finished reduction in the prior iteration before starting a new one. This error indicates that your module has parameters that were not used in producing loss.",
        [f"{SITE}/torch/nn/parallel/distributed.py:forward"],
    ),
    (
        "checkpoint-of-a-gpu",
        "RuntimeError: Attempting to deserialize object on a CUDA device but torch.cuda.is_available() is False.",
        [f"{SITE}/torch/serialization.py:_validate_device"],
    ),
    ("no-visible-gpu", "RuntimeError: No CUDA GPUs are available", [f"{SITE}/torch/cuda/__init__.py:_lazy_init"]),
    (
        "request-exceeds-context",
        "openai.BadRequestError: Error code: 400 - {'message': \"This model's maximum context length is 4096 tokens. However, you requested 5000 tokens\"}",
        ["/srv/client.py:ask"],
    ),
    (
        "request-exceeds-context",
        "ValueError: The decoder prompt (length 9000) is longer than the maximum model length of 8192.",
        ["/srv/serve.py:main"],
    ),
    (
        "config-value-invalid",
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig\n  Value error, Unknown task",
        ["/srv/serve.py:main"],
    ),
    (
        "python-too-old",
        "TypeError: unsupported operand type(s) for |: 'type' and 'NoneType'",
        ["/opt/lib/python3.9/site-packages/acme/api.py:<module>"],
    ),
    ("python-too-old", "TypeError: type 'array.array' is not subscriptable", [f"{SITE}/acme/fd.py:Exchange"]),
    ("sentencepiece-file-missing", "TypeError: not a string", [f"{SITE}/sentencepiece/__init__.py:LoadFromFile"]),
    (
        "adapter-config-missing",
        "ValueError: Can't find 'adapter_config.json' at './out/step_100'",
        [f"{SITE}/peft/config.py:_get_peft_type"],
    ),
    (
        "flash-attention-missing",
        "ImportError: FlashAttention2 has been toggled on, but it cannot be used due to the following error: the package flash_attn seems to be not installed.",
        [f"{SITE}/transformers/modeling_utils.py:_flash_attn_2_can_dispatch"],
    ),
    (
        "disk-quota",
        'safetensors_rust.SafetensorError: Error while serializing: IoError(Os { code: 122, kind: FilesystemQuotaExceeded, message: "Disk quota exceeded" })',
        [f"{SITE}/safetensors/torch.py:save_file"],
    ),
    ("disk-quota", "OSError: [Errno 122] Disk quota exceeded", ["/srv/train.py:save"]),
    ("read-only-file-system", "OSError: [Errno 30] Read-only file system: '/models/.cache'", ["/srv/load.py:main"]),
    (
        "tls-certificate",
        "ssl.SSLCertVerificationError: [SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: self-signed certificate",
        ["/usr/lib/python3.12/ssl.py:do_handshake"],
    ),
    (
        "hf-rate-limit",
        "huggingface_hub.errors.HfHubHTTPError: 429 Client Error: Too Many Requests for url: https://huggingface.co/api/models/x",
        [f"{SITE}/huggingface_hub/utils/_http.py:hf_raise_for_status"],
    ),
    (
        "wandb-not-logged-in",
        "wandb.errors.errors.UsageError: api_key not configured (no-tty). call wandb.login(key=[your_api_key])",
        [f"{SITE}/wandb/sdk/wandb_login.py:prompt_api_key"],
    ),
    (
        "hf-model-not-found",
        "huggingface_hub.errors.HFValidationError: Repo id must be in the form 'repo_name' or 'namespace/repo_name': '/mnt/a/b'.",
        [f"{SITE}/huggingface_hub/utils/_validators.py:validate_repo_id"],
    ),
]

LINES: list[tuple[str, str]] = [
    ("sglang-piecewise-recompiled", "[19:59:38] PCG capture stream is not set; likely a Dynamo runtime recompilation."),
    (
        "cuda-fabric-manager",
        "UserWarning: CUDA initialization: Unexpected error. Error 802: system not yet initialized",
    ),
    ("nvml-version-mismatch", "Failed to initialize NVML: Driver/library version mismatch"),
    ("python-headers-missing", "/tmp/tmp1/main.c:5:10: fatal error: Python.h: No such file or directory"),
    ("ptxas-unknown-gpu", "ptxas fatal   : Value 'sm_103a' is not defined for option 'gpu-name'"),
    (
        "nvcc-gcc-too-new",
        "host_config.h:143: error: #error -- unsupported GNU version! gcc versions later than 12 are not supported!",
    ),
    ("nvcc-unknown-architecture", "nvcc fatal   : Unsupported gpu architecture 'compute_120'"),
    (
        "nccl-duplicate-gpu",
        "h:1583:1585 [0] init.cc:738 NCCL WARN Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 1000",
    ),
    (
        "nccl-version-mismatch",
        "h:1:2 [0] NCCL WARN Mismatched NCCL version detected : rank 1 version 22703 rank 0 version 22602",
    ),
    (
        "nccl-peer-access",
        "h:1:2 [0] NCCL WARN Cuda failure 217 'peer access is not supported between these two devices'",
    ),
    ("nccl-no-interface", "h:1:2 [0] bootstrap.cc:104 NCCL WARN Bootstrap : no socket interface found"),
    (
        "nccl-timeout",
        "[rank1]:[E626 ProcessGroupNCCL.cpp:616] [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=8",
    ),
    (
        "port-in-use",
        "ERROR:    [Errno 98] error while attempting to bind on address ('0.0.0.0', 8000): address already in use",
    ),
    ("host-oom-killed", "[912.1] Memory cgroup out of memory: Killed process 4242 (python3) total-vm:214748364kB"),
    (
        "host-oom-killed",
        "slurmstepd: error: Detected 1 oom_kill event in StepId=11772161.7. Some of the step tasks have been OOM Killed.",
    ),
    ("process-killed", "  exitcode  : -9 (pid: 4242)"),
    ("process-killed", "  traceback : Signal 9 (SIGKILL) received by PID 4242"),
    (
        "shared-memory-too-small",
        "ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient shared memory (shm).",
    ),
    (
        "shared-memory-too-small",
        "h:1:2 [0] misc/shmutils.cc:72 NCCL WARN Error: failed to extend /dev/shm/nccl-UbzKZ9 to 9637892 bytes",
    ),
    (
        "thread-limit",
        "OpenBLAS blas_thread_init: pthread_create failed for thread 3 of 64: Resource temporarily unavailable",
    ),
    (
        "scheduler-time-limit",
        "slurmstepd: error: *** JOB 8384 ON n1 CANCELLED AT 2026-05-02T03:58:46 DUE TO TIME LIMIT ***",
    ),
    ("scheduler-time-limit", "=>> PBS: job killed: walltime 3621 exceeded limit 3600"),
    (
        "scheduler-preempted",
        "slurmstepd: error: *** STEP 608.0 ON n1 CANCELLED AT 2026-08-12T02:06:12 DUE TO JOB REQUEUE ***",
    ),
    (
        "scheduler-node-failed",
        "slurmstepd: error: *** JOB 9 ON n[1-4] CANCELLED AT 2026-08-12T02:06:12 DUE TO NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS ***",
    ),
    ("scheduler-cancelled", "slurmstepd: error: *** STEP 12.0 ON n2 CANCELLED AT 2026-08-12T02:06:12 ***"),
    ("process-killed", "Killed"),
    ("process-killed", "/srv/run.sh: line 12:  4242 Killed                  python train.py"),
    ("process-killed", "srun: error: n1: tasks 3,5-7: Killed"),
    (
        "process-killed",
        "[2026-05-02 03:58:46,001] [ERROR] [launch.py:325:sigkill_handler] ['python', 'train.py'] exits with return code = -9",
    ),
    ("process-killed", "failed (exitcode: -9) local_rank: 0 (pid: 4242) of binary: /usr/bin/python"),
    ("process-killed", "RuntimeError: DataLoader worker (pid 4242) is killed by signal: Killed. "),
    ("host-oom-killed", "Some of your processes may have been killed by the cgroup out-of-memory handler."),
    ("hung-up", "W0502 03:58:46.001 api.py:900] Received Signals.SIGHUP death signal, shutting down workers"),
    ("hung-up", "Hangup"),
    ("terminated", "Received Signals.SIGTERM death signal, shutting down workers"),
    ("bus-error", "  exitcode  : -7 (pid: 4242)"),
    ("bus-error", "  traceback : Signal 7 (SIGBUS) received by PID 4242"),
    ("segmentation-fault", "Segmentation fault (core dumped)"),
    ("segmentation-fault", "  exitcode  : -11 (pid: 4242)"),
    (
        "ucx-caught-signal",
        "[n1:4242:0:4242] Caught signal 11 (Segmentation fault: address not mapped to object at address 0x10)",
    ),
    ("illegal-instruction", "  traceback : Signal 4 (SIGILL) received by PID 4242"),
    ("sglang-child-failed", "Received sigquit from a child process. It usually means the child failed."),
    ("vllm-engine-died", "Engine core proc EngineCore_DP0 died unexpectedly, shutting down client."),
    (
        "request-exceeds-context",
        "This model's maximum context length is 2048 tokens. However, you requested 5418 tokens (3918 in the messages",
    ),
    ("argument-invalid", "api_server.py: error: unrecognized arguments: --enable-chunked-prefil"),
    ("argument-invalid", "train.py: error: argument --precision: invalid choice: 'fp12' (choose from 'bf16', 'fp16')"),
    ("disk-quota", "cp: error writing 'model.safetensors': Disk quota exceeded"),
    ("wandb-not-logged-in", "wandb: ERROR api_key not configured (no-tty). call wandb.login(key=[your_api_key])"),
]

NEAR_MISSES: list[tuple[str, list[str]]] = [
    # the right words from somewhere else, or the right place with other words
    ("RuntimeError: operation not permitted", ["/srv/main.py:main"]),
    ("PermissionError: [Errno 1] Operation not permitted: '/dev/nvidia0'", ["/srv/main.py:main"]),
    ("MemoryError: Unable to allocate 3.1 GiB for an array", ["/srv/main.py:main"]),
    ("RuntimeError: CUDA error: unspecified launch failure" + ASYNC, ["/srv/main.py:main"]),
    (
        "NotImplementedError: argument of type: <class 'torch.cuda.streams.Stream'>",
        [f"{SITE}/torch/fx/proxy.py:create_arg"],
    ),
    ("NotImplementedError: argument of type: <class 'set'>", ["/opt/thunder/dynamo/splitter.py:_splitter"]),
    ("IndexError: index out of range in self", ["/srv/deck.py:draw"]),
    ("IndexError: list index out of range", [f"{SITE}/torch/nn/functional.py:embedding"]),
    ("AssertionError: 25 is not divisible by 2", ["/srv/arithmetic.py:halve"]),
    ("RuntimeError: Cannot find ptxas", ["/srv/my_builder.py:find"]),
    ("RuntimeError: Failed to find C compiler. Please specify via CC environment variable.", ["/srv/setup.py:main"]),
    ("mylib.Unsupported: print", [f"{SITE}/torch/_dynamo/eval_frame.py:compile_wrapper"]),
    ("torch._dynamo.exc.InternalTorchDynamoError: KeyError: 'x'", [f"{SITE}/torch/_dynamo/convert_frame.py:_compile"]),
    ("ImportError: cannot import name 'LLM' from 'vllm' (/srv/vllm.py)", ["/srv/main.py:<module>"]),
    ("ImportError: k.so: undefined symbol: sqlite3_deserialize", ["/srv/main.py:<module>"]),
    ("ConnectionRefusedError: [Errno 111] Connection refused", ["/usr/lib/python3.12/socket.py:create_connection"]),
    ("TimeoutError: timed out", ["/srv/main.py:main"]),
    ("FileNotFoundError: [Errno 2] No such file or directory: '/srv/ninja.txt'", ["/srv/main.py:main"]),
    ("FileNotFoundError: [Errno 2] No such file or directory: 'ninja'", ["/srv/main.py:main"]),
    (
        "subprocess.CalledProcessError: Command '['gcc', 'a.c', '-o', 'a']' returned non-zero exit status 1.",
        ["/srv/b.py:main"],
    ),
    (
        "RuntimeError: mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)",
        [f"{SITE}/torch/nn/modules/linear.py:forward"],
    ),
    ("RuntimeError: size mismatch for the two halves", [f"{SITE}/torch/nn/modules/module.py:load_state_dict"]),
    ("ValueError: No available memory for the cache blocks", ["/srv/cache.py:grow"]),
    ("ValueError: out of memory. Try to lower your batch size", ["/srv/train.py:step"]),
    ("KeyError: 'NCCL error'", [f"{SITE}/torch/distributed/distributed_c10d.py:barrier"]),
    (
        "safetensors.SafetensorError: File does not contain tensor lm_head.weight",
        [f"{SITE}/safetensors/torch.py:load_file"],
    ),
    ("KeyboardInterrupt: ", ["/srv/main.py:main"]),
    (
        "Exception: Capture cuda graph failed: something else",
        ["/sglang/srt/model_executor/cuda_graph_runner.py:__init__"],
    ),
]

QUIET_LINES = [
    "",
    "Process finished with exit code 0",
    "INFO: killed 3 stale sessions",
    "GPU memory: 70.1 GiB free, out of memory risk: low",
    "exitcode  : -15 (pid: 4242)",
    "[W1021 ProcessGroupNCCL.cpp:1536] Warning: destroy_process_group() was not called before program exit",
    "Capture cuda graph end. Time elapsed: 12.1 s. avail mem=5.31 GB.",
    "If you see out of memory errors, lower --mem-fraction-static",
    "Time limit of the job: 24:00:00",
    "slurmstepd: error: task/cgroup: unable to add task to memory cgroup",
    "CANCELLED orders: 3",
    "Killed 3 stale workers and went on",
    "INFO: the request was Killed by its client",
    "return code = -9 would mean SIGKILL",
    "exitcode: 0 (pid: 4242)",
    "exitcode  : -15 (pid: 9)",
    "Received Signals.SIGCHLD, reaping",
    "Caught signals are logged to signals.log",
    "segmentation fault lines in the survey: 12",
    "Bus error rate 0.0",
    "Illegal instruction count: 0",
    "Hangup button pressed",
    "error: argument parsing took 3 ms",
    "This model's maximum context length is 4096 tokens.",
    "wandb: Tracking run with wandb version 0.19",
    "disk quota: 71% used",
    "All engine core procs are up",
    "Received sigquit handler registration",
    "is killed by signal handling docs",
    "LSF run time limit is 3600",
    "node failure probability 0.1%",
    "Token indices sequence length is longer than the specified maximum sequence length for this model (700 > 512)",
]

COUNTER_EXAMPLES: dict[str, str] = {
    # for entries that need no frame: words that look like theirs, and are not
    "capture-unsafe-operation": "RuntimeError: operation not permitted",
    "capture-unpinned-copy": "RuntimeError: Cannot copy between CPU and CUDA tensors",
    "capture-unjoined-stream": "RuntimeError: the capturing stream of the camera is gone",
    "capture-uncaptured-dependency": "RuntimeError: dependency created on work in another stream",
    "capture-legacy-stream": "RuntimeError: the legacy stream is full",
    "capture-invalidated": "RuntimeError: operation failed due to a previous error",
    "capture-rng-offset": "RuntimeError: Offset increment encountered unexpectedly",
    "cudagraph-output-overwritten": "RuntimeError: tensor output has been overwritten by a subsequent run",
    "cuda-out-of-memory": "MemoryError: out of memory. Tried to allocate 3 GiB",
    "cuda-illegal-address": "RuntimeError: an illegal memory access was avoided",
    "cuda-device-side-assert": "AssertionError: device-side assert would trigger",
    "cuda-misaligned-address": "ValueError: misaligned address",
    "cuda-launch-resources": "RuntimeError: too many resources requested",
    "cuda-no-kernel-image": "RuntimeError: no image is available",
    "cuda-driver-too-old": "RuntimeError: The printer driver on your system is too old",
    "cuda-invalid-device": "ValueError: invalid device ordinal: pass one below 8",
    "cuda-fabric-manager": "RuntimeError: system not yet initialized",
    "cuda-devices-busy": "RuntimeError: all devices are busy",
    "cuda-ecc-error": "RuntimeError: 0 uncorrectable ECC errors, all is well",
    "nvml-version-mismatch": "RuntimeError: library version mismatch",
    "cublas-init-failed": "RuntimeError: CUBLAS_STATUS_NOT_INITIALIZED is one of the codes",
    "cublas-not-supported": "RuntimeError: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`",
    "fp8-unsupported-gpu": "ValueError: type fp8e4nv is not supported by this model",
    "flash-attention-unsupported-gpu": "RuntimeError: FlashAttention only supports head dimensions up to 256",
    "python-headers-missing": "RuntimeError: fatal error: cuda.h: No such file or directory",
    "extension-build-failed": "subprocess.CalledProcessError: Command '['ninja', '-v']' returned non-zero exit status 1.",
    "checkpoint-not-written": "RuntimeError: unexpected pos 12 vs 9",
    "nvcc-gcc-too-new": "RuntimeError: unsupported GNU version of tar",
    "nvcc-unknown-architecture": "RuntimeError: Unsupported gpu architecture",
    "package-missing": "ImportError: No module could be found",
    "flashinfer-missing": "ImportError: flashinfer is too old",
    "extension-built-for-other-torch": "ImportError: k.so: undefined symbol: sqlite3_deserialize",
    "cuda-libraries-mixed": "ImportError: k.so: undefined symbol: PyFloat_Type",
    "shared-library-missing": "OSError: model.bin: cannot open file",
    "libstdcxx-too-old": "ImportError: version 3.4 not found",
    "library-on-noexec-mount": "OSError: failed to map segment of the heart",
    "numpy-abi-mismatch": "ImportError: numpy is not installed",
    "transformers-version": "ImportError: cannot import name 'LLM' from 'vllm' (/srv/vllm.py)",
    "tokenizer-file-too-new": "Exception: data did not match the schema at line 3 column 4",
    "safetensors-header": "safetensors.SafetensorError: File does not contain tensor lm_head.weight",
    "nccl-duplicate-gpu": "RuntimeError: rank 0 and rank 1 both on device 3",
    "nccl-version-mismatch": "RuntimeError: Mismatched version detected",
    "nccl-peer-access": "RuntimeError: peer access is not enabled",
    "nccl-no-interface": "RuntimeError: no socket interface given",
    "nccl-timeout": "TimeoutError: collective operation of the choir timed out",
    "gloo-peer-lost": "RuntimeError: the peer was lost",
    "rendezvous-timeout": "torch.distributed.DistStoreError: no clients joined",
    "master-unreachable": "torch.distributed.DistNetworkError: the server socket is closed",
    "port-in-use": "OSError: [Errno 99] Cannot assign requested address",
    "host-oom-killed": "ray.exceptions.OutOfMemoryError: Task was retried",
    "process-killed": "RuntimeError: DataLoader worker (pid 4242) exited unexpectedly with exit code 1",
    "shared-memory-too-small": "RuntimeError: unable to write to file <model.bin>",
    "too-many-open-files": "OSError: [Errno 23] Too many open files in system",
    "disk-full": "OSError: [Errno 5] Input/output error",
    "thread-limit": "RuntimeError: can't start the thread of this story",
    "hung-up": "torch.distributed.elastic.multiprocessing.api.SignalException: Process 4242 got signal: 10",
    "bus-error": "RuntimeError: the bus is late",
    "segmentation-fault": "RuntimeError: segmentation of the image failed",
    "illegal-instruction": "ValueError: illegal instruction in line 3 of the recipe",
    "ray-actor-died": "ray.exceptions.RayActorError: The actor is temporarily unavailable",
    "nan-when-sampling": "ValueError: probability tensor must be of float type",
    "tensors-on-different-devices": "RuntimeError: Expected all tensors to have the same number of dimensions",
    "tensor-on-meta-device": "RuntimeError: Cannot copy out of a closed file; no data!",
    "tensor-types-differ": "RuntimeError: mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)",
    "cuda-memory-limit": "RuntimeError: Allocation on device would exceed the budget of the team",
    "cuda-invalid-image": "RuntimeError: the image is invalid: no PNG header",
    "request-exceeds-context": "ValueError: Token indices sequence length is longer than the specified maximum sequence length for this model (700 > 512)",
    "config-value-invalid": "acme.ValidationError: the batch is not valid",
    "circular-import": "ImportError: cannot import name 'LLM' from 'acme' (/srv/acme.py)",
    "disk-quota": "RuntimeError: API quota exceeded",
    "read-only-file-system": "AttributeError: attribute 'x' is read-only",
    "name-resolution": "ValueError: the name of the service is not known",
    "tls-certificate": "RuntimeError: certificate of the model card could not be read",
    "hf-rate-limit": "requests.exceptions.HTTPError: 429 Client Error: Too Many Requests for url: https://api.acme.example/v1",
}
