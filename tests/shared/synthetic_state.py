"""State adapters over synthetic tensors, in the layouts of all strategies, for testing checkpoints.

A layout assigns parts of a tensor to ranks. `SyntheticAdapter` holds a rank's parts of tensors whose values are
functions of their names, so that any rank can check what it loaded.
"""

import zlib

import torch

from booster_core.ranks.coordinator import DistCoordinator
from booster_core.state import Box, ParamGroup, StateAdapter, TensorShard, box_numel, box_shape, full_box, slices_of

Part = tuple[Box, "tuple[int, int] | None", bool]
"""Box, flat range, and whether this rank owns it."""

LAYOUTS = ("replicated", "flat", "chunks", "columns", "fused_rows", "stages", "columns_flat")
"""The layouts of `parts_of`: replicated tensors; ZeRO's equal flat ranges; Gemini's chunks that span several tensors;
tensor parallel columns; a fused weight's three row blocks; pipeline stages; tensor parallel with ZeRO inside."""


TENSORS = [
    ("embed.weight", (33, 20), torch.float32),
    ("layers.0.weight", (12, 18), torch.bfloat16),
    ("layers.10.weight", (7, 5, 3), torch.float16),
    ("layers.2.bias", (61,), torch.float32),
    ("scale", (), torch.float32),
    ("empty", (0, 4), torch.float32),
    ("fp8", (8, 9), torch.float8_e4m3fn),
    ("count", (), torch.int64),
    ("mask", (11, 13), torch.bool),
    ("bytes", (40, 40), torch.uint8),
    ("double", (9, 4), torch.float64),
    ("tall", (100, 6), torch.float32),
]
"""Tensors of every kind: without dimensions or elements, of many rows, and in formats of each width."""


def value_of(key, shape, dtype):
    """Return the values of the tensor with a name."""
    generator = torch.Generator().manual_seed(zlib.crc32(key.encode()))
    values = torch.randint(0, 100, shape, generator=generator)
    return (values % 2).bool() if dtype == torch.bool else values.to(torch.float32).to(dtype)


