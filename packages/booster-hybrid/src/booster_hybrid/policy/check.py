"""`check_policy`: compare the layers that a policy splits with the same layers unsplit, before anything is split.

Each distinct layer runs on random weights and inputs, once whole and once for every tensor parallel rank, all within
this process; see `booster_hybrid.tensor_parallel.rehearsal`. Random weights show differences that a model's own hide,
such as those of projections that begin as zeros, and they exist for lazy models too. Nothing is communicated, so all
ranks come to the same verdict.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from booster_core.errors import ConfigError
from booster_core.state import named_modules
from booster_hybrid.inner_model import inner_model
from booster_hybrid.policy.check_gradients import NoGradientError, differing_gradient
from booster_hybrid.random_weights import random_weights
from booster_hybrid.tensor_parallel.apply import TensorParallelModel, parallelize
from booster_hybrid.tensor_parallel.linear import ColumnForward, RowForward
from booster_hybrid.tensor_parallel.rehearsal import RehearsedRank, rehearse
from booster_hybrid.tensor_parallel.split import is_repeated
from booster_runtime.data import call_with, named_forward, taken_by

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor

    from booster_hybrid.policy.base import ShardingPolicy

    _Call = tuple[tuple[Any, ...], dict[str, Any]]

_TOLERANCE = 1e-3
"""Largest difference, relative to the largest output: sums in another order differ by about 1e-6 in fp32."""
_SEED = 20191


class _UncheckableError(Exception):
    """A layer can't be compared; the message says why."""


def check_policy(
    model: nn.Module,
    policy: ShardingPolicy,
    size: int,
    device: torch.device,
    *,
    batch: Callable[[], Any] | None = None,
    split_sequence: Callable[[nn.Module, nn.Module, RehearsedRank, TensorParallelModel], None] | None = None,
) -> dict[str, str]:
    """Raise if a policy changes what a layer computes.

    Args:
        model: The user's model, whole; it is neither changed nor called.
        policy: How it is split.
        size: Number of tensor parallel ranks.
        device: Where layers are run.
        batch: Returns a batch, for layers whose forward needs more than hidden states; ``None`` where the model's
            own weights are not there to find out by.
        split_sequence: Splits the sequences of one layer, as ``"split_gather"`` does, given the model, the layer, the
            rank and the result of `parallelize`; ``None`` leaves them whole.

    Returns:
        The layers that could not be checked, with the reasons.

    Raises:
        ConfigError: Naming the first layer whose outputs differ, by how much, and what to correct in the policy.
    """
    inner = inner_model(model)
    is_host = device.type == "cpu"
    kept = torch.random.fork_rng([] if is_host else [device], device_type="cuda" if is_host else device.type)
    with kept, torch.no_grad():
        try:
            whole = _skeleton(inner)
            parts = [_skeleton(inner) for _ in range(size)]
        except Exception as error:  # noqa: BLE001 - whatever a user's object raises when it is copied
            return {"(all)": f"the model can't be copied ({type(error).__name__}: {error})"}
        ranks = [RehearsedRank(None, rank, size) for rank in range(size)]
        splits = [parallelize(part, policy, rank) for part, rank in zip(parts, ranks, strict=True)]
        whole_sequences = tuple(f"{name}." for name in policy.whole_sequences)
        compared = _Comparison(
            type(inner).__name__, whole, parts, ranks, splits, device, split_sequence, whole_sequences
        )
        chosen = compared.distinct(_layer_paths(whole, policy, splits[0]))
        unchecked: dict[str, str] = {}
        calls = _Calls(inner, {path: alike[0] for path, alike in chosen.items()}, batch)
        for path, alike in chosen.items():
            try:
                compared.compare(path, calls)
            except _UncheckableError as error:
                unchecked.update(dict.fromkeys(alike, str(error)))
        return unchecked


