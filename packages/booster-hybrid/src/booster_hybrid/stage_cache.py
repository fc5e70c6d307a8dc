"""`StageCache`: keys and values of the layers that a pipeline stage runs, kept between the tokens of `generate`.

transformers' models ask a cache for the length of the text: of some layer, which may run on another rank, or has got
the present tokens already because another stage of this rank has run before. This one answers for all layers alike.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from booster_core.errors import ConfigError
from booster_hybrid.pipeline.absent import is_absent
from booster_runtime.sharding import generating_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn

_KINDS = frozenset({"DynamicLayer", "DynamicSlidingWindowLayer"})
"""transformers' layers of a cache that grow with the text; a window is left to the mask."""


@dataclass(frozen=True)
class _Kept:
    """Stands for a cache in outputs that go to other ranks."""


class StageCache:
    """One text's keys and values on one rank.

    Args:
        is_asked_for: Whether the call names a cache; else models that need another kind have none.

    Attributes:
        cache: transformers' cache, with some methods of this; ``None`` if nothing is kept.
    """

    def __init__(self, *, is_asked_for: bool) -> None:
        self._is_asked_for = is_asked_for
        self.cache: Any = None
        self._update: Callable[..., tuple[Tensor, Tensor]]
        self._length: int | None = None

    def instead_of(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return what makes such a cache, and is called as the method of transformers that makes one."""

        @functools.wraps(method)
        def prepare(generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
            before = {*model_kwargs}
            result = method(generation_config, model_kwargs, *args, **kwargs)
            made = {name: model_kwargs.pop(name) for name in {*model_kwargs} - before}
            if {*made} == {"past_key_values"} and _is_plain(made["past_key_values"]):
                self._begin(type(made["past_key_values"])())
                model_kwargs["past_key_values"] = self.cache
                return result
            if self._is_asked_for:
                found = ", ".join(f"`{type(each).__name__}`" for each in made.values()) or "what the model has"
                msg = (
                    f"`generate` is to keep {found}, and under `pp_size` only keys and values that grow with the text "
                    "are kept. Leave out `use_cache` and `cache_implementation`; each token is computed from the whole "
                    "text then."
                )
                raise ConfigError(msg)
            generation_config.use_cache = False
            return result

        return prepare

    def _begin(self, cache: Any) -> None:
        self.cache, self._update = cache, cache.update
        cache.update, cache.get_seq_length, cache.get_mask_sizes = self.update, self.length, self.mask_sizes

    @contextlib.contextmanager
    def during_forward(self) -> Iterator[None]:
        """Let the text be as long as before the forward, for all of the rank's stages."""
        self._length = self.length()
        try:
            yield
        finally:
            self._length = None

    def length(self, layer_idx: int = 0) -> int:
        """Return the number of tokens that every layer has."""
        del layer_idx
        if self._length is None:
            layers = () if self.cache is None else self.cache.layers
            return max((layer.get_seq_length() for layer in layers), default=0)
        return self._length

    def mask_sizes(self, query_length: int | Tensor, layer_idx: int = 0) -> tuple[int, int]:
        """Return how many tokens a layer sees, and how many it has dropped: none."""
        del layer_idx
        # Early versions of transformers 5 pass positions.
        query = query_length.shape[0] if isinstance(query_length, Tensor) else query_length
        return self.length() + query, 0

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Return a layer's keys and values of all tokens; of a layer that is only tried, in their form alone."""
        if is_absent(keys):
            past = self.length()
            return tuple(  # type: ignore[return-value] # of two
                torch.cat([each.new_zeros((*each.shape[:-2], past, each.shape[-1])), each], -2)
                for each in (keys, values)
            )
        return self._update(keys, values, layer_idx, *args, **kwargs)

    def left_out(self, outputs: Any) -> Any:
        """Return outputs with a mark in the place of the cache."""
        return pytree.tree_map(
            lambda leaf: _Kept() if leaf is self.cache and leaf is not None else leaf,
            outputs,
            is_leaf=lambda leaf: leaf is self.cache,
        )

    def put_in(self, outputs: Any) -> Any:
        """Return outputs with this rank's cache in the place of the mark."""
        return pytree.tree_map_only(_Kept, lambda _: self.cache, outputs)


def can_keep(model: nn.Module) -> bool:
    """Return whether a model generates by transformers' own loop, which asks a method for a cache."""
    inner = generating_model(model)
    return inner is not None and type(inner).generate is sys.modules["transformers"].GenerationMixin.generate


def _is_plain(cache: Any) -> bool:
    """Return whether a cache holds keys and values of each layer that grow with the text, on the device."""
    kinds = {type(layer).__name__ for layer in getattr(cache, "layers", ())}
    return type(cache).__name__ == "DynamicCache" and not cache.offloading and kinds <= _KINDS
