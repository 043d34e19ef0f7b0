"""How files are changed: one function for each kind of file, from its bytes and a random generator to a mutant.

Here are files of tensors and of text; `archives` has those that hold other files.

In half of the cases a structured mutation is resealed: digests and checksums are computed again, so that what stands
behind the seal is reached. A mutant may also be something else in the file's place: a FIFO, a folder, a loop of links,
an endless device, nothing.
"""

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from adversary import forging
from adversary.values import RAW, TEXTS, dumped, twisted


class Mutant(NamedTuple):
    """What stands in the place of a file."""

    content: bytes
    about: str  # what was done, in words
    resealed: bool = False
    instead: str = ""  # something that is no regular file


def placed(mutant: Mutant, path: Path) -> None:
    """Put a mutant into a path where nothing is."""
    if mutant.instead == "a FIFO":
        os.mkfifo(path)
    elif mutant.instead == "a folder":
        path.mkdir()
    elif mutant.instead == "a loop of links":
        path.symlink_to(path.name)
    elif mutant.instead == "a link to nothing":
        path.symlink_to("nowhere")
    elif mutant.instead == "an endless device":
        path.symlink_to("/dev/zero")
    elif mutant.instead == "a file without read permission":
        path.write_bytes(mutant.content)
        path.chmod(0)
    elif mutant.instead != "nothing":
        path.write_bytes(mutant.content)


INSTEAD = ["a FIFO", "a folder", "a loop of links", "a link to nothing", "an endless device", "nothing"]
Structured = Callable[[bytes, random.Random], Mutant]


def mutated(raw: bytes, structured: Structured, draw: random.Random) -> Mutant:
    """A mutant of a file: mostly by what its kind allows, else by its bytes or its place."""
    way = draw.random()
    if way < 0.05:
        return Mutant(raw, "", instead=(name := draw.choice(INSTEAD)))._replace(about=f"it is {name}")
    if way < 0.35:
        return damaged(raw, draw)
    return structured(raw, draw)


# ---------------------------------------------------------------------------------------------- bytes


