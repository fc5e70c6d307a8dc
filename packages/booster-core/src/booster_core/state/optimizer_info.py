"""``param_groups.json``: an optimizer's state without its tensors, as ranks tell each other and as files hold it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from booster_core.errors import CheckpointError, shorten
from booster_core.state.adapter import ParamGroup
from booster_core.state.json_values import decode_json, encode_json
from booster_core.state.names import distinct, natural_order
from booster_core.state.optimizer_state import MASTER

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from booster_core.state.adapter import StateAdapter, TensorMeta

FORMAT_VERSION = 1
"""Version of ``param_groups.json``."""


def check_optimizer_is_saved_whole(adapter: StateAdapter) -> None:
    """Raise `CheckpointError` if an optimizer has state that neither shards nor scalars show; it is named."""
    unsaved = adapter.unsaved_state()
    if unsaved:
        msg = (
            f"{len(unsaved)} entries of the optimizer's state would be lost, since they belong to no parameter: "
            f"{shorten(unsaved)}. Keep them in a parameter group, or in the state of a parameter."
        )
        raise CheckpointError(msg)


@dataclass(frozen=True, kw_only=True)
class OptimizerInfo:
    """An optimizer's state, its tensors left out.

    Args:
        groups: Parameter groups.
        scalars: State that is not a tensor, by parameter and state name.
        shapes: The shape of each parameter.
        dtypes: The element type of each parameter; none are known in files that others have written.
    """

    groups: tuple[ParamGroup, ...]
    scalars: Mapping[str, Mapping[str, Any]]
    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return all of it as JSON, ordered by name: the file does not depend on which rank held what."""
        return {
            "format_version": FORMAT_VERSION,
            "param_groups": [
                {
                    "params": sorted(group.params, key=natural_order),
                    **{key: encode_json(group.options[key], key) for key in sorted(group.options)},
                }
                for group in self.groups
            ],
            "scalars": {
                name: {state: encode_json(states[state], f"{name}/{state}") for state in sorted(states)}
                for name, states in sorted(self.scalars.items(), key=lambda item: natural_order(item[0]))
            },
            "param_shapes": {name: list(self.shapes[name]) for name in sorted(self.shapes, key=natural_order)},
            "param_dtypes": self.dtype_names(),
        }

    def dtype_names(self) -> dict[str, str]:
        """Return the element types as text, ordered by name."""
        return {name: str(self.dtypes[name]).removeprefix("torch.") for name in sorted(self.dtypes, key=natural_order)}

    @classmethod
    def from_json(cls, content: Any, where: str) -> OptimizerInfo:
        """Return what `to_json` was made of.

        Raises:
            CheckpointError: If the content is something else; ``where`` names its file.
        """
        try:
            if content["format_version"] > FORMAT_VERSION:
                msg = (
                    f"'{where}' has format version {content['format_version']}; this Booster reads up to "
                    f"{FORMAT_VERSION}."
                )
                raise CheckpointError(msg)
            groups = tuple(
                ParamGroup(
                    params=_names(group["params"]),
                    options={key: decode_json(item) for key, item in group.items() if key != "params"},
                )
                for group in _list(content["param_groups"])
            )
            scalars = {
                name: {state: decode_json(value) for state, value in states.items()}
                for name, states in content["scalars"].items()
            }
            shapes = {name: _shape(shape) for name, shape in content["param_shapes"].items()}
            dtypes = {name: decode_json({"$dtype": dtype}) for name, dtype in content.get("param_dtypes", {}).items()}
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            msg = f"'{where}' does not describe an optimizer's parameter groups: {error!r}."
            raise CheckpointError(msg) from error
        return cls(groups=groups, scalars=scalars, shapes=shapes, dtypes=dtypes)

    @classmethod
    def of(cls, adapter: StateAdapter) -> OptimizerInfo:
        """Return what this rank knows."""
        groups = tuple(adapter.param_groups())
        members = {name for group in groups for name in group.params}
        shards = {shard.name: shard for shard in adapter.model_shards() if shard.name in members}
        return cls(
            groups=groups,
            scalars=adapter.optimizer_scalars(),
            shapes={name: shard.global_shape for name, shard in shards.items()},
            dtypes={name: shard.dtype for name, shard in shards.items()},
        )

    def entries(self) -> list[Any]:
        """Return what a rank tells the others, in parts: ranks that have all groups alike may differ in scalars."""
        return [self.groups, self.scalars, self.shapes, self.dtypes]

    def with_own_dtypes(self, states: Mapping[str, Mapping[str, TensorMeta]]) -> dict[str, dict[str, TensorMeta]]:
        """Return the tensors of a saved state, by parameter and state name, those marked that keep their type.

        An optimizer may keep state in another type than what it steps on, a narrow momentum next to fp32 weights or
        fp32 next to narrow ones, where torch's ``load_state_dict`` would convert it.
        """
        kept: dict[str, dict[str, TensorMeta]] = {}
        for name, held in states.items():
            stepped = held[MASTER].dtype if MASTER in held else self.dtypes.get(name)
            kept[name] = {
                key: replace(meta, keeps_dtype=stepped is not None and meta.dtype != stepped)
                for key, meta in held.items()
            }
        return kept

    @classmethod
    def merge(cls, gathered: Sequence[Sequence[Any]]) -> OptimizerInfo:
        """Return what all ranks know together: a rank may hold only some of the parameters.

        Args:
            gathered: The `entries` of every rank; those that are equal are the same object.

        Raises:
            CheckpointError: If ranks disagree about a group's options.
        """
        rank_groups, rank_scalars, *facts = (distinct(entries) for entries in zip(*gathered, strict=True))
        groups = []
        for index in range(max(len(held) for held in rank_groups)):
            present: list[ParamGroup] = [held[index] for held in rank_groups if index < len(held)]
            params = tuple(dict.fromkeys(name for group in present for name in group.params))
            options = present[0].options
            for group in present[1:]:
                if group.options != options and encode_json(dict(group.options), "") != encode_json(dict(options), ""):
                    msg = f"Ranks disagree about parameter group {index}: {dict(options)} and {dict(group.options)}."
                    raise CheckpointError(msg)
            groups.append(ParamGroup(params=params, options=options))
        scalars: dict[str, dict[str, Any]] = {}
        shapes, dtypes = ({name: fact for held in ranks for name, fact in held.items()} for ranks in facts)
        for named in rank_scalars:
            for name, states in named.items():
                scalars.setdefault(name, {}).update(states)
        return cls(groups=tuple(groups), scalars=scalars, shapes=shapes, dtypes=dtypes)


def _list(values: Any) -> list[Any]:
    if not isinstance(values, list):
        msg = f"a list was expected, not a {type(values).__name__}"
        raise TypeError(msg)
    return values


def _names(values: Any) -> tuple[str, ...]:
    if not all(isinstance(value, str) for value in _list(values)):
        msg = "names are text"
        raise TypeError(msg)
    return tuple(values)


def _shape(values: Any) -> tuple[int, ...]:
    if not all(type(value) is int and value >= 0 for value in _list(values)):
        msg = "sizes are numbers"
        raise TypeError(msg)
    return tuple(values)
