"""HubFolder: a model repository on the Hugging Face Hub as a Destination; its commits are atomic.

Each shard is made in a temporary file and sent, and the file is deleted: the disk has to hold one shard. Nobody sees
what was sent until a single commit names it, together with the small files and the manifest. `--resume` reads in the
journal which shards were sent and asks the Hub whether it still has them; these are not computed again.

The journal, in `~/.cache/llmconv/uploads/`, contains neither tensors nor credentials:

    KEY.jsonl            one line per file that the Hub has: name, size, sha256; locked while a run is at work
    .llmconv-….part      the shard that is being made or sent

A repository without README.md gets a model card of the steps in the manifest and the report of `verify`. Fields of its
header: https://huggingface.co/docs/hub/model-cards. `base_model_relation` is one of adapter, finetune, merge and
quantized; a merged adapter is a finetune for the Hub, since the repository has all weights.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Self

from llmconv.addresses import HubAddress
from llmconv.checkpoint import ADAPTER_CONFIG, parse_object
from llmconv.errors import InputRefused, OutputFailed, UnsupportedInput, printable
from llmconv.files.safe_folder import Folder, Link, is_inner, user_cache
from llmconv.files.sources import SUFFIXES
from llmconv.hub.repository import FileDigest, HubRepository, digest_of, file_digest, sent
from llmconv.output.local_folder import require_space
from llmconv.output.manifest import MANIFEST, VERDICTS, Manifest, file_entry, is_file_entry, parse_manifest
from llmconv.output.plan import (
    Destination,
    Plan,
    Shard,
    UnfinishedOutput,
    check_copy,
    failing_safely,
    require_unchanged,
    stream_shard,
)
from llmconv.progress import say

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd

CONFIG = "config.json"


@dataclass(frozen=True)
class HubFolder(Destination):
    """A repository and its branch; a commit leaves nothing to tidy."""

    address: HubAddress

    @cached_property
    def repository(self) -> HubRepository:
        return HubRepository(self.address)

    def is_complete(self) -> bool:
        state, files = self.repository.state, self.manifest().files
        return (
            bool(files)
            and state.has_branch
            and all(
                name in state.files
                and state.files[name].size == entry.get("bytes")
                and state.files[name].sha256 in ("", entry.get("sha256"))
                for name, entry in files.items()
            )
        )

    def require_free(self, overwrite: bool, inputs: Sequence[Path] = (), *, resume: bool = False) -> None:
        """See `Destination`; files about the repository, such as README.md, are not in the way."""
        state = self.repository.state
        if not state.has_branch:
            return
        if not overwrite and MANIFEST in state.files and not (resume and self.is_complete()):
            problem = f"`{self.address}` already contains a model of llmconv"
            raise InputRefused(problem, hint="choose another `-o`, or give `--overwrite` to replace it by a new commit")
        require_own_weights(self.repository, [CONFIG] if MANIFEST not in state.files and CONFIG in state.files else [])

    def require_space(self, plan: Plan) -> None:
        require_space(user_cache(UPLOADS), self.space_needed(plan))

    def space_needed(self, plan: Plan) -> int:
        """See `Destination`: on this machine, one shard at a time; copies are sent from where they are."""
        return max((shard.nbytes for shard in plan.shards if not shard.copy_of), default=0)

    def read(self, name: str) -> bytes | None:
        return self.repository.read(name)

    def begin(self, key: str, files: Sequence[str], *, overwrite: bool, resume: bool) -> UnfinishedCommit:
        return UnfinishedCommit(self, key=f"{key} {self.address}", resume=resume)

    def share(self, key: str, files: Sequence[str], mine: Collection[str]) -> UnfinishedCommit:
        self.require_shared()

    def finish(self, key: str, files: Sequence[str], *, overwrite: bool, trusted: bool) -> UnfinishedCommit:
        self.require_shared()

    def require_shared(self) -> NoReturn:
        """See `Destination`; what was sent is known only to the process that makes the commit."""
        problem = f"`{self.address}` cannot be written by several processes"
        raise UnsupportedInput(problem, hint="let them write a folder or a bucket, then `llmconv push` it")


class UnfinishedCommit(UnfinishedOutput):
    """A commit; `resume` uses what a run with the same `key` (sources, options, address) has sent."""

    def __init__(self, target: HubFolder, *, key: str, resume: bool) -> None:
        self.target, self.repository, self._key, self._resume = target, target.repository, key, resume
        self.finished = {}
        self._contents: dict[str, bytes] = {}
        self._additions: dict[str, CommitOperationAdd] = {}

    def __enter__(self) -> Self:
        """Makes the repository, a private one, unless it exists, and opens the journal."""
        existed = self.repository.state.exists
        self.repository.create(private=None if existed else True)
        if not existed:
            say(f"made the private repository `{self.target.address.repository}`")
        with failing_safely():
            self._journal = UploadJournal(self._key, resume=self._resume)
        try:  # takes the shards of an interrupted run that the Hub still has
            entries = self._journal.entries
            known = self.repository.has_objects({entry["sha256"]: entry["bytes"] for entry in entries.values()})
            for name, entry in entries.items():
                addition = self.repository.addition(name, b"")
                if entry["sha256"] in known and sent(addition, entry["bytes"], entry["sha256"]):
                    self.finished[name], self._additions[name] = entry, addition
        except BaseException:
            self._journal.close(keep=True)
            raise
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Keeps the journal after a failure of the Hub or an interrupt, deletes it after anything else."""
        self._journal.close(keep=isinstance(error, OSError | OutputFailed | KeyboardInterrupt) and bool(self.finished))

    def make_shard(self, shard: Shard, advance: Callable[[int], None]) -> dict[str, Any]:
        with failing_safely():
            if not shard.copy_of:
                with self._journal.folder.begin("shard") as new:  # removed at the end of the block
                    entry = stream_shard(new.file, shard, advance)
                    self._send(shard.name, new.path, entry)
                return entry
            digest = file_digest(shard.copy_of)
            entry = {"bytes": digest.size, "sha256": digest.sha256}
            self._send(shard.name, shard.copy_of, entry)
        require_unchanged(shard.copy_of, shard)
        check_copy(shard.copy_of, shard)
        advance(shard.nbytes)
        return entry

    def _send(self, name: str, path: Path, entry: dict[str, Any]) -> None:
        """Sends a file, or keeps it if the Hub wants it in the commit itself, as it does with small ones."""
        addition = self.repository.addition(name, path)
        addition.upload_info.sha256 = bytes.fromhex(entry["sha256"])
        self.repository.preupload([addition])
        if addition.path_or_fileobj:  # a file that was sent is let go
            self._contents[name] = path.read_bytes()
        else:
            self._additions[name] = addition

    def record(self, name: str, entry: dict[str, Any]) -> None:
        self.finished[name] = entry
        with failing_safely():
            self._journal.add(name, entry)

    def write_file(self, name: str, content: bytes | Link) -> None:
        if isinstance(content, Link):
            problem = f"`{name}` would be a symbolic link, which the Hub does not have"
            raise UnsupportedInput(problem, hint="write to a local folder, then `llmconv push` it")
        self._contents[name], self.finished[name] = content, file_entry(content)

    def commit(self, manifest: Manifest) -> None:
        """Makes the one commit, and compares what the Hub has then; see `UnfinishedOutput`."""
        manifest.files = dict(self.finished)
        small = {**self._contents, MANIFEST: manifest.encode()}
        if CARD not in self.finished and is_unedited(self.repository.read(CARD)):
            config = parse_object(self._contents.get(CONFIG, b"{}"), CONFIG)
            small[CARD] = model_card(manifest, config, self.target.address.repository)
        additions = [self.repository.addition(name, content) for name, content in small.items()]
        self.repository.preupload(additions)
        deleted = replaced_files(self.repository, {*self.finished, MANIFEST})
        made = f"{manifest.steps[-1]['command']} of {manifest.steps[-1]['source']}" if manifest.steps else "a model"
        done = self.repository.commit([*self._additions.values(), *additions], deleted, f"llmconv: {made}")
        digests = {name: FileDigest(entry["bytes"], entry["sha256"]) for name, entry in manifest.files.items()}
        digests |= {name: digest_of(content) for name, content in small.items()}
        if differing := self.repository.at(done.commit).differing(digests):
            problem = f"commit {done.commit[:12]} on the Hub has other bytes in `{differing[0]}` than were sent"
            raise OutputFailed(problem, hint="run again with `--overwrite`, and report it to the Hub")


