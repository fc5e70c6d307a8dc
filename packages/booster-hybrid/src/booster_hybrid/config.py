"""`HybridConfig`: the mesh and the options of each of its axes, checked without a process group.

Data parallel ranks are replicas that average gradients, or share the state by ZeRO.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from booster_core.errors import ConfigError
from booster_hybrid.mesh import AXES, check_order
from booster_hybrid.pipeline.schedule import STYLES, ZERO_BUBBLE, make_schedule
from booster_zero import ZeroConfig

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class DataParallelConfig:
    """Options of data parallelism where each rank keeps all of the optimizer state, ``zero_stage=0``.

    Args:
        bucket_bytes: Size of the buckets in which gradients are averaged, in bytes; ``None`` for 25 MiB. A parameter
            that is larger has a bucket of its own.
        overlap_communication: Average gradients during backward.
        communication_dtype: Dtype in which gradients are sent: ``"fp32"``, ``"bf16"`` (half the bytes of fp32),
            ``"fp16"`` or a torch dtype; ``None`` uses that of the parameters. CPUs always sum in fp32, devices in this
            dtype.
        master_weights: Keep fp32 masters of bf16 and fp16 parameters; if False, the optimizer updates the working
            parameters.
        unused: ``"zero"`` gives a parameter that this rank did not use a zero gradient, and skips those that no rank
            used; ``"raise"`` raises at the step and names them by rank.
        broadcast_buffers: Broadcast, after each step, the first data parallel rank's values of buffers that forward
            changes, such as running statistics.

    Raises:
        ConfigError: If a value is out of range.

    Reference: Li et al. 2020, "PyTorch Distributed" (arXiv:2006.15704).
    """

    bucket_bytes: int | None = None
    overlap_communication: bool = True
    communication_dtype: torch.dtype | str | None = None
    master_weights: bool = True
    unused: str = "zero"
    broadcast_buffers: bool = True

    def __post_init__(self) -> None:
        self.with_norm(0.0)  # which refuses what is out of range

    def with_norm(self, max_norm: float) -> ZeroConfig:
        """Return the options for ZeRO's machinery, which does the work with one shard for each rank.

        Args:
            max_norm: Clip gradients by this global norm in each step; 0 does not.

        Raises:
            ConfigError: If a value is out of range.
        """
        return ZeroConfig(max_norm=max_norm, **asdict(self))


def zero_options(zero: ZeroConfig | None, zero_stage: int, max_norm: float, *, cpu_offload: bool) -> ZeroConfig | None:
    """Return ZeRO's options, given as one or one by one; ``None`` where nothing is sharded.

    Args:
        zero: All of them.
        zero_stage: ZeRO's stage; 0 shards nothing.
        max_norm: Global norm to clip by.
        cpu_offload: Whether state is kept on the host.

    Raises:
        ConfigError: If options are given in both ways, or ask for what can't be.
    """
    if zero is None:
        if zero_stage not in (0, 1, 2, 3):
            msg = (
                f"`zero_stage={zero_stage}` is not one of 0 (each rank keeps all of the state), 1 (optimizer state is "
                "split over the data parallel ranks), 2 (gradients too) and 3 (parameters too)."
            )
            raise ConfigError(msg)
        if cpu_offload and zero_stage == 0:
            msg = "`cpu_offload=True` moves what ZeRO shards, and `zero_stage=0` shards nothing. Use `zero_stage=1`."
            raise ConfigError(msg)
        return ZeroConfig(stage=zero_stage, max_norm=max_norm, cpu_offload=cpu_offload) if zero_stage else None
    given = {"zero_stage": zero_stage, "max_norm": max_norm, "cpu_offload": cpu_offload}
    doubled = [name for name, value in given.items() if value]
    if doubled:
        msg = f"`zero=ZeroConfig(...)` says what `{doubled[0]}={given[doubled[0]]}` says, too. Give one of them."
        raise ConfigError(msg)
    return zero


SEQUENCE_MODES = ("split_gather", "all_to_all", "ring_attn")

CONTEXT_PARALLEL = {"ulysses": "all_to_all", "ring": "ring_attn"}
"""The modes that split attention, too, by the field's names."""


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """Pipeline parallelism: consecutive layers on consecutive ranks.

    Args:
        size: Number of ranks that a model's layers are spread over; 1 makes no pipeline.
        num_microbatches: Parts of equal size, give or take a sample, into which each batch is cut; as many as there are
            ranks where neither this nor ``microbatch_size`` is given.
        microbatch_size: Samples in each part but the last, which may have fewer; another way to say it.
        style: Order of the parts' forwards and backwards: one of `booster_hybrid.pipeline.schedule.STYLES`.
        num_model_chunks: Stages on each rank: 1, except for ``"interleaved"`` (2 or more; 2 by default) and
            ``"zbv"`` (2).
        num_layers_per_stage: Number of layers of each stage, in their order; ``None`` shares them out.
        checkpoint_ratio: Which part of each stage's layers, 0 to 1, keeps only its inputs and is recomputed in
            backward: one number for all stages, or one for each in their order. Layers are rounded up. ``None`` leaves
            it to the model.

    Raises:
        ConfigError: If a number is below 1, the style is unknown or does not go with the number of chunks, or both
            ways to cut a batch are given.
    """

    size: int = 1
    num_microbatches: int | None = None
    microbatch_size: int | None = None
    style: str = "1f1b"
    num_model_chunks: int | None = None
    num_layers_per_stage: tuple[int, ...] | None = None
    checkpoint_ratio: float | tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        _check_positive("pp_size", self.size)
        if self.style not in STYLES:
            msg = f"`pp_style={self.style!r}` is not one of {', '.join(map(repr, STYLES))}."
            raise ConfigError(msg)
        for name in ("num_microbatches", "microbatch_size", "num_model_chunks"):
            value = getattr(self, name)
            if value is not None and value < 1:
                msg = f"`{name}={value}` must be at least 1."
                raise ConfigError(msg)
        if self.num_microbatches is not None and self.microbatch_size is not None:
            msg = (
                f"`num_microbatches={self.num_microbatches}` and `microbatch_size={self.microbatch_size}` are two "
                "answers to one question: how a batch is cut. Give one of them."
            )
            raise ConfigError(msg)
        make_schedule(self.style, 1, 1, self.num_chunks)  # refuses what does not go together
        self._check_without_pipeline()
        stages = self.num_layers_per_stage
        if stages is not None and (len(stages) != self.num_stages or min(stages) < 1):
            msg = (
                f"`num_layers_per_stage={list(stages)}` must list {self.num_stages} positive numbers: one for each of "
                f"{self.num_chunks} stage(s) on {self.size} rank(s)."
            )
            raise ConfigError(msg)
        self._check_ratios()

    def _check_ratios(self) -> None:
        asked = self.checkpoint_ratio
        if asked is None:
            return
        ratios = self.checkpoint_ratios
        if len(ratios) != self.num_stages:
            msg = (
                f"`checkpoint_ratio={asked!r}` must be one number, or {self.num_stages}: one for each of "
                f"{self.num_chunks} stage(s) on {self.size} rank(s)."
            )
            raise ConfigError(msg)
        if not all(0.0 <= ratio <= 1.0 for ratio in ratios) or not any(ratios):
            msg = (
                f"`checkpoint_ratio={asked!r}` is the part of each stage's layers that is recomputed: between 0 and "
                "1, and above 0 for one stage at least. `None` leaves it to the model."
            )
            raise ConfigError(msg)

    @property
    def checkpoint_ratios(self) -> tuple[float, ...]:
        """The part of each stage's layers that is recomputed in backward."""
        ratio = self.checkpoint_ratio or 0.0
        return ratio if isinstance(ratio, tuple) else (ratio,) * self.num_stages

    def _check_without_pipeline(self) -> None:
        """Refuse what would have no effect."""
        given = {
            "num_microbatches": self.num_microbatches,
            "microbatch_size": self.microbatch_size,
            "num_layers_per_stage": self.num_layers_per_stage,
            "checkpoint_ratio": self.checkpoint_ratio,
            "num_model_chunks": self.num_model_chunks,
            "pp_style": None if self.style == "1f1b" else self.style,
        }
        for name, value in given.items():
            if self.size == 1 and value is not None:
                msg = f"`{name}={value!r}` is about a pipeline, and `pp_size=1` makes none. Leave it out."
                raise ConfigError(msg)

    @property
    def num_chunks(self) -> int:
        """Stages on each rank."""
        if self.num_model_chunks is not None:
            return self.num_model_chunks
        return 2 if self.style in ("interleaved", ZERO_BUBBLE) else 1

    @property
    def num_stages(self) -> int:
        """Stages of the whole model."""
        return self.size * self.num_chunks


