"""Generation with the guesses of an MTP head (`export --mtp`, `--speculate mtp`) against the same loop without."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM
from transformers.cache_utils import DynamicLayer, MtpCache
from transformers.modeling_layers import MtpModel

from benchmarks.exporters import add_tokenizer
from benchmarks.measure import FOLDER, Target, llmconv, report, run
from llmconv.generation import TextModel
from llmconv.runtime import SessionSettings
from tests.builders.mtp_models import save_with_head

THREADS, ROUNDS, PROMPT, NEW = 2, 5, 32, 192
LAYERS, VOCABULARY, TOKENS, ROWS, SECONDS = 6, 128, 64, 2, 60
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "first_k_dense_replace": LAYERS,
    "moe_intermediate_size": 256,
    "max_position_embeddings": 1024,
}


def texts(rows: int, tokens: int, seed: int) -> torch.Tensor:
    """Synthetic text, int64 [rows, tokens]: each token decides the next one, by a fixed permutation."""
    following = torch.randperm(VOCABULARY - 3, generator=torch.Generator().manual_seed(0)) + 3
    ids = torch.randint(3, VOCABULARY, (rows, 1), generator=torch.Generator().manual_seed(seed))
    for _ in range(tokens - 1):
        ids = torch.cat([ids, following[ids[:, -1:] - 3]], dim=1)
    return ids


def trained(folder: Path) -> None:
    """Trains a model and its head for a minute, so that both predict the text."""
    save_with_head(folder, "glm4_moe", **SIZES)
    main = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    main._keys_to_ignore_on_load_unexpected = {rf"\.layers\.{LAYERS}\."}
    head = MtpModel.from_pretrained(main)
    for weight in [*main.parameters(), *head.parameters()]:
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.02)
    optimizer = torch.optim.AdamW({*main.parameters(), *head.parameters()}, lr=1e-3, weight_decay=0.0, fused=True)
    started, step, losses = time.perf_counter(), 0, (0.0, 0.0)
    while time.perf_counter() - started < SECONDS:
        ids = texts(ROWS, TOKENS, step)
        out = main(ids, output_hidden_states=True, use_cache=False)
        of_main = cross_entropy(out.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        states, of_head = out.hidden_states[-1][:, :-2], torch.zeros(())
        for ahead in (1, 2):  # the head's own state takes the place of the model's in a chain of guesses
            past = MtpCache(config=head.config)
            past.layers = [DynamicLayer()]
            given, positions = ids[:, ahead:-1], torch.arange(ahead, TOKENS - 1)[None]
            states = head.forward_layer(0, states, positions, past, input_ids=given)
            of_head = of_head + cross_entropy(
                head._project_to_logits(states).flatten(0, 1), ids[:, ahead + 1 :].flatten()
            )
            states = states[:, :-1]
        optimizer.zero_grad()
        (of_main + of_head).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        step, losses = step + 1, (of_main.item(), of_head.item())
    print(f"{step} steps, losses {losses[0]:.3f} and {losses[1]:.3f}", file=sys.stderr)
    state = {name: tensor.detach() for name, tensor in main.state_dict().items()}
    start = f"model.layers.{LAYERS}."
    state |= {f"{start}{name}": tensor for name, tensor in published(head.layers[0])}
    state |= {f"{start}embed_tokens.weight": state["model.embed_tokens.weight"].clone()}
    state |= {f"{start}shared_head.head.weight": state["lm_head.weight"].clone()}
    save_file(
        {name: tensor.contiguous() for name, tensor in state.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    add_tokenizer(folder)


def published(layer: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of a head's layer under the names of GLM-4.5's checkpoints, experts one by one."""
    for name, tensor in layer.state_dict().items():
        block = name.removeprefix("mtp_block.")
        if block == "mlp.experts.gate_up_proj":
            for number, both in enumerate(tensor.detach()):
                gate, up = both.chunk(2)
                yield f"mlp.experts.{number}.gate_proj.weight", gate
                yield f"mlp.experts.{number}.up_proj.weight", up
        elif block == "mlp.experts.down_proj":
            yield from ((f"mlp.experts.{number}.down_proj.weight", one) for number, one in enumerate(tensor.detach()))
        else:
            yield name.replace("mtp_block.", "").replace("post_norm.", "shared_head.norm."), tensor.detach()


def timed(model: TextModel, prompt: list[int]) -> tuple[float, float, list[int]]:
    """Seconds per new token after the first, tokens per call, and the tokens, of one greedy text without an end."""
    settings = model.defaults.but(max_new_tokens=NEW, eos_token_id=())
    started, guessed, tokens = 0.0, 0, []
    for piece in model.stream([prompt], settings):
        started = started or time.perf_counter()
        guessed += piece.guessed
        tokens += [piece.token] if piece.token is not None else []
    return (time.perf_counter() - started) / (NEW - 1), NEW / (NEW - guessed), tokens


def main() -> int:
    """Measures, prints the table, and returns 1 if a target is missed."""
    folder = FOLDER / "mtp"
    if not (folder / "mtp.onnx").exists():
        trained(folder)
        run(llmconv("export", folder, "--mtp"))
    model = TextModel.open(folder, settings=SessionSettings(threads=THREADS), speculate="mtp")
    off = replace(model, speculate="off")
    ratios, alone, guessing, calls = [], [], [], []
    for number in range(ROUNDS + 1):
        prompt = texts(1, PROMPT, 10_000 + number)[0].tolist()
        without, given = (timed(one, prompt) for one in (off, model))
        if without[2] != given[2]:
            sys.exit("guesses changed the text")
        if number:  # the first is a warm-up
            ratios.append(without[0] / given[0])
            alone.append(1000 * without[0])
            guessing.append(1000 * given[0])
            calls.append(given[1])
    right = np.mean(np.array(given[2]) == texts(1, PROMPT + NEW, 10_000 + ROUNDS)[0, PROMPT:].numpy())
    body = "\n".join(
        [
            f"A GLM-4.5 of {LAYERS} dense layers and an MTP head (width {SIZES['hidden_size']}, float32), trained for",
            f"{SECONDS} s on text in which each token decides the next one; {NEW} new tokens, {THREADS} threads,",
            f"medians of {ROUNDS} texts. {100 * right:.0f} % of the new tokens are those of the text. Guesses changed",
            "no token.",
            "",
            "| guesses | ms per token | tokens per call |",
            "| --- | --- | --- |",
            f"| `--speculate off` | {statistics.median(alone):.1f} | 1 |",
            f"| `--speculate mtp` | {statistics.median(guessing):.1f} | {statistics.median(calls):.2f} |",
        ]
    )
    targets = [Target("times as fast as without", statistics.median(ratios), 1.5, at_least=True)]
    return report("mtp", "Guesses of an MTP head", body, targets)


if __name__ == "__main__":
    sys.exit(main())
