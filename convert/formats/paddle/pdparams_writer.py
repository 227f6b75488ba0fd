"""Writes `.pdparams` as `paddle.save` of a dict of tensors does, streamed; layout in `pdparams.py`.

One pickle of protocol 4, whose arrays may have any size. numpy 1 and 2 both find `numpy.core.multiarray`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from llmconv.convert.formats.paddle.pdparams import NUMPY_CODES, PARAMETER_NAMES
from llmconv.errors import UnsupportedInput
from llmconv.files.pickles.encoder import PickledCall, PickledName, pickle_pieces
from llmconv.tensors import LazyTensor, Piece

CODES = {dtype.name: code for code, dtype in NUMPY_CODES.items() if not dtype.name.startswith("float8")}
RECONSTRUCT = PickledName("numpy.core.multiarray", "_reconstruct")
EMPTY_ARRAY = (PickledName("numpy", "ndarray"), (0,), b"b")
VERSION = 1


def pdparams_pieces(tensors: Mapping[str, LazyTensor]) -> Iterator[Piece]:
    """The pieces of a `.pdparams` file of the tensors, in order.

    Raises:
        UnsupportedInput: numpy, as paddle uses it, has no code for an element type.
    """
    arrays = {name: _array(name, tensor) for name, tensor in tensors.items()}
    # the table gives each parameter its name in the running program; only `paddle.load` reads it
    return pickle_pieces({**arrays, PARAMETER_NAMES: {name: name for name in tensors}}, protocol=4)


def _array(name: str, tensor: LazyTensor) -> PickledCall:
    """A numpy array, as numpy pickles it: `(version, shape, dtype, column_major, bytes)`."""
    if tensor.dtype.name not in CODES:
        raise UnsupportedInput(
            f"`{name}` is {tensor.dtype.name}, which is unsupported in Paddle's files", hint="give `--dtype bfloat16`"
        )
    order = "<" if tensor.dtype.itemsize > 1 else "|"
    dtype = PickledCall(
        PickledName("numpy", "dtype"), (CODES[tensor.dtype.name], False, True), (3, order, None, None, None, -1, -1, 0)
    )
    return PickledCall(RECONSTRUCT, EMPTY_ARRAY, (VERSION, tensor.shape, dtype, False, tensor))
