"""The group of commands: exit codes, error messages, signals and closed standard streams, the same for all."""

from __future__ import annotations

import gc
import os
import re
import signal
import sys
import traceback
from collections import UserDict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import click
from click import group, version_option

from llmconv.cli.help_page import SECTIONS, Group
from llmconv.cli.options import VERBOSE, refuse_empty_paths
from llmconv.errors import KEPT, LlmconvError, OutputFailed, UsageProblem, first_line, printable, usage_line
from llmconv.memory import is_out_of_memory
from llmconv.progress import status
from llmconv.requirements import require_platform, require_transformers, unusable_package
from llmconv.stores import hung_calls
from llmconv.version import __version__

BUG_EXIT_CODE = 70  # exit code of an unexpected error, a bug: `EX_SOFTWARE` of sysexits.h
MEMORY_HINT = "close other programs, or use smaller batches, shorter lengths or, in `verify`, `--low-memory`"
INTERRUPTED_HINT = "run the same command again"
RESUME_HINT = f"{INTERRUPTED_HINT}; `--resume` keeps the files that this one has finished"
# commands that only print: if the reader of stdout closes early (`| head`), their exit code is still 0
PRINT_ONLY = ("inspect", "formats", "families", "doctor")
REPORTS_VERSIONS = "doctor"
EARLY = "_interrupted"  # name of the function in `__main__.py` that ends the program on Ctrl-C before a command begins
HELP = {"-h", "--help"}
READER_LEFT = 141  # exit code of the other commands if the reader of stdout closes early: 128 + SIGPIPE, as in shells
# imports and traces make millions of long-lived objects: by default, garbage collection took 6 % of an export
GC_THRESHOLDS = (100_000, 50, 100)


class Terminated(KeyboardInterrupt):
    """SIGTERM, which schedulers send before SIGKILL."""


def _terminated(number: int, frame: FrameType | None) -> None:
    raise Terminated


def _take_signals() -> None:
    """From here on a signal is an exception: a command may have something to undo."""
    signal.signal(signal.SIGTERM, _terminated)
    if getattr(signal.getsignal(signal.SIGINT), "__name__", "") == EARLY:
        signal.signal(signal.SIGINT, signal.default_int_handler)


