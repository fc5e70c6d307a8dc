"""`check_experts`: compare modules of experts with two halves of themselves, before anything is spread.

Each distinct module runs with a few experts, random weights and random tokens: once as the model would call it, and
once as it will be called where experts are spread, with some of them, and rows of one choice each, which come from two
ranks. It shows whether the first dimension of the parameters is the experts', whether the module counts them by the
attributes that are known, and whether it computes each row by itself, also where an expert has many.
Nothing is communicated, so all ranks come to the same verdict.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn

from booster_core.errors import ConfigError
from booster_hybrid.probe.kinds import kind_of
from booster_hybrid.probe.units import place_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from booster_hybrid.expert_parallel.apply import ExpertsModule

_SEED = 20191
_MOST_EXPERTS, _CHOICES = 4, 2
_FEWEST_TOKENS, _MOST_TOKENS, _PRODUCTS = 64, 4096, 1 << 28
"""So many tokens that a limit on the rows of an expert shows, as far as the products of an expert's weights allow."""
_TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-4}
_NARROW_TOLERANCE = 0.05
"""Largest difference, relative to the largest output: some roundings of the format."""


def check_experts(experts: Sequence[ExpertsModule], device: torch.device) -> None:
    """Raise if a module of experts computes something else where some of them are here.

    Args:
        experts: The modules, whole; they are neither changed nor called.
        device: Where they are run.

    Raises:
        ConfigError: Naming the first module that does, or that can't be called.
    """
    checked = set()
    is_host = device.type == "cpu"
    for each in experts:
        kind = kind_of(each.module, place_of(each.name), {"": (*each.parameters, *each.counts, each.takes_every_token)})
        if kind not in checked:
            checked.add(kind)
            kept = torch.random.fork_rng([] if is_host else [device], device_type="cuda" if is_host else device.type)
            with kept, torch.no_grad():
                torch.manual_seed(_SEED)
                (_EveryTokenComparison if each.takes_every_token else _Comparison)(each, device).run()


