"""This rank's place in the mesh, as a plugin's attributes: sizes, process groups, and the place in the pipeline.

Colossal-AI's plugin has these names, too.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from booster_core.errors import ConfigError
from booster_hybrid.mesh import mesh_shape
from booster_hybrid.pipeline.schedule import make_schedule

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.distributed import ProcessGroup

    from booster_hybrid.config import HybridConfig
    from booster_hybrid.mesh import Mesh, MeshShape


@dataclass(frozen=True)
class PipelinePosition:
    """A rank's place in the pipeline, under the names of Colossal-AI's stage manager.

    Args:
        stage: The rank's position, counted from 0.
        num_stages: Ranks of the pipeline.
        first: Position of the rank that holds the model's first stage.
        last: Position of the rank that holds the last one, and so has outputs and loss; under ``"zbv"`` the first.
    """

    stage: int
    num_stages: int
    first: int
    last: int

    def is_first_stage(self, *, ignore_chunk: bool = True) -> bool:
        """Return whether one of this rank's stages is the model's first one, where batches enter.

        Args:
            ignore_chunk: Must be ``True``: the answer is about all stages of the rank.

        Raises:
            ConfigError: If it is not.
        """
        _check_chunk(ignore_chunk=ignore_chunk)
        return self.stage == self.first

    def is_last_stage(self, *, ignore_chunk: bool = True) -> bool:
        """Return whether one of them is the last one: this rank gets losses and outputs of `execute_pipeline`.

        Args:
            ignore_chunk: As for `is_first_stage`.

        Raises:
            ConfigError: As `is_first_stage` does.
        """
        _check_chunk(ignore_chunk=ignore_chunk)
        return self.stage == self.last


def _check_chunk(*, ignore_chunk: bool) -> None:
    if not ignore_chunk:
        msg = (
            "`ignore_chunk=False` asks about the chunk that runs at the moment, which a script can't see. Leave it "
            "out: the answer is about all stages of this rank."
        )
        raise ConfigError(msg)


class _Group:
    """The ranks along an axis, made by `boost`.

    Args:
        axis: The axis.
    """

    def __init__(self, axis: str) -> None:
        self._axis = axis

    def __get__(self, plugin: MeshAttributes, _: type) -> ProcessGroup:
        """Return the process group.

        Raises:
            ConfigError: If no model was boosted yet: making groups takes every rank, and a script may ask on one.
        """
        made = plugin._made_for  # noqa: SLF001 - its own
        if not dist.is_initialized() or made is None or made[0] is not dist.group.WORLD:
            msg = f"`plugin.{self._axis}_group` is made when a model is boosted. Ask for it after `booster.boost(...)`."
            raise ConfigError(msg)
        uses_tensor_ranks = self._axis == "sp" and plugin.config.sequence.mode == "split_gather"
        return made[1]["tp" if uses_tensor_ranks else self._axis,].group


class MeshAttributes:
    """Attributes of a plugin that tell a rank's place in the mesh.

    Attributes:
        config: The sizes of the axes.
        dp_group: The ranks that get different batches and hold the same part of the model.
        tp_group: The ranks over which this rank's layers are split.
        pp_group: The ranks of this rank's pipeline, in the order of their positions.
        sp_group: Those over which its sequences are split; under ``"split_gather"`` those of ``tp_group``.
        ep_group: Those over which its experts are spread.
    """

    config: HybridConfig
    _made_for: tuple[Any, Mesh] | None = None
    _has_warned = False
    dp_group, tp_group, pp_group, sp_group, ep_group = map(_Group, ("dp", "tp", "pp", "sp", "ep"))

    @property
    def tp_size(self) -> int:
        """Ranks over which each layer is split."""
        return self.config.tensor.size

    @property
    def pp_size(self) -> int:
        """Ranks over which the layers are spread."""
        return self.config.pipeline.size

    @property
    def sp_size(self) -> int:
        """Ranks over which sequences are split; 1 under ``"split_gather"``, which uses the tensor parallel ranks."""
        return self.config.sequence.size

    @property
    def ep_size(self) -> int:
        """Ranks over which experts are spread; they are data parallel ranks."""
        return self.config.expert.size

    @property
    def zero_stage(self) -> int:
        """Stage of ZeRO; 0 where the state is replicated."""
        return 0 if self.config.zero is None else self.config.zero.stage

    @property
    def dp_size(self) -> int:
        """Ranks that get different batches: what the other sizes leave of the world."""
        return self._launched("dp_size").sizes["dp"]

    @property
    def coordinates(self) -> Mapping[str, int]:
        """This rank's index along each of the axes ``"dp"``, ``"pp"``, ``"sp"`` and ``"tp"``."""
        return self._launched("coordinates").coordinates(dist.get_rank())

    @property
    def stage_manager(self) -> PipelinePosition | None:
        """This rank's place in the pipeline; ``None`` where ``pp_size=1`` makes none."""
        pipeline = self.config.pipeline
        if pipeline.size == 1:
            return None
        placement = make_schedule(pipeline.style, pipeline.size, 1, pipeline.num_chunks).placement
        index = self._launched("stage_manager").coordinates(dist.get_rank())["pp"]
        last = placement.rank_of(placement.num_stages - 1)
        return PipelinePosition(index, pipeline.size, first=placement.rank_of(0), last=last)

    @property
    def _splits_nothing(self) -> bool:
        sizes = self.tp_size, self.pp_size, self.sp_size, self.ep_size
        return dist.is_initialized() and dist.get_world_size() > 1 and max(sizes) == 1 and self.config.zero is None

    def _warn_of_plain_data_parallelism(self) -> None:
        """Say once, on rank 0, that every rank will hold all of a model."""
        if not self._splits_nothing or self._has_warned:
            return
        self._has_warned = True
        if dist.get_rank() == 0:
            logging.getLogger("booster").warning(
                "Plugin 'hybrid' splits nothing: with tp_size=1, pp_size=1, sp_size=1 and zero_stage=0 each of %d "
                "ranks holds the whole model, its gradients and its optimizer state, as under plugin 'ddp'. Pass "
                "`HybridParallelPlugin(tp_size=...)`, `pp_size`, `sp_size` or `zero_stage`, or choose another plugin.",
                dist.get_world_size(),
            )

    def _launched(self, asked: str) -> MeshShape:
        """Return the mesh; raise if there is no process group yet."""
        if not dist.is_initialized():
            msg = f"`plugin.{asked}` needs the process group. Ask for it after `launch_from_torch()`."
            raise ConfigError(msg)
        return self._shape(dist.get_world_size())

    def _shape(self, world_size: int) -> MeshShape:
        return mesh_shape(self.config.sizes, self.config.mesh_order, world_size)
