"""Meta's model-parallel Llama, read and written: a folder of `consolidated.NN.pth` shards, `params.json` and tokenizer.

Layout (meta-llama/llama `model.py` with fairscale's parallel layers; llama-models): column-parallel weights are split
along dim 0, row-parallel ones along dim 1, the embedding along dim 1 (Llama 1, 2) or dim 0 (Llama 3), norms repeated.
The table of names has this axis of each tensor (LLaMA2-Accessory has the same: `util/tensor_parallel.py`,
`model/peft.py`). Every size in `params.json` is checked against the shapes of the weights.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import floor
from pathlib import Path
from typing import Any

from llmconv.checkpoint import Checkpoint, json_object, read_json
from llmconv.convert import algebra, tokenizers
from llmconv.convert.fields import Fields
from llmconv.convert.formats import Format
from llmconv.convert.models import model_config
from llmconv.convert.models.config_file import plain_fields, updated
from llmconv.convert.models.head_and_dtype import with_head
from llmconv.errors import MalformedInput, listing
from llmconv.files.pickle_reader import TensorRef
from llmconv.files.torch_reader import open_torch_file
from llmconv.files.torch_writer import torch_pieces
from llmconv.not_a_model_folder import training_files_in
from llmconv.output.plan import Plan, Shard, json_bytes
from llmconv.tensors import LazyTensor

PARAMS = {  # fields of `params.json`; any other field that a user gives belongs to `config.json`
    *("dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "multiple_of", "ffn_dim_multiplier", "norm_eps"),
    *("rope_theta", "use_scaled_rope", "rope_scaling_factor", "rope_high_freq_factor", "max_batch_size"),
    *("max_seq_len", "model"),
}

COUNTS = ("dim", "n_layers", "n_heads", "n_kv_heads", "multiple_of")
NUMBERS = ("norm_eps", "ffn_dim_multiplier", "rope_theta", "rope_scaling_factor", "rope_high_freq_factor")
REQUIRED = ("dim", "n_layers", "n_heads", "norm_eps")
NUMBER_LIMIT = 1e12  # larger than any size or frequency of a model
SMALL_DIMS = (2048, 3072)  # hidden sizes of Llama 3.2 1B and 3B


def read_params(content: Mapping[str, Any], source: str) -> dict[str, Any]:
    """The fields of `params.json`, also if nested in `model`; MalformedInput if one is missing or not positive."""
    params = dict(content["model"]) if isinstance(content.get("model"), Mapping) else dict(content)
    for name in REQUIRED:
        if not params.get(name):
            raise MalformedInput(
                f"`{source}` has no `params.json` with `{name}`",
                hint="copy `params.json` next to the shards, or give it with `--config PATH`",
            )
    given = Fields(params, source, "in `params.json` of `{}`", "repair it, or give the right one with `--config PATH`")
    for name in (name for name in (*COUNTS, *NUMBERS) if params.get(name)):
        if given.number(name, most=NUMBER_LIMIT) % 1 and name in COUNTS:
            raise given.invalid(name, params[name], "an integer")
    if params["dim"] % params["n_heads"]:
        raise MalformedInput(
            f"`dim` {params['dim']} in `params.json` of `{source}` is not a multiple of `n_heads` {params['n_heads']}",
            hint="it belongs to another model; give the right one with `--config PATH`",
        )
    return params


def is_scaled(params: Mapping[str, Any]) -> bool:
    """Whether the model is a Llama 3.1 or later (with scaled rotary positions)."""
    return bool(params.get("use_scaled_rope"))


def intermediate_of(params: Mapping[str, Any]) -> int:
    """Rows of w1 over all shards (meta-llama/llama `model.py`, FeedForward; llama-models the same).

    `int(2 * 4 * dim / 3)`, times `ffn_dim_multiplier` rounded down, rounded up to a multiple of `multiple_of`.
    """
    hidden = int(2 * (4 * int(params["dim"])) / 3)
    if params.get("ffn_dim_multiplier"):
        hidden = int(params["ffn_dim_multiplier"] * hidden)
    multiple = int(params.get("multiple_of") or 256)
    return -(-hidden // multiple) * multiple


def to_config(
    params: Mapping[str, Any], vocabulary: int, intermediate: int, kv_heads: int, source: str
) -> dict[str, Any]:
    """The content of a Llama's `config.json`, without dtype and token ids; MalformedInput if weights contradict it."""
    expected = intermediate_of(params)
    if expected != intermediate:
        raise MalformedInput(
            f"shape mismatch for the feed-forward layers of `{source}`: expected {expected} rows from `params.json`, "
            f"got {intermediate}",
            hint="a shard is missing or superfluous, or `params.json` belongs to another model",
        )
    dim, heads = int(params["dim"]), int(params["n_heads"])
    theta = float(params.get("rope_theta") or 10000.0)
    # trained length by generation: Llama 3.1+ 131072, Code Llama 16384, 3 8192, 2 4096, 1 (eps 1e-6) 2048
    by_theta = {1e6: 16384, 5e5: 8192}.get(theta, 2048 if params["norm_eps"] == 1e-6 else 4096)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "head_dim": dim // heads,
        "hidden_act": "silu",
        "hidden_size": dim,
        "initializer_range": 0.02,
        "intermediate_size": intermediate,
        "max_position_embeddings": 131072 if is_scaled(params) else by_theta,
        "mlp_bias": False,
        "num_attention_heads": heads,
        "num_hidden_layers": int(params["n_layers"]),
        "num_key_value_heads": kv_heads,
        "pretraining_tp": 1,
        "rms_norm_eps": params["norm_eps"],
        "rope_scaling": _rope_scaling(params),
        "rope_theta": theta,
        "tie_word_embeddings": False,
        "use_cache": True,
        "vocab_size": vocabulary,
    }