class _Comparison:
    """Runs one module of experts whole and in halves.

    Args:
        experts: The module.
        device: Where it is run.

    Attributes:
        takes: What it is called with.
    """

    takes = "hidden states, indices and weights"

    def __init__(self, experts: ExpertsModule, device: torch.device) -> None:
        self._experts, self._device = experts, device
        self._dtype = next(iter(experts.parameters.values())).dtype
        self._num_experts = min(_MOST_EXPERTS, experts.num_experts) // 2 * 2
        memo: dict[int, Any] = {}
        for parameter in experts.module.parameters():
            memo[id(parameter)] = nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype, device="meta"))
        self._module = copy.deepcopy(experts.module, memo).eval()
        self._values = {}
        for name, parameter in experts.module.named_parameters():
            shape = (self._num_experts, *parameter.shape[1:]) if name in experts.parameters else parameter.shape
            values = torch.randn(shape, device=self._device, dtype=torch.float32) * max(shape[-1], 1) ** -0.5
            self._values[name] = values.to(self._dtype)
        numel = sum(values[0].numel() for name, values in self._values.items() if name in experts.parameters)
        self._tokens = min(max(_PRODUCTS // max(numel, 1), _FEWEST_TOKENS), _MOST_TOKENS)

    def run(self) -> None:
        """Compare.

        Raises:
            ConfigError: If the halves compute something else.
        """
        choices = min(_CHOICES, self._num_experts)
        tokens = self._tokens
        scores = torch.rand(tokens, self._num_experts, device=self._device)
        scores[: tokens // 2, 0] += 1  # more for one expert than for the others, as a limit for each would be noticed
        index = scores.topk(choices, -1).indices
        weights = torch.rand(tokens, choices, device=self._device, dtype=torch.float32).to(self._dtype)
        hidden, _ = self._whole(tokens, index, weights)
        # Tokens of two ranks, each of which would call the whole module with its own; parts get those of both.
        own = [(each[: tokens // 3], each[tokens // 3 :]) for each in (hidden, index, weights)]
        expected = torch.cat([self._called(self._values, self._num_experts, *each) for each in zip(*own, strict=True)])
        half = self._num_experts // 2
        found = torch.zeros(tokens, choices, hidden.shape[-1], device=self._device, dtype=torch.float64)
        for first in (0, half):
            here = {
                name: values[first : first + half] if name in self._experts.parameters else values
                for name, values in self._values.items()
            }
            tokens, places = torch.nonzero((index >= first) & (index < first + half), as_tuple=True)
            local = (index[tokens, places] - first).unsqueeze(1)
            rows = self._part(here, half, hidden[tokens], local, weights[tokens, places].unsqueeze(1))
            found[tokens, places] = rows.double()
        self._compare(found.sum(1), expected)

    def _part(self, values: Mapping[str, Tensor], num_experts: int, *inputs: Tensor) -> Tensor:
        """Return the outputs of some of the experts."""
        try:
            rows: Tensor = self._called(values, num_experts, *inputs)
        except Exception as error:  # noqa: BLE001 - whatever a module raises that counts its experts otherwise
            self._refuse(f"with some of its experts it fails with {type(error).__name__}: {error}")
        return rows

    def _compare(self, found: Tensor, expected: Tensor) -> None:
        difference = float((found.double() - expected.double()).abs().max())
        scale = float(expected.double().abs().max())
        if not difference <= _TOLERANCES.get(self._dtype, _NARROW_TOLERANCE) * scale:
            self._refuse(f"on random inputs its outputs of up to {scale:.3g} differ by up to {difference:.3g}")

    def _whole(self, num_rows: int, *others: Tensor) -> tuple[Tensor, Tensor]:
        """Return hidden states that the module takes, and its outputs."""
        hidden, expected = None, None
        reason = "it returns no hidden states"
        for width in self._widths():
            hidden = torch.randn(num_rows, width, device=self._device, dtype=torch.float32).to(self._dtype)
            try:
                expected = self._called(self._values, self._num_experts, hidden, *others)
            except Exception as error:  # noqa: BLE001 - the hidden states have another width
                reason = f"{type(error).__name__}: {error}"
                continue
            if isinstance(expected, torch.Tensor) and expected.shape == hidden.shape:
                break
        if hidden is None or not isinstance(expected, torch.Tensor) or expected.shape != hidden.shape:
            self._refuse(f"it can't be called with {self.takes} ({reason})")
        again = self._called(self._values, self._num_experts, hidden, *others)
        if not torch.isfinite(expected).all() or not torch.equal(expected, again):
            self._refuse("it gives other outputs in each call, or infinite ones")
        return hidden, expected

    def _widths(self) -> list[int]:
        named = [vars(self._module).get(name) for name in ("hidden_dim", "hidden_size")]
        sizes = [size for values in self._values.values() for size in values.shape[1:][::-1]]
        return list(dict.fromkeys(size for size in (*named, *sizes) if isinstance(size, int)))

    def _called(self, values: Mapping[str, Tensor], num_experts: int, *inputs: Tensor) -> Any:
        for attribute in self._experts.counts:
            setattr(self._module, attribute, num_experts)
        buffers = {name: buffer.to(self._device) for name, buffer in self._module.named_buffers()}
        return torch.func.functional_call(self._module, {**values, **buffers}, inputs)

    def _refuse(self, reason: str) -> NoReturn:
        name, kind = self._experts.name, type(self._experts.module).__name__
        counted = ", ".join(repr(each) for each in self._experts.counts) or "no attribute"
        msg = (
            f"The experts '{name}' ({kind}) can't be spread over ranks: {reason}. They need parameters of shape "
            f"(experts, ...), a forward that takes {self.takes} and computes each token by itself, and in "
            f"`ExpertRule(counts=...)` the attributes that count the experts (here {counted}). Correct the rule, or "
            "use `ep_size=1`."
        )
        raise ConfigError(msg)


class _EveryTokenComparison(_Comparison):
    """The same for experts that are called with every token."""

    takes = "hidden states of every token for each expert"

    def run(self) -> None:
        """Compare.

        Raises:
            ConfigError: If the halves compute something else, or zeros don't give zeros.
        """
        hidden, expected = self._whole(self._num_experts * self._tokens)
        half, fewer = self._num_experts // 2, self._tokens - 2
        for first in (0, half):
            here = {
                name: values[first : first + half] if name in self._experts.parameters else values
                for name, values in self._values.items()
            }
            rows, wanted = (
                each.view(self._num_experts, self._tokens, -1)[first : first + half, :fewer].flatten(0, 1)
                for each in (hidden, expected)
            )
            self._compare(self._part(here, half, rows), wanted)
        zeros = torch.zeros_like(hidden, requires_grad=True)
        with torch.enable_grad():
            results = self._called(self._values, self._num_experts, zeros)
            (slope,) = torch.autograd.grad(results, zeros, torch.randn_like(results), allow_unused=True)
        if results.any() or (slope is not None and slope.any()):
            self._refuse("rows of zeros, which stay where they are, don't give zeros and gradients of zero")
