"""Distributions made on the fly, as pip would have laid them on ``sys.path``."""

import importlib
import sys
import textwrap

import pytest

HOOKS = """
from booster_core.plugin.hookspecs import hookimpl
from {package}.plugin import {class_name}

@hookimpl
def booster_plugins():
    return [{class_name}]
"""
PLUGIN = """
from booster_core.plugin import Capability, Plugin

class {class_name}(Plugin):
    name = "{name}"
    api_version = 2
    {body}

    def configure(self, objects, context):
        return objects
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Return a function that installs a distribution with a plugin, or with given files, and forgets it afterwards."""
    before = set(sys.modules)

    def install_distribution(
        name="acme", *, distribution=None, files=None, body="pass", requires=(), group="booster.plugins", module=None
    ):
        distribution = distribution or f"booster-{name}"
        package = distribution.replace("-", "_")
        class_name = f"{name.title()}Plugin"
        texts = {
            f"{package}/__init__.py": "",
            f"{package}/hooks.py": HOOKS.format(package=package, class_name=class_name),
            f"{package}/plugin.py": PLUGIN.format(class_name=class_name, name=name, body=body),
            **{f"{package}/{path}": textwrap.dedent(text) for path, text in (files or {}).items()},
        }
        texts = {path: text for path, text in texts.items() if text is not None}
        info = f"{package}-1.2.dist-info"
        needs = "".join(f"Requires-Dist: {text}\n" for text in requires)
        texts[f"{info}/METADATA"] = f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.2\n{needs}"
        texts[f"{info}/entry_points.txt"] = f"[{group}]\n{name} = {module or package + '.hooks'}\n"
        site = tmp_path / distribution
        for path, text in texts.items():
            (site / path).parent.mkdir(parents=True, exist_ok=True)
            (site / path).write_text(text)
        monkeypatch.syspath_prepend(str(site))
        importlib.invalidate_caches()
        return package

    yield install_distribution
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]
