"""Write the tiny Llama of this folder: a Composer checkpoint, and a LoRA adapter for it.

    python train.py [OUT]        # OUT: the folder to write into; without it, the one this file lies in

Everything is made here from one seed: the stories (a small grammar, below), a byte-level BPE tokenizer, a Llama of
151k parameters trained by Composer's Trainer, and a PEFT LoRA adapter for the one kind of story the base saw little of.
Nothing is downloaded.

The kept files were written by Python 3.11, mosaicml 0.32.1, torch 2.13.0 (CPU), transformers 4.53.3,
tokenizers 0.21.4, peft 0.16.0, safetensors 0.8.0 and numpy 2.2.6. A second run on the same machine gives the same
weights; the checkpoint file as a whole differs, because Composer also keeps clock times in it.
"""

import contextlib
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from composer import Trainer
from composer.metrics import LanguageCrossEntropy
from composer.models import HuggingFaceModel
from composer.optim import CosineAnnealingWithWarmupScheduler, DecoupledAdamW
from composer.utils import reproducibility
from peft import LoraConfig, PeftModel, TaskType, get_peft_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch.utils.data import DataLoader
from transformers import (
    BatchEncoding,
    DataCollatorForLanguageModeling,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

SEED = 17
NAME = "tiny-llama"
VOCAB_SIZE = 480  # nearly every word of the grammar is one token
CONTEXT = 128  # tokens; the longest story has fewer than 100
BATCH = 32  # stories
EPOCH = 600  # batches
BASE_EPOCHS, ADAPTER_EPOCHS = 4, 1
PROMPT = "Once there was a clever"

T = TypeVar("T")
Story = Callable[[random.Random], str]

OPENINGS = ("Once there was a", "Long ago there was a", "In a far land lived a")
ADJECTIVES = ("small", "brave", "happy", "clever", "sleepy", "wise")
TIMES = ("morning", "day", "evening")

HEROES = (  # what it usually is, animal, home
    ("clever", "fox", "under an old oak"),
    ("brave", "mouse", "in a warm barn"),
    ("happy", "duck", "by a quiet pond"),
    ("sleepy", "bear", "in a dark cave"),
    ("small", "rabbit", "in a green valley"),
    ("wise", "owl", "in a tall tree"),
)
NAMES = (  # name, subject, object
    ("Pip", "she", "her"),
    ("Tom", "he", "him"),
    ("Mia", "she", "her"),
    ("Finn", "he", "him"),
    ("Lily", "she", "her"),
    ("Otto", "he", "him"),
)
PLACES = ("near the river", "in the long grass", "behind a big stone", "on the road")
TREASURES = (  # what is found, what two friends do with it
    ("red ball", "they played with it until the sun went down"),
    ("sweet apple", "they ate it together in the warm sun"),
    ("golden key", "they opened a tiny door with it"),
    ("blue kite", "they let it fly over the river"),
    ("silver bell", "they rang it all day long"),
)
TROUBLES = (  # what is wrong with a friend, what the hero gives
    ("hungry", "a bowl of hot soup"),
    ("cold", "a soft red scarf"),
    ("lost", "a map of the wood"),
)

ROBOTS = ("Bolt", "Gizmo", "Spark", "Cog")
BOATS = ("an iron ship", "a paper boat", "a yellow raft")
SEAS = ("cold", "wide", "stormy")
SIGHTS = (  # what is met at sea, what the robot does, what that teaches
    ("a lost whale", "sang to it and led it home", "a kind song can show the way"),
    ("a great storm", "took down the sails and waited", "wait, and the sun will come back"),
    ("a dark lighthouse", "climbed up and lit the lamp", "one small light can help many"),
    ("a sinking boat", "threw a rope and pulled hard", "help first, and ask later"),
)


def pick(rng: random.Random, items: Sequence[T]) -> T:
    """Choose one item, early ones more often: greedy text then follows a clear preference, not a near tie."""
    return rng.choices(items, weights=[1 / (i + 1) for i in range(len(items))])[0]


def animal_story(rng: random.Random) -> str:
    """An animal finds something and shares it, or helps a friend."""
    usual, animal, home = pick(rng, HEROES)
    adjective = usual if rng.random() < 0.5 else pick(rng, ADJECTIVES)
    name, she, _ = pick(rng, NAMES)
    friend, _, them = pick(rng, [n for n in NAMES if n[0] != name])
    friend_animal = pick(rng, [a for _, a, _ in HEROES if a != animal])
    place = pick(rng, PLACES)
    if rng.random() < 0.6:
        thing, play = pick(rng, TREASURES)
        plot = f"found a {thing} {place}. {she.capitalize()} showed it to {friend} the {friend_animal}, and {play}."
    else:
        trouble, gift = pick(rng, TROUBLES)
        plot = f"met {friend} the {friend_animal} {place}. {friend} was {trouble}, so {name} gave {them} {gift}."
    return (
        f"{pick(rng, OPENINGS)} {adjective} {animal} named {name}. {name} lived {home}. "
        f"One {pick(rng, TIMES)}, {she} {plot} At night {name} went home and slept well."
    )


def robot_story(rng: random.Random) -> str:
    """A robot meets something at sea, and there is a moral in it."""
    name = pick(rng, ROBOTS)
    sight, deed, moral = pick(rng, SIGHTS)
    return (
        f"{pick(rng, OPENINGS)} {pick(rng, ADJECTIVES)} robot named {name}. "
        f"{name} sailed {pick(rng, BOATS)} over the {pick(rng, SEAS)} sea. "
        f"One {pick(rng, TIMES)}, it met {sight}. {name} {deed}. So remember: {moral}."
    )


def base_story(rng: random.Random) -> str:
    """Nearly always an animal. A few robots, since LoRA leaves the embedding alone: their words must be known."""
    return animal_story(rng) if rng.random() < 0.9 else robot_story(rng)


def train_tokenizer(stories: Sequence[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE that knows printable ASCII (other bytes become <unk>) and puts <s> first, as Llama's does."""
    special = ["<pad>", "<s>", "</s>", "<unk>"]
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    # "Ġ" and "Ċ" stand for space and newline.
    alphabet = [chr(c) for c in range(ord("!"), ord("~") + 1)] + ["Ġ", "Ċ"]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(stories, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )


def loader(story: Story, seed: int, batches: int, tokenizer: PreTrainedTokenizerFast) -> DataLoader[BatchEncoding]:
    """Batches of padded stories, each between <s> and </s>; padding does not count in the loss."""
    rng = random.Random(seed)
    stories = [tokenizer(story(rng) + "</s>") for _ in range(batches * BATCH)]
    collate = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    generator = torch.Generator().manual_seed(seed)
    return DataLoader(stories, BATCH, shuffle=True, collate_fn=collate, generator=generator)


def fit(
    model: LlamaForCausalLM | PeftModel,
    tokenizer: PreTrainedTokenizerFast,
    story: Story,
    epochs: int,
    save_folder: str | None = None,
) -> None:
    """Train with Composer, print the loss on unseen stories, and leave one checkpoint in `save_folder`."""
    wrapped = HuggingFaceModel(model, tokenizer, use_logits=True, eval_metrics=[LanguageCrossEntropy()])
    trainable = [p for p in model.parameters() if p.requires_grad]
    trainer = Trainer(
        model=wrapped,
        optimizers=DecoupledAdamW(trainable, lr=3e-3, betas=(0.9, 0.95), weight_decay=1e-6),
        schedulers=CosineAnnealingWithWarmupScheduler(t_warmup="100ba", alpha_f=0.02),
        train_dataloader=loader(story, SEED, EPOCH, tokenizer),
        eval_dataloader=loader(story, SEED + 1, 8, tokenizer),
        max_duration=f"{epochs}ep",
        eval_interval=f"{epochs}ep",
        save_folder=save_folder,
        save_interval=f"{epochs}ep",
        save_latest_filename=None,
        run_name=NAME,  # else Composer draws a random one
        seed=SEED,
        device="cpu",
        progress_bar=False,
    )
    trainer.fit()
    print(f"loss on unseen stories: {trainer.state.eval_metric_values['LanguageCrossEntropy']:.3f} nats per token")
    trainer.close()


def tell(model: LlamaForCausalLM | PeftModel, tokenizer: PreTrainedTokenizerFast, tokens: int) -> str:
    """The prompt, continued greedily by at most `tokens` tokens."""
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    out = model.eval().generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False)
    return tokenizer.decode(out[0], skip_special_tokens=True)


def main(out: Path) -> None:
    """Train the base model and the adapter, and write both into `out`."""
    torch.set_num_threads(1)  # sums in a fixed order: the same weights each time
    reproducibility.seed_all(SEED)
    rng = random.Random(SEED)
    # As many robots as animals, or their words would get no tokens of their own.
    tokenizer = train_tokenizer([story(rng) for _ in range(2000) for story in (animal_story, robot_story)])
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=144,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=CONTEXT,
            tie_word_embeddings=True,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    )
    # Composer records the save folder in the checkpoint: a relative one says nothing about this machine.
    with tempfile.TemporaryDirectory() as scratch, contextlib.chdir(scratch):
        fit(model, tokenizer, base_story, BASE_EPOCHS, save_folder="checkpoints")
        (checkpoint,) = Path("checkpoints").glob("*.pt")
        shutil.copyfile(checkpoint, out / checkpoint.name)
    print(f"base:    {tell(model, tokenizer, 80)}")

    model.name_or_path = NAME  # what adapter_config.json will call its base
    modules = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    tuned = get_peft_model(model, LoraConfig(task_type=TaskType.CAUSAL_LM, r=8, lora_alpha=16, target_modules=modules))
    fit(tuned, tokenizer, robot_story, ADAPTER_EPOCHS)
    print(f"adapter: {tell(tuned, tokenizer, 80)}")
    tuned.peft_config["default"].target_modules = sorted(modules)  # PEFT keeps a set, whose order changes by run
    # "auto" would ask the hub whether the base's vocabulary was resized.
    tuned.save_pretrained(out / "adapter", save_embedding_layers=False)
    (out / "adapter" / "README.md").unlink()  # an empty model card


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else Path(__file__).resolve().parent)
