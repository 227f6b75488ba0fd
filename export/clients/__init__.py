"""What each client needs besides the graphs: one file per client in this folder, found by listing it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import onnx

from llmconv.causal_lm import GENERATION, SPECIAL_TOKENS, generation_settings
from llmconv.errors import UnsupportedInput, UsageProblem
from llmconv.export.input_map import InputMap, Port
from llmconv.files.safe_folder import Link
from llmconv.plugins import each_plugin
from llmconv.progress import warn

if TYPE_CHECKING:
    from llmconv.export.clients.image_parts import Edits, ImageModel

ROLES = ("prefill", "decode", "unified")
DEFAULT = "onnxruntime"

FileContent = bytes | Link


@dataclass(frozen=True)
class ClientModel:
    """The description of the model that a client's functions receive."""

    config: Any
    input_map: InputMap
    generation: Mapping[str, Any] | None = None  # the content of `generation_config.json`, None if the file is missing
    cache: str = "growing"  # `growing` or `shared-buffer`
    precision: str = "float32"  # dtype that the graphs compute in
    target: str | None = None  # runtime of the graphs, such as `ort-cuda`; None for any
    quant: str | None = None  # preset of quantized weights, such as `int4`; None for weights as they are
    # the whole model, if its vision tower is exported too; None for a language model alone
    images: ImageModel | None = None
    roles: tuple[str, ...] = ()  # the decoder's graphs that are exported
    fields: Mapping[str, Any] = field(default_factory=dict)  # the content of `config.json`

    @property
    def settings(self) -> dict[str, Any]:
        """See `generation_settings`."""
        return generation_settings(self.fields, self.generation)


@dataclass(frozen=True)
class EncodedGraphs:
    """The graphs of one export, bound to weight files in the same folder: bytes and file names by role."""

    encoded: Mapping[str, bytes]
    files: Mapping[str, str]
    weights: tuple[str, ...]

    def past(self) -> list[Port]:
        """The inputs of past keys and values, with the axes that the graph declares."""
        graph = onnx.load_from_string(next(iter(self.encoded.values()))).graph
        return [
            Port(port.name, "", tuple(dim.dim_param or dim.dim_value for dim in port.type.tensor_type.shape.dim))
            for port in graph.input
            if port.name.startswith("past_key_values.")
        ]


@dataclass(frozen=True)
class Client:
    """One client; each file of this folder defines one as its constant `CLIENT`."""

    name: str  # value of `--layout`, equal to the file's name
    title: str
    roles: tuple[str, ...]  # the graphs to write if the user asks for none
    # sets of graphs that the client can run, the preferred set first; empty for any graphs
    supports: tuple[frozenset[str], ...] = ()
    adds_graphs: bool = False  # add the preferred set to graphs that the client cannot run; otherwise refuse them
    caches: tuple[str, ...] = ("growing",)
    # it reads the tokenizer of `tokenizer.json` alone
    reads_tokenizer_json: bool = False
    # the types of models whose vision tower and embedding table it runs together with the decoder
    image_models: frozenset[str] = frozenset()
    # raises InputRefused for a model that the client cannot run
    check: Callable[[ClientModel], None] = lambda model: None
    # paths of the files from `files`, apart from the graphs themselves, for the description of a model
    file_names: Callable[[ClientModel], tuple[str, ...]] = lambda model: ()
    # content by path in the folder; includes a graph if the client needs a variant of it
    files: Callable[[ClientModel, EncodedGraphs], Mapping[str, FileContent]] = lambda model, graphs: {}
    # fields to add to the `config.json` of a new folder; that of a model folder is never changed
    config: Callable[[ClientModel, EncodedGraphs], Mapping[str, Any]] = lambda model, graphs: {}
    # fields that files of the model must have for this client; a new folder gets them
    edits: Callable[[ClientModel], Edits] = lambda model: {}
    # it loads the weight files of each graph separately, so graphs of a new folder share few files
    divides_weights: bool = False


OF_BEAMS = {"early_stopping", "length_penalty", "num_beam_groups", "diversity_penalty"}
OF_SAMPLES = {"temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff"}
LENGTHS = {"max_new_tokens", "max_length"}  # which a program sets itself


