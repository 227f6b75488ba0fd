"""Custom code of a model: executed only with consent, then exported and verified like other models."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from llmconv.cli import main
from llmconv.errors import InputRefused, MalformedInput, UnsupportedInput
from llmconv.export import INPUT_MAPS, InputMap, export, register_input_map
from llmconv.generation import generate
from llmconv.model_code import model_class
from llmconv.runtime.custom_code import custom_classes, uses_custom_code
from llmconv.runtime.eager.runner import EagerRunner
from llmconv.verify import verify

TRACE = "from pathlib import Path\nPath(__file__).with_name('ran').write_text(__name__)\n"
"""What a module does when it is executed."""

MODEL = f"""{TRACE}
from transformers import LlamaConfig, LlamaForCausalLM
from transformers import PreTrainedTokenizerFast as OwnTokenizer

class OwnConfig(LlamaConfig):
    model_type = "own"

class OwnLlama(LlamaForCausalLM):
    def forward(self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, **others):
        output = super().forward(input_ids, attention_mask, position_ids, past_key_values, **others)
        output.logits = output.logits * 2
        return output

class Own(OwnLlama):
    config_class = OwnConfig
"""
"""A Llama whose logits are twice as large."""

OWN = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.Own"}
NATIVE = {"AutoModelForCausalLM": "own.OwnLlama"}


@pytest.fixture
def with_code(talking: Path, tmp_path: Path) -> Callable[..., Path]:
    """`with_code(model_type, auto_map)` is a folder with weights, graphs, a tokenizer and code."""

    def make(
        model_type: str, auto_map: dict[str, str], code: str = MODEL, tokenizer: dict[str, Any] | None = None
    ) -> Path:
        folder = Path(shutil.copytree(talking, tmp_path / "model"))
        edit(folder / "config.json", model_type=model_type, auto_map=auto_map)
        edit(folder / "tokenizer_config.json", **(tokenizer or {}))
        (folder / "own.py").write_text(code)
        (folder / "custom_generate").mkdir()
        (folder / "custom_generate" / "generate.py").write_text(TRACE)
        return folder

    return make


@pytest.fixture
def own_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """The family `own` is in the table."""
    monkeypatch.setattr("llmconv.export.families.INPUT_MAPS", dict(INPUT_MAPS))
    register_input_map("own", InputMap())


def edit(path: Path, **fields: Any) -> None:
    """Changes fields of a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def run(*arguments: object) -> Result:
    """`llmconv` as a person runs it."""
    return CliRunner().invoke(main, [*map(str, arguments)])


def executed(folder: Path) -> bool:
    """Whether any module in the folder was."""
    return bool(list(folder.rglob("ran")))


@pytest.mark.slow_rows("verify")
@pytest.mark.parametrize("command", ["export --overwrite", "verify", "generate --backend torch --prompt a"])
def test_code_is_not_executed_without_consent(with_code: Callable[..., Path], command: str) -> None:
    folder = with_code("own", OWN)
    name, *options = command.split()
    result = run(name, folder, *options)
    assert result.exit_code == 3 and "is not executed" in result.stderr
    assert "--trust-remote-code" in result.stderr
    assert not executed(folder)


@pytest.mark.slow
def test_a_type_that_transformers_knows_is_built_by_transformers(with_code: Callable[..., Path]) -> None:
    folder = with_code("llama", NATIVE, tokenizer={"auto_map": {"AutoTokenizer": [None, "own.OwnTokenizer"]}})
    export(folder, overwrite=True)
    assert verify(folder)
    assert generate(folder, ["a"], backend="torch", max_new_tokens=1).completions
    assert not executed(folder)


@pytest.mark.slow
def test_the_option_prefers_the_code_of_the_folder(with_code: Callable[..., Path]) -> None:
    folder = with_code("llama", NATIVE)
    report = verify(folder, trust_remote_code=True)  # graphs of transformers' own class
    assert executed(folder) and report.exit_code == 1


@pytest.mark.slow
def test_trusted_code_is_exported_verified_and_run(
    with_code: Callable[..., Path], own_row: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = with_code("own", OWN)
    cache = folder.parent / "cache"
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(cache))
    export(folder, overwrite=True, trust_remote_code=True)
    assert verify(folder, trust_remote_code=True)
    found = [generate(folder, ["a"], backend=b, trust_remote_code=True).completions for b in ("onnx", "torch")]
    assert found[0] == found[1]
    assert not cache.exists() and not list(folder.rglob("__pycache__"))
    assert not (folder / "custom_generate" / "ran").exists()


@pytest.mark.slow
def test_consent_ends_with_the_call(with_code: Callable[..., Path], own_row: None) -> None:
    folder = with_code("own", OWN)
    export(folder, dry_run=True, trust_remote_code=True)
    with pytest.raises(UnsupportedInput, match="is not executed"):
        export(folder, dry_run=True)


def test_a_type_without_a_row_is_refused_before_its_code_runs(with_code: Callable[..., Path]) -> None:
    folder = with_code("own", OWN)
    with pytest.raises(UnsupportedInput, match="no input map for model_type `own`"):
        export(folder, trust_remote_code=True)
    assert not executed(folder)


def test_changed_code_is_read_again(with_code: Callable[..., Path]) -> None:
    folder = with_code("llama", NATIVE)
    fields = json.loads((folder / "config.json").read_text())
    first, same = (custom_classes(folder, fields)[1] for _ in range(2))
    (folder / "own.py").write_text(MODEL.replace("* 2", "* 3"))
    assert first is same is not custom_classes(folder, fields)[1]


