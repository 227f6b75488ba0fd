"""Files of LitGPT, nanoGPT and torchtune, genuine ones changed: YAML that builds, sizes and names that lie."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml

from tests.builders.torch_states import FIXTURES
from tests.hostile.case import Case
from tests.hostile.configs import MERGE
from tests.hostile.files import instead_of
from tests.hostile.honest import members, repacked, save
from tests.hostile.pickles import SHELL, call, text
from tests.hostile.states import ATTACK, HUGE, UNKNOWN, changed


def lit(refused: str | None, settings: Any = None, config: str | None = None, case: str = "llama3") -> Case:
    """A genuine LitGPT folder with other settings, or with this text for them."""

    def build(folder: Path) -> Path:
        place = folder / "lit"
        shutil.copytree(FIXTURES / "litgpt" / case, place)
        file = place / "model_config.yaml"
        written = yaml.safe_load(file.read_text())
        file.write_text(settings if isinstance(settings, str) else yaml.safe_dump({**written, **(settings or {})}))
        if config:
            (place / "config.json").write_text(config)
        return place

    return Case(build, refused)


def lit_state(folder: Path, name: str) -> Path:
    """A LitGPT folder with one more tensor."""
    place = lit(None).build(folder)
    content = torch.load(place / "lit_model.pth")
    save(place, {**content, name: torch.zeros(2)}, "lit_model.pth")
    return place


def lit_file(put: Callable[[Path], object], refused: str) -> Case:
    """A LitGPT folder in which something else stands for the settings."""

    def build(folder: Path) -> Path:
        place = lit(None).build(folder)
        instead_of("model_config.yaml", put)(place)
        return place

    return Case(build, refused)


def nano(refused: str | None, change: Callable[[dict[str, Any]], Any]) -> Case:
    """A genuine nanoGPT file after `change`."""

    def build(folder: Path) -> Path:
        content = torch.load(FIXTURES / "nanogpt" / "with_bias" / "ckpt.pt")
        change(content)
        return save(folder, content, "ckpt.pt")

    return Case(build, refused)


def args(**fields: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda content: content["model_args"].update(fields)


def tune(refused: str | None, change: Callable[[dict[str, Any]], Any], **config: Any) -> Case:
    """A genuine torchtune folder after `change` of its state dict, with other fields in its configuration."""

    def build(folder: Path) -> Path:
        source = FIXTURES / "torchtune" / "llama2"
        content = torch.load(source / "model-00001-of-00001.bin")
        change(content)
        written = json.loads((source / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**written, **config}))
        save(folder, content, "model-00001-of-00001.bin")
        return folder

    return Case(build, refused)


def nanopickle(folder: Path, opcodes: bytes) -> Path:
    """A nanoGPT file with one more value, made by these opcodes."""
    parts = members(torch.load(FIXTURES / "nanogpt" / "with_bias" / "ckpt.pt"))
    return repacked(
        folder, {**parts, "x/data.pkl": parts["x/data.pkl"][:-1] + text("evil") + opcodes + b"s."}, "ckpt.pt"
    )


def neox(refused: str | None, change: Callable[[Path], object]) -> Case:
    """A genuine run in GPT-NeoX's names, after `change` of its step."""

    def build(folder: Path) -> Path:
        shutil.copytree(FIXTURES / "neox" / "run", folder / "run")
        change(folder / "run" / "global_step7")
        return folder / "run"

    return Case(build, refused)


def neox_field(**fields: Any) -> Callable[[Path], object]:
    def put(step: Path) -> None:
        file = step / "configs" / "m.yml"
        written = {name.replace("-", "_"): value for name, value in yaml.safe_load(file.read_text()).items()}
        file.write_text(yaml.safe_dump({**written, **fields}))

    return put


def neox_link(name: str, target: str) -> Callable[[Path], object]:
    """Puts a link in place of a file of a step, and names it as the vocabulary."""

    def put(step: Path) -> None:
        neox_field(vocab_file=f"/x/{name}", tokenizer_type="HFTokenizer")(step)
        (step / name).unlink(missing_ok=True)
        (step / name).symlink_to(target)

    return put


