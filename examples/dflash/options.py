"""Options from three places, the later winning: the defaults of `Config`, a configuration file, the command line.

A file is TOML with the options' names as keys, underscores and all, and the same meaning as on the command line: paths are
relative to the folder the program is started in. What a file leaves out is the demo's.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from config import TYPES, Config, ConfigError, choices_of

FOLDER = Path(__file__).parent / "configs"
"""Where the bundled files are."""


def bundled() -> list[str]:
    """Return the names of the bundled files."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def find(name: str) -> Path:
    """Return the file that ``--config`` names: a bundled one by its name, or any by its path.

    Raises:
        ConfigError: if there is no such file.
    """
    path = FOLDER / f"{name}.toml" if name in bundled() else Path(name)
    if not path.is_file():
        raise ConfigError(f"--config is {name}: no such file, and none of the bundled ones ({', '.join(bundled())})")
    return path


def read(path: Path) -> dict[str, Any]:
    """Return the options that a file gives, as values of `Config`'s fields, each of the right type and in its range.

    Raises:
        ConfigError: in one sentence that names the file and the key.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as TOML: {error}") from error
    given: dict[str, Any] = {}
    for key, value in content.items():
        if key not in TYPES:
            near = difflib.get_close_matches(key, TYPES, n=1)
            raise ConfigError(f"{path}: there is no option {key!r}" + (f", did you mean {near[0]!r}?" if near else ""))
        try:
            given[key] = _from_toml(key, value)
        except ValueError as error:
            raise ConfigError(f"{path}: {key} is {value!r}, it must be {error}") from None
    try:
        Config(**given).check_ranges()
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    return given


def add_to(parser: argparse.ArgumentParser) -> None:
    """Give the parser an option for each field of `Config`; what the command line leaves out is not in the result."""
    for option in fields(Config):
        flag = f"--{option.name.replace('_', '-')}"
        meaning = option.metadata["help"].replace("%", "%%")
        if TYPES[option.name] is bool:
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=meaning)
        else:
            parser.add_argument(
                flag,
                type=_from_command_line(option.name),
                default=argparse.SUPPRESS,
                metavar=_metavar(option.name),
                help=meaning,
            )


def combine(path: Path, given: dict[str, Any]) -> Config:
    """Return the options of the file with those of the command line, ``given``, over them.

    The demo's taps are for the bundled target. Another target without taps of its own gets the paper's.

    Raises:
        ConfigError: in one sentence that says what to change.
    """
    from_file = read(path)
    combined = from_file | given
    if "target" in combined and "taps" not in combined:
        combined["taps"] = None
    config = Config(**combined)
    config.check_ranges()
    try:
        config.check_combinations()
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}" if from_file and not given else str(error)) from None
    return config


def _parts(name: str) -> tuple[Any, bool, bool]:
    """Return an option's type without None and without tuple, whether it is a tuple, and whether it may be None."""
    kind, optional = TYPES[name], False
    if get_origin(kind) in (Union, UnionType):
        kind = next(argument for argument in get_args(kind) if argument is not type(None))
        optional = True
    if get_origin(kind) is tuple:
        return _plain(get_args(kind)[0]), True, optional
    return _plain(kind), False, optional


def _plain(kind: Any) -> Any:
    return str if get_origin(kind) is Literal else kind


_NOUNS = {int: "a whole number", float: "a number", bool: "true or false", str: "a string", Path: "a path, as a string"}
_NOTHING = {"taps": "paper"}
"""The word for None on the command line; it is 'none' for the others. TOML has no null, so files know it, too."""


def _word(name: str) -> str:
    return _NOTHING.get(name, "none")


def _expected(name: str) -> str:
    kind, several, optional = _parts(name)
    noun = f"a list, each element {_NOUNS[kind]}" if several else _NOUNS[kind]
    return noun + (f", or {_word(name)!r}" if optional else "")


def _from_toml(name: str, value: Any) -> Any:
    kind, several, optional = _parts(name)
    if optional and value == _word(name):
        return None
    if several:
        if not isinstance(value, list):
            raise ValueError(_expected(name))
        return tuple(_single(name, kind, element) for element in value)
    return _single(name, kind, value)


def _single(name: str, kind: Any, value: Any) -> Any:
    taken = {float: (int, float), Path: (str,)}.get(kind, (kind,))
    # A bool is an int to Python, and not to TOML.
    if not isinstance(value, taken) or (isinstance(value, bool) and kind is not bool):
        raise ValueError(_expected(name))
    return kind(value)


def _from_command_line(name: str) -> Callable[[str], Any]:
    kind, several, optional = _parts(name)

    def convert(text: str) -> Any:
        if optional and text == _word(name):
            return None
        try:
            return tuple(kind(part) for part in text.split(",")) if several else kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not {_expected(name)}") from None

    return convert


def _metavar(name: str) -> str:
    kind, several, _ = _parts(name)
    if choices := choices_of(name):
        return "|".join(choices)
    noun = {int: "N", float: "X", Path: "PATH"}.get(kind, name.upper())
    return f"{noun},..." if several else noun
