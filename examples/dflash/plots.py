"""Pictures of a run, made from its files."""

from __future__ import annotations

import os
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

from run_folder import RunFolder

# matplotlib keeps a list of fonts; without this it would make a folder for settings as well.
os.environ.setdefault(
    "MPLCONFIGDIR", str(Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "matplotlib")
)

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from monitor import COMPILES, WAITS_TO_COMPILE

_COLORS = {
    "starts": "0.9",
    "answers": "tab:blue",
    "evaluates": "tab:purple",
    "reads": "tab:cyan",
    "trains": "tab:green",
    COMPILES: "tab:red",
    WAITS_TO_COMPILE: "tab:orange",
    "waits for work": "0.75",
    "waits for room": "0.75",
    "waits for replicas": "0.6",
    "waits for weights": "0.75",
}


def _save(figure: Figure, path: Path) -> None:
    FigureCanvasAgg(figure)  # without pyplot: nothing of the process is set, and no display is looked for
    figure.tight_layout()
    new = path.with_name(f".{path.stem}.new.png")
    figure.savefig(new, dpi=110)
    new.replace(path)


def loss(folder: RunFolder) -> None:
    """Draw ``loss.png``: the loss of each step, and the expected acceptance length."""
    steps = folder.metrics("step")
    figure = Figure(figsize=(7, 4))
    axes = figure.subplots()
    beside = axes.twinx()
    for own, name, label, color in (
        (axes, "loss", "loss, first replica", "tab:blue"),
        (beside, "eal", "expected acceptance length, first replica", "tab:green"),
    ):
        own.plot([s["step"] for s in steps], [s[name] for s in steps], linewidth=1, color=color)
        own.set_ylabel(label, color=color)
    axes.set_xlabel("step")
    _save(figure, folder.path / "loss.png")


def acceptance(folder: RunFolder, by_drafter: dict[str, list[float]]) -> None:
    """Draw ``acceptance.png``: how often each draft slot is accepted, with all before it."""
    figure = Figure(figsize=(7, 4))
    axes = figure.subplots()
    for name, shares in by_drafter.items():
        axes.plot(range(1, len(shares) + 1), shares, marker="o", markersize=3, label=name)
    axes.set(xlabel="draft slot", ylabel="accepted, share of cycles", ylim=(0, 1))
    axes.legend()
    _save(figure, folder.path / "acceptance.png")


def acceptance_length(folder: RunFolder) -> None:
    """Draw ``acceptance_length.png``: what was measured while training went on; nothing if there was one evaluation, at the end."""
    measured = sorted(folder.metrics("evaluation"), key=lambda line: line["step"])
    if len(measured) < 2:
        return
    figure = Figure(figsize=(7, 4))
    axes = figure.subplots()
    for name, label in (("tau", "all references"), ("tau_not_looping", "without loops")):
        known = [(line["step"], line[name]) for line in measured if line[name] is not None]
        axes.plot(*zip(*known, strict=True) if known else ([], []), marker="o", markersize=3, label=label)
    axes.set(xlabel="step", ylabel="acceptance length")
    axes.legend()
    _save(figure, folder.path / "acceptance_length.png")


def spans(changes: Iterable[dict[str, str | float]], end: float) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """Turn changes of state into spans ``(start, length)``, by thread and state."""
    by_thread: dict[str, list[tuple[float, str]]] = {}
    for change in changes:
        by_thread.setdefault(str(change["thread"]), []).append((float(change["seconds"]), str(change["state"])))
    found: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for thread, states in by_thread.items():
        own = found.setdefault(thread, {})
        for (start, state), (stop, _) in pairwise([*states, (end, "")]):
            own.setdefault(state, []).append((start, max(0.0, stop - start)))
    return found


def threads(folder: RunFolder, end: float) -> None:
    """Draw ``threads.png``: what each thread did when."""
    by_thread = spans(folder.metrics("thread"), end)
    figure = Figure(figsize=(9, 4))
    axes = figure.subplots()
    for row, states in enumerate(by_thread.values()):
        for state, bars in states.items():
            if state in _COLORS:
                axes.broken_barh(bars, (row - 0.4, 0.8), facecolors=_COLORS[state])
    axes.set_yticks(range(len(by_thread)), list(by_thread))
    axes.invert_yaxis()
    axes.set_xlabel("seconds of training")
    for state, color in _COLORS.items():
        axes.broken_barh([(0.0, 0.0)], (0, 0), facecolors=color, label=state)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), ncol=4, fontsize="small")
    _save(figure, folder.path / "threads.png")
