"""How files are changed that hold other files: arrays, archives, pickles, images; with checksums that fit."""

import gzip
import io
import os
import pickle
import random
import struct
import tarfile
import warnings
import zipfile
import zlib
from collections.abc import Callable

from adversary.mutations import Mutant, Structured, damaged
from adversary.values import extreme

SHAPES = [
    "(10**12,)", "(1000000000000,)", "(50000000, 0)", "(-1,)", "()", "(2, 3)", "(1.5,)", "None", "(" + "1," * 60 + ")",
    "(" * 500 + ")" * 500, "(99999999999999999999999,)",
]  # fmt: skip
TYPES = [
    "'|O'", "'<f8'", "'<c16'", "'<U9999999'", "'|V1000000000'", "[('a','<i4')]", "'<M8[ns]'", "'|S0'", "'x'", "None",
    "'>i2'", "'<f2'", "'|b1'",
]  # fmt: skip
FORMATS = [  # what may stand in the place of an image
    b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(canary) (w) file closefile\nshowpage\n%%EOF\n",
    b"P6\n100000 100000\n255\n",
    b"GIF89a\xff\xff\xff\xff\x00\x00\x00;",
    b"BM" + b"\xff" * 60,
    b"II*\0\x08\0\0\0" + b"\xff" * 90,
    b"\x89HDF\r\n\x1a\n" + b"\0" * 90,
    b"<svg xmlns='http://www.w3.org/2000/svg'/>",
    b"RIFF\xff\xff\xff\xffWEBPVP8 " + b"\xff" * 90,
]


class Canary:
    """A pickle of this runs code: it leaves a file behind."""

    def __reduce__(self) -> object:
        return os.system, ("touch canary",)


