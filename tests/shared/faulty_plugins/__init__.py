"""Copies of the kit's reference plugins with one fault each: the conformance kit must find every one."""

from __future__ import annotations

from faulty_plugins import gradients, parameters, pipeline, state

FAULTY: dict[str, type] = {
    name: each
    for module in (gradients, parameters, pipeline, state)
    for name, each in vars(module).items()
    if isinstance(each, type) and each.__module__ == module.__name__ and not name.startswith("_")
}
"""The plugins, by name."""
