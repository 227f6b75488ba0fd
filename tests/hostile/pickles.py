"""Pickles: code execution by every opcode that calls or builds, and bombs that cost memory or time."""

from __future__ import annotations

import pickle
import struct
from pathlib import Path

from tests.hostile.case import CANARY, Case
from tests.hostile.honest import composer, with_pickle

SHELL = f"touch {CANARY}"
PYTHON = f"open({CANARY!r}, 'w')"
ATTACK = "nothing was run"


def text(value: str) -> bytes:
    """Pushes a text."""
    data = value.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(data)) + data


def named(module: str, name: str) -> bytes:
    """Pushes a global."""
    return f"c{module}\n{name}\n".encode()


def call(module: str, name: str, *args: bytes) -> bytes:
    """Pushes the result of a call."""
    return named(module, name) + b"(" + b"".join(args) + b"tR"


def beside(value: bytes, refused: str | None = None) -> Case:
    """A run that holds one more value, under `evil`, made by these opcodes."""
    return Case(lambda folder: with_pickle(folder, lambda data: data[:-1] + text("evil") + value + b"s."), refused)


def in_front(opcodes: bytes, refused: str | None = None) -> Case:
    """A run whose pickle starts with these opcodes."""
    return Case(lambda folder: with_pickle(folder, lambda data: data[:2] + opcodes + data[2:]), refused)


def weight(value: bytes, refused: str | None) -> Case:
    """A run with one more entry among its weights, made by these opcodes."""
    state = {"model.evil": "put another value here"}

    def build(folder: Path) -> Path:
        own = pickle.dumps("put another value here", 2)[2:-1]
        return with_pickle(folder, lambda data: data.replace(own[:27], value), composer(state))

    return Case(build, refused)


NESTED = pickle.dumps({"nested": 1})

