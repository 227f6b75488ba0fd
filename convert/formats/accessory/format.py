"""LLaMA2-Accessory: a folder of `consolidated.NN-of-MM.model.pth` shards, its `llama_peft` adapters, and its deltas.

Layout (Alpha-VLLM/LLaMA2-Accessory `accessory/util/misc.py`, `save_checkpoint`): `{"model": {"llma.…": tensor}}` per
model-parallel rank, with or without `config.json` and `meta.json`.

With `--only_save_trainable` a rank has only what was trained, LoRA (`model/peft.py`), biases and norms: `lora_a`
[r, in], `lora_b` [out, r], no alpha, so the update is B·A. Every linear layer has a bias. Rows of queries and keys are
in Meta's order.

Deltas (`tools/weight_operate.py`), `consolidated.NN-of-MM.model-diff.pth`: tuned − base, subtracted in float32 and
stored in float16; what the base does not have (LoRA, biases) is stored whole, what the delta does not have stays.
Reading joins base (of any format) and delta first, so that they may be split differently, and adds in float32 with one
rounding; upstream's sum is float16. Written files pair with those of the base: in Meta's layout, and as many.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from llmconv.checkpoint import Checkpoint, read_json, read_side_files
from llmconv.convert.adapters import other_tools
from llmconv.convert.adapters.adapter import Adapter
from llmconv.convert.algebra import LAYER_NUMBER, fitting, rename, reordered, rope_order, zeros
from llmconv.convert.deltas import DeltaFormat, arithmetic
from llmconv.convert.formats import Format
from llmconv.convert.formats.accessory import config as configs
from llmconv.convert.formats.accessory import read
from llmconv.convert.formats.meta import MetaTokenizer, find_tokenizer, tokenizer_for
from llmconv.convert.models.config_file import plain_fields
from llmconv.convert.models.head_and_dtype import settle_head, with_dtype
from llmconv.convert.state_dicts.files import training_files_in
from llmconv.convert.tokenizers import special_ids
from llmconv.errors import InputRefused, MalformedInput, UnsupportedInput, listing
from llmconv.files.torch_writer import torch_pieces
from llmconv.output.plan import Plan, Shard
from llmconv.tensors import DType, LazyTensor, cast


def _open(path: Path, config: Mapping[str, Any], tokenizer: Path | None) -> Checkpoint:
    base, drop = Path(config["base"]) if "base" in config else None, bool(config.get("drop"))
    own, base_shards = read.open_shards(path), read.open_shards(base) if base else []
    # `rope_scaling` is Accessory's field, unless it is Hugging Face's object
    objects = {name for name, value in config.items() if name == "rope_scaling" and isinstance(value, Mapping)}
    given = {name: value for name, value in config.items() if name in configs.FIELDS - objects}
    stored = (_stored_params(base) if base else {}) | _stored_params(path)
    params = configs.read_params(stored | given, read.plugin_family(path, chain(*own, *base_shards)), path.name)
    whole = _join(path, own, params)
    if base:
        # as in upstream's loader with a list of checkpoints: later tensors replace those of the base
        whole = _join(base, base_shards, params) | whole
    before = list(whole)
    warnings = read.leave_out(whole, params.family, path.name, drop=drop)
    lost = [name for name in before if name not in whole]
    if not any(name.startswith(("tok_embeddings.", "word_embeddings.", "embedding.")) for name in whole):
        raise InputRefused(
            f"`{(base or path).name}` is not a whole model: it holds only the {len(whole)} tensors that were trained",
            hint="give the folder of `consolidated.…` shards that training started from with `--base`",
        )
    tensors = read.to_hugging_face(whole, params, path.name)
    if pairs := sum(name.endswith(".lora_a.weight") for name in whole):
        warnings.append(f"merged {pairs} LoRA pairs as B·A; Accessory's LoRA has no alpha")
    settings = _config(path, params, tensors)
    tokens, more = _tokenizer(path, tokenizer, base, settings["vocab_size"])
    kept = read.EXTRA_FILES if tokenizer is None else ("generation_config.json",)
    extra_files = {name: content for name, content in read_side_files(path).items() if name in kept}
    others = {name: value for name, value in config.items() if name not in (*given, *FORMAT.options)}
    extra = plain_fields(others, warnings)
    norms = [name for name in ("norm.weight", "ln_f.weight") if own and name in own[0]]
    if any(len({shard[name].read().tobytes() for shard in own}) > 1 for name in norms):
        warnings.append("the norms differ between shards; those of shard 0 are used, as upstream does")
    settings |= {"bos_token_id": tokens.bos, "eos_token_id": tokens.eos} | extra
    dropped = (*([f"{len(lost)} tensors: {read.kinds(lost)}"] if lost else []), *training_files_in(path))
    rest = ((*warnings, *more), "", len(own) + len(base_shards), dropped)
    side_files = {**extra_files, **tokens.files}
    return Checkpoint(path, FORMAT.name, tensors, settings, side_files, *rest, source_type=params.family)


def _stored_params(folder: Path) -> dict[str, Any]:
    """The content of Accessory's `config.json` or Meta's `params.json`."""
    file = next((folder / name for name in ("config.json", "params.json") if (folder / name).is_file()), None)
    content = read_json(file) if file else {}
    return dict(content["model"]) if isinstance(content.get("model"), Mapping) else content


def _join(
    folder: Path, shards: Sequence[dict[str, LazyTensor]], params: configs.AccessoryParams
) -> dict[str, LazyTensor]:
    if params.family == "internlm" and len(shards) > 1:
        raise UnsupportedInput(
            f"`{folder.name}` is an InternLM in {len(shards)} shards, which upstream's own code cannot run",
            hint="give the original checkpoint in one shard",
        )
    return read.join(shards, params.copied, params.experts, folder.name)


def _config(path: Path, params: configs.AccessoryParams, tensors: dict[str, LazyTensor]) -> dict[str, Any]:
    """The config; its sizes are compared with the tensors."""
    embedding = "transformer.word_embeddings.weight" if params.family == "falcon" else "model.embed_tokens.weight"
    settings = configs.to_config(params, tensors[embedding].num_rows, path.name)
    if settings["model_type"] == "llama":
        settings |= {switch: configs.has_biases(tensors, layers) for switch, layers in configs.SWITCHES.items()}
    return {**settings, "tie_word_embeddings": None}  # always stored as two matrices: the values decide


def _tokenizer(path: Path, given: Path | None, base: Path | None, vocabulary: int) -> tuple[MetaTokenizer, list[str]]:
    file = given or _find_tokenizer(path) or (_find_tokenizer(base) if base else None)
    tokens, warnings = tokenizer_for(file, vocabulary, path.name, since_3_1=False)
    if file and tokens.eos is None:
        bos, eos = special_ids(tokens.files)
        # a tokenizer without a token for the beginning begins with that for the end (upstream `model/tokenizer.py`)
        tokens = replace(tokens, bos=eos if bos is None else bos, eos=eos)
    return tokens, warnings


def _find_tokenizer(folder: Path) -> Path | None:
    """In upstream's order: `tokenizer.model`, else the folder if it has a Hugging Face tokenizer."""
    if (folder / "tokenizer.json").is_file() and not (folder / "tokenizer.model").is_file():
        return folder
    return find_tokenizer(folder)


