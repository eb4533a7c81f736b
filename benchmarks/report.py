"""Tables of what `run.py` has measured, as text and as Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import mean, median, stdev
from typing import Any

from benchmarks.pieces.load import EAGER
from benchmarks.pieces.variants import VARIANTS

Result = dict[str, Any]

NAMES = {
    "stock": "stock `torch.compile`",
    "lock": "a lock around every call",
    "first_call": "a first-call flag per function",
    "copies": "a compiled copy per thread",
    "safecompile": "safecompile",
    EAGER: 'safecompile, `when_compiling="eager"`',
    "stock_patched": "stock, beside the library",
    "nobody": "nothing: the machine itself",
}


@dataclass(frozen=True)
class Table:
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def text(self) -> str:
        lines = [[cell.replace("`", "") for cell in row] for row in (self.columns, *self.rows)]
        widths = [max(len(row[index]) for row in lines) for index in range(len(self.columns))]
        first, *rest = zip(*lines, strict=True)
        padded = [[cell.ljust(widths[0]) for cell in first]]
        padded += [[cell.rjust(width) for cell in column] for column, width in zip(rest, widths[1:], strict=True)]
        return "\n".join([self.title, *("  " + "  ".join(row) for row in zip(*padded, strict=True))])

    def markdown(self) -> str:
        rule = ["---", *["---:"] * (len(self.columns) - 1)]
        return "\n".join(f"| {' | '.join(row)} |" for row in (self.columns, rule, *self.rows))


def herd_ratios(result: Result) -> dict[str, dict[str, tuple[float, int, int]]]:
    """Return, by variant and number of threads: wall time as a multiple of one thread's of the variant, compiles, errors.

    The multiple is the median of those within one round; the compiles are the most of all rounds.
    """
    found: dict[str, dict[str, tuple[float, int, int]]] = {}
    for variant in VARIANTS:
        rounds = [one for repeat in result["repeats"] for one in repeat[variant]["rounds"]]
        found[variant] = {
            threads: (
                median(one[threads]["seconds"] / one["1"]["seconds"] for one in rounds),
                max(one[threads]["compiles"] for one in rounds),
                sum(len(one[threads]["errors"]) for one in rounds),
            )
            for threads in sorted(rounds[0], key=int)
        }
    return found


def herd(result: Result) -> Table:
    rows = []
    for variant, by_threads in herd_ratios(result).items():
        seconds = median(one["1"]["seconds"] for repeat in result["repeats"] for one in repeat[variant]["rounds"])
        cells = [
            f"{ratio:.2f}x ({compiles})" + (f", {errors} errors" if errors else "")
            for ratio, compiles, errors in by_threads.values()
        ]
        rows.append([NAMES[variant], f"{seconds:.2f} s", *cells])
    threads = list(herd_ratios(result)["stock"])
    return Table(
        "P1 First call of one function by N threads together: wall time in multiples of one thread's (graphs compiled)",
        ["", "one thread", *(f"N = {count}" for count in threads)],
        rows,
    )


def warm(result: Result) -> Table:
    rows = []
    for name, measured in result["seconds_per_call"].items():
        for variant, seconds in measured.items():
            ratio, more = over_stock(measured, variant)
            cells = [f"{median(seconds) * 1e6:.2f} µs", f"{ratio:.3f}", f"{more * 1e6:+.2f} µs"]
            rows.append([f"{name}: {NAMES[variant]}", *cells])
    install = median(result["install_seconds"])
    return Table(
        f"P2 A warm call of x + 1, CPU time (installing the patches, once a process: {install:.2f} s)",
        ["", "a call", "x stock", "more"],
        rows,
    )


def over_stock(measured: dict[str, list[float]], variant: str) -> tuple[float, float]:
    """Return the ratio and the difference of a variant to stock: medians of those within one round."""
    pairs = list(zip(measured[variant], measured["stock"], strict=True))
    return median(ours / stock for ours, stock in pairs), median(ours - stock for ours, stock in pairs)


CASES = {"nothing": "none", "blocked": "waits without the GIL", "compiled": "real"}


def beside_waits(result: Result) -> Iterable[tuple[str, str, float, float, float, int]]:
    """Return by compile and variant: longest call of all rounds, median of their 99 %, calls a second, failed calls."""
    for case in CASES:
        for variant in ("nobody", *VARIANTS):
            if waits := result[variant].get(case):
                calls, seconds = sum(wait["calls"] for wait in waits), sum(wait["seconds"] for wait in waits)
                longest, p99 = max(wait["longest"] for wait in waits), median(wait["p99"] for wait in waits)
                yield case, variant, longest, p99, calls / seconds, sum(wait["failed"] for wait in waits)


def beside(result: Result) -> Table:
    return Table(
        "P3 Warm calls while another thread compiles (longest: of all rounds; 99 %: median of the rounds)",
        ["the compile: variant", "longest", "99 %", "calls/s", "failed"],
        [
            [
                f"{CASES[case]}: {NAMES[variant]}",
                f"{longest * 1e3:.1f} ms",
                f"{p99 * 1e3:.3f} ms",
                f"{rate:.0f}",
                f"{failed}",
            ]
            for case, variant, longest, p99, rate, failed in beside_waits(result)
        ],
    )


def throughput_ratios(result: Result) -> dict[str, dict[str, float]]:
    """Return, by variant and number of threads, the calls in all rounds over stock's."""
    rates = result["calls_per_second"]
    return {variant: {n: sum(rates[n][variant]) / sum(rates[n]["stock"]) for n in rates} for variant in VARIANTS}


