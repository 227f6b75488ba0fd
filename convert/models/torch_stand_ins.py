"""Stand-ins for torch: modules that record names and shapes of their tensors, without data.

Source of names and shapes: torch `nn/modules/{linear,sparse,normalization,conv}.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Self


class Unreadable(Exception):
    """A constructor needs more than stands here for torch and transformers."""


class Opaque:
    """Base of classes whose own base is unknown: such an object may hold weights."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass


class Unknown:
    """Anything without a stand-in, by its name; `is_suspect`: it may hold weights, as an object of an unknown class."""

    def __init__(self, name: str, *, is_suspect: bool = False) -> None:
        self.name = name
        self.is_suspect = is_suspect

    def __getattr__(self, name: str) -> Unknown:
        if name.startswith("__"):
            raise AttributeError(name)
        return Unknown(name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if "default" in kwargs:  # a field of a configuration with a validator around it
            return kwargs["default"]
        return Unknown(self.name, is_suspect=self.name[:1].isupper() and not self.name.isupper())

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return (Opaque,)

    def __getitem__(self, key: Any) -> Unknown:
        return Unknown(self.name)

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def _same(self, *other: Any) -> Any:
        return Unknown(self.name)

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _same
    __pow__ = __rpow__ = __neg__ = __matmul__ = __or__ = __ror__ = __floordiv__ = __rfloordiv__ = _same
    __lt__ = __le__ = __gt__ = __ge__ = _same

    def _raise(self, *other: Any) -> Any:
        raise Unreadable(f"the value of `{self.name}` is not known")

    __bool__ = __len__ = __iter__ = __index__ = __int__ = __float__ = __contains__ = _raise


MODULE_LIMIT = 100_000  # far more modules than any model has; a configuration may ask for any number of them
HOOKS = ("_register_load_state_dict_pre_hook", "register_load_state_dict_post_hook", "register_forward_hook")
SAME_SHAPE = (
    *("to", "float", "half", "clone", "contiguous", "detach", "requires_grad_"),
    *("normal_", "uniform_", "fill_", "zero_"),
)


class Tensor(Unknown):
    """A tensor of `shape`, or of one that is not known (None)."""

    def __init__(self, shape: tuple[int, ...] | None = None) -> None:
        super().__init__("a tensor")
        self.shape = shape

    def __getattr__(self, name: str) -> Any:
        if name in SAME_SHAPE:
            return lambda *args, **kwargs: self
        if name == "size":
            return lambda: self.shape if self.shape is not None else Unknown(name)
        return Tensor() if name == "data" else super().__getattr__(name)

    def _scaled(self, other: Any = 0) -> Tensor:
        same = isinstance(other, int | float) or (isinstance(other, Tensor) and other.shape == self.shape)
        return Tensor(self.shape if same else None)

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __neg__ = _scaled


class Parameter(Tensor):
    """A trained tensor."""

    def __init__(self, data: Any = None, requires_grad: bool = True) -> None:
        super().__init__(data.shape if isinstance(data, Tensor) else None)


class Buffer(Tensor):
    """A tensor that is not trained, and stored if it is `persistent`; it may be of any dtype."""

    def __init__(self, data: Any = None, *, persistent: bool = True) -> None:
        super().__init__(data.shape if isinstance(data, Tensor) else None)
        self.persistent = persistent


def _sized(*sizes: Any, **kwargs: Any) -> Tensor:
    shape = kwargs.get("size", sizes[0] if len(sizes) == 1 and not isinstance(sizes[0], int) else sizes)
    if not isinstance(shape, tuple | list) or any(isinstance(size, Unknown) for size in shape):
        return Tensor()
    if any(type(size) is not int for size in shape):
        raise TypeError(f"{shape!r} is not a shape")
    return Tensor(tuple(shape))


def _parameter(*sizes: Any) -> Parameter:
    shape = tuple(sizes[0]) if isinstance(sizes[0], tuple | list) else sizes
    if any(type(size) is not int for size in shape):
        raise TypeError(f"{shape!r} is not a shape")
    return Parameter(Tensor(shape))


class Module:
    """Notes every parameter, buffer and module that is assigned to it, in order."""

    count = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        Module.count += 1
        if Module.count > MODULE_LIMIT:
            raise Unreadable("more modules than any model has")
        self.__dict__.setdefault("_parts", {})

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, Opaque) or (isinstance(value, Unknown) and value.is_suspect):
            raise Unreadable(f"`{name}` may hold weights")
        parts = self.__dict__.setdefault("_parts", {})
        if isinstance(value, Module | Parameter) or (isinstance(value, Buffer) and value.persistent):
            parts[name] = value
        elif name in parts:
            del parts[name]
        object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        if name in ("training", "device", "dtype", "generation_config"):
            return Unknown(name)
        if name in SAME_SHAPE or name in ("apply", "eval", "train", "bfloat16"):
            return lambda *args, **kwargs: self
        if name in ("post_init", "init_weights", "reset_parameters", "tie_weights", "_init_weights") or name in HOOKS:
            return lambda *args, **kwargs: None
        raise AttributeError(name)

    def __call__(self, *args: Any, **kwargs: Any) -> Unknown:
        return Unknown(type(self).__name__.lower())

    def register_buffer(self, name: str, tensor: Any, persistent: bool = True) -> None:
        object.__setattr__(self, name, tensor)
        if persistent and tensor is not None:
            self._parts[name] = Buffer(tensor)

    def add_module(self, name: str, module: Any) -> None:
        setattr(self, name, module)

    register_module = register_parameter = add_module

    def parameters(self) -> list[Tensor]:
        return [tensor for _, tensor in self.named_tensors()]

    def named_tensors(self, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
        """Parameters and buffers by their names in a state dict, shared ones under every name."""
        for name, part in self.__dict__.get("_parts", {}).items():
            if isinstance(part, Module):
                yield from part.named_tensors(f"{prefix}{name}.")
            else:
                yield prefix + name, part

    def named_modules(self, prefix: str = "") -> Iterator[tuple[str, Module]]:
        """This module and all below by name; names end with a dot."""
        yield prefix, self
        for name, part in self.__dict__.get("_parts", {}).items():
            if isinstance(part, Module):
                yield from part.named_modules(f"{prefix}{name}.")


class Plain(Module):
    """A module without weights, such as an activation, Dropout, a loss, or rotary positions."""


class Linear(Module):
    def __init__(self, in_features: Any, out_features: Any, bias: Any = True, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight = _parameter(out_features, in_features)
        self.bias = _parameter(out_features) if bias else None


class Embedding(Module):
    def __init__(self, num_embeddings: Any, embedding_dim: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.weight = _parameter(num_embeddings, embedding_dim)


class LayerNorm(Module):
    def __init__(
        self,
        normalized_shape: Any,
        eps: Any = 0,
        elementwise_affine: Any = True,
        bias: Any = True,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        self.weight = _parameter(normalized_shape) if elementwise_affine else None
        self.bias = _parameter(normalized_shape) if elementwise_affine and bias else None


class RMSNorm(LayerNorm):
    def __init__(self, normalized_shape: Any, eps: Any = 0, elementwise_affine: Any = True, **kwargs: Any) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, bias=False)


class GroupNorm(LayerNorm):
    def __init__(self, num_groups: Any, num_channels: Any, eps: Any = 0, affine: Any = True, **kwargs: Any) -> None:
        super().__init__(num_channels, eps, affine)


class Conv1d(Module):
    def __init__(
        self,
        in_channels: Any,
        out_channels: Any,
        kernel_size: Any,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: Any = 1,
        bias: Any = True,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        kernel = kernel_size[0] if isinstance(kernel_size, tuple | list) else kernel_size
        self.weight = _parameter(out_channels, in_channels // groups, kernel)
        self.bias = _parameter(out_channels) if bias else None


class ModuleList(Module):
    def __init__(self, modules: Iterable[Any] = ()) -> None:
        super().__init__()
        self.extend(modules)

    def append(self, module: Any) -> None:
        setattr(self, str(len(self._parts)), module)

    def extend(self, modules: Iterable[Any]) -> None:
        for module in modules:
            self.append(module)

    def __iter__(self) -> Iterator[Any]:
        return iter(list(self._parts.values()))

    def __len__(self) -> int:
        return len(self._parts)

    def __getitem__(self, index: Any) -> Any:
        return list(self._parts.values())[index]


class Sequential(ModuleList):
    def __init__(self, *modules: Any) -> None:
        if len(modules) == 1 and isinstance(modules[0], dict):
            super().__init__()
            for name, module in modules[0].items():
                setattr(self, name, module)
        else:
            super().__init__(modules)


class ModuleDict(Module):
    def __init__(self, modules: Any = ()) -> None:
        super().__init__()
        for name, module in dict(modules).items():
            setattr(self, name, module)

    def __getitem__(self, name: str) -> Any:
        return self._parts[name]

    __setitem__ = Module.add_module
    update = __init__


WITHOUT_WEIGHTS = (
    *("Identity", "Dropout", "ReLU", "GELU", "SiLU", "Sigmoid", "Tanh", "Softmax", "Softplus", "LeakyReLU", "ELU"),
    *("ReLU6", "Hardtanh", "Mish", "LogSigmoid", "CrossEntropyLoss", "MSELoss", "BCEWithLogitsLoss", "Flatten"),
    *("AvgPool1d", "MaxPool1d", "Hardswish", "Unfold", "LogSoftmax", "Softsign", "ConstantPad1d", "ZeroPad2d"),
)


class Nn:
    """`torch.nn`."""

    Module, Parameter, Buffer = Module, Parameter, Buffer
    Linear, Embedding, LayerNorm, RMSNorm = Linear, Embedding, LayerNorm, RMSNorm
    GroupNorm, Conv1d, ModuleList, Sequential, ModuleDict = GroupNorm, Conv1d, ModuleList, Sequential, ModuleDict
    ParameterList, ParameterDict = ModuleList, ModuleDict

    def __getattr__(self, name: str) -> Any:
        return type(name, (Plain,), {}) if name in WITHOUT_WEIGHTS else Unknown(name)


class Torch:
    """`torch`."""

    nn = Nn()
    empty = zeros = ones = rand = randn = FloatTensor = staticmethod(_sized)

    @staticmethod
    def log(value: Any, *args: Any, **kwargs: Any) -> Any:
        return value if isinstance(value, Tensor) else Unknown("log")

    exp = expm1 = clamp = log

    @staticmethod
    def normal(*args: Any, size: Any = None, **kwargs: Any) -> Tensor:
        return _sized(size)

    @staticmethod
    def full(size: Any, *args: Any, **kwargs: Any) -> Tensor:
        return _sized(size)

    @staticmethod
    def arange(*args: Any, **kwargs: Any) -> Tensor:
        return Tensor((args[0],) if len(args) == 1 and type(args[0]) is int else None)

    @staticmethod
    def zeros_like(like: Any, *args: Any, **kwargs: Any) -> Tensor:
        return Tensor(like.shape if isinstance(like, Tensor) else None)

    ones_like = empty_like = zeros_like

    @staticmethod
    def tensor(data: Any, *args: Any, **kwargs: Any) -> Tensor:
        is_flat = isinstance(data, list) and all(isinstance(item, int | float) for item in data)
        return Tensor(() if isinstance(data, int | float) else (len(data),) if is_flat else None)

    def __getattr__(self, name: str) -> Any:
        return Tensor if name == "Tensor" else Unknown(name)
