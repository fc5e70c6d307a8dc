"""Weights that are released in 8 or 4 bits, read as the fp32 values that they stand for, in any parts.

Two forms are known. In block FP8 (DeepSeek-V3 and later, Qwen3-FP8) a weight comes with a scale for each block of
128 x 128 values (``weight_block_size``), or one for all: ``weight`` and ``weight_scale_inv``. Two values of 4 bits
(E2M1) in a byte occur there, too. In MXFP4 (gpt-oss) 32 values of 4 bits share a power of two: ``*_blocks`` of 16
bytes, and ``*_scales``. The arithmetic is that of transformers with ``dequantize=True``: a product in fp32, rounded
once to the model's format. Blocks are those of the configuration, also where they don't divide a weight, as in
DeepSeek's code.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from booster_checkpoint.files.composed import rows_of
from booster_checkpoint.files.safetensors_file import is_low_bit
from booster_core.errors import CheckpointDamagedError, CheckpointError
from booster_core.state import TensorMeta, box_numel, box_shape, full_box, slices_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from booster_checkpoint.storage import Location
    from booster_core.state import Box

    Read = Callable[[str, Box, torch.Tensor], None]

_READABLE = ("fp8", "mxfp4")
_BLOCK = (128, 128)
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_E8M0_BIAS = 127
_BLOCKS, _SCALES = "_blocks", "_scales"
_MX_BYTES, _MX_VALUES = 16, 32
_REMEDY = "Download its files again, or load a release in bf16."


def _pairs() -> torch.Tensor:
    """Return for each byte the two values of 4 bits in it, that of the low half first, as a complex number."""
    table = torch.tensor(_E2M1)
    return torch.complex(table.repeat(16), table.repeat_interleave(16))


@dataclass(frozen=True)
class QuantizedWeight:
    """A weight, and how its values are made from the tensors of files.

    Args:
        key: The tensor of files with its values.
        scales: The tensor of files with its scales.
        meta: Shape and format of the weight.
        stored: Shape and format of ``key``.
        scales_meta: Shape and format of ``scales``.
        block: Rows and columns that share a scale.
        unit: Columns that are stored together: 2 in a byte, or 32 in the last dimension; 1 where each is for itself.
        is_transposed: Whether files hold it with its last two dimensions exchanged; ``block`` is of these.
    """

    key: str
    scales: str
    meta: TensorMeta
    stored: TensorMeta
    scales_meta: TensorMeta
    block: tuple[int, int]
    unit: int = 1
    is_transposed: bool = False

    def read(self, read: Read, box: Box, out: torch.Tensor) -> None:
        """Read a box of the weight into ``out``, row-major and contiguous, by means of ``read`` for files' tensors."""
        target = out.view(box_shape(box))
        if self.is_transposed:
            box, target = (*box[:-2], box[-1], box[-2]), target.transpose(-1, -2)
        for part in rows_of(box, out.dtype.itemsize):
            target[slices_of(part, box)] = self._values(read, part).mul(self._factors(read, part))

    def _values(self, read: Read, box: Box) -> torch.Tensor:
        """Return the values without their scales, read in whole units."""
        (start, stop), ndim = box[-1], len(box)
        first, last = start // self.unit, -(-stop // self.unit)
        stored = (*box[:-1], (first, last), *full_box(self.stored.shape[ndim:]))
        packed = torch.empty(box_numel(stored), dtype=self.stored.dtype)
        read(self.key, stored, packed)
        if packed.itemsize > 1:
            return packed.float().view(box_shape(box))
        # A look-up is four times as fast as the conversion, and that of a complex number as that of two.
        table = torch.arange(256, dtype=torch.uint8).view(self.stored.dtype).float() if self.unit == 1 else _pairs()
        values = table.index_select(0, packed.view(torch.uint8).int())
        values = torch.view_as_real(values) if table.is_complex() else values
        values = values.view(*box_shape(box[:-1]), (last - first) * self.unit)
        return values.narrow(-1, start - first * self.unit, stop - start)

    def _factors(self, read: Read, box: Box) -> torch.Tensor:
        """Return the scale of each value of a box, or one for all."""
        meta, ndim = self.scales_meta, len(box)
        is_grid = len(meta.shape) == ndim and meta.shape[-2:] != (1, 1)
        ranges = [
            (first // size, (last - 1) // size + 1) for (first, last), size in zip(box[-2:], self.block, strict=True)
        ]
        leading = box[:-2] if len(meta.shape) == ndim else ()
        part = (*leading, *(ranges if is_grid else full_box(meta.shape[len(leading) :])))
        scales = torch.empty(box_numel(part), dtype=meta.dtype)
        read(self.scales, part, scales)
        factors = (scales.float() - _E8M0_BIAS).exp2() if meta.dtype == torch.uint8 else scales.float()
        if not is_grid:
            return factors.view(*box_shape(leading), *(1,) * (ndim - len(leading)))
        factors = factors.view(box_shape(part))
        for dim in (-1, -2):
            (first, last), size = box[dim], self.block[dim]
            factors = factors.index_select(dim, torch.arange(first, last) // size - first // size)
        return factors


def find_weights(
    path: Location, tensors: Mapping[str, TensorMeta], config: Any
) -> tuple[dict[str, QuantizedWeight], set[str]]:
    """Return the weights that a checkpoint holds quantized, by name, and the names of tensors that only serve these.

    Args:
        path: The checkpoint, for messages.
        tensors: What the files hold.
        config: Their ``config.json``; ``None`` if there is none.

    Raises:
        CheckpointError: If the weights are in another form, or scales are absent or of another shape than blocks have.
    """
    settings = _settings_of(config)
    method = settings.get("quant_method")
    if settings and method not in _READABLE:
        msg = (
            f"The weights in '{path}' are quantized by `quant_method={method!r}`, which can't be read; 'fp8' and "
            "'mxfp4' can. Load a release in bf16, or write one with transformers, where it knows how: "
            "`AutoModelForCausalLM.from_pretrained(...).dequantize().save_pretrained(...)`."
        )
        raise CheckpointError(msg)
    weights: dict[str, QuantizedWeight] = {}
    for key, meta in tensors.items():
        if key.endswith(_BLOCKS) and meta.dtype == torch.uint8:
            name = key.removesuffix(_BLOCKS)
            if name + _SCALES in tensors or method == "mxfp4":
                weights[name] = _in_mxfp4(path, key, name + _SCALES, tensors)
            continue
        stem = key.removesuffix(".weight")
        others = () if stem == key or not is_low_bit(meta.dtype) else (f"{stem}.scale", f"{stem}.qscale_weight")
        scales = next((each for each in (f"{key}_scale_inv", *others) if each in tensors), None)
        if scales is not None:
            weights[key] = _in_blocks(path, key, scales, tensors, settings.get("weight_block_size", _BLOCK))
    used = {name for weight in weights.values() for name in (weight.key, weight.scales)}
    for key, meta in tensors.items():
        if method == "fp8" and key not in used and len(meta.shape) > 1 and is_low_bit(meta.dtype):
            msg = f"'{path}' holds '{key}' in {meta.dtype} without its scales, '{key}_scale_inv'. {_REMEDY}"
            raise CheckpointDamagedError(msg)
    static = {key for key in tensors if weights and key.endswith("activation_scale")}
    return weights, (used | static) - weights.keys()


def without_quantization(config: Any) -> Any:
    """Return a configuration that says nothing of quantized weights."""
    if not isinstance(config, dict):
        return config
    return {name: without_quantization(value) for name, value in config.items() if name != "quantization_config"}


def _settings_of(config: Any) -> dict[str, Any]:
    """Return the entry ``quantization_config`` of a model's configuration, or of that of its text model."""
    for each in (config, config.get("text_config") if isinstance(config, dict) else None):
        found = each.get("quantization_config") if isinstance(each, dict) else None
        if isinstance(found, dict):
            return found
    return {}


def _in_mxfp4(path: Location, key: str, scales: str, tensors: Mapping[str, TensorMeta]) -> QuantizedWeight:
    blocks, found = tensors[key], tensors.get(scales)
    *leading, rows, groups, nbytes = (0, 0, *blocks.shape)[-max(len(blocks.shape), 3) :]
    if found is None or found.dtype != torch.uint8 or found.shape != blocks.shape[:-1] or nbytes != _MX_BYTES:
        there = "none is there" if found is None else f"'{scales}' is {found.shape} of {found.dtype}"
        msg = (
            f"'{key}' in '{path}' is {blocks.shape} of {blocks.dtype}. MXFP4 has blocks of {_MX_BYTES} bytes, and a "
            f"scale of 8 bits for each of them in '{scales}': {there}. {_REMEDY}"
        )
        raise CheckpointDamagedError(msg)
    meta = TensorMeta(shape=(*leading, groups * _MX_VALUES, rows), dtype=torch.float32)
    return QuantizedWeight(key, scales, meta, blocks, found, (1, _MX_VALUES), _MX_VALUES, is_transposed=True)


def _in_blocks(path: Location, key: str, scales: str, tensors: Mapping[str, TensorMeta], block: Any) -> QuantizedWeight:
    stored, found = tensors[key], tensors[scales]
    unit = 2 if stored.dtype in (torch.int8, getattr(torch, "float4_e2m1fn_x2", None)) else 1
    *leading, rows, columns = (*stored.shape[:-1], stored.shape[-1] * unit) if stored.shape else (0, 0)
    grid = found.shape[-2:] if len(found.shape) > 1 else (1, 1)
    if unit == 2 and all(grid):  # E2M1: blocks of their own, 1 x 32
        block = (rows // grid[0], columns // grid[1])
    is_alone = math.prod(found.shape) == 1 or (grid == (1, 1) and found.shape[:-2] == tuple(leading))
    sizes = block if isinstance(block, (list, tuple)) and len(block) == len(grid) else (0, 0)
    is_divided = all(type(size) is int and size > 0 for size in sizes) and found.shape == (
        *leading,
        *(-(-length // size) for length, size in zip((rows, columns), sizes, strict=True)),
    )
    if len(stored.shape) < len(grid) or not (is_alone or is_divided):
        msg = (
            f"'{key}' in '{path}' is {stored.shape} and its scales '{scales}' {found.shape}: not one for each block of "
            f"`weight_block_size={block!r}`, nor one for all. Correct the entry in 'config.json' next to the files, or "
            "download them again."
        )
        raise CheckpointError(msg)
    meta = TensorMeta(shape=(*leading, rows, columns), dtype=torch.float32)
    return QuantizedWeight(key, scales, meta, stored, found, (rows, columns) if is_alone else tuple(sizes), unit)
