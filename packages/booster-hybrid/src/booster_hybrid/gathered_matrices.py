"""`GatheredMatrices`: optimizers that update whole matrices, such as Muon, where each rank has a part of every matrix.

Before such an optimizer steps, the parts of each matrix, of its gradient and of its state come together on one of the
ranks, and go back afterwards. Ranks share the matrices out by size, so that each has as many elements of whole ones
meanwhile as it has of parts, and no update is computed twice.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from booster_core.errors import BoosterError, ConfigError
from booster_runtime.collectives import all_gather_object, all_reduce
from booster_runtime.sharding import control_device, is_by_matrix, is_cut, taken_for, update_cost
from booster_zero.engine import assign_owners, only

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor
    from torch.optim import Optimizer

    from booster_hybrid.mesh import RankGroup
    from booster_hybrid.tensor_parallel.split import Split


class Part(NamedTuple):
    """This rank's part of a matrix.

    Args:
        name: The parameter's name.
        split: Which part it is.
        values: What the optimizer lists, with its gradient.
    """

    name: str
    split: Split
    values: nn.Parameter


class GatheredMatrices:
    """Brings matrices together for the steps of one optimizer.

    Args:
        optimizer: Updates each of its parameters as a whole, and none by what another one is.
        group: The ranks that have parts of them.
        device: Where they are.
    """

    def __init__(self, optimizer: Optimizer, group: RankGroup, device: torch.device) -> None:
        self._optimizer, self._group, self._device = optimizer, group, device
        self._known: dict[tuple[str, ...], _Shares] = {}
        self._kinds: dict[tuple[str, ...], dict[int, dict[str, Any]]] = {}

    def step(self, parts: Sequence[Part], run: Callable[[], Any]) -> Any:
        """Step the optimizer on whole matrices.

        Args:
            parts: What it lists of them, the same matrices on each of the ranks; those without a gradient are left out.
            run: Steps the optimizer.

        Raises:
            ConfigError: If ranks have parts of other matrices than each other.
            BoosterError: If the step has failed on another rank; there, what it raised.

        Collective: the ranks that have parts.
        """
        optimizer = self._optimizer
        known = {id(each) for group in optimizer.param_groups for each in group["params"]}  # others may have some, too
        parts = [part for part in parts if part.values.grad is not None and id(part.values) in known]
        shares = self._shares_of(parts)
        wholes = self._bring(parts, shares)
        places = {id(part.values): index for index, part in enumerate(parts)}
        listed = [
            [wholes.get(places[id(each)]) if id(each) in places else each for each in group["params"]]
            for group in optimizer.param_groups
        ]
        result, error = None, None
        try:
            with only(optimizer, [[each for each in group if each is not None] for group in listed]):
                result = run()
        except Exception as caught:  # noqa: BLE001 - raised below, once the other ranks know
            error = caught
        states = {index: optimizer.state.pop(whole, {}) for index, whole in wholes.items()}
        names = tuple(part.name for part in parts)
        kinds = self._kinds_of_all(
            names, {index: _kinds(own, wholes[index].shape) for index, own in states.items()}, error
        )
        values = {index: whole.detach() for index, whole in wholes.items()}
        for index, own in shares.send_back(values, {index: part.values for index, part in enumerate(parts)}).items():
            parts[index].values.data.copy_(own)
        self._send_state_back(parts, shares, states, kinds)
        return result

    def _kinds_of_all(
        self, names: tuple[str, ...], own: dict[int, dict[str, Any]], error: Exception | None
    ) -> dict[int, dict[str, Any]]:
        """Return what is kept of each matrix, as `_kinds` describes it; raise if the step has failed on a rank.

        What ranks have told each other once is known while it stays the same: two flags tell that it does.

        Raises:
            BoosterError: If it has failed on another rank.

        Collective: the ranks that have parts.
        """
        known = self._kinds.get(names)
        is_known = known is not None and all(
            _is_plain(kinds) and known.get(index) == kinds for index, kinds in own.items()
        )
        device = control_device(self._device, self._group.group)
        flags = torch.tensor([error is not None, not is_known], dtype=torch.int32, device=device)
        all_reduce(flags, group=self._group.group).wait()
        num_failed, num_unknown = flags.tolist()
        if error is not None:
            raise error
        if num_failed:
            msg = (
                f"The step of {type(self._optimizer).__qualname__} has failed on another rank that has parts of the "
                "same matrices, which says why."
            )
            raise BoosterError(msg)
        if num_unknown:
            told = all_gather_object(own, self._group.group)
            self._kinds[names] = {index: kinds for each in told for index, kinds in each.items()}
        return self._kinds[names]

    def _shares_of(self, parts: Sequence[Part]) -> _Shares:
        """Return which part of each matrix the ranks have, and who has which matrices for a step.

        Collective: the ranks that have parts.
        """
        names = tuple(part.name for part in parts)
        if names in self._known:
            return self._known[names]
        found = all_gather_object((names, [part.split for part in parts]), self._group.group)
        if any(theirs != names for theirs, _ in found):
            msg = (
                f"{type(self._optimizer).__qualname__} updates whole matrices, of which tensor parallel ranks have "
                "parts of different sizes: data parallel ranks shared them out in another way on each. Use a "
                "`tp_size` that divides heads and widths, or `zero_stage=0`."
            )
            raise ConfigError(msg)
        count = update_cost if is_by_matrix(self._optimizer) else math.prod
        sizes = [(index, count(part.split.global_shape)) for index, part in enumerate(parts)]
        shares = _Shares([splits for _, splits in found], assign_owners(sizes, self._group.size), self._group)
        self._known[names] = shares
        return shares

    def _bring(self, parts: Sequence[Part], shares: _Shares) -> dict[int, nn.Parameter]:
        """Return the matrices that this rank has whole for the step, with their gradients and state.

        Collective: the ranks that have parts.
        """
        values = shares.bring({index: part.values.detach() for index, part in enumerate(parts)})
        gradients = shares.bring({index: _gradient(part.values) for index, part in enumerate(parts)})
        wholes = {index: taken_for(nn.Parameter(whole), parts[index].values) for index, whole in values.items()}
        state = self._optimizer.state
        cut: dict[str, dict[int, Tensor]] = defaultdict(dict)
        for index, part in enumerate(parts):
            own = state.get(part.values, {})
            for key, value in own.items():
                if _is_cut(key, value, part.values.shape):
                    cut[key][index] = value
                elif index in wholes:
                    state[wholes[index]][key] = value
        for key in sorted(cut):
            for index, value in shares.bring(cut[key]).items():
                state[wholes[index]][key] = value
        for index, whole in wholes.items():
            whole.grad = gradients[index]
        return wholes

    def _send_state_back(
        self,
        parts: Sequence[Part],
        shares: _Shares,
        states: Mapping[int, Mapping[str, Any]],
        kinds: Mapping[int, Mapping[str, Any]],
    ) -> None:
        """Give each rank its part of the state of matrices, and all of what is not cut as they are.

        Args:
            parts: This rank's parts of the matrices.
            shares: Who has which matrices.
            states: The state of those that it had whole.
            kinds: That of all, as `_kinds` describes it.

        Collective: the ranks that have parts.
        """
        cut: dict[str, dict[int, Tensor]] = defaultdict(dict)
        for index in sorted(kinds):
            values = parts[index].values
            for key, kind in kinds[index].items():
                kept = self._optimizer.state[values]
                if isinstance(kind, torch.dtype):
                    known = kept.get(key)
                    if not (isinstance(known, torch.Tensor) and known.dtype == kind and known.shape == values.shape):
                        kept[key] = torch.empty(values.shape, dtype=kind, device=values.device)
                    cut[key][index] = kept[key]
                elif index in states:
                    kept[key] = states[index][key]
                else:
                    kept[key] = kind.to(values.device) if isinstance(kind, torch.Tensor) and key != "step" else kind
        for key in sorted(cut):
            own = {index: state[key] for index, state in states.items() if index in cut[key]}
            for index, value in shares.send_back(own, cut[key]).items():
                cut[key][index].copy_(value)


@dataclass(frozen=True)
class _Shares:
    """Which part of some matrices each rank has, and which of them it has whole for a step.

    Args:
        splits: The parts, by rank and matrix.
        owners: The rank that has a matrix whole, by matrix.
        group: The ranks.
    """

    splits: Sequence[Sequence[Split]]
    owners: Mapping[int, int]
    group: RankGroup

    def bring(self, tensors: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Return the whole tensors, by matrix, that belong to this rank.

        Args:
            tensors: This rank's parts of tensors that are cut as matrices are, by matrix.

        Collective: the ranks that have parts.
        """
        rank, wholes = self.group.rank, {}
        for alike in _by_dtype(tensors):
            owned = [[index for index in alike if self.owners[index] == owner] for owner in range(self.group.size)]
            source = [alike[index].reshape(-1) for indices in owned for index in indices]
            sent = [sum(alike[index].numel() for index in indices) for indices in owned]
            numels = [[math.prod(splits[index].local_shape) for index in owned[rank]] for splits in self.splits]
            came = iter(self._exchanged(source, sent, numels, next(iter(alike.values()))))
            for index in owned[rank]:
                shape = self.splits[rank][index].global_shape
                wholes[index] = alike[index].new_empty(shape)
            for splits in self.splits:
                for index in owned[rank]:
                    split = splits[index]
                    for box, part in zip(split.boxes, split.parts(next(came).view(split.local_shape)), strict=True):
                        wholes[index][tuple(slice(*bounds) for bounds in box)] = part
        return wholes

    def send_back(self, wholes: Mapping[int, Tensor], like: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Return this rank's parts of tensors that are whole on the ranks they belong to.

        Args:
            wholes: Those that belong to this rank, by matrix.
            like: The tensors that this rank's parts are for, by matrix.

        Collective: the ranks that have parts.
        """
        rank, parts = self.group.rank, {}
        for alike in _by_dtype(like):
            owned = [[index for index in alike if self.owners[index] == owner] for owner in range(self.group.size)]
            cut = [[splits[index].take(wholes[index]).reshape(-1) for index in owned[rank]] for splits in self.splits]
            sent = [sum(part.numel() for part in each) for each in cut]
            numels = [[alike[index].numel() for index in indices] for indices in owned]
            flat = [part for each in cut for part in each]
            came = self._exchanged(flat, sent, numels, next(iter(alike.values())))
            for index, part in zip((index for indices in owned for index in indices), came, strict=True):
                parts[index] = part.view(alike[index].shape)
        return parts

    def _exchanged(
        self, source: Sequence[Tensor], sent: Sequence[int], numels: Sequence[Sequence[int]], like: Tensor
    ) -> list[Tensor]:
        """Return flat tensors that came here, rank by rank, of as many elements as ``numels`` says."""
        flat = torch.cat(list(source)) if source else like.new_empty(0)
        out = like.new_empty(sum(map(sum, numels)))
        bounds, received = ([0, *accumulate(lengths)] for lengths in (sent, map(sum, numels)))
        self.group.all_to_all(flat, bounds, out, received).wait()
        return list(torch.split(out, [numel for each in numels for numel in each]))


def _gradient(values: Tensor) -> Tensor:
    assert values.grad is not None, "those without one are left out"
    return values.grad


def _is_cut(key: str, value: Any, shape: torch.Size) -> bool:
    return isinstance(value, torch.Tensor) and is_cut(key, value, shape)


def _is_plain(kinds: Mapping[str, Any]) -> bool:
    """Whether all that is kept of a matrix is cut as it is: nothing of it changes from step to step but values."""
    return all(isinstance(each, torch.dtype) for each in kinds.values())


def _by_dtype(tensors: Mapping[int, Tensor]) -> list[dict[int, Tensor]]:
    """Return the tensors by their formats: what is sent together is of one."""
    alike: dict[torch.dtype, dict[int, Tensor]] = defaultdict(dict)
    for index, tensor in tensors.items():
        alike[tensor.dtype][index] = tensor
    return [alike[dtype] for dtype in sorted(alike, key=str)]


def _kinds(state: Mapping[str, Any], shape: torch.Size) -> dict[str, Any]:
    """Return what is kept of a matrix: the format of what is cut as it is, and the value of what is not."""
    return {
        key: value.dtype if _is_cut(key, value, shape) else value.cpu() if isinstance(value, torch.Tensor) else value
        for key, value in state.items()
    }