@dataclass(frozen=True, kw_only=True)
class SequenceConfig:
    """Sequence parallelism: each sample's positions split over ranks.

    Args:
        size: Ranks over which a sequence is split; 1 splits none.
        mode: How attention sees the whole sequence: one of `SEQUENCE_MODES`, or ``None`` where none is split.
            ``"split_gather"`` uses the tensor parallel ranks and so takes no size of its own.

    Raises:
        ConfigError: If the size is below 1, the mode is unknown, ``"split_gather"`` comes with a size, or another mode
            without one.
    """

    size: int = 1
    mode: str | None = None

    def __post_init__(self) -> None:
        _check_positive("sp_size", self.size)
        if self.mode is not None and self.mode not in SEQUENCE_MODES:
            known = ", ".join(map(repr, SEQUENCE_MODES))
            msg = f"`sequence_parallelism_mode={self.mode!r}` is not one of {known}, or None."
            raise ConfigError(msg)
        if (self.size > 1) != (self.mode in ("all_to_all", "ring_attn")):
            msg = (
                f"`sp_size={self.size}` and `sequence_parallelism_mode={self.mode!r}` don't go together: 'all_to_all' "
                "and 'ring_attn' split sequences over `sp_size` ranks, of which they need two or more, and "
                "'split_gather' over the tensor parallel ranks. Change one of them, or leave both out."
            )
            raise ConfigError(msg)


