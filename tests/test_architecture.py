"""The shape of the package: stages flow one way, the core knows no framework."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import fastfedul

SRC = Path(fastfedul.__file__).parent
STAGES = ("data", "federation", "history", "unlearn", "evaluate", "report")
FRAMEWORKS = {
    *("torch", "flwr", "ray", "sklearn", "scipy", "matplotlib", "tensorflow"),
    "cryptography",
}
CORE = {"numpy", "safetensors", "blake3", "xxhash", "threadpoolctl", "fastfedul"}


def imported_by(path: Path) -> set[str]:
    """Return every module a file imports, also inside functions."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            module = node.module or ""
            names |= {module} | {f"{module}.{alias.name}" for alias in node.names}
    return names


def stages_imported_by(path: Path) -> set[str]:
    parts = [name.split(".") for name in imported_by(path)]
    return {p[1] for p in parts if p[0] == "fastfedul" and len(p) > 1} & set(STAGES)


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_never_imports_a_later_stage(stage: str) -> None:
    later = set(STAGES[STAGES.index(stage) + 1 :])
    for module in (SRC / stage).rglob("*.py"):
        assert not stages_imported_by(module) & later, module


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_never_imports_the_command_line_or_an_integration(stage: str) -> None:
    for module in (SRC / stage).rglob("*.py"):
        outside = {"fastfedul.cli", "fastfedul.integrations", "fastfedul.experiment"}
        assert not imported_by(module) & outside, module


@pytest.mark.parametrize("stage", ["federation", "history", "unlearn"])
def test_the_core_needs_little_more_than_numpy(stage: str) -> None:
    for module in (SRC / stage).rglob("*.py"):
        roots = {name.split(".")[0] for name in imported_by(module)}
        assert roots <= CORE | sys.stdlib_module_names, module


def test_importing_the_package_and_its_command_line_imports_no_framework() -> None:
    code = "import sys, fastfedul, fastfedul.cli.main; print(*sys.modules)"
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    loaded = {name.split(".")[0] for name in found.stdout.split()}
    assert not loaded & FRAMEWORKS


def test_nothing_is_ever_unpickled() -> None:
    for module in SRC.rglob("*.py"):
        assert not imported_by(module) & {"pickle", "marshal", "shelve"}, module
        assert "allow_pickle=True" not in module.read_text("utf-8"), module


def test_random_numbers_come_only_from_named_streams() -> None:
    for module in SRC.rglob("*.py"):
        assert "random" not in imported_by(module), module
        if module.name != "rng.py":
            text = module.read_text("utf-8")
            assert "default_rng" not in text, module
            assert "np.random.seed" not in text, module


def test_every_public_name_exists() -> None:
    for name in fastfedul.__all__:
        assert hasattr(fastfedul, name)
    assert list(fastfedul.__all__) == sorted(fastfedul.__all__)
