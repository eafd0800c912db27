"""What the project keeps up beside its behaviour: documents that are true, links that lead somewhere."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

from modelexpress_rl.inference.config import ModelExpressGeneratorConfig
from modelexpress_rl.train.config import ModelExpressTrainerConfig

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
CONFIGURATION = (ROOT / "docs" / "configuration.md").read_text()
PACKAGE = sorted((ROOT / "modelexpress_rl").rglob("*.py"))


def test_every_link_leads_somewhere() -> None:
    for document in DOCUMENTS:
        for target in re.findall(r"\]\(([^)#]+)\)", document.read_text()):
            if "://" not in target:
                assert (document.parent / target).exists(), f"{document.relative_to(ROOT)} links to {target}"


def test_every_variable_is_documented() -> None:
    text = (ROOT / "modelexpress_rl" / "envs.py").read_text()
    read = set(re.findall(r'"((?:MX|MODEL|LOCAL|RANK)[A-Z0-9_]*)"', text))
    assert {name for name in read if f"`{name}`" not in CONFIGURATION} == set()


def test_every_documented_variable_is_read() -> None:
    documented = set(re.findall(r"`(MX_[A-Z0-9_]+|MODEL_[A-Z_]+)`", CONFIGURATION))
    code = "\n".join(path.read_text() for path in PACKAGE)
    assert {name for name in documented if f'"{name}"' not in code} == set()


def test_every_field_is_documented() -> None:
    for config in (ModelExpressTrainerConfig, ModelExpressGeneratorConfig):
        missing = [field.name for field in fields(config) if f"`{field.name}`" not in CONFIGURATION]
        assert missing == [], config.__name__


def test_files_that_the_documents_name_exist() -> None:
    """Named from the root, or, as the way of the data does, from the package."""
    for document in DOCUMENTS:
        for name in re.findall(r"`([a-z_]+/[\w./-]*(?:/|\.py|\.md|\.proto))`", document.read_text()):
            found = (ROOT / name).exists() or (ROOT / "modelexpress_rl" / name).exists()
            assert found, f"{document.relative_to(ROOT)} names {name}"


def test_modules_stay_short() -> None:
    long = [path for path in PACKAGE if "_pb" not in path.parts and path.read_text().count("\n") > 500]
    assert long == []
