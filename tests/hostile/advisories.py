"""Public advisories about the files of training tools, each by its number; docs/advisories.md says what they are."""

from __future__ import annotations

import io
import json
import re
import tarfile
from pathlib import Path
from typing import Any

import numpy as np

from tests.hostile import gguf
from tests.hostile.case import Case
from tests.hostile.deltas import model
from tests.hostile.honest import weights, with_pickle
from tests.hostile.pickles import PYTHON, SHELL, beside, call, text
from tests.hostile.zips import changed

PAYLOAD = b"\x80\x02" + call("os", "system", text(SHELL)) + b"."


def tar(folder: Path) -> Path:
    """torch's format before 0.1.10, a tar whose members are pickles."""
    with tarfile.open(folder / "x.pt", "w") as archive:
        for name in ("sys_info", "pickle", "storages", "tensors"):
            entry = tarfile.TarInfo(name)
            entry.size = len(PAYLOAD)
            archive.addfile(entry, io.BytesIO(PAYLOAD))
    return folder / "x.pt"


def longer_storage(folder: Path) -> Path:
    """The first storage declares a million elements, and its member has 32."""
    count = re.compile(rb"(cpuq.)K.", re.DOTALL)
    return with_pickle(folder, lambda data: count.sub(lambda found: found[1] + b"J\x40\x42\x0f\0", data, count=1))


def item_of_a_tensor(folder: Path) -> Path:
    """An item is set on the first tensor, as if it were a dict."""
    tensor = re.compile(rb"\)Rq.tq.Rq.", re.DOTALL)
    return with_pickle(folder, lambda data: tensor.sub(lambda found: found[0] + text("key") + b"K\x01s", data, count=1))


def with_file(name: str, content: bytes = PAYLOAD, **config: Any) -> Case:
    """A Hugging Face folder with one more file, and fields of its `config.json`; it gets another dtype."""

    def build(folder: Path) -> Path:
        path = model(folder / "base", weights(), **config)
        (path / name).write_bytes(content)
        return path

    return Case(build, None, {"dtype": "float16"})


TEMPLATES = [{"name": name, "template": "x"} for name in ("../../pwned", "/tmp/pwned", "a\\..\\pwned")]

BYTES, ONE = np.array([2, 1, 1, 6, 6, 1, 1, 1], "i4"), np.zeros(1, "f4")
NO_IDS = ("tokenizer.ggml.token_type", *(f"tokenizer.ggml.{name}_token_id" for name in ("bos", "eos", "unknown")))
GIB = (1 << 30).to_bytes(8, "little")

CASES: dict[str, Case] = {
    "CVE-2025-32434 a tar of torch's first format": Case(tar, "several files"),
    "CVE-2026-24747 an item set on a tensor": Case(item_of_a_tensor, "SETITEM|item|dict"),
    "CVE-2026-24747 a storage longer than its data": Case(longer_storage, "record has"),
    "CVE-2025-1716 pip as a callable": beside(call("pip._internal.cli.main", "main", text("install"))),
    "CVE-2025-1889 a call that loads a second pickle": beside(call("torch", "load", text("x/config.p"))),
    "CVE-2025-1944 another name in the local header": changed(
        "x/data.pkl", "contradictory headers", local_name="x/data.pk1"
    ),
    "CVE-2025-1945 flags of an encrypted member": changed("x/data.pkl", "compressed or encrypted", flags=1),
    "CVE-2025-10156 a wrong checksum": changed("x/data.pkl", "CRC-32", crc=1),
    "CVE-2025-10157 a callable in a module of asyncio": beside(
        call("asyncio.unix_events", "_UnixSubprocessTransport._start", text(SHELL))
    ),
    "GHSA-f54q-57x4-jg88 eval through profile": beside(call("profile", "run", text(PYTHON))),
    "CVE-2026-1839 the random states of a Trainer": with_file("rng_state.pth"),
    "CVE-2024-11393 a pickle next to the weights": with_file("training_args.bin"),
    "CVE-2026-5843 a file that config.json names": with_file("evil.py", PYTHON.encode(), model_file="evil.py"),
    "CVE-2026-4372 code that config.json names": with_file(
        "evil.py", PYTHON.encode(), _attn_implementation_internal="evil/kernel", attn_implementation="evil/kernel"
    ),
    "CVE-2026-9856 templates whose names are paths": with_file(
        "tokenizer_config.json", json.dumps({"chat_template": TEMPLATES}).encode()
    ),
    "CVE-2025-49847 a token of 2^31 bytes": gguf.token(
        "text of", tokens=gguf.array(gguf.TEXT, 1, (1 << 31).to_bytes(8, "little"))
    ),
    "CVE-2025-49847 a token of 2^63 bytes": gguf.token(
        "text of", tokens=gguf.array(gguf.TEXT, 1, (1 << 63).to_bytes(8, "little"))
    ),
    "CVE-2025-52566 a count of tokens that is negative in 32 bits": gguf.token(
        "arrays of more", tokens=gguf.array(gguf.TEXT, (1 << 31) + 8, b"")
    ),
    "CVE-2026-7482 a tensor longer than the file": gguf.one_more("lies at", (1 << 20,), offset=1024),
    "CVE-2026-7482 a tensor after the end of the file": gguf.one_more("lies at", (8,), offset=1 << 40),
    "llama.cpp 25969 a byte of -1": gguf.token(
        None, pieces=True, tokens=["a", "b", "c", "<0x-1>", "<0xZZ>", "ab", "bc", "abc"], token_type=BYTES
    ),
    "llama.cpp 25508 an id past the vocabulary": gguf.token("has no token", bos_token_id=(1 << 32) - 1),
    "llama.cpp 25508 a vocabulary without the usual ids": gguf.case(
        "no scores or unknown token",
        {**gguf.PIECES, **dict.fromkeys(NO_IDS), "tokenizer.ggml.tokens": ["a"], "tokenizer.ggml.scores": ONE},
        tensors={gguf.EMBEDDING: np.ones((1, 4), "f4")},
    ),
    "llama.cpp 26318 an alignment that is a float": gguf.case("alignment", {"general.alignment": 32.0}),
    "llama.cpp 26318 a size that overflows when padded": gguf.one_more("shape", ((1 << 64) - 8,), kind=24),
    "llama.cpp 27203 dimensions whose product is negative": gguf.one_more("shape", ((1 << 63) - 1, 2), kind=24),
    "llama.cpp 26690 scores of one byte": gguf.token("scores", pieces=True, scores=np.zeros(8, "u1")),
    "llama.cpp 25821 more layers than 512": gguf.own("layers", block_count=513),
    "LM Studio 2289 a byte of -1": gguf.token(
        None, pieces=True, tokens=["a", "b", "c", "<0x-f>", "<0x00>", "ab", "bc", "abc"], token_type=BYTES
    ),
    "ggml 1516 a text of 1 GiB": gguf.case("text of", {"x": gguf.TEXT.to_bytes(4, "little") + GIB}),
    "ggml 1516 an array of 2^30 numbers": gguf.case("arrays of more", {"x": gguf.array(gguf.U32, 1 << 30, b"")}),
    "ggml 1516 an alignment of 1 GiB": gguf.case("alignment", {"general.alignment": 1 << 30}),
}
