"""Values that nobody expects, and trees of plain values with one of them in a random place."""

import json
import random
from typing import Any

DEEP = 60_000  # brackets: more than any parser that calls itself can take
RAW = {  # JSON that `json.dumps` would not write
    "«huge integer»": "9" * 5000,
    "«1e999»": "1e999",
    "«-1e999»": "-1e999",
    "«NaN»": "NaN",
    "«Infinity»": "Infinity",
    "«deep list»": "[" * DEEP + "]" * DEEP,
    "«deep object»": '{"a":' * DEEP + "1" + "}" * DEEP,
    "«half a surrogate»": '"\\ud800"',
}
NUMBERS = [0, 1, -1, 2, 2**31, 2**53, 2**53 + 1, 2**63, -(2**63), 10**18, 10**30, 0.5, -0.0, 1e-300, 1e308, 3.0]
TEXTS = [
    "", " ", "x", "x" * 70_000, "\x00", "\x1b]0;owned\x07\x1b[2J", "\u202egnp.exe", "a\nb\r\nc", "../../etc/passwd",
    "/dev/zero", "canary.py:build", "identity+" * 3000 + "identity", "squares+squares+squares+squares", "fourier:3:1",
    "fourier:90000000:1+fourier:90000000:2", "float32[3,6000,6000]", "float32[1,8,8]", "float64[" + "9," * 400 + "9]",
    "unit", "relu", "class", "none", "diagonal", "int16", "float32", "%s%n{0}", "=1+1", "é" * 300, "[bold]rich[/bold]",
]  # fmt: skip
OTHERS = [None, True, False, [], {}, [[]], [None], {"": None}, [1, 2, 3], ["a"] * 50_000]


def extreme(draw: random.Random) -> Any:
    """A value that nobody expects."""
    return draw.choice(draw.choice([NUMBERS, TEXTS, OTHERS, list(RAW)]))


def dumped(value: Any) -> str:
    """The JSON of a tree, some of whose values stand for what JSON's writers would not write."""
    text = json.dumps(value, ensure_ascii=False)
    for name, raw in RAW.items():
        text = text.replace(json.dumps(name, ensure_ascii=False), raw)
    return text


def twisted(value: Any, draw: random.Random) -> tuple[Any, str]:
    """A tree with one value deleted, doubled, changed or of another type; and what was done."""
    places = list(_places(value))
    path = draw.choice(places)
    if not path:
        new = extreme(draw)
        return new, f"all of it is {new!r:.40}"
    holder = copied = json.loads(json.dumps(value))
    for step in path[:-1]:
        holder = holder[step]
    last, name = path[-1], "/".join(map(str, path))
    old = holder[last]
    way = draw.choice(["delete", "double", "extreme", "extreme", "extreme", "near", "near"])
    if way == "delete":
        del holder[last]
        return copied, f"{name} is deleted"
    if way == "double":
        if isinstance(holder, list):
            holder.insert(last, old)
        else:
            holder[f"{last} "] = old
        return copied, f"{name} is there twice"
    holder[last] = _near(old, draw) if way == "near" else extreme(draw)
    return copied, f"{name} is {holder[last]!r:.40} instead of {old!r:.40}"


def _near(old: Any, draw: random.Random) -> Any:
    """A value of the same type that is not far: what a liar would write."""
    if isinstance(old, bool):
        return not old
    if isinstance(old, int):
        return draw.choice([old + 1, old - 1, -old, 2 * old + 1, old * 1000 + 1])
    if isinstance(old, float):
        return draw.choice([old * 1.01, -old, old + 1, old * 1e6])
    if isinstance(old, str):
        at = draw.randrange(len(old) + 1)
        return draw.choice([old[:at] + "x" + old[at + 1 :], old.upper(), old[::-1], old + " ", old[:at]])
    if isinstance(old, list):
        return draw.choice([old[::-1], old[1:], old + old, sorted(old, key=str), old[:1] * len(old)])
    if isinstance(old, dict):
        return dict(list(old.items())[1:])
    return 0


def _places(value: Any, at: tuple[Any, ...] = ()) -> Any:
    yield at
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, entry in list(entries)[:30]:
        yield from _places(entry, (*at, key))