# files about a repository, not of its model: they are kept, or replaced by those that the user wrote
PAGES = re.compile(r"(?:README|LICEN[CS]E|NOTICE|USE_POLICY|CITATION)[^/]*|\.git(?:attributes|ignore)", re.IGNORECASE)
WEIGHTS = re.compile(rf".*\.(?:{SUFFIXES}|onnx(?:[._]data)?|h5)(?:\.index\.json)?")


def manifest_of(repository: HubRepository) -> Manifest:
    """The manifest at the head of a branch, an empty one without."""
    content = repository.read(MANIFEST)
    return Manifest() if content is None else parse_manifest(content)


def foreign_files(repository: HubRepository) -> set[str]:
    """Files that llmconv did not make, without those about the repository."""
    made = {MANIFEST, *manifest_of(repository).files}
    return {name for name in repository.state.files if name not in made and not PAGES.fullmatch(name)}


def foreign_weights(repository: HubRepository) -> list[str]:
    """Weights that llmconv did not make, sorted."""
    return sorted(name for name in foreign_files(repository) if WEIGHTS.fullmatch(name))


def require_own_weights(repository: HubRepository, others: Sequence[str] = ()) -> None:
    """Raises InputRefused for a branch with weights, or the files `others`, that llmconv did not make."""
    if repository.state.has_branch and (found := [*foreign_weights(repository), *others]):
        hint = "choose another repository or a new branch (`org/name@branch`), or delete it there yourself"
        raise InputRefused(f"`{repository.address}` contains `{found[0]}`, which llmconv did not make", hint=hint)


