"""Print what a bug report needs: machine, versions, plugins."""

from __future__ import annotations

import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

import click
import importlib_metadata

from booster_core import discovery
from booster_core.ranks.environments import choose_backend, describe_devices, variables

_THIRD_PARTY = ("torch", "safetensors", "transformers", "peft", "numpy", "pluggy", "importlib_metadata")
_VARIABLES = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM_JOB_ID",
    "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
    "PMI_RANK", "PMI_SIZE", "BOOSTER_MONITOR", "BOOSTER_LOG", "OMP_NUM_THREADS",
    "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "NCCL_DEBUG", "NCCL_SOCKET_IFNAME", "NCCL_P2P_DISABLE",
    "NCCL_IB_DISABLE", "GLOO_SOCKET_IFNAME", "TORCH_DISTRIBUTED_DEBUG", "TORCH_NCCL_BLOCKING_WAIT",
    "PYTORCH_CUDA_ALLOC_CONF", "HF_HOME", "HF_HUB_OFFLINE", "PYTHONPATH",
)  # fmt: skip


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")
def command(*, as_json: bool) -> None:
    """Print what a bug report needs: machine, Python, torch, devices, backends, packages, plugins."""
    report = {
        "machine": _machine(),
        "python": {"version": sys.version.split()[0], "implementation": platform.python_implementation()},
        "torch": _torch(),
        "packages": _packages(),
        "plugins": {
            listing.name: listing.problem or f"{listing.distribution} {listing.version}"
            for listing in discovery.installed()
        },
        "environment variables": variables(*_VARIABLES),
    }
    if as_json:
        click.echo(json.dumps(report, indent=2))
        return
    for title, entries in report.items():
        click.echo("\n".join([f"{title}:", *(f"  {key}: {value}" for key, value in entries.items())]))


def _machine() -> dict[str, Any]:
    memory = Path("/proc/meminfo")
    return {
        "system": platform.platform(),
        "usable cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory": ", ".join(memory.read_text().replace(" ", "").splitlines()[:3]) if memory.exists() else "unknown",
    }


def _torch() -> dict[str, Any]:
    """Return what torch says of its build, of devices and of backends, or why it cannot be imported."""
    try:
        import torch
        from torch import distributed
    except (ImportError, OSError) as error:
        return {"problem": f"torch cannot be imported: {error}"}
    facts: dict[str, Any] = {
        "version": torch.__version__,
        "built for CUDA": torch.version.cuda or "no",
        "built for ROCm": torch.version.hip or "no",
        "threads": torch.get_num_threads(),
        "gloo": distributed.is_available() and distributed.is_gloo_available(),
        "nccl": distributed.is_available() and distributed.is_nccl_available(),
        "backend": choose_backend(None),
        "devices": torch.accelerator.device_count(),
    }
    if torch.cuda.is_available():
        facts["NCCL version"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return {**facts, **describe_devices()}


def _packages() -> dict[str, str]:
    """Return the versions of Booster's own distributions, of all plugins', and of their main dependencies."""
    versions: dict[str, str] = {}
    for distribution in importlib_metadata.distributions():
        name = distribution.metadata["Name"] or ""
        groups = {entry.group for entry in distribution.entry_points}
        if name in _THIRD_PARTY or name.startswith("booster-") or groups & {"booster.plugins", "booster.hooks"}:
            versions.setdefault(name, distribution.version)
    return dict(sorted(versions.items()))