def _rope_scaling(params: Mapping[str, Any]) -> dict[str, Any] | None:
    """Factor 8 for Llama 3.1, and 32 for 3.2, which `params.json` does not contain: 3.2 is detected by its size."""
    if not is_scaled(params):
        return None
    usual = 32.0 if params["dim"] in SMALL_DIMS else 8.0
    return {
        "rope_type": "llama3",
        "factor": float(params.get("rope_scaling_factor") or usual),
        "low_freq_factor": 1.0,
        "high_freq_factor": float(params.get("rope_high_freq_factor") or 4.0),
        "original_max_position_embeddings": 8192,
    }


CODE = "Meta's code"
SUPPORTED: dict[str, tuple[Any, ...]] = {
    "model_type": ("llama",),
    "hidden_act": ("silu",),
    "attention_bias": (),
    "mlp_bias": (),
    "sliding_window": (),
}
MULTIPLES = (4096, 1024, 256, 64, 16, 1)
DIGITS = 17


def params_of(decoder: model_config.LlamaLikeConfig, shards: int) -> dict[str, Any]:
    """The fields of `params.json` that this generation has (else UnsupportedInput); Meta counts copies of heads."""
    model_config.refuse_fields(decoder, SUPPORTED, CODE)
    params: dict[str, Any] = {
        "dim": decoder.hidden,
        "n_layers": decoder.layers,
        "n_heads": decoder.heads,
        **({"n_kv_heads": max(decoder.kv_heads, shards)} if decoder.kv_heads != decoder.heads else {}),
        "vocab_size": decoder.vocabulary,
        **feed_forward_of(decoder.hidden, decoder.intermediate),
        "norm_eps": decoder.eps,
        **({"rope_theta": decoder.theta} if decoder.theta != 10000.0 else {}),
        **_scaling(decoder),
    }
    back = config_of(params, decoder)
    own = {"head_dim": decoder.head_dim, "rope_scaling": dict(decoder.scaling) or None}
    model_config.refuse_other_values(decoder, own, back, CODE)
    return params


def config_of(params: Mapping[str, Any], decoder: model_config.LlamaLikeConfig) -> dict[str, Any]:
    """The `config.json` that `to-hf` makes of `params.json`."""
    return to_config(params, decoder.vocabulary, decoder.intermediate, decoder.kv_heads, decoder.source)


