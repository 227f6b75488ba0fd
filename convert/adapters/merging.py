"""merged: adapters placed on a base, as one lazy checkpoint."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmconv.causal_lm import architecture
from llmconv.checkpoint import (
    OWN_CODE,
    TEMPLATES,
    VOCABULARIES,
    Checkpoint,
    json_object,
    own_file,
    read_json,
    read_side_files,
)
from llmconv.convert.adapters.adapter import Adapter
from llmconv.convert.adapters.combining import Recipe, TaskVectors
from llmconv.convert.adapters.edits import Edits, base_in_memory
from llmconv.convert.adapters.tensor_names import AS_STORED
from llmconv.convert.models import head_and_dtype
from llmconv.convert.models.transformers_source import auto_classes
from llmconv.convert.tokenizers import added_tokens, all_tokens, beyond_rows, read_tokenizer, special_tokens
from llmconv.errors import LlmconvError, MalformedInput, UnsupportedInput, listing
from llmconv.output.plan import json_bytes
from llmconv.tensors import FLOATS, LazyTensor, lists_by_key


def merged(base: Checkpoint, adapters: Sequence[Adapter], recipe: Recipe | None = None) -> tuple[Checkpoint, Edits]:
    """The merged checkpoint, lazy, and the edits of each tensor; by default the sum of all adapters.

    The base is unquantized. Raises MalformedInput for an adapter of another base, UnsupportedInput for a kind of
    adapter or base that cannot be merged.
    """
    recipe = recipe or Recipe((1.0,) * len(adapters))
    # refuses another model type, since shapes of another architecture may fit by chance
    if base.config.get("quantization_config"):
        raise UnsupportedInput(
            "the base is quantized", hint="merge into the unquantized model the adapter was trained on, then quantize"
        )
    own = base.config.get("model_type")
    if other := next((adapter for adapter in adapters if adapter.model_type not in ("", own)), None):
        raise MalformedInput(
            f"`{other.name}` was trained on a {other.model_type}, the base is a {own}",
            hint="give the base that the adapter was trained on",
        )
    memory = base_in_memory(base, head_and_dtype.with_tied_head(base, base.config), adapters)
    stored, base = base, replicated(replace(base, tensors=memory.tensors) if memory else base, adapters)
    embedding = head_and_dtype.find_embedding(base)
    head = head_and_dtype.find_head(base, embedding)
    whole = head_and_dtype.with_tied_head(base, base.config)
    edits = Edits(whole, base.config, naming=memory.naming if memory else AS_STORED)
    if embedding and head not in base and head in edits.tensors:
        edits.tied = (embedding, head)
    vectors = TaskVectors(edits, adapters, recipe.weights, recipe.combination)
    for number in vectors.order:
        edits.place(adapters[number], recipe.weights[number])
    # copies trained rows of the embedding to a tied head, in place (PEFT `TrainableTokensWrapper`, `tied_adapter`)
    tied = edits.tied or (head in edits.tensors and edits.config.get(head_and_dtype.TIE) is True)
    if embedding in edits.tokens and tied and head not in edits.tokens:
        edits.tokens[head] = edits.tokens[embedding]
    config = deepcopy(base.config)
    for adapter in adapters:
        config |= adapter.fields
    resized = fit_vocabulary(edits, embedding, head, config)
    untie(edits, embedding, head, config)
    follow_task(edits, adapters, head, config)
    types = head_and_dtype.stored_types(edits.tensors, config, recipe.dtype) if recipe.dtype != "keep" else {}
    tensors: dict[str, LazyTensor] = {}
    for name, own in edits.tensors.items():
        target = types.get(name, own.dtype) if own.dtype.name in ("float64", *FLOATS) else own.dtype
        combined = name in edits.changes and not vectors.summed
        tensors[name] = vectors.combined(name, edits.current(name), target) if combined else edits.result(name, target)
    if recipe.dtype != "keep":
        config = head_and_dtype.with_dtype(config, tensors)
    if memory:
        tensors, edits = memory.restored(tensors, edits)
    rows = [row for one in edits.tokens.get(embedding or "", []) for row in one.ids]
    trained = None if embedding in edits.whole or embedding in edits.changes else rows
    side_files, notes = side_files_of(stored, adapters, recipe.tokenizer, config, resized=resized, trained=trained)
    edits.warnings.extend(notes)
    return replace(base, tensors=tensors, config=config, side_files=side_files), edits


LAYER = re.compile(r"((?:[A-Za-z_]\w*\.)*(?:layers|h|layer)\.)(\d+)(\..+)")
COUNTS = ("num_hidden_layers", "n_layer", "num_layers")
# Fields with one entry for each layer
LAYER_LISTS = ("layer_types", "mlp_layer_types", "no_rope_layers", "layers_block_type")
MOST = 4096  # maximum number of layers: a short config could ask for more than fit into memory
NUMBERED = ("mlp_only_layers", "moe_layers", "attn_layer_indices")
"""Fields with layer numbers, which are ambiguous for a model with other layers."""


def replicated(base: Checkpoint, adapters: Sequence[Adapter]) -> Checkpoint:
    """The base with replicated layers (PEFT `replicate_layers`); MalformedInput for one that the base does not have."""
    wanted = {adapter.config.layers for adapter in adapters}
    if wanted <= {()}:
        return base
    if len(wanted) > 1:
        raise UnsupportedInput(
            "the adapters have different `layer_replication`", hint="they are of different models; merge one at a time"
        )
    tensors, order, count = _restacked(base.tensors, wanted.pop())
    return replace(base, tensors=tensors, config=_config(base.config, count, order))


def _restacked(
    tensors: Mapping[str, LazyTensor], ranges: Sequence[tuple[int, int]]
) -> tuple[dict[str, LazyTensor], list[int], int]:
    """The tensors under their new layer numbers, the old number of each layer, and the old number of layers."""
    layers = {name: match for name in tensors if (match := LAYER.fullmatch(name))}
    if not (stacks := Counter(match[1] for match in layers.values())):
        raise UnsupportedInput("the base has no numbered layers to replicate", hint="give a decoder of the llama kind")
    prefix = stacks.most_common(1)[0][0]
    layers = {name: match for name, match in layers.items() if match[1] == prefix}
    count = 1 + max(int(match[2]) for match in layers.values())
    if (last := max(stop for _, stop in ranges)) > count:
        raise MalformedInput(
            f"`layer_replication` names layer {last - 1}, the base has {count}",
            hint="the adapter was trained on another model; see its `base_model_name_or_path`",
        )
    if (total := sum(stop - start for start, stop in ranges)) > MOST:
        raise UnsupportedInput(
            f"`layer_replication` makes {total} layers of {count}, more than {MOST}",
            hint="repair `adapter_config.json`, or copy the adapter again",
        )
    order = [layer for start, stop in ranges for layer in range(start, stop)]
    homes = lists_by_key((old, new) for new, old in enumerate(order))
    result: dict[str, LazyTensor] = {}
    for name, tensor in tensors.items():
        if match := layers.get(name):
            result |= {f"{prefix}{new}{match[3]}": tensor for new in homes.get(int(match[2]), [])}
        else:
            result[name] = tensor
    return result, order, count


def _config(config: Mapping[str, Any], count: int, order: Sequence[int]) -> dict[str, Any]:
    result = deepcopy(dict(config))
    for part in (result, result.get("text_config")):
        if not isinstance(part, dict):
            continue
        if set_ := [name for name in NUMBERED if part.get(name)]:
            raise UnsupportedInput(
                f"the base's config numbers its layers in `{set_[0]}`, which replication would change",
                hint="repeat the layers of the base yourself, and remove `layer_replication` from the adapter",
            )
        part |= {name: len(order) for name in COUNTS if name in part}
        part |= {
            name: [part[name][layer] for layer in order]
            for name in LAYER_LISTS
            if isinstance(part.get(name), list) and len(part[name]) == count
        }
    return result


def fit_vocabulary(edits: Edits, embedding: str | None, head: str, config: dict[str, Any]) -> bool:
    """Sets `vocab_size` to a resized embedding's rows; whether it changed. MalformedInput: not embedding and head."""
    sizes = {name: edits.current(name).num_rows for name in (embedding, head) if name and edits.tensors.get(name)}
    if not (changed := [name for name, size in sizes.items() if size != edits.tensors[name].num_rows]):
        return False
    if len(set(sizes.values())) > 1:
        raise MalformedInput(
            f"the adapter resizes `{changed[0]}` to {sizes[changed[0]]} rows, but not both embedding and head",
            hint="they must have one size; save the adapter again with `save_embedding_layers=True`",
        )
    parts = [part for part in (config, config.get("text_config")) if isinstance(part, dict)]
    for part in [part for part in parts if "vocab_size" in part] or parts[:1]:
        part["vocab_size"] = sizes[changed[0]]
    return True