def _ranges(numel, parts, index):
    size = -(-numel // parts)
    return min(size * index, numel), min(size * (index + 1), numel)


def parts_of(  # noqa: PLR0911 - one case for each layout
    layout, shape, position, start, rank, world_size
):
    """Return a rank's parts of one tensor.

    Args:
        layout: One of `LAYOUTS`.
        shape: Shape of the tensor.
        position: Its position in the list of tensors.
        start: Number of elements of the tensors before it.
        rank: The rank.
        world_size: Number of ranks.
    """
    whole = full_box(shape)
    numel = box_numel(whole)
    if layout == "replicated":
        return [(whole, None, position % world_size == rank)]
    if layout == "flat":
        return [(whole, _ranges(numel, world_size, rank), True)]
    if layout == "chunks":
        size, parts = 1000, list[Part]()
        for chunk in range(start // size, -(-(start + numel) // size) + 1):
            low, high = (min(max(edge - start, 0), numel) for edge in (chunk * size, (chunk + 1) * size))
            if low < high and chunk % world_size == rank:
                parts.append((whole, (low, high), True))
        return parts or ([(whole, (0, 0), True)] if numel else [(whole, None, rank == 0)])
    if layout == "stages":
        return [(whole, None, True)] if position % world_size == rank else []
    if layout == "fused_rows" and len(shape) > 1 and shape[0] >= 3 * world_size:
        third = shape[0] // 3
        blocks = [(0, third), (third, 2 * third), (2 * third, shape[0])]
        cuts = [(a + _ranges(b - a, world_size, rank)[0], a + _ranges(b - a, world_size, rank)[1]) for a, b in blocks]
        return [((cut, *whole[1:]), None, True) for cut in cuts]
    if layout == "columns" and len(shape) > 1:
        return [((*whole[:-1], _ranges(shape[-1], world_size, rank)), None, True)]
    if layout == "columns_flat" and len(shape) > 1:
        # Even ranks hold the left columns, odd ranks the right; each side is split flat between its ranks.
        sides = min(2, world_size)
        peers = (world_size - rank % sides + sides - 1) // sides
        box = (*whole[:-1], _ranges(shape[-1], sides, rank % sides))
        return [(box, _ranges(box_numel(box), peers, rank // sides), True)]
    return [(whole, None, rank == world_size - 1)]


class SyntheticAdapter(StateAdapter):
    """Hold a rank's parts of synthetic tensors.

    Args:
        tensors: Name, shape and dtype of the model's tensors.
        layout: One of `LAYOUTS`.
        is_filled: Start with the right values; with zeros otherwise.
        states: Names of elementwise optimizer states.
        has_extra: Whether a module has state that is no tensor.
    """

    def __init__(self, tensors, layout, *, is_filled=True, states=("exp_avg", "master"), has_extra=True):
        self._names = [name for name, _, _ in tensors]
        self._states = list(states) if is_filled else []
        ranks = DistCoordinator()
        self._layout = layout, ranks.rank, ranks.world_size
        self._tensors = tensors
        self._model = self._make(None, is_filled=is_filled)
        self._optimizer = {state: self._make(state, is_filled=is_filled) for state in self._states}
        self.scalars = {name: {"step": 7} for name in self._held()} if is_filled else {}
        self.options = {"lr": 0.5 if is_filled else 0.0, "betas": (0.9, 0.99)}
        extra = {"scale": torch.full((3,), 2.0), "names": ["a", "b"], "n": 3} if is_filled else None
        self.extra = {"block._extra_state": extra} if has_extra else {}
        self.finished = []

    def _make(self, state, *, is_filled):
        layout, rank, world_size = self._layout
        shards, start = [], 0
        for position, (name, shape, dtype) in enumerate(self._tensors):
            kind = dtype if state is None or not dtype.is_floating_point else torch.float32
            whole = value_of(name if state is None else f"{name}/{state}", shape, kind)
            for box, flat, is_owner in parts_of(layout, shape, position, start, rank, world_size):
                data = whole[slices_of(box)].clone() if shape else whole.clone()
                data = data.reshape(box_shape(box)) if flat is None else data.reshape(-1)[flat[0] : flat[1]].clone()
                data = data if is_filled else torch.zeros_like(data)
                shards.append(
                    TensorShard(
                        name=name,
                        global_shape=shape,
                        dtype=kind,
                        box=box,
                        flat=flat,
                        data=data,
                        is_owner=is_owner,
                        state=state,
                    )
                )
            start += whole.numel()
        return shards

    def _held(self):
        return list(dict.fromkeys(shard.name for shard in self._model))

    def wrong(self):
        """Return the keys of the tensors with a wrong value on this rank."""
        wrong = []
        for shard in (*self._model, *(shard for shards in self._optimizer.values() for shard in shards)):
            expected = value_of(shard.key, shard.global_shape, shard.dtype)[slices_of(shard.box)]
            expected = expected if shard.flat is None else expected.reshape(-1)[slice(*shard.flat)]
            if not torch.equal(expected.reshape(shard.data.shape).float(), shard.data.float()):
                wrong.append(shard.key)
        return wrong

    @property
    def keeps_values(self):
        return True

    def model_shards(self):
        yield from self._model

    def tied_names(self):
        return {"tied": self._names[0]}

    def extra_state(self):
        return self.extra

    def load_extra_state(self, values):
        self.extra = dict(values)

    def optimizer_shards(self):
        for shards in self._optimizer.values():
            yield from shards

    def optimizer_scalars(self):
        return self.scalars

    def param_groups(self):
        held = self._held()
        cut = [name for name in self._names[:2] if name in held], [name for name in self._names[2:] if name in held]
        return [ParamGroup(params=tuple(names), options=self.options) for names in cut]

    def prepare_optimizer_load(self, tensors, scalars, groups):
        states = dict.fromkeys(state for entry in tensors.values() for state in entry)
        self._optimizer = {state: self._make(state, is_filled=False) for state in states}
        self.scalars = {name: dict(scalars[name]) for name in self._held() if name in scalars}
        self.options = dict(groups[0].options)

    def finish_load(self, *, model, optimizer):
        self.finished.append((model, optimizer))