def _scaling(decoder: model_config.LlamaLikeConfig) -> dict[str, Any]:
    """Llama 3.1's rope scaling, without factors that are the defaults of Meta's code (8 and 4)."""
    if decoder.scaling.get("rope_type") != "llama3":
        return {}
    params: dict[str, Any] = {"use_scaled_rope": True}
    factor, high = (decoder.scaling.get(name) for name in ("factor", "high_freq_factor"))
    if factor != 8 or decoder.hidden in SMALL_DIMS:
        params["rope_scaling_factor"] = factor
    return params | ({"rope_high_freq_factor": high} if high != 4 else {})


def feed_forward_of(dim: int, intermediate: int) -> dict[str, Any]:
    """`multiple_of`, and `ffn_dim_multiplier` if needed, for exactly `intermediate`: few digits, a large multiple."""
    candidates: list[dict[str, Any]] = [{"multiple_of": 256}]
    base = int(2 * (4 * dim) / 3)
    for digits in range(1, DIGITS):
        ratio = floor(intermediate / base * 10**digits) / 10**digits
        candidates += [{"multiple_of": multiple, "ffn_dim_multiplier": ratio} for multiple in MULTIPLES]
    candidates.append({"multiple_of": 1, "ffn_dim_multiplier": (intermediate + 0.5) / base})
    return next(found for found in candidates if intermediate_of({"dim": dim, **found}) == intermediate)


SHARD = re.compile(r"consolidated\.(\d+)\.pth")
NONE = re.compile(r"(?!)")  # which finds nothing


def open_shards(path: Path) -> list[Mapping[str, LazyTensor]]:
    """Name to tensor of each rank, in order; MalformedInput if one is missing, or names, shapes or dtypes differ."""
    found = {int(match[1]): entry for entry in path.iterdir() if (match := SHARD.fullmatch(entry.name))}
    if (missing := algebra.first_missing(found, max(found) + 1)) is not None:
        raise MalformedInput(
            f"`{path.name}` has {len(found)} shards, but `consolidated.{missing:02}.pth` is missing",
            hint="copy the missing shard; all shards are needed",
        )
    shards = {found[number].name: open_shard(found[number]) for number in sorted(found)}
    require_alike(shards)
    return [*shards.values()]


def require_alike(shards: Mapping[str, Mapping[str, LazyTensor]], *, but: re.Pattern[str] = NONE) -> None:
    """MalformedInput unless all shards, by file, have the same names, shapes and dtypes, but for names of `but`."""
    layouts = {
        file: {name: (tensor.dtype.name, tensor.shape) for name, tensor in shard.items() if not but.search(name)}
        for file, shard in shards.items()
    }
    first = next(iter(layouts.values()))
    for file, layout in layouts.items():
        if names := sorted({name for name, _ in layout.items() ^ first.items()}):
            raise MalformedInput(
                f"`{file}` differs from the first shard in {len(names)} tensors: {listing(names)}",
                hint="the shards are of different models or splits; copy the folder again",
            )


def open_shard(path: Path, inside: str = "") -> Mapping[str, LazyTensor]:
    """The tensors of one torch file, under the key `inside` if given; MalformedInput for anything but tensors."""
    file = open_torch_file(path)
    content = file.content
    if inside and isinstance(content, dict) and isinstance(content.get(inside), dict):
        content = content[inside]
    if not isinstance(content, dict) or not all(isinstance(ref, TensorRef) for ref in content.values()):
        raise MalformedInput(f"`{path.name}` is not a plain state dict", hint="it should hold tensors and nothing else")
    return {str(name): file.tensor(str(name), ref) for name, ref in content.items()}


def file_order(target: str) -> tuple[int, int]:
    """Sort key of a Hugging Face name: embedding, layers by number, final norm, head, as a loader needs them."""
    number = re.search(r"\.(\d+)\.", target)
    group = 0 if "embed" in target else 1 if number else 2 if "norm" in target or "ln_f" in target else 3
    return group, int(number[1]) if number else 0


