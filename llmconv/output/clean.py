"""clean: deletes what an interrupted run left in an object store."""

from __future__ import annotations

from dataclasses import dataclass

from llmconv.errors import InputRefused
from llmconv.output.manifest import MANIFEST, parse_manifest
from llmconv.output.store_folder import CLAIM, JOURNAL, SMALL, Claim, read_claim
from llmconv.stores.address import StoreAddress, is_store_address, parse_address
from llmconv.stores.object_store import ObjectStore, abort_uploads, open_uploads


@dataclass(frozen=True)
class Cleaned:
    """What was, or would be, deleted: paths of objects below the address, and the number of open multipart uploads.

    The number is None if uploads cannot be listed (no boto3, or no S3).
    """

    objects: tuple[str, ...]
    uploads: int | None


def clean(output: str | StoreAddress, *, dry_run: bool = False) -> Cleaned:
    """Deletes the journal and the files that an interrupted run left below `output`, and their open uploads.

    A published output stays, and so does everything that llmconv did not write: uploads of other files may be at work.
    Raises InputRefused unless `output` is in an object store with access, OutputFailed if the store failed.
    """
    if not is_store_address(output):
        raise InputRefused(
            f"`{output}` is not an address in an object store",
            hint="a local run that was interrupted left a folder `.OUT.llmconv-partial` next to OUT, which you can "
            "remove; one to the Hub left nothing there",
        )
    address = output if isinstance(output, StoreAddress) else parse_address(output)
    store = ObjectStore(address)
    objects, written = _left(store)
    if dry_run:
        found = open_uploads(address, written)
        return Cleaned(tuple(objects), len(found[1]) if found else None)
    store.delete([*(key for key in objects if key != CLAIM), CLAIM])
    return Cleaned(tuple(objects), abort_uploads(address, written))


def _left(store: ObjectStore) -> tuple[list[str], set[str]]:
    """What to delete, and the files that a run may have been writing.

    That is the journal, and the files that the claim lists, new and replaced ones, if no output is published. An upload
    that a lost worker left open may be of a file that has been published since.
    """
    keys = {head.key for head in store.list()}
    claim = read_claim(store) or Claim("")
    published = store.read(MANIFEST, SMALL) if MANIFEST in keys else None
    files = set() if published is not None else {*claim.files, *claim.replaced}
    written = {*claim.files, *(parse_manifest(published).files if published else ())}
    return sorted(key for key in keys if key.startswith(f"{JOURNAL}/") or key in files), written