class Commands(UserDict[str, click.Command]):
    """The commands by name, in the order of the work; each module is imported when its command is first asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.names = [name for names in SECTIONS.values() for name in names]

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def __missing__(self, name: str) -> click.Command:
        if name not in self.names:
            raise KeyError(name)
        self[name] = refuse_empty_paths(import_module(f"llmconv.cli.{name.replace('-', '_')}").command)
        return self[name]


class CommandGroup(Group):
    """The group of all commands: what they share in errors, signals and standard streams."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = Commands()

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        """As click's; `help COMMAND` is `COMMAND --help`; wrong options of the group are reported like a command's."""
        if args[:1] == ["help"]:
            args = [*args[1:], "--help"]
        try:
            return super().make_context(info_name, args, parent, **extra)
        except BrokenPipeError as error:  # of `--version` and `--help`
            _discard_stdout()
            raise click.exceptions.Exit(0) from error
        except click.UsageError as error:
            self._fail_usage(error)

    def main(self, *args: Any, **extra: Any) -> Any:
        """As click's; closed standard streams go to the null device, and a failed write is reported."""
        # opens closed standard streams on the null device: an output file would get their number, and so messages
        for number, name in enumerate(("stdin", "stdout", "stderr")):
            try:
                os.fstat(number)
            except OSError:
                os.open(os.devnull, os.O_RDWR)  # takes the lowest free number: this one
            if getattr(sys, name) is None:
                setattr(sys, name, open(os.devnull, "w" if number else "r", encoding="utf-8"))  # noqa: SIM115 - it stays open
        try:
            return super().main(*args, **extra)
        except OSError as error:  # of `--version` and `--help`, which print before a command is invoked
            _print_error(
                f"writing failed: {error.strerror or error} (stdout)", "make sure that there is space on the disk"
            )
            sys.exit(OutputFailed.exit_code)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        """As click's; checks the version of transformers first, for all commands but the one that reports it."""
        if args[0] != REPORTS_VERSIONS and not {*args} & HELP:
            require_transformers()
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the command; an error is printed as message, blank line and hint, and gives its exit code."""
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")  # by default its threads busy-wait for a while
        gc.set_threshold(*GC_THRESHOLDS)
        _take_signals()
        hung_calls.watch(partial(_print_error, "interrupted, and the store does not answer", RESUME_HINT))
        asks_help = bool({*ctx.args} & HELP)
        try:
            require_platform()
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result
        except LlmconvError as error:
            self._fail(ctx, error.message, error.hint, error.exit_code)
        except KeyboardInterrupt as interrupt:
            code = 143 if isinstance(interrupt, Terminated) else 130
            keeps = KEPT in getattr(interrupt, "__notes__", ())
            self._fail(ctx, "interrupted", RESUME_HINT if keeps else INTERRUPTED_HINT, code)
        except BrokenPipeError:
            _discard_stdout()
            ctx.exit(0 if asks_help or ctx.invoked_subcommand in PRINT_ONLY else READER_LEFT)
        except click.UsageError as error:
            self._fail_usage(error)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except OSError as error:
            problem = f"reading or writing failed: {error.strerror or error} ({error.filename or 'stdout'})"
            self._fail(ctx, problem, "check the free disk space, and that the files are readable and writable", 4)
        except Exception as error:  # a bug: never exit code 1, which means a difference
            if is_out_of_memory(error):
                self._fail(ctx, "out of memory", MEMORY_HINT, OutputFailed.exit_code)
            if isinstance(error, ImportError) and (unusable := unusable_package(error)):
                self._fail(ctx, unusable.message, unusable.hint, unusable.exit_code)
            self._fail(ctx, *_bug(ctx, error), BUG_EXIT_CODE)

    def _fail_usage(self, error: click.UsageError) -> NoReturn:
        """Reports click's errors of arguments like every other error; without any argument click shows the help."""
        if error.ctx is None or isinstance(error, click.exceptions.NoArgsIsHelpError):
            raise error
        message, command, path = usage_line(error.format_message()), error.ctx.command, error.ctx.command_path
        hint = f"see `{path} --help`"
        if isinstance(error, click.NoSuchOption):
            ours = [spelling for one in command.params for spelling in one.opts]
            if known := hint_for(error.ctx.info_name or "", error.option_name, ours):
                message, hint = f"no such option `{error.option_name}`", f"{known}; {hint}"
        elif isinstance(error, click.BadParameter) and (known := hint_for_value(message)):
            hint = f"{known}; {hint}"
        elif (found := NO_COMMAND.match(message)) and MEANT.get(found[1]) in getattr(command, "commands", {}):
            message, hint = found[0], f"did you mean `{path} {MEANT[found[1]]}`? {hint}"
        problem = UsageProblem(message, hint=hint)
        self._fail(error.ctx, problem.message, problem.hint, problem.exit_code)

    def _fail(self, ctx: click.Context, message: str, hint: str, exit_code: int) -> NoReturn:
        if ctx.meta.get(VERBOSE):
            traceback.print_exc()
        _print_error(message, hint)
        ctx.exit(exit_code)


def _print_error(message: str, hint: str) -> None:
    """Prints to stderr. If that fails, the exit code alone reports the error: it must not become 1, a difference."""
    with suppress(OSError):
        status("")
        click.echo(f"error: {message}\n\nhint: {hint}", err=True)


