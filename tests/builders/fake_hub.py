"""FakeHub: as much of the Hugging Face Hub as reading and writing models needs, on loopback, with faults on demand.

It keeps what the real one promises: an object has the sha256 that it was announced with, a commit names only objects
that were sent, and it follows the parent that the client saw.
"""

from __future__ import annotations

import asyncio
import base64
import fnmatch
import hashlib
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

LFS = ("*.safetensors", "*.onnx", "*.bin", "*.pth", "*.pt")
"""Files that are LFS objects whatever their size, by the `.gitattributes` of a new repository."""

LFS_BYTES = 10 << 20
METHODS = ["GET", "HEAD", "POST", "PUT", "DELETE"]
ATTRIBUTES = b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n"


@dataclass(frozen=True)
class Stored:
    """A file of a commit."""

    content: bytes
    is_lfs: bool

    @property
    def blob(self) -> str:
        """Git's hash of the file, or of its pointer."""
        kept = b"pointer" + hashlib.sha256(self.content).digest() if self.is_lfs else self.content
        return hashlib.sha1(b"blob %d\0" % len(kept) + kept).hexdigest()

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()

    def entry(self, path: str) -> dict[str, Any]:
        """As `tree` and `paths-info` tell it."""
        size = len(self.content)
        lfs = {"lfs": {"oid": self.sha256, "size": size, "pointerSize": 130}} if self.is_lfs else {}
        return {"type": "file", "path": path, "oid": self.blob, "size": size, **lfs}


@dataclass
class Repository:
    """Commits, and branches that name them."""

    private: bool = False
    gated: bool = False
    read_only: bool = False
    commits: dict[str, dict[str, Stored]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)

    def add(self, branch: str, files: dict[str, Stored], message: str = "") -> str:
        """A commit with exactly these files."""
        commit = hashlib.sha1(f"{branch}{len(self.commits)}{id(self)}".encode()).hexdigest()
        self.commits[commit], self.branches[branch] = files, commit
        self.messages.append(message)
        return commit

    def put(self, branch: str = "main", **files: bytes) -> None:
        """What another person commits; `_` in a name is a dot."""
        more = {name.replace("_", ".", 1): Stored(content, False) for name, content in files.items()}
        self.add(branch, {**self.files(branch), **more})

    def files(self, revision: str = "main") -> dict[str, Stored]:
        """The files at a branch or commit."""
        return self.commits[self.branches.get(revision, revision)]

    def contents(self, revision: str = "main") -> dict[str, bytes]:
        """The bytes of all files but `.gitattributes`."""
        return {name: kept.content for name, kept in self.files(revision).items() if name != ".gitattributes"}


@dataclass
class Fault:
    """What to answer instead to requests whose `METHOD path` contains `part`; status 0 cuts the connection."""

    part: str
    status: int = 503
    times: int = 1
    message: str = ""


class Refused(Exception):
    """An answer with an error code."""

    def __init__(self, status: int, code: str = "", message: str = "") -> None:
        self.response = JSONResponse(
            {"error": message}, status, headers={"X-Error-Code": code, "X-Error-Message": message}
        )


class FakeHub:
    """The server; its state is there to be looked at."""

    def __init__(self, token: str) -> None:
        self.token = token
        self.repositories: dict[str, Repository] = {}
        self.objects: dict[str, bytes] = {}
        self.puts: list[str] = []
        self.requests: list[str] = []
        self.sent = 0
        """Bytes of files in all answers."""
        self.faults: list[Fault] = []
        self.damaged = ""
        """Part of the path of files whose last bit changes on the way."""
        self.held, self.hold = threading.Event(), ""
        self.corrupt = self.always_ignores = False
        self.address = ""

    def repository(self, name: str, *, private: bool = False) -> Repository:
        """A new repository, with the file that every one has."""
        made = Repository(private)
        made.add("main", {".gitattributes": Stored(ATTRIBUTES, False)}, "initial commit")
        self.repositories[name] = made
        return made

    async def answer(self, request: Request) -> Response:
        """Any request."""
        path = request.scope["raw_path"].decode()
        line = f"{request.method} {path}"
        self.requests.append(line)
        try:
            if fault := next((fault for fault in self.faults if fault.part in line and fault.times), None):
                return _faulty(fault)
            if self.hold and self.hold in line:
                await self._wait()
            for method, pattern, handler in ROUTES:
                if request.method in method and (parts := _match(pattern, path)) is not None:
                    answer: Response = await handler(self, request, *parts)
                    return answer
            return Refused(404, "", f"no route {line}").response
        except Refused as refused:
            return refused.response

    async def _wait(self) -> None:
        self.held.set()
        while self.hold:
            await asyncio.sleep(0.02)
        raise Refused(503)

    def find(self, request: Request, name: str, *, write: bool = False) -> Repository:
        """A repository that the client may see, or write."""
        given = request.headers.get("authorization", "")
        found, knows = self.repositories.get(name), given == f"Bearer {self.token}"
        if given and not knows:
            raise Refused(401, "", "Invalid credentials in Authorization header")
        if found is None or (found.private and not knows):
            raise Refused(404 if knows else 401, "RepoNotFound", "Repository not found")
        if found.gated:
            raise Refused(403, "GatedRepo", "Access to this model is restricted")
        if write and not knows:
            raise Refused(401, "", "Invalid username or password.")
        if write and found.read_only and request.query_params.get("create_pr") is None:
            raise Refused(403, "", f"You don't have the rights; your token is {given[7:]}")
        return found


