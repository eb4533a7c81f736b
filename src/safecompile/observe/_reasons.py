"""Why Dynamo compiles: what its guards say of the entries that it has, in words."""

from __future__ import annotations

import ast
import re
import reprlib
from contextlib import suppress
from types import CodeType
from typing import Any

from safecompile._core.events import RESUME

__all__ = ["reasons"]

# The order in which a tensor is compared: who fails at a later one is nearer.
_TENSOR_CHECKS = ("dispatch key", "dtype", "device", "requires_grad", "rank", "size", "stride")

_ATTRIBUTE = r"(?:\.\w+(?!\w*\()|\[(?:'[^']*'|\d+)\])"
_SOURCE = re.compile(rf"\b([LG])\['(\w+)'\]({_ATTRIBUTE}*)")
_OWN_TABLE = re.compile(r"\._(?:modules|parameters|buffers)\['(\w+)'\]")
_PLAIN = (int, float, complex, str, bytes, type(None))


def reasons(entries: list[Any], frame: Any) -> tuple[str, ...]:
    """Return why none of the entries fits the frame, that of the nearest first."""
    found = []
    for entry in entries:
        with suppress(Exception):  # a guard calls what belongs to the user
            if differences := _differences(entry.guard_manager, frame):
                found.append(differences)
    found.sort(key=lambda one: one[0])
    texts = tuple(dict.fromkeys(text for _, text in found))
    return texts or (("another graph is needed",) if entries else ("first call",))


def _differences(guard_manager: Any, frame: Any) -> tuple[tuple[int, ...], str] | None:
    """Return how far an entry is from the frame, and in what it differs.

    A check stops at the first guard that fails. If that is one for a plain value of an argument, look on with the value
    that the entry wants: an entry that then fits is nearer than one of which only the first difference is known.
    """
    values, texts, tried = dict(frame.f_locals), list[str](), set[str]()
    while True:
        info = guard_manager.check_verbose(values)
        if info.result:
            return ((len(texts), 0), "; ".join(texts)) if texts else None
        part = _failing(info.verbose_code_parts, guard_manager, frame)
        texts.append(_in_words(part, frame))
        wanted = re.match(r"L\['(\w+)'\] == (.*)", _code(part))
        try:
            name, value = wanted[1], ast.literal_eval(wanted[2])  # type: ignore[index]
        except (TypeError, ValueError, SyntaxError):
            name, value = "", None
        if name not in values or name in tried:
            check = next((i for i, name in enumerate(_TENSOR_CHECKS) if f"' {name} mismatch" in part), 0)
            return (len(texts), 1, -info.num_guards_executed, -check), "; ".join(texts)
        values[name] = value
        tried.add(name)


def _code(part: str) -> str:
    """Return a guard without the remark that follows its code."""
    return re.split(r"\s+# ", part)[0].strip()


def _failing(parts: list[str], guard_manager: Any, frame: Any) -> str:
    """Return the part that fails, of those that one guard stands for."""
    for part in parts if len(parts) > 1 else ():
        with suppress(Exception):
            if not _value(part, frame, guard_manager):
                return part
    return parts[0]


def _value(code: str, frame: Any, guard_manager: Any = None) -> Any:
    """Evaluate code of a guard, as torch does for its own log."""
    scope = {**(getattr(guard_manager, "closure_vars", None) or {}), "L": frame.f_locals, "G": frame.f_globals}
    return eval(code, scope)  # noqa: S307


def _in_words(part: str, frame: Any) -> str:
    code = _code(part)
    if code.startswith("GLOBAL_STATE changed:"):
        return f"{code.partition(':')[2].strip().replace('_', ' ')} changed"
    if code.startswith("___check_torch_function_mode_stack"):
        return "torch function modes changed (a default device is one)"
    if code.startswith("Duplicate tensor found"):
        return "two arguments are the same tensor"
    source = _SOURCE.search(code)
    if source is None:
        return code
    subject = _subject(source, frame.f_code)
    if mismatch := re.match(r".*' (.* mismatch.*)", code):
        return f"{subject}: {re.sub(r'[.] expected', ': expected', mismatch[1]).split('. Guard failed')[0].strip()}"
    if found := re.search(r"but found <class '(.*)'>", code):
        return f"{subject}: expected a tensor, actual {found[1]}"
    if code.startswith("___check_type_id"):
        wanted = re.search(r"type=<class '(.*)'>", code)
        return f"{subject}: expected {wanted[1] if wanted else 'another type'}, actual {_type(source[0], frame)}"
    if code.startswith("___check_obj_id"):
        return f"{subject}: another object"
    asked, equal, wanted_value = code.partition(" == ")
    if equal and not _SOURCE.search(wanted_value):
        of = "" if asked == source[0] else f"{_SOURCE.sub(_name, asked)}: "
        with suppress(Exception):
            return f"{subject}: {of}expected {wanted_value}, actual {_shown(_value(asked, frame))}"
    return f"{subject}: {_SOURCE.sub(_name, code)} does not hold"


def _name(source: re.Match[str]) -> str:
    return source[2] + _OWN_TABLE.sub(r".\1", source[3])


def _subject(source: re.Match[str], code: CodeType) -> str:
    if source[1] == "G":
        return f"global {_name(source)}"
    if source[2] in code.co_freevars:
        return f"closure variable {_name(source)}"
    return f"{'variable' if code.co_name.startswith(RESUME) else 'argument'} {_name(source)}"


def _type(source: str, frame: Any) -> str:
    with suppress(Exception):
        return type(_value(source, frame)).__qualname__
    return "another"


def _shown(value: Any) -> str:
    return reprlib.repr(value) if isinstance(value, _PLAIN) else type(value).__qualname__