FORMAT = Format(
    name="accessory",
    title="LLaMA2-Accessory: a folder of `consolidated.NN-of-MM.model.pth`",
    covers="any number of shards, whole or (with `--base`) only what was trained; the plugins `llama`, `llama_peft`, "
    "`mixtral`, `internlm`, `falcon`, and the language model of the others with `--drop`",
    detect=read.holds_shards,
    open=_open,
    options=("base", "drop"),
    peek=read.peek,
    save=read.save,
)


FACTOR = re.compile(r"(?P<module>.+)\.(?P<part>lora_[ab])\.weight")
QUERY_OR_KEY = re.compile(r"\.self_attn\.[qk]_proj(?:\.bias)?$")
DESCRIPTION = "a LLaMA2-Accessory model of the base's kind"


def open_accessory_adapter(path: Path, base: Checkpoint, alpha: float | None = None) -> Adapter:
    """Opens what an Accessory run trained, from the folder of an epoch; LoRA pairs have no `alpha`.

    Raises InputRefused for a whole model, MalformedInput for another base, UnsupportedInput for another family, or
    biases that the base cannot have.
    """
    shards = read.open_shards(path)
    family = read.plugin_family(path, (name for shard in shards for name in shard))
    kind = str(base.config.get("model_type"))
    if (family, kind) not in (("llama", "llama"), ("llama", "mistral"), ("mixtral", "mixtral")):
        raise UnsupportedInput(
            f"`{path.name}` holds trained parameters of a {family}, the base is a {kind[:40]}",
            hint="give the base that they were trained on; `llmconv to-hf --base` takes one in Accessory's files",
        )
    whole = read.join(shards, (), _experts(base), path.name)
    if "tok_embeddings.weight" in whole:
        raise InputRefused(
            f"`{path.name}` holds a whole model", hint=f"convert it: `llmconv to-hf {path.name} -o OUT` merges its LoRA"
        )
    # the factors by the base's modules and the other tensors by its names, rows in its order
    names = configs.table_of(configs.AccessoryParams(family, {"moe": {"num_experts": _experts(base)}}, 0, 0, 1, 1, 0))
    linear = {name.removesuffix(".weight"): to.removesuffix(".weight") for name, to in names.items() if to}
    biases = {f"{module}.bias": f"{to}.bias" for module, to in linear.items() if configs.LINEAR.search(module)}
    factors = other_tools.renamed(other_tools.pair_up(whole, FACTOR, path.name), names, path.name, DESCRIPTION)
    rest = {name: tensor for name, tensor in whole.items() if not FACTOR.fullmatch(name)}
    homes = _homes(rest, names | biases, path.name)
    order = rope_order(other_tools.sizes_of(base.config, base.path.name).dim)
    with fitting(f"the heads of `{path.name}` do not match the base's", "it was trained on another model"):
        factors = other_tools.reordered(factors, QUERY_OR_KEY, order)
        others = reordered({target: rest[name] for target, name in homes.items()}, QUERY_OR_KEY, order)
    if alpha is not None and not factors:
        raise InputRefused(f"`{path.name}` holds no LoRA pair", hint="leave out `--alpha`")
    others, fields = _with_biases(others, base, path.name)
    ranks = {"r": rank, "lora_alpha": rank} if (rank := next((own.rank for own in factors.values()), 0)) else {}
    new = sorted(name.removesuffix(".bias") for name in others if name.endswith(".bias") and name not in base)
    files = sorted(entry for entry in path.iterdir() if read.SHARD.fullmatch(entry.name))
    settings = path / "config.json" if (path / "config.json").is_file() else None
    config = {**(ranks or {"lora_alpha": 1}), "bias": "all" if new else "none", "modules_to_save": new}
    adapter = other_tools.as_adapter(files, settings, config, factors, alpha, others)
    return replace(adapter, fields=fields)


