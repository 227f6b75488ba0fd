"""TextModel: a tokenizer, and the graphs or the eager model that continue its tokens."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from llmconv.argument_checks import checked
from llmconv.causal_lm import context_length, has_window, language_config
from llmconv.errors import InputRefused, UsageProblem
from llmconv.files.paths import kind_of
from llmconv.files.sources import fetching, local_path
from llmconv.generation.loop import LOOKUP, MTP, OFF, Decode, Guesser, Lookup, LoopEngine, PrefixCache
from llmconv.generation.prompts import (
    EncodedPrompt,
    RequestInputs,
    given_inputs,
    prompt_names,
    require_size,
    require_together,
    token_lists,
)
from llmconv.generation.row import (
    PositionRule,
    Row,
    RowStart,
    TextPiece,
    feed,
    pieces_of,
    positions_of,
    require_streamer,
)
from llmconv.generation.runners import (
    FORMS,
    ModelFiles,
    TorchOptions,
    is_model,
    load_images,
    load_object,
    load_runner,
    with_lora,
)
from llmconv.generation.sampling import GenerationSettings, require_settings
from llmconv.progress import warn
from llmconv.runtime.extra_inputs import GivenInputs
from llmconv.runtime.onnxruntime.session_settings import SessionSettings, StageAddresses
from llmconv.runtime.runner import TOKENS_ONLY, PromptEmbeddings, Runner, default_positions
from llmconv.runtime.tokenizer import TOKENIZER, UNKNOWN, TokenDecoder, encode_prompt, find_tokenizer

if TYPE_CHECKING:
    from llmconv.generation.genai import GenaiEngine
    from llmconv.generation.images import ImageEncoder
    from llmconv.generation.shared_batch import SharedBatch
    from llmconv.generation.structured import GrammarCompiler, TokenMask
    from llmconv.runtime.prefix import Prefix


@dataclass(frozen=True)
class TextModel:
    """A model that continues texts.

    Attributes:
        tokenizer: a tokenizer of transformers.
        runner: the graphs or the eager model.
        defaults: the settings in `generation_config.json`.
        context_length: tokens that the model was made for, prompt and new text together; None if unknown.
        backend: `onnx`, `torch` or `genai`.
        positions: the model's rule for position ids.
        folder: has the configuration.
        images: prepares prompts with images; None for a model that takes none.
        origin: the model that this one shares its graphs with, see `with_adapter`.
        speculate: `lookup` or `off`, the smaller model that guesses, see `open`, or what makes a guesser.
    """

    tokenizer: Any
    runner: Runner
    defaults: GenerationSettings
    context_length: int | None = None
    backend: str = "onnx"
    positions: PositionRule = default_positions
    folder: Path = Path()
    images: ImageEncoder | None = None
    origin: TextModel | None = None
    speculate: str | TextModel | Callable[[], Guesser] = LOOKUP

    @classmethod
    @checked
    def open(  # noqa: PLR0913 - one parameter per option
        cls,
        model: Any,
        decode: str | Path | None = None,
        *,
        tokenizer: Any = None,
        backend: str = "onnx",
        settings: SessionSettings | None = None,
        adapter: str | Path | None = None,
        prefix_tuning: str | Path | None = None,
        trust_remote_code: bool = False,
        device: Any = None,
        dtype: Any = None,
        stages: StageAddresses | None = None,
        speculate: Any = LOOKUP,
        form: str = FORMS[0],
    ) -> TextModel:
        """Opens a folder, a graph, a pair of graphs (prefill, decode), a name in the Hub's cache, or `ModelFiles`.

        Args:
            model: what to open (a download is removed with the last use), or a model of transformers, run by torch.
            decode: the decode graph, if `model` is the prefill graph.
            tokenizer: a tokenizer of transformers, or the folder of one; None for that of the model.
            backend: `onnx` (the graphs), `torch` (the eager model) or `genai` (ONNX Runtime GenAI, if installed).
            settings: session settings of onnxruntime; `torch` takes the number of threads from them.
            adapter: for `torch`: a PEFT adapter, which PEFT applies, or another, merged in memory as `merge-lora`
                would. For graphs of `export --lora-inputs`: a LoRA adapter, or a file of `llmconv onnx-adapter`.
            prefix_tuning: tuned prefix before every prompt: a PEFT adapter folder of prefix tuning, or of prompt tuning
                where the model takes embeddings (`torch`), or PaddleNLP's `pre_caches.npy`.
            trust_remote_code: run the code in the folder: of the tokenizer and, for `torch`, of the model.
            device: torch's device, for `torch`, or its name or number; None for the CPU.
            dtype: `float32`, `float16` or `bfloat16`, for `torch`; None for that of the weights.
            stages: where stages of `export --stages` run that do not run here.
            speculate: `lookup` runs tokens that the text is likely to repeat in the same call, so that a call may give
                several; `off` gives one token per call; `mtp` runs those that the model's own MTP head guesses, for
                graphs of `export --mtp`. Anything else is a smaller model of the same vocabulary that
                guesses these tokens: a `TextModel`, or what is opened as one, with the same backend and settings. The
                tokens are the same.
            form: `auto` rewrites graphs in memory to the form that is fastest on the CPU, with packed weights if these
                take no more than a quarter of the free memory; `mapped` does so without a copy of the weights; `file`
                runs graphs as they are.

        Raises:
            InputRefused: the folder has no tokenizer, neither graphs nor weights, or no graph of an MTP head for `mtp`;
                or a prefix of another model.
            OutOfMemory, StageFailed: the device has too little memory; no stage of this model answers at an address.
            UnsupportedInput: a prefix for a model that caches more than keys and values; a smaller model with another
                vocabulary.
            UsageProblem: an unknown backend, device or dtype, or what only `torch` takes for the graphs.
        """
        options = TorchOptions.of(adapter, device, dtype)
        if not isinstance(speculate, TextModel) and not (isinstance(speculate, str) and speculate in WAYS):
            same: dict[str, Any] = {"backend": backend, "settings": settings, "device": device, "dtype": dtype}
            speculate = _smaller(speculate, form=form, trust_remote_code=trust_remote_code, **same)
        if is_model(model):
            if speculate == MTP:
                raise UsageProblem("`speculate` is `mtp`, and this model runs in torch", hint=GUESSES)
            of_files = {"decode": decode, "stages": stages, "prefix_tuning": prefix_tuning}
            return cls(**parts_of_object(model, tokenizer, settings, options, **of_files))._with_guesses(speculate)
        with fetching() as fetched:
            files = ModelFiles.find(model if decode is None else (model, decode))
            prefix = None
            if prefix_tuning is not None:
                from llmconv.runtime.prefix import open_prefix  # noqa: PLC0415 - most models have none

                prefix = open_prefix(local_path(prefix_tuning))
            tokenizer = find_tokenizer(tokenizer, files.tokenizer or files.folder, trust_remote_code)
            given: dict[str, Any] = {"stages": stages, "prefix": prefix, "trust_remote_code": trust_remote_code}
            given["form"] = form
            parts = parts_of_files(files, backend, settings, options, **given)
            if isinstance(speculate, str) and speculate == MTP:
                from llmconv.generation.mtp import open_head  # noqa: PLC0415 - few models have one

                speculate = open_head(files.folder, parts["runner"], settings, form, parts["context_length"])
            opened = cls(tokenizer, **parts)._with_guesses(speculate)
            fetched.keep_for(opened)
        return opened

    def _with_guesses(self, speculate: str | TextModel | Callable[[], Guesser]) -> TextModel:
        """This model with guesses as `open` has them; UnsupportedInput for a smaller model with another vocabulary."""
        made = replace(self, speculate=speculate)
        if made._guesser and isinstance(speculate, TextModel):
            if self.backend != "onnx" or not self.runner.scores_all(1, 2):
                warn("this model runs one token per call, so the smaller model of `--speculate` is not used")
            elif speculate.backend == "genai":
                raise UsageProblem("GenAI's loop guesses for no other model", hint="open the smaller model without it")
        return made

    def with_adapter(self, adapter: str | Path) -> TextModel:
        """This model with a LoRA adapter (see `open`) in place of any that it has; both share graphs and weights.

        Raises InputRefused for no adapter, one for other modules than the graphs have inputs for, or of another model;
        UnsupportedInput for another kind; UsageProblem if the graphs have no inputs for factors, or the model has a
        tuned prefix.
        """
        from llmconv.runtime.prefix import PrefixedRunner  # noqa: PLC0415 - most models have none

        if isinstance(self.runner, PrefixedRunner):
            problem = "the model has a tuned prefix"
            raise UsageProblem(problem, hint="give `adapter` and `prefix_tuning` to `TextModel.open` together")
        return replace(self, runner=with_lora(self.runner, self.folder, adapter), origin=self)

    def with_image_processor(self, processor: Any) -> TextModel:
        """This model with another image processor of transformers; both share graphs and weights.

        Its images must have the size that the vision tower takes. Raises UsageProblem if the model takes no images, or
        `processor` is something else.
        """
        encoder = self.require_images()
        from transformers.image_processing_base import ImageProcessingMixin  # noqa: PLC0415 - imports torch

        if not isinstance(processor, ImageProcessingMixin):
            has_one = isinstance(getattr(processor, "image_processor", None), ImageProcessingMixin)
            raise UsageProblem(
                f"`image_processor` is {kind_of(processor)}, not an image processor of transformers",
                hint="give its `image_processor`" if has_one else "`AutoImageProcessor.from_pretrained(FOLDER)` is one",
            )
        return replace(self, images=replace(encoder, image_processor=processor))

    @property
    def decode(self) -> TokenDecoder:
        """Tokens to text, without special tokens."""
        return TokenDecoder(self.tokenizer)

    @property
    def longest_prompt(self) -> int:
        """Number of tokens that a prompt can have: the context, or a million if that is unknown."""
        return UNKNOWN if self.context_length is None else self.context_length

    @property
    def sequences(self) -> int | None:
        """Maximum number of prompts in a batch, None for any: one if a tuned prefix precedes padding in a window."""
        return 1 if self.virtual_tokens and has_window(self.folder) else self.runner.max_batch_size

    @property
    def virtual_tokens(self) -> int:
        """Number of tokens of a tuned prefix."""
        return self.runner.virtual_tokens

    @property
    def chat_ends(self) -> frozenset[int]:
        """Tokens that end an answer in a chat: those of the settings, and the tokenizer's end token.

        A chat model that was trained from a base may keep the base's `generation_config.json`, and end its turns with a
        token that only the tokenizer names, or only its template: the first that it writes after an answer, if it
        writes none of the others there.
        """
        own = self.tokenizer.eos_token_id
        ends = self.defaults.eos_token_id | (frozenset() if own is None else {int(own)})
        return ends if ends & {*self._after_answers} else ends | {*self._after_answers[:1]}

    @cached_property
    def _after_answers(self) -> list[int]:
        from llmconv.runtime.chat_templates import answer_end  # noqa: PLC0415 - a text needs none

        return answer_end(self.tokenizer)

    @property
    def _engine(self) -> GenaiEngine | LoopEngine:
        if self.backend == "genai":
            return cast("GenaiEngine", self.runner)
        return LoopEngine(self.runner, self.positions, self.folder, self._guesser, self._mask)

    @cached_property
    def grammars(self) -> GrammarCompiler:
        """What compiles the structures of `GenerationSettings` for the tokenizer."""
        from llmconv.generation.structured import GrammarCompiler  # noqa: PLC0415 - few texts have a structure

        return GrammarCompiler(self.tokenizer, self.decode.special_texts)

    def _mask(self, settings: GenerationSettings) -> TokenMask | None:
        return self.grammars.mask(settings.structure, settings.eos_token_id) if settings.structure else None

    @cached_property
    def _guesser(self) -> Callable[[], Guesser] | None:
        if not isinstance(draft := self.speculate, TextModel):
            return draft if callable(draft) else Lookup if draft == LOOKUP else None
        from llmconv.generation.draft import Draft, shared_vocabulary  # noqa: PLC0415 - few models have one

        sizes = shared_vocabulary(self.tokenizer, draft.tokenizer), language_config(draft.folder).get("vocab_size")
        tokens = min(size for size in sizes if isinstance(size, int))
        return partial(Draft, draft.runner, draft.positions, tokens, draft.context_length)

    def __repr__(self) -> str:
        context = f", context {self.context_length:,}" if self.context_length else ""
        return f"<{type(self).__name__} {self.folder}: {self.backend}{context}>"

    def encode(self, text: str, *, add_special_tokens: bool = True, most: int | None = None) -> list[int]:
        """Tokens of a text, with the special tokens that the tokenizer adds; an empty text becomes the start token.

        Args:
            text: a text.
            add_special_tokens: add the special tokens.
            most: number of tokens that the caller can use; a text of more than twice as many is refused before all of
                it becomes tokens. None for any number.

        Raises:
            InputRefused: the text has no tokens, or more than twice as many as `most`.
            UsageProblem: it is not a string.
        """
        if not isinstance(text, str):
            problem = f"`text` is {kind_of(text)}, not a string"
            raise UsageProblem(problem, hint="give one `str`; for a chat use `encode_chat`")
        start = self.defaults.bos_token_id
        return self._known(encode_prompt(self.tokenizer, text, start, add_special_tokens=add_special_tokens, most=most))

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        template: str = TOKENIZER,
        *,
        add_special_tokens: bool = True,
        most: int | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Tokens of a chat, up to where the answer begins; if the last message is the assistant's, it is continued.

        Args:
            messages: `role` and `content` each, in order.
            template: `tokenizer` for the tokenizer's own, or one of `templates.TEMPLATES`.
            add_special_tokens: add a start token if the template does not write it.
            most: see `encode`.
            variables: further variables of the template, such as `tools` and `enable_thinking`.

        Raises:
            InputRefused: the tokenizer has no chat template, the template fails on the messages, or see `encode`.
            UsageProblem: an unknown template.
        """
        from llmconv.runtime.chat_templates import encode_chat  # noqa: PLC0415 - a text needs none

        options: dict[str, Any] = {"add_special_tokens": add_special_tokens, "most": most, "variables": variables}
        return self._known(encode_chat(self.tokenizer, messages, template, **options))

    @property
    def vocabulary(self) -> int:
        """Number of token ids that a prompt may have: the rows of the embedding, often more than the tokenizer has."""
        return self._vocabulary or len(self.tokenizer)

    @cached_property
    def _vocabulary(self) -> int | None:
        """Number of tokens that the model knows; None if its configuration does not tell."""
        size = language_config(self.folder).get("vocab_size")
        return size if isinstance(size, int) and self.images is None else None

    def _known(self, ids: list[int]) -> list[int]:
        """Raises InputRefused for a token without an embedding: one that was added to the tokenizer alone."""
        if self._vocabulary is None or not ids or max(ids) < self._vocabulary:
            return ids
        token = max(ids)
        problem = f"the prompt has the token `{self.tokenizer.convert_ids_to_tokens(token)}` of id {token}"
        raise InputRefused(
            f"{problem}, and the model knows {self._vocabulary} tokens",
            hint="give the model's own tokenizer, or resize its embeddings (`resize_token_embeddings`) and train them",
        )

    def without_images(self, ids: list[int], name: str = "the prompt") -> list[int]:
        """The tokens of a prompt without images, see `ImageEncoder.without_images`."""
        return ids if self.images is None else self.images.without_images(ids, name)

    def require_images(self) -> ImageEncoder:
        """What prepares prompts with images; raises UsageProblem if the model takes no images."""
        if self.images is None:
            hint = "docs/multimodal.md lists the families that take images, and those that need `export --embeds`"
            raise UsageProblem(f"`{self.folder}` takes no images with the backend `{self.backend}`", hint=hint)
        return self.images

    def encode_images(
        self,
        messages: Sequence[Mapping[str, Any]],
        images: Sequence[Any],
        template: str = TOKENIZER,
        *,
        add_special_tokens: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> EncodedPrompt:
        """A chat with images, which are paths, bytes of files, or images of Pillow; otherwise as `encode_chat`.

        `messages` have a part of type `image` for each image, or none; the other arguments are as
        there. Also raises InputRefused if an image is refused, UsageProblem if the model takes no images.
        """
        from llmconv.generation.images import with_images  # noqa: PLC0415 - most models take none
        from llmconv.runtime.chat_templates import chat_text  # noqa: PLC0415 - a text needs none

        encoder = self.require_images()
        if template == TOKENIZER:  # other templates take texts only
            messages = with_images(messages, len(images))
        text, starts = chat_text(self.tokenizer, messages, template, add_special_tokens, variables)
        return encoder.encode(text, images, starts=starts, most=self.longest_prompt)

    def stream(  # noqa: PLR0913 - what a prompt may have besides tokens
        self,
        prompts: Sequence[Sequence[int]],
        settings: GenerationSettings | None = None,
        cache: PrefixCache | None = None,
        most: int = 0,
        embeddings: Sequence[PromptEmbeddings | None] = (),
        *,
        samples: Sequence[int] = (),
        decode: Decode | None = None,
        streamer: Any = None,
        inputs: Sequence[RequestInputs] | None = None,
        others: SharedBatch | None = None,
        continues: Sequence[bool] = (),
    ) -> Generator[TextPiece]:
        """Continues every prompt, token by token; one `next()` runs at most one step of the model.

        Args:
            prompts: token ids. They form one batch, in which each prompt gives the same text as alone.
            settings: how to continue them; default: `defaults`.
            cache: tokens that have run before: a `Conversation` for a single prompt, which also keeps this turn when
                the stream ends; or a `SharedPrefix`.
            most: maximum number of prompt tokens per step; 0 for all. Each step but the last then yields an empty
                piece.
            samples: number of each prompt's random generator, see `GenerationSettings.seed_of`; of a beam search, the
                rank of the beam that continues it. Default: 0 for all.
            decode: tokens to text; default: that of the model.
            streamer: a `TextStreamer` or another streamer of transformers, for one prompt and without beams: it gets
                the prompt and then each new token, as integer arrays of shape [1, tokens] and [1].
            embeddings: of each prompt, in place of those of some tokens; empty for none. Such prompts do not use
                `cache`.
            inputs: values of the model's extra inputs, by name, for each prompt; others have their defaults. Prompts
                with values neither use nor change `cache`.
            others: streams of this model whose steps a single prompt shares, see `shared_batch`.
            continues: whether the new text of each prompt is read behind it: then a space between both is a part of the
                new text, which sentencepiece's decoder drops where a text begins. Default: no.

        Raises:
            InputRefused: a prompt is longer than the context, embeddings have another size, or a value does not fit an
                extra input.
            UsageProblem: prompts that are not tokens, or settings that the graphs cannot serve.
        """
        settings = self.defaults if settings is None else require_settings(settings)
        starts = self._starts(token_lists(prompts), settings, samples, embeddings, inputs)
        if continues:
            starts = [start._replace(continues=own) for start, own in zip(starts, continues, strict=True)]
        decode = decode or self.decode
        self.require_structure(settings)
        placed = any(start.embeddings for start in starts)
        cache = None if placed or any(start.inputs for start in starts) else cache
        if streamer is not None:
            require_streamer(streamer, len(prompts), settings)
            return feed(streamer, starts[0].prompt, self._engine.grow(starts, settings, decode, cache, most, others))
        if settings.num_beams > 1:
            if placed:
                raise UsageProblem("a beam search takes tokens only", hint="give `--num-beams 1`")
            return self._search(starts, settings, decode)
        return self._engine.grow(starts, settings, decode, cache, most, others)

    def shared_batch(self) -> SharedBatch:
        """For streams of single prompts that run in one call of the model, whenever they start and end."""
        from llmconv.generation.shared_batch import SharedBatch  # noqa: PLC0415 - for a server

        return SharedBatch(self.runner, self.positions)

    def require_structure(self, settings: GenerationSettings) -> None:
        """Raises UsageProblem if texts cannot have the structure, or the rules for tokens, for whatever reason."""
        if settings.rules and (settings.num_beams > 1 or self.backend == "genai"):
            what = "a beam search" if settings.num_beams > 1 else "GenAI's loop"
            problem = f"{what} takes neither log-probabilities nor rules for single tokens"
            raise UsageProblem(problem, hint="leave out `--num-beams`, or `--backend genai`")
        if settings.structure is None:
            return
        if settings.num_beams > 1 or self.backend == "genai":
            what = "a beam search" if settings.num_beams > 1 else "GenAI's loop"
            problem = f"`{settings.structure.name}`: {what} takes no structured output"
            raise UsageProblem(problem, hint="leave out `--num-beams`, or `--backend genai`")
        self.grammars.require(settings.structure, settings.eos_token_id)

    def _starts(
        self,
        prompts: Sequence[Sequence[int]],
        settings: GenerationSettings,
        samples: Sequence[int],
        embeddings: Sequence[PromptEmbeddings | None],
        inputs: Sequence[RequestInputs] | None,
    ) -> list[RowStart]:
        """The rows of a batch before the first token; arguments and errors as in `stream`."""
        if len(prompts) > 1 == self.sequences and self.virtual_tokens:
            problem = "in a batch, padding would shift the window of this model's attention away from the tuned prefix"
            raise UsageProblem(problem, hint="give one prompt at a time")
        limits, given = self.limits(prompts, settings), self.given_inputs(prompts, inputs)
        samples = samples or [0] * len(prompts)
        if len(samples) != len(prompts):
            raise UsageProblem(f"{len(samples)} samples for {len(prompts)} prompts", hint="give one number per prompt")
        starts = list(map(RowStart, prompts, limits, samples, embeddings or [None] * len(prompts), given))
        if any(start.inputs for start in starts):
            require_together([start.inputs or GivenInputs(0) for start in starts], self.runner.extra_inputs)
        for start in starts:
            if start.embeddings:
                require_size(self.embedding_size, start.embeddings.rows, TOKENS_ONLY)
        return starts

    def given_inputs(
        self, prompts: Sequence[Sequence[int]], inputs: Sequence[RequestInputs] | None
    ) -> list[GivenInputs | None]:
        """The values of extra inputs by name for each prompt (token ids), checked; None for a prompt without any.

        Raises InputRefused if a value does not fit an extra input, UsageProblem unless there is one mapping per prompt.
        """
        if inputs is None:
            return [None] * len(prompts)
        count = len(inputs) if isinstance(inputs, Sequence) else kind_of(inputs)
        if count != len(prompts):
            raise UsageProblem(f"{len(prompts)} prompts, and inputs for {count}", hint="give one dict for each prompt")
        several = zip(prompts, inputs, prompt_names(len(prompts)), strict=True)
        found = [given_inputs(one, len(prompt), self.runner.extra_inputs, name) for prompt, one, name in several]
        return [one if one.values else None for one in found]

    @property
    def embedding_size(self) -> int | None:
        """Size of the embeddings that prompts may contain; None if they consist of tokens only."""
        return self.runner.embedding_size

    def _search(self, starts: Sequence[RowStart], settings: GenerationSettings, decode: Decode) -> Generator[TextPiece]:
        """Beam search: the pieces of a text come when all of it is known. Equal neighbors share one search."""
        for _, group in groupby(
            enumerate(starts), key=lambda each: (each[1].prompt, each[1].inputs and each[1].inputs.content)
        ):
            rows = [Row(index, start, settings, decode) for index, start in group]
            count = max(row.sample for row in rows) + 1
            found = self._engine.beams(rows[0].prompt, rows[0].room, settings, count, rows[0].inputs)
            for row in rows:
                yield from pieces_of(row, found[row.sample])

    def search(self, prompt: Sequence[int], settings: GenerationSettings, count: int) -> list[list[int]]:
        """The new tokens of the `count` best beams of one prompt (token ids), best first.

        `settings` have at least `count` beams. Raises InputRefused if the prompt is longer than the context;
        UsageProblem if there are fewer beams, or transformers does not accept the settings.
        """
        limit = self.limits([prompt], settings)[0]
        rows = (Row(0, RowStart(prompt, limit), settings, self.decode) for _ in range(count))
        found = zip(rows, self._engine.beams(prompt, limit, settings, count), strict=True)
        return [[piece.token for piece in pieces_of(*one) if piece.token is not None] for one in found]

    def limits(self, prompts: Sequence[Sequence[int]], settings: GenerationSettings) -> list[int]:
        """Maximum number of new tokens of each prompt; raises InputRefused if one is empty or too long."""
        named = zip(prompt_names(len(prompts)), prompts, strict=True)
        return [self.limit(name, len(prompt), settings) for name, prompt in named]

    def limit(self, name: str, prompt_tokens: int, settings: GenerationSettings) -> int:
        """Maximum number of new tokens of the prompt `name`; InputRefused if it is empty or too long."""
        room = None if self.context_length is None else self.context_length + (not self._engine.runs_last_token)
        context = self.context_length
        wanted = settings.new_tokens(prompt_tokens)
        if prompt_tokens == 0:
            raise InputRefused(f"{name} has no tokens", hint="give a prompt that is not empty")
        if wanted == 0:
            hint = "give a larger `--max-length`, or `--max-new-tokens`, which does not count the prompt"
            raise InputRefused(f"{name} has {prompt_tokens} tokens, but max_length is {settings.max_length}", hint=hint)
        if context is not None and prompt_tokens > context:
            hint = "shorten the prompt, or export with a larger --max-seq-len if the graphs set the limit"
            raise InputRefused(f"{name} has {prompt_tokens} tokens, but the model's context is {context}", hint=hint)
        return wanted if room is None else min(wanted, room - prompt_tokens)


def parts_of_object(
    model: Any, tokenizer: Any, settings: SessionSettings | None, options: TorchOptions, **unused: Any
) -> dict[str, Any]:
    """The fields of a `TextModel` for a model of transformers in memory, on its device and in its dtype.

    `tokenizer` is an object or a folder; `settings` has the number of threads. Raises InputRefused if the folder has no
    tokenizer; UsageProblem without a tokenizer, for `unused` options, which only files have, or for another kind of
    model.
    """
    dtype = str(getattr(model, "dtype", "")).removeprefix("torch.")
    own = {"device": str(getattr(model, "device", "")), "dtype": dtype}
    given = {name: value for name, value in vars(options).items() if value != own.get(name)}
    if odd := next((name for name, value in {**given, **unused}.items() if value is not None), None):
        raise UsageProblem(f"`{odd}` has no effect on a model in memory", hint="load the model with it")
    if tokenizer is None:
        raise UsageProblem("a model in memory has no tokenizer", hint="give `tokenizer`, an object or a folder")
    runner = load_object(model, settings)
    return {
        "tokenizer": find_tokenizer(tokenizer, Path(), False),
        "runner": runner,
        "defaults": GenerationSettings.of_config(runner.model.generation_config.to_dict(), runner.config.to_dict()),
        "context_length": runner.context_length,
        "backend": "torch",
    }


WAYS = (LOOKUP, OFF, MTP)
GUESSES = "give `lookup`, `off`, or the folder of a smaller model"


def _smaller(model: Any, **options: Any) -> TextModel:
    """The draft model of `--speculate MODEL`, a folder or an address; errors name the option."""
    is_path = isinstance(model, str | Path) and model != "" and (Path(model).exists() or "/" in str(model))
    if not is_path and not is_model(model):
        raise UsageProblem(f"`speculate` is {model!r:.40}", hint=GUESSES.replace("`off`", "`off`, `mtp`"))
    try:
        return TextModel.open(model, speculate=OFF, **options)
    except InputRefused as error:
        raise type(error)(f"the smaller model of `--speculate`: {error.message}", hint=error.hint) from error


def parts_of_files(
    files: ModelFiles,
    backend: str,
    settings: SessionSettings | None,
    options: TorchOptions,
    *,
    stages: StageAddresses | None,
    prefix: Prefix | None,
    trust_remote_code: bool,
    form: str,
) -> dict[str, Any]:
    """The fields of a `TextModel` for files, except for the tokenizer; raises as `TextModel.open`."""
    if prefix and backend == "genai":
        raise UsageProblem("`--prefix-tuning`: GenAI begins with an empty cache", hint="leave out `--backend genai`")
    runner = load_runner(files, backend, settings, options, stages, trust_remote_code=trust_remote_code, form=form)
    if prefix:
        from llmconv.runtime.prefix import with_prefix  # noqa: PLC0415 - as above

        runner = with_prefix(runner, prefix)
    # tokens of prompt and new text, of which a tuned prefix takes a part
    context = context_length(files.folder)
    lengths = [context - runner.virtual_tokens if context else None, runner.cache_capacity]
    length = min((length for length in lengths if length is not None), default=None)
    if length is not None and length < 1:
        problem = f"a prefix of {runner.virtual_tokens} tokens leaves no room in the model's context of {context}"
        raise InputRefused(problem, hint="is it the prefix of this model?")
    return {
        "runner": runner,
        "defaults": GenerationSettings.of(files.generation_config or files.folder),
        "context_length": length,
        "backend": backend,
        "positions": positions_of(files.folder),
        "folder": files.folder,
        "images": load_images(files, backend, runner, settings),
    }