def warn_of_settings(model: ClientModel, client: str, follows: Collection[str]) -> None:
    """Warns of fields of `generation_config.json`, or without it of `config.json`, that change tokens elsewhere.

    `follows` are those that the loop of `client` has; those of beams have no effect without them, nor do those of
    samples without `do_sample`.
    """
    given = model.settings
    others = GENERATION.keys() - {*follows, *SPECIAL_TOKENS, *LENGTHS, *OF_BEAMS}
    others -= set() if given.get("do_sample") else OF_SAMPLES
    lost = sorted(name for name in others if given.get(name) not in (None, GENERATION[name], [], {}))
    if lost:
        file = "generation_config.json" if model.generation is not None else "config.json"
        warn(
            f"{client} has no {', '.join(f'`{name}`' for name in lost)} of {file}: its texts "
            "differ from those of transformers and `llmconv generate` unless your program does what they say"
        )


def weight_files(model: onnx.ModelProto) -> list[str]:
    """The weight files that a graph maps, in order."""
    pairs = (pair for tensor in model.graph.initializer for pair in tensor.external_data)
    return sorted({pair.value for pair in pairs if pair.key == "location"})


@lru_cache(maxsize=1)
def known_clients() -> dict[str, Client]:
    return dict(each_plugin(__name__, "CLIENT", Client))


def find_clients(names: Sequence[str]) -> list[Client]:
    """The clients with these names, each once; the default client without names; UsageProblem for an unknown one."""
    for name in names:
        if name not in known_clients():
            raise UsageProblem(f"unknown layout `{name}`", hint=f"one of: {', '.join(known_clients())}")
    return [known_clients()[name] for name in dict.fromkeys(names or (DEFAULT,))]


def roles_for(clients: Sequence[Client], asked: Sequence[str]) -> list[str]:
    """The graphs to write, in the order of `ROLES`; the clients decide if none are asked for.

    Raises UsageProblem: a client cannot run the graphs asked for.
    """
    wanted = set(asked) or {role for client in clients for role in client.roles}
    for client in clients:
        if client.supports and not any(graphs <= wanted for graphs in client.supports):
            if not client.adds_graphs:
                raise UsageProblem(
                    f"layout `{client.name}` cannot use the {sorted(wanted)[0]} graph alone",
                    hint="give `--unified`, or `--prefill --incremental`, or none of them",
                )
            wanted |= client.supports[0]
    return [role for role in ROLES if role in wanted]


@dataclass(frozen=True)
class ClientFiles:
    """The files that the chosen clients need besides the graphs of one model."""

    clients: Sequence[Client]
    model: ClientModel

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for client in self.clients for name in client.file_names(self.model))

    @property
    def divide_weights(self) -> bool:
        """Whether graphs of a model with images should have weight files of their own."""
        return bool(self.model.images) and any(client.divides_weights for client in self.clients)

    def check(self, unsupported: str, *, takes_embeddings: bool) -> None:
        """Checks that every client can run the graphs.

        `unsupported`: an option that only llmconv's own runner supports; empty if none is given. `takes_embeddings`:
        whether the graphs take embeddings instead of tokens. Raises UsageProblem: an option that a client does not
        support; InputRefused: a client cannot run this model.
        """
        for client in self.clients:
            if client.name == DEFAULT:
                continue
            cache = self.model.cache
            reason = unsupported or (f"a {cache} cache" if cache not in client.caches else "")
            if reason:
                raise UsageProblem(f"layout `{client.name}` does not support {reason}", hint="leave out one of them")
            images = self.model.images  # such a client runs the parts of the model itself
            if takes_embeddings and images is None:
                raise UnsupportedInput(
                    f"layout `{client.name}` supports graphs that take tokens, and these take embeddings",
                    hint=f"leave out `--layout {client.name}`, or `--embeds`",
                )
            if takes_embeddings and images and images.model_type not in client.image_models:
                known = ", ".join(sorted(client.image_models)) or "none"
                raise UnsupportedInput(
                    f"layout `{client.name}` does not support images of the model type `{images.model_type}`",
                    hint=f"leave out `--layout {client.name}`; types with images that it supports: {known}",
                )
            client.check(self.model)

    def files(self, graphs: EncodedGraphs) -> dict[str, FileContent]:
        """Content of all files by path in the folder; may include a variant of a graph under the graph's own name."""
        return {path: content for client in self.clients for path, content in client.files(self.model, graphs).items()}

    def config(self, graphs: EncodedGraphs) -> dict[str, Any]:
        return {name: value for client in self.clients for name, value in client.config(self.model, graphs).items()}

    def edits(self) -> dict[str, dict[str, Any]]:
        """Fields that files of the model must have for the clients, by file."""
        found: dict[str, dict[str, Any]] = {}
        for client in self.clients:
            for name, fields in client.edits(self.model).items():
                found[name] = {**found.get(name, {}), **fields}
        return found
