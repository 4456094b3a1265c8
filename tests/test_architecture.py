"""The shape of the package and its tests: rooms in one order, short files of tests."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import fastfedul

SRC = Path(fastfedul.__file__).parent
ROOT = Path(__file__).parents[1]
FRAMEWORKS = {
    *("torch", "flwr", "ray", "sklearn", "scipy", "matplotlib", "tensorflow"),
    *("cryptography", "jinja2", "PIL", "polars", "obstore", "boto3", "botocore"),
    *("prometheus_client", "mlflow"),
}
STORE = {"obstore", "boto3", "botocore"}
"""Packages of the extra `store`, which one module alone imports, when it is used."""
CORE = {"numpy", "safetensors", "blake3", "xxhash", "threadpoolctl", "fastfedul"}
LONGEST_TEST_FILE = 600
"""Lines. A longer file of tests is about more than one idea."""
PLANTED = {
    "ledger/chain.py": "from fastfedul.methods.registry import METHODS",
    "methods/kd.py": "from fastfedul.integrations.torch import TorchTrainer",
    "runs/config.py": "import fastfedul.cli.main",
    "data/dataset.py": "def f():\n    from fastfedul.integrations.torch import models",
    "federation/rounds.py": "import torch",
    "runs/validation.py": "def f():\n    from scipy import stats",
    "params.py": "from fastfedul.records import Model",
    "console/app.py": "import prometheus_client",
    "integrations/flower/run.py": "def f():\n    import mlflow",
}


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


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    """Check the rooms of a copy of the package, as `make check` does."""
    command = Path(sys.executable).with_name("lint-imports")
    return subprocess.run(
        [command, "--no-cache", "--config", str(ROOT / "pyproject.toml")],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_every_room_imports_only_from_those_below() -> None:
    done = lint(SRC.parent)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("module", PLANTED)
def test_a_planted_wrong_import_is_found(module: str, tmp_path: Path) -> None:
    shutil.copytree(SRC, tmp_path / "fastfedul")
    path = tmp_path / "fastfedul" / module
    path.write_text(path.read_text("utf-8") + f"\n\n{PLANTED[module]}\n", "utf-8")
    done = lint(tmp_path)
    assert done.returncode == 1
    assert "BROKEN" in done.stdout


@pytest.mark.parametrize("room", ["federation", "ledger", "methods"])
def test_the_core_needs_little_more_than_numpy(room: str) -> None:
    for module in (SRC / room).rglob("*.py"):
        roots = {name.split(".")[0] for name in imported_by(module)}
        allowed = STORE if module.name == "object_store.py" else set()
        assert roots <= CORE | allowed | sys.stdlib_module_names, module


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
    assert set(fastfedul.__all__) <= set(dir(fastfedul))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = fastfedul.nothing


def test_no_file_of_tests_is_about_more_than_one_idea() -> None:
    files = [*(ROOT / "tests").rglob("*.py")]
    assert files
    long = {
        str(file.relative_to(ROOT)): count
        for file in files
        if (count := len(file.read_text("utf-8").splitlines())) > LONGEST_TEST_FILE
    }
    assert long == {}, f"split these by ideas, builders go to tests/support: {long}"


def test_a_public_name_is_imported_when_it_is_used() -> None:
    code = (
        "import sys, fastfedul\n"
        "print(*(n for n in sys.modules if n.startswith(('fastfedul', 'numpy'))))\n"
        "fastfedul.errors_before = 'fastfedul.errors' in sys.modules\n"
        "fastfedul.InvalidInputError\n"
        "print(fastfedul.errors_before, 'fastfedul.errors' in sys.modules, "
        "'numpy' in sys.modules)"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    loaded, times = found.stdout.splitlines()
    assert set(loaded.split()) == {"fastfedul", "fastfedul.lazy_names"}
    assert times == "False True False"
