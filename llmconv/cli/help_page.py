"""What `--help` shows besides the text of a command: options under headings, and examples."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib import resources

import click

MANY = 15  # number of options from which on they are shown under headings
OTHER, MESSAGES = "Options", "Messages"

# headings in their order, with the parameters below each
COMMON = {
    "Input": "format config tokenizer base adapter strategy root code drop qkv_layout",
    "Prompts": (
        "prompts prompt_file prompt_field images chat template system prompt_prefix src_length add_special_tokens "
        "batch_size"
    ),
    "Sampling and length": (
        "max_new_tokens max_length temperature top_k top_p min_p repetition_penalty num_beams "
        "num_return_sequences stop_strings seed"
    ),
    "Output": "output output_file dtype max_shard_size graphs_only verify stream null overwrite resume dry_run",
    "Merge": "weights initial_adapters combine densities rank majority_sign base_quant alpha check",
    "Division of the work": "part finish workers engine",
    "Graphs": (
        "task no_cache prefill incremental unified graph_name layout embeds last_logits postprocess stages "
        "lora_inputs prefix opset"
    ),
    "Shapes and cache": "shapes max_seq_len prompt_len cache",
    "Runtime and precision": "target strict_target precision logits_dtype",
    "Quantization": "quant quant_block symmetric quant_exclude quant_bits method calibrate static_activations kv_cache",
    "Server": "host port name parallel queue api_key allow_hosts allow_origins",
    "What is compared": "graphs input_map reference allow_changed",
    "Scenarios": "suite scenario budget repeat layers low_memory",
    "Cost of quantization": "text max_divergence min_agreement",
    "Report": "report github bisect minimize record",
    "Other clients": "clients pythons",
    "Model": "backend first_export decode prefix_tuning device trust_remote_code",
    "Runtime": "provider threads session_config timeout prepack packed_cache form speculate",
    "Stages on other hosts": "stage_at stage_timeout",
    MESSAGES: "as_json quiet verbose help",
}
RUNNING = {"tokenizer": "Model", "adapter": "Model", "dtype": "Model"}
# headings of parameters that mean something else in a command
OWN: dict[str, dict[str, str]] = {
    "to-hf": {"trust_remote_code": "Input"},
    "merge-lora": {"seed": "Merge", "tokenizer": "Output"},
    "export": {"batch_size": "Shapes and cache", "trust_remote_code": "Graphs"},
    "verify": {"calibrate": "What is compared", "method": "Scenarios", "adapter": "What is compared"}
    | {"trust_remote_code": "What is compared"},
    "generate": RUNNING,
    "chat": RUNNING,
    "serve": {**RUNNING, "max_new_tokens": "Server", "system": "Server", "template": "Server"},
}
# the commands, in the order of the work
SECTIONS: dict[str, tuple[str, ...]] = {
    "Convert and merge": ("inspect", "to-hf", "from-hf", "merge-lora", "delta"),
    "Export and verify": ("export", "onnx-adapter", "verify", "push", "run"),
    "Generate and serve": ("generate", "embed", "chat", "serve", "serve-stage", "bench"),
    "Other": ("clean", "formats", "families", "doctor"),
}


def path_of(ctx: click.Context) -> str:
    """The words that name a command after `llmconv`, such as `delta apply`; also of a context without parents."""
    names = [ctx.info_name or ""]
    while ctx.parent is not None:
        ctx = ctx.parent
        names.append(ctx.info_name or "")
    return " ".join(reversed(names[:-1] if len(names) > 1 else names))


def heading_of(command: str, parameter: str) -> str:
    """The heading above an option, from the path of the command and the Python name of the parameter."""
    if own := OWN.get(command, {}).get(parameter):
        return own
    return next((heading for heading, names in COMMON.items() if parameter in names.split()), OTHER)


class Command(click.Command):
    """A command whose help has examples, and headings above many options."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As click's, whose parser names no context for an option without its value."""
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            error.ctx = error.ctx or ctx
            raise

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the examples, and the options below headings in the order of `COMMON`."""
        _write_examples(path_of(ctx), formatter)
        rows: dict[str, list[tuple[str, str]]] = {heading: [] for heading in (OTHER, *COMMON)}
        named = [param for param in self.get_params(ctx) if isinstance(param, click.Option)]
        shown = [(param, record) for param in named if (record := param.get_help_record(ctx))]
        for param, record in shown:
            name = "help" if param in (self.get_help_option(ctx),) else param.name or ""
            rows[heading_of(path_of(ctx), name) if len(shown) > MANY else OTHER].append(record)
        for heading, records in rows.items():
            if records:
                with formatter.section(heading):
                    formatter.write_dl(records)


class Group(click.Group):
    """A group whose help lists its commands, each with the whole first sentence of its help."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The commands in the order of the work, not of the alphabet."""
        return list(self.commands)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the commands under headings, where click has one list of sentences that it cuts."""
        for heading, names in (SECTIONS if ctx.parent is None else {"Commands": tuple(self.commands)}).items():
            with formatter.section(heading):
                first = {name: (self.commands[name].help or "").split("\n\n")[0] for name in names}
                formatter.write_dl([(name, " ".join(text.split()).removesuffix(".")) for name, text in first.items()])


@cache
def examples() -> dict[str, list[tuple[str, str]]]:
    """Lines to copy, by command, each with a note; empty for none."""
    texts = tomllib.loads((resources.files(__package__) / "examples.toml").read_text("utf-8"))
    return {
        name: [(line, note) for line, _, note in (row.partition("  # ") for row in text.splitlines())]
        for name, text in texts.items()
    }


def _write_examples(command: str, formatter: click.HelpFormatter) -> None:
    if not (lines := examples().get(command)):
        return
    width = max((len(line) for line, note in lines if note), default=0)
    with formatter.section("Examples"):
        indent = " " * formatter.current_indent
        fits = all(len(indent) + width + 4 + len(note) <= formatter.width for _, note in lines)
        for line, note in lines:
            if not note:
                formatter.write(f"{indent}{line}\n")
            else:
                formatter.write(
                    f"{indent}{line:{width}}  # {note}\n" if fits else f"{indent}{line}\n{indent}    # {note}\n"
                )