def test_folders_of_one_name_do_not_share_their_classes(with_code: Callable[..., Path], tmp_path: Path) -> None:
    folder = with_code("llama", NATIVE)
    fields = json.loads((folder / "config.json").read_text())
    other = Path(shutil.copytree(folder, tmp_path / "other" / folder.name))
    classes = [custom_classes(one, fields)[1] for one in (folder, other)]
    assert classes[0] is not classes[1] and [executed(one) for one in (folder, other)] == [True, True]


@pytest.mark.parametrize(
    ("auto_map", "named"),
    [
        ({"AutoModel": "own.Own"}, ""),
        ({"AutoModel": "own.OwnForConditionalGeneration"}, "own.OwnForConditionalGeneration"),
        ({"AutoModel": "own.Inner", "AutoModelForCausalLM": "own.Own"}, "own.Own"),
    ],
)
def test_a_class_without_a_head_is_not_the_language_model(auto_map: dict[str, str], named: str) -> None:
    assert model_class({"auto_map": auto_map}) == named


@pytest.mark.slow
def test_a_new_folder_contains_the_code(with_code: Callable[..., Path], tmp_path: Path) -> None:
    folder = with_code("llama", NATIVE)
    export(folder, tmp_path / "new", trust_remote_code=True)
    assert (tmp_path / "new" / "own.py").read_text() == MODEL
    assert generate(tmp_path / "new", ["a"], backend="torch", max_new_tokens=1, trust_remote_code=True).completions


OWN_TOKENIZER = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": [None, "own.OwnTokenizer"]}}


def test_a_tokenizers_code_is_not_executed_without_consent(with_code: Callable[..., Path]) -> None:
    folder = with_code("llama", {}, tokenizer=OWN_TOKENIZER)
    with pytest.raises(InputRefused, match="custom code") as refused:
        generate(folder, ["a"])
    assert "--trust-remote-code" in refused.value.hint and not executed(folder)


@pytest.mark.slow
def test_a_trusted_tokenizer_gives_the_tokens_of_the_same_tokenizer(
    with_code: Callable[..., Path], talking: Path
) -> None:
    folder = with_code("llama", {}, tokenizer=OWN_TOKENIZER)
    found = generate(folder, ["a fox"], trust_remote_code=True)
    assert found.completions == generate(talking, ["a fox"]).completions and executed(folder)


@pytest.mark.parametrize("reference", ["org/repository--own.Own", "elsewhere.Own", "..own.Own", "/tmp/own.Own"])
def test_code_from_elsewhere_is_refused(with_code: Callable[..., Path], own_row: None, reference: str) -> None:
    folder = with_code("own", {"AutoModelForCausalLM": reference, "AutoConfig": "own.OwnConfig"})
    with pytest.raises(MalformedInput, match=r"which is not in"):
        export(folder, overwrite=True, trust_remote_code=True)


@pytest.mark.slow_rows("verify-import flash_attention_of_long_ago", "verify-1 / 0")
@pytest.mark.parametrize("code", ["import flash_attention_of_long_ago", "def", "1 / 0"])
@pytest.mark.parametrize("command", ["export --overwrite", "verify"])
def test_failing_code_gives_one_line(with_code: Callable[..., Path], own_row: None, code: str, command: str) -> None:
    result = run(*command.split(), with_code("own", OWN, code), "--trust-remote-code")
    assert result.exit_code == 3 and re.search(r"the code in `|`own\.py` is not valid Python: line 1", result.stderr)
    assert "Traceback" not in result.stderr


COMPUTED = MODEL.replace(
    "class Own(OwnLlama):",
    """class Own(OwnLlama):
    def __init__(self, config):
        super().__init__(config)
        self.register_buffer("kept", torch.full((2,), 3.0), persistent=False)
        self.plain = torch.full((2,), 5.0)
""",
).replace("from transformers import LlamaConfig", "import torch\nfrom transformers import LlamaConfig")


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
def test_values_that_the_code_computes_are_not_lost(with_code: Callable[..., Path], dtype: str) -> None:
    folder = with_code("own", OWN, COMPUTED)
    model = EagerRunner(folder, dtype, code=folder).model
    assert model.kept.tolist() == [3.0, 3.0] and model.plain.tolist() == [5.0, 5.0]
    assert model.lm_head.weight.device.type == "cpu"


@pytest.mark.parametrize("code", ["x = 1", "Own = OwnConfig = None"])
def test_a_missing_class_is_named(with_code: Callable[..., Path], own_row: None, code: str) -> None:
    with pytest.raises(MalformedInput, match=r"`own\.Own`, and that module of .* has no such class"):
        export(with_code("own", OWN, code), overwrite=True, trust_remote_code=True)


@pytest.mark.slow
def test_code_that_fails_when_it_runs_gives_a_one_line_error(with_code: Callable[..., Path], own_row: None) -> None:
    folder = with_code("own", OWN, MODEL.replace("super().forward(", "others['no_such']("))
    result = run("verify", folder, "--trust-remote-code")
    assert result.exit_code == 3 and "fails: KeyError: 'no_such'" in result.stderr


@pytest.mark.parametrize("auto_map", [[], "own.Own", {"AutoModelForCausalLM": 3}, {"AutoModelForCausalLM": None}])
def test_an_invalid_auto_map_is_ignored(auto_map: Any) -> None:
    assert not uses_custom_code({"model_type": "llama", "auto_map": auto_map}, trusted=True)
