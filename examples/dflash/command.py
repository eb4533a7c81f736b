"""The command line of the demo."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import NamedTuple, NoReturn

import options
from config import Config, ConfigError
from run_folder import Start


class Command(NamedTuple):
    """What the command line asks for.

    Attributes:
        config: options.
        run: the run folder.
        start: how to begin in it.
        estimate_for: no run is wanted, but an estimate of it, at this many tokens a second of each drafter.
        make_cache: no run is wanted, but the features for it in this folder.
    """

    config: Config
    run: Path
    start: Start
    estimate_for: float | None
    make_cache: Path | None


def command_line(arguments: list[str]) -> Command:
    """Read the command line and the configuration file that it names.

    Raises:
        ConfigError: if the options cannot work.
    """
    parser = Parser(description="Train a DFlash drafter in several threads and measure it.", allow_abbrev=False)
    parser.add_argument(
        "--config",
        default="demo",
        metavar="NAME|FILE",
        help=f"TOML file that the other options change: a path, or one of {', '.join(options.bundled())} (%(default)s)",
    )
    parser.add_argument(
        "--run", type=Path, metavar="PATH", help="run folder, for all that is written (runs/dflash-NAME)"
    )
    begin = parser.add_mutually_exclusive_group()
    begin.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in the run folder")
    begin.add_argument("--restart", action="store_true", help="begin again, and delete the run folder's checkpoints")
    parser.add_argument(
        "--dry-run",
        nargs="?",
        type=_rate,
        const=2800.0,
        metavar="TOK/S",
        help="show shapes, parameters, memory and, for this many context tokens a second of each drafter (%(const)s), "
        "traffic, from the target's config.json alone; named devices need not exist",
    )
    parser.add_argument(
        "--make-cache",
        type=Path,
        metavar="PATH",
        help="make the features for all steps, for any number of runs with --cache, and end; goes on with a folder begun before",
    )
    options.add_to(parser)
    given = vars(parser.parse_args(arguments))
    file, run, dry_run = options.find(given.pop("config")), given.pop("run"), given.pop("dry_run")
    resume, restart, given_cache = given.pop("resume"), given.pop("restart"), given.pop("make_cache")
    return Command(
        options.combine(file, given),
        run or Path("runs") / f"dflash-{file.stem}",
        "resume" if resume else "restart" if restart else "fresh",
        dry_run,
        given_cache,
    )


def _rate(text: str) -> float:
    rate = float(text)
    if not (rate > 0 and math.isfinite(rate)):
        raise argparse.ArgumentTypeError(f"{text} tokens a second is no rate")
    return rate


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Report like everything else that is wrong with the options."""
        raise ConfigError(message)