def _skeleton(model: nn.Module) -> nn.Module:
    """Return a copy of a model without values, in evaluation mode; it shares the model's buffers."""
    memo: dict[int, Any] = {id(buffer): buffer for buffer in model.buffers()}
    for parameter in model.parameters():
        empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
        memo[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    return copy.deepcopy(model, memo).eval()


def _layer_paths(model: nn.Module, policy: ShardingPolicy, split: TensorParallelModel) -> dict[str, str]:
    """Return where the layers are that a policy names, or whose parts it splits, each with its name."""
    paths = {name: path for name, path, _ in reversed(list(named_modules(model)))}
    prefixes = tuple(f"{name}." for name in policy.layers if isinstance(_at(model, paths.get(name)), nn.ModuleList))
    found: dict[str, str] = {}
    for name in split.splits:
        match = re.match(r"(.*?\.)?\d+(?=\.)", name)
        own = next((prefix for prefix in prefixes if name.startswith(prefix)), None)
        layer = own + name[len(own) :].partition(".")[0] if own else match.group() if match else None
        if layer in paths:
            found[paths[layer]] = layer
    return found


def _at(model: nn.Module, path: str | None) -> nn.Module | None:
    return None if path is None else model.get_submodule(path)


@dataclass(frozen=True)
class _Values:
    """Random weights of a layer, and copies of its buffers, by their names in it."""

    parameters: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]

    @classmethod
    def of(cls, layer: nn.Module, device: torch.device) -> _Values:
        for name, parameter in layer.named_parameters():
            if not parameter.is_floating_point():
                msg = f"its parameter '{name}' is of {parameter.dtype}"
                raise _UncheckableError(msg)
        for name, buffer in layer.named_buffers():
            if is_repeated(buffer):
                msg = f"its buffer '{name}' has no values yet"
                raise _UncheckableError(msg)
        parameters = random_weights(layer, device, _SEED)
        return cls(parameters, {name: buffer.to(device) for name, buffer in layer.named_buffers()})


