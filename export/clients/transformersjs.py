"""transformers.js: `onnx/model.onnx` and its data `onnx/model.onnx_data`, …, which link to the graph and the weights.

The name of the graph ends with that of its `dtype`, such as `onnx/model_q4.onnx` (its `src/utils/dtypes.js`, 4.3). The
client requires the folder `onnx/`, and a graph may refer to data in its own folder or below only. But onnxruntime
follows links of the kind that the Hugging Face cache has: if the graph is a link, its data may be next to the target
of the link. So nothing is copied; a program that uploads or copies the folder follows the links and gets plain files,
which the client also opens. (Hard links would work too, but then onnx refuses the weights of all graphs in the
folder.) A folder without the required `generation_config.json` gets one with what its config says.

A model with images has three graphs with such links, and fields that the client's processor reads differently from
transformers' (`src/models/session_config.js`, `src/models/llava/`, `src/configs.js`, `image_processing_auto.js`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx

from llmconv.errors import UnsupportedInput, UsageProblem
from llmconv.export.clients import (
    Client,
    ClientModel,
    EncodedGraphs,
    FileContent,
    warn_of_settings,
    weight_files,
)
from llmconv.export.clients.image_parts import CONFIG, PREPROCESSOR, PROCESSOR, Edits, ImageModel, take_float32_pixels
from llmconv.files.safe_folder import Link
from llmconv.output.manifest import EMBEDDINGS_ROLE, VISION_ROLE
from llmconv.output.plan import json_bytes
from llmconv.progress import warn

IMAGE_MODELS = frozenset({"llava"})  # types that the client has a class for, among those whose vision tower is exported
TEXT_MODELS = frozenset(
    """
    afmoe apertus arcee bloom codegen cohere cohere2 deepseek_v3 deepseek_v4 ernie4_5 exaone falcon falcon_h1 gemma
    gemma2 gemma3 gemma3_text gemma3n gemma4 glm glm_moe_dsa gpt2 gpt_bigcode gpt_neo gpt_neox gpt_oss gptj granite
    granitemoehybrid helium hrm_text hunyuan_v1_dense jais lfm2 lfm2_moe llama llama4_text mbart ministral
    ministral3 mistral mistral4 mobilellm modernbert-decoder mpt nanochat nemotron_h olmo olmo2 olmo3 olmo_hybrid
    openelm opt phi phi3 phi3_v qwen2 qwen2_5_vl qwen2_moe qwen2_vl qwen3 qwen3_5 qwen3_5_moe qwen3_5_text qwen3_moe
    qwen3_next qwen3_vl qwen3_vl_moe smollm3 solar_open stablelm starcoder2 trocr vaultgemma youtu zaya
    """.split()  # noqa: SIM905 - seventy lines otherwise
)
"""Types that the client's `AutoModelForCausalLM` knows (`src/models/registry.js`, 4.3.1); it refuses others."""

PARTS = {VISION_ROLE: "vision_encoder", EMBEDDINGS_ROLE: "embed_tokens", "unified": "decoder_model_merged"}
"""The client's name of each graph, by role."""

IMAGE_PROCESSORS = {"LlavaImageProcessor": "CLIPImageProcessor"}
"""Image processors that the client has under another name."""

TEXT_FIELDS = ("model_type", "num_hidden_layers")
"""Fields of `text_config` from which the client derives the names of the cache; it has no defaults for them."""


def variant(role: str, encoded: bytes) -> bytes:
    """The encoded graph of a role, a key of `PARTS`, with the inputs that the client feeds."""
    if role != VISION_ROLE:
        return encoded
    model = onnx.load_from_string(encoded)
    take_float32_pixels(model)
    return bytes(model.SerializeToString(deterministic=True))


def preprocessor(images: ImageModel) -> dict[str, Any]:
    """The content of the `preprocessor_config.json` that the client requires; empty if there is one, or no processor.

    transformers 5 writes it into `processor_config.json`, and reads it there first.
    """
    fields = images.processor.get("image_processor")
    if images.has_preprocessor or not isinstance(fields, dict):
        return {}
    kind = str(fields.get("image_processor_type", "LlavaImageProcessor"))
    return {
        **fields,
        "image_processor_type": IMAGE_PROCESSORS.get(kind, kind),
        "processor_class": images.processor.get("processor_class", "LlavaProcessor"),
    }


def edits(images: ImageModel) -> Edits:
    """Fields that the client needs: it has no defaults, and does not subtract the token of a tower's class.

    transformers reads them with the same result: `num_additional_image_tokens` is counted with the `default` strategy
    less one, which the client's `LlavaProcessor` does not do.
    """
    found: dict[str, dict[str, Any]] = {}
    text = images.fields.get("text_config")
    own = images.config.text_config
    missing = {name: getattr(own, name) for name in TEXT_FIELDS if isinstance(text, dict) and name not in text}
    if missing:
        found[CONFIG] = {"text_config": {**images.fields["text_config"], **missing}}
    if images.processor.get("vision_feature_select_strategy") == "default":
        count = int(images.processor.get("num_additional_image_tokens") or 0)
        found[PROCESSOR] = {"num_additional_image_tokens": count - 1, "vision_feature_select_strategy": "full"}
    return found


GRAPH = "transformersjs.graph"  # not `.onnx`: opened under this name, the graph does not find its data
DTYPES = {"float32": "fp32", "float16": "fp16"}  # the client's `dtype` by precision, for weights as they are
QUANTIZED_DTYPES = {"float32": "q4", "float16": "q4f16"}  # the client's `dtype` by precision, for weights of 4 bits
SUFFIXES = {"fp32": "", "fp16": "_fp16", "q4": "_q4", "q4f16": "_q4f16", "q8": "_quantized"}
"""End of the graph's name by `dtype`; what the graph computes in, the client reads from its inputs."""

