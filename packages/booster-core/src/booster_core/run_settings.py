"""`RunSettings`: the plugin, its options and the precision of a run, chosen where it is started.

`booster run` takes them from its command line or from a file, and hands them to the script's ``Booster()`` by the
environment variable ``BOOSTER_SETTINGS``.
"""

from __future__ import annotations

import ast
import functools
import inspect
import json
import sys
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from booster_core.errors import ConfigError
from booster_core.log import log
from booster_core.ranks.environments import variables

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import click

    from booster_core.plugin.interface import Plugin

__all__ = ["RunSettings", "option_value", "settings_options"]

VARIABLE = "BOOSTER_SETTINGS"
_LITERALS = {"true": True, "false": False, "none": None}


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """What ``Booster()`` takes where its script passes neither plugin nor precision.

    Args:
        plugin: Name of an installed plugin; ``None`` for that of the script.
        options: Arguments of its constructor.
        precision: As ``mixed_precision`` of `Booster`, by name; ``None`` for that of the script.

    Raises:
        ConfigError: If a value is of another type, or there are options of no plugin.
    """

    plugin: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    precision: str | None = None

    def __post_init__(self) -> None:
        for name in ("plugin", "precision"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                msg = f"`{name}={value!r}` of a run's settings is no name."
                raise ConfigError(msg)
        if not isinstance(self.options, dict):
            msg = f"`options={self.options!r}` of a run's settings is no table of names and values."
            raise ConfigError(msg)
        if self.options and self.plugin is None:
            given = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
            msg = f"`{given}` are options of a plugin, and none is named. Name it, as by `--plugin zero`."
            raise ConfigError(msg)

    @classmethod
    def of_this_run(cls) -> RunSettings:
        """Return what ``BOOSTER_SETTINGS`` says, or empty settings where it is not set.

        Raises:
            ConfigError: If it is no JSON object with these names.
        """
        text = variables(VARIABLE).get(VARIABLE, "").strip()
        if not text:
            return cls()
        try:
            values = json.loads(text)
            return cls(**values)
        except (ValueError, TypeError) as error:
            msg = (
                f"The environment variable {VARIABLE}={text!r} is no settings of a run ({error}). `booster run` sets "
                'it; by hand, write JSON such as {"plugin": "zero", "options": {"stage": 2}, "precision": "bf16"}.'
            )
            raise ConfigError(msg) from error

    def left_by(self, plugin: object, precision: object) -> RunSettings:
        """Return those settings that a script leaves open, and warn of others that have no effect.

        Args:
            plugin: What the script passes to `Booster`, or ``None``.
            precision: As ``plugin``; what a plugin object was asked for counts too.
        """
        left = self
        if plugin is not None and self.plugin is not None:
            left = replace(left, plugin=None, options={})
            name = plugin if isinstance(plugin, str) else getattr(plugin, "name", plugin)
            if name != self.plugin or self.options:
                log.warning(
                    "The script passes plugin %r to Booster, and `--plugin %s` of `booster run` and its "
                    "options have no effect. Pass none in the script to choose it there.",
                    name,
                    self.plugin,
                )
        own = getattr(plugin, "precision", None) if precision is None else precision
        if own is not None and self.precision is not None:
            left = replace(left, precision=None)
            if own != self.precision:
                log.warning(
                    "The script asks for precision %r, and `--precision %s` of `booster run` has no effect.",
                    own,
                    self.precision,
                )
        return left

    def environment(self) -> dict[str, str]:
        """Return the environment variable that hands the settings to a script; none where there are none.

        Raises:
            ConfigError: As `to_json`.
        """
        return {} if self == RunSettings() else {VARIABLE: self.to_json()}

    def to_json(self) -> str:
        """Return the settings as JSON, without those that are not chosen; a file of it is for ``--settings``.

        Raises:
            ConfigError: If JSON has no such value.
        """
        chosen = {name: value for name, value in asdict(self).items() if value not in (None, {})}
        try:
            return json.dumps(chosen)
        except TypeError as error:
            msg = f"The options {dict(self.options)} of plugin '{self.plugin}' can't be passed to a script: {error}."
            raise ConfigError(msg) from error

    def make_plugin(self, plugin_class: type[Plugin]) -> Plugin:
        """Return the plugin with its options.

        Raises:
            ConfigError: If its constructor has no such option, or refuses a value.
        """
        known = inspect.signature(plugin_class).parameters
        takes_any = any(each.kind is each.VAR_KEYWORD for each in known.values())
        for name in self.options if not takes_any else ():
            if name not in known:
                msg = (
                    f"Plugin '{self.plugin}' has no option '{name}', which the settings of this run (`--option` of "
                    f"`booster run`, or its file) give it. Its options: {', '.join(known)}."
                )
                raise ConfigError(msg)
        return plugin_class(**self.options)


def option_value(text: str) -> tuple[str, Any]:
    """Return the name and value of ``NAME=VALUE``: a Python literal, ``true``, ``false``, ``none``, or else a string.

    Raises:
        ConfigError: If it has no such form.
    """
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        msg = f"`--option {text}` is not NAME=VALUE."
        raise ConfigError(msg)
    if value.lower() in _LITERALS:
        return name, _LITERALS[value.lower()]
    try:
        return name, ast.literal_eval(value)
    except (SyntaxError, ValueError):
        return name, value


def settings_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--plugin``, ``--option``, ``--precision`` and ``--settings`` to a click command that starts a script.

    The function is called with their `RunSettings` as ``settings``. The file has the command's other options as well,
    by their names with underscores; what the command line says wins. A plugin named there has the options given there.
    """
    import click

    @functools.wraps(function)
    def command(*, file: dict[str, Any], plugin: str | None, option: tuple[str, ...], **others: Any) -> Any:
        try:
            options = dict(map(option_value, option))
            if plugin in (None, file.get("plugin")):
                plugin, options = file.get("plugin"), {**file.get("options", {}), **options}
            settings = RunSettings(plugin=plugin, options=options, precision=others.pop("precision"))
        except ConfigError as error:
            raise click.UsageError(str(error)) from error
        return function(settings=settings, **others)

    for add in (
        click.option("--plugin", metavar="NAME", help="Plugin, where the script names none."),
        click.option("--option", multiple=True, metavar="NAME=VALUE", help="Its argument; repeatable."),
        click.option(
            "--precision",
            metavar="NAME",
            type=click.Choice(["fp32", "bf16", "fp16", "pure-bf16"]),
            help="fp32, bf16, fp16 or pure-bf16.",
        ),
        click.option(
            "--settings",
            "file",
            metavar="FILE",
            is_eager=True,
            callback=_read_settings,
            help="TOML or JSON with any of these options.",
        ),
    )[::-1]:
        command = add(command)
    return command


def _read_settings(context: click.Context, _: click.Parameter, path: str | None) -> dict[str, Any]:
    """Read a file of settings, and make those of the command itself its defaults."""
    import click

    if path is None:
        return {}
    try:
        text = Path(path).read_text(encoding="utf-8")
        values = json.loads(text) if path.endswith(".json") else tomllib.loads(text)
    except (OSError, ValueError) as error:
        msg = f"'{path}' can't be read as {'JSON' if path.endswith('.json') else 'TOML'}: {error}"
        raise click.BadParameter(msg) from error
    known = {each.name for each in context.command.params if isinstance(each, click.Option)} - {"file", "option"}
    known.add("options")
    if not isinstance(values, dict) or not values.keys() <= known:
        wrong = ", ".join(f"'{name}'" for name in values if name not in known)
        msg = f"'{path}' has no settings named {wrong}; it can have: {', '.join(sorted(map(str, known)))}."
        raise click.BadParameter(msg)
    try:
        RunSettings(**{name: values[name] for name in ("plugin", "options", "precision") if name in values})
    except ConfigError as error:
        msg = f"'{path}': {error}"
        raise click.BadParameter(msg) from error
    own = {name: value for name, value in values.items() if name not in ("plugin", "options")}
    context.default_map = {
        name: ",".join(map(str, value)) if isinstance(value, list) else value for name, value in own.items()
    }
    return values