def untie(edits: Edits, embedding: str | None, head: str, config: dict[str, Any]) -> None:
    """Gives a head that is no longer the embedding its own tensor and changes `config`; else removes it, in place."""
    if edits.tied and edits.same(head, embedding):
        del edits.tensors[head]
    elif head in edits.tensors and (edits.touches(head) or edits.touches(embedding)) and head_and_dtype.is_tied(config):
        head_and_dtype.set_everywhere(config, head_and_dtype.TIE, False)


TASKS = {  # PEFT's `task_type` to the table of transformers' classes, and the ending of their names
    "SEQ_CLS": ("SEQUENCE_CLASSIFICATION", "ForSequenceClassification"),
    "TOKEN_CLS": ("TOKEN_CLASSIFICATION", "ForTokenClassification"),
    "QUESTION_ANS": ("QUESTION_ANSWERING", "ForQuestionAnswering"),
}

HEADS = ("score", "classifier", "qa_outputs", "classification_head")
"""How transformers' classes call the module that replaces the output head."""


def follow_task(edits: Edits, adapters: Sequence[Adapter], head: str, config: dict[str, Any]) -> None:
    """Changes `config` to the class of `TASKS` which adapters were trained as, and leaves out the head that it lacks.

    Raises MalformedInput for different tasks or a missing head, UnsupportedInput if transformers has no such class.
    """
    tasks: dict[str, Adapter] = {}
    for adapter in adapters:  # by the config's task or else by the class that PEFT wrapped
        wrapped = adapter.config.base_class if not adapter.config.task else ""
        fits = (task for task, (_, ending) in TASKS.items() if adapter.config.task == task or wrapped.endswith(ending))
        tasks |= {task: adapter for task in list(fits)[:1]}
    if len(tasks) > 1:
        raise MalformedInput(
            f"the adapters were trained for different tasks: {listing(sorted(tasks))}", hint="merge one at a time"
        )
    for task, adapter in tasks.items():
        table, ending = TASKS[task]
        # the last matrix of the head, whose rows are the classes
        heads = [name for name in edits.tensors if name.partition(".")[0] in HEADS and name.endswith(".weight")]
        if not heads:
            raise MalformedInput(
                f"`{adapter.name}` was trained for {task}, and neither its file nor the base contains the head",
                hint="save the adapter with the head in `modules_to_save`; to merge it into the language model alone, "
                "set `task_type` to CAUSAL_LM in its `adapter_config.json`",
            )
        if not architecture(config).endswith(ending):
            model_type = str(config.get("model_type"))
            if model_type not in (classes := auto_classes(table)):
                raise UnsupportedInput(
                    f"transformers has no class for {table.lower().replace('_', ' ')} of type `{model_type[:80]}`",
                    hint="merge it with PEFT's `merge_and_unload`, in the code that trained it",
                )
            config["architectures"] = [classes[model_type]]
            if head in edits.tensors and not edits.touches(head):
                del edits.tensors[head]
                edits.warnings.append(
                    f"`{head}` is left out: OUT is a {architecture(config)}, with the head of `{adapter.name}`"
                )
        labels, count = config.get("id2label"), edits.current(heads[-1]).num_rows
        config.pop("num_labels", None)
        if not isinstance(labels, dict) or len(labels) != count:
            named = {str(label): f"LABEL_{label}" for label in range(count)}
            config |= {"id2label": named, "label2id": {text: int(label) for label, text in named.items()}}


