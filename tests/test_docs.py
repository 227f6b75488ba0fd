"""What the documentation says is true: links lead somewhere, pages are up to date, the README's session runs."""

from __future__ import annotations

import ast
import inspect
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import llmconv
import llmconv.cli
from llmconv.convert.formats import formats
from llmconv.export import INPUT_MAPS
from tests.conftest import save_tiny
from tools import action_page, fields_page, formats_page, site_hooks

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = [
    page
    for pattern in (
        "*.md",
        "docs/*.md",
        "docs/start/*.md",
        "plugins/*/*.md",
        "examples/*/*.md",
        "tests/fixtures/**/*.md",
    )
    for page in sorted(ROOT.glob(pattern))
]
LLMCONV = Path(sys.executable).parent / "llmconv"


def blocks(page: Path, language: str) -> list[str]:
    """The code blocks of a page in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    targets = re.findall(r"\]\(([^)#\s]+)", text)
    broken = [target for target in targets if "://" not in target and not (page.parent / target).exists()]
    assert not broken


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_column_of_a_table_has_a_header(page: Path) -> None:
    headers = re.findall(r"^(\|.*)\n\|[ :|-]+\|$", page.read_text(), re.MULTILINE)
    assert [line for line in headers if re.search(r"\|\s*\|", line)] == []


def test_the_page_of_the_command_line_is_up_to_date() -> None:
    command = [sys.executable, "-m", "tools.cli_page", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_table_of_formats_is_up_to_date() -> None:
    text = (ROOT / formats_page.PAGE.page).read_text()
    assert formats_page.PAGE.with_part(text, formats_page.table()) == text


def test_the_table_of_the_fields_of_requests_is_up_to_date() -> None:
    text = (ROOT / fields_page.PAGE.page).read_text()
    assert fields_page.PAGE.with_part(text, fields_page.table()) == text


def test_the_table_of_the_inputs_of_the_action_is_up_to_date() -> None:
    text = (ROOT / action_page.PAGE.page).read_text()
    assert action_page.PAGE.with_part(text, action_page.tables()) == text
    assert all(f"| `{name}` |" in text for name in ("source", "verify-options", "verdict"))


def test_every_command_has_a_section() -> None:
    sections = re.findall(r"^## llmconv (\S+)$", (ROOT / "docs/cli.md").read_text(), re.MULTILINE)
    assert sections == list(llmconv.cli.main.commands)


@pytest.mark.slow
def test_every_room_that_the_documentation_imports_from_is_reachable_by_its_name() -> None:
    text = "\n".join(page.read_text() for page in PAGES)
    rooms = sorted({*re.findall(r"(?:from|import) `?llmconv\.(\w+)", text)} - {"lm_eval"})  # which needs an extra
    assert {"convert", "embedding", "output"} <= {*rooms} <= {*llmconv.__all__}
    lines = [f"assert llmconv.{room}.__name__ == 'llmconv.{room}'" for room in rooms]
    subprocess.run([sys.executable, "-c", "\n".join(["import llmconv", *lines])], check=True)


def first_cells(page: Path) -> set[str]:
    """What the first columns of a page's tables name."""
    return set(re.findall(r"`([\w-]+)`", "\n".join(re.findall(r"^\| (.*?) \|", page.read_text(), re.MULTILINE))))


def test_the_page_of_what_is_read_names_every_format() -> None:
    assert {*formats()} <= first_cells(ROOT / "docs/reading.md")


def test_the_page_of_families_names_every_family() -> None:
    assert {*INPUT_MAPS} <= first_cells(ROOT / "docs/families.md")


