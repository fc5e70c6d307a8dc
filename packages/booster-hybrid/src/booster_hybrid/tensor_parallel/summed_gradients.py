"""Gradients of which each rank computes a part, summed where a parameter is used, or where a module's outputs are.

Such parameters are norms of each head, which are whole on every rank and work on split activations, and keys and values
that several ranks hold. A hook on the parameter would sum all that reaches it, also the gradient of a penalty on
weights, which every rank has whole; and it could not be put on a parameter that is trained later.

Such outputs are those of latent attention, which projects hidden states to a latent vector and to the rotary part of
the keys in one layer. The vector goes through column-parallel layers, which sum its gradient; the rotary part goes to
the heads as it is, so that each rank has the gradient of its own heads alone.
Reference: DeepSeek-AI 2024, "DeepSeek-V2" (arXiv:2405.04434), section 2.1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from booster_hybrid.tensor_parallel.collectives import enter, leave, share

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from torch import Tensor, nn

    from booster_hybrid.mesh import RankGroup
    from booster_hybrid.modules import ModulePatches
    from booster_hybrid.tensor_parallel.split import Split


def used(parameter: Tensor, split: Split | None, group: RankGroup) -> Tensor:
    """Return a parameter for one use, whose gradient is summed over ranks.

    Args:
        parameter: The parameter.
        split: Which part of the whole it is, where ranks share parts; ``None`` where it is whole.
        group: The ranks.

    Collective: the group, in backward.
    """
    if group.size == 1 or not (torch.is_grad_enabled() and parameter.requires_grad):
        return parameter
    return enter((parameter,), group)[0] if split is None else share(parameter, split, group)


class GradientAllReduce:
    """The forward of a module some of whose parameters sum their gradient over ranks.

    While it runs, the modules hold what `used` returns in the place of the parameters.

    Args:
        module: The module whose forward reads the parameters.
        group: The ranks.

    Attributes:
        splits: Which part of a whole the parameters are, by the module that holds them, this one or one inside, and
            their name in it; ``None`` for whole ones.
    """

    def __init__(self, module: nn.Module, group: RankGroup) -> None:
        self._forward: Callable[..., Any] = module.forward
        self._group = group
        self.splits: dict[tuple[nn.Module, str], Split | None] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        kept = [(holder._parameters, name, holder._parameters[name]) for holder, name in self.splits]  # noqa: SLF001
        try:
            for (parameters, name, parameter), split in zip(kept, self.splits.values(), strict=True):
                if parameter is not None:
                    parameters[name] = used(parameter, split, self._group)  # type: ignore[assignment]
            return self._forward(*args, **kwargs)
        finally:
            for parameters, name, parameter in kept:
                parameters[name] = parameter


def sum_where_used(
    module: nn.Module,
    splits: Mapping[int, Split | None],
    group: RankGroup,
    changes: ModulePatches,
    holders: Iterable[nn.Module] | None = None,
) -> None:
    """Let a module sum the gradients of some parameters that it uses, in place.

    Args:
        module: The module whose forward reads them.
        splits: The parameters, by ``id``, as for `used`.
        group: The ranks.
        changes: Notes what is replaced.
        holders: The modules that hold them; ``None`` looks at the module and all inside.
    """
    found = {
        (holder, name): splits[id(parameter)]
        for holder in (module.modules() if holders is None else holders)
        for name, parameter in holder.named_parameters(recurse=False, remove_duplicate=False)
        if id(parameter) in splits
    }
    if not found:
        return
    forward: Any = vars(module).get("forward")
    if not isinstance(forward, GradientAllReduce):
        forward = GradientAllReduce(module, group)
        changes.forward(module, forward)
    forward.splits.update(found)


class OutputSum:
    """Sums over ranks what a module returns, or the gradient of its last outputs.

    Args:
        module: The module, which returns a tensor.
        group: The ranks.
        changes: Notes the hook.
        is_partial: Whether what it returns is a part of a sum; else its gradient is.
        number: Of how many of the last outputs the gradient is summed; ``None`` for all.

    Attributes:
        module: As above.
        group: As above; who splits sequences between layers sums at the borders of blocks instead.
        is_partial: As above.
    """

    def __init__(
        self,
        module: nn.Module,
        group: RankGroup,
        changes: ModulePatches,
        *,
        is_partial: bool = False,
        number: int | None = None,
    ) -> None:
        self.module, self.group, self.is_partial, self._number = module, group, is_partial, number
        changes.hook(module.register_forward_hook(self))

    def __call__(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        """Return the outputs.

        Collective: the ranks, in forward or in backward.
        """
        del module, args
        if self.is_partial or self.group.size == 1:
            return leave(output, self.group)
        if self._number is None:
            return enter((output,), self.group)[0]
        others, own = output[..., : -self._number], output[..., -self._number :]
        return torch.cat([others, *enter((own,), self.group)], -1)
