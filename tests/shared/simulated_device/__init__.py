"""A simulated accelerator for tests: device type ``"simulated"``, compiled from ``device.cpp`` by the test run.

Its memory is counted and can be limited; operators and collectives run on the CPU, see ``device.cpp``. It registers as
torch's private-use backend until the process ends, so tests use it in rank workers, which the
fixture ``simulated_device`` ends afterwards:

    def on_rank(library): simulated_device.load(library); model.to("simulated"); ...
    def test_it(simulated_device): run_on_ranks(on_rank, 2, simulated_device)
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import shutil
import subprocess
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

NAME = "simulated"
_SOURCE = Path(__file__).with_name("device.cpp")
_BUILD_SECONDS = 600


class NotBuiltError(Exception):
    """Raised if the device can't be built; the message says why."""


def build(folder: Path) -> str:
    """Return the path of the device's library; compile it into a folder unless it exists there.

    Raises:
        NotBuiltError: If there is no compiler, or it fails.
    """
    import torch
    from torch.utils.cpp_extension import include_paths, library_paths

    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        msg = "neither g++ nor clang++ was found to build the simulated device"
        raise NotBuiltError(msg)
    abi = int(torch.compiled_with_cxx11_abi())
    command = [compiler, "-O1", "-std=c++20", "-w", "-fPIC", "-shared", f"-D_GLIBCXX_USE_CXX11_ABI={abi}"]
    command += [argument for path in include_paths() for argument in ("-isystem", path)]
    command += [str(_SOURCE)]
    command += [argument for path in library_paths() for argument in ("-L", path)] + ["-lc10", "-ltorch_cpu", "-ltorch"]
    key = hashlib.sha256("\0".join([torch.__version__, *command]).encode() + _SOURCE.read_bytes()).hexdigest()[:16]
    library = folder / f"simulated_device_{key}.so"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several test sessions may share the folder
        if not library.exists():
            fresh = library.with_suffix(".new")
            done = subprocess.run(
                [*command, "-o", str(fresh)], capture_output=True, text=True, timeout=_BUILD_SECONDS, check=False
            )
            if done.returncode:
                msg = f"{compiler} could not build the simulated device:\n{done.stderr[-3000:]}"
                raise NotBuiltError(msg)
            fresh.rename(library)
    return str(library)


def load(library: str) -> None:
    """Register the device with torch in this process; later calls do nothing."""
    import torch

    if torch._C._get_privateuse1_backend_name() == NAME:
        return
    torch.ops.load_library(library)
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _module())
    torch.utils.generate_methods_for_privateuse1_backend()


def _module() -> types.ModuleType:
    """Return the module ``torch.simulated``: the functions that torch expects of a device module, as ``torch.cuda``."""
    import torch

    ops: Any = torch.ops.simulated_device
    module: Any = types.ModuleType(f"torch.{NAME}")
    module.is_available = lambda: True
    module.is_initialized = lambda: True
    module.device_count = lambda: 1
    module.current_device = lambda: 0
    module.set_device = lambda device: None
    module.device = module.stream = contextlib.nullcontext
    module.synchronize = lambda device=None: None
    module.empty_cache = lambda: None
    module._is_in_bad_fork = lambda: False
    # Kernels run on the CPU and use its generator.
    module.manual_seed = module.manual_seed_all = lambda seed: None
    module.get_rng_state = lambda device=None: torch.get_rng_state()
    module.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    module.memory_allocated = lambda device=None: ops.memory_allocated()
    module.max_memory_allocated = lambda device=None: ops.max_memory_allocated()
    module.reset_peak_memory_stats = lambda device=None: ops.reset_peak_memory_stats()
    module.mem_get_info = lambda device=None: (ops.limit() - ops.memory_allocated(), ops.limit())
    return module


@contextlib.contextmanager
def memory_limit(num_bytes: int) -> Iterator[None]:
    """Limit the device's memory to ``num_bytes``; larger allocations raise ``torch.OutOfMemoryError``."""
    import torch

    ops: Any = torch.ops.simulated_device
    before = ops.limit()
    ops.set_limit(num_bytes)
    try:
        yield
    finally:
        ops.set_limit(before)


def bytes_moved() -> tuple[int, int]:
    """Return the number of bytes copied so far from host to device, and from device to host."""
    import torch

    ops: Any = torch.ops.simulated_device
    return ops.bytes_to_device(), ops.bytes_to_host()


def cpu_view(tensor: Tensor) -> Tensor:
    """Return a device tensor as a CPU tensor that shares its memory."""
    import torch

    return torch.ops.simulated_device.cpu_view(tensor)
