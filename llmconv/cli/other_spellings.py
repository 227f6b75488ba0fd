"""Options that another command has, or another program: what to give in their place."""

from __future__ import annotations

from collections.abc import Iterable

EMBED_TEXTS = "texts are arguments: `llmconv embed FOLDER TEXT…`, or lines of `--text-file FILE`"

SOURCE = "the checkpoint is an argument: `llmconv to-hf SOURCE -o OUT`"
ANY_SIZE = "leave it out: graphs take any batch and length; fixed ones are"
QUANT = "`llmconv export MODEL --quant int8` (or `int4`, `a8w8`) quantizes; graphs know by themselves what they are"
IN_A_FILE = "settings are options or in generation_config.json; `llmconv run FILE` takes a whole job with its texts"
NAMES = ("--model_name_or_path", "--name_or_path", "--pretrained_path", "--load_checkpoint", "--model_dir")
"""How other programs call the model."""

TALKING = ("generate", "chat", "serve")
"""Commands that run a model."""

STAGES = (
    "`llmconv export --stages N` divides the graphs, and `--stage-at` and `[stage N]` of `--session-config` place them"
)
DEVICES: tuple[str, ...] = (
    "--n_gpus",
    "--model_parallel_size",
    "--tensor_parallel_degree",
    "--tensor_parallel_size",
    "--device_num",
)
DEVICES += ("--use_parallel", "--rank_id", "--local_rank", "--dist_on_itp", "--master_port")
OF_MODEL = "leave it out: what the model is stands in its folder, for a checkpoint see `llmconv to-hf`"
KINDS = ("--llama_config", "--llama_type", "--model_name", "--model_type", "--auto_trans_ckpt")
GRAPHS = ("--prefill_model_path", "--increment_model_path", "--full_model_path")
TEXT_LENGTHS = ("--max_seq_len", "--seq_length", "--predict_length", "--total_max_length")
ATTENTION = (
    "--block_attn",
    "--append_attn",
    "--use_flash_attention",
    "--attn_impl",
    "--use_cache",
    "--paged_attention",
)
IN_GENERATION_CONFIG = ("--no_repeat_ngram_size", "--eos_token_id", "--pad_token_id")
FOUND = ("--prefix", "--world_size", "--pre_name", "--mixtral", "--device")


def _each(commands: str | tuple[str, ...], hint: str, *options: str) -> dict[tuple[str, str], str]:
    """One hint for several options of one or more commands."""
    names = (commands,) if isinstance(commands, str) else commands
    return {(name, option): hint for name in names for option in options}