def damaged(raw: bytes, draw: random.Random) -> Mutant:
    """Changed without regard to what it means."""
    way = draw.choice(["bits", "bits", "bits", "cut", "longer", "block", "empty", "doubled", "moved"])
    new = bytearray(raw)
    if way == "bits":
        for _ in range(draw.choice([1, 1, 1, 2, 8])):
            place = draw.randrange(len(new) * 8) if draw.random() < 0.5 else draw.randrange(min(len(new), 600) * 8)
            new[place // 8] ^= 1 << place % 8
        return Mutant(bytes(new), "bits are flipped")
    if way == "cut":
        return Mutant(raw[: draw.randrange(len(raw))], "it is cut short")
    if way == "longer":
        return Mutant(raw + draw.choice([b"\0", b"\0" * 4096, draw.randbytes(64), raw]), "it is longer")
    if way == "block":
        start = draw.randrange(len(new))
        filled = draw.choice([b"\0", b"\xff", b"\x80", b"9", b"["]) * draw.choice([1, 8, 64])
        new[start : start + len(filled)] = filled
        return Mutant(bytes(new), f"{len(filled)} bytes are overwritten")
    if way == "empty":
        return Mutant(b"", "it is empty")
    a, b = sorted(draw.randrange(len(raw) + 1) for _ in range(2))
    if way == "doubled":
        return Mutant(raw[:b] + raw[a:], "a part is there twice")
    return Mutant(raw[a:b] + raw[:a] + raw[b:], "a part is moved")


# ---------------------------------------------------------------------------------------------- safetensors


def safetensors(raw: bytes, draw: random.Random) -> Mutant:
    """Metadata, values, types, shapes and places, each of which may lie."""
    file = forging.read(raw)
    ways = (
        [_metadata, _metadata, _metadata, _values, _values, _values, _header] if file.metadata else [_values, _header]
    )
    about = draw.choice(ways)(file, draw)
    seal = draw.random() < 0.5 and any(name in file.metadata for name in ("digest", "seal"))
    try:
        return Mutant(forging.written(forging.resealed(file) if seal else file), about, seal)
    except (TypeError, ValueError):  # what can't be sealed is given without a seal
        return Mutant(forging.written(file), about)


def _metadata(file: forging.Forgery, draw: random.Random) -> str:
    field = draw.choice([name for name in file.metadata if name not in ("digest", "seal")])
    way = draw.random()
    if way < 0.1:
        del file.metadata[field]
        return f"{field} is deleted"
    if way < 0.2:
        file.metadata[extreme_name(draw)] = file.metadata[field]
        return "there is a field more"
    if way < 0.3:
        file.metadata[field] = draw.choice([*TEXTS, *RAW.values(), "{", "null", "[]"])
        return f"{field} is {file.metadata[field]!r:.40}"
    try:
        value, about = twisted(json.loads(file.metadata[field]), draw)
        file.metadata[field] = dumped(value)
    except ValueError:  # a plain text
        file.metadata[field], about = file.metadata[field][::-1], "turned round"
    return f"{field}: {about}"


def extreme_name(draw: random.Random) -> str:
    return draw.choice(["privacy", "nonce", "site", "\x1b[31m", "x" * 5000, "digest ", "signature", "é", ""])


def _values(file: forging.Forgery, draw: random.Random) -> str:
    name = draw.choice(list(file.tensors))
    tensor = file.tensors[name]
    if draw.random() < 0.15 and len(file.tensors) > 1:
        other = draw.choice([key for key in file.tensors if key != name])
        file.tensors[name], file.tensors[other] = file.tensors[other], tensor
        return f"{name} and {other} are swapped"
    values = tensor.array().copy()
    if not values.size:
        return "nothing is changed"
    flat = values.reshape(-1)
    place = draw.randrange(flat.size)
    number = draw.choice([0, -1, 0.5, np.nan, np.inf, -np.inf, 1e300, 1e99, 1e30, 1e9, -1e9, 1e6, 1e-300, 2**53, 2**62])
    with np.errstate(all="ignore"):
        way = draw.choice(["one", "one", "all", "scaled", "shifted", "negated", "rolled", "turned", "row"])
        if way == "one":
            flat[place] = np.array(number).astype(values.dtype)
        elif way == "all":
            flat[:] = np.array(number).astype(values.dtype)
        elif way == "scaled":
            flat[:] = (flat.astype(float) * draw.choice([0, 1.01, 2, 255, 1e4, 1e8, 1e13, 1e40])).astype(values.dtype)
        elif way == "shifted":
            flat[:] = (flat.astype(float) + draw.choice([1, -1, 7, 1e3, 1e6])).astype(values.dtype)
        elif way == "negated":
            flat[:] = (-flat.astype(float)).astype(values.dtype)
        elif way == "rolled":
            flat[:] = np.roll(flat, draw.randrange(1, 1 + flat.size))
        elif way == "turned":
            flat[:] = flat[::-1].copy()
        elif values.ndim:
            values[draw.randrange(len(values))] = values[draw.randrange(len(values))]
    file.tensors[name] = tensor.holding(values)
    return f"values of {name}: {way}"


def _header(file: forging.Forgery, draw: random.Random) -> str:
    name = draw.choice(list(file.tensors))
    tensor = file.tensors[name]
    way = draw.choice(["shape", "dtype", "offsets", "empty", "delete", "double", "rename", "extreme", "many"])
    if way == "shape":
        shape = draw.choice([tensor.shape[::-1], [1, *tensor.shape], [-1, -1], [2**62, 4], [0], [2**31] * 3, "x", None])
        file.lies[name] = {"shape": shape}
    elif way == "dtype":
        file.lies[name] = {"dtype": draw.choice([*forging.TORCH, "F8_E4M3", "C64", "F128", "", None, 7])}
    elif way == "offsets":
        size = len(tensor.data)
        file.lies[name] = {"data_offsets": draw.choice([
            [0, size], [size, 0], [-8, size - 8], [0, 2**62], [0.0, size], [0], [None, 1], "ab", [1, size + 1],
            [0, 0, 0], [10**30, 10**30 + size]])}  # fmt: skip
    elif way == "empty":
        shape = draw.choice([[50_000_000, 0], [2**40, 0], [0, 2**62], [1] * 70, [10**7, 0, 10**7]])
        file.tensors[draw.choice([name, "more"])] = forging.Tensor(tensor.dtype, shape, b"")
        return f"a tensor of shape {shape!s:.30}"
    elif way == "delete":
        del file.tensors[name]
    elif way == "double":
        file.tensors[name + " "] = tensor
    elif way == "rename":
        file.tensors[extreme_name(draw)] = file.tensors.pop(name)
    elif way == "extreme":
        file.lies[draw.choice([name, "__metadata__"])] = draw.choice([None, [], 7, "x", {"a": [[]]}])
    else:
        file.tensors |= {f"more {number}": forging.Tensor("U8", [0], b"") for number in range(20_000)}
    return f"{name}: {way} {file.lies.get(name, '')!s:.60}"


# ---------------------------------------------------------------------------------------------- texts


def json_text(raw: bytes, draw: random.Random) -> Mutant:
    """A file of JSON."""
    value, about = twisted(json.loads(raw), draw)
    return Mutant(dumped(value).encode(errors="surrogatepass") + b"\n", about)


def answer(raw: bytes, draw: random.Random) -> Mutant:
    """A site's answer, resealed in half of the cases."""
    value, about = twisted(json.loads(raw), draw)
    if draw.random() < 0.5 and isinstance(value, dict):
        return Mutant(forging.answer(value), about, resealed=True)
    return Mutant(dumped(value).encode(errors="surrogatepass") + b"\n", about)


def json_lines(raw: bytes, draw: random.Random) -> Mutant:
    """A history, one of whose lines is another one."""
    lines = raw.splitlines()
    number = draw.randrange(len(lines))
    way = draw.random()
    if way < 0.1:
        del lines[number]
        return Mutant(b"\n".join([*lines, b""]), f"line {number} is deleted")
    if way < 0.2:
        lines.insert(number, lines[number])
        return Mutant(b"\n".join([*lines, b""]), f"line {number} is there twice")
    lines[number] = json_text(lines[number], draw).content.strip()
    return Mutant(b"\n".join([*lines, b""]), f"line {number} is changed")


TOML = [
    "nan", "inf", "-1", "1e999", "9" * 5000, '""', "[]", "{}", "true", "1979-05-27", "[" * 20_000 + "]" * 20_000,
    '"' + "x" * 70_000 + '"', '"\\u001b[2J"', '"\\u202e"', "{a=" * 20_000 + "1" + "}" * 20_000, "0x" + "f" * 20_000,
    '"../../etc/passwd"', '"canary.py:build"', '"/dev/zero"', '"squares+squares+squares"', '["a"]', "[[1]]",
]  # fmt: skip


def toml(raw: bytes, draw: random.Random) -> Mutant:
    """A line of TOML deleted, doubled, or with another value."""
    lines = raw.decode().splitlines()
    number = draw.choice([number for number, line in enumerate(lines) if line.strip() and line[0] != "#"])
    way = draw.random()
    if way < 0.15:
        about = f"deleted: {lines.pop(number):.40}"
    elif way < 0.25:
        lines.insert(number, lines[number])
        about = f"twice: {lines[number]:.40}"
    elif way < 0.4:
        name = draw.choice(["more", '"\\u001b[31m"', "a" + ".a" * 20_000, "[" * 50 + "x" + "]" * 50, "'x'.y"])
        lines.insert(number, f"{name} = {draw.choice(TOML)}")
        about = f"an entry more, {name:.40}"
    else:
        key, equals, _ = lines[number].partition("=")
        lines[number] = f"{key}= {draw.choice(TOML)}" if equals else draw.choice(["[x]", "[[model]]", "[model.model]"])
        about = f"changed: {lines[number]:.60}"
    return Mutant("\n".join([*lines, ""]).encode(), about)


def lines(raw: bytes, draw: random.Random) -> Mutant:
    """A table or a list of names, one of whose cells is another one."""
    rows = [row.split(b",") for row in raw.split(b"\n")]
    row = draw.choice(rows)
    cell = draw.randrange(len(row))
    new = draw.choice([*TEXTS, "nan", "inf", "-1", "1e999", "9" * 5000, '"', '"a', "'", ";", "\ufeff", "1_000"])
    way = draw.choice(["cell", "cell", "cell", "delete", "more", "rows", "bytes"])
    if way == "cell":
        row[cell] = new.encode()
    elif way == "delete":
        del row[cell]
    elif way == "more":
        row.insert(cell, new.encode())
    elif way == "rows":
        rows += [row] * draw.choice([1, 1000])
    else:
        row[cell] = draw.choice([b"\xff\xfe", b"\xc3", b"\x00", draw.randbytes(20)])
    return Mutant(b"\n".join(b",".join(row) for row in rows), f"{way} {new!r:.40}")
