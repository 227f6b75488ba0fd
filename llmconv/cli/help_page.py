"""What `--help` shows besides the text of a command: options under headings, and examples."""

from __future__ import annotations

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
    "Runtime": "provider threads session_config timeout prepack packed_cache",
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
# lines to copy, by command, each with a note
EXAMPLES: dict[str, tuple[tuple[str, str], ...]] = {
    "inspect": (
        ("llmconv inspect model", "a folder"),
        ("llmconv inspect ep0-ba2-rank0.pt --json", "one file, for a program"),
        ("llmconv inspect hf://org/name", "a model of the Hub: headers only"),
    ),
    "to-hf": (
        ("llmconv to-hf ep0-ba2-rank0.pt -o base", "a Composer checkpoint"),
        ("llmconv to-hf llama-2-13b -o base --dry-run", "a folder of consolidated.NN.pth"),
        ("llmconv to-hf epoch3 -o tuned --base llama-2", "trained by LLaMA2-Accessory"),
        ("llmconv to-hf llama.ckpt -o base --config run.yaml", "a MindFormers checkpoint"),
        ("llmconv to-hf latest-rank0.pt -o tuned --base llama-2", "a LoRA run with only the adapter"),
        ("llmconv to-hf saved -o model --config config.json", "written by accelerate's save_state or save_model"),
        ("llmconv to-hf model -o half --dtype bfloat16", "a Hugging Face folder in another element type"),
        (
            "llmconv to-hf run.pt -o own --code baichuan-13b --trust-remote-code",
            "a model that only its own code computes",
        ),
    ),
    "from-hf": (
        ("llmconv from-hf base -o llama --to meta --shards 2", "a folder of consolidated.NN.pth"),
        ("llmconv from-hf base -o run --to mindformers", "a folder of MindFormers"),
        ("llmconv from-hf base -o run --to paddle --dry-run", "what would be written"),
    ),
    "merge-lora": (
        ("llmconv merge-lora base adapter -o merged", ""),
        ("llmconv merge-lora base style facts -o merged --weight 0.7 --weight 1", "two adapters, weighted"),
        ("llmconv merge-lora base style facts -o merged --combine ties --density 0.4 --check", ""),
        ("llmconv merge-lora base-nf4 adapter -o merged --base-quant dequantize", "a quantized base"),
    ),
    "delta apply": (
        ("llmconv delta apply llama-7b vicuna-7b-delta-v1.1 -o vicuna-7b", ""),
        ("llmconv delta apply llama-2-13b accessory-diff -o tuned", "consolidated.NN.pth and ….model-diff.pth"),
        ("llmconv delta apply base delta -o tuned --dry-run", "names and sizes only"),
    ),
    "delta extract": (
        ("llmconv delta extract llama-2-7b tuned -o tuned-delta", ""),
        ("llmconv delta extract llama-2-7b tuned -o tuned-lora --rank 64", "a LoRA adapter that is close to it"),
        ("llmconv delta extract llama-2-7b tuned -o tuned-delta --to fastchat", ""),
    ),
    "export": (
        ("llmconv export model", "graphs next to the weights, which are not copied"),
        ("llmconv export model -o int4 --quant int4 --verify", "a new folder of a quarter of the size"),
        ("llmconv export model -o app --layout genai --precision float16", "for ONNX Runtime GenAI"),
        ("llmconv export model --shapes static --max-seq-len 2048", "fixed axes, as NPUs need them"),
    ),
    "onnx-adapter": (
        ("llmconv onnx-adapter base style -o style.onnx_adapter", "base: `export --lora-inputs all-linear`"),
        ("llmconv onnx-adapter base style -o style.onnx_adapter --alpha 16", "files without lora_alpha"),
        ("llmconv onnx-adapter base style -o style.onnx_adapter --dry-run", "names and shapes only"),
    ),
    "verify": (
        ("llmconv verify model", "a folder that `export` wrote"),
        ("llmconv verify int4 --reference model --report report", "quantized weights; report.html shows it"),
        ("llmconv verify model --suite full --bisect", "all scenarios; the first node that differs"),
        ("llmconv verify --graph decoder_model.onnx --reference model", "a graph of another exporter"),
    ),
    "push": (
        ("llmconv push merged me/merged --private", ""),
        ("llmconv push merged me/merged --revision v2 --verify-upload", "another branch, compared afterwards"),
        ("llmconv push merged me/merged --dry-run", "what would be uploaded"),
    ),
    "run": (
        ("llmconv run model.yaml --dry-run", "what is to be done, and why"),
        ("llmconv run model.yaml --set adapter=runs/lora-2 --set verify.suite=full", "other values"),
        ("llmconv run --schema", "for editors"),
    ),
    "generate": (
        ('llmconv generate model --prompt "Once upon a time"', ""),
        ('llmconv generate model "What is ONNX?" --chat --stream --max-new-tokens 200', "an answer, as it comes"),
        ("llmconv generate model --prompt-file prompts.jsonl --output-file out.jsonl", "many prompts"),
        ('llmconv generate model --prompt "Once" --backend torch', "the eager model, without graphs"),
    ),
    "embed": (
        ('llmconv embed model "a text" "another text"', "model has the graph of `export --task embed`"),
        ("llmconv embed model --text-file texts.txt --output-file rows.npy", "a row per line"),
        ('llmconv embed model "a question" --prompt-name query', "with the model's own prompt in front"),
    ),
    "chat": (
        ("llmconv chat model", ""),
        ('llmconv chat model --system "Answer in one sentence." --temperature 0', ""),
        ("llmconv chat model --backend torch --device cuda", "the eager model"),
    ),
    "serve": (
        ("llmconv serve model", "http://127.0.0.1:8000: a chat page, and OpenAI's API under /v1"),
        ("llmconv serve model --port 9000 --name my-model --parallel 8", ""),
        ("llmconv serve model --host 0.0.0.0 --allow-host gpu-box", "with a key in LLMCONV_API_KEY"),
    ),
    "serve-stage": (
        ("llmconv serve-stage model --stage 2", "of graphs of `export --stages 2`"),
        ("llmconv serve-stage model --stage 2 --listen 10.0.0.2:7700", "for another host of a private network"),
        ("llmconv serve-stage model --stage 2 --provider cuda --json", "on a GPU; the address as JSON"),
    ),
    "bench": (
        ("llmconv bench model", ""),
        ("llmconv bench model --against torch --lengths 128,512 --repeat 5", "graphs and the eager model"),
        ("llmconv bench int4 --against model --csv speed.csv --plot speed.png", "two folders"),
    ),
    "clean": (
        ("llmconv clean s3://bucket/models/base", ""),
        ("llmconv clean s3://bucket/models/base --dry-run", "what would be deleted"),
        ("llmconv clean gs://bucket/models/base --json", ""),
    ),
    "formats": (
        ("llmconv formats", ""),
        ("llmconv formats --json", "for a program"),
        ("llmconv formats -q", "without messages"),
    ),
    "families": (
        ("llmconv families", ""),
        ("llmconv families --json", "also the types that are not exported, and why"),
        ("llmconv families -q", "without messages"),
    ),
    "doctor": (
        ("llmconv doctor", ""),
        ("llmconv doctor --json", "for a report of a bug"),
        ("llmconv doctor -q", "without messages"),
    ),
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


def _write_examples(command: str, formatter: click.HelpFormatter) -> None:
    if not (examples := EXAMPLES.get(command)):
        return
    width = max((len(line) for line, note in examples if note), default=0)
    with formatter.section("Examples"):
        indent = " " * formatter.current_indent
        fits = all(len(indent) + width + 4 + len(note) <= formatter.width for _, note in examples)
        for line, note in examples:
            if not note:
                formatter.write(f"{indent}{line}\n")
            else:
                formatter.write(
                    f"{indent}{line:{width}}  # {note}\n" if fits else f"{indent}{line}\n{indent}    # {note}\n"
                )