def test_the_readme_and_contributing_name_only_words_of_the_makefile() -> None:
    targets = set(re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in (README, ROOT / "CONTRIBUTING.md"):
        words = re.findall(r"(?:^|`)make ([a-z-]+)(?: ([a-z-]+))?", page.read_text(), re.MULTILINE)
        assert {word for pair in words for word in pair if word} <= targets


def test_make_alone_lists_the_words() -> None:
    done = subprocess.run(["make", "--no-print-directory"], cwd=ROOT, capture_output=True, text=True, check=True)
    listed = [line.split()[1] for line in done.stdout.splitlines()]
    words = "setup demo test test-slow clients check fix bench families versions mutants other-exporters docs site"
    assert listed == [*words.split(), "pictures", "fuzz", "wheel", "size"]


@pytest.mark.slow
def test_the_session_of_the_readme_is_what_happens(tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (session,) = blocks(README, "console")
    for step in re.split(r"^\$ ", session, flags=re.MULTILINE)[1:]:
        command, _, shown = step.partition("\n")
        assert_shown(shown, run(shlex.split(command), tmp_path))


def test_no_sigma_that_a_page_shows_is_above_the_largest_that_it_shows() -> None:
    wrong, seen = [], 0
    for page in PAGES:
        for step in re.split(r"^\$ ", "".join(blocks(page, "console")), flags=re.MULTILINE):
            if largest := re.search(r"largest sigma ([\d.]+) \((.*), [^,]+\)$", step, re.MULTILINE):
                lines = re.findall(r"^PASSED \| ([^|]*) \| .*?sigma ([\d.]+)", step, re.MULTILINE)
                above = [line for line in lines if float(line[1]) > float(largest[1])]
                other = [line for line in lines if line[0] == largest[2] and line[1] != largest[1]]
                wrong += [(str(page), line) for line in (*above, *other)]
                seen += len(lines)
    assert seen >= 3 and wrong == []


API = ROOT / "docs/api.md"


def test_the_page_about_python_names_every_public_function_and_these_before_the_classes() -> None:
    named = [value for found in site_hooks.NAMES.finditer(API.read_text()) for value, _ in site_hooks.named(found)]
    kinds = ["class" if inspect.isclass(value) else "function" for value in named]
    assert kinds == sorted(kinds, reverse=True) and len({*named}) == len(named)
    rooms = [getattr(llmconv, name) for name in llmconv.__all__ if name not in {"__version__", "pipeline", "runtime"}]
    public = {getattr(room, name) for room in rooms for name in getattr(room, "__all__", []) if name.islower()}
    assert {*filter(inspect.isfunction, public)} | {llmconv.pipeline} == {*filter(inspect.isfunction, named)}


@pytest.mark.slow
def test_the_examples_of_the_page_about_python_run(tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    sections = re.split(r"^## ", API.read_text(), flags=re.MULTILINE)
    apart = ("Embed", "Serve", "Upload")
    codes = [(text, re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)) for text in sections]
    runs = "".join(code for text, found in codes for code in found if not text.startswith(apart))
    imports = "\n".join(re.findall(r"^from .*", API.read_text(), re.MULTILINE))
    done = subprocess.run([sys.executable, "-c", f"{imports}\n{runs}"], cwd=tmp_path, check=True, capture_output=True)
    assert b"robot named Bolt" in done.stdout


START = sorted((ROOT / "docs/start").glob("*.md"))


@pytest.mark.one_row_in(4)
@pytest.mark.slow
@pytest.mark.parametrize("page", START, ids=lambda page: page.stem)
def test_the_session_of_a_start_page_is_what_happens(page: Path, tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    parts = re.findall(r"^```(console|python)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    for language, text in parts:
        if language == "python":
            subprocess.run([sys.executable, "-c", text], cwd=tmp_path, check=True)
            continue
        for step in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
            line, _, shown = step.partition("\n")
            code = re.search(r"# exit code (\d+)", line)
            assert_shown(shown, run(shlex.split(line, comments=True), tmp_path, int(code[1]) if code else 0))


def test_every_start_page_is_on_the_first_page_and_in_the_menu() -> None:
    first, menu = (ROOT / "docs/index.md").read_text(), (ROOT / "mkdocs.yml").read_text()
    assert [page.name for page in START if f"start/{page.name}" not in first or f"start/{page.name}" not in menu] == []


def string_parts() -> set[str]:
    """Every string in the sources, f-strings in their constant parts."""
    sources = (path for room in ("llmconv", "convert", "export", "verify") for path in (ROOT / room).rglob("*.py"))
    nodes = (node for path in sources for node in ast.walk(ast.parse(path.read_text())))
    return {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}


@pytest.mark.slow
def test_a_message_under_troubleshooting_is_one_of_the_program() -> None:
    text = (ROOT / "docs/troubleshooting.md").read_text()
    messages = re.findall(r"^### (.*)$", text.partition("## Messages")[2].partition("## Symptoms")[0], re.MULTILINE)
    parts = [part.strip() for message in messages for part in re.split(r"…,?", message) if part.strip()]
    sources = string_parts()
    assert len(messages) > 5
    assert [part for part in parts if not any(part in found for found in sources)] == []


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(tmp_path / "site")]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    api = (tmp_path / "site/api.html").read_text()
    assert all(
        f'id="llmconv.{name}"' in api
        for name in ("convert.to_hugging_face.to_hf", "export.exporter.export", "verify.run.verify")
    )
    assert "repository" in (tmp_path / "site/search/search_index.json").read_text()


def run(command: list[str], folder: Path, code: int = 0) -> str:
    """Runs a command of llmconv and returns what a person would see."""
    assert command[0] == "llmconv"
    path = {**os.environ, "COLUMNS": "200"}
    done = subprocess.run(
        [LLMCONV, *command[1:]],
        cwd=folder,
        env=path,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    assert done.returncode == code, done.stdout
    return done.stdout


def assert_shown(shown: str, seen: str) -> None:
    """What the README shows was seen, and is all of it unless it has `…`, but for the digits of measured numbers."""
    lines = {without_digits(line) for line in seen.splitlines()}
    missing = [line for line in shown.splitlines() if line not in ("", "…") and without_digits(line) not in lines]
    assert not missing, seen
    unshown = lines - {"", *map(without_digits, shown.splitlines())}
    assert "…" in shown or not unshown, unshown


def without_digits(line: str) -> str:
    """A line with every number as `#`, exponents included, and without the output that has the largest sigma."""
    line = re.sub(r"(largest sigma \S+) \(.*?\)", r"\1", line)
    return re.sub(r"\d[\d.,]*(e-?\d+)?", "#", line)


@pytest.mark.slow
def test_the_python_of_the_readme_prints_the_same_story_beside_the_session(tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (code,) = blocks(README, "python")
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert " robot named Bolt. Bolt sailed an iron ship over the cold sea." in done.stdout
    assert "deprecated" not in done.stderr


def test_nothing_says_to_install_what_is_not_on_the_package_index() -> None:
    sources = [path for room in ("llmconv", "convert", "export", "verify") for path in (ROOT / room).rglob("*.py")]
    pages = [page for page in PAGES if page.name != "CHANGELOG.md"]  # which may tell what was once said
    absent = re.compile(r"pip install\s+(?:'|\")?llmconv\b")
    assert [str(path) for path in (*pages, *sources) if absent.search(path.read_text())] == []


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a git checkout")
def test_what_the_readme_writes_in_the_repository_is_ignored_by_git() -> None:
    outputs = {*re.findall(r"-o (\w+)|--report (\w+)", "".join(blocks(README, "console")))}
    folders = {name for pair in outputs for name in pair if name} | {"scratch"}
    assert folders == {"base", "merged", "report", "scratch"}
    for folder in folders:
        assert subprocess.run(["git", "check-ignore", "-q", f"{folder}/x"], cwd=ROOT, check=False).returncode == 0


@pytest.mark.slow
def test_the_demo_runs_twice() -> None:
    for _ in range(2):
        command = [sys.executable, "examples/demo.py"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "tokens per second" in done.stdout


@pytest.mark.slow
def test_the_workflow_for_ci_runs_as_it_stands(tmp_path: Path) -> None:
    *_, text = blocks(ROOT / "docs/ci.md", "yaml")
    steps = [step for step in yaml.safe_load(text)["jobs"]["verify"]["steps"] if "name" in step]
    save_tiny("llama", tmp_path / "model")
    environment = {
        **os.environ,
        "PATH": f"{LLMCONV.parent}{os.pathsep}{os.environ['PATH']}",
        "GITHUB_STEP_SUMMARY": str(tmp_path / "summary"),
    }
    for step in steps:
        done = subprocess.run(["bash", "-e", "-c", step["run"]], cwd=tmp_path, env=environment, check=False)
        assert done.returncode == 0, step["name"]
    assert (tmp_path / "summary").read_text().startswith("# PASS: model")
    assert (tmp_path / "report" / "report.html").is_file()
