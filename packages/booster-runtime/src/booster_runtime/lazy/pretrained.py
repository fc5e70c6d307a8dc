"""Lets a lazy model's tensors come from a checkpoint, before any initialiser has run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from booster_checkpoint.files import MODEL
from booster_checkpoint.load import Expectation, as_model_names, compare, open_source
from booster_core.errors import CheckpointError, LazyInitError
from booster_core.state import NamedTensors, TensorMeta, extra_state_modules
from booster_runtime.lazy.files import FileRead, empty_like
from booster_runtime.lazy.tensor import LazyTensor

if TYPE_CHECKING:
    from torch import nn

    from booster_core.checkpoint_io import LoadReport


def load_pretrained(model: nn.Module, checkpoint: str | Path, *, strict: bool = True) -> LoadReport:
    """Let a lazy model have the values of a checkpoint instead of those that its construction draws.

    Nothing is read but names and shapes: the values are read when the model is boosted, by each rank as far as it
    keeps them. Initialisers of tensors that are in the checkpoint never run; where none is left to draw, random
    generators are left as they were before `LazyInitContext`.

    Args:
        model: A lazy model. Floating values are converted to its dtypes.
        checkpoint: A file, an index, or a folder, in any form that `Booster.load_model` reads.
        strict: Raise unless model and checkpoint hold the same tensors; ``False`` takes those that fit.

    Returns:
        What will be loaded and what will not.

    Raises:
        LazyInitError: If the model has its values already.
        CheckpointError: If the checkpoint can't be read, or with ``strict`` does not fit.
    """
    named = NamedTensors.of(model)
    lazies = [tensor for tensor in named.tensors.values() if isinstance(tensor, LazyTensor)]
    if not lazies:
        msg = "`load_pretrained` is for lazy models; this one has its values. Boost it and use `Booster.load_model`."
        raise LazyInitError(msg)
    path = Path(checkpoint).resolve()
    extra = extra_state_modules(model)
    expected = Expectation(
        tensors={
            name: TensorMeta(shape=tuple(tensor.shape), dtype=tensor.dtype) for name, tensor in named.tensors.items()
        },
        aliases=named.aliases,
        extra=tuple(extra),
    )
    with open_source(path, MODEL) as source, torch.no_grad():
        known = (*expected.tensors, *expected.aliases, *expected.extra)
        stored = as_model_names(source, model, known)
        report, found = compare(stored.tensors, stored.values, expected)
        if strict and not report.is_complete:
            msg = f"'{path}' does not fit the model. {report.problems()} Pass `strict=False` to load what fits."
            raise CheckpointError(msg)
        for name, home in found.items():
            tensor, layout = named.tensors[name], stored.layouts[home]
            if isinstance(tensor, LazyTensor):
                recorder = tensor.lazy_recorder
                key = layout.single or home
                parts = {piece.key: source.tensors[piece.key] for piece in layout.pieces}
                read = FileRead(recorder.files, path, key, layout.meta, None if layout.single else (layout, parts))
                value = recorder.record_source("a tensor of a file", read, empty_like(read.meta))
                tensor.data = value.to(device=tensor.device, dtype=tensor.dtype)
            else:
                tensor.copy_(stored.read_whole(home))
        for name, value in stored.extra_values(tuple(extra)).items():
            extra[name].set_extra_state(value)
    for recorder in {id(tensor.lazy_recorder): tensor.lazy_recorder for tensor in lazies}.values():
        recorder.draws_if_needed = True
    return report
