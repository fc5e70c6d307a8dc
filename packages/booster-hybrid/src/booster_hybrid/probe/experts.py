"""`check_experts`: prove, before anything is spread, that experts compute and differentiate as whole ones do.

Each kind of module runs with a few experts, random weights and random tokens: whole, as two ranks would each call it,
and spread over both within this process, on the user's own module, which is put back then. So it shows whether the
first dimension of the parameters is the experts', whether the module counts them by the attributes that are known, and
whether it computes each row by itself. Nothing is communicated, so all ranks come to the
same verdict.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from booster_core.errors import ConfigError
from booster_hybrid.expert_parallel.apply import install_experts
from booster_hybrid.modules import ModulePatches
from booster_hybrid.probe.in_process import InProcessRank, on_ranks
from booster_hybrid.probe.running import NoValuesError, Result, Runner, Setting, random_values, restored, settings_of
from booster_hybrid.probe.units import place_of, structural_key

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from booster_hybrid.expert_parallel.apply import ExpertsModule
    from booster_hybrid.probe.calls import Call

_SEED = 20191
_MOST_EXPERTS, _CHOICES, _RANKS, _TOKENS = 4, 2, 2, 64


def check_experts(experts: Sequence[ExpertsModule], device: torch.device) -> None:
    """Raise if a module of experts computes something else, or has other gradients, where some of them are here.

    Args:
        experts: The modules, whole; what is changed for the check is put back.
        device: Where they are run.

    Raises:
        ConfigError: Naming the first module that does, or that can't be called.
    """
    checked = set()
    for each in experts:
        kind = structural_key(
            each.module, place_of(each.name), {"": (*each.parameters, *each.counts, each.takes_every_token)}
        )
        if kind not in checked:
            checked.add(kind)
            with restored(each.module, device):
                torch.manual_seed(_SEED)
                _Probe(each, device).run()


class _Probe:
    """Runs one module of experts whole and spread.

    Args:
        experts: The module.
        device: Where it is run.
    """

    def __init__(self, experts: ExpertsModule, device: torch.device) -> None:
        self._experts, self._device = experts, device
        self._num_experts = min(_MOST_EXPERTS, experts.num_experts) // _RANKS * _RANKS
        self._shapes = {id(each): (self._num_experts, *each.shape[1:]) for each in experts.parameters.values()}
        self._names = {id(parameter): name for name, parameter in experts.module.named_parameters()}
        self._takes = "hidden states of every token for each expert"
        if not experts.takes_every_token:
            self._takes = "hidden states, indices and weights"

    def run(self) -> None:
        """Compare in the first setting, and with the first width, in which the module runs whole.

        Raises:
            ConfigError: If the spread module gives something else.
        """
        reason = ""
        changes = ModulePatches()
        for attribute in self._experts.counts:
            changes.attribute(self._experts.module, attribute, self._num_experts)
        try:
            for setting in settings_of(self._experts.module):
                for width in self._widths():
                    try:
                        values = self._values(setting)
                        runners = self._runners(width, setting)
                        whole = [runner.whole(values) for runner in runners]
                    except NoValuesError as error:
                        self._refuse(str(error))
                    except Exception as error:  # noqa: BLE001 - the width is another, or the format not supported
                        reason = reason or f"{type(error).__name__}: {error}"
                        continue
                    known = [each for each in whole if each is not None]
                    if len(known) < _RANKS:
                        self._refuse("it gives other outputs in each call, or infinite ones")
                    if known[0].output.shape[-1] == width:
                        self._compare(runners, values, known, setting)
                        return
                    reason = reason or "it returns no hidden states"
        finally:
            changes.undo()
        self._refuse(f"it can't be called with {self._takes} ({reason})")

    def _values(self, setting: Setting) -> dict[int, Tensor]:
        return random_values(
            self._experts.module, self._device, setting.dtype, frozenset(self._shapes), shapes=self._shapes
        )

    def _widths(self) -> list[int]:
        """Return which widths hidden states may have: sizes of the parameters, those that attributes name first."""
        sizes = [size for shape in self._shapes.values() for size in shape[1:][::-1]]
        named = [each for each in vars(self._experts.module).values() if type(each) is int and each in sizes]
        return list(dict.fromkeys((*named, *sizes)))

    def _runners(self, width: int, setting: Setting) -> list[Runner]:
        """Return what calls the module as two ranks do, with more tokens for one expert and on one rank than others."""
        tensors, bounds = self._tensors(width), (0, _TOKENS // 3, _TOKENS)
        calls = [self._call(*(each[start:stop] for each in tensors)) for start, stop in pairwise(bounds)]
        return [Runner(self._experts.module, call, setting, self._device) for call in calls]

    def _tensors(self, width: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return hidden states, indices and weights."""
        generator = torch.Generator(self._device).manual_seed(_SEED)
        choices = min(_CHOICES, self._num_experts)
        options: dict[str, Any] = {"generator": generator, "device": self._device, "dtype": torch.float64}
        scores = torch.rand(_TOKENS, self._num_experts, **options)
        scores[: _TOKENS // 2, 0] += 1  # as a limit for each expert would be noticed
        index = scores.topk(choices, -1).indices
        weights = torch.rand(_TOKENS, choices, **options)
        hidden = torch.randn(_TOKENS, width, **options)
        return hidden, index, weights

    def _call(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Call:
        if not self._experts.takes_every_token:
            return (hidden, index, weights.requires_grad_()), {}
        chosen = torch.zeros(len(hidden), self._num_experts, device=self._device, dtype=hidden.dtype)
        rows = hidden * chosen.scatter_(1, index, 1.0).T.unsqueeze(-1)
        return (rows.flatten(0, 1),), {}

    def _compare(
        self, runners: Sequence[Runner], values: Mapping[int, Tensor], whole: Sequence[Result], setting: Setting
    ) -> None:
        try:
            modules = self._experts.module.modules()
            found = on_ranks(
                _RANKS, lambda rank: self._on_rank(runners[rank.rank], values, rank), modules, self._device
            )
        except Exception as error:  # noqa: BLE001 - whatever a module raises that counts its experts otherwise
            self._refuse(f"with some of its experts it fails with {type(error).__name__}: {error}")
        trained = [key for key, each in values.items() if each.requires_grad]
        total = {key: _sum([each.gradients[key] for each in whole]) for key in trained}
        share = self._num_experts // _RANKS
        for rank, (own, expected) in enumerate(zip(found, whole, strict=True)):
            gradients = {key: each for key, each in expected.gradients.items() if key not in values}
            gradients |= {key: each for key, each in total.items() if key in self._shapes}
            part = slice(rank * share, (rank + 1) * share)
            self._refuse_difference(own, Result(expected.output, gradients), setting, part)
        # What every rank has whole is trained on in the sum of its gradients.
        shared = {key: each for key, each in total.items() if key not in self._shapes}
        summed = {key: _sum([each.gradients[key] for each in found]) for key in shared}
        output = whole[0].output
        self._refuse_difference(Result(output, summed), Result(output, shared), setting, slice(None))

    def _on_rank(self, runner: Runner, values: Mapping[int, Tensor], rank: InProcessRank) -> Result:
        changes, share = ModulePatches(), self._num_experts // _RANKS
        try:
            install_experts(self._experts, rank, changes, self._num_experts)
            here = {
                key: each.detach()[rank.rank * share :][:share].requires_grad_(each.requires_grad)
                if key in self._shapes
                else each
                for key, each in values.items()
            }
            return runner.run(here)
        finally:
            changes.undo()

    def _refuse_difference(self, found: Result, whole: Result, setting: Setting, part: slice) -> None:
        difference = found.differs_from(
            whole, setting.tolerance, lambda key, each: each[part] if key in self._shapes else each
        )
        if difference is not None:
            key, text = difference
            subject = "" if key is None else f"the gradient of '{self._names.get(key, f'(input {key})')}' "
            self._refuse(f"{subject}{text}")

    def _refuse(self, reason: str) -> NoReturn:
        name, kind = self._experts.name, type(self._experts.module).__name__
        counted = ", ".join(repr(each) for each in self._experts.counts) or "no attribute"
        msg = (
            f"The experts '{name}' ({kind}) can't be spread over ranks: {reason}. They need parameters of shape "
            f"(experts, ...), a forward that takes {self._takes} and computes each token by itself, and in "
            f"`ExpertRule(counts=...)` the attributes that count the experts (here {counted}). Correct the rule, or "
            "use `ep_size=1`."
        )
        raise ConfigError(msg)


def _sum(parts: Sequence[Tensor | None]) -> Tensor | None:
    """Return the sum of gradients; where there is none, a parameter was not used."""
    known = [each for each in parts if each is not None]
    return torch.stack(known).sum(0) if known else None