MAX_DATA_FILES = 100  # `MAX_EXTERNAL_DATA_CHUNKS` of transformers.js 4.3


FOLLOWS = frozenset(
    """
    do_sample temperature top_k repetition_penalty no_repeat_ngram_size bad_words_ids min_length min_new_tokens
    forced_bos_token_id forced_eos_token_id suppress_tokens begin_suppress_tokens
    """.split()  # noqa: SIM905 - twelve lines otherwise
)
"""Generation settings that the client applies (`src/models/modeling_utils.js`, `_get_logits_processor`, and
`src/generation/logits_sampler.js`, 4.3.1): its filter by `top_p` is not called, and its beams are not searched."""


def files(model: ClientModel, graphs: EncodedGraphs) -> dict[str, FileContent]:
    warn_of_settings(model, "transformers.js 4.3", FOLLOWS)
    made: dict[str, FileContent] = {}
    for role, stem in _stems(model).items():
        weights = _weights(model, graphs, role)
        if len(weights) > MAX_DATA_FILES:
            raise UsageProblem(
                f"transformers.js supports at most {MAX_DATA_FILES} data files, the weights are in {len(weights)}",
                hint="write them into fewer files: `-o OUT --max-shard-size SIZE`",
            )
        linked = linked_graph(model, stem)
        names = dict(zip(weights, data_names(len(weights), linked), strict=True))
        file, graph = graph_file(stem), onnx.load_from_string(variant(role, graphs.encoded[role]))
        for entry in (entry for tensor in graph.graph.initializer for entry in tensor.external_data):
            entry.value = names[entry.value] if entry.key == "location" else entry.value
        made[file] = bytes(graph.SerializeToString(deterministic=True))
        made[f"onnx/{linked}"] = Link(f"../{file}")
        made |= {f"onnx/{name}": Link(f"../{target}") for target, name in names.items()}
    if model.generation is None:  # what transformers itself derives from a config
        made["generation_config.json"] = json_bytes({"_from_model_config": True, **model.settings})
    if model.images and (content := preprocessor(model.images)):
        made[PREPROCESSOR] = json_bytes(content)
    return made


def _stems(model: ClientModel) -> dict[str, str]:
    """The client's name of each graph without the suffix of its `dtype`, by role."""
    return PARTS if model.images else {"unified": "model"}


def _weights(model: ClientModel, graphs: EncodedGraphs, role: str) -> Sequence[str]:
    """The files of weights of a graph; each session of the client loads its own."""
    return weight_files(onnx.load_from_string(graphs.encoded[role])) if model.images else graphs.weights


def config(model: ClientModel, graphs: EncodedGraphs) -> dict[str, Any]:
    """What the client downloads and opens if a call gives no `dtype`; local data are found by onnxruntime itself."""
    dtype = client_dtype(model)
    counts = {linked_graph(model, s): len(_weights(model, graphs, role)) for role, s in _stems(model).items()}
    content: dict[str, Any] = {"dtype": dtype, "use_external_data_format": counts}
    if model.precision != "float32":  # before 4.0 the client reads the element type of the cache here
        content["kv_cache_dtype"] = {dtype: model.precision}
    return {"transformers.js_config": content}


def client_dtype(model: ClientModel) -> str:
    """The client's name of the graph's variety, such as `q4`."""
    if model.quant == "int8":
        return "q8"
    return (QUANTIZED_DTYPES if model.quant else DTYPES)[model.precision]


def linked_graph(model: ClientModel, stem: str = "model") -> str:
    """Name in `onnx/` of the graph that the client calls `stem`."""
    return f"{stem}{SUFFIXES[client_dtype(model)]}.onnx"


def graph_file(stem: str) -> str:
    return GRAPH if stem == "model" else f"transformersjs-{stem}.graph"


def file_names(model: ClientModel) -> tuple[str, ...]:
    """The graphs, and the links to them and to the first file of weights."""
    graphs = {stem: linked_graph(model, stem) for stem in _stems(model).values()}
    names = ((graph_file(stem), f"onnx/{name}", f"onnx/{name}_data") for stem, name in graphs.items())
    return tuple(name for part in names for name in part)


def check(model: ClientModel) -> None:
    if model.precision not in DTYPES:
        raise UnsupportedInput(
            f"transformers.js does not run {model.precision} graphs", hint="give `--precision float16 -o OUT`"
        )
    if not model.images and (kind := model.config.model_type) not in TEXT_MODELS:
        warn(f"transformers.js 4.3 has no class for `{kind}`: `AutoModelForCausalLM` refuses the folder")


def data_names(count: int, graph: str = "model.onnx") -> Sequence[str]:
    """`model.onnx_data`, `model.onnx_data_1` and so on."""
    return [f"{graph}_data" + (f"_{number}" if number else "") for number in range(count)]


CLIENT = Client(
    name="transformersjs",
    title="transformers.js: onnx/model.onnx and onnx/model.onnx_data, which are links",
    roles=("unified",),
    supports=(frozenset({"unified"}),),
    adds_graphs=True,
    reads_tokenizer_json=True,
    image_models=IMAGE_MODELS,
    check=check,
    file_names=file_names,
    files=files,
    config=config,
    edits=lambda model: edits(model.images) if model.images else {},
    divides_weights=True,
)
