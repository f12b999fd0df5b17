"""An accelerator for tests, `fake:0` and `fake:1`, on which a program fails where it would fail on a GPU.

The host cannot access its memory, so a missing copy terminates the process. Its streams run asynchronously, so a
missing synchronization gives wrong results; `torch.fake.delays` makes this likely. The sources are in
`tests/fake_device`: a PyTorch backend for `PrivateUse1` whose operators run the CPU's kernels.

`build` compiles it, once for all processes. `load` registers it in this process. Call `load` in a rank
(`ranks(1)(fn)`), not in the pytest process, where other tests must not find an accelerator.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import importlib.util
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "tests" / "fake_device"
CACHE = ROOT / "build" / "fake_device"
_COMPILER = os.environ.get("CXX", "c++")
_TORCH = Path(torch.__file__).parent
_FLAGS = [
    "-std=c++20",
    "-O0",
    "-fPIC",
    "-pthread",
    "-w",
    f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
    f"-I{_TORCH / 'include'}",
    f"-I{_TORCH / 'include' / 'torch' / 'csrc' / 'api' / 'include'}",
]
_LINK = ["-shared", f"-L{_TORCH / 'lib'}", f"-Wl,-rpath,{_TORCH / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch", "-ldl"]


def library() -> Path:
    """Returns the path of the library for these sources, this compiler and this PyTorch."""
    texts = [file.read_text() for file in sorted(SOURCES.glob("*.?pp"))]
    what = repr([texts, _COMPILER, _FLAGS, torch.__version__])
    return CACHE / hashlib.sha256(what.encode()).hexdigest()[:16] / "libfake_device.so"


def build() -> Path:
    """Compiles the library if necessary; concurrent processes compile it only once."""
    path = library()
    if path.exists():
        return path
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            with ThreadPoolExecutor(2) as pool:
                objects = list(pool.map(lambda source: _compiled(source, path.parent), sorted(SOURCES.glob("*.cpp"))))
            linked = path.with_suffix(".linked")
            _run([_COMPILER, *map(str, objects), *_LINK, "-o", str(linked)])
            linked.rename(path)
    return path


def _compiled(source: Path, folder: Path) -> Path:
    target = folder / f"{source.stem}.o"
    _run([_COMPILER, *_FLAGS, "-c", str(source), "-o", str(target)])
    return target


def _run(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if result.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{result.stderr[-4000:]}")


def load(devices: int = 2) -> None:
    """Registers the device in this process as torch's accelerator, and builds the library if necessary."""
    if hasattr(torch, "fake"):
        return
    path = build()
    torch.ops.load_library(str(path))
    torch.ops.fake_device.set_device_count(devices)
    spec = importlib.util.spec_from_file_location("torch.fake", SOURCES / "torch_fake.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["torch.fake"] = module
    spec.loader.exec_module(module)
    module._library, module._count = ctypes.CDLL(str(path)), devices
    torch.utils.rename_privateuse1_backend("fake")
    torch.ops.fake_device.register_hooks()
    torch._register_device_module("fake", module)
    torch.utils.generate_methods_for_privateuse1_backend()
    _prefer_compiled_shapes()


# Operators whose output shapes are computed only by Python functions. For other operators, such a function would
# override the compiled one, which is faster and does not import PyTorch's compiler.
_SHAPES = (
    "convolution",
    "convolution_backward",
    "native_batch_norm",
    "native_batch_norm_backward",
    "native_layer_norm",
    "native_layer_norm_backward",
    "native_group_norm",
    "native_group_norm_backward",
    "embedding_dense_backward",
    "nll_loss_forward",
    "nll_loss_backward",
)
_shapes: list[torch.library.Library] = []


def _prefer_compiled_shapes() -> None:
    registered = getattr(torch, "_meta_registrations", None)
    library = getattr(registered, "_meta_lib_dont_use_me_use_register_meta", None)
    if library is None:
        return
    library._destroy()
    own = torch.library.Library("aten", "IMPL", "Meta")
    _shapes.append(own)
    for op, function in torch._decomp.global_decomposition_table["meta"].items():
        name = getattr(op, "_schema", op).name.removeprefix("aten::")
        if name in _SHAPES and not torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "Meta"):
            own.impl(op, function)


if __name__ == "__main__":
    build()
