"""Mutants of a part of `ReferencePlugin`, written as that part."""

from __future__ import annotations

from reference_plugins import ReferenceOptimizer, ReferencePlugin, ReferenceStateAdapter

from booster_core.plugin import ModelWrapper

_PARTS = {
    "optimizer_class": ReferenceOptimizer,
    "adapter_class": ReferenceStateAdapter,
    "model_class": ModelWrapper,
}


def as_plugin(part: type) -> type[ReferencePlugin]:
    """Return the plugin with a faulty optimizer, state adapter or model, under that one's name."""
    kind = next(kind for kind, base in _PARTS.items() if issubclass(part, base))
    members = {"__doc__": part.__doc__, "__module__": part.__module__, kind: part}
    return type(part.__name__, (ReferencePlugin,), members)
