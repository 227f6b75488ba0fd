"""Checks paths that a caller gives: clear errors for other values, and only local paths for outputs."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Any

from llmconv.errors import InputRefused, UsageProblem
from llmconv.hub.address import HubAddress, is_hub_address, parse_hub_address
from llmconv.stores.address import StoreAddress, is_store_address, parse_address

ADDRESS = re.compile(r"\s*(?P<scheme>[A-Za-z][\w.+@-]+):/+(?P<rest>.*)", re.DOTALL)
"""`scheme://…` (RFC 3986), `scheme:/…` as pathlib leaves it, and `user@host:/…`; `C:/…` is a drive."""

URI = re.compile(
    r"(?P<scheme>[A-Za-z][\w+.-]*)://(?:(?P<user>[^\s/?#'\"`@:]*)(?P<password>:[^\s/?#'\"`@]*)?@)?"
    r"(?P<path>[^\s?#'\"`]*)(?P<query>[?#][^\s'\"`]*)?"
)
"""A URI within a text, in parts of which some may be credentials."""

COPY_TOOLS = {
    "s3": "aws s3 cp --recursive",
    "s3a": "aws s3 cp --recursive",
    "gs": "gcloud storage cp -r",
    "gcs": "gcloud storage cp -r",
    "az": "azcopy copy --recursive",
    "abfs": "azcopy copy --recursive",
    "abfss": "azcopy copy --recursive",
    "oci": "oci os object bulk-upload",
    "hf": "hf upload",
}
"""Scheme to the command that copies a folder to such a store."""

LOCAL_SCHEMES = ("file", "local")  # schemes of this machine's files


def without_credentials(text: str) -> str:
    """A text whose URIs have neither passwords nor queries, which may be signatures; for http also without the user.

    What is removed of one URI is removed everywhere: an error may name the rest of it alone.
    """
    for found in [*URI.finditer(text)]:
        public = found["user"] and not found["password"] and not found["scheme"].lower().startswith("http")
        user = "" if public or found["user"] is None else f"{found['user']}{found['password'] or ''}@"
        for part in filter(None, (user, found["query"])):
            text = text.replace(part, "")
    return text


WRITTEN = "a path to write"
Written = Annotated[str | Path, WRITTEN]  # a parameter with a file or folder to write; see `output_path`


PLACED = "a path or an address to write"
Placed = Annotated[str | Path, PLACED]
"""A parameter with a folder to write, on this machine, in an object store or on the Hub; see `output_place`."""


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
        raise InputRefused(
            f"`{name}` is `-`, which is not a file", hint="give a path; a file of that name would be `./-`"
        )
    if found := ADDRESS.fullmatch(text):
        shown = without_credentials(text.strip())
        raise InputRefused(
            f"`{shown}` is not on this machine: `{name}` takes a local path",
            hint=_way_out(found["scheme"], found["rest"], shown),
        )
    # pathlib drops a leading `./`, without which a second call would take the path for a URI
    return path.absolute() if ADDRESS.fullmatch(str(path)) else path


def _way_out(scheme: str, rest: str, text: str) -> str:
    if scheme.lower() in LOCAL_SCHEMES:
        return f"give the plain path: `/{rest}`"
    tool = COPY_TOOLS.get(scheme.lower())
    copied = f"write to a local path, then copy it: `{tool} …`" if tool else "write to a local path, then copy it"
    return f"{copied}; a local folder `{scheme}:` would be `./{text}`"


def is_address(value: str | Path) -> bool:
    """Whether `value` is a URI, also as pathlib leaves it."""
    return ADDRESS.fullmatch(os.fspath(value)) is not None


def path_of(value: Any, name: str) -> Path:
    """A `str` or `Path` as a Path; raises UsageProblem, with its type, if it is neither, or empty."""
    if not isinstance(value, str | os.PathLike) or isinstance(text := os.fspath(value), bytes):
        raise UsageProblem(f"`{name}` is {kind_of(value)}, not a path", hint=_instead(value))
    if not text.strip() or "\0" in text:
        problem = (
            "is not a path: it contains a null character"
            if text.strip()
            else "is empty, which is not the name of a file or folder"
        )
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
