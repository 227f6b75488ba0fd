"""How many rows of the embedding are tokens: Megatron pads it to a multiple of a number and of the tensor ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmconv.convert.formats.megatron.arguments import Arguments
from llmconv.convert.tokenizers.ids import vocabulary_size
from llmconv.errors import InputRefused, MalformedInput


def true_vocabulary(
    arguments: Arguments, padded: int, given: Mapping[str, Any], tokenizer: Mapping[str, bytes], warnings: list[str]
) -> int:
    """The number of tokens: the user's `vocab_size`, else that of the tokenizer.

    Args:
        arguments: of the run.
        padded: rows of the embedding.
        given: fields of the user.
        tokenizer: files by name, empty where there are none.
        warnings: gets a line where rows are cut off by the tokenizer.

    Raises:
        InputRefused: neither is known.
        MalformedInput: there are more tokens than rows.
    """
    asked, counted = given.get("vocab_size"), vocabulary_size(tokenizer)
    size = asked if asked is not None else counted
    if size is None and arguments.values.get("vocab_size") == padded:
        return padded
    if size is None:
        raise InputRefused(
            f"the embedding of `{arguments.source}` has {padded} rows, and it does not contain how many are tokens",
            hint=f"give the tokenizer with `--tokenizer`, or `vocab_size` with `--config` ({padded} keeps all rows)",
        )
    if type(size) is not int or not 0 < size <= padded:
        raise MalformedInput(
            f"the embedding of `{arguments.source}` has {padded} rows, the vocabulary {str(size)[:40]} tokens",
            hint="give the tokenizer and the configuration of this model",
        )
    if asked is None and size < padded:
        warnings.append(
            f"the tokenizer has {size} tokens: the other {padded - size} rows of the embedding were cut off as padding"
        )
    return size
