"""Pictures of runs, drawn by matplotlib: curves of values, memory over time, and comparisons of plans.

Nothing here imports torch, and matplotlib is imported where something is drawn.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import numpy as np

from booster_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from matplotlib.axes import Axes
    from numpy.typing import NDArray

    from booster_tools.planning.ranking import Plan

__all__ = ["check_picture", "draw_curve", "draw_memory", "draw_plan", "format_bytes", "format_seconds", "picture"]

FORMATS = (".png", ".svg", ".pdf")
LIMIT = "#d1495b"
_LIGHT = {"ink": "#333333", "paper": "#ffffff", "grid": "#e4e4e4"}
_DARK = {"ink": "#d5d7da", "paper": "#1e2129", "grid": "#3a3f4b"}
_KINDS = {
    "parameters": ("parameter_bytes", "#4477aa"),
    "gradients": ("gradient_bytes", "#66ccee"),
    "optimizer state": ("optimizer_bytes", "#228833"),
    "others that stay": ("other_bytes", "#aa3377"),
    "transient": ("activation_bytes", "#999999"),
}


def check_picture(path: Path) -> None:
    """Check that a picture can be drawn to a path.

    Raises:
        ConfigError: If matplotlib can't be imported, or the path's ending names no format of ours.
    """
    if path.suffix not in FORMATS:
        msg = f"The picture '{path}' must end in one of {', '.join(FORMATS)}."
        raise ConfigError(msg)
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as cause:
        msg = (
            f"Pictures need the package `matplotlib`, which can't be imported ({cause}). Run `pip install "
            "'booster-tools[pictures]'`."
        )
        raise ConfigError(msg) from cause


@contextlib.contextmanager
def picture(
    path: Path, *, inches: tuple[float, float], title: str, rows: int = 1, dark: bool = False
) -> Iterator[Sequence[Axes]]:
    """Draw axes above each other in a ``with``, and write them at its end, unless it raises.

    Args:
        path: Where to write; its ending is the format, ``.png``, ``.svg`` or ``.pdf``.
        inches: Width and height, of 100 pixels each.
        title: Printed above.
        rows: How many axes there are.
        dark: Whether the paper is dark.

    Raises:
        ConfigError: As `check_picture` does.
    """
    check_picture(path)
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    colors = _DARK if dark else _LIGHT
    inks = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    papers = ("figure.facecolor", "axes.facecolor", "savefig.facecolor", "legend.facecolor")
    settings = dict.fromkeys(inks, colors["ink"]) | dict.fromkeys(papers, colors["paper"])
    fixed = {"svg.hashsalt": "booster", "svg.fonttype": "none"}  # the same file each time, with words that are words
    look = {"axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True, "font.size": 9}
    all_settings: Any = settings | fixed | look | {"grid.color": colors["grid"], "legend.frameon": False}
    with rc_context(all_settings):
        figure = Figure(figsize=inches, layout="constrained")
        figure.suptitle(title, x=0.01, horizontalalignment="left", fontsize=11)
        found: list[Axes] = [*figure.subplots(rows, sharex=True, squeeze=False)[:, 0]]
        for axes in found:
            axes.grid(visible=True)
        yield found
        path.parent.mkdir(parents=True, exist_ok=True)
        # without the time of writing, which only these formats would tell
        metadata = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(path.suffix)
        figure.savefig(path, dpi=150, metadata=metadata)


def draw_curve(
    steps: Sequence[int], values: Sequence[float], path: Path, *, title: str, y_name: str, dark: bool = False
) -> None:
    """Draw values over steps, with their running mean over a twentieth of them on top.

    Values that are not finite leave gaps.

    Args:
        steps: Of the values, rising.
        values: One value for each of these steps.
        path: Where to write; its ending is the format.
        title: Printed above the curve.
        y_name: What the values are, with their unit.
        dark: Whether the paper is dark.

    Raises:
        ConfigError: If no value is finite, or as `check_picture` does.
    """
    numbers = np.asarray(values, dtype=np.float64)
    is_there = np.isfinite(numbers)
    numbers = np.where(is_there, numbers, np.nan)
    if not is_there.any():
        msg = f"None of the {len(numbers)} values of '{title}' is finite, so there is no curve to draw."
        raise ConfigError(msg)
    around = np.pad(is_there, 1)
    is_alone = is_there & ~around[:-2] & ~around[2:]  # between gaps, where no line would show it
    with picture(path, inches=(8.2, 4.6), title=title, dark=dark) as (axes,):
        axes.plot(steps, numbers, color="#7fa8d4", linewidth=0.8)
        axes.plot(np.asarray(steps)[is_alone], numbers[is_alone], ".", color="#7fa8d4")
        axes.plot(steps, _running_mean(numbers), color="#2f7fd0", linewidth=2.0)
        axes.set(xlabel="step", ylabel=y_name)


def draw_memory(
    events: Iterable[Mapping[str, Any]],
    path: Path,
    *,
    title: str,
    counters: Sequence[str] = (),
    dark: bool = False,
) -> None:
    """Draw the counters of bytes of one rank's trace over time, above its phases, with their peaks.

    Args:
        events: Of the trace, as `booster_runtime.trace.read_trace` returns them.
        path: Where to write; its ending is the format.
        title: Printed above.
        counters: Names of those to draw; none for all.
        dark: Whether the paper is dark.

    Raises:
        ConfigError: If the trace has no counters, or not the named ones, or as `check_picture` does.
    """
    found: dict[str, list[Mapping[str, Any]]] = {}
    tracks: dict[int, str] = {}
    phases: list[Mapping[str, Any]] = []
    for event in events:
        if event["ph"] == "C":
            found.setdefault(event["name"], []).append(event)
        elif event["name"] == "thread_name":
            tracks[event["tid"]] = event["args"]["name"]
        elif event["ph"] == "X" and tracks[event["tid"]] == "phases":
            phases.append(event)
    names = list(counters or found)
    if not names or not found.keys() >= set(names):
        msg = (
            f"'{title}' has no counters {', '.join(names) or 'at all'}, but {', '.join(found) or 'none'}. Perfetto "
            "(ui.perfetto.dev) shows all that a trace has."
        )
        raise ConfigError(msg)
    start = min(samples[0]["ts"] for samples in found.values())
    with picture(path, inches=(9.6, 1.0 + 2.6 * len(names)), title=title, rows=len(names), dark=dark) as rows:
        for axes, name in zip(rows, names, strict=True):
            _shade(axes, phases, start)
            _stack(axes, found[name], start, name)
            axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
        rows[-1].set(xlabel="seconds", xlim=(0, None))


def draw_plan(found: Plan, path: Path, *, dark: bool = False) -> None:
    """Draw a bar of bytes for each setting that could be planned, best first, with the line of a device's memory.

    Args:
        found: What `plan` returned.
        path: Where to write; its ending is the format.
        dark: Whether the paper is dark.

    Raises:
        ConfigError: As `check_picture` does.
    """
    planned = [(each, each.prediction) for each in found.settings if each.prediction is not None]
    number = planned[0][0].devices.number if planned else 0
    memory = found.settings[0].devices.memory_bytes if found.settings else 0
    most = max((prediction.peak_bytes for _, prediction in planned), default=1)
    shows_limit = memory <= 3 * most  # else the bars would be too short to compare
    highest = max(1.4 * most, 1.05 * memory) if shows_limit else 1.4 * most
    title = f"Bytes of a rank at the peak of a step, on {number} devices"
    with picture(path, inches=(11.0, 1.4 + 0.26 * len(planned)), title=title, dark=dark) as (axes,):
        start = np.zeros(len(planned))
        for name, (attribute, color) in _KINDS.items():
            sizes = np.array([getattr(prediction, attribute) for _, prediction in planned], dtype=np.float64)
            axes.barh(range(len(planned)), sizes, left=start, color=color, label=name)
            start += sizes
        for row, (setting, prediction) in enumerate(planned):
            words = f" {format_bytes(prediction.peak_bytes)}, {format_seconds(setting.step_seconds)} a step"
            ink = None if setting.fits else LIMIT
            axes.text(start[row], row, words if setting.fits else f"{words}, too much", va="center", color=ink)
        if shows_limit:
            axes.axvline(memory, color=LIMIT, linestyle="--", label=f"memory of a device: {format_bytes(memory)}")
        axes.set_yticks(range(len(planned)), [str(setting.candidate) for setting, _ in planned])
        axes.set(ylim=(len(planned) - 0.5, -0.5) if planned else None)
        axes.xaxis.set_major_formatter(lambda size, _: format_bytes(size))
        axes.xaxis.set_major_locator(_binary_marks(highest))
        axes.set_xlim(0, highest)
        axes.grid(visible=False, axis="y")
        axes.figure.legend(loc="outside lower center", ncols=len(_KINDS) + 1)


def format_bytes(num_bytes: float) -> str:
    """Return a number of bytes as people write it, such as ``"1.5 GiB"``."""
    unit = min(max(int(num_bytes).bit_length() - 1, 0) // 10, 4)
    return f"{num_bytes / 1024.0**unit:.4g} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[unit]}"


def format_seconds(seconds: float) -> str:
    """Return a time as people write it, such as ``"20 ms"``."""
    for factor, unit in ((1.0, "s"), (1e3, "ms")):
        if abs(seconds) * factor >= 1 or not seconds:
            return f"{seconds * factor:.4g} {unit}"
    return f"{seconds * 1e6:.4g} µs"


def _running_mean(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the mean of each value and those before it, but NaN, within a window of a twentieth of all.

    A window is the end of one block of its length and the beginning of the next. Their sums are made once for each
    block, and nothing is subtracted, so that a spike costs those after it no digits.
    """
    window = max(1, len(values) // 20)
    is_there = ~np.isnan(values)

    def sums(numbers: NDArray[Any]) -> NDArray[np.float64]:
        blocks = np.pad(numbers.astype(np.float64), (0, -len(numbers) % window)).reshape(-1, window)
        upto, since = blocks.cumsum(axis=1), np.zeros_like(blocks)
        since[1:, :-1] = blocks[:-1, :0:-1].cumsum(axis=1)[:, ::-1]  # of the block before, what is in the window
        return (upto + since).ravel()[: len(numbers)]

    means = sums(np.where(is_there, values, 0.0)) / np.maximum(sums(is_there), 1)
    return np.where(is_there, means, np.nan)


def _shade(axes: Axes, phases: Sequence[Mapping[str, Any]], start: float) -> None:
    """Paint the background by phase, each name in a color of its own."""
    names = list(dict.fromkeys(phase["name"] for phase in phases))
    for place, name in enumerate(names):
        own = [((each["ts"] - start) / 1e6, each["dur"] / 1e6) for each in phases if each["name"] == name]
        color = ("#4a90d9", "#e0a526", "#6ab04c")[place % 3]
        bottom_and_top = axes.get_xaxis_transform()
        axes.broken_barh(own, (0, 1), transform=bottom_and_top, facecolor=color, alpha=0.2, label=name)


def _stack(axes: Axes, samples: Sequence[Mapping[str, Any]], start: float, name: str) -> None:
    """Draw a counter's values on top of each other, and the peak of their sum."""
    parts = list(dict.fromkeys(part for sample in samples for part in sample["args"]))
    times = np.array([(sample["ts"] - start) / 1e6 for sample in samples])
    sizes = np.array([[sample["args"].get(part, 0) for sample in samples] for part in parts], dtype=np.float64)
    peak = sizes.sum(axis=0).max()
    axes.stackplot(times, sizes, labels=parts if len(parts) > 1 else [], alpha=0.7, step="post")
    axes.axhline(peak, color=LIMIT, linestyle="--", label=f"peak {format_bytes(peak)}")
    axes.yaxis.set_major_formatter(lambda size, _: format_bytes(size))
    axes.yaxis.set_major_locator(_binary_marks(peak))
    axes.set(ylabel=name, ylim=(0, 1.08 * peak or 1.0))


def _binary_marks(most: float) -> Any:
    """Return a locator of about five marks, round in the unit that suits the highest value."""
    from matplotlib.ticker import MaxNLocator, MultipleLocator

    unit = 1024.0 ** (max(int(most).bit_length() - 1, 0) // 10)
    marks = MaxNLocator(nbins=5, steps=[1, 2, 5, 10]).tick_values(0, max(most, 1.0) / unit)
    return MultipleLocator((marks[1] - marks[0]) * unit)
