# SPDX-License-Identifier: Apache-2.0
"""What is written in several places of the repository says the same everywhere."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from types import ModuleType

import pytest

import commlib
import commlib.errors
import commlib.torch
from commlib import config

REPOSITORY = Path(__file__).resolve().parent.parent
PAGES = [*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/*.md")]


def pins() -> dict[str, str]:
    lines = (REPOSITORY / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text())
    local = [link for link in links if not link.startswith("http")]
    assert [link for link in local if not (page.parent / link).exists()] == []


def test_every_setting_is_documented_and_no_other() -> None:
    table = (REPOSITORY / "docs/usage.md").read_text().split("\n## Settings\n")[1].split("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("| `")]
    documented = {name for row in rows for name in re.findall(r"`(COMMLIB_\w+)`", row.split("|")[1])}
    assert documented == {variable for variable, _ in config._VARIABLES.values()}


def test_documented_defaults_are_those_of_the_code() -> None:
    table = (REPOSITORY / "docs/usage.md").read_text()
    rows = re.findall(r"^\| `(COMMLIB_\w+)` \|.*\| (\d+[KMG]?) \|$", table, re.MULTILINE)
    documented = {
        name: config._VARIABLES[field][1](dict(rows)[name])
        for field, (name, _) in config._VARIABLES.items()
        if name in dict(rows)
    }
    fields = {name: field for field, (name, _) in config._VARIABLES.items()}
    assert len(documented) >= 8
    assert documented == {name: getattr(config.Config(), fields[name]) for name in documented}


def test_hooks_use_the_pinned_tools() -> None:
    used = re.findall(r'"([\w-]+)==([\w.]+)"', (REPOSITORY / ".pre-commit-config.yaml").read_text())
    assert used
    assert {name: pins()[name] for name, _ in used} == dict(used)


def test_what_make_installs_is_pinned() -> None:
    text = (REPOSITORY / "pyproject.toml").read_text()
    listed = re.findall(r"^(?:bench|test|dev) = \[(.*?)\]$", text, re.MULTILINE | re.DOTALL)
    assert len(listed) == 3
    names = re.findall(r'"([\w-]+)', "".join(listed))
    assert [name for name in names if name not in pins()] == []


def test_ci_does_what_a_person_would() -> None:
    commands = (REPOSITORY / ".ci/run").read_text().splitlines()
    assert [line for line in commands if line.startswith("make")] == ["make lint", "make test"]


def test_nothing_of_one_machine_is_written_down() -> None:
    places = re.compile(r"(?<![\w.])/(?:work|root|home)/|(?:index-url|find-links|trusted-host)\s*=\s*\S*:/")
    texts = [
        path
        for pattern in (
            "*",
            "docs/*",
            "src/**/*",
            "commlib/**/*",
            "tests/**/*",
            "examples/**/*",
            "benchmarks/*",
            "benchmarks/harness/*",
            "tools/*",
            ".ci/*",
        )
        for path in REPOSITORY.glob(pattern)
        if path.is_file() and path.suffix not in {".so", ".o", ".d", ".pyc"} and path != Path(__file__)
    ]
    assert [str(path) for path in texts if places.search(path.read_text(errors="replace"))] == []


@pytest.mark.parametrize("module", [commlib, commlib.errors, commlib.torch], ids=lambda module: module.__name__)
def test_whatever_is_public_says_what_it_is(module: ModuleType) -> None:
    silent = []
    for name in module.__all__:
        public = getattr(module, name)
        methods = vars(public).items() if isinstance(public, type) else []
        described = {name: public} if callable(public) else {}
        described |= {
            f"{name}.{part}": method
            for part, method in methods
            if not part.startswith("_")
            and (callable(method) or isinstance(method, property | classmethod | staticmethod))
        }
        silent += [what for what, it in described.items() if len(inspect.getdoc(it) or "") < 30]
    assert silent == []