def _experts(base: Checkpoint) -> int:
    count = base.config.get("num_local_experts")
    return count if type(count) is int and 0 < count < 1 << 16 else 0


def _homes(rest: dict[str, LazyTensor], names: Mapping[str, str | None], source: str) -> dict[str, str]:
    """The base's tensor name to Accessory's."""
    try:
        return rename(rest, names, source)
    except MalformedInput:
        known = [name for name in rest if name in names or re.sub(LAYER_NUMBER, "{}", name, count=1) in names]
        if not (left := sorted(rest.keys() - set(known))):
            raise
        raise other_tools.unplaced(
            left, [name for name, target in names.items() if target], source, DESCRIPTION
        ) from None


def _with_biases(
    others: dict[str, LazyTensor], base: Checkpoint, source: str
) -> tuple[dict[str, LazyTensor], dict[str, Any]]:
    """Adds zero biases to layers without one, and returns the config fields that enable biases."""
    biases = {name: tensor for name, tensor in others.items() if name.endswith(".bias")}
    if base.config.get("model_type") != "llama":
        if trained := [name for name, tensor in biases.items() if name not in base and not read.is_zero(tensor)]:
            raise UnsupportedInput(
                f"`{source}` holds {len(trained)} trained biases, such as `{trained[0]}`, which are unsupported in a "
                f"{base.config.get('model_type')}",
                hint="transformers has no equivalent model; train with `bias_tuning` off",
            )
        return {name: tensor for name, tensor in others.items() if name not in biases or name in base}, {}
    result, fields = dict(others), dict[str, Any]()
    for switch, layers in configs.SWITCHES.items():
        if not configs.has_biases(biases, layers):
            continue
        fields[switch] = True
        for weight in [name for name in base if name.endswith(tuple(f".{layer}.weight" for layer in layers))]:
            bias, tensor = weight.removesuffix("weight") + "bias", base[weight]
            if bias not in base:
                result[bias] = (
                    cast(result[bias], tensor.dtype) if bias in result else zeros(tensor.dtype, tensor.shape[:1])
                )
    return result, fields


ADAPTER = other_tools.AdapterFormat(
    "LLaMA2-Accessory (`consolidated.NN-of-MM.model.pth` with only what was trained)",
    read.holds_shards,
    open_accessory_adapter,
)


SPLIT = ("meta", "accessory")  # formats whose files are model-parallel ranks
# Fields of `config.json` that a tuned model may change: they do not change what the shared weights mean
RUN_FIELDS = {"max_batch_size", "max_seq_len", "lora_rank", "bias_tuning", "norm_tuning"}
WITHOUT = "extract an exact delta, without `--to`"