CASES: dict[str, Case] = {
    "reduce: os.system": beside(call("os", "system", text(SHELL)), ATTACK),
    "reduce: posix.system": beside(call("posix", "system", text(SHELL)), ATTACK),
    "reduce: nt.system": beside(call("nt", "system", text(SHELL)), ATTACK),
    "reduce: builtins.eval": beside(call("builtins", "eval", text(PYTHON)), ATTACK),
    "reduce: __builtin__.eval": beside(call("__builtin__", "eval", text(PYTHON)), ATTACK),
    "reduce: builtins.exec": beside(call("builtins", "exec", text(PYTHON)), ATTACK),
    "reduce: builtins.__import__": beside(call("builtins", "__import__", text("os")), ATTACK),
    "reduce: subprocess.Popen": beside(call("subprocess", "Popen", text(SHELL), b"I1\n"), "opcode 0x49|" + ATTACK),
    "reduce: subprocess.check_output": beside(call("subprocess", "check_output", text(SHELL)), ATTACK),
    "reduce: importlib.import_module": beside(call("importlib", "import_module", text("antigravity")), ATTACK),
    "reduce: runpy.run_path": beside(call("runpy", "run_path", text("/etc/profile")), ATTACK),
    "reduce: shutil.rmtree": beside(call("shutil", "rmtree", text("/nonexistent")), ATTACK),
    "reduce: socket.create_connection": beside(call("socket", "create_connection", text("127.0.0.1")), ATTACK),
    "reduce: builtins.getattr": beside(call("builtins", "getattr", named("builtins", "print"), text("__self__"))),
    "reduce: operator.attrgetter": beside(call("operator", "attrgetter", text("system"))),
    "reduce: pkgutil.resolve_name": beside(call("pkgutil", "resolve_name", text("os:system"))),
    "reduce: profile.run": beside(call("profile", "run", text(PYTHON))),
    "reduce: timeit.timeit": beside(call("timeit", "timeit", text(PYTHON))),
    "reduce: bdb.Bdb.run": beside(call("bdb", "Bdb.run", text(PYTHON))),
    "reduce: code.InteractiveInterpreter.runcode": beside(call("code", "InteractiveInterpreter.runcode", text(PYTHON))),
    "reduce: webbrowser.open": beside(call("webbrowser", "open", text("file:///etc/passwd"))),
    "reduce: pip main": beside(call("pip._internal", "main", text("install"))),
    "reduce: numpy runstring": beside(call("numpy.testing._private.utils", "runstring", text(PYTHON), b"}")),
    "reduce: numpy load with pickle": beside(call("numpy", "load", text("/etc/passwd"), b"N\x88")),
    "reduce: numpy core multiarray fromfile": beside(call("numpy", "fromfile", text("/etc/passwd"))),
    "reduce: torch.load": beside(call("torch", "load", text("/etc/passwd"))),
    "reduce: torch.hub.load": beside(call("torch.hub", "load", text("evil/evil"), text("evil"))),
    "reduce: torch.storage._load_from_bytes": beside(
        call("torch.storage", "_load_from_bytes", b"C" + bytes([len(NESTED)]) + NESTED)
    ),
    "reduce: torch.utils.cpp_extension.load_inline": beside(
        call("torch.utils.cpp_extension", "load_inline", text("x"), text("y"))
    ),
    "reduce: nested pickle.loads": beside(call("pickle", "loads", b"C" + bytes([len(NESTED)]) + NESTED)),
    "reduce: nested _pickle.loads": beside(call("_pickle", "loads", b"C" + bytes([len(NESTED)]) + NESTED)),
    "reduce: marshal code object": beside(call("types", "FunctionType", call("marshal", "loads", b"C\x01\xe3"), b"}")),
    "reduce: a name with a dot": beside(call("torch", "os.system", text(SHELL))),
    "reduce: a submodule of os": beside(call("os.path", "os.system", text(SHELL)), ATTACK),
    "reduce: arguments that are not a tuple": beside(named("torch", "Size") + b"]R", "arguments that are not a tuple"),
    "reduce: calls a text": beside(text("os.system") + b"(" + text(SHELL) + b"tR"),
    "reduce: calls the result of a call": beside(call("operator", "methodcaller", text("system")) + b")R"),
    "stack_global: assembled from the memo": beside(
        text("os") + b"r\xff\xff\x00\x000" + b"j\xff\xff\x00\x00" + text("system") + b"\x93(" + text(SHELL) + b"tR",
        ATTACK,
    ),
    "stack_global: names that are not text": beside(b"K\x01K\x02\x93", "something other than text"),
    "stack_global: unicode lookalike of os": beside(text("\u043es") + text("system") + b"\x93(" + text(SHELL) + b"tR"),
    "inst": beside(b"(" + text(SHELL) + b"ios\nsystem\n", ATTACK),
    "obj": beside(b"(" + named("os", "system") + text(SHELL) + b"o", ATTACK),
    "obj: an unknown class": beside(b"(" + named("evil", "Evil") + text(SHELL) + b"o"),
    "newobj": beside(named("subprocess", "Popen") + b"(" + text(SHELL) + b"t\x81", ATTACK),
    "newobj_ex": beside(named("evil", "Evil") + b")}\x92"),
    "build: on a global": beside(named("evil", "Evil") + b"}" + text("__class__") + text("x") + b"sb"),
    "build: __setstate__ of an object": beside(
        call("evil", "Evil") + b"}" + text("__setstate__") + named("evil", "run") + b"sb"
    ),
    "build: on the dict of the checkpoint": Case(
        lambda folder: with_pickle(folder, lambda data: data[:-1] + b"}" + text("x") + b"K\x01sb."), None
    ),
    "append to a global": beside(named("sys", "path") + text("/tmp") + b"a", ATTACK),
    "setitem on a global": beside(named("sys", "modules") + text("os") + b"Ns", ATTACK),
    "append to a text": beside(text("x") + text("y") + b"a", "an object that is not a list"),
    "setitem on a list": beside(b"]" + text("x") + text("y") + b"s", "an object that is not a dict"),
    "ext1": beside(b"\x82\x01", "opcode 0x82"),
    "ext2": beside(b"\x83\x01\x00", "opcode 0x83"),
    "ext4": beside(b"\x84\x01\x00\x00\x00", "opcode 0x84"),
    "persid as text": beside(b"Pos.system\n", "opcode 0x50"),
    "binpersid: a command": beside(b"(" + text("system") + text(SHELL) + b"tQ", "not a storage"),
    "binpersid: a storage of a negative size": beside(
        b"(" + text("storage") + named("torch", "FloatStorage") + text("0") + text("cpu") + b"J\xff\xff\xff\xfftQ",
        "not a storage",
    ),
    "out-of-band buffer": beside(b"\x97", "opcode 0x97"),
    "readonly buffer": beside(b"]\x98", "opcode 0x98"),
    "protocol 0": Case(lambda folder: with_pickle(folder, lambda _: pickle.dumps({"state": [1, "x"]}, 0)), "opcode"),
    "protocol 5": Case(
        lambda folder: with_pickle(folder, lambda _: pickle.dumps({"state": bytearray(3)}, 5)), "`state.model`"
    ),
    "protocol 255": in_front(b"\x80\xff"),
    "a pickle after the pickle": Case(
        lambda folder: with_pickle(folder, lambda data: data + b"cos\nsystem\n."), "after its end"
    ),
    "an empty pickle": Case(lambda folder: with_pickle(folder, lambda _: b""), "truncated or damaged"),
    "a stop on an empty stack": Case(lambda folder: with_pickle(folder, lambda _: b"."), "truncated or damaged"),
    "pops more than there is": in_front(b"000", "truncated or damaged"),
    "a memo that was never filled": beside(b"j\xff\xff\xff\x7f", "truncated or damaged"),
    "a memo index of 2^32 - 1": in_front(b"Nr\xff\xff\xff\xff0"),
    "a text of 2^63 bytes": beside(b"\x8d" + b"\xff" * 7 + b"\x7f", "over the limit"),
    "bytes of 2^64 - 1 bytes": beside(b"\x8e" + b"\xff" * 8, "over the limit"),
    "a bytearray of 4 GB": beside(b"\x96" + struct.pack("<Q", 4 << 30), "over the limit"),
    "a text of a negative size": beside(b"T\xff\xff\xff\xff", "over the limit"),
    "a text that ends after the pickle": beside(b"X" + struct.pack("<I", 1 << 20), "is truncated"),
    "a number of 2^31 bytes": beside(b"\x8b\xff\xff\xff\x7f", "over the limit"),
    "a number of 255 bytes": beside(b"\x8a\xff" + b"\x7f" * 255, "over the limit"),
    "a frame of 2^63 bytes": in_front(b"\x95" + b"\xff" * 8),
    "a name without an end": beside(b"c" + b"a" * 5000, "unfinished name"),
    "a name that is not text": beside(b"c\xff\xfe\nx\n", "truncated or damaged"),
    "100,000 marks": in_front(b"(" * 100_000, "nested deeper"),
    "a tuple a million deep": beside(b")" + b"\x85" * 1_000_000, "nested deeper"),
    "a tuple a million deep as key": in_front(b"})" + b"\x85" * 1_000_000 + b"Ns0"),
    "a list a million deep": beside(b"]" * 1_000_000 + b"a" * 999_999, "nested deeper|times its own size"),
    "6 million memo entries": in_front(b"N" + b"\x94" * 6_000_000 + b"0", "memoizes more than"),
    "6 million opcodes": in_front(b"N0" * 3_000_000),
    "billion laughs by dup": beside(b"]Na" + (b"2" + b"\x86") * 60, "again and again"),
    "billion laughs by memo": beside(
        b"]q\xf0" + b"".join(b"0](h\xf0h\xf0h\xf0h\xf0h\xf0h\xf0h\xf0h\xf0h\xf0h\xf0eq\xf0" for _ in range(30)),
        "again and again",
    ),
    "a list that contains itself": beside(b"]q\xf0h\xf0a", "contains itself"),
    "unhashable keys": beside(b"}(]N}N]\x85Nu"),
    "keys that are not text": beside(b"}(K\x01NNN\x88NG\x7f\xf8\x00\x00\x00\x00\x00\x00N)Nu"),
    "an object as key": beside(b"}" + call("evil", "Evil") + b"Ns"),
    "an odd number of keys and values": beside(b"}(Nu", "truncated or damaged|inconsistent"),
    "the same key twice": Case(
        lambda folder: with_pickle(folder, lambda data: data[:-1] + text("state") + b"}s."), "`state.model`"
    ),
    "a set of lists": beside(b"\x8f(]]\x90"),
    "a frozen set of dicts": beside(b"(}}\x91"),
    "an ordered dict of no pairs": beside(
        call(
            "collections",
            "OrderedDict",
            b"]",
        ),
        None,
    ),
    "an ordered dict of triples": beside(call("collections", "OrderedDict", b"](NNNtaq\xf1"), "inconsistent"),
    "bytes in an unknown encoding": beside(call("_codecs", "encode", text("x"), text("rot13")), "encodes bytes"),
    "bytes by the zip codec": beside(call("_codecs", "encode", text("x"), text("zlib")), "encodes bytes"),
    "a size of a text": beside(call("torch", "Size", text("xyz"))),
    "a weight that is an object": weight(call("evil", "Evil"), "an object that was not rebuilt"),
    "a weight that is a command": weight(call("os", "system", text(SHELL)), ATTACK),
    "a weight that is quantized": weight(
        call("torch._utils", "_rebuild_qtensor", b"N"), "an object that was not rebuilt"
    ),
    "a weight from numpy": weight(
        call("torch._utils", "_rebuild_device_tensor_from_numpy", b"N"), "an object that was not rebuilt"
    ),
    "a weight without a storage": weight(call("torch._utils", "_rebuild_tensor_v2", *[b"N"] * 6), "without a storage"),
    "a weight with a hook": weight(
        call("torch._tensor", "_rebuild_from_type_v2", named("os", "system"), b"NNN"), ATTACK
    ),
}
