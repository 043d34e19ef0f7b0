"""Strangers, replays, and answers that lie: what keys, nonces and seals are there for.

Each trick is a command that a server or a site would run on what somebody sent. It must be refused, or, where a site
lies about its own counts, be named.
"""

import copy
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from adversary import forging
from adversary.federation import Federation, collected, done
from adversary.malicious import Outcome
from helpers.commands import unskew

SIGNED = (0, 1, 2)  # the sites that take part here


class Stage(NamedTuple):
    """What three sites and a server with keys have made."""

    federation: Federation
    folder: Path
    files: list[Path]  # signed statistics
    heads: Path
    answers: list[Path]

    def calibrate(self, *options: object, files: list[Path] | None = None) -> tuple[int, str]:
        """Run the server's command with the sites' keys."""
        out = self.folder / "calibrated.safetensors"
        keys = ["--sites", self.folder / "keys", "--out", out, "--force"]
        answer = unskew("calibrate", *self.federation.task, "--stats", *(files or self.files), *keys, *options)
        return answer.code, answer.err + answer.out

    def forged(self, name: str, forgery: forging.Forgery) -> Path:
        path = self.folder / f"{name}.stats"
        path.write_bytes(forging.written(forging.resealed(forgery)))
        return path


def staged(federation: Federation, folder: Path) -> Stage:
    """Make keys, and go through the conversation honestly."""
    keys = folder / "keys"
    keys.mkdir(parents=True)
    for name in (*(f"site_{number}" for number in SIGNED), "server", "stranger"):
        done("key", "new", folder / name)
        if name.startswith("site_"):
            (folder / f"{name}.pub").rename(keys / f"{name}.pub")
    task = federation.task
    files = [
        collected(federation, folder / f"s{number}.stats", number, "pooled", "float64", "--sign", _key(folder, number))
        for number in SIGNED
    ]
    heads = folder / "heads.safetensors"
    done("calibrate", *task, "--stats", *files, "--sites", keys, "--sign", folder / "server.key", "--propose", heads)
    answers = []
    for number, file in zip(SIGNED, files, strict=True):
        out = folder / f"a{number}.answer"
        mine = ["--stats", file, "--sign", _key(folder, number), "--server", folder / "server.pub", "--out", out]
        done("evaluate", *task, "--data", federation.site(number), "--heads", heads, *mine)
        answers.append(out)
    return Stage(federation, folder, files, heads, answers)


def _key(folder: Path, number: int) -> Path:
    return folder / f"site_{number}.key"


# ---------------------------------------------------------------------------------------------- tricks


def tricks(stage: Stage) -> Iterator[Outcome]:
    """Carry out every trick on files that are signed."""
    folder, fed, files = stage.folder, stage.federation, stage.files
    own, honest = forging.read(files[0].read_bytes()), files[1:]

    def tried(name: str, *options: object, files: list[Path] | None = None) -> Outcome:
        code, said = stage.calibrate(*options, files=files)
        return Outcome(name, {0: "accepted"}.get(code, "refused"), None, 100.0 if code == 0 else 0.0, said)

    unsigned = collected(fed, folder / "unsigned.stats", 0)
    yield tried("a file that is not signed", files=[unsigned, *honest])
    stranger = collected(fed, folder / "x.stats", 3, "pooled", "float64", "--sign", folder / "stranger.key")
    yield tried("a stranger's file", files=[*files, stranger])
    (folder / "false").mkdir()
    done("key", "new", folder / "false" / "site_0")
    false = collected(fed, folder / "y.stats", 3, "pooled", "float64", "--sign", folder / "false" / "site_0.key")
    yield tried("a stranger under a site's name", files=[false, *honest])
    changed = copy.deepcopy(own)
    changed.put("mean", own.array("mean") * 1.01)
    yield tried("changed after it was signed, and resealed", files=[stage.forged("changed", changed), *honest])
    moved = forging.read(unsigned.read_bytes())
    moved.metadata |= {"signature": own.metadata["signature"], "site": own.metadata["site"]}
    moved.put("mean", own.array("mean") * 0.5)
    yield tried("another file's signature", files=[stage.forged("moved", moved), *honest])
    renamed = copy.deepcopy(own)
    renamed.set("site", "site_1")
    yield tried("signed by one, in the name of another", files=[stage.forged("renamed", renamed), files[2]])
    again = collected(fed, folder / "again.stats", 3, "pooled", "float64", "--sign", _key(folder, 0))
    yield tried("a second file of one site", files=[*files, again])
    old = Path(fed.folder / "older.toml")
    done("task", *fed.model, "--labels", fed.folder / "names.txt", "--hold-out", 0.2, "--out", old, "--force")
    replay = folder / "replay.stats"
    older = ["--task", old, "--trust", "--data", fed.site(0), "--sign", _key(folder, 0)]
    done("stats", *older, "--out", replay)
    yield tried("a file of an older task", files=[replay, *honest])
    moved = forging.read(replay.read_bytes())
    moved.metadata["nonce"] = own.metadata["nonce"]
    yield tried("a file of an older task, with the new nonce", files=[stage.forged("nonce", moved), *honest])
    yield from _on_answers(stage, tried)
    heads = forging.read(stage.heads.read_bytes())
    name = next(name for name in heads.tensors if name.endswith("weight"))
    heads.put(name, heads.array(name) * 0)
    lie = folder / "heads_lie.safetensors"
    lie.write_bytes(forging.written(forging.resealed(heads)))
    asked = ["--data", fed.site(1), "--heads", lie, "--server", folder / "server.pub", "--out", folder / "lie.answer"]
    answer = unskew("evaluate", *fed.task, *asked, "--stats", files[1])
    yield Outcome("heads that the server has not signed", "refused" if answer.code else "accepted", None,
                  0.0 if answer.code else 100.0, answer.err)  # fmt: skip