# Prefixes of the names of tokenizer files
TOKENIZER = (
    "tokenizer",
    "special_",
    "added_",
    "vocab",
    "merges",
    "spiece",
    "sentencepiece",
    "chat_template",
    *OWN_CODE,
    TEMPLATES,
)
GENERATION = "generation_config.json"
# Fields of `generation_config.json` without a meaning for decoding
NOT_OF_DECODING = ("transformers_version", "_from_model_config")
TEMPLATE, OLD_TEMPLATE, CONFIG = "chat_template.jinja", "chat_template.json", "tokenizer_config.json"

SideFiles = dict[str, bytes]


def side_files_of(
    base: Checkpoint,
    adapters: Sequence[Adapter],
    tokenizer: Path | None,
    config: dict[str, Any],
    *,
    resized: bool,
    trained: Sequence[int] | None,
) -> tuple[SideFiles, list[str]]:
    """The side files of the merged model, and warnings about tokenizers and chat templates that differ.

    The ids of special tokens in `config` (changed in place) and in `generation_config.json` follow the tokenizer, if it
    is not the base's: the user's file or folder, which replaces all others (InputRefused if it is none), or that of an
    adapter which changed the vocabulary (`resized`), or trained rows (`trained`, None: all) of tokens that it added.
    """
    others = {name: content for name, content in base.side_files.items() if not name.startswith(TOKENIZER)}
    if tokenizer:
        given = read_tokenizer(tokenizer)
        return _with_ids(base.side_files, others | given, config), beyond_rows(given, config)
    if not (own := [(adapter, files) for adapter in adapters if (files := _tokenizer(adapter, needed=resized))]):
        return dict(base.side_files), [*_other_tokens(base, [(adapter, {}) for adapter in adapters])]
    adapter, files = own[0]
    if resized:
        return _with_ids(base.side_files, others | files, config), []
    if not base.side_files.keys() & VOCABULARIES and files.keys() & VOCABULARIES:
        note = f"the base has no tokenizer; it is taken from the adapter `{adapter.name}`"
        return _with_ids(base.side_files, others | files, config), [note]
    if len(own) == len(adapters) == 1 and (more := _trained_tokens(base.side_files, files, trained)):
        note = (
            f"the adapter `{adapter.name}` trained {len(more)} tokens that the base's tokenizer does not have "
            f"({listing(more)}); its tokenizer is taken"
        )
        return _with_ids(base.side_files, others | files, config), [note]
    kept, notes = _with_template(base, own)
    return kept, [*notes, *_other_tokens(base, own)]


