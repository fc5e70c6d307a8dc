"""The ways in which users compile a model, by a backend that needs no C++ compiler."""

from __future__ import annotations

import torch

from booster_runtime import compile_layers

BACKEND = "aot_eager"


def whole(model):
    return torch.compile(model, backend=BACKEND)


def in_place(model):
    model.compile(backend=BACKEND)
    return model


def layers(model):
    for layer in model.model.layers:
        layer.compile(backend=BACKEND)
    return model


def blocks(model):
    compile_layers(model, backend=BACKEND)
    return model