def _on_answers(stage: Stage, tried: Any) -> Iterator[Outcome]:
    """Tricks with answers, signed and not."""
    values = json.loads(stage.answers[0].read_bytes())

    def validated(name: str, answer: dict[str, Any] | None, *others: Path) -> Outcome:
        path = stage.folder / "liar.answer"
        if answer is not None:
            path.write_bytes(forging.answer(answer))
        given = [*([path] if answer is not None else []), *others]
        return tried(name, "--heads", stage.heads, "--validate", *given)

    honest = stage.answers[1:]
    signature = json.loads(honest[0].read_bytes())["signature"]
    yield validated("an answer that was changed and resealed", _lying(values, 1), *honest)
    yield validated("an answer with another's signature", {**values, "signature": signature}, *honest)
    yield validated("an answer that is not signed", {**values, "signature": None, "site": None}, *honest)
    yield validated("an answer twice", None, *honest, honest[0])
    statistics = json.loads(honest[0].read_bytes())["statistics"]
    yield validated("an answer in the name of another's file", {**values, "statistics": statistics}, *honest)
    yield validated("an answer to other heads", {**values, "heads": "0" * 64}, *honest)


def _lying(values: dict[str, Any], more: int) -> dict[str, Any]:
    """An answer whose site claims more examples, all of them right."""
    total = [count + more for count in values["total"]]
    return {**values, "total": total, "right": dict.fromkeys(values["right"], total)}


def unsigned_answers(federation: Federation, folder: Path, flips: int = 60) -> Iterator[Outcome]:
    """Answers that lie where nobody has keys: bits, counts above what there is, one that forces the choice."""
    folder.mkdir(exist_ok=True)
    task = federation.task
    files = [collected(federation, folder / f"s{number}.stats", number) for number in range(4)]
    heads = folder / "heads.safetensors"
    done("calibrate", *task, "--stats", *files, "--propose", heads)
    answers = []
    for number, file in enumerate(files):
        answers.append(folder / f"a{number}.answer")
        asked = ["--heads", heads, "--stats", file, "--out", answers[-1]]
        done("evaluate", *task, "--data", federation.site(number), *asked)
    out, liar = folder / "validated.safetensors", folder / "liar.answer"

    def validated(content: bytes) -> tuple[int, str, bytes]:
        liar.write_bytes(content)
        given = ["--heads", heads, "--validate", liar, *answers[1:], "--out", out, "--force"]
        answer = unskew("calibrate", *task, "--stats", *files, *given)
        return answer.code, answer.err + answer.out, out.read_bytes() if answer.code == 0 else b""

    raw = answers[0].read_bytes()
    code, said, chosen = validated(raw)
    assert code == 0, said
    draw, taken = random.Random(0), 0
    for place in draw.sample(range(8 * len(raw)), flips):
        flipped = bytearray(raw)
        flipped[place // 8] ^= 1 << place % 8
        taken += validated(bytes(flipped))[0] == 0
    yield Outcome(f"{flips} answers with a flipped bit", f"{flips - taken} refused", None, 100.0 * taken, "")
    values = json.loads(raw)
    code, said, _ = validated(forging.answer(_lying(values, 5)))
    named = "refused" if code else "accepted"
    yield Outcome("an answer that counts more than the site has", named, None, 0.0 if code else 100.0, said)
    worst = {name: [0] * len(values["total"]) for name in values["right"]}
    for name in worst:
        code, said, found = validated(forging.answer({**values, "right": {**worst, name: values["total"]}}))
        forced = code == 0 and found != chosen
        shown = "liar" in said or files[0].name in said
        ended = "refused" if code else "named" if shown else "accepted"
        yield Outcome(
            f"an answer by which {name} is always right", ended, None, 100.0 if forced and not shown else 0.0, said
        )