def _match(pattern: str, path: str) -> list[str] | None:
    """The parts of a path that stand for `*` (one part) and `**` (org/name, or all that is left)."""
    wanted, given = pattern.strip("/").split("/"), path.strip("/").split("/")
    found: list[str] = []
    for at, part in enumerate(wanted):
        if part == "**":
            rest = len(wanted) - at - 1
            taken = given[: len(given) - rest] if rest else given
            found.append(unquote("/".join(taken)))
            given = given[len(taken) :]
        elif not given or (part != "*" and not fnmatch.fnmatch(given[0], part)):
            return None
        else:
            taken, given = given[:1], given[1:]
            found += [unquote(taken[0])] if "*" in part else []
    return None if given or "" in found else found


def _faulty(fault: Fault) -> Response:
    fault.times -= 1
    if fault.status:
        return Refused(fault.status, "", fault.message).response

    async def cut() -> AsyncIterator[bytes]:
        yield b"{"
        raise ConnectionAbortedError

    return StreamingResponse(cut(), headers={"Content-Length": "1000"})


async def create(hub: FakeHub, request: Request) -> Response:
    asked = await request.json()
    name = f"{asked['organization']}/{asked['name']}"
    if request.headers.get("authorization") != f"Bearer {hub.token}":
        raise Refused(401, "", "Invalid username or password.")
    if name in hub.repositories:
        return JSONResponse({"url": f"{hub.address}/{name}", "error": "exists"}, 409)
    hub.repository(name, private=asked.get("visibility") == "private" or bool(asked.get("private")))
    return JSONResponse({"url": f"{hub.address}/{name}"})


async def branch(hub: FakeHub, request: Request, name: str, branch: str) -> Response:
    found, asked = hub.find(request, name, write=True), await request.json()
    if branch in found.branches:
        raise Refused(409, "", "reference already exists")
    start = asked.get("startingPoint", "main")
    found.branches[branch] = found.branches.get(start, start)
    return JSONResponse({})


async def preupload(hub: FakeHub, request: Request, name: str, revision: str) -> Response:
    found, asked = hub.find(request, name, write=True), await request.json()
    files = _at(found, revision)
    ignored = files[".gitignore"].content.decode() if ".gitignore" in files else ""
    patterns = (ignored if hub.always_ignores else asked.get("gitIgnore", ignored)).split()
    told = []
    for file in asked["files"]:
        path, size = file["path"], file["size"]
        lfs = size > LFS_BYTES or any(fnmatch.fnmatch(path, pattern) for pattern in LFS)
        kept = files.get(path)
        told.append(
            {
                "path": path,
                "uploadMode": "lfs" if lfs else "regular",
                "shouldIgnore": any(fnmatch.fnmatch(path, pattern) for pattern in patterns),
                "oid": (kept.sha256 if kept.is_lfs else kept.blob) if kept else None,
            }
        )
    return JSONResponse({"files": told})


async def batch(hub: FakeHub, request: Request, name: str) -> Response:
    hub.find(request, name.removesuffix(".git"), write=False)
    told = []
    for wanted in (await request.json())["objects"]:
        oid = wanted["oid"]
        sending = {"actions": {"upload": {"href": f"{hub.address}/_objects/{oid}?signature=secret"}}}
        told.append({"oid": oid, "size": wanted["size"], **({} if oid in hub.objects else sending)})
    return JSONResponse({"transfer": "basic", "objects": told})


async def put_object(hub: FakeHub, request: Request, oid: str) -> Response:
    content = await request.body()
    if hashlib.sha256(content).hexdigest() != oid:
        raise Refused(400, "", "the sha256 differs from the announced one")
    hub.objects[oid] = content
    hub.puts.append(oid)
    return Response()


async def commit(hub: FakeHub, request: Request, name: str, revision: str) -> Response:
    found = hub.find(request, name, write=True)
    head, files = found.branches.get(revision, ""), dict(_at(found, revision))
    message = ""
    for line in (await request.body()).splitlines():
        kind, value = (entry := json.loads(line))["key"], entry["value"]
        if kind == "header":
            message = f"{value['summary']}\n{value.get('description', '')}"
            if value.get("parentCommit") not in (None, head):
                raise Refused(412, "", "A commit has happened since. Please refresh and try again.")
        else:
            _apply(hub, files, kind, value)
    pull = f"refs/pr/{sum(name.startswith('refs/pr/') for name in found.branches) + 1}"
    is_pull = request.query_params.get("create_pr") is not None
    made = found.add(pull if is_pull else revision, files, message)
    told = {"commitUrl": f"{hub.address}/{name}/commit/{made}", "commitOid": made}
    return JSONResponse({**told, "pullRequestUrl": f"{hub.address}/{name}/discussions/{pull[8:]}" if is_pull else None})