def save_delta(base: Checkpoint, tuned: Checkpoint, shards: int | None) -> arithmetic.WrittenDelta:
    """The files of a delta in `shards` ranks (None: as the base), and those that Accessory's loader looks for.

    Raises UnsupportedInput for a model or change that it cannot have, UsageProblem for a number that does not divide
    it.
    """
    count = shards or (base.shards if base.format in SPLIT else 1)
    before, after = configs.args_of(base), configs.args_of(tuned)
    # refuses other settings, since a delta is applied with the base's
    names = sorted({*before.params.fields, *after.params.fields} - RUN_FIELDS)
    one, other = before.params.fields, after.params.fields
    odd = [name for name in names if one.get(name) != other.get(name)]
    if odd or before.params.family != after.params.family:
        raise UnsupportedInput(
            f"the two models differ in {listing(odd or ['llama_type'])}, which Accessory's deltas do not contain",
            hint=WITHOUT,
        )
    below, above = read.split_ranks(base, before, count), read.split_ranks(tuned, after, count)
    lacking = below[0].keys() - above[0].keys()
    resized = [name for name, tensor in above[0].items() if name in below[0] and tensor.shape != below[0][name].shape]
    if changed := [*sorted(lacking), *resized]:
        raise UnsupportedInput(
            f"the tuned model lacks, or has in another shape, {len(changed)} tensors of the base: {listing(changed)}",
            hint=WITHOUT,
        )
    differences = arithmetic.Differences(arithmetic.FLOAT32, arithmetic.FLOAT16)
    container = partial(torch_pieces, inside=("model",))
    files = tuple(
        Shard(
            f"consolidated.{number:02}-of-{count:02}.model-diff.pth",
            {name: differences.of(name, below[number].get(name), tensor) for name, tensor in rank.items()},
            container,
        )
        for number, rank in enumerate(above)
    )
    small, warnings = read.small_files(tuned, after)
    tokenizers = ("tokenizer.model", "tokenizer.json")
    if any(base.side_files.get(name) != tuned.side_files.get(name) for name in tokenizers):
        warnings += ("the tokenizers differ, and a sum with Accessory's deltas keeps that of the base",)
    return arithmetic.WrittenDelta(Plan(tuned, files, small, warnings), differences)


def plus_accessory(base: Checkpoint, folder: Path, dtype: str) -> Checkpoint:
    """The tuned model in Hugging Face names and `dtype` (see `all_rounded`), with the base's config and side files.

    Raises UnsupportedInput for a base or parts that Accessory or transformers lacks, MalformedInput for another base,
    or a missing shard.
    """
    args = configs.args_of(base)
    family, name = args.params.family, folder.absolute().name
    shards = read.open_shards(folder, read.DELTA_FILE)
    delta = read.join(shards, args.params.copied, args.params.experts, name)
    base_tensors = read.whole_tensors(base, args)
    added_type = _common({name: tensor.dtype for name, tensor in shards[0].items()})
    kept = {name: arithmetic.wider(tensor.dtype, added_type) for name, tensor in base.items()}
    read.leave_out(delta, family, name, drop=False)
    sums = read.to_hugging_face(_add(base_tensors, delta, name), args.params, name)
    tensors = arithmetic.all_rounded(sums, {target: kept.get(target, _common(kept)) for target in sums}, dtype)
    config = settle_head(tensors, {**base.config, "tie_word_embeddings": None}, [])
    if family == "llama":
        config |= {switch: configs.has_biases(tensors, layers) for switch, layers in configs.SWITCHES.items()}
    return replace(base, tensors=tensors, config=with_dtype(config, tensors))


def _common(types: Mapping[str, DType]) -> DType:
    return Counter(types.values()).most_common(1)[0][0]


def _add(base_tensors: dict[str, LazyTensor], delta: dict[str, LazyTensor], source: str) -> dict[str, LazyTensor]:
    wrong = [
        name for name, tensor in delta.items() if name in base_tensors and base_tensors[name].shape != tensor.shape
    ]
    if wrong:
        shapes = [f"{name} {list(delta[name].shape)} for {list(base_tensors[name].shape)}" for name in wrong]
        raise MalformedInput(
            f"shape mismatch between `{source}` and the base for {len(wrong)} tensors: {listing(shapes)}",
            hint="give the model that the training started from",
        )
    sums = {
        name: arithmetic.added(name, base_tensors.get(name), tensor)
        for name, tensor in delta.items()
        if not name.endswith("rope.freqs")
    }
    return {**base_tensors, **sums}


DELTA = DeltaFormat(
    detect=lambda path: path.is_dir() and any(read.DELTA_FILE.fullmatch(entry.name) for entry in path.iterdir()),
    apply=plus_accessory,
    save=save_delta,
)
