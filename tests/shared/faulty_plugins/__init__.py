"""Copies of the kit's reference plugins with one fault each: the conformance kit must find every one."""

from reference_plugins import ReferenceOptimizer, ReferencePlugin, ReferenceStateAdapter

from booster_core.plugin import ModelWrapper, Plugin
from faulty_plugins import gradients, parameters, pipeline, state

_PARTS = {"optimizer_class": ReferenceOptimizer, "adapter_class": ReferenceStateAdapter, "model_class": ModelWrapper}


def _plugin_with(part):
    """Return `ReferencePlugin` with a faulty part, of the same name."""
    (place,) = (place for place, kind in _PARTS.items() if issubclass(part, kind))
    return type(part.__name__, (ReferencePlugin,), {"__module__": __name__, "__doc__": part.__doc__, place: part})


FAULTY = {
    name: each if issubclass(each, Plugin) else _plugin_with(each)
    for module in (gradients, parameters, pipeline, state)
    for name, each in vars(module).items()
    if isinstance(each, type) and each.__module__ == module.__name__ and not name.startswith("_")
}
"""The plugins, by name."""
globals().update({name: each for name, each in FAULTY.items() if each.__module__ == __name__})  # ranks unpickle them