def _npy(raw: bytes, draw: random.Random) -> tuple[bytes, str]:
    """An array with another header."""
    start = 10 + int.from_bytes(raw[8:10], "little")
    header, body = raw[10:start].decode("latin1"), raw[start:]
    ways = ["shape", "dtype", "text", "body", "version", "values"]
    way = draw.choice(ways)
    if way == "shape":
        shape = draw.choice(SHAPES)
        header = header[: header.index("'shape':")] + f"'shape': {shape}, }}"
    elif way == "dtype":
        dtype = draw.choice(TYPES)
        header = f"{{'descr': {dtype}, " + header[header.index("'fortran_order'") :]
    elif way == "text":
        header = draw.choice(
            ["{" * 5000, "__import__('os').system('touch canary')", "1", "{}", "9" * 9000, "\x00" * 64]
        )
    elif way == "body":
        body = draw.choice([b"", body[: len(body) // 2], body * 3, b"\xff" * len(body)])
    elif way == "values":
        body = bytes(draw.choice([0, 1, 127, 128, 255]) for _ in range(min(len(body), 400))) + body[400:]
    magic = draw.choice([b"\x93NUMPY\x01\x00", b"\x93NUMPY\x09\x00"]) if way == "version" else raw[:8]
    text = header.encode("latin1", "replace")[:60_000]
    return magic + len(text).to_bytes(2, "little") + text + body, f"npy {way} {header!r:.50}"


def npy(raw: bytes, draw: random.Random) -> Mutant:
    content, about = _npy(raw, draw)
    return Mutant(content, about)


def npz(raw: bytes, draw: random.Random) -> Mutant:
    """An archive of arrays, one of which is another one, with checksums that fit."""
    return _zipped(raw, draw, _npy)


def _zipped(raw: bytes, draw: random.Random, change: Callable[[bytes, random.Random], tuple[bytes, str]]) -> Mutant:
    with zipfile.ZipFile(io.BytesIO(raw)) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    name = draw.choice(list(files))
    way = draw.choice(["change"] * 6 + ["delete", "double", "rename", "bomb", "many", "link"])
    about, more = way, []
    if way == "change":
        files[name], about = change(files[name], draw)
    elif way == "delete":
        del files[name]
    elif way == "rename":
        files[draw.choice(["/etc/x", "../x", "x" * 60_000, "\x1b[31m", "y"])] = files.pop(name)
    elif way == "bomb":
        files[name] = files[name][:128] + b"\0" * 2**27
    elif way == "many":
        files |= {f"{number}.npy": b"" for number in range(3000)}
    elif way == "double":
        more = [(name, files[name][::-1])]
    packing = zipfile.ZIP_DEFLATED if way == "bomb" else draw.choice([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", packing, compresslevel=1) as archive:
        for key, content in [*files.items(), *more]:
            archive.writestr(key, content)
        if way == "link":
            entry = zipfile.ZipInfo(f"{name}.link")
            entry.external_attr = 0o120777 << 16
            archive.writestr(entry, "/etc/passwd")
    content = out.getvalue()
    if way == "bomb" and draw.random() < 0.5:  # which says that it is small
        content = content.replace(struct.pack("<I", 128 + 2**27), struct.pack("<I", 1000))
    return Mutant(content, f"{name}: {about}", resealed=True)


def weights_pt(raw: bytes, draw: random.Random) -> Mutant:
    """A file of torch.save: its pickle changed, in an archive whose checksums fit; or tensors of odd kinds."""
    if draw.random() < 0.4:
        return _odd_tensors(raw, draw)
    return _zipped(raw, draw, _pickled)


def _pickled(raw: bytes, draw: random.Random) -> tuple[bytes, str]:
    if draw.random() < 0.2:
        return pickle.dumps(draw.choice([Canary(), {"weight": Canary()}, [Canary()]])), "a pickle that runs code"
    if draw.random() < 0.1:
        return draw.choice(
            [b"\x80\x02]" + b"]" * 50_000 + b".", b"\x80\x02N.", b"\x80\x02" + b"(" * 90_000 + b"."]
        ), "deep"
    return damaged(raw, draw).content, "damaged, resealed"


def _odd_tensors(raw: bytes, draw: random.Random) -> Mutant:
    import torch

    tree = torch.load(io.BytesIO(raw), weights_only=True)
    name = draw.choice(list(tree))
    old = tree[name]
    odd = {
        "stride 0": lambda: torch.zeros(1).expand(50_000_000, 1000),
        "stride 0, same shape": lambda: torch.zeros(1).expand(old.shape),
        "overlapping": lambda: torch.zeros(old.numel() + 1).as_strided(old.shape, [1] * old.ndim),
        "meta": lambda: torch.empty(old.shape, device="meta"),
        "huge meta": lambda: torch.empty(2**40, device="meta"),
        "sparse": lambda: old.to_sparse(),
        "sparse and huge": lambda: torch.sparse_coo_tensor([[0], [0]], [1.0], (2**30, 2**30)),
        "quantised": lambda: torch.quantize_per_tensor(old, 0.1, 0, torch.quint8),
        "nested": lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]),
        "complex": lambda: old.to(torch.complex64),
        "empty": lambda: torch.empty(50_000_000, 0),
        "bool": lambda: old > 0,
        "NaN": lambda: old * float("nan"),
        "scalar": lambda: torch.tensor(1.0),
        "many dimensions": lambda: torch.zeros([1] * 64),
        "no tensor": lambda: extreme(draw),
        "itself": lambda: tree,
        "deep": lambda: _deep(400),
    }
    kind = draw.choice(list(odd))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tree = {**tree, name: odd[kind]()}
        if kind == "itself":
            tree[name] = tree
        out = io.BytesIO()
        try:
            torch.save(tree, out)
        except Exception:  # what torch can't write is no file
            return damaged(raw, draw)
    return Mutant(out.getvalue(), f"{name} is {kind}", resealed=True)


def _deep(levels: int) -> object:
    value: object = {}
    for _ in range(levels):
        value = {"a": value}
    return value


def gzipped(inside: Callable[[bytes, random.Random], Mutant]) -> Structured:
    """Changed inside of gzip, with a checksum that fits; or a bomb."""

    def change(raw: bytes, draw: random.Random) -> Mutant:
        if draw.random() < 0.05:
            packer = zlib.compressobj(9, zlib.DEFLATED, 31)
            zeros = b"".join(packer.compress(b"\0" * 2**20) for _ in range(700)) + packer.flush()
            return Mutant(zeros, "700 MB of zeros", resealed=True)
        mutant = inside(gzip.decompress(raw), draw)
        return mutant._replace(content=gzip.compress(mutant.content, 1), resealed=True)

    return change


def idx(raw: bytes, draw: random.Random) -> Mutant:
    """The header of an idx file: its type, its dimensions."""
    new = bytearray(raw)
    if draw.random() < 0.5:
        new[draw.randrange(4)] = draw.choice([0, 1, 2, 3, 8, 9, 13, 14, 255])
        return Mutant(bytes(new), "another type")
    at = 4 + 4 * draw.randrange(new[3])
    new[at : at + 4] = struct.pack(">I", draw.choice([0, 1, 2, 2**31 - 1, 2**32 - 1, 70_000]))
    return Mutant(bytes(new), "another size")


def tar(raw: bytes, draw: random.Random) -> Mutant:
    """An archive of pickles or images, one of which is another one."""
    with tarfile.open(fileobj=io.BytesIO(raw)) as archive:
        files = {entry.name: archive.extractfile(entry).read() for entry in archive if entry.isfile()}  # type: ignore[union-attr]
    name = draw.choice(list(files))
    way = draw.choice(["change", "change", "change", "delete", "link", "device", "size", "rename"])
    if way == "change":
        files[name], _ = _pickled(files[name], draw)
    elif way == "delete":
        del files[name]
    elif way == "rename":
        files[draw.choice(["../x", "/etc/x", "x" * 300])] = files.pop(name)
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for key, content in files.items():
            entry = tarfile.TarInfo(key)
            entry.size = len(content)
            if key == name and way in ("link", "device"):
                entry.type = tarfile.SYMTYPE if way == "link" else tarfile.FIFOTYPE
                entry.linkname, entry.size = "/dev/zero", 0
            archive.addfile(entry, io.BytesIO(content))
    content = out.getvalue()
    if way == "size":  # of a member, with a header whose checksum fits
        entry = tarfile.TarInfo(name)
        entry.size = draw.choice([2**33, 2**60])
        content = entry.tobuf(tarfile.GNU_FORMAT) + content
    return Mutant(content, f"{name}: {way}", resealed=True)


def png(raw: bytes, draw: random.Random) -> Mutant:
    """The chunks of a PNG, with checksums that fit; or an image of another format under its name."""
    if draw.random() < 0.15:
        content = draw.choice(FORMATS)
        return Mutant(content, f"another format: {content[:8]!r}", resealed=True)
    chunks, at = [], 8
    while at < len(raw):
        size = int.from_bytes(raw[at : at + 4], "big")
        chunks.append([raw[at + 4 : at + 8], raw[at + 8 : at + 8 + size]])
        at += 12 + size
    way = draw.choice(["size", "depth", "data", "delete", "text", "bomb", "order"])
    if way == "size":
        sizes = draw.choice([(2**31 - 1, 2**31 - 1), (30_000, 30_000), (0, 5), (9000, 9000), (1, 2**30)])
        chunks[0][1] = struct.pack(">II", *sizes) + chunks[0][1][8:]
    elif way == "depth":
        chunks[0][1] = chunks[0][1][:8] + bytes([draw.choice([1, 3, 16, 32]), draw.choice([0, 2, 3, 4, 6, 9]), 0, 0, 0])
    elif way == "data":
        chunks[1][1] = damaged(chunks[1][1], draw).content
    elif way == "delete":
        del chunks[draw.randrange(len(chunks))]
    elif way == "text":
        chunks.insert(1, [b"zTXt", b"a\0\0" + zlib.compress(b"\0" * 2**24)])
    elif way == "bomb":
        chunks[0][1] = struct.pack(">II", 12_000, 12_000) + chunks[0][1][8:]
        chunks[1][1] = zlib.compress(b"\0" * 2**22, 1)
    else:
        chunks.reverse()
    body = b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )
    return Mutant(raw[:8] + body, f"png {way}", resealed=True)


def zipped_pictures(raw: bytes, draw: random.Random) -> Mutant:
    """A zip of images and lists, one of which is another one."""

    def change(content: bytes, draw: random.Random) -> tuple[bytes, str]:
        mutant = png(content, draw) if content.startswith(b"\x89PNG") else damaged(content, draw)
        return mutant.content, mutant.about

    return _zipped(raw, draw, change)