@dataclass(frozen=True, kw_only=True)
class HybridConfig:
    """The mesh of a hybrid run; the data parallel size is what the other sizes leave of the world.

    Args:
        tp_size: Ranks over which a layer is split; 1 splits none.
        pipeline: Pipeline parallelism.
        sequence: Sequence parallelism.
        ep_size: Data parallel ranks over which experts are spread; 1 leaves all of them on each rank.
        zero: ZeRO over the data parallel ranks; ``None`` replicates the optimizer state on them.
        ddp: How they average gradients where the state is replicated; ``None`` for the defaults.
        mesh_order: The axes, from the outermost to the innermost, whose ranks are neighbours.

    Raises:
        ConfigError: If a size is below 1, ``"split_gather"`` splits sequences without a tensor size, there are options
            of both ways to share the state, or the order does not name each axis once.
    """

    tp_size: int = 1
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    sequence: SequenceConfig = field(default_factory=SequenceConfig)
    ep_size: int = 1
    zero: ZeroConfig | None = None
    ddp: DataParallelConfig | None = None
    mesh_order: tuple[str, ...] = AXES

    def __post_init__(self) -> None:
        _check_positive("tp_size", self.tp_size)
        _check_positive("ep_size", self.ep_size)
        check_order(self.mesh_order)
        if self.ddp is not None and self.zero is not None:
            msg = (
                f"`ddp=DataParallelConfig(...)` is about `zero_stage=0`, and stage {self.zero.stage} of ZeRO has "
                "options of its own. Leave it out, and pass `zero=ZeroConfig(...)`."
            )
            raise ConfigError(msg)
        if self.zero is not None and self.zero.replica_size > 1:
            msg = (
                f"`zero=ZeroConfig(replica_size={self.zero.replica_size})`: all data parallel ranks share the state "
                "here. Use 1."
            )
            raise ConfigError(msg)
        mode = self.sequence.mode
        if mode == "split_gather" and self.tp_size == 1:
            msg = (
                "`sequence_parallelism_mode='split_gather'` splits sequences over the tensor parallel ranks, but "
                "`tp_size=1`. Pass `tp_size`, or use 'all_to_all' or 'ring_attn' with `sp_size`."
            )
            raise ConfigError(msg)

    def data_parallel(self, max_norm: float = 0.0) -> ZeroConfig:
        """Return the options of what reduces gradients and steps.

        Args:
            max_norm: Global norm to clip by where the state is replicated.
        """
        if self.zero is not None:
            return self.zero
        return (self.ddp or DataParallelConfig()).with_norm(max_norm)

    @property
    def sizes(self) -> dict[str, int]:
        """Size of each axis but that of data parallelism."""
        return {"pp": self.pipeline.size, "sp": self.sequence.size, "tp": self.tp_size}


