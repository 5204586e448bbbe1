"""A Hopper GPU made of the CPU: Triton compiles and launches as ever, and the launches are noted.

All of Triton that is in Python runs. In the place of its C code, and of the GPU, stands a note.
Nobody runs machine code here, so that none is made: kernels become Triton's IR for GPUs.
"""

from __future__ import annotations

import atexit
import functools
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler.compiler import LazyDict, ir, make_backend
from triton.knobs import HookChain

from flashgen import AttentionSpec
from support.caches import VARIABLE
from support.specialised import NUM_SMS
from support.variants import rendered_module

#: The kernels that a forward pass launches, and those of packed sequences and of a cache.
KERNELS = (
    *("_attention_hopper", "_attention_forward"),
    *("_list_tiles", "_find_segment_tiles", "_find_rows", "_find_range"),
    *("_list_and_fill", "_attention_hopper_varlen", "_list_sequence_tiles", "_varlen_forward"),
    *("_list_both_tiles", "_padded_rows", "_backward_hopper_varlen", "_place_packed_sums"),
    *("_varlen_rows", "_varlen_backward_of_keys", "_varlen_backward_of_queries"),
    *("_cache_attention", "_decide_cache_tiles", "_append_rows"),
)


@dataclass
class FakeGpu:
    """What stands in for the driver.

    Attributes:
        calls: the arguments of each launch, as Triton's C code would get them; tensors by address.
        maps: how often a tensor map was made.
        binds: how often Triton looked at all arguments of a launch anew.
        stream: the current one.
    """

    calls: list[tuple[Any, ...]] = field(default_factory=list)
    maps: int = 0
    binds: int = 0
    stream: int = 7

    def launch(self, *args: Any) -> None:
        """What the C code does but for the launch: the hooks."""
        hooks = [arg for arg in args if isinstance(arg, HookChain)]
        for hook in hooks:
            hook(None)
        self.calls.append(_plain(args))

    def make_map(self, *args: Any) -> tuple[Any, ...]:
        """A tensor map, as what it is made of."""
        self.maps += 1
        return ("map", *_plain(args))

    def load_binary(self, name: str, *_: Any) -> tuple[Any, ...]:
        """(module, function, registers, spilled registers, most threads) of a kernel."""
        return "module", f"function {name}", 100, 0, 1024


class _Launcher:
    """Launches nothing. It says that Triton allocates memory at each launch: none is kept."""

    global_scratch_size = 1

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        pass


def to_ir_alone(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Launches translate kernels to Triton's own IR and stop there; their names, as they come.

    All that Triton's front end refuses, which its interpreter accepts, is refused, in a tenth of
    the time of machine code.
    """
    translated: list[str] = []

    def compile_to_ir(src: Any, target: Any, options: Any, **_: Any) -> SimpleNamespace:
        backend = make_backend(target)
        parsed = backend.parse_options(options | src.parse_options())
        context = ir.context()
        ir.load_dialects(context)
        backend.load_dialects(context)
        functions = backend.get_codegen_implementation(parsed)
        src.make_ir(target, parsed, functions, backend.get_module_map(), context)
        translated.append(src.fn.__name__)
        unused = dict.fromkeys(("function", "packed_metadata", "hash"))
        return SimpleNamespace(run=_Launcher(), launch_metadata=lambda *_: None, **unused)

    monkeypatch.setattr(triton.compiler, "compile", compile_to_ir)
    return translated


@functools.cache
def _folder() -> str:
    """Where Triton keeps these kernels, apart from those that a GPU can run."""
    if VARIABLE in os.environ:
        return f"{os.environ[VARIABLE]}/launched"
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _described(self: CUDABackend, module: Any, metadata: dict[str, Any], *_: Any) -> str:
    """In the place of LLVM's code: what a launch reads of a kernel that is made of it."""
    [metadata["name"]] = re.findall(r"tt\.func public @(\w+)\(", str(module))
    metadata |= {"shared": 1024, "tmem_size": None}
    metadata |= {"global_scratch_size": 0, "global_scratch_align": 1}
    metadata |= {"profile_scratch_size": 0, "profile_scratch_align": 1}
    return "none"


def is_address(x: Any) -> bool:
    """Whether a note has it from a tensor: beyond the sizes in tests, where no program begins yet.

    A Python that is not position-independent has its heap below 2^32.
    """
    return isinstance(x, int) and x >= 2**22


def named(x: Any, names: dict[int, str]) -> Any:
    """Notes with names for addresses."""
    if isinstance(x, tuple):
        return tuple(named(y, names) for y in x)
    return names.get(x, "another") if is_address(x) else x


def _plain(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return x.data_ptr()
    if isinstance(x, list | tuple):
        return tuple(map(_plain, x))
    if isinstance(x, HookChain | LazyDict):  # what a launch is told to tell others
        return None
    return x


def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    """Puts one in the place of Triton's driver."""
    gpu = FakeGpu()
    utils = SimpleNamespace(
        load_binary=gpu.load_binary,
        get_device_properties=lambda device: {"max_shared_mem": 232448},
        fill_tma_descriptor=gpu.make_map,  # Triton 3.6
        fill_tma_descriptor_tiled=gpu.make_map,  # Triton 3.7, like the two after it
        unload_module=lambda module: None,  # Triton 3.8
        launch=gpu.launch,
        build_signature_metadata=tuple,
    )
    driver = SimpleNamespace(
        utils=utils,
        launcher_cls=nvidia.CudaLauncher,
        get_current_device=lambda: 0,
        get_current_stream=lambda device: gpu.stream,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
    )
    monkeypatch.setattr(triton.runtime.driver, "_active", driver)
    monkeypatch.setenv("TRITON_CACHE_DIR", _folder())
    monkeypatch.setattr(CUDABackend, "make_llir", _described)
    monkeypatch.setattr(CUDABackend, "make_ptx", lambda *_: "none")
    monkeypatch.setattr(CUDABackend, "make_cubin", lambda *_: b"none")
    module = SimpleNamespace(launch=gpu.launch)
    monkeypatch.setattr(nvidia, "compile_module_from_src", lambda **_: module, raising=False)
    monkeypatch.setattr(nvidia, "library_dirs", lambda: [])
    monkeypatch.setattr(nvidia, "PyKernelArg", SimpleNamespace, raising=False)
    return gpu


def module_on(
    gpu: FakeGpu,
    spec: AttentionSpec,
    monkeypatch: pytest.MonkeyPatch,
    *,
    edit_source: Callable[[str], str] = lambda source: source,
) -> ModuleType:
    """A spec's module with both kernels, which takes tensors of the CPU for those of the GPU."""

    def on_gpu(source: str) -> str:
        assert "q.is_cuda" in source
        return edit_source(re.sub(r"\b(q|k_new|x|given\[0\])\.is_cuda\b", "True", source))

    module = rendered_module(spec, hopper=True, edit_source=on_gpu)
    monkeypatch.setattr(module, "_is_elsewhere", lambda x: False)
    monkeypatch.setattr(module, "_target", lambda device: "sm_90")
    if hasattr(module, "_is_hopper"):
        monkeypatch.setattr(module, "_is_hopper", lambda device: True)
        monkeypatch.setattr(module, "_num_sms", lambda device: NUM_SMS)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    for kernel in KERNELS:
        if hasattr(module, kernel):
            _count_binds(gpu, getattr(module, kernel), monkeypatch)
    return module


def _count_binds(gpu: FakeGpu, kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run = kernel.run

    def counted(*args: Any, **kwargs: Any) -> Any:
        gpu.binds += 1
        return run(*args, **kwargs)

    monkeypatch.setattr(kernel, "run", counted)
