"""`StateAdapter`: how a plugin shows its state, as shards that can be read and written.

`StateAdapter` is the only thing a plugin supplies for checkpoints, resharding, EMA and gradient access. It contains no
file code. `booster_core.state.ReplicatedStateAdapter` is the default, for plugins that keep the whole model on every
rank.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import torch

    from booster_core.state.shard import TensorShard

JSONValue = Any
"""What ``json`` can write: str, int, float, bool, None, and lists and str-keyed dicts of these.

`booster_core.state.encode_json` turns other plain values (tuples, other dicts, lists of tensors) into such."""


@dataclass(frozen=True, kw_only=True)
class TensorMeta:
    """What a checkpoint says of one tensor before any of its values are read.

    Args:
        shape: Shape of the whole tensor.
        dtype: Element type in the file.
        keeps_dtype: Room for it has this type whatever its parameter's is: optimizer state that had another one.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    keeps_dtype: bool = False


@dataclass(frozen=True, kw_only=True)
class ParamGroup:
    """One parameter group of an optimizer, free of ids and of this run's objects.

    Args:
        params: Names of the group's parameters, in the group's order.
        options: Every other entry of the group (``lr``, ``betas``, ...), as JSON values; tensors (a capturable
            ``lr``) appear as Python numbers.
    """

    params: tuple[str, ...]
    options: Mapping[str, JSONValue]


class ShardFollower(Protocol):
    """Keeps values that are cut as a model's shards, and hands them over where the model is cut in another way."""

    def give(self, shard: TensorShard) -> None:
        """Write what is kept of a shard of this rank's tensors into ``shard.data``, and forget it."""

    def take(self, shard: TensorShard) -> None:
        """Keep a copy of ``shard.data``, which is to be kept of a shard from now on."""


class StateAdapter(ABC):
    """Lists the parts of the model's and the optimizer's tensors that this rank holds.

    One adapter serves one boosted model and, where there is one, its optimizer. Iterators are lazy where that saves
    memory: a caller copies out of ``shard.data`` (or into it) before it asks for the next shard, and keeps no
    reference, so that an adapter may stage a tensor from a slower memory for just that long.

    Every rank lists its own shards. Over all ranks, the owned shards of a tensor cover it exactly once.
    """

    @property
    def keeps_values(self) -> bool:
        """Whether ``shard.data`` stays valid after the next shard; if not, saves of several hosts copy it first."""
        return False

    @abstractmethod
    def model_shards(self) -> Iterator[TensorShard]:
        """Yield the shards of parameters and persistent buffers held here. ``data`` is readable and writable.

        Tied tensors are yielded once, under their first name; `tied_names` tells the others.
        """

    def export_shards(self, dtypes: Mapping[str, torch.dtype]) -> Iterator[TensorShard]:
        """Yield what a file in ``dtypes`` is written from: `model_shards`, or masters of which they are rounded copies.

        Args:
            dtypes: The element type of tensors in the file, by name; those without one are written as they are.
        """
        del dtypes
        return self.model_shards()

    def model_targets(self, stored: Mapping[str, TensorMeta]) -> Iterator[TensorShard]:
        """Yield what a load of ``stored`` writes: `model_shards`, and masters of which they would be a rounded copy."""
        del stored
        return self.model_shards()

    def follow(self, follower: ShardFollower) -> None:  # noqa: B027 - most shards stay as they are cut
        """Let a follower's values go along whenever `export_shards` is cut in another way, as long as it lives.

        Args:
            follower: The same on every rank.
        """

    def place(self, shard: TensorShard) -> Iterator[TensorShard]:
        """Yield a shard of this rank's own tensors as this adapter lists it, with views of its ``data``."""
        yield shard

    @abstractmethod
    def tied_names(self) -> Mapping[str, str]:
        """Return, for each further name of a tied tensor, the first name, under which its shard is listed."""

    @abstractmethod
    def extra_state(self) -> Mapping[str, object]:
        """Return the values of modules' ``get_extra_state``, keyed as in ``state_dict`` (``layer._extra_state``)."""

    @abstractmethod
    def load_extra_state(self, values: Mapping[str, object]) -> None:
        """Hand values that `extra_state` once returned to the modules' ``set_extra_state``."""

    @abstractmethod
    def optimizer_shards(self) -> Iterator[TensorShard]:
        """Yield the tensors of the optimizer's state held here; ``shard.state`` names which state.

        Elementwise state (``exp_avg``) has the parameter's global shape; any other has its own, held and owned like a
        replicated tensor. A parameter's state that is a list of tensors is listed by path: ``"old_dirs/3"``. Master
        weights, where the run keeps them, are the state ``"master"``.
        """

    @abstractmethod
    def optimizer_scalars(self) -> Mapping[str, Mapping[str, JSONValue]]:
        """Return state that is not a tensor, by parameter name and state name (a step count kept as a Python int)."""

    def unsaved_state(self) -> Sequence[str]:
        """Return names of the optimizer's state that neither shards nor scalars show; a save refuses them."""
        return ()

    @abstractmethod
    def param_groups(self) -> Sequence[ParamGroup]:
        """Return the optimizer's parameter groups by name, as far as this rank holds them.

        A rank that holds only some of the parameters (a pipeline stage) lists those; group ``i`` is the same group on
        every rank, and may be empty on some.
        """

    @abstractmethod
    def prepare_optimizer_load(
        self,
        tensors: Mapping[str, Mapping[str, TensorMeta]],
        scalars: Mapping[str, Mapping[str, JSONValue]],
        groups: Sequence[ParamGroup],
    ) -> None:
        """Make room for the state that a checkpoint holds, so that `optimizer_shards` lists it for writing.

        Existing state that the checkpoint does not hold is dropped. A checkpoint's ``"master"`` of a parameter for
        which this run keeps no master weights is taken as the parameter itself: `optimizer_shards` then lists the
        parameter's own storage (or a staging tensor copied in by `finish_load`) under the state ``"master"``.

        Entries of parameters that this rank does not hold are ignored. State that is listed although the
        checkpoint lacks it (masters, after a run without) is left alone by the reader; `finish_load` brings it up to
        date.

        Args:
            tensors: For each parameter name, what the checkpoint holds: state name to shape and dtype.
            scalars: State that is not a tensor, as `optimizer_scalars` returned it.
            groups: The checkpoint's parameter groups; already checked to list the same parameters as this
                optimizer's. Their options replace this optimizer's.

        Collective: every rank of the plugin's mesh, in step.
        """

    @abstractmethod
    def finish_load(self, *, model: bool, optimizer: bool) -> None:
        """Bring everything derived from the loaded state up to date (working parameters from masters, and back).

        Args:
            model: The model's shards were written.
            optimizer: The optimizer's shards were written.

        Collective: every rank of the plugin's mesh, in step.
        """