def _apply(hub: FakeHub, files: dict[str, Stored], kind: str, value: Mapping[str, Any]) -> None:
    path = value["path"]
    if kind == "file":
        files[path] = Stored(base64.b64decode(value["content"]) + b" " * hub.corrupt, False)
    elif kind == "lfsFile":
        if value["oid"] not in hub.objects or len(hub.objects[value["oid"]]) != value["size"]:
            raise Refused(400, "", f"the object of {path} was not sent")
        files[path] = Stored(hub.objects[value["oid"]], True)
    elif kind == "deletedFile":
        if path not in files:
            raise Refused(404, "EntryNotFound", "A file with this name doesn't exist")
        del files[path]
    else:
        raise Refused(400, "", f"unknown {kind}")


def _at(repository: Repository, revision: str) -> dict[str, Stored]:
    if revision not in repository.branches and revision not in repository.commits:
        raise Refused(404, "RevisionNotFound", "Invalid rev id")
    return repository.files(revision)


async def info(hub: FakeHub, request: Request, name: str, revision: str = "main") -> Response:
    found = hub.find(request, name)
    files, sha = _at(found, revision), found.branches.get(revision, revision)
    told = {"_id": "1", "id": name, "modelId": name, "sha": sha, "private": found.private, "tags": [], "downloads": 0}
    siblings = [{"rfilename": path} for path in files]
    return JSONResponse({**told, "lastModified": "2040-01-01T00:00:00.000Z", "siblings": siblings})


async def tree(hub: FakeHub, request: Request, name: str, revision: str) -> Response:
    return JSONResponse([kept.entry(path) for path, kept in _at(hub.find(request, name), revision).items()])


async def resolve(hub: FakeHub, request: Request, *parts: str) -> Response:
    *name, revision, path = parts
    found = hub.find(request, "/".join(name))
    kept = _at(found, revision).get(path)
    if kept is None:
        raise Refused(404, "EntryNotFound", "Entry not found")
    commit, size = found.branches.get(revision, revision), len(kept.content)
    tag = kept.sha256 if kept.is_lfs else kept.blob
    told = {"X-Repo-Commit": commit, "ETag": f'"{tag}"', "Accept-Ranges": "bytes"}
    if kept.is_lfs:
        told |= {"X-Linked-Size": str(size), "X-Linked-ETag": f'"{tag}"'}
    first, _, last = request.headers.get("range", "").removeprefix("bytes=").partition("-")
    if not first or request.method == "HEAD":
        body = kept.content if request.method == "GET" else b""
        if body and hub.damaged and hub.damaged in path:
            body = body[:-1] + bytes([body[-1] ^ 1])
        hub.sent += len(body)
        return Response(body, 200, {**told, "Content-Length": str(size)})
    start, end = int(first), min(int(last or size), size - 1)
    hub.sent += end + 1 - start
    return Response(kept.content[start : end + 1], 206, {**told, "Content-Range": f"bytes {start}-{end}/{size}"})


async def validate(hub: FakeHub, request: Request) -> Response:
    return JSONResponse({"errors": [], "warnings": []})


ROUTES: tuple[tuple[str, str, Any], ...] = (
    ("POST", "/api/repos/create", create),
    ("POST", "/api/validate-yaml", validate),
    ("POST", "/api/models/**/branch/*", branch),
    ("POST", "/api/models/**/preupload/*", preupload),
    ("POST", "/api/models/**/commit/*", commit),
    ("GET", "/api/models/**/revision/*", info),
    ("GET", "/api/models/**/tree/*", tree),
    ("GET", "/api/models/**", info),
    ("POST", "/**/info/lfs/objects/batch", batch),
    ("PUT", "/_objects/*", put_object),
    ("GET HEAD", "/*/*/resolve/*/**", resolve),
    ("GET HEAD", "/*/resolve/*/**", resolve),
)
"""Methods, path and handler; the first that fits answers."""


@contextmanager
def serving(token: str) -> Iterator[FakeHub]:
    """The server on a free port of loopback, in a thread."""
    hub = FakeHub(token)
    app = Starlette(routes=[Route("/{path:path}", hub.answer, methods=METHODS)])
    config = uvicorn.Config(app, port=0, log_level="critical", ws="none", lifespan="off")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    hub.address = f"http://127.0.0.1:{port}"
    yield hub
    hub.hold, server.should_exit = "", True
    thread.join()
