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
    **_each(("export", "generate"), QUANT, "--quant_type", "--quantization", "--weight_only_quant_bits"),
    ("generate", "--quant"): QUANT,
    **_each("generate", "FOLDER is an argument: `llmconv generate FOLDER`", *NAMES),
    **_each("generate", IN_A_FILE, "--config", "--run_mode", "--mode", "--inference_model"),
    **_each("generate", "`--prompt TEXT`, once per prompt, or arguments after FOLDER", "--prompts", "--predict_data"),
    **_each("generate", "`--prompt-file FILE`", "--data_file", "--input_file", "--predict_file"),
    **_each("generate", "`--prefix-tuning PATH`", "--prefix_path", "--export_precache"),
    **_each("generate", "`--adapter PATH`", "--lora_path", "--adapter_path"),
    **_each("generate", "`--tokenizer PATH`", "--tokenizer_path", "--tokenizer_name_or_path"),
    **_each("generate", "`--max-length N`, prompt included, or `--max-new-tokens N`", "--max_seq_len", "--seq_length"),
    **_each("generate", "`--device cuda:N` for torch, `--provider cuda` for graphs", "--device_id", "--n_gpus"),
    **_each("generate", "`--dtype` with `--backend torch`", "--model_dtype", "--precision"),
    (
        "generate",
        "--decode_strategy",
    ): "`--temperature 0` is greedy, any other samples, `--num-beams N` searches",
    ("generate", "--do_sample"): "`--temperature T` samples, `--temperature 0` is greedy",
    **_each(("merge-lora",), "BASE is an argument: `llmconv merge-lora BASE ADAPTER -o OUT`", *NAMES),
    **_each(("merge-lora",), "ADAPTER is an argument: `llmconv merge-lora BASE ADAPTER -o OUT`", "--lora_path"),
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
    dashed = option.replace("_", "-")
    return HINTS.get((command, option), f"`{dashed}`" if dashed != option and dashed in {*known} else "")


def hint_for_value(message: str) -> str:
    """The hint for the value of another program that an option refused; empty if the value is none.

    Args:
        message: of the refusal, with the value between backticks.
    """
    return next((f"here it is {ours}" for value, ours in VALUES.items() if f": `{value}` is not" in message), "")