def _trained_tokens(base: Mapping[str, bytes], files: SideFiles, trained: Sequence[int] | None) -> list[str]:
    """The tokens that an adapter added, if it trained their rows and the base's tokens keep their ids."""
    if trained == [] or "tokenizer.json" not in base or "tokenizer.json" not in files:
        return []
    try:
        before, after = all_tokens(base), all_tokens(files)
    except MalformedInput:
        return []
    more = {text: number for text, number in after.items() if text not in before}
    same = all(after.get(text) == number for text, number in before.items()) and not {*more.values()} & {
        *before.values()
    }
    return sorted(more) if same and (trained is None or {*more.values()} <= {*trained}) else []


def _other_tokens(base: Checkpoint, own: Sequence[tuple[Adapter, SideFiles]]) -> Iterator[str]:
    """A warning for each adapter saved with other special or added tokens (at which generation would not stop)."""
    for adapter, files in own:
        if found := [*_token_differences(base.side_files, files), *_generation_differences(base, adapter)]:
            yield (
                f"the adapter `{adapter.name}` was saved with other settings than the base, whose are kept: "
                f"{'; '.join(found)}; `--tokenizer {adapter.path}` takes the tokenizer from there, with its ids"
            )


def _token_differences(base: Mapping[str, bytes], files: Mapping[str, bytes]) -> list[str]:
    if not any(name in files for name in (CONFIG, "special_tokens_map.json", "tokenizer.json", "added_tokens.json")):
        return []
    try:
        mine, others = special_tokens(files), special_tokens(base)
        added = added_tokens(files, base)
    except MalformedInput:  # a tokenizer in a form that is not compared
        return []
    changed = [
        f"`{kind}` {text!r} (base: {others[kind][0]!r})" if kind in others else f"`{kind}` {text!r} (base: none)"
        for kind, (text, _) in mine.items()
        if text != others.get(kind, ("",))[0]
    ]
    return [*changed, *([f"{len(added)} added tokens, {listing(added)}"] if added else [])]


