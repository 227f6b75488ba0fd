"""LocalFolder: a folder on this machine as a Destination."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from llmconv.errors import InputRefused
from llmconv.files.copying import can_clone
from llmconv.output.existing_folder import bytes_held, is_complete, require_free
from llmconv.output.manifest import MANIFEST, Manifest, read_manifest
from llmconv.output.plan import Plan
from llmconv.output.shared_staging import SharedFolder, signature
from llmconv.output.staging import StagedFolder


@dataclass(frozen=True)
class LocalFolder:
    """See `Destination`.

    Attributes:
        path: of the folder.
    """

    path: Path

    def __str__(self) -> str:
        return str(self.path)

    @property
    def name(self) -> str:
        """See `Destination`."""
        return self.path.name

    def is_complete(self) -> bool:
        """See `Destination`."""
        return is_complete(self.path)

    def tidy(self) -> None:
        """See `Destination`; a rename leaves nothing."""

    def require_free(self, overwrite: bool, inputs: Sequence[Path], *, resume: bool) -> None:
        """See `Destination`."""
        require_free(self.path, overwrite, inputs, resume=resume)

    def require_space(self, plan: Plan) -> None:
        """See `Destination`; what an interrupted run wrote is kept or freed."""
        require_space(self.path, self.space_needed(plan) - bytes_held(self.path))

    def space_needed(self, plan: Plan) -> int:
        """See `Destination`; clones need none."""
        source = next((shard.copy_of for shard in plan.shards if shard.copy_of), None)
        if source and can_clone(source, _home(self.path)):
            return sum(shard.nbytes for shard in plan.shards if not shard.copy_of)
        return plan.nbytes

    def manifest(self) -> Manifest:
        """See `Destination`."""
        return read_manifest(self.path)

    def read(self, name: str) -> bytes | None:
        """See `Destination`."""
        path = self.path / name
        return path.read_bytes() if path.is_file() else None

    def made_at(self) -> int:
        """See `Destination`."""
        return (self.path / MANIFEST).stat().st_mtime_ns

    def begin(self, key: str, files: Sequence[str], *, overwrite: bool, resume: bool) -> StagedFolder:
        """See `Destination`."""
        return StagedFolder(self.path, key=key, overwrite=overwrite, resume=resume)

    def require_shared(self) -> None:
        """See `Destination`; they can."""

    def share(self, key: str, files: Sequence[str], mine: Collection[str]) -> SharedFolder:
        """See `Destination`."""
        return SharedFolder(self.path, key=key, files=mine)

    def finish(self, key: str, files: Sequence[str], *, overwrite: bool, trusted: bool) -> StagedFolder:
        """See `Destination`."""
        trusts = signature if trusted else None
        return StagedFolder(self.path, key=key, overwrite=overwrite, resume=True, trusts=trusts)


def _home(output: Path) -> Path:
    """The nearest existing folder above `output`."""
    return next(folder for folder in output.absolute().parents if folder.is_dir())


def require_space(output: Path, needed: int, home: Path | None = None) -> None:
    """Requires free space on the disk; a file system that reports no size (`/proc`, some of FUSE) is not asked.

    Args:
        output: the folder to write.
        needed: bytes.
        home: an existing folder on the disk of `output` (default: the nearest above it).

    Raises:
        InputRefused: fewer than `needed` bytes are free.
    """
    usage = shutil.disk_usage(home or _home(output))
    if needed > usage.free and usage.total:
        raise InputRefused(
            f"no space left: `{output}` needs {needed:,} bytes, {usage.free:,} are free",
            hint="free some space, or choose an output on another disk",
        )