def _discard_stdout() -> None:
    """Sends the rest of the buffer to the null device, or Python reports the closed pipe again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _bug(ctx: click.Context, error: Exception) -> tuple[str, str]:
    """The message of a bug (version, command, error and where it was raised) and its hint."""
    command = " ".join(filter(None, (ctx.command_path, ctx.invoked_subcommand)))
    frame = traceback.extract_tb(error.__traceback__)[-1:]
    place = f" ({Path(frame[0].filename).name}:{frame[0].lineno})" if frame else ""
    line = f"llmconv {__version__} has a bug: {command}: {type(error).__name__}: {first_line(error)}{place}"
    return printable(line), "report this line and the command that you ran; `-v` shows the traceback"


NO_COMMAND = re.compile("no such command `([^`]*)`")
# what somebody means who does not know the commands
MEANT = {"convert": "to-hf", "merge": "merge-lora", "quantize": "export", "list": "formats", "upload": "push"}

EMBED_TEXTS = "texts are arguments: `llmconv embed FOLDER TEXT…`, or lines of `--text-file FILE`"
SOURCE = "the checkpoint is an argument: `llmconv to-hf SOURCE -o OUT`"
ANY_SIZE = "leave it out: graphs take any batch and length; fixed ones are"
QUANT = "`llmconv export MODEL --quant int8` (or `int4`, `a8w8`) quantizes; graphs know by themselves what they are"
IN_A_FILE = "settings are options or in generation_config.json; `llmconv run FILE` takes a whole job with its texts"
# how other programs call the model
NAMES = "--model_name_or_path --name_or_path --pretrained_path --load_checkpoint --model_dir"
TALKING = "generate chat serve"

STAGES = (
    "`llmconv export --stages N` divides the graphs, and `--stage-at` and `[stage N]` of `--session-config` place them"
)
DEVICES = "--n_gpus --model_parallel_size --tensor_parallel_degree --tensor_parallel_size --device_num"
DEVICES += " --use_parallel --rank_id --local_rank --dist_on_itp --master_port"
OF_MODEL = "leave it out: what the model is stands in its folder, for a checkpoint see `llmconv to-hf`"
KINDS = "--llama_config --llama_type --model_name --model_type --auto_trans_ckpt"
GRAPHS = "--prefill_model_path --increment_model_path --full_model_path"
TEXT_LENGTHS = "--max_seq_len --seq_length --predict_length --total_max_length"
ATTENTION = "--block_attn --append_attn --use_flash_attention --attn_impl --use_cache --paged_attention"
IN_GENERATION_CONFIG = "--no_repeat_ngram_size --eos_token_id --pad_token_id"
FOUND = "--prefix --world_size --pre_name --mixtral --device"


# command and option to the hint
HINTS = {
    (name, option): hint.replace("{name}", name)
    for names, hint, options in (
        ("embed", EMBED_TEXTS, "--prompt --text --texts --input"),
        ("embed", "`--text-file FILE` reads one text per line", "--prompt-file"),
        ("embed", "`--output-file FILE` writes a .npy array, or JSON lines", "-o --output"),
        ("generate", "`--prompt TEXT`", "--text"),
        ("generate", "`--prompt-file FILE`", "--text-file"),
        ("generate", "`--image FILE`, once per image", "--images"),
        ("generate", "`--output-file FILE` writes JSON lines", "-o --output"),
        ("to-hf", SOURCE, "--composer_path --load_checkpoint --model_name_or_path --src_ckpt"),
        ("to-hf", "`-o OUT`", "--hf_output_path --hf_path --output_path --dst_ckpt"),
        ("to-hf", "`--dtype float32`, `float16` or `bfloat16`", "--output_precision"),
        ("to-hf", "leave it out: a remote checkpoint is read where it is", "--local_checkpoint_save_location"),
        ("to-hf", "`llmconv push OUT ORG/NAME` uploads it", "--hf_repo_for_upload --push_to_hub"),
        ("to-hf", "`llmconv generate OUT --backend torch --prompt TEXT` runs it", "--test_uploaded_model"),
        ("export", "FOLDER is an argument: `llmconv export FOLDER`", f"--pretrained_model_name_or_path {NAMES}"),
        ("export", f"{ANY_SIZE} `--shapes static --batch-size N`", "--export_batch_size"),
        ("export", "`--verify`", "--verify_export"),
        ("export", "`-o OUT` writes a new folder", "--output_folder --output_path --inference_model_dir"),
        (f"export {TALKING}", QUANT, "--quant_type --quantization --weight_only_quant_bits"),
        (TALKING, QUANT, "--quant --cachekv_int8 --cachekv_int8_type"),
        (TALKING, "MODEL is an argument: `llmconv {name} MODEL`", f"{NAMES} --pretrained_type"),
        (TALKING, "`llmconv generate PREFILL --decode DECODE` takes the two graphs", GRAPHS),
        (TALKING, IN_A_FILE, "--config --config_path --run_mode --mode --inference_model --dynamic"),
        (TALKING, OF_MODEL, KINDS),
        ("generate", "`--prompt TEXT`, once per prompt, or arguments after FOLDER", "--prompts --predict_data"),
        ("generate", "`--prompt-file FILE`", "--data_file --input_file --predict_file"),
        ("generate", "`--image FILE`, once per image", "--image_path"),
        ("generate", "`--batch-size N`", "--predict_batch_size --max_batch_size"),
        ("generate", "leave it out; `llmconv bench MODEL` measures", "--warmup --generated_time"),
        (TALKING, "`--prefix-tuning PATH`", "--prefix_path --export_precache"),
        (TALKING, "`--adapter PATH`", "--lora_path --adapter_path"),
        (TALKING, "`--tokenizer PATH`", "--tokenizer_path --tokenizer_name_or_path"),
        ("generate chat", "`--max-length N`, prompt included, or `--max-new-tokens N`", TEXT_LENGTHS),
        ("serve", "`--max-new-tokens N`; a request has `max_tokens`", TEXT_LENGTHS),
        (TALKING, "`--max-new-tokens N`", "--max_gen_len"),
        (TALKING, "`--device cuda:N` for torch, `--provider cuda` for graphs", "--device_id --device_map"),
        (TALKING, STAGES, DEVICES),
        (TALKING, "`--dtype` with `--backend torch`", "--model_dtype --precision --autocast_dtype"),
        (TALKING, "leave it out: the graphs of `llmconv export` have attention and a cache that fit", ATTENTION),
        (TALKING, "`generation_config.json` in the model's folder has it", IN_GENERATION_CONFIG),
        (TALKING, "`--template NAME`", "--chat_template"),
        (TALKING, "`hf://ORG/NAME@REVISION`", "--revision"),
        (TALKING, "log in with `hf auth login`, or set HF_TOKEN", "--use_auth_token"),
        (TALKING, "`llmconv export --postprocess topk:K` makes such graphs", "--is_sample_acceleration"),
        (TALKING, "`--session-config FILE` gives options of onnxruntime", "--ge_config_path"),
        ("generate chat", "`--temperature 0` is greedy, any other samples", "--decode_strategy --do_sample"),
        (TALKING, "`--system TEXT`", "--system_prompt"),
        ("generate chat", "`--stop TEXT`", "--stop_tokens"),
        ("serve", "MODEL is an argument: `llmconv serve MODEL`", "--model"),
        ("serve", "`--name NAME`", "--served_model_name"),
        ("serve", "`--port N`", "--flask_port --base_port --server_port"),
        ("generate", "`llmconv serve MODEL --port N`", "--server_port"),
        ("to-hf", SOURCE, "--model --input_path --torch_ckpt_dir --src_checkpoint --src_weights_path"),
        ("to-hf", "`-o OUT`", "--mindspore_ckpt_path --mindspore_path --dst_checkpoint --dst_weights_path"),
        ("to-hf", "`llmconv from-hf MODEL --to mindformers -o OUT` is the other way", "--reversed"),
        ("to-hf", "`--strategy PATH`", "--src_strategy --dst_strategy"),
        ("to-hf", "`--config FILE`", "--src_config_path --dst_config_path --train_yaml"),
        ("to-hf", "`--tokenizer PATH`", "--tokenizer_path --tokenizer_name_or_path"),
        ("to-hf", "`--adapter merge` (the default) or `split`", "--is_peft"),
        ("to-hf", "leave it out: all files of a checkpoint are found by their content", FOUND),
        ("export", IN_A_FILE, "--config --run_mode"),
        ("export", f"{ANY_SIZE} `--shapes static --max-seq-len N`", "--seq_length"),
        (
            "export",
            "leave it out: a folder without weights of safetensors is named with its `to-hf` command",
            "--from_pretrained",
        ),
        ("export", "`-o OUT` writes a new folder", "--inference_model"),
        ("export", "`llmconv merge-lora` before, or `--lora-inputs NAMES`", "--lora_path"),
        ("export", "`--prefix PATH`", "--prefix_path --export_precache"),
        ("export", "`--stages N` divides the graphs", DEVICES),
        (
            "merge-lora",
            "BASE is an argument: `llmconv merge-lora BASE ADAPTER -o OUT`",
            f"{NAMES} --base_model --base_ckpt_path --src_ckpt_path_or_dir",
        ),
        (
            "merge-lora",
            "ADAPTER is an argument: `llmconv merge-lora BASE ADAPTER -o OUT`",
            "--lora_path --adapter_name_or_path --lora_model --lora_ckpt_path",
        ),
        (
            "merge-lora",
            "`-o OUT`",
            "--output_path --merge_lora_model_path --merge_model_path --export_dir --dst_ckpt_path --dst_ckpt_dir",
        ),
        (
            "merge-lora",
            "convert the base first: `llmconv to-hf BASE --strategy PATH`",
            "--src_ckpt_strategy --dst_ckpt_strategy",
        ),
        ("merge-lora", "leave it out: a merge runs on the CPU, in little memory", "--device --low_gpu_mem"),
        ("merge-lora", "leave it out: OUT has safetensors", "--safe_serialization --src_postfix"),
        ("merge-lora", "`--max-shard-size SIZE`", "--export_size"),
        ("merge-lora", "leave it out: it is read from the adapter", "--finetuning_type --llama_type --template"),
        ("merge-lora", "`--alpha A`, where the adapter does not say it: the scale is A / rank", "--lora_scaling"),
    )
    for name in names.split()
    for option in options.split()
}
# values that other programs have, and ours
VALUES = {
    "weight_only_int8": "`int8`",
    "weight_only_int4": "`int4`",
    "wint8": "`int8`",
    "wint4": "`int4`",
    "a8w8c8": "`a8w8` with `--kv-cache int8`",
    "ptq": "`a8w8` with `--calibrate FILE`",
    "nf4": "`int4`, whose codes are integers",
}


def hint_for(command: str, option: str, known: Iterable[str] = ()) -> str:
    """The hint for an `option` that a command does not have, next to its `known` ones; empty for the help alone."""
    dashed, under = option.replace("_", "-"), "--" + option.removeprefix("--").replace("-", "_")
    if dashed != option and dashed in {*known}:
        return HINTS.get((command, option), f"`{dashed}`")
    return HINTS.get((command, option)) or HINTS.get((command, under), "")


def hint_for_value(message: str) -> str:
    """The hint for a refused option value (in backticks in `message`) that another program accepts; empty if none."""
    return next((f"here it is {ours}" for value, ours in VALUES.items() if f": `{value}` is not" in message), "")


@group(cls=CommandGroup, context_settings={"help_option_names": ["-h", "--help"]})
@version_option(__version__, "-V", "--version", prog_name="llmconv")
def main() -> None:
    """From a training checkpoint to verified ONNX graphs.

    Exit codes: 0 success, 1 a difference was found, 2 usage error, 3 input refused,
    4 I/O or a stage on another host failed (safe to --resume), 5 nothing could be compared, 70 a bug of llmconv,
    130 interrupted and 143 terminated (--resume continues).
    """
