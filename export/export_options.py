"""ExportOptions: the keyword arguments of `export`, and their defaults."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

from llmconv.output.plan import DEFAULT_SIZE

GENERATE, EMBED, CLASSIFY, RERANK = "generate", "embed", "classify", "rerank"
SCORING = "scoring"  # values of the option `task`, and the role of the graph of `no_cache`


class ExportOptions(TypedDict, total=False):
    """The keyword arguments of `export`, with the names of the command's options.

    Attributes:
        prefill: write `prefill.onnx`.
        incremental: write `decode.onnx`.
        unified: write `model.onnx`, one graph for prompts and steps. By default the first two are written, or the
            graphs that `layout` needs.
        graph_name: `ROLE=FILE` each: names of `prefill`, `decode`, `unified`, `scoring`, … other than the usual ones.
        layout: names of the clients that will open the folder, one file each in `export/clients/`.
        embeds: graphs take `inputs_embeds` instead of `input_ids`, and `embeddings.onnx` is the embedding table; always
            so for multimodal models.
        last_logits: return the logits of the last position only.
        postprocess: `argmax` or `topk:K`: choose tokens in the graph.
        stages: number of graphs that the layers are divided into.
        lora_inputs: linear layers whose graphs take LoRA factors as optional inputs: `all-linear`, or names of modules.
        prefix: PEFT adapter of prefix or prompt tuning, or `pre_caches.npy`: virtual tokens before every prompt.
        opset: version of the standard operators: 21, 23 or 24.
        shapes: `dynamic`, or `static`: every axis is a number, and the cache is a buffer that is filled in place.
        batch_size: static: sequences per call (default: 1).
        max_seq_len: static: number of tokens that the cache holds.
        prompt_len: static: new tokens per call of `prefill.onnx` (default: the largest divisor of `max_seq_len` up to
            128, so that every prompt that fits can be cut into calls of this length).
        cache: dynamic: `growing`, or `shared-buffer`: past and present are one buffer that is filled in place, as
            required by ORT-GenAI's `past_present_share_buffer` (default: that of the target, otherwise `growing`).
        target: `ort-cpu`, `ort-cuda`, `ort-webgpu` or `ort-dml`: the provider of onnxruntime that runs the graphs. It
            decides `precision`, `cache` and `opset` where they are not given, see `targets/presets.py`.
        strict_target: refuse graphs with nodes that the target's provider would leave to the CPU.
        task: `generate`, or one graph without a cache: `embed`, `classify` or `rerank`, see docs/embeddings.md.
        no_cache: one graph that returns the logits of a whole text and keeps no cache, `scoring.onnx`.
        precision: `float32`, `float16` or `bfloat16`: dtype that the graphs compute in, and of their cache (default:
            that of the target, otherwise `float32`).
        logits_dtype: dtype of the logits: `float32`, or the precision.
        dtype: `keep`, `float32`, `float16` or `bfloat16`: element type of the stored weights; by default, with a new
            folder and a `precision` of less than float32, that precision.
        quant: `int8`, `int4`, `int4-mixed`, `int4-small` or `a8w8`: store the matrices as integer codes, in `output`.
        quant_block: number of neighboring weights that share a scale: 16, 32, 64, 128 or 256 (default: 32, for
            `int4-small` 128).
        symmetric: store no zero points.
        quant_exclude: regular expressions; weights with such names are not quantized.
        quant_bits: `PATTERN=8` or `PATTERN=4`: bits of the weights with such names.
        kv_cache: `int8`: keep keys and values as integer codes, with scales measured on the text `calibrate` (default:
            that of llmconv).
        calibrate: text file, or `default` for the text that ships with llmconv; columns of a weight count as much as
            what they are multiplied with on this text. For `a8w8`, norms are divided by factors from the ranges on it.
        static_activations: with `a8w8` and `calibrate`: round activations in the ranges measured on the text, with
            `QuantizeLinear` and `DequantizeLinear`, as toolchains for NPUs read them.
        method: `search` for the scales with the least squared error (the default), `rtn` for those of onnxruntime; with
            `calibrate` and 4 bits also `gptq` (error feedback) and `awq` (scaled norms and columns).
        max_shard_size: largest safetensors file, such as `5GB`, if weights are written.
        graphs_only: write graphs, configuration and tokenizer into `output`, but no weights: those of the model are to
            be put next to the graphs, by the names of its files; only their headers are read.
        overwrite: replace existing graphs, or an existing `output`.
        resume: continue an interrupted export.
        dry_run: make and check all graphs, but write nothing.
        trust_remote_code: run the model's own code, which `auto_map` of its `config.json` declares.
    """

    prefill: bool
    incremental: bool
    unified: bool
    graph_name: str | Sequence[str]
    layout: str | Sequence[str]
    embeds: bool
    last_logits: bool
    postprocess: str | None
    stages: int
    prefix: str | Path | None
    lora_inputs: str | Sequence[str]
    opset: int | None
    shapes: str
    batch_size: int | None
    max_seq_len: int | None
    prompt_len: int | None
    cache: str | None
    target: str | None
    strict_target: bool
    task: str
    no_cache: bool
    precision: str | None
    logits_dtype: str
    dtype: str
    quant: str | None
    quant_block: int | None
    symmetric: bool
    quant_exclude: Sequence[str]
    quant_bits: Sequence[str]
    kv_cache: str | None
    calibrate: str | Path | None
    static_activations: bool
    method: str | None
    max_shard_size: str | int
    graphs_only: bool
    overwrite: bool
    resume: bool
    dry_run: bool
    trust_remote_code: bool


DEFAULTS: ExportOptions = {  # the options that a call leaves out
    "prefill": False,
    "incremental": False,
    "unified": False,
    "graph_name": (),
    "layout": (),
    "embeds": False,
    "last_logits": False,
    "postprocess": None,
    "stages": 1,
    "prefix": None,
    "lora_inputs": "",
    "opset": None,
    "shapes": "dynamic",
    "batch_size": None,
    "max_seq_len": None,
    "prompt_len": None,
    "cache": None,
    "target": None,
    "strict_target": False,
    "task": "generate",
    "no_cache": False,
    "precision": None,
    "logits_dtype": "float32",
    "dtype": "keep",
    "quant": None,
    "quant_block": None,
    "symmetric": False,
    "quant_exclude": (),
    "quant_bits": (),
    "kv_cache": None,
    "calibrate": None,
    "static_activations": False,
    "method": None,
    "max_shard_size": DEFAULT_SIZE,
    "graphs_only": False,
    "overwrite": False,
    "resume": False,
    "dry_run": False,
    "trust_remote_code": False,
}
