"""FourierFT: W + scaling · Re(inverse FFT of a sparse spectrum) (arXiv 2405.03003; PEFT `tuners/fourierft/layer.py`).

The file contains the values of the spectrum; their positions are the first of a permutation that torch draws from
`random_loc_seed`. The whole update of a tensor is computed at once by an inverse FFT: 16 bytes per element.
"""

from __future__ import annotations

import numpy as np

from llmconv.convert.adapters.tuners import FittingShape, Tuner, WeightShape
from llmconv.convert.adapters.tuners.module_tensors import ModuleTensors, RowChange, first_of_permutation
from llmconv.errors import MalformedInput
from llmconv.tensors import Array


def fit(learned: ModuleTensors) -> FittingShape:
    """Any size; the number of frequencies must be the config's."""
    (count,), settings = learned.shape("fourierft_spectrum", 1), learned.settings
    expected = settings.of_module("n_frequency_pattern", learned.module, settings.positive("n_frequency", 1000))
    learned.same("the number of frequencies", count, int(expected))
    settings.number("scaling", 150)
    if not isinstance(seed := settings.fields.get("random_loc_seed", 777), int):
        raise MalformedInput(
            f"the adapter config has {seed!r} for `random_loc_seed`, so the positions of its frequencies are unknown",
            hint="ask the adapter's author for the seed it was trained with",
        )
    return None, None


def require(learned: ModuleTensors, shape: WeightShape) -> None:
    """The weight has at least as many elements as there are frequencies."""
    if (count := learned.shape("fourierft_spectrum")[0]) > shape[0] * shape[1]:
        raise learned.misfit(f"{count} frequencies for {shape[0]}×{shape[1]} weights")


def delta(learned: ModuleTensors, shape: WeightShape) -> RowChange:
    """Rows of the update, from half of the spectrum's Hermitian part, whose transform is the real part."""
    values, settings = learned.read("fourierft_spectrum"), learned.settings
    seed = settings.fields.get("random_loc_seed", 777)
    rows, columns = np.divmod(first_of_permutation(shape[0] * shape[1], len(values), seed), shape[1])
    spectrum = np.zeros((shape[0], shape[1] // 2 + 1), np.complex128)
    for down, across in ((rows, columns), (-rows % shape[0], -columns % shape[1])):
        near = across < spectrum.shape[1]
        np.add.at(spectrum, (down[near], across[near]), values[near] / 2)
    change: Array = np.fft.irfft2(spectrum, s=shape) * settings.number("scaling", 150)
    return lambda weight, start: change[start : start + len(weight)]


TUNER = Tuner(
    peft_type="FOURIERFT",
    parts=("fourierft_spectrum",),
    fields=("n_frequency", "n_frequency_pattern", "scaling", "random_loc_seed"),
    fit=fit,
    delta=delta,
    require=require,
    conv1d=True,
)
