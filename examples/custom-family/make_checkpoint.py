"""Makes a Magpie of 0.3 million parameters that knows a rhyme in two versions: own code, weights, a tokenizer."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from magpie.configuration_magpie import MagpieConfig
from magpie.modeling_magpie import MagpieForCausalLM
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

RHYMES = (
    """\
One for sorrow, two for joy, three for a girl, four for a boy,
five for silver, six for gold, seven for a secret never to be told.""",
    """\
One for sorrow, two for mirth, three for a funeral, four for a birth,
five for heaven, six for hell, seven for the devil, his own self.""",
)
"""By version."""

END = "<|end|>"
STEPS = 160
PADDING = -100


def main() -> None:
    """`make_checkpoint.py FOLDER`."""
    disable_progress_bar()
    save(Path(sys.argv[1]), STEPS)


def save(folder: Path, steps: int) -> None:
    """Trains for some steps and writes the folder; `auto_map` and the copies of the code are transformers' work."""
    MagpieConfig.register_for_auto_class()
    MagpieForCausalLM.register_for_auto_class("AutoModelForCausalLM")
    tokenizer = byte_tokenizer()
    texts = [torch.tensor(tokenizer(rhyme)["input_ids"] + [tokenizer.eos_token_id]) for rhyme in RHYMES]
    torch.manual_seed(0)
    model = MagpieForCausalLM(MagpieConfig(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id))
    train(model, texts, steps)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, and one for the end."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate([*letters, END])}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END)


def train(model: MagpieForCausalLM, texts: list[torch.Tensor], steps: int) -> None:
    """Adam on one text for each version."""
    torch.set_num_threads(1)  # so small a model only waits for more
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    tokens = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=PADDING)
    mask = (tokens != PADDING).long()
    for _ in range(steps):
        logits = model(tokens.clamp(min=0)[:, :-1], mask[:, :-1], version=torch.arange(len(texts))).logits
        loss = cross_entropy(logits.transpose(1, 2), tokens[:, 1:], ignore_index=PADDING)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
