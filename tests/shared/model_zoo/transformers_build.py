"""Entries for models of transformers, which are built from a config."""

from functools import partial

import torch

from model_zoo.fields import batch_of
from model_zoo.registry import ZooModel, own_loss, weighted_outputs


def of_transformers(name, family, suffix, settings, fields, *, loss=None, **more):
    """Return the entry of a model.

    Args:
        name: Its name in the zoo.
        family: What the names of its class and its config's begin with.
        suffix: The rest of its class' name.
        settings: Of its config; a nested dict becomes a sub-config.
        fields: Recipes of its batches.
        loss: Its own by default where it is given labels.
        **more: As for `ZooModel`.
    """
    has_labels = not fields.keys().isdisjoint({"labels", "start_positions"})
    return ZooModel(
        name=name,
        build=from_config(f"{family}Config", f"{family}{suffix}", **settings),
        batch=batch_of(**fields),
        loss=loss or (own_loss if has_labels else weighted_outputs),
        needs=("transformers",),
        **more,
    )


def from_config(config_class, model_class, **settings):
    """Return a function that builds the model; a nested dict in the settings becomes a sub-config."""
    return partial(_build, config_class, model_class, settings)


def _build(config_class, model_class, settings):
    import transformers

    config = getattr(transformers, config_class)(**settings)
    _without_dropout(config)
    model = getattr(transformers, model_class)(config)
    # Queries and embeddings that start at zero make layer norms ill-conditioned, or have zero gradients.
    for parameter in model.parameters():
        if parameter.requires_grad and not parameter.any() and parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def _without_dropout(config):
    """Set dropout probabilities in the config and its sub-configs to zero."""
    from transformers import PreTrainedConfig

    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            _without_dropout(value)
        elif "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)