def check_shapes(path: Path, shards: Sequence[Mapping[str, LazyTensor]], params: Mapping[str, Any]) -> int:
    """Key/value heads, without copies, by the first layer; MalformedInput if they or the shards contradict the file."""
    dim, count = int(params["dim"]), len(shards)
    head_dim = dim // int(params["n_heads"])
    queries = shards[0]["layers.0.attention.wq.weight"].shape
    if len(queries) != 2 or queries[1] != dim or queries[0] * count != dim:
        need, whole = "which is impossible", dim // queries[0] if queries[0] and not dim % queries[0] else 0
        if whole:
            need = f"expected {whole} shards"
            need += f": those of the ranks {count} to {whole - 1} are missing" if whole > count + 1 else ""
            need += f": that of rank {count} is missing" if whole == count + 1 else ""
        raise MalformedInput(
            f"`{path.name}` has {count} shards with query rows {list(queries)} for `dim` {dim}; {need}",
            hint="a shard is missing or superfluous, or `params.json` belongs to another model",
        )
    keys = shards[0]["layers.0.attention.wk.weight"].shape[0]
    stored, declared = keys * count // head_dim, int(params.get("n_kv_heads") or params["n_heads"])
    if stored == declared:
        return declared // _copies(shards, keys, head_dim)
    if keys != head_dim or stored % declared:
        raise MalformedInput(
            f"`{path.name}` has {stored} key/value heads, `params.json` declares {declared}",
            hint="the heads in the shards must be a multiple of `n_kv_heads`; is `params.json` of another model?",
        )
    return declared