def sequence_config(
    size: int,
    mode: str | None,
    *,
    sequence_parallel: bool,
    context_parallel: str | None,
) -> SequenceConfig:
    """Return how sequences are split, by the names of torch and Megatron or by Colossal-AI's mode.

    Args:
        size: Ranks over which a sequence is split.
        mode: Colossal-AI's ``sequence_parallelism_mode``.
        sequence_parallel: Split over the tensor parallel ranks, as ``"split_gather"`` does.
        context_parallel: ``"ulysses"`` or ``"ring"``.

    Raises:
        ConfigError: If more than one of them is given, or it is unknown.
    """
    if context_parallel not in (None, *CONTEXT_PARALLEL):
        known = " or ".join(map(repr, CONTEXT_PARALLEL))
        msg = f"`context_parallel={context_parallel!r}` is not {known}."
        raise ConfigError(msg)
    given = {
        "sequence_parallelism_mode": mode,
        "sequence_parallel": sequence_parallel or None,
        "context_parallel": context_parallel,
    }
    named = [f"{name}={value!r}" for name, value in given.items() if value is not None]
    if len(named) > 1:
        msg = f"`{'` and `'.join(named)}` are two ways to split sequences. Give one of them."
        raise ConfigError(msg)
    if sequence_parallel:
        mode = "split_gather"
    elif context_parallel is not None:
        mode = CONTEXT_PARALLEL[context_parallel]
    return SequenceConfig(size=size, mode=mode)


def checked_choice(unchecked: str) -> str:
    """Return what to do about layers that can't be checked.

    Raises:
        ConfigError: If it is none of the two possibilities.
    """
    if unchecked not in ("raise", "allow"):
        msg = f"`unchecked={unchecked!r}` is neither 'raise' nor 'allow'."
        raise ConfigError(msg)
    return unchecked


def check_used(
    config: HybridConfig,
    *,
    custom_policy: object,
    example_batch: object,
    split_batch: object,
    pipeline_record: object,
) -> None:
    """Refuse options that would have no effect.

    Args:
        config: The mesh.
        custom_policy: How the model is split; ``None`` where it was not given, as for the following three.
        example_batch: A batch for the dry run that finds layers.
        split_batch: Splits batches into microbatches.
        pipeline_record: Where to write down what a pipeline does.

    Raises:
        ConfigError: If there is one.
    """
    pp_size = config.pipeline.size
    is_split = config.sequence.mode is not None or config.tp_size > 1
    of_pipeline = (
        (
            "example_batch",
            None if is_split else example_batch,
            "is for finding the layers of",
        ),
        ("split_batch", split_batch, "splits the batches of"),
        ("pipeline_record", pipeline_record, "writes down the work of"),
    )
    for name, value, what in of_pipeline:
        if pp_size == 1 and value is not None:
            msg = f"`{name}` {what} a pipeline, and `pp_size=1` makes none. Pass `pp_size`, or leave it out."
            raise ConfigError(msg)
    if split_batch is not None and not callable(split_batch):
        msg = (
            f"`split_batch` is a function of a batch and a number of microbatches; got `{type(split_batch).__name__}`."
        )
        raise TypeError(msg)
    if split_batch is not None and config.pipeline.microbatch_size is not None:
        msg = (
            f"`microbatch_size={config.pipeline.microbatch_size}` and `split_batch` are two answers to one question: "
            "how a batch is cut. Give one of them; `num_microbatches` is passed on to `split_batch`."
        )
        raise ConfigError(msg)
    sizes = (config.tp_size, pp_size, config.ep_size)
    if custom_policy is not None and max(sizes) == 1 and config.sequence.mode is None:
        msg = (
            "`custom_policy` says where a model is split, and `tp_size=1`, `pp_size=1` and `ep_size=1` without a "
            "`sequence_parallelism_mode` split none. Leave it out."
        )
        raise ConfigError(msg)


def _check_positive(name: str, size: int) -> None:
    if size < 1:
        msg = f"`{name}={size}` must be at least 1, which leaves that axis out."
        raise ConfigError(msg)
