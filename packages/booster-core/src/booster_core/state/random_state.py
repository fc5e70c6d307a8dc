"""A rank's random number generators, Python's, NumPy's and torch's: their states as tensors and JSON, own streams."""

from __future__ import annotations

import hashlib
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from booster_core.errors import CheckpointError
from booster_core.state.json_values import decode_json, encode_json

if TYPE_CHECKING:
    from collections.abc import Mapping

_origins: dict[int, int] = {}
"""The seed that `separate_random_state` set last, and the one before."""


def capture_random_state(device: torch.device, name: str, tensors: dict[str, torch.Tensor]) -> Any:
    """Return the states of this process' global generators as JSON that refers to tensors.

    Args:
        device: The rank's device; its generator is included where it is an accelerator.
        name: Where the tensors' names begin.
        tensors: Filled with the tensors.
    """
    version, internal, gauss_next = random.getstate()
    states: dict[str, Any] = {
        "python": {"version": version, "internal": torch.tensor(internal), "gauss_next": gauss_next},
        "numpy": _with_tensors(np.random.get_state(legacy=False)),  # noqa: NPY002 - the global state is what is meant
        "torch": torch.get_rng_state(),
    }
    if device.type != "cpu":
        states[device.type] = torch.get_device_module(device).get_rng_state(device)
    return encode_json(states, name, tensors)


def restore_random_state(device: torch.device, state: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    """Set this process' global generators to states that `capture_random_state` returned.

    The state of a device's generator is used where this rank runs on a device of that type, too.

    Raises:
        CheckpointError: If a state is not one of these generators.
    """
    states = decode_json(state, tensors)
    try:
        python = states["python"]
        random.setstate((python["version"], tuple(python["internal"].tolist()), python["gauss_next"]))
        np.random.set_state(_with_arrays(states["numpy"]))  # noqa: NPY002 - see above
        torch.set_rng_state(states["torch"])
        if device.type != "cpu" and device.type in states:
            torch.get_device_module(device).set_rng_state(states[device.type], device)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        msg = f"The saved states of random numbers do not fit the generators of this process: {error}."
        raise CheckpointError(msg) from error


def separate_random_state(index: int) -> None:
    """Let this process' global generators go on in a stream of their own, which follows from where they are.

    Ranks that draw alike and pass one index still draw alike; index 0 goes on as if nothing had happened.

    Args:
        index: Tells the streams apart: the index among the ranks that see different samples.
    """
    if index:  # each by a number of its own: a script may seed some of them only
        seed = common_seed()
        random.seed(_mixed(random.getrandbits(64), index))
        np.random.seed(_mixed(int.from_bytes(np.random.bytes(8), "little"), index) % 2**32)  # noqa: NPY002 - see above
        torch.manual_seed(_mixed(int(torch.randint(2**62, ())), index))
        _origins.clear()
        _origins[torch.initial_seed()] = seed


def common_seed() -> int:
    """Return the seed of torch's generator before `separate_random_state`: alike on ranks that were seeded alike."""
    return _origins.get(torch.initial_seed(), torch.initial_seed())


def _mixed(number: int, index: int) -> int:
    return int.from_bytes(hashlib.blake2b(f"{number}/{index}".encode(), digest_size=7).digest(), "little")


def _with_tensors(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with_tensors(item) for key, item in value.items()}
    return torch.from_numpy(value.copy()) if isinstance(value, np.ndarray) else value


def _with_arrays(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with_arrays(item) for key, item in value.items()}
    return value.numpy() if isinstance(value, torch.Tensor) else value
