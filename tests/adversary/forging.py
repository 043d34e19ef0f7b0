"""Safetensors files taken apart and put together again, with whatever lies and a digest that fits them.

The format: eight bytes with the length of a header, the header as JSON, the tensors' bytes. Unskew's digests are the
SHA-256 over the metadata and each tensor's name, type, shape and bytes: of statistics in the order in which tensors
lie, as `digest`, which leaves a signature out; of everything else in the order of their names, as `seal`. An answer is
a line of JSON with a digest of its own.
"""

import hashlib
import json
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

NUMPY = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "U8": "u1", "BOOL": "?"}
TORCH = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
    "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip


@dataclass
class Tensor:
    dtype: str
    shape: list[int]
    data: bytes

    def array(self) -> np.ndarray:
        """Its values; of bfloat16 as float32."""
        if self.dtype == "BF16":
            return (np.frombuffer(self.data, "<u2").astype("<u4") << 16).view("<f4").reshape(self.shape)
        return np.frombuffer(self.data, NUMPY[self.dtype]).reshape(self.shape)

    def holding(self, values: np.ndarray) -> "Tensor":
        """The same kind of tensor with other values."""
        if self.dtype == "BF16":
            raw = (np.ascontiguousarray(values, "<f4").view("<u4") >> 16).astype("<u2").tobytes()
        else:
            with np.errstate(all="ignore"):
                raw = np.ascontiguousarray(values).astype(NUMPY[self.dtype]).tobytes()
        return replace(self, shape=list(values.shape), data=raw)


@dataclass
class Forgery:
    """A file's metadata and tensors, in their order; `lies` replaces entries of the header when it is written."""

    metadata: dict[str, str]
    tensors: dict[str, Tensor]
    lies: dict[str, Any] = field(default_factory=dict)

    def get(self, name: str) -> Any:
        """A field of the metadata, which is JSON."""
        return json.loads(self.metadata[name])

    def set(self, name: str, value: Any) -> None:
        self.metadata[name] = json.dumps(value)

    def array(self, name: str) -> np.ndarray:
        return self.tensors[name].array()

    def put(self, name: str, values: Any) -> None:
        self.tensors[name] = self.tensors[name].holding(np.asarray(values))


def read(raw: bytes) -> Forgery:
    """Take a file apart."""
    length = int.from_bytes(raw[:8], "little")
    header, body = json.loads(raw[8 : 8 + length]), raw[8 + length :]
    metadata = header.pop("__metadata__", {})
    ordered = sorted(header.items(), key=lambda item: item[1]["data_offsets"])
    tensors = {name: Tensor(at["dtype"], at["shape"], body[slice(*at["data_offsets"])]) for name, at in ordered}
    return Forgery(metadata, tensors)


def written(forgery: Forgery) -> bytes:
    """Put a file together."""
    header: dict[str, Any] = {"__metadata__": forgery.metadata} if forgery.metadata else {}
    begin = 0
    for name, tensor in forgery.tensors.items():
        end = begin + len(tensor.data)
        header[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [begin, end]}
        begin = end
    for name, lie in forgery.lies.items():
        true = header.get(name)
        header[name] = {**true, **lie} if isinstance(true, dict) and isinstance(lie, dict) else lie
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + b"".join(tensor.data for tensor in forgery.tensors.values())


def resealed(forgery: Forgery) -> Forgery:
    """The same with a digest that fits, where there was one."""
    kind = next((kind for kind in ("digest", "seal") if kind in forgery.metadata), None)
    if kind is None:
        return forgery
    rest = {name: value for name, value in forgery.metadata.items() if name != kind}
    covered = {name: value for name, value in rest.items() if kind == "seal" or name != "signature"}
    hashed = hashlib.sha256(json.dumps(covered, sort_keys=True).encode())
    tensors = forgery.tensors.items()
    for name, tensor in tensors if kind == "digest" else sorted(tensors):
        told = {**vars(tensor), **forgery.lies.get(name, {})} if isinstance(forgery.lies.get(name, {}), dict) else {}
        shape = told.get("shape", tensor.shape)
        shape = tuple(shape) if isinstance(shape, list) else shape
        dtype = TORCH.get(str(told.get("dtype")), told.get("dtype"))
        hashed.update(f"{name} torch.{dtype} {shape}\n".encode(errors="replace"))
        hashed.update(tensor.data)
    return replace(forgery, metadata={**rest, kind: hashed.hexdigest()})


def answer(values: dict[str, Any]) -> bytes:
    """The line of an answer, with a digest that fits."""
    covered = {name: value for name, value in values.items() if name not in ("digest", "signature")}
    hashed = hashlib.sha256(_line(covered)).hexdigest()
    return _line({**values, "digest": hashed})


def _line(values: dict[str, Any]) -> bytes:
    return (json.dumps(values, sort_keys=True, separators=(",", ":")) + "\n").encode()
