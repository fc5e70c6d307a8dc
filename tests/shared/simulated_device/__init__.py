"""A simulated accelerator for tests: device type ``"simulated"``, compiled from the C++ files here by the test run.

Its memory is counted and can be limited, its streams order work, a timeline tells how long a device would take, and
its collectives follow NCCL's rules; see ``device.cpp``, ``order.h``, ``timeline.h`` and ``collectives.cpp``. It
registers as torch's private-use backend until the process ends, so tests use it in rank workers, which the fixture
``simulated_device`` ends afterwards:

    @on_devices(2)
    def test_it(simulated_device): model.to("simulated"); ...
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import shutil
import subprocess
import sys
import types
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from sysconfig import get_path

import torch
import torch.distributed as dist
from ranked import dispatched, number_of

from booster_testing import run_on_ranks

NAME = "simulated"
BACKEND = f"cpu:gloo,{NAME}:simccl"
"""The backends of a process group, as ``cpu:gloo,cuda:nccl``."""
_FOLDER = Path(__file__).parent
_SOURCES = _FOLDER / "device.cpp", _FOLDER / "collectives.cpp"
_BUILD_SECONDS = 1800
_MODULE = "simulated_device_native"


class NotBuiltError(Exception):
    """Raised if the device can't be built; the message says why."""


def build(folder):
    """Return the path of the device's library; compile it into a folder unless it exists there.

    Raises:
        NotBuiltError: If there is no compiler, or it fails.
    """
    from torch.utils.cpp_extension import include_paths, library_paths

    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        msg = "neither g++ nor clang++ was found to build the simulated device"
        raise NotBuiltError(msg)
    abi = int(torch.compiled_with_cxx11_abi())
    flags = ["-O1", "-std=c++20", "-w", "-fPIC", f"-D_GLIBCXX_USE_CXX11_ABI={abi}", f"-DTORCH_EXTENSION_NAME={_MODULE}"]
    flags += [argument for path in (*include_paths(), get_path("include")) for argument in ("-isystem", path)]
    libraries = [argument for path in library_paths() for argument in ("-L", path)]
    libraries += [f"-l{name}" for name in ("c10", "torch_cpu", "torch", "torch_python")]
    # Both sources in one go: nearly all of the time is for torch's headers.
    command = [compiler, *flags, "-shared", "-include", *map(str, _SOURCES), *libraries]
    texts = b"".join(path.read_bytes() for path in sorted(_FOLDER.glob("*.[ch]*")))
    settings = "\0".join([torch.__version__, sys.version, *command])
    library = folder / f"simulated_device_{hashlib.sha256(settings.encode() + texts).hexdigest()[:16]}.so"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several test sessions may share the folder
        if not library.exists():
            fresh = library.with_suffix(".new")
            result = subprocess.run(
                [*command, "-o", str(fresh)], stderr=subprocess.PIPE, text=True, timeout=_BUILD_SECONDS, check=False
            )
            if result.returncode:
                msg = f"{compiler} could not build the simulated device:\n{result.stderr[-3000:]}"
                raise NotBuiltError(msg)
            fresh.rename(library)
    return str(library)


def load(library):
    """Register the device and its collective backend with torch in this process; later calls do nothing."""
    if torch._C._get_privateuse1_backend_name() == NAME:
        return
    spec = importlib.util.spec_from_file_location(_MODULE, library)
    native = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(native)
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _module())
    torch.utils.generate_methods_for_privateuse1_backend()
    # As on CUDA, `Module.to` keeps the parameters, and so which of them are tied.
    torch.__future__.set_swap_module_params_on_conversion(True)

    def make_backend(store, rank, size, timeout):
        return native.SimulatedBackend(dist.ProcessGroupGloo(store, rank, size, timeout=timeout))

    dist.Backend.register_backend("simccl", make_backend, devices=[NAME])


def run_on_devices(function, world_size, library, *args, **kwargs):
    """Call `booster_testing.run_on_ranks` for ranks with a device each."""
    return run_on_ranks(function, world_size, *args, backend=BACKEND, prepare=partial(load, library), **kwargs)