class _Comparison:
    """Runs layers whole and split.

    Args:
        model_name: Class of the model, for messages.
        whole: A copy of it without values.
        parts: One for each rank, split.
        ranks: The ranks.
        splits: What became of each copy's parameters.
        device: Where layers run.
        split_sequence: As for `check_policy`.
        whole_sequences: What names of layers begin with whose sequences stay whole.
    """

    def __init__(
        self,
        model_name: str,
        whole: nn.Module,
        parts: Sequence[nn.Module],
        ranks: Sequence[RehearsedRank],
        splits: Sequence[TensorParallelModel],
        device: torch.device,
        split_sequence: Callable[[nn.Module, nn.Module, RehearsedRank, TensorParallelModel], None] | None,
        whole_sequences: tuple[str, ...],
    ) -> None:
        self._model_name, self._whole, self._parts = model_name, whole, parts
        self._ranks, self._splits, self._device = ranks, splits, device
        self._split_sequence, self._whole_sequences = split_sequence, whole_sequences

    def distinct(self, paths: Mapping[str, str]) -> dict[str, list[str]]:
        """Return where to find one layer of each kind, with the names of all that are like it."""
        found: dict[object, tuple[str, list[str]]] = {}
        for path, name in paths.items():
            layer = self._parts[0].get_submodule(path)
            shapes = tuple((key, tuple(each.shape)) for key, each in layer.named_parameters())
            forwards = tuple(type(vars(module).get("forward")) for module in layer.modules())
            key = (repr(self._whole.get_submodule(path)), shapes, forwards)
            found.setdefault(key, (path, []))[1].append(name)
        return dict(found.values())

    def compare(self, path: str, calls: _Calls) -> None:
        """Raise if a layer computes something else when it is split.

        Raises:
            ConfigError: If it does.
            _UncheckableError: If that can't be found out.
        """
        layer, name = self._whole.get_submodule(path), calls.names[path]
        self._refuse_open(path)
        values = _Values.of(layer, self._device)
        expected, call = None, None
        reasons = []
        for call in calls.of(path, layer, self._width(path), 2 * len(self._ranks) + 1, self._device):
            try:
                expected = _run(layer, values.parameters, values.buffers, call)
                again = _run(layer, values.parameters, values.buffers, call)
            except Exception as error:  # noqa: BLE001 - the layer needs to be called in another way
                reasons.append(f"{type(error).__name__}: {error}")
                continue
            if not torch.isfinite(expected).all() or not torch.equal(expected, again):
                msg = "it gives other outputs in each call, or infinite ones"
                raise _UncheckableError(msg)
            break
        if expected is None or call is None:
            msg = "it can't be called on random hidden states, and there was no batch to find its inputs by"
            raise _UncheckableError(f"{msg} ({reasons[-1]})" if reasons else msg)
        self._compare_with(expected, path, name, values, call)

    def _compare_with(self, expected: Tensor, path: str, name: str, values: _Values, call: _Call) -> None:
        local = [self._local(path, rank, values.parameters) for rank in range(len(self._ranks))]
        what = f"The sharding policy of {self._model_name} changes what layer '{name}' computes"
        self._compare_split(expected, path, values, call, local, what, self._remedy(path))
        self._compare_gradients(path, name, values, call, local)
        if self._split_sequence is None or name.startswith(self._whole_sequences):
            return
        for part, rank, split in zip(self._parts, self._ranks, self._splits, strict=True):
            self._split_sequence(part, part.get_submodule(path), rank, split)
        what = (
            f"`sequence_parallelism_mode='split_gather'` changes what layer '{name}' of {self._model_name} computes, "
            "which looks at several positions of a sequence outside of the modules that the policy splits"
        )
        remedy = (
            "Move that into a module of its own with submodules, which gets whole sequences, or leave "
            "`sequence_parallelism_mode` out."
        )
        self._compare_split(expected, path, values, call, local, what, remedy)

    def _compare_split(
        self,
        expected: Tensor,
        path: str,
        values: _Values,
        call: _Call,
        local: Sequence[Mapping[str, Tensor]],
        what: str,
        remedy: str,
    ) -> None:
        def run(rank: int) -> Tensor:
            return _run(self._parts[rank].get_submodule(path), local[rank], values.buffers, call)

        try:
            results = rehearse(self._ranks, run)
        except Exception as error:
            msg = f"{what}: split over {len(self._ranks)} ranks it fails with {type(error).__name__}: {error}. {remedy}"
            raise ConfigError(msg) from error
        for result in results:
            if result.shape != expected.shape:
                msg = f"{what}: it returns shape {tuple(result.shape)} in place of {tuple(expected.shape)}. {remedy}"
                raise ConfigError(msg)
            difference, scale = float((result - expected).abs().max()), float(expected.abs().max())
            if not difference <= _TOLERANCE * scale:
                msg = f"{what}: on random inputs its outputs of up to {scale:.3g} differ by up to {difference:.3g}. "
                raise ConfigError(msg + remedy)

    def _compare_gradients(
        self, path: str, name: str, values: _Values, call: _Call, local: Sequence[Mapping[str, Tensor]]
    ) -> None:
        parts = [part.get_submodule(path) for part in self._parts]
        tensors = values.parameters, local, values.buffers
        try:
            found = differing_gradient(
                self._whole.get_submodule(path), parts, tensors, call, self._ranks, self._splits, self._names(0, path)
            )
        except NoGradientError as error:
            raise _UncheckableError(str(error)) from error
        if found is not None:
            msg = (
                f"The sharding policy of {self._model_name} changes the gradients of layer '{name}', not its outputs: "
                f"{found}. In `custom_policy`, a parameter or module that is whole on every rank but works on split "
                "activations, such as a norm of each head, needs `Style.SUMMED_GRADIENT`; see "
                "docs/sharding-policies.md."
            )
            raise ConfigError(msg)

    def _local(self, path: str, rank: int, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return a rank's parts of a layer's weights."""
        split, names = self._splits[rank], self._names(rank, path)
        found = {}
        for key, name in names.items():
            of_rank = split.splits.get(name)
            found[key] = values[key] if of_rank is None else of_rank.take(values[key])
        return found

    def _names(self, rank: int, path: str) -> dict[str, str]:
        """Return the names in the model of a layer's parameters, by their names in it."""
        part = self._parts[rank]
        names = {
            id(parameter): f"{name}.{attribute}"
            for name, _, module in named_modules(part)
            for attribute, parameter in module.named_parameters(recurse=False)
        }
        return {key: names[id(parameter)] for key, parameter in part.get_submodule(path).named_parameters()}

    def _forwards(self, path: str, kind: type) -> dict[str, Any]:
        """Return the forwards of the split linear layers in a layer, by the layers' names in the model."""
        model = self._parts[0]
        inside = set(model.get_submodule(path).modules())
        found = {name: vars(module).get("forward") for name, _, module in named_modules(model) if module in inside}
        return {name: forward for name, forward in found.items() if isinstance(forward, kind)}

    def _refuse_open(self, path: str) -> None:
        """Refuse a layer whose inputs or outputs are split as well, such as one linear layer of a pair."""
        columns = self._forwards(path, ColumnForward).values()
        rows = self._forwards(path, RowForward).values()
        if any(each.gathers is None for each in columns) != any(each.splits is None for each in rows):
            msg = "its inputs or outputs are split as well"
            raise _UncheckableError(msg)

    def _width(self, path: str) -> int | None:
        """Return the size of a layer's hidden states: that of the inputs of its first column-parallel linear layer."""
        for name in self._forwards(path, ColumnForward):
            split = self._splits[0].splits[f"{name}.weight"]
            return split.global_shape[1 - split.dim]
        return None

    def _remedy(self, path: str) -> str:
        """Return what to correct, with the linear layers that look fused."""
        split_of = {
            name: self._splits[0].splits[f"{name}.weight"]
            for kind in (ColumnForward, RowForward)
            for name in self._forwards(path, kind)
        }
        inputs = {
            split_of[name].global_shape[split_of[name].dim]
            for name, forward in self._forwards(path, RowForward).items()
            if forward.splits is None
        }
        fused = []
        for name in self._forwards(path, ColumnForward):
            split = split_of[name]
            count = next((n for n in (3, 2) if split.global_shape[split.dim] in {n * each for each in inputs}), None)
            if count is not None and len(split.ranges) == 1:
                fused.append(f"'{name}' looks like {count} fused projections: `num_blocks={count}`")
        hint = f"{'; '.join(fused)}. " if fused else ""
        return (
            f"{hint}In `custom_policy`, a linear layer that computes several projections needs `num_blocks=` (3 for q, "
            "k and v; 2 for gate and up), one that computes attention heads needs `units=`, and counts of heads in "
            "its parent need `scaled=`; see docs/sharding-policies.md."
        )


class _Calls:
    """How layers may be called: as the model calls them for a batch, or on hidden states alone.

    Args:
        model: The user's model.
        names: Names of the layers, by their paths.
        batch: Returns a batch; ``None`` where the model can't be run.
    """

    def __init__(self, model: nn.Module, names: Mapping[str, str], batch: Callable[[], Any] | None) -> None:
        self.names = names
        self._model, self._batch = model, batch
        self._recorded: dict[str, _Call] | None = None

    def of(self, path: str, layer: nn.Module, width: int | None, length: int, device: torch.device) -> Iterator[_Call]:
        """Yield calls of a layer to try."""
        parameters = list(inspect.signature(named_forward(layer)).parameters.values())
        if len(parameters) > 1 or width is None:
            yield from self._from_batch(path, device)
        is_needed = [each for each in parameters[1:] if each.default is each.empty and each.kind not in (2, 4)]
        if width is not None and not is_needed:
            generator = torch.Generator(device).manual_seed(_SEED)
            yield (torch.randn(2, length, width, generator=generator, device=device),), {}
        if len(parameters) == 1 and width is not None:
            yield from self._from_batch(path, device)

    def _from_batch(self, path: str, device: torch.device) -> Iterator[_Call]:
        if self._recorded is None:
            self._recorded = {}
            with contextlib.suppress(Exception):  # no batch, or one that the model can't take: see the caller's reason
                self._record()
        if path in self._recorded:
            args, kwargs = pytree.tree_map_only(torch.Tensor, lambda each: each.to(device), self._recorded[path])
            generator = torch.Generator(device).manual_seed(_SEED)

            def drawn(value: Tensor) -> Tensor:
                return torch.randn(value.shape, generator=generator, device=device)

            if args and isinstance(args[0], torch.Tensor) and args[0].is_floating_point():
                args = (drawn(args[0]), *args[1:])
            elif isinstance(hidden := kwargs.get("hidden_states"), torch.Tensor):
                kwargs = {**kwargs, "hidden_states": drawn(hidden)}
            yield args, kwargs

    def _record(self) -> None:
        """Run a copy of the model that shares its weights, until each of the layers was called."""
        if self._batch is None:
            return
        recorded: dict[str, _Call] = {}
        batch = self._batch()
        tensors = (*self._model.parameters(), *self._model.buffers())
        model = copy.deepcopy(self._model, {id(tensor): tensor for tensor in tensors}).eval()
        for path in self.names:

            def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], path: str = path) -> None:
                recorded.setdefault(path, (_floats(args), _floats(kwargs)))
                if len(recorded) == len(self.names):
                    raise _EnoughError

            model.get_submodule(path).register_forward_pre_hook(note, with_kwargs=True)
        with contextlib.suppress(_EnoughError):
            call_with(model, taken_by(model, batch))
        self._recorded = recorded


class _EnoughError(BaseException):
    """Ends a forward whose layers have all been called; not an `Exception`, which a model may catch."""


def _floats(value: Any) -> Any:
    """Return copies of tensors, those of narrow formats in the weights' fp32."""
    return pytree.tree_map_only(
        torch.Tensor, lambda each: each.detach().float() if each.is_floating_point() else each.detach().clone(), value
    )


def _run(layer: nn.Module, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor], call: _Call) -> Tensor:
    """Return a layer's hidden states."""
    args, kwargs = copy.deepcopy(call)  # caches are written to
    state = {**parameters, **{name: buffer.clone() for name, buffer in buffers.items()}}
    output = torch.func.functional_call(layer, state, args, kwargs)
    for leaf in pytree.tree_leaves(output):
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
            return leaf
    msg = "it returns no tensor"
    raise _UncheckableError(msg)