def _generation_differences(base: Checkpoint, adapter: Adapter) -> list[str]:
    """The fields of the adapter's `generation_config.json` that the base's has with another value, or not at all."""
    path = adapter.path / GENERATION
    if not path.is_file():
        return []
    try:
        mine = read_json(own_file(adapter.path, GENERATION))
        others = json_object(base.side_files.get(GENERATION, b"{}"))
    except LlmconvError:
        return []
    fields = [name for name, value in mine.items() if name not in NOT_OF_DECODING and value != others.get(name)]
    return [f"{listing(fields)} in `{GENERATION}`"] if fields else []


def _with_ids(base: Mapping[str, bytes], files: SideFiles, config: dict[str, Any]) -> SideFiles:
    """The files of another tokenizer, with those ids of its tokens in configs that differ; a list keeps its others."""
    try:
        mine, others = special_tokens(files), special_tokens(base)
    except MalformedInput:
        return files
    ids = {f"{kind}_id": number for kind, (_, number) in mine.items() if number is not None}
    ids = {name: own for name, own in ids.items() if others.get(name.removesuffix("_id"), ("", None))[1] != own}
    if not others:  # without a tokenizer the base's ids are those of its config
        ids = {name: number for name, number in ids.items() if config.get(name) is not None}
    for part in (config, config.get("text_config")):
        if isinstance(part, dict):
            _set_ids(part, ids if part is config else {name: ids[name] for name in ids if name in part})
    if GENERATION not in files or not ids:
        return files
    generation = json_object(files[GENERATION])
    _set_ids(generation, ids)
    return files | {GENERATION: json_bytes(generation)}


def _set_ids(fields: dict[str, Any], ids: Mapping[str, int]) -> None:
    for name, number in ids.items():
        old = fields.get(name)
        if not isinstance(old, list):
            fields[name] = number
        elif number not in old:
            fields[name] = [number, *old]


def _with_template(base: Checkpoint, own: Sequence[tuple[Adapter, SideFiles]]) -> tuple[SideFiles, list[str]]:
    """The base's files; if it has no chat template, with that of the first adapter that has one."""
    kept, template = dict(base.side_files), template_of(base.side_files)
    for adapter, files in own:
        if not (found := template_of(files)) or found == template:
            continue
        if template:
            hint = f"`--tokenizer {adapter.path}` takes the tokenizer from there"
            return kept, [
                f"the adapter `{adapter.name}` has another chat template than the base, which is kept; {hint}"
            ]
        kept[TEMPLATE] = found.encode()
        return kept, [f"the base has no chat template; that of the adapter `{adapter.name}` is written with it"]
    return kept, []


def _tokenizer(adapter: Adapter, *, needed: bool) -> SideFiles:
    """The tokenizer files in an adapter's folder; unreadable ones are ignored unless they are needed."""
    try:
        return {name: data for name, data in read_side_files(adapter.path).items() if name.startswith(TOKENIZER)}
    except LlmconvError:
        if needed:
            raise
        return {}


def template_of(files: Mapping[str, bytes]) -> str:
    """The chat template in tokenizer files; empty if there is none, or if there are several named ones."""
    if TEMPLATE in files:
        return files[TEMPLATE].decode(errors="replace")
    for name in (OLD_TEMPLATE, CONFIG):
        found = json_object(files.get(name, b"{}")).get("chat_template")
        if isinstance(found, str) and found:
            return found
    return ""