def throughput(result: Result) -> Table:
    rates = result["calls_per_second"]
    stock = ["stock, calls a second", *(f"{median(by_variant['stock']):.0f}" for by_variant in rates.values())]
    ratios = [[NAMES[v], *(f"{ratio:.3f}" for ratio in row.values())] for v, row in throughput_ratios(result).items()]
    return Table(
        "P4 Warm calls of N threads together: throughput over stock's",
        ["", *(f"N = {count}" for count in rates)],
        [stock, *ratios[1:]],
    )


def load(result: Result) -> Table:
    rows = [
        [
            NAMES[variant],
            *(f"{one[name] * 1e3:.1f} ms" for name in ("median", "p99", "longest", "longest_compiled")),
            f"{one['compiles']}",
            f"{one['shapes_compiled']}",
            f"{one['errors']}",
        ]
        for variant, one in result.items()
    ]
    return Table(
        "P5 Requests with a new shape now and then: time from when one is due to its answer",
        ["", "median", "99 %", "longest", "longest call of a compiled shape", "compiles", "shapes compiled", "errors"],
        rows,
    )


def extra_import(result: Result) -> float:
    return median(run["safecompile"]["safecompile"] for run in result["runs"])


def imports(result: Result) -> Table:
    runs = result["runs"]
    ratio = median(run["safecompile"]["total"] / run["torch"]["total"] for run in runs)
    torch = median(run["torch"]["total"] for run in runs)
    return Table(
        "P6 Imports",
        ["", "`import torch`", "`import safecompile` after it", "both over torch alone"],
        [["", f"{torch:.2f} s", f"{extra_import(result) * 1e3:.1f} ms", f"{ratio:.3f}"]],
    )


def memory(result: Result) -> Table:
    ways = {"traced": "Python", "resident": "resident"}
    kinds = {"made": "callable made", "compiled": "callable compiled", "thread": "thread"}
    return Table(
        "P7 Memory: what Python allocates (tracemalloc), and what the resident set grows by",
        ["", *(f"{kind}, {way}" for kind in kinds.values() for way in ways.values())],
        [
            [NAMES[v], *(f"{result[way][v][kind] / 1024:.1f} KiB" for kind in kinds for way in ways)]
            for v in result["traced"]
        ],
    )


def checkpoint(result: Result) -> Table:
    rows = []
    for p, measured in result["time"].items():
        average, margin = _mean_ratio(measured["safecompile"], measured["stock"])
        stock, ours = (result["memory"][p][variant]["bytes"] for variant in ("stock", "safecompile"))
        rows.append([f"one thread, dropout {p}: time", f"{average:.3f}", f"at most {average + margin:.3f}"])
        rows.append([f"one thread, dropout {p}: memory", f"{ours / stock:.3f}", f"of {stock / 2**20:.0f} MiB"])
    average, margin = _mean_ratio(result["threads"]["stock"], result["threads"]["safecompile"])
    rows.append(["four threads, no random numbers: throughput", f"{average:.3f}", f"at least {average - margin:.3f}"])
    return Table("A stack of checkpointed blocks", ["", "over torch's", "limit of a 95 % interval"], rows)


def _mean_ratio(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float]:
    ratios = [one / other for one, other in zip(ours, theirs, strict=True)]
    return mean(ratios), 1.96 * stdev(ratios) / len(ratios) ** 0.5


TABLES: dict[str, Callable[[Result], Table]] = {
    "herd": herd,
    "warm": warm,
    "beside": beside,
    "throughput": throughput,
    "load": load,
    "imports": imports,
    "memory": memory,
    "checkpoint": checkpoint,
}


def table(run: Result, piece: str) -> Table:
    return TABLES[piece](run["results"][piece])


@dataclass(frozen=True)
class Target:
    what: str
    asked: str
    measured: str
    met: bool


def _targets(results: Result) -> Iterable[Target]:
    ratio, compiles, _ = herd_ratios(results["herd"])["safecompile"]["8"]
    what = "8 threads make the first call of one function: "
    yield Target(what + "graphs compiled", "1", f"{compiles}", compiles == 1)
    yield Target(what + "wall time over one thread's", "≤ 1.3", f"{ratio:.2f}", ratio <= 1.3)
    for name in ("function", "method"):
        ratio, more = over_stock(results["warm"]["seconds_per_call"][name], "safecompile")
        what = f"a warm call of the smallest compiled {name}: "
        yield Target(what + "over stock's", "≤ 1.05", f"{ratio:.3f}", ratio <= 1.05)
        yield Target(what + "more than stock's", "≤ 2 µs", f"{more * 1e6:.2f} µs", more <= 2e-6)
    longest = max(wait for _, variant, wait, *_ in beside_waits(results["beside"]) if variant == "safecompile")
    what = "the longest warm call while another thread compiles"
    yield Target(what, "< 100 ms", f"{longest * 1e3:.1f} ms", longest < 0.1)
    by_threads = throughput_ratios(results["throughput"])["safecompile"]
    least = min(by_threads.values())
    what = f"warm calls of {', '.join(by_threads)} threads: the lowest throughput over stock's"
    yield Target(what, "≥ 0.97", f"{least:.3f}", least >= 0.97)
    extra = extra_import(results["imports"])
    yield Target("`import safecompile` after `import torch`", "≤ 50 ms", f"{extra * 1e3:.0f} ms", extra <= 0.05)


def targets(run: Result) -> Table:
    """Return what was to be reached, and what was."""
    rows = [[one.what, one.asked, one.measured + ("" if one.met else " (missed)")] for one in _targets(run["results"])]
    return Table("What the library is to keep to", ["", "target", "measured"], rows)


def machine(run: Result) -> str:
    one = run["machine"]
    return (
        f"{one['cores']} cores of {one['cpu']}, {one['system'].partition('-')[0]}, Python {one['python']}, "
        f"torch {one['torch']}, safecompile {one['safecompile']}, backend {one['backend']}, {one['date'][:10]}"
    )
