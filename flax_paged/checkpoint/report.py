"""Readable lists of tensor names: one line for the same parameter of many layers, and the nearest name for a typo."""

import difflib
import re
from collections.abc import Iterable, Sequence

_MAX_SPELLED_OUT = 3  # up to this many names of one pattern are listed one by one


def _ranges(numbers: Sequence[int]) -> str:
    """Write sorted integers as ranges: 0, 1, 2, 5 becomes `0-2,5`."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in spans)


def collapse_names(names: Iterable[str]) -> list[str]:
    """Write names that differ only in their first number as one: `layers.[12-15].mlp.up_proj.weight`.

    Args:
        names: Tensor names; the order of first appearance is kept.

    Returns:
        One string a pattern; patterns with few names are spelled out.
    """
    groups: dict[tuple[str, str], list[str]] = {}
    for name in dict.fromkeys(names):
        prefix, number, suffix = re.fullmatch(r"(.*?(?:^|\.))(\d+)(\..*|$)|.*", name).groups()
        key = (name, "") if number is None else (prefix, suffix)
        groups.setdefault(key, []).append(name)
    lines = []
    for (prefix, suffix), members in groups.items():
        if len(members) <= _MAX_SPELLED_OUT:
            lines += members
        else:
            numbers = sorted(int(name[len(prefix) : len(name) - len(suffix)]) for name in members)
            lines.append(f"{prefix}[{_ranges(numbers)}]{suffix}")
    return lines


def nearest_name(name: str, candidates: Sequence[str]) -> str | None:
    """Return the candidate most like `name`, or None where none is close."""
    matches = difflib.get_close_matches(name, candidates, n=1, cutoff=0.75)
    return matches[0] if matches else None


def shape_lines(shapes: Iterable[tuple[str, tuple[int, ...], tuple[int, ...]]]) -> list[str]:
    """Write (name, shape in the checkpoint, shape expected) as lines, one for the same mismatch of many layers."""
    groups: dict[tuple, list[str]] = {}
    for name, got, expected in shapes:
        groups.setdefault((tuple(got), tuple(expected)), []).append(name)
    return [
        f"{line}: {got} in the checkpoint, {expected} expected"
        for (got, expected), names in groups.items()
        for line in collapse_names(names)
    ]


def section(title: str, lines: Sequence[str]) -> str:
    """Return a titled list for an error message, or an empty string where there is nothing to say."""
    return "".join([f"\n{title}", *(f"\n  {line}" for line in lines)]) if lines else ""