def on_devices(num_ranks, **limits):
    """Call the test, which has the fixture `simulated_device`, on ranks with a device each: see `ranked.on_ranks`."""

    def dispatch(test, parameters):
        number = number_of(num_ranks, parameters)
        return run_on_devices(test, number, parameters["simulated_device"], *parameters.values(), **limits)

    return dispatched(dispatch)


def _module():
    """Return the module ``torch.simulated``: the functions that torch expects of a device module, as ``torch.cuda``."""
    ops = torch.ops.simulated_device
    module = types.ModuleType(f"torch.{NAME}")
    module.is_available = lambda: True
    module.is_initialized = lambda: True
    module.device_count = lambda: 1
    module.current_device = lambda: 0
    module.set_device = lambda device: None
    module.device = contextlib.nullcontext
    module.Stream = lambda device=None, priority=0: torch.Stream(NAME, priority=priority)
    module.Event = lambda enable_timing=False, **_: torch.Event(NAME, enable_timing=enable_timing)
    module.current_stream = lambda device=None: torch.accelerator.current_stream()
    module.stream = lambda stream: contextlib.nullcontext() if stream is None else stream
    module.synchronize = lambda device=None: ops.synchronize()  # torch 2.10's own takes the device for unused
    module.empty_cache = ops.empty_cache
    module._is_in_bad_fork = lambda: False
    # Kernels run on the CPU and use its generator.
    module.manual_seed = module.manual_seed_all = lambda seed: None
    module.get_rng_state = lambda device=None: torch.get_rng_state()
    module.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    module.memory_allocated = lambda device=None: ops.memory_allocated()
    module.memory_reserved = lambda device=None: ops.memory_reserved()
    module.max_memory_reserved = lambda device=None: ops.max_memory_reserved()
    module.max_memory_allocated = lambda device=None: ops.max_memory_allocated()
    module.memory_stats = lambda device=None: {"num_alloc_retries": ops.num_alloc_retries()}
    module.reset_peak_memory_stats = lambda device=None: ops.reset_peak_memory_stats()
    module.mem_get_info = lambda device=None: (_total_bytes() - ops.memory_reserved(), _total_bytes())
    return module


def _total_bytes():
    """Return the size of the device's memory: a real one has some limit, too."""
    limit = torch.ops.simulated_device.limit()
    return 64 * 2**30 if limit < 0 else limit


@contextlib.contextmanager
def memory_limit(num_bytes):
    """Limit the device's memory to ``num_bytes``; larger allocations raise ``torch.OutOfMemoryError``."""
    ops = torch.ops.simulated_device
    before = ops.limit()
    ops.set_limit(num_bytes)
    try:
        yield
    finally:
        ops.set_limit(before)


def bytes_moved():
    """Return the number of bytes copied so far from host to device, and from device to host."""
    return torch.ops.simulated_device.bytes_to_device(), torch.ops.simulated_device.bytes_to_host()


def max_memory_active():
    """Return the most bytes that could not be used for anything else, since the peak was reset.

    Beside allocated memory, that is memory which is freed, but was named to another stream by ``record_stream``: it is
    not used again before the host has seen that stream come as far, which the host that runs ahead sees late.
    """
    return torch.ops.simulated_device.max_memory_active()


def streams_made():
    """Return how many streams were made so far, those of communicators aside.

    CUDA hands out 32 in turn: whoever makes more shares them with streams that it must not wait for.
    """
    return torch.ops.simulated_device.streams_made()


@dataclass(frozen=True)
class Rates:
    """What the device does per second: operations of matrix products, bytes of its memory, and of each link."""

    flops: float
    memory_bytes: float
    link_bytes: float


def start_timeline(rates):
    """Tell from now on when a device of these rates would begin and end each work; see ``timeline.h``."""
    torch.ops.simulated_device.start_timeline(rates.flops, rates.memory_bytes, rates.link_bytes)


def host_works(seconds):
    """Let the host compute for so long, during which it starts nothing."""
    torch.ops.simulated_device.host_works(seconds)


def times():
    """Return when the last work since `start_timeline` ends, and how long copies from and to the host take in all."""
    return torch.ops.simulated_device.times()
