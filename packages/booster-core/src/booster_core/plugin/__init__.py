"""The interface between `Booster` and a strategy, and the parts of a plugin: wrappers, hooks, placing of models.

``from booster_core.plugin import GeminiPlugin`` imports the class of any installed plugin.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from booster_core.lazy_import import public_names

if TYPE_CHECKING:
    from booster_core.discovery import PluginListing, installed, load
    from booster_core.plugin.checks import check_arguments
    from booster_core.plugin.guards import through_guard
    from booster_core.plugin.hooks import hook_relay, register_hooks, unregister_hooks
    from booster_core.plugin.hookspecs import hookimpl
    from booster_core.plugin.interface import (
        API_VERSION,
        SYNCHRONOUS_TRAINING,
        BoostContext,
        Boosted,
        Capability,
        PipelinePlugin,
        Plugin,
        as_tuple,
        like,
    )
    from booster_core.plugin.model import ModelWrapper, boosted_inside, unwrap_model
    from booster_core.plugin.optimizer import OptimizerWrapper, check_loss, unscaled_gradient, write_gradient
    from booster_core.plugin.options import check_argument_types, check_option_types
    from booster_core.plugin.scaling import GradientScaling
    from booster_core.plugin.settings import (
        check_no_masters,
        holds_numbers,
        normalisation_parameters,
        place_model,
        rebind,
        stored_dtypes,
    )
    from booster_core.plugin.single import SingleDevicePlugin
    from booster_core.plugin.step_agreement import sum_of_bits
    from booster_core.state import StateAdapter, TensorShard

__all__ = [
    "API_VERSION",
    "SYNCHRONOUS_TRAINING",
    "BoostContext",
    "Boosted",
    "Capability",
    "GradientScaling",
    "ModelWrapper",
    "OptimizerWrapper",
    "PipelinePlugin",
    "Plugin",
    "PluginListing",
    "SingleDevicePlugin",
    "StateAdapter",
    "TensorShard",
    "as_tuple",
    "boosted_inside",
    "check_argument_types",
    "check_arguments",
    "check_loss",
    "check_no_masters",
    "check_option_types",
    "holds_numbers",
    "hook_relay",
    "hookimpl",
    "installed",
    "like",
    "load",
    "normalisation_parameters",
    "place_model",
    "rebind",
    "register_hooks",
    "stored_dtypes",
    "sum_of_bits",
    "through_guard",
    "unregister_hooks",
    "unscaled_gradient",
    "unwrap_model",
    "write_gradient",
]

_import, __dir__ = public_names(__name__)


def __getattr__(name: str) -> Any:
    """Import a public name, or the class of an installed plugin, or say which distribution brings it."""
    if name in __all__:
        return _import(name)
    if not name[:1].isupper():  # no class: Python asks for submodules here before it imports them
        msg = f"module 'booster_core.plugin' has no attribute '{name}'"
        raise AttributeError(msg)
    from booster_core.discovery import plugin_class

    return plugin_class(name)
