"""Plots of what `run.py` has measured: PNG on white, so that they can be read in print and on a dark page alike.

Variants differ in marker or hatching, too, and not in colour alone.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.pieces.load import EAGER
from benchmarks.pieces.variants import VARIANTS
from benchmarks.report import CASES, NAMES, beside_waits, herd_ratios, over_stock, throughput_ratios

Result = dict[str, Any]

# The colours of Okabe and Ito, which those who see no red or no green can tell apart.
STYLES = {
    "stock": ("#000000", "s", ""),
    "lock": ("#E69F00", "^", "//"),
    "first_call": ("#CC79A7", "v", "\\\\"),
    "copies": ("#0072B2", "D", ".."),
    "safecompile": ("#009E73", "o", ""),
    EAGER: ("#56B4E9", "P", "xx"),
}
KEY = "Results"  # of the text in a PNG that says which results it shows


def digest(run: Result) -> str:
    """Return what tells the results of one run from another's."""
    return hashlib.sha256(json.dumps(run, sort_keys=True).encode()).hexdigest()


def _name(variant: str) -> str:
    return NAMES[variant].replace("`", "")


def _lines(axes: Any, by_variant: dict[str, dict[str, float]]) -> None:
    for variant, row in by_variant.items():
        color, marker, _ = STYLES[variant]
        ours = variant == "safecompile"
        axes.plot(
            range(len(row)),
            list(row.values()),
            color=color,
            marker=marker,
            label=_name(variant),
            linewidth=2.5 if ours else 1.5,
            zorder=3 if ours else 2,
        )
        axes.set_xticks(range(len(row)), list(row))
    axes.set_xlabel("threads")
    axes.grid(axis="y", alpha=0.3)


def _bars(
    axes: Any, groups: Sequence[str], by_variant: Mapping[str, Sequence[float]], text: Callable[[float], str]
) -> None:
    height = 0.8 / len(by_variant)
    for index, (variant, values) in enumerate(by_variant.items()):
        color, _, hatch = STYLES[variant]
        places = [group + height * (index - (len(by_variant) - 1) / 2) for group in range(len(groups))]
        bars = axes.barh(
            places, values, height, color=color, hatch=hatch, edgecolor="white", linewidth=0.5, label=_name(variant)
        )
        axes.bar_label(bars, [text(value) for value in values], padding=3, fontsize=8)
    axes.set_yticks(range(len(groups)), groups)
    axes.invert_yaxis()
    axes.margins(x=0.18)
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)


def _milliseconds(value: float) -> str:
    return f"{value:.0f} ms" if value >= 10 else f"{value:.2g} ms"


def herd(result: Result, figure: Any) -> None:
    ratios = herd_ratios(result)
    left, right = figure.subplots(1, 2)
    _lines(left, {variant: {n: cell[0] for n, cell in row.items()} for variant, row in ratios.items()})
    left.set_ylabel("wall time, in multiples of one thread's")
    left.set_ylim(bottom=0)
    _lines(right, {variant: {n: cell[1] for n, cell in row.items()} for variant, row in ratios.items()})
    right.set_ylabel("graphs compiled")
    right.set_ylim(bottom=0)
    figure.suptitle("First call of one function by several threads together")


def warm(result: Result, figure: Any) -> None:
    axes = figure.subplots()
    measured = result["seconds_per_call"]
    groups = [name for name in measured if set(VARIANTS) <= measured[name].keys()]
    more = {v: [over_stock(measured[name], v)[1] * 1e6 for name in groups] for v in VARIANTS if v != "stock"}
    _bars(axes, groups, more, lambda value: f"{value:+.2f} µs")
    axes.axvline(0, color="black", linewidth=1)
    stock = ", ".join(f"{name} {median(measured[name]['stock']) * 1e6:.1f} µs" for name in groups)
    axes.set_xlabel(f"µs more than stock torch.compile ({stock})")
    figure.suptitle("A warm call of the smallest compiled function")


def beside(result: Result, figure: Any) -> None:
    waits = {(case, variant): (longest, p99) for case, variant, longest, p99, *_ in beside_waits(result)}
    groups = [(case, index) for case in ("blocked", "compiled") for index in (0, 1)]
    axes = figure.subplots()
    names = [f"{('longest', '99 %')[index]}, compile: {CASES[case]}" for case, index in groups]
    values = {v: [waits[case, v][index] * 1e3 for case, index in groups] for v in VARIANTS}
    _bars(axes, names, values, _milliseconds)
    axes.set_xscale("log")
    axes.set_xlabel("ms a call, logarithmic")
    figure.suptitle("Warm calls while another thread compiles")


def throughput(result: Result, figure: Any) -> None:
    axes = figure.subplots()
    _lines(axes, throughput_ratios(result))
    axes.set_ylabel("calls a second, over stock's")
    axes.set_ylim(bottom=0)
    figure.suptitle("Warm calls of several threads together")


def load(result: Result, figure: Any) -> None:
    axes = figure.subplots()
    kinds = {"median": "median", "p99": "99 %", "longest": "longest", "longest_compiled": "longest,\ncompiled shape"}
    values = {variant: [one[kind] * 1e3 for kind in kinds] for variant, one in result.items()}
    _bars(axes, list(kinds.values()), values, _milliseconds)
    axes.set_xscale("log")
    axes.set_xlabel("ms to the answer, logarithmic")
    figure.suptitle("Requests with a new shape now and then")


def memory(result: Result, figure: Any) -> None:
    axes = figure.subplots()
    groups = {"made": "callable made", "compiled": "callable compiled", "thread": "thread"}
    values = {v: [one[kind] / 1024 for kind in groups] for v, one in result["traced"].items()}
    _bars(axes, list(groups.values()), values, lambda value: f"{value:.1f} KiB")
    axes.set_xlabel("KiB that Python allocates")
    figure.suptitle("Memory per callable and per thread")


PLOTS: dict[str, Callable[[Result, Any], None]] = {
    "herd": herd,
    "warm": warm,
    "beside": beside,
    "throughput": throughput,
    "load": load,
    "memory": memory,
}


def draw_all(run: Result, folder: Path) -> None:
    """Draw what was measured into PNG files of that name."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    one = run["machine"]
    made = f"torch {one['torch']}, Python {one['python']}, {one['cores']} cores of {one['cpu']}, {one['date'][:10]}"
    if run["quick"]:
        made += " (a quick run: no figures to quote)"
    for name, draw in PLOTS.items():
        if name in run["results"]:
            figure = Figure(figsize=(8, 5), dpi=150, facecolor="white", layout="constrained")
            FigureCanvasAgg(figure)
            draw(run["results"][name], figure)
            figure.legend(
                *figure.axes[0].get_legend_handles_labels(),
                loc="outside lower center",
                ncols=3,
                fontsize=8,
                title=made,
                title_fontsize=7,
                frameon=False,
            )
            figure.savefig(folder / f"{name}.png", metadata={KEY: digest(run)})
