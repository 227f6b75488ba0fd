"""to-hf out of a bucket and into one, against the same run on the disk; the server is on the loopback."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks import bucket_server, measure
from benchmarks.measure import FOLDER, Measurement, Target, interleaved, llmconv, median, python, report, run, table
from benchmarks.models import base
from benchmarks.to_hf import checkpoint
from llmconv.files.mirror import AHEAD, CHUNK

ROUNDS = 3
GIGABYTES = 30
BUCKET = "s3://bucket"
LOCAL = "disk to disk"

PUT = """
import sys, obstore
from obstore.store import S3Store
blocks = (bytes(4 << 20) for _ in range(int(sys.argv[1]) >> 22))
obstore.put(S3Store("bucket"), "raw", blocks, chunk_size=8 << 20, max_concurrency=4)
"""

GET = """
import sys, obstore
from concurrent.futures import ThreadPoolExecutor
from obstore.store import S3Store
store, step = S3Store("bucket"), 8 << 20
def get(start):
    obstore.get(store, sys.argv[1], options={"range": (start, start + step)}).bytes()
with ThreadPoolExecutor(16) as pool:
    list(pool.map(get, range(0, int(sys.argv[2]), step)))
"""
"""The same bytes in requests of the same size, and thrown away: what obstore and the server take at least."""

SAVE = """
import sys
from pathlib import Path
from benchmarks.sparse import save_composer
from benchmarks.zero_checkpoint import deep
save_composer(Path(sys.argv[1]), *deep(float(sys.argv[2]) * 1e9))
"""
"""In another process: the peak memory of a child is never less than that of its parent, with torch in it."""


def main() -> int:
    """Measures, prints the table, and returns 1 if a target is missed."""
    load = os.getloadavg()[0]
    with bucket_server.serving(FOLDER) as endpoint:
        measure.INSTALLED.update(bucket_server.environment(endpoint))
        sources = {"`.pt`": checkpoint(), "folder": base()}
        runs, requests = measured({**commands(sources), **raw(base() / "model.safetensors")}, ROUNDS, endpoint)
        large, more = measured(large_command(), 1, endpoint)
    body = (
        "The 1.1 B Llama (2.2 GB of bfloat16) as a Composer checkpoint with Adam state and as a folder, which\n"
        f"`--max-shard-size 1GB` writes anew; medians of runs in turn. {GIGABYTES} GB are a sparse checkpoint.\n"
        "The server shares the cores, drops what is put into it, and sends files as they lie.\n"
        f"Load average of the machine before the first run: {load:.1f}.\n\n"
        f"{table(runs | large)}\n\n{requests_table(requests | more)}"
    )
    return report("buckets", "to-hf and buckets", body, targets(runs, large, requests))


def commands(sources: Mapping[str, Path]) -> dict[str, list[str]]:
    """Every source from disk and bucket, to disk and bucket; the first of each source is the local run."""
    result = {}
    for name, path in sources.items():
        for way in (LOCAL, "disk to bucket", "bucket to disk", "bucket to bucket"):
            start, _, end = way.split()
            source = path if start == "disk" else f"{BUCKET}/{path.relative_to(FOLDER)}"
            out = FOLDER / "out" if end == "disk" else f"{BUCKET}/out"
            size = ["--max-shard-size", "1GB"] if path.is_dir() else []
            result[f"{name}, {way}"] = llmconv("to-hf", source, "-o", out, "--overwrite", *size)
    return result


def raw(path: Path) -> dict[str, list[str]]:
    """obstore alone, with as many bytes."""
    size = str(path.stat().st_size)
    return {"`obstore.put`": python(PUT, size), "`obstore.get`": python(GET, str(path.relative_to(FOLDER)), size)}


def large_command() -> dict[str, list[str]]:
    """A checkpoint larger than memory, made on first use."""
    path = FOLDER / "composer-30gb.pt"
    if not path.exists():
        run(python(SAVE, str(path), str(GIGABYTES)))
    arguments = [f"{BUCKET}/{path.name}", "-o", f"{BUCKET}/large", "--dtype", "bfloat16", "--overwrite"]
    return {f"`.pt` of {GIGABYTES} GB, bucket to bucket": llmconv("to-hf", *arguments)}


def measured(
    jobs: Mapping[str, Sequence[str]], rounds: int, endpoint: str
) -> tuple[dict[str, list[Measurement]], dict[str, list[tuple[str, str]]]]:
    """Runs all commands in turn; also the requests of the last run of each, as method and key."""
    seen: list[list[tuple[str, str]]] = []
    results = interleaved(jobs, rounds, FOLDER / "out", lambda: seen.append(bucket_server.requests(endpoint)))
    seen.append(bucket_server.requests(endpoint))
    return results, dict(zip(jobs, seen[-len(jobs) :], strict=True))


def requests_table(requests: Mapping[str, Sequence[tuple[str, str]]]) -> str:
    """How often each method was used by each command."""
    methods = ("HEAD", "GET", "PUT", "POST", "DELETE")
    lines = ["| requests | " + " | ".join(methods) + " |", "| --- |" + " --- |" * len(methods)]
    for name, found in requests.items():
        if found:
            counts = (str(sum(method == one for one, _ in found)) for method in methods)
            lines.append(f"| {name} | " + " | ".join(counts) + " |")
    return "\n".join(lines)


def targets(
    runs: Mapping[str, Sequence[Measurement]],
    large: Mapping[str, Sequence[Measurement]],
    requests: Mapping[str, Sequence[tuple[str, str]]],
) -> list[Target]:
    """Speed against the local run of the same series, memory, requests."""
    found = []
    for name in (name for name in runs if "bucket" in name):
        local = runs[f"{name.partition(',')[0]}, {LOCAL}"]
        speed = median(local, lambda one: one.wall) / median(runs[name], lambda one: one.wall)
        found.append(Target(f"{name}: speed / speed from {LOCAL}", speed, 0.5, at_least=True))
    into = max(one.peak_mb for name, some in runs.items() if "disk to bucket" in name for one in some)
    found.append(Target("disk to bucket: peak RSS, MB", into, 300))
    found += [Target(f"{name}: peak RSS, MB", some[0].peak_mb, 600) for name, some in large.items()]
    source = checkpoint().name
    asked = sum(key == source for _, key in requests["`.pt`, bucket to disk"])
    chunks = -(-(base() / "model.safetensors").stat().st_size // CHUNK) + 1 + AHEAD
    return [*found, Target("`.pt`: requests besides data and read-ahead", asked - chunks, 3)]


if __name__ == "__main__":
    sys.exit(main())
