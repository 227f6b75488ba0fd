"""Wrong arguments give one line, and a hint at what to give."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

import llmconv
import llmconv.cli
import llmconv.convert
import llmconv.embedding
import llmconv.export
import llmconv.generation
import llmconv.push
import llmconv.verify
from llmconv.cli.command_group import hint_for, hints
from llmconv.errors import UsageProblem
from tests.cli.commands import CHECKPOINT, LEAVES, command


def test_an_unknown_command_is_a_usage_error() -> None:
    done = CliRunner().invoke(llmconv.cli.main, ["convert"])
    assert done.exit_code == 2
    assert done.stderr.startswith("error: no such command `convert`\n\nhint: did you mean `")
    assert "to-hf`? see `" in done.stderr


USAGE = {
    "--nope": "no such option `--nope`",
    "inspect": "missing argument `PATH`",
    "inspect a --jsn": "no such option `--jsn`",
    "delta": "",
    "delta aply": "no such command `aply`",
    "delta apply a": "missing argument `DELTA`",
    "to-hf a": "missing option `-o`",
    "to-hf a -o": "option `-o` requires an argument",
    "export a --graph-name": "option `--graph-name` requires an argument",
    "delta apply a b -o": "option `-o` requires an argument",
    "export a --prefill=3": "option `--prefill` does not take a value",
    "to-hf a -o b --dtype int8": "invalid value for `--dtype`: `int8` is not one of `keep`",
}


@pytest.mark.parametrize("line", USAGE)
def test_wrong_arguments_give_one_line_and_a_hint_to_the_help(line: str) -> None:
    done = CliRunner().invoke(llmconv.cli.main, line.split(), prog_name="llmconv")
    assert done.exit_code == 2 and not done.stdout
    if not USAGE[line]:  # no arguments at all: the help itself
        assert done.stderr.startswith("Usage: llmconv delta")
        return
    message, blank, hint = done.stderr.splitlines()
    assert message.startswith(f"error: {USAGE[line]}") and not message.endswith(".") and not blank
    path = " ".join(["llmconv", *(word for word in line.split()[:2] if word in {*LEAVES, "delta", "apply"})])
    assert hint == f"hint: see `{path} --help`"


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("embed MODEL --prompt abc", "`llmconv embed FOLDER TEXT…`"),
        ("embed MODEL abc -o x.npy", "`--output-file FILE`"),
        ("generate MODEL --text abc", "`--prompt TEXT`"),
    ],
)
def test_an_option_of_another_command_is_answered_with_the_one_to_give(line: str, hint: str) -> None:
    done = CliRunner().invoke(llmconv.cli.main, line.split())
    assert done.exit_code == 2 and f"error: no such option `{line.split()[-2]}`\n" in done.stderr
    assert hint in done.stderr and done.stderr.endswith(f"; see `main {line.split()[0]} --help`\n")


SEEDS = {
    "to-hf --composer_path a.pt --hf_output_path b": "the checkpoint is an argument: `llmconv to-hf SOURCE -o OUT`",
    "to-hf a.pt -o b --output_precision bf16": "`--dtype float32`",
    "generate m --top_p 0.9 x": "`--top-p`",
    "generate m --src_length 8 x": "`--src-length`",
    "generate m --prefix_path p x": "`--prefix-tuning PATH`",
    "generate m --run_mode predict": "`llmconv run FILE`",
    "generate --config x.yaml": "`llmconv run FILE`",
    "generate m --max_seq_len 100 x": "`--max-length N`",
    "generate m --quant_type weight_only_int8": "`llmconv export MODEL --quant int8`",
    "export m --quant_type weight_only_int8": "`llmconv export MODEL --quant int8`",
    "export m --quant weight_only_int8": "here it is `int8`",
    "export m --export_batch_size 1": "graphs take any batch",
    "export m --max_seq_len 32000": "`--max-seq-len`",
    "merge-lora --model_name_or_path a": "BASE is an argument",
}


@pytest.mark.parametrize("line", SEEDS)
def test_a_name_of_another_program_is_answered_with_ours(line: str) -> None:
    done = CliRunner().invoke(llmconv.cli.main, line.split())
    assert done.exit_code == 2 and SEEDS[line] in done.stderr.partition("hint: ")[2]


SCRIPTS = {
    "generate": """
        config run_mode use_parallel predict_data load_checkpoint auto_trans_ckpt device_id device_num rank_id
        predict_length predict_batch_size do_sample top_k top_p max_length batch_size model_name seq_length
        tokenizer_path prefill_model_path increment_model_path config_path ge_config_path is_sample_acceleration
        generated_time dynamic full_model_path model_type llama_config llama_type pretrained_path pretrained_type
        quant n_gpus n-gpus max_seq_len model_parallel_size max_gen_len local_rank dist_on_itp master_port
        image_path server_port model_name_or_path decode_strategy src_length data_file output_file inference_model
        mode quant_type block_attn cachekv_int8 cachekv_int8_type lora_path prefix_path export_precache
        tensor_parallel_degree chat_template use_flash_attention append_attn total_max_length name_or_path prompts
        max_new_tokens max_batch_size num_return_sequences no_repeat_ngram_size use_cache eos_token_id pad_token_id
        model_dtype autocast_dtype warmup trust_remote_code use_auth_token revision device_map attn_impl
    """,
    "chat": """
        model_name_or_path pretrained_path llama_config tokenizer_path quant n_gpus device_id load_checkpoint config
        system_prompt name_or_path lora_path stop_tokens max_seq_len
    """,
    "serve": """
        model_name_or_path pretrained_path llama_config tokenizer_path quant n_gpus device_id load_checkpoint config
        max_seq_len tensor_parallel_size model served_model_name flask_port base_port lora_path
    """,
    "to-hf": """
        model input_path output_path reversed torch_ckpt_dir mindspore_ckpt_path mindspore_path src_checkpoint
        dst_checkpoint src_strategy dst_strategy prefix world_size src_weights_path src_config_path tokenizer_path
        dst_weights_path mixtral dst_config_path model_name_or_path pre_name device composer_path hf_output_path
        output_precision local_checkpoint_save_location hf_repo_for_upload test_uploaded_model is_peft train_yaml
    """,
    "export": """
        config run_mode model_dir output_path batch_size seq_length model_name_or_path inference_model quant_type
        lora_path export_precache pretrained_model_name_or_path output_folder export_batch_size max_seq_len
        verify_export from_pretrained tensor_parallel_degree load_checkpoint
    """,
    "merge-lora": """
        model_name_or_path lora_path output_path merge_lora_model_path merge_model_path device low_gpu_mem
        safe_serialization adapter_name_or_path base_model lora_model export_dir template finetuning_type
        export_size base_ckpt_path lora_ckpt_path lora_scaling src_postfix dst_ckpt_path src_ckpt_path_or_dir
        llama_type
    """,
}
"""Options of the scripts of MindFormers, LLaMA2-Accessory, PaddleNLP, LLM Foundry and others, by the command that does
their job."""


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_option_of_other_programs_is_answered_with_an_option_that_the_command_has(name: str) -> None:
    known = {spelling for one in command(name).params for spelling in (*one.opts, *one.secondary_opts)}
    hints = {option: hint_for(name, f"--{option}", known) for option in SCRIPTS[name].split()}
    assert [option for option, hint in hints.items() if not hint and f"--{option}" not in known] == []


def test_options_in_hints_exist() -> None:
    """Those between backticks are of that command, or of the one that the hint names."""
    for (name, _), hint in hints().items():
        for quoted in re.findall(r"`([^`]+)`", hint):
            words = quoted.removeprefix("llmconv ").split()
            owner = words[0] if quoted.startswith("llmconv ") else name
            for word in words:
                if word.startswith("-") and owner != "hf":
                    assert word in {o for p in command(owner).params for o in (*p.opts, *p.secondary_opts)}, hint


def test_spellings_of_other_commands_are_not_options() -> None:
    for name, option in hints():
        assert option not in {spelling for one in command(name).params for spelling in one.opts}


def test_an_unknown_opset_is_a_usage_problem_in_python(tmp_path: Path) -> None:
    llmconv.convert.to_hf(CHECKPOINT, tmp_path / "base")
    with pytest.raises(UsageProblem, match="`opset` is 22"):
        llmconv.export.export(tmp_path / "base", opset=22)


def test_a_word_in_place_of_a_number_is_refused_without_the_name_of_a_type() -> None:
    done = CliRunner().invoke(llmconv.cli.main, ["chat", "model", "--temperature", "warm"])
    assert done.exit_code == 2 and "`warm` is not a number" in done.stderr


def test_a_slip_in_a_name_gets_the_name_that_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "checkpoint.pt").touch()
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(llmconv.cli.main, ["inspect", "checkpoints.pt"])
    assert done.exit_code == 3 and "did you mean `checkpoint.pt`?" in done.stderr
