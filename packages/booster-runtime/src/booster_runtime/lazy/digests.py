"""A short number for a tensor's values, to see whether they changed, or differ between processes."""

from __future__ import annotations

import ctypes

import torch
import xxhash
from torch.utils._python_dispatch import _disable_current_modes


def digest_of(tensor: torch.Tensor) -> int:
    """Return the xxh3 (64 bits) of a real tensor's shape, dtype and values.

    Collective: none.
    """
    with _disable_current_modes(), torch.no_grad():
        plain = tensor.detach()
        if plain.layout != torch.strided:
            plain = plain.to_dense()
        plain = plain.cpu().contiguous().resolve_conj().resolve_neg()
        digest = xxhash.xxh3_64(f"{tuple(plain.shape)} {plain.dtype}".encode())
        if plain.numel():
            # Not by `numpy()`, after which torch lets nobody resize the tensor.
            digest.update((ctypes.c_char * plain.nbytes).from_address(plain.data_ptr()))
        return digest.intdigest()
