"""Parts of layers that mix positions in another way than by attention: linear attention, state spaces, convolutions.

Such a part runs on whole sequences, which are gathered at its entry, so that a recurrence, its chunks and its padding
are the model's own. Which parts these are is found out, and not listed: `find_mixers` asks autograd whether what a part
returns for some positions depends on what it is given for others.

Recurrences and convolutions run over positions, but each head (or group of heads, or channel) by itself. Where
`MIXERS` says what is counted in a class, a rank computes its heads with its slices of the part's weights, in a copy of
the part that counts fewer heads; what ranks return is summed over the output projection, and cut to each rank's
positions: the work and the activations of a part are shared out, as DeepSpeed-Ulysses
(https://arxiv.org/abs/2309.14509) shares out those of attention. Weights stay whole on each rank, whose gradient is
that of its heads: the mean over sequence parallel ranks, which all weights take, makes it the whole one. Elsewhere
every rank computes the part alike, and keeps its own positions of what it returns.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from booster_core.errors import ConfigError
from booster_hybrid.pipeline.absent import is_absent
from booster_hybrid.policy.mixers import MIXERS, attribute_of, lengths_of_blocks
from booster_hybrid.sequence_parallel.exchange import gather_sequence, scatter_sum
from booster_hybrid.sequence_parallel.layers import HIDDEN_STATES, mapped
from booster_hybrid.sequence_parallel.stack import argument_names, kind_of_layer
from booster_hybrid.torch_functions import outside_of_graphs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from booster_hybrid.mesh import RankGroup
    from booster_hybrid.sequence_parallel.exchange import SequenceLayout
    from booster_hybrid.sequence_parallel.stack import Stack


_CACHES = ("cache_params", "past_key_values")


class ForwardOfHeads:
    """The forward of a part of a layer that mixes positions: that of this rank's heads, where these can be told.

    Args:
        module: The part.
        group: The sequence parallel ranks.

    Attributes:
        is_partial: Whether what was returned last is this rank's term of a sum over ranks, and not the whole.
    """

    def __init__(self, module: nn.Module, group: RankGroup) -> None:
        self._module, self._group = module, group
        self._heads = MIXERS[type(module).__name__]
        self.is_partial = False

    @classmethod
    def of(cls, module: nn.Module, group: RankGroup) -> ForwardOfHeads | None:
        """Return the forward of a part whose heads can be shared out among ranks, which becomes its own."""
        heads = MIXERS.get(type(module).__name__)
        if heads is None or group.size == 1 or "forward" in vars(module):
            return None
        known = {*heads.cuts, *heads.first, *heads.whole}
        counts = [attribute_of(module, name) for name in heads.units]
        if not {name for name, _ in module.named_parameters()} <= known or any(each % group.size for each in counts):
            return None
        forward = cls(module, group)
        module.forward = forward
        return forward

    @outside_of_graphs
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's own code on this rank's heads, or on all of them."""
        module = self._module
        self.is_partial = all(kwargs.get(name) is None for name in _CACHES) and not _is_watched(module)
        if not self.is_partial:  # a cache would hold some heads; hooks and adapters are those of the whole part
            return type(module).forward(module, *args, **kwargs)
        here = self._of_this_rank(module, "")
        return type(module).forward(here, *args, **kwargs)

    def _of_this_rank(self, module: nn.Module, prefix: str) -> nn.Module:
        """Return a copy of a module with this rank's heads."""
        here = copy.copy(module)
        own: dict[str, Any] = vars(here)
        own.pop("forward", None)
        own["_parameters"] = {
            name: None if value is None else self._slice(prefix + name, value)
            for name, value in module._parameters.items()  # noqa: SLF001 - a slice is no parameter of its own
        }
        own["_buffers"] = {
            name: None if value is None else self._slice(prefix + name, value)
            for name, value in module._buffers.items()  # noqa: SLF001
        }
        own["_modules"] = {
            name: None if child is None else self._of_this_rank(child, f"{prefix}{name}.")
            for name, child in module._modules.items()  # noqa: SLF001
        }
        for name in (*self._heads.units, *self._heads.sizes):
            path, _, attribute = name.rpartition(".")
            if path == prefix.rstrip(".") and attribute in own:
                own[attribute] //= self._group.size
        if isinstance(here, nn.Conv1d):
            own.update({name: own[name] // self._group.size for name in ("in_channels", "out_channels")})
            own["groups"] = own["in_channels"]
        return here

    def _slice(self, name: str, value: Tensor) -> Tensor | None:
        """Return this rank's slice of a parameter; ``None`` for what another rank uses alone."""
        rank, size = self._group.rank, self._group.size
        if name in self._heads.first:
            return value if rank == 0 else None
        cut = self._heads.cuts.get(name)
        if cut is None:
            return value
        sizes = lengths_of_blocks(self._module, cut, value.shape[cut.dim])
        parts = [each.chunk(size, cut.dim)[rank] for each in torch.split(value, [*sizes], cut.dim)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, cut.dim)


def _is_watched(module: nn.Module) -> bool:
    """Return whether something hangs on the modules inside of a part: hooks, adapters, other forwards."""
    return any(
        "forward" in vars(each) or each._forward_hooks or each._forward_pre_hooks  # noqa: SLF001 - torch tells nobody
        for each in module.modules()
        if each is not module
    )


def find_mixers(layers: Sequence[nn.Module], stack: Stack) -> None:
    """Let layers note in ``stack.mixers`` what mixes positions in them while they run on whole sequences, in place.

    Args:
        layers: The layers, which attend through the stack, that of a single rank.
        stack: What they share.
    """
    for layer in layers:
        watch = _Watch(layer, stack)
        for module in layer.modules():
            if module is not layer:
                module.register_forward_pre_hook(watch.before, with_kwargs=True)
                module.register_forward_hook(watch.after, with_kwargs=True)
        layer.register_forward_hook(watch.after_layer, prepend=True)


def gather_for_mixers(layers: Sequence[nn.Module], stack: Stack) -> None:
    """Give the parts of layers that mix positions whole sequences, in place.

    Args:
        layers: The layers.
        stack: What they share, which knows the parts.
    """
    for layer in layers:
        for module in _outermost(layer, stack.mixers.classes):
            hooks = _WholeSequences(module, stack)
            module.register_forward_pre_hook(hooks.before, with_kwargs=True)
            module.register_forward_hook(hooks.after, always_call=True)


def _outermost(module: nn.Module, classes: set[str]) -> list[nn.Module]:
    found = []
    for child in module.children():
        found += [child] if type(child).__name__ in classes else _outermost(child, classes)
    return found


def _hidden_name(names: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | int | None:
    """Return where among its arguments a part is given hidden states: their place or name, ``None`` if nowhere."""
    if args:
        return 0
    return next((each for each in (HIDDEN_STATES, *names[:1]) if each in kwargs), None)


def _argument(name: str | int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[name] if isinstance(name, int) else kwargs[name]


class _Watch:
    """Finds out which parts of a layer mix positions without attention.

    Args:
        layer: The layer.
        stack: What the layers share.
    """

    def __init__(self, layer: nn.Module, stack: Stack) -> None:
        self._layer, self._stack = layer, stack
        self._counts: list[int] = []
        self._found: set[nn.Module] = set()
        self._is_testing = False

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note how often has been attended before a part."""
        del module, args, kwargs
        if not self._is_testing:
            self._counts.append(self._stack.num_attentions)

    def after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Test a part that has not attended."""
        del output
        if self._is_testing or self._stack.num_attentions != self._counts.pop():
            return
        self._is_testing = True
        try:
            with torch.enable_grad():
                if _mixes(module, args, kwargs, self._stack.length):
                    self._found.add(module)
        finally:
            self._is_testing = False

    def after_layer(self, layer: nn.Module, args: Any, output: Any) -> None:
        """Note what was found in the layer."""
        del args, output
        mixers = self._stack.mixers
        classes = {type(module).__name__ for module in self._found}
        mixers.classes |= {type(module).__name__ for module in _outermost(layer, classes)}
        if not self._stack.num_attentions:
            mixers.apart.add(kind_of_layer(layer))


def _mixes(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], length: int) -> bool:
    """Return whether what a module returns for half of the positions depends on what it is given for the other half."""
    name = _hidden_name(argument_names(module), args, kwargs)
    hidden = None if name is None else _argument(name, args, kwargs)
    if not isinstance(hidden, torch.Tensor) or not hidden.is_floating_point() or length not in hidden.shape[1:]:
        return False
    dim = hidden.shape.index(length, 1)
    leaf = hidden.detach().clone().requires_grad_()
    given = leaf * 1  # which a module may write to
    output = module.forward(given, *args[1:], **kwargs) if name == 0 else module.forward(**{**kwargs, str(name): given})
    output = output[0] if isinstance(output, tuple) else output
    if not isinstance(output, torch.Tensor) or length not in output.shape[1:] or not output.requires_grad:
        return False
    along, half = output.shape.index(length, 1), length // 2
    for kept, asked in (((0, half), (half, length - half)), ((half, length - half), (0, half))):
        part = output.narrow(along, *kept)
        weights = torch.arange(part.numel(), device=part.device, dtype=part.dtype).sin().view(part.shape)
        (gradient,) = torch.autograd.grad((part * weights).sum(), leaf, retain_graph=True, allow_unused=True)
        if gradient is not None and bool(gradient.narrow(dim, *asked).any()):
            return True
    return False


class _WholeSequences:
    """Gives a part of a layer whole sequences, and takes this rank's positions out of what it returns.

    Args:
        module: The part.
        stack: What the layers share.
    """

    def __init__(self, module: nn.Module, stack: Stack) -> None:
        self._stack, self._names = stack, argument_names(module)
        self._heads = ForwardOfHeads.of(module, stack.group)

    @outside_of_graphs
    def before(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Gather what is given for this rank's positions. Collective: the sequence parallel ranks."""
        stack = self._stack
        name = _hidden_name(self._names, args, kwargs)
        if name is None:
            shapes = [tuple(each.shape) for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)]
            msg = (
                f"'{type(module).__name__}' mixes positions of a sequence and is given no hidden states of shape "
                f"(samples, positions, width), but tensors of shapes {shapes}. Pass them as in the batch that `boost` "
                "has seen, or leave `sequence_parallelism_mode` out."
            )
            raise ConfigError(msg)
        hidden = _argument(name, args, kwargs)
        stack.note_masks([*args, *kwargs.values()])
        stack.resume(hidden.shape[1])
        layout = stack.layout(stack.length)
        stack.num_attentions += 1
        stack.stream.pause()  # ranks draw alike

        def whole(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or is_absent(value):
                return value
            if value in stack.wholes:
                return stack.wholes[value]
            is_of_positions = value.dim() > 1 and value.shape[:2] == hidden.shape[:2]  # made in the layer, as it is
            return _gathered(value, layout, stack) if is_of_positions else value

        result: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map(whole, (args, kwargs))
        return result

    @outside_of_graphs
    def after(self, module: nn.Module, _: Any, output: Any) -> Any:
        """Take this rank's positions. Collective: the sequence parallel ranks, where each has some heads."""
        del module
        self._stack.stream.resume()
        if output is None:  # the part has raised
            return None
        layout, group = self._stack.layout(self._stack.length), self._stack.group
        if self._heads is not None and self._heads.is_partial:
            return mapped(output, lambda partial: scatter_sum(partial, layout, group))
        return mapped(output, lambda hidden: layout.take(hidden, 1, group.rank).contiguous())


def _gathered(value: Tensor, layout: SequenceLayout, stack: Stack) -> Tensor:
    """Return whole sequences of which each rank has a part. Collective: the ranks."""
    whole = gather_sequence(value.to(torch.uint8) if value.dtype == torch.bool else value, layout, stack.group)
    return whole.to(value.dtype)
