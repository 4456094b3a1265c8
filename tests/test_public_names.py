"""The names that `import fastfedul as ff` offers, and when their modules are loaded."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import fastfedul as ff
from tests.support.disk_ledgers import initial_model, round_of

SRC = Path(ff.__file__).parent


@pytest.mark.parametrize("package", ["fastfedul", "fastfedul.methods"])
def test_type_checkers_see_the_same_names_as_programs(package: str) -> None:
    module = sys.modules[package]
    tree = ast.parse(Path(str(module.__file__)).read_text("utf-8"))
    seen = {
        alias.asname
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname
    }
    assert seen == set(module.__all__)
    for name in module.__all__:
        assert getattr(module, name) is not None
    with pytest.raises(AttributeError, match="nonsense"):
        _ = module.nonsense


def test_methods_are_names_of_the_package() -> None:
    method = ff.methods.FastFedUL(skew=ff.methods.Scalar(0.07))
    assert ff.methods.FastFedUL is ff.FastFedUL
    assert method.skew == ff.Scalar(0.07)


def test_one_name_loads_no_module_of_the_others() -> None:
    code = "import sys, fastfedul as ff; ff.methods; ff.Params; print(*sys.modules)"
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    loaded = set(found.stdout.split())
    assert "fastfedul.params" in loaded
    assert not loaded & {"fastfedul.ledger.disk", "fastfedul.methods.cdp", "pydantic"}


def test_a_ledger_is_created_opened_and_only_read(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    with ff.create_ledger(path, initial_model(), update_dtype="int8") as ledger:
        ledger.append(round_of(0))
    with ff.open_ledger(path) as ledger:
        ledger.append(round_of(1))
        with ff.open_ledger(path, read_only=True) as reader:
            assert reader.num_rounds == 2
            assert reader.settings.update_dtype == "int8"
            assert not isinstance(reader, ff.DiskLedger)
        with pytest.raises(ff.LedgerLockedError):
            ff.open_ledger(path)