def _copies(shards: Sequence[Mapping[str, LazyTensor]], keys: int, head_dim: int) -> int:
    """Number of neighboring ranks with the same head: with more ranks than heads, Meta copies and counts them."""
    if keys != head_dim or len(shards) == 1:
        return 1
    names = ("layers.0.attention.wk.weight", "layers.0.attention.wv.weight")
    heads = [b"".join(shard[name].read().tobytes() for name in names) for shard in shards]
    run = next((number for number, head in enumerate(heads) if head != heads[0]), len(heads))
    repeats = len(heads) % run == 0 and all(head == heads[number // run * run] for number, head in enumerate(heads))
    return run if repeats else 1


def join(
    path: Path, name: str, shards: Sequence[Mapping[str, LazyTensor]], params: Mapping[str, Any], kv_heads: int
) -> LazyTensor:
    """The tensor `name` (Meta's) from all shards, in Hugging Face's row order; MalformedInput if not joinable."""
    parts = [shard[name] for shard in shards]
    head_dim = int(params["dim"]) // int(params["n_heads"])
    if (dim := split_dim(name)) is None:
        return parts[0]
    if name.endswith((".wk.weight", ".wv.weight")):
        repeat = max(1, parts[0].shape[0] * len(parts) // (kv_heads * head_dim))
        groups = [parts[start : start + repeat] for start in range(0, len(parts), repeat)]
        different = MalformedInput(
            f"the shards of `{path.name}` contain different copies of one key/value head",
            hint="`n_kv_heads` of `params.json` does not match the shards; does it belong to another model?",
        )
        parts = [algebra.replicated(group, different) for group in groups]
    if name.startswith("tok_") and parts[0].shape[1] == params["dim"]:
        dim = 0  # Llama 3 splits the embedding by rows
    with algebra.fitting(
        f"the parts of `{name}` in `{path.name}` cannot be joined", "`params.json` belongs to another model"
    ):
        whole = algebra.concat(parts, dim)
        if name.endswith((".wq.weight", ".wk.weight")):
            return algebra.permute_rows(whole, algebra.rope_order(head_dim))
        return whole


FREQUENCIES: dict[str, str | None] = {  # buffers that models compute
    "rope.freqs": None,
    "layers.{}.attention.inner_attention.rope.freqs": None,
}

LLAMA: dict[str, str | None] = FREQUENCIES | {  # to Hugging Face's names, in the order in which a loader needs them
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "layers.{}.attention.wq.weight": "model.layers.{}.self_attn.q_proj.weight",
    "layers.{}.attention.wk.weight": "model.layers.{}.self_attn.k_proj.weight",
    "layers.{}.attention.wv.weight": "model.layers.{}.self_attn.v_proj.weight",
    "layers.{}.attention.wo.weight": "model.layers.{}.self_attn.o_proj.weight",
    "layers.{}.feed_forward.w1.weight": "model.layers.{}.mlp.gate_proj.weight",
    "layers.{}.feed_forward.w3.weight": "model.layers.{}.mlp.up_proj.weight",
    "layers.{}.feed_forward.w2.weight": "model.layers.{}.mlp.down_proj.weight",
    "layers.{}.attention_norm.weight": "model.layers.{}.input_layernorm.weight",
    "layers.{}.ffn_norm.weight": "model.layers.{}.post_attention_layernorm.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}

COLUMN = {"wq", "wk", "wv", "w1", "w3", "output", "dense_h_to_4h"}
ROW = {"wo", "w2", "dense", "dense_4h_to_h"}
EMBEDDING = {"tok_embeddings", "word_embeddings"}
SUFFIX = re.compile(r"\.(weight|bias|lora_a\.weight|lora_b\.weight)$")


def split_dim(name: str, repeated: Iterable[str] = ()) -> int | None:
    """The dimension that ranks split; None for copies (shard 0's is used). `repeated`: further such layers."""
    suffix = SUFFIX.search(name)
    block, _, layer = name[: suffix.start()].rpartition(".") if suffix else ("", "", "")
    if not suffix or layer in repeated or (block and not block.startswith("layers.")):
        return None
    if layer in COLUMN:
        return None if suffix[1] == "lora_a.weight" else 0
    if layer in ROW:
        return 1 if suffix[1] in ("weight", "lora_a.weight") else None
    return 1 if layer in EMBEDDING else None


TOKENIZER = "tokenizer.model"
RELEASED_SENTENCEPIECE = (32000, 32016)  # vocabulary of Llama 1 and 2, and of Code Llama
RELEASED_TIKTOKEN = 128256  # vocabulary of Llama 3


@dataclass(frozen=True)
class MetaTokenizer:
    """Tokenizer files, and ids for configs, or None; `stops` end a generation; `size` is the number of tokens, or 0."""

    files: Mapping[str, bytes] = field(default_factory=dict)
    bos: int | None = None
    eos: int | None = None
    stops: tuple[int, ...] = ()
    size: int = 0
    warnings: tuple[str, ...] = ()


def find_tokenizer(folder: Path) -> Path | None:
    """`tokenizer.model` next to the shards, or one folder up, where Meta's downloads put it."""
    return next((file for file in (folder / TOKENIZER, folder.absolute().parent / TOKENIZER) if file.is_file()), None)


def tokenizer_for(
    path: Path | None, vocabulary: int, source: str, *, since_3_1: bool
) -> tuple[MetaTokenizer, list[str]]:
    """The tokenizer at `path` with its warnings; without one, the ids of the released model of this vocabulary size."""
    if path is None:
        released = MetaTokenizer()
        if vocabulary in RELEASED_SENTENCEPIECE:
            released = MetaTokenizer(bos=1, eos=2, stops=(2,))
        elif vocabulary == RELEASED_TIKTOKEN:
            first = vocabulary - tokenizers.NUM_SPECIAL
            bos, *stops = (first + token for token in (tokenizers.BOS, tokenizers.EOS, tokenizers.EOT))
            released = MetaTokenizer(bos=bos, eos=stops[0], stops=tuple(stops))
        return released, [f"`{source}` has no tokenizer; give one with `--tokenizer` if you need it"]
    loaded = load_tokenizer(path, since_3_1=since_3_1)
    warnings = list(loaded.warnings)
    if loaded.size > vocabulary:
        warnings.append(
            f"the tokenizer has {loaded.size} tokens, the embedding {vocabulary}: does it belong to the model?"
        )
    return loaded, warnings


def load_tokenizer(path: Path, *, since_3_1: bool) -> MetaTokenizer:
    """Converts a `tokenizer.model`, or a folder with tokenizer files; one with a `tokenizer.json` is used unchanged.

    With `since_3_1` special tokens are those of Llama 3.1 and later (tiktoken only). Raises InputRefused if there is no
    tokenizer, or it is neither sentencepiece nor tiktoken.
    """
    files = tokenizers.read_tokenizer(path)
    if "tokenizer.json" in files or TOKENIZER not in files:
        return MetaTokenizer(files)
    data = files[TOKENIZER]
    if tokenizers.is_tiktoken(data):
        ranks, special = tokenizers.parse_tiktoken(data), tokenizers.reserved_tokens(since_3_1=since_3_1)
        content = tokenizers.tokenizer_bytes(tokenizers.tiktoken_json(ranks, since_3_1=since_3_1))
        settings = _settings({"bos_token": special[tokenizers.BOS], "eos_token": special[tokenizers.EOS]})
        made = {"tokenizer.json": content, "tokenizer_config.json": json_bytes(settings)}
        # the files do not distinguish a chat model from a base model, which never emits the other two
        ends = (tokenizers.EOS, tokenizers.EOM, tokenizers.EOT) if since_3_1 else (tokenizers.EOS, tokenizers.EOT)
        bos, *stops = (len(ranks) + token for token in (tokenizers.BOS, *ends))
        return MetaTokenizer(made, bos, stops[0], tuple(stops), len(ranks) + len(special))
    return sentencepiece_tokenizer(tokenizers.parse_sentencepiece(data), {TOKENIZER: data})


def sentencepiece_tokenizer(model: tokenizers.SentencePieceModel, files: Mapping[str, bytes]) -> MetaTokenizer:
    """The tokenizer of a sentencepiece model, with its own `files` (of which there may be none)."""
    warnings = list[str]()
    names = {"bos_token": model.bos, "eos_token": model.eos, "unk_token": model.unk}
    settings = _settings({name: model.pieces[index][0] for name, index in names.items() if index >= 0})
    made = {**files, "tokenizer_config.json": json_bytes(settings)}
    if model.is_converted:
        made["tokenizer.json"] = tokenizers.tokenizer_bytes(tokenizers.tokenizer_json(model))
    else:
        warnings = [f"the sentencepiece model is {tokenizers.NOT_CONVERTED}; only `tokenizer.model` is written"]
    return MetaTokenizer(made, model.bos, model.eos, (model.eos,), len(model.pieces), tuple(warnings))


def _settings(tokens: dict[str, str]) -> dict[str, Any]:
    """`tokenizer_config.json` with the generic class: LlamaTokenizer of transformers 5 ignores `tokenizer.json`."""
    return {
        **tokens,
        "add_bos_token": True,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


def save(checkpoint: Checkpoint, shards: int) -> Plan:
    """The files of a Meta checkpoint; see `Format.save`."""
    decoder = model_config.read_decoder(checkpoint)
    params = params_of(decoder, shards)
    tokenizer = _tokenizer(checkpoint, decoder)
    embedding_by_rows = tokenizers.is_tiktoken(tokenizer) if tokenizer else decoder.theta == 5e5
    # every rank has whole heads; with more ranks than key/value heads, neighboring ranks hold copies of one
    sizes = {
        "hidden_size": decoder.hidden,
        "intermediate_size": decoder.intermediate,
        "num_attention_heads": decoder.heads,
        "vocab_size": decoder.vocabulary,
    }
    model_config.refuse_shards(decoder.source, shards, sizes, {"num_key_value_heads": decoder.kv_heads})
    ranks: list[dict[str, LazyTensor]] = [{} for _ in range(shards)]
    # A Llama in Meta's names and row order, with a tied head; MalformedInput for wrong keys or shapes
    tensors = with_head(checkpoint, "model.embed_tokens.weight", tied=False)
    renamed = algebra.rename(tensors, algebra.inverted(LLAMA), decoder.source)
    order, rotated = algebra.inverse_order(algebra.rope_order(decoder.head_dim)), (".wq.weight", ".wk.weight")
    for name, target in renamed.items():
        tensor = algebra.permute_rows(tensors[target], order) if name.endswith(rotated) else tensors[target]
        parts = _parts(name, tensor, decoder, shards, embedding_by_rows=embedding_by_rows)
        for rank, part in zip(ranks, parts, strict=True):
            rank[name] = part
    files = tuple(Shard(f"consolidated.{number:02}.pth", rank, torch_pieces) for number, rank in enumerate(ranks))
    small = ({TOKENIZER: tokenizer} if tokenizer else {}) | {"params.json": json_bytes(params)}
    # warnings about content that Meta's folder cannot hold
    losses = []
    if tokenizer is None:
        losses.append(f"`{decoder.source}` has no `{TOKENIZER}`, the only tokenizer that Meta's code reads")
    read_back = config_of(params, decoder)["max_position_embeddings"]
    if read_back != decoder.max_positions:
        losses.append(f"`params.json` does not contain `max_position_embeddings`; `to-hf` will assume {read_back}")
    return Plan(checkpoint, files, small, tuple(losses))


def _parts(
    name: str, tensor: LazyTensor, decoder: model_config.LlamaLikeConfig, shards: int, *, embedding_by_rows: bool
) -> Sequence[LazyTensor]:
    if (dim := split_dim(name)) is None:
        return [tensor] * shards
    if name.startswith("tok_") and embedding_by_rows:
        dim = 0
    if name.endswith((".wk.weight", ".wv.weight")) and shards > decoder.kv_heads:
        copies, size = shards // decoder.kv_heads, decoder.head_dim
        return [
            algebra.slice_rows(tensor, rank // copies * size, (rank // copies + 1) * size) for rank in range(shards)
        ]
    return algebra.split(tensor, dim, shards)


def _tokenizer(checkpoint: Checkpoint, decoder: model_config.LlamaLikeConfig) -> bytes | None:
    """`tokenizer.model`, unchanged if there is one; Llama 3's can be made from `tokenizer.json`."""
    files = checkpoint.side_files
    if TOKENIZER in files or "tokenizer.json" not in files:
        return files.get(TOKENIZER)
    content = json_object(files["tokenizer.json"])
    made = tokenizers.tiktoken_of(content) if content else None
    return made if made and made.count(b"\n") + tokenizers.NUM_SPECIAL == decoder.vocabulary else None


def _open(path: Path, config: Mapping[str, Any], tokenizer: Path | None) -> Checkpoint:
    shards = open_shards(path)
    stored = read_json(path / "params.json") if (path / "params.json").is_file() else {}
    params = read_params({**stored, **{name: value for name, value in config.items() if name in PARAMS}}, path.name)
    renamed = algebra.rename(shards[0], LLAMA, path.name)
    # one layer more than there are tensors is enough to report missing keys, even if a billion layers are declared
    layers = min(int(params["n_layers"]), len(renamed) + 1)
    expected = [target.format(layer) for target in LLAMA.values() if target for layer in range(layers)]
    algebra.require(dict.fromkeys(expected), renamed, path.name)
    kv_heads = check_shapes(path, shards, params)
    tensors = {
        target: join(path, source, shards, params, kv_heads)
        for target, source in sorted(renamed.items(), key=lambda pair: (*file_order(pair[0]), pair[0]))
    }
    vocabulary = tensors["model.embed_tokens.weight"].num_rows
    intermediate = tensors["model.layers.0.mlp.gate_proj.weight"].num_rows
    settings = to_config(params, vocabulary, intermediate, kv_heads, path.name)
    settings["tie_word_embeddings"] = None  # Llama 3.2 1B and 3B hold one matrix twice: the values decide
    tokens, warnings = tokenizer_for(
        tokenizer or find_tokenizer(path), vocabulary, path.name, since_3_1=is_scaled(params)
    )
    extra = plain_fields({name: value for name, value in config.items() if name not in PARAMS}, warnings)
    settings = updated(settings | {"bos_token_id": tokens.bos, "eos_token_id": tokens.eos}, extra)
    if len({shard["norm.weight"].read().tobytes() for shard in shards}) > 1:  # shard 0's, as by rank 0 of Meta's code
        warnings.append("the norms differ between shards (as in Llama 3 70B); those of shard 0 are used")
    side_files = dict(tokens.files)
    if tokens.bos is not None:
        stops = list(tokens.stops) if len(tokens.stops) > 1 else tokens.eos
        side_files["generation_config.json"] = json_bytes({"bos_token_id": tokens.bos, "eos_token_id": stops})
    left = [name for name in shards[0] if name.endswith("rope.freqs")]
    dropped = (*([f"rotary frequencies ({listing(left)})"] if left else []), *training_files_in(path))
    return Checkpoint(path, FORMAT.name, tensors, settings, side_files, tuple(warnings), "", len(shards), dropped)


FORMAT = Format(
    name="meta",
    title="Meta's Llama: a folder of `consolidated.NN.pth` and `params.json`",
    covers="Llama 1, 2, 3, 3.1, 3.2 (text), Code Llama; any number of shards; its tokenizer, sentencepiece or tiktoken",
    detect=lambda path: path.is_dir() and any(SHARD.fullmatch(entry.name) for entry in path.iterdir()),
    open=_open,
    save=save,
)