HINTS: dict[tuple[str, str], str] = {
    **{("embed", option): EMBED_TEXTS for option in ("--prompt", "--text", "--texts", "--input")},
    ("embed", "--prompt-file"): "`--text-file FILE` reads one text per line",
    ("embed", "-o"): "`--output-file FILE` writes a .npy array, or JSON lines",
    ("embed", "--output"): "`--output-file FILE` writes a .npy array, or JSON lines",
    ("generate", "--text"): "`--prompt TEXT`",
    ("generate", "--text-file"): "`--prompt-file FILE`",
    ("generate", "--images"): "`--image FILE`, once per image",
    ("generate", "-o"): "`--output-file FILE` writes JSON lines",
    ("generate", "--output"): "`--output-file FILE` writes JSON lines",
    **_each("to-hf", SOURCE, "--composer_path", "--load_checkpoint", "--model_name_or_path", "--src_ckpt"),
    **_each("to-hf", "`-o OUT`", "--hf_output_path", "--hf_path", "--output_path", "--dst_ckpt"),
    ("to-hf", "--output_precision"): "`--dtype float32`, `float16` or `bfloat16`",
    ("to-hf", "--local_checkpoint_save_location"): "leave it out: a remote checkpoint is read where it is",
    **_each("to-hf", "`llmconv push OUT ORG/NAME` uploads it", "--hf_repo_for_upload", "--push_to_hub"),
    ("to-hf", "--test_uploaded_model"): "`llmconv generate OUT --backend torch --prompt TEXT` runs it",
    **_each("export", "FOLDER is an argument: `llmconv export FOLDER`", "--pretrained_model_name_or_path", *NAMES),
    ("export", "--export_batch_size"): f"{ANY_SIZE} `--shapes static --batch-size N`",
    ("export", "--verify_export"): "`--verify`",
    **_each("export", "`-o OUT` writes a new folder", "--output_folder", "--output_path", "--inference_model_dir"),
    **_each(("export", *TALKING), QUANT, "--quant_type", "--quantization", "--weight_only_quant_bits"),
    **_each(TALKING, QUANT, "--quant", "--cachekv_int8", "--cachekv_int8_type"),
    **{
        pair: hint
        for name in TALKING
        for pair, hint in _each(
            name, f"MODEL is an argument: `llmconv {name} MODEL`", *NAMES, "--pretrained_type"
        ).items()
    },
    **_each(TALKING, "`llmconv generate PREFILL --decode DECODE` takes the two graphs", *GRAPHS),
    **_each(TALKING, IN_A_FILE, "--config", "--config_path", "--run_mode", "--mode", "--inference_model", "--dynamic"),
    **_each(TALKING, OF_MODEL, *KINDS),
    **_each("generate", "`--prompt TEXT`, once per prompt, or arguments after FOLDER", "--prompts", "--predict_data"),
    **_each("generate", "`--prompt-file FILE`", "--data_file", "--input_file", "--predict_file"),
    **_each("generate", "`--image FILE`, once per image", "--image_path"),
    **_each("generate", "`--batch-size N`", "--predict_batch_size", "--max_batch_size"),
    **_each("generate", "leave it out; `llmconv bench MODEL` measures", "--warmup", "--generated_time"),
    **_each(TALKING, "`--prefix-tuning PATH`", "--prefix_path", "--export_precache"),
    **_each(TALKING, "`--adapter PATH`", "--lora_path", "--adapter_path"),
    **_each(TALKING, "`--tokenizer PATH`", "--tokenizer_path", "--tokenizer_name_or_path"),
    **_each(TALKING[:2], "`--max-length N`, prompt included, or `--max-new-tokens N`", *TEXT_LENGTHS),
    **_each("serve", "`--max-new-tokens N`; a request has `max_tokens`", *TEXT_LENGTHS),
    **_each(TALKING, "`--max-new-tokens N`", "--max_gen_len"),
    **_each(TALKING, "`--device cuda:N` for torch, `--provider cuda` for graphs", "--device_id", "--device_map"),
    **_each(TALKING, STAGES, *DEVICES),
    **_each(TALKING, "`--dtype` with `--backend torch`", "--model_dtype", "--precision", "--autocast_dtype"),
    **_each(TALKING, "leave it out: the graphs of `llmconv export` have attention and a cache that fit", *ATTENTION),
    **_each(TALKING, "`generation_config.json` in the model's folder has it", *IN_GENERATION_CONFIG),
    **_each(TALKING, "`--template NAME`", "--chat_template"),
    **_each(TALKING, "`hf://ORG/NAME@REVISION`", "--revision"),
    **_each(TALKING, "log in with `hf auth login`, or set HF_TOKEN", "--use_auth_token"),
    **_each(TALKING, "`llmconv export --postprocess topk:K` makes such graphs", "--is_sample_acceleration"),
    **_each(TALKING, "`--session-config FILE` gives options of onnxruntime", "--ge_config_path"),
    **_each(TALKING[:2], "`--temperature 0` is greedy, any other samples", "--decode_strategy", "--do_sample"),
    **_each(TALKING, "`--system TEXT`", "--system_prompt"),
    **_each(TALKING[:2], "`--stop TEXT`", "--stop_tokens"),
    **_each("serve", "MODEL is an argument: `llmconv serve MODEL`", "--model"),
    **_each("serve", "`--name NAME`", "--served_model_name"),
    **_each("serve", "`--port N`", "--flask_port", "--base_port", "--server_port"),
    **_each("generate", "`llmconv serve MODEL --port N`", "--server_port"),
    **_each("to-hf", SOURCE, "--model", "--input_path", "--torch_ckpt_dir", "--src_checkpoint", "--src_weights_path"),
    **_each("to-hf", "`-o OUT`", "--mindspore_ckpt_path", "--mindspore_path", "--dst_checkpoint", "--dst_weights_path"),
    **_each("to-hf", "`llmconv from-hf MODEL --to mindformers -o OUT` is the other way", "--reversed"),
    **_each("to-hf", "`--strategy PATH`", "--src_strategy", "--dst_strategy"),
    **_each("to-hf", "`--config FILE`", "--src_config_path", "--dst_config_path", "--train_yaml"),
    **_each("to-hf", "`--tokenizer PATH`", "--tokenizer_path", "--tokenizer_name_or_path"),
    **_each("to-hf", "`--adapter merge` (the default) or `split`", "--is_peft"),
    **_each("to-hf", "leave it out: all files of a checkpoint are found by their content", *FOUND),
    **_each("export", IN_A_FILE, "--config", "--run_mode"),
    **_each("export", f"{ANY_SIZE} `--shapes static --max-seq-len N`", "--seq_length"),
    **_each(
        "export",
        "leave it out: a folder without weights of safetensors is named with its `to-hf` command",
        "--from_pretrained",
    ),
    **_each("export", "`-o OUT` writes a new folder", "--inference_model"),
    **_each("export", "`llmconv merge-lora` before, or `--lora-inputs NAMES`", "--lora_path"),
    **_each("export", "`--prefix PATH`", "--prefix_path", "--export_precache"),
    **_each("export", "`--stages N` divides the graphs", *DEVICES),
    **_each(
        "merge-lora",
        "BASE is an argument: `llmconv merge-lora BASE ADAPTER -o OUT`",
        *NAMES,
        "--base_model",
        "--base_ckpt_path",
        "--src_ckpt_path_or_dir",
    ),
    **_each(
        "merge-lora",
        "ADAPTER is an argument: `llmconv merge-lora BASE ADAPTER -o OUT`",
        "--lora_path",
        "--adapter_name_or_path",
        "--lora_model",
        "--lora_ckpt_path",
    ),
    **_each(
        "merge-lora",
        "`-o OUT`",
        "--output_path",
        "--merge_lora_model_path",
        "--merge_model_path",
        "--export_dir",
        "--dst_ckpt_path",
    ),
    **_each("merge-lora", "leave it out: a merge runs on the CPU, in little memory", "--device", "--low_gpu_mem"),
    **_each("merge-lora", "leave it out: OUT has safetensors", "--safe_serialization", "--src_postfix"),
    **_each("merge-lora", "`--max-shard-size SIZE`", "--export_size"),
    **_each(
        "merge-lora", "leave it out: it is read from the adapter", "--finetuning_type", "--llama_type", "--template"
    ),
    **_each("merge-lora", "`--alpha A`, where the adapter does not say it: the scale is A / rank", "--lora_scaling"),
}
"""Command and option to the hint."""

VALUES = {
    "weight_only_int8": "`int8`",
    "weight_only_int4": "`int4`",
    "wint8": "`int8`",
    "wint4": "`int4`",
    "a8w8c8": "`a8w8` with `--kv-cache int8`",
    "ptq": "`a8w8` with `--calibrate FILE`",
    "nf4": "`int4`, whose codes are integers",
}
"""Values that other programs have, and ours."""


def hint_for(command: str, option: str, known: Iterable[str] = ()) -> str:
    """The hint for an option that a command does not have; empty if there is none but the help.

    Args:
        command: its name, such as `embed`.
        option: as it was given, such as `--prompt`.
        known: the options that the command has: they are spelled with dashes.
    """
    dashed, under = option.replace("_", "-"), "--" + option.removeprefix("--").replace("-", "_")
    if dashed != option and dashed in {*known}:
        return HINTS.get((command, option), f"`{dashed}`")
    return HINTS.get((command, option)) or HINTS.get((command, under), "")


def hint_for_value(message: str) -> str:
    """The hint for the value of another program that an option refused; empty if the value is none.

    Args:
        message: of the refusal, with the value between backticks.
    """
    return next((f"here it is {ours}" for value, ours in VALUES.items() if f": `{value}` is not" in message), "")