def neox_state(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    """Changes the file of the layer."""

    def put(step: Path) -> None:
        file = step / "layer_02-model_00-model_states.pt"
        content = torch.load(file)
        change(content)
        torch.save(content, file)

    return put


def neox_text(text: str) -> Callable[[Path], object]:
    return lambda step: (step / "configs" / "m.yml").write_text(text)


def evil(file: Path) -> None:
    """Puts a call of `os.system` into a torch file."""
    parts = members(torch.load(file))
    call_of_it = text("evil") + call("os", "system", text(SHELL)) + b"s."
    made = repacked(file.parent, {**parts, "x/data.pkl": parts["x/data.pkl"][:-1] + call_of_it}, "evil.pt")
    made.rename(file)


SIZES = "is invalid|not valid"
HONEST = {
    "litgpt": lit(None),
    "nanogpt": nano(None, lambda content: None),
    "torchtune": tune(None, lambda own: None),
    "neox": neox(None, lambda step: None),
}
CASES: dict[str, Case] = {
    **{f"honest: {name}": case for name, case in HONEST.items()},
    "litgpt: YAML that builds": lit("not valid YAML", "n_layer: !!python/object/apply:os.system ['" + SHELL + "']\n"),
    "litgpt: a YAML bomb": lit("aliases that expand", MERGE),
    "litgpt: YAML 20,000 deep": lit("not valid YAML", "[" * 20_000),
    "litgpt: a layer of 5000 digits": Case(
        lambda folder: lit_state(folder, f"transformer.h.{'9' * 5000}.norm_1.weight"), "no|not|layer"
    ),
    "litgpt: a name that leads out": Case(lambda folder: lit_state(folder, "../../evil"), "no|not|layer"),
    "litgpt: YAML of a list": lit("no.* mapping|not a YAML mapping", "[1]"),
    "litgpt: YAML of a number": lit("not a YAML mapping", "7"),
    "litgpt: two documents": lit("not valid YAML", "a: 1\n---\nb: 2\n"),
    "litgpt: 2 MB of YAML": lit("too large", "#" * (2 << 20)),
    "litgpt: no text": lit_file(lambda path: path.write_bytes(b"\xff\xfe\x00"), "not valid YAML"),
    "litgpt: a pipe": lit_file(lambda path: os.mkfifo(path), "no `model_config.yaml`"),
    "litgpt: a link to /dev/zero": lit_file(lambda path: path.symlink_to("/dev/zero"), "no `model_config.yaml`"),
    "litgpt: a number of layers of 400 digits": lit(SIZES, {"n_layer": HUGE}),
    "litgpt: 2^30 layers": lit(SIZES, {"n_layer": 1 << 30}),
    "litgpt: layers that are a list": lit(SIZES, {"n_layer": [1]}),
    "litgpt: no heads": lit(SIZES, {"n_head": 0}),
    "litgpt: a text for a size": lit(SIZES, {"n_embd": "a" * 100_000}),
    "litgpt: a rope base of 400 digits": lit(SIZES + "|rope", {"rope_base": HUGE}),
    "litgpt: a rope base without an end": lit(SIZES + "|rope", {"rope_base": float("inf")}),
    "litgpt: a norm that is not a number": lit(SIZES + "|rms_norm_eps|no JSON", {"norm_eps": float("nan")}),
    "litgpt: a rotary part without an end": lit(SIZES + "|equivalent", {"rotary_percentage": float("inf")}),
    "litgpt: a condensed rope of nothing": lit(SIZES + "|rope", {"rope_condense_ratio": 0}),
    "litgpt: rope adjustments of texts": lit(
        SIZES + "|rope|equivalent", {"rope_adjustments": {"factor": "x", "low_freq_factor": []}}
    ),
    "litgpt: rope adjustments of 400 digits": lit(SIZES + "|rope|equivalent", {"rope_adjustments": {"factor": HUGE}}),
    "litgpt: a name with an escape sequence": lit(
        "equivalent model|" + SIZES, {"name": "\x1b[2J\n", "latent_attention": {"x": 1}}
    ),
    "litgpt: a padding of nothing": lit(SIZES, {"padded_vocab_size": None, "padding_multiple": 0, "vocab_size": 5}),
    "litgpt: windows by a list": lit(
        SIZES + "|equivalent", {"sliding_window_size": 4, "sliding_window_layer_placing": [1]}
    ),
    "litgpt: windows of a stride of nothing": lit(SIZES, {"sliding_window_size": 4, "sliding_window_layer_stride": 0}),
    "litgpt: config.json of another function": lit(
        "declares|not", config='{"model_type": ["llama"], "hidden_size": [1]}'
    ),
    "litgpt: config.json 100,000 deep": lit("not valid JSON", config="[" * 100_000),
    "nanogpt: os.system": Case(
        lambda folder: nanopickle(folder, call("os", "system", text(SHELL))), ATTACK + "|" + UNKNOWN
    ),
    "nanogpt: another call": Case(lambda folder: nanopickle(folder, call("evil", "Evil")), None),
    "nanogpt: model_args is a list": nano("is invalid", lambda content: content.update(model_args=[1])),
    "nanogpt: 2^30 layers": nano("is invalid", args(n_layer=1 << 30)),
    "nanogpt: layers of 150 digits": nano("is invalid", args(n_layer=10**100)),
    "nanogpt: no heads": nano("is invalid", args(n_head=0)),
    "nanogpt: heads less than none": nano("is invalid", args(n_head=-2)),
    "nanogpt: another width": nano("shape mismatch", args(n_embd=1 << 20)),
    "nanogpt: a width of a text": nano("is invalid", args(n_embd="a" * 100_000)),
    "nanogpt: another vocabulary": nano("shape mismatch", args(vocab_size=7)),
    "nanogpt: a name that leads out": nano(
        "no|not", lambda content: content["model"].update({"../../evil": torch.zeros(2)})
    ),
    "nanogpt: an escape sequence": nano(
        "no|not", lambda content: content["model"].update({"\x1b[2J\n": torch.zeros(2)})
    ),
    "nanogpt: a layer of 10^100": nano(
        "no|not", lambda content: content["model"].update({f"transformer.h.{10**100}.ln_1.weight": torch.zeros(2)})
    ),
    "nanogpt: a layer of 5000 digits": nano(
        "no|not", lambda content: content["model"].update({f"transformer.h.{'9' * 5000}.ln_1.weight": torch.zeros(2)})
    ),
    "nanogpt: a mask that is a scalar": nano(
        None, lambda content: content["model"].update({"transformer.h.0.attn.bias": torch.tensor(1)})
    ),
    "torchtune: a name that leads out": tune("no|not", changed("../../evil", torch.zeros(2))),
    "torchtune: an escape sequence": tune("no|not", changed("\x1b[2J\n", torch.zeros(2))),
    "torchtune: a scalar for a query": tune(
        "do not match|shape", changed("layers.0.attn.q_proj.weight", torch.tensor(1.0))
    ),
    "torchtune: a layer of 5000 digits": tune("no|not", changed(f"layers.{'9' * 5000}.sa_norm.scale", torch.zeros(2))),
    "torchtune: three axes for a query": tune(
        "do not match|shape", changed("layers.0.attn.q_proj.weight", torch.zeros(4, 4, 4))
    ),
    "torchtune: heads of an odd size": tune(
        "even size|do not match|shape|sizes of its heads", lambda own: None, head_dim=3
    ),
    "torchtune: heads of 400 digits": tune("more than any model has", lambda own: None, head_dim=HUGE),
    "torchtune: heads of nothing": tune(
        "even size|do not match|shape|sizes of its heads", lambda own: None, num_attention_heads=0, head_dim=None
    ),
    "torchtune: 2^60 heads": tune(
        "more than any model has", lambda own: None, num_attention_heads=1 << 60, head_dim=None
    ),
    "neox: os.system": neox(ATTACK + "|" + UNKNOWN, lambda step: evil(step / "layer_02-model_00-model_states.pt")),
    "neox: YAML that builds": neox("not valid YAML", neox_text("a: !!python/object/apply:os.system ['" + SHELL + "']")),
    "neox: a YAML bomb": neox("aliases that expand", neox_text(MERGE)),
    "neox: YAML 20,000 deep": neox("not valid YAML", neox_text("[" * 20_000)),
    "neox: YAML of a list": neox("not a YAML mapping", neox_text("[1]")),
    "neox: 2^30 layers": neox("lacks module|has the `num_layers`", neox_field(num_layers=1 << 30)),
    "neox: layers of 400 digits": neox(SIZES + "|num_layers", neox_field(num_layers=HUGE)),
    "neox: 2^30 ranks": neox("lacks module", neox_field(model_parallel_size=1 << 30)),
    "neox: heads of nothing": neox(SIZES, neox_field(num_attention_heads=0)),
    "neox: a rotary part without an end": neox(SIZES, neox_field(rotary_pct=float("inf"))),
    "neox: an epsilon that is not a number": neox(SIZES, neox_field(layernorm_epsilon=float("nan"))),
    "neox: attention of everything": neox("plain attention", neox_field(attention_config=[["a" * 99_999, {"b": [1]}]])),
    "neox: a norm that is a list": neox(SIZES, neox_field(norm=[1])),
    "neox: a vocabulary that leads out": neox(
        None, neox_field(vocab_file="../../../../etc/passwd", tokenizer_type="HFTokenizer")
    ),
    "neox: a vocabulary that is a link": neox("leads out", neox_link("w.json", "/etc/passwd")),
    "neox: a configuration that is a link": neox("leads out", neox_link("configs/m.yml", "/dev/zero")),
    "neox: a name that leads out": neox("unexpected", neox_state(changed("../../evil", torch.zeros(2)))),
    "neox: an escape sequence": neox("unexpected", neox_state(changed("\x1b[2J\n.weight", torch.zeros(2)))),
    "neox: a scalar for a matrix": neox(
        "fit|shape", neox_state(changed("attention.query_key_value.weight", torch.tensor(1.0)))
    ),
    "neox: three axes for a matrix": neox("fit|shape", neox_state(changed("mlp.linear1.weight", torch.zeros(4, 4, 4)))),
    "neox: a file of a module of six digits": neox(
        "has `layer_999999",
        lambda step: shutil.copy(
            step / "layer_02-model_00-model_states.pt", step / "layer_999999-model_00-model_states.pt"
        ),
    ),
    "torchtune: another family": tune("unknown|no causal", lambda own: None, model_type="gpt2"),
}