def replaced_files(repository: HubRepository, names: Collection[str]) -> list[str]:
    """Files to delete, since the output with the files `names` replaces the one that they belong to."""
    old = [name for name in manifest_of(repository).files if name in repository.state.files]
    inherited = [] if repository.state.has_branch else foreign_weights(repository)
    return sorted({*old, *inherited} - {*names})


UPLOADS = "uploads"  # the folder of journals and shards to send, in the user's cache
JOURNAL_BYTES = 64 << 20  # largest size, in bytes, of a journal that is read


class UploadJournal:
    """The locked journal of an upload (OutputFailed if it is); `resume` keeps entries of a run with the same `key`."""

    def __init__(self, key: str, *, resume: bool) -> None:
        home = user_cache(UPLOADS)
        home.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._name = f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.jsonl"
        self.folder = Folder.open_own(home)  # also of the shard that is made or sent
        self.folder.sweep()
        self._file = self.folder.open_to_append(self._name)
        try:
            fcntl.flock(self._file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._file.close()
            raise OutputFailed("another run uploads the same output", hint="wait until it has ended") from error
        self.entries = self._read() if resume else {}
        os.ftruncate(self._file.fileno(), 0)
        for name, entry in self.entries.items():
            self.add(name, entry)

    def _read(self) -> dict[str, dict[str, Any]]:
        found = {}
        for line in (self.folder.read(self._name, JOURNAL_BYTES) or b"").splitlines():
            try:
                name, size, sha256 = json.loads(line)
            except (ValueError, TypeError, RecursionError):  # cut off by a crash
                continue
            entry = {"bytes": size, "sha256": sha256}
            if isinstance(name, str) and is_inner(name) and is_file_entry(entry):
                found[name] = entry
        return found

    def add(self, name: str, entry: dict[str, Any]) -> None:
        self._file.write(json.dumps([name, entry["bytes"], entry["sha256"]]).encode() + b"\n")
        os.fsync(self._file.fileno())

    def close(self, *, keep: bool) -> None:
        """Unlocks the journal, and removes it unless an interrupted run is to `keep` it."""
        if not keep:
            self.folder.remove(self._name)
        self._file.close()
        self.folder.close()


CARD = "README.md"
# the name in a step of an input that came from the Hub
HUB_SOURCE = re.compile(r"(?P<repository>[\w.-]+/[\w.-]+)@[0-9a-f]{40}(?:/.*)?", re.ASCII)
# command to what it makes of a base model; others leave the function as it is
RELATIONS = {"merge-lora": "finetune", "delta-apply": "finetune", "to-hf": "finetune"}
REPORT_BYTES = 64 << 20
# the end of a card: the sha256 of what stands above it
MARK = b"\n<!-- Written by llmconv, which replaces it as long as it is unedited: sha256 %s -->\n"


def model_card(manifest: Manifest, config: Mapping[str, Any], repository: str, report: Path | None = None) -> bytes:
    """The content of README.md.

    `config` is the folder's `config.json`, empty if it has none; `repository` is `org/name` on the Hub; `report` is the
    `report.json` of `llmconv verify`.
    """
    import yaml  # noqa: PLC0415 - 20 ms that other commands do not pay

    named = []
    for done in manifest.steps:
        named += [HUB_SOURCE.fullmatch(str(name)) for name in (done.get("source"), _options(done).get("base")) if name]
    bases = list(dict.fromkeys(found["repository"] for found in named if found))
    causal = any(str(name).endswith("ForCausalLM") for name in config.get("architectures") or ())
    fields = {
        "base_model": bases[0] if len(bases) == 1 else bases,
        "base_model_relation": _relation(manifest) if bases else "",
        "library_name": "peft" if _is_adapter(manifest) else "transformers" if config else "",
        "pipeline_tag": "text-generation" if causal and not _is_adapter(manifest) else "",
        "tags": ["llmconv", *(["onnx"] if manifest.graphs else [])],
    }
    header = yaml.safe_dump(
        {name: value for name, value in fields.items() if value}, sort_keys=False, allow_unicode=True
    )
    title = repository.rpartition("/")[2]
    parts = [f"---\n{header}---\n", f"# {title}\n", _made(manifest), _verified(report), _usage(manifest, repository)]
    text = "\n".join(part for part in parts if part).encode()
    return text + MARK % hashlib.sha256(text).hexdigest().encode()


def is_unedited(card: bytes | None) -> bool:
    """Whether a card may be replaced: there is none, or `model_card` made it and nobody has changed it since."""
    if card is None:
        return True
    text, begin, end = card.rpartition(MARK.partition(b"%")[0])
    return begin + end == MARK % hashlib.sha256(text).hexdigest().encode()


def _options(done: Mapping[str, Any]) -> Mapping[str, Any]:
    options = done.get("options")
    return options if isinstance(options, dict) else {}


def _relation(manifest: Manifest) -> str:
    """What the model is to its base, by the last step that changed its function; empty if none did."""
    if _is_adapter(manifest):
        return "adapter"
    relation = ""
    for done in manifest.steps:
        options = _options(done)
        command, adapters = done.get("command"), options.get("adapters")
        if command == "export" and options.get("quant"):
            relation = "quantized"
        elif command == "merge-lora" and isinstance(adapters, list) and len(adapters) > 1:
            relation = "merge"
        elif command != "to-hf" or options.get("base"):
            relation = RELATIONS.get(str(command), relation)
    return relation


def _is_adapter(manifest: Manifest) -> bool:
    return ADAPTER_CONFIG in manifest.files


def _made(manifest: Manifest) -> str:
    """The steps that made the model, in order."""
    lines = []
    for number, done in enumerate(manifest.steps, 1):
        given = []
        for name, value in _options(done).items():  # of inputs only the names
            values = value if isinstance(value, list) else [value]
            texts = [str(one["name"] if isinstance(one, dict) and "name" in one else one) for one in values]
            given.append(f"{_code(name)} {_code(', '.join(texts))}")
        line = f"{number}. {_code('llmconv ' + str(done.get('command')))} of {_code(done.get('source'))}"
        lines.append(line + (f": {', '.join(given)}" if given else "") + f" (llmconv {_code(done.get('llmconv'))})")
    steps = "\n".join(lines)
    return f"## How it was made\n\n{steps}\n\nSizes and sha256 of all files are in `llmconv.json`.\n"


def _code(value: object) -> str:
    """A name that may be anyone's, as code, which is neither Markdown nor HTML."""
    return f"`{printable(str(value)).replace('`', chr(39))}`"


def _verified(report: Path | None) -> str:
    if report is None or report.stat().st_size > REPORT_BYTES:
        return ""
    try:
        content = json.loads(report.read_bytes())
        verdict, checks = content["verdict"], [check["verdict"] for check in content["checks"]]
    except (ValueError, LookupError, TypeError, RecursionError):
        return ""
    if verdict not in VERDICTS:
        return ""
    counts = ", ".join(
        f"{checks.count(key)} {word}" for key, word in (("pass", "passed"), ("fail", "differ"), ("skip", "skipped"))
    )
    return (
        "## Verification\n\n"
        f"`llmconv verify` compared the graphs with the eager model: **{verdict.upper()}** ({counts}).\n"
    )


def _usage(manifest: Manifest, repository: str) -> str:
    """How to run it: with llmconv always, with transformers where it has weights for it."""
    if _is_adapter(manifest):
        return f"## How to use it\n\n```sh\nllmconv merge-lora BASE {repository} -o merged\n```\n"
    if "config.json" not in manifest.files:
        return ""
    lines = [f'## How to use it\n\n```sh\nllmconv generate {repository} --prompt "Once upon a time"\n```\n']
    trust = ", trust_remote_code=True" if any(name.endswith(".py") for name in manifest.files) else ""
    if any(name.endswith(".safetensors") for name in manifest.files):
        lines.append(
            "```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
            f'model = AutoModelForCausalLM.from_pretrained("{repository}"{trust})\n'
            f'tokenizer = AutoTokenizer.from_pretrained("{repository}"{trust})\n```\n'
        )
    return "\n".join(lines)
