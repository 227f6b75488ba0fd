"""Checks paths that a caller gives: clear errors for other values, and only local paths for outputs.

Pointer files are followed: Composer's replacement of symbolic links in buckets, and Git LFS pointers. Layout
(mosaicml/composer `utils/file_helpers.py`, `get_file`, `create_symlink_file`): a text file `NAME.symlink` contains the
name of an object, relative to the root of the bucket; if `NAME` is missing, `NAME.symlink` replaces it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Protocol

from llmconv.addresses import (
    HubAddress,
    StoreAddress,
    is_hub_address,
    is_store_address,
    parse_address,
    parse_hub_address,
)
from llmconv.errors import InputRefused, MalformedInput, UnsupportedInput, UsageProblem

# `scheme://…` (RFC 3986), `scheme:/…` as pathlib leaves it, and `user@host:/…`; `C:/…` is a drive
ADDRESS = re.compile(r"\s*(?P<scheme>[A-Za-z][\w.+@-]+):/+(?P<rest>.*)", re.DOTALL)
# A URI within a text, in parts of which some may be credentials
URI = re.compile(
    r"(?P<scheme>[A-Za-z][\w+.-]*)://(?:(?P<user>[^\s/?#'\"`@:]*)(?P<password>:[^\s/?#'\"`@]*)?@)?"
    r"(?P<path>[^\s?#'\"`]*)(?P<query>[?#][^\s'\"`]*)?"
)
# scheme to the command that copies a file or a folder to such a store
COPY_TOOLS = {
    **dict.fromkeys(("s3", "s3a"), "`aws s3 cp …`, for a folder `aws s3 cp --recursive …`"),
    **dict.fromkeys(("gs", "gcs"), "`gcloud storage cp -r …`"),
    **dict.fromkeys(("az", "abfs", "abfss"), "`azcopy copy --recursive …`"),
    "oci": "`oci os object put …`, a folder by `oci os object bulk-upload …`",
    "hf": "`hf upload …`",
}
LOCAL_SCHEMES = ("file", "local")  # schemes of this machine's files


def without_credentials(text: str) -> str:
    """A text whose URIs have no password, query or, for http, user; what one URI loses is removed everywhere."""
    for found in [*URI.finditer(text)]:
        public = found["user"] and not found["password"] and not found["scheme"].lower().startswith("http")
        user = "" if public or found["user"] is None else f"{found['user']}{found['password'] or ''}@"
        for part in filter(None, (user, found["query"])):
            text = text.replace(part, "")
    return text


WRITTEN = "a path to write"
Written = Annotated[str | Path, WRITTEN]  # a parameter with a file or folder to write; see `output_path`
PLACED = "a path or an address to write"
# A parameter with a folder to write, on this machine, in an object store or on the Hub; see `output_place`
Placed = Annotated[str | Path, PLACED]


def output_place(value: Any, name: str = "output") -> Path | StoreAddress | HubAddress:
    """The place of an output folder: an address or a local path; InputRefused for anything else, or credentials."""
    if isinstance(value, StoreAddress | HubAddress):
        return value
    if is_hub_address(value):
        return parse_hub_address(value)
    if is_store_address(value):
        return parse_address(value)
    found = ADDRESS.fullmatch(os.fspath(value)) if isinstance(value, str | Path) else None
    if found and found["scheme"].lower() not in LOCAL_SCHEMES:
        text = without_credentials(str(value).strip())
        raise InputRefused(
            f"`{text}` is not on this machine, and nothing can be written there",
            hint="give a local path, `s3://BUCKET/FOLDER` (also gs, az and oci) or `hf://ORG/NAME`; "
            f"a local folder `{found['scheme']}:` would be `./{text}`",
        )
    return output_path(value, name)


def local_only(place: Path | StoreAddress | HubAddress) -> Path | None:
    """The place if it is on this machine, else None."""
    return place if isinstance(place, Path) else None


def output_path(value: Any, name: str = "output") -> Path:
    """The local path of an output, also `./s3:/x`; InputRefused for a URI or `-`, UsageProblem as `path_of`."""
    path = path_of(value, name)
    text = os.fspath(value)
    if text == "-":
        message = f"`{name}` is `-`, which is not a file"
        raise InputRefused(message, hint="give a path; a file of that name would be `./-`")
    if found := ADDRESS.fullmatch(text):
        shown = without_credentials(text.strip())
        problem = f"`{shown}` is not on this machine: `{name}` takes a local path"
        raise InputRefused(problem, hint=_way_out(found["scheme"], found["rest"], shown))
    # pathlib drops a leading `./`, without which a second call would take the path for a URI
    return path.absolute() if ADDRESS.fullmatch(str(path)) else path


def _way_out(scheme: str, rest: str, text: str) -> str:
    if scheme.lower() in LOCAL_SCHEMES:
        return f"give the plain path: `/{rest}`"
    tool = COPY_TOOLS.get(scheme.lower())
    copied = f"write to a local path, then copy it: {tool}" if tool else "write to a local path, then copy it"
    return f"{copied}; a local folder `{scheme}:` would be `./{text}`"


def is_address(value: str | Path) -> bool:
    """Whether `value` is a URI, also as pathlib leaves it."""
    return ADDRESS.fullmatch(os.fspath(value)) is not None


def path_of(value: Any, name: str) -> Path:
    """A `str` or `Path` as a Path; raises UsageProblem, with its type, if it is neither, or empty."""
    if not isinstance(value, str | os.PathLike) or isinstance(text := os.fspath(value), bytes):
        raise UsageProblem(f"`{name}` is {kind_of(value)}, not a path", hint=_instead(value))
    if not text.strip() or "\0" in text:
        empty = "is empty, which is not the name of a file or folder"
        problem = "is not a path: it contains a null character" if text.strip() else empty
        raise UsageProblem(f"`{name}` {problem}", hint="give a path; `.` is the current folder")
    return Path(text)


def kind_of(value: Any) -> str:
    """The type of a value with its article: `None`, `a list`, `an int`, `a LlamaForCausalLM`."""
    if value is None:
        return "None"
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def _instead(value: Any) -> str:
    """The hint for a value that is often passed instead of a path."""
    if hasattr(getattr(value, "model", None), "save_pretrained") and hasattr(value, "train"):
        return (
            "give its model, `trainer.model`, where a model in memory is taken (`export`, `pipeline`); or save it: "
            "`trainer.save_model(FOLDER)`, then give FOLDER"
        )
    if hasattr(value, "save_pretrained"):
        return "save it first: `model.save_pretrained(FOLDER)`, `tokenizer.save_pretrained(FOLDER)`; then give FOLDER"
    if hasattr(value, "state_dict"):
        return "save it first: `torch.save(model.state_dict(), FILE)`, then `llmconv.convert.to_hf(FILE, FOLDER)`"
    if isinstance(folder := getattr(value, "folder", None), Path):
        return f"give its folder: `{folder}`"
    if isinstance(value, bytes):
        return "give a `str`: `os.fsdecode(…)`"
    return "give a `str` or a `pathlib.Path`"


SUFFIX = ".symlink"
HOPS = 8
TEXT_LIMIT = 1024  # maximum bytes of an object's name, that of S3
# of files with weights, of which a mirror of a store fetches only what is needed
WEIGHT_SUFFIXES = frozenset(
    (".safetensors", ".pt", ".pth", ".bin", ".ckpt", ".distcp", ".pdparams", ".onnx", ".data", ".gguf", ".npz", ".npy")
)
PLAIN_NAME = re.compile(r"[\w.+@=-]{1,255}")
# the first bytes of a Git LFS pointer, which replaces a file that was not fetched (git-lfs `docs/spec.md`)
GIT_LFS = b"version https://git-lfs"


def refuse_git_lfs(head: bytes, name: str) -> None:
    """Raises UnsupportedInput if `head`, the first bytes of a file, is a Git LFS pointer."""
    if head.startswith(GIT_LFS):
        problem = f"`{name}` is a Git LFS pointer: the file itself was not fetched"
        raise UnsupportedInput(problem, hint="fetch it with `git lfs pull`, or download the folder again")


class PointerTree(Protocol):
    """The files in which a pointer is followed; paths are strings with `/`."""

    def exists(self, path: str) -> bool:
        """Whether a file or folder exists."""

    def head(self, path: str) -> bytes | None:
        """The first `TEXT_LIMIT + 1` bytes of a file, None for a folder."""

    def roots(self, path: str) -> Iterator[str]:
        """Possible roots of the bucket that contains `path`, the most likely first."""


def follow(path: str, tree: PointerTree) -> str:
    """Resolves a pointer, or a file that has only one; InputRefused without target, MalformedInput for a circle."""
    seen: list[str] = []
    while len(seen) < HOPS:
        if not tree.exists(path) and tree.exists(path + SUFFIX):
            path += SUFFIX
        if (target := _target(path, tree)) is None:
            return path
        if path in seen:
            break
        seen.append(path)
        path = _find(path, target, tree)
    problem = f"`{PurePosixPath(seen[0]).name}` is a circle of pointers, or a chain of more than {HOPS}"
    raise MalformedInput(problem, hint="name the checkpoint itself")


def _target(path: str, tree: PointerTree) -> str | None:
    """The target of the pointer at `path`, None if it is not a pointer."""
    name = PurePosixPath(path).name
    head = tree.head(path) if name.endswith(SUFFIX) and tree.exists(path) else None
    if head is None:
        return None
    try:
        text = head.decode().strip()
    except UnicodeDecodeError:
        text = ""
    if not text or len(head) > TEXT_LIMIT or not text.isprintable():
        raise MalformedInput(f"`{name}` is not a pointer: it should contain the name of one object", hint=NAME_IT)
    if text.startswith("/") or ":" in text or "\\" in text or ".." in PurePosixPath(text).parts:
        raise MalformedInput(f"`{name}` points to {text[:80]!r}, outside of its bucket", hint=NAME_IT)
    return text


NAME_IT = "name the checkpoint itself instead of the pointer"


def _find(path: str, target: str, tree: PointerTree) -> str:
    """`target` under a root of the bucket, or next to the pointer where only the two were copied."""
    folder, _, name = path.rpartition("/")
    places = [f"{root}/{target}" for root in tree.roots(folder)]
    places.append(f"{folder}/{PurePosixPath(target).name}" if folder else PurePosixPath(target).name)
    for place in places:
        if tree.exists(place) or tree.exists(place + SUFFIX):
            return place
    hint = "fetch it, too, under the same path from the root of the bucket, or name the checkpoint itself"
    raise InputRefused(f"`{name}` points to `{target}`, which does not exist", hint=hint)


class LocalTree:
    """Files on the disk; any folder above the pointer may be the bucket's root, except the root of the disk."""

    def exists(self, path: str) -> bool:
        return os.path.exists(path)  # False, too, for a name that is too long

    def head(self, path: str) -> bytes | None:
        if not Path(path).is_file():
            return None
        with open(path, "rb") as file:
            return file.read(TEXT_LIMIT + 1)

    def roots(self, path: str) -> Iterator[str]:
        """The nearest first."""
        folder = Path(path).absolute()
        yield from (str(place) for place in (folder, *folder.parents) if place != place.parent)


def follow_local(path: Path) -> Path:
    """Resolves a path on the disk, see `follow`; a path that does not exist is returned unchanged."""
    if path.is_file() and (target := _copied_link(path)):
        return target
    found = follow(path.as_posix(), LocalTree())
    return path if found == path.as_posix() else Path(found)


def _copied_link(path: Path) -> Path | None:
    """The target of a symbolic link that git or an archive copied as a text file, None if it is not one."""
    if path.stat().st_size > TEXT_LIMIT or path.name.endswith(SUFFIX):
        return None
    text = path.read_bytes().decode("latin-1").strip()
    target = path.parent / text if PLAIN_NAME.fullmatch(text) and text not in (".", "..", path.name) else None
    return target if target and target.exists() else None
