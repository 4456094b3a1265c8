"""Starting a ledger from models that were saved while training."""

from __future__ import annotations

import json
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pytest
from safetensors.numpy import save_file

from fastfedul import InvalidInputError, LedgerReader, read_round, verify
from fastfedul.history.importing import import_ledger

NAMES = ("a/b", "ü", "client-2")
SIZES = {"a/b": 30.0, "ü": 20.0, "client-2": 50.0}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Two rounds of three clients, npz and safetensors mixed, with a counter."""
    rng = np.random.default_rng(3)
    folder = tmp_path / "saved"
    (folder / "global").mkdir(parents=True)
    model = {"w": rng.standard_normal((3, 2)).astype(np.float32), "n": np.array(0)}
    np.savez(folder / "global" / "0.npz", **model)  # type: ignore[arg-type]
    for index in range(2):
        (folder / "clients" / str(index)).mkdir(parents=True)
        mean = np.zeros((3, 2))
        for name in NAMES:
            local = model["w"] + rng.standard_normal((3, 2)).astype(np.float32)
            path = folder / "clients" / str(index) / quote(name, safe="")
            save_file({"w": local, "n": np.array(index + 1)}, f"{path}.safetensors")
            mean += SIZES[name] / 100 * (local - model["w"])
        model = {"w": (model["w"] + mean).astype(np.float32), "n": np.array(index + 1)}
        save_file(model, folder / "global" / f"{index + 1}.safetensors")
    table = {str(index): SIZES for index in range(2)}
    (folder / "shares.json").write_text(json.dumps(table))
    return folder


def test_saved_models_become_a_ledger(saved: Path, tmp_path: Path) -> None:
    out = tmp_path / "ledger"
    assert import_ledger(saved, out) == 2
    with LedgerReader(out) as ledger:
        assert set(ledger.clients()) == set(NAMES)
        assert not verify(ledger).problems
        shares = {u.client: u.share for u in ledger.updates_in(0)}
        assert shares == pytest.approx({n: s / 100 for n, s in SIZES.items()})
        assert ledger.final.buffers["n"] == 2
        [first, *_] = read_round(ledger, 1).updates
        assert first.delta is not None


def test_a_missing_client_model_is_a_participant_without_update(
    saved: Path, tmp_path: Path
) -> None:
    (saved / "clients" / "1" / "client-2.safetensors").unlink()
    import_ledger(saved, tmp_path / "ledger")
    with LedgerReader(tmp_path / "ledger") as ledger:
        kept = [update.kept for update in ledger.updates_of("client-2")]
        assert kept == [True, False]
        assert ledger.running_sums("client-2").num_unseen == 1


def test_wrong_shares_are_noticed_and_leave_no_ledger(
    saved: Path, tmp_path: Path
) -> None:
    (saved / "shares.json").unlink()
    with pytest.raises(InvalidInputError, match="differs from the mean"):
        import_ledger(saved, tmp_path / "ledger")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["saved"]


def test_gaps_and_nonsense_are_named(saved: Path, tmp_path: Path) -> None:
    out = tmp_path / "ledger"
    with pytest.raises(InvalidInputError, match="no folder"):
        import_ledger(tmp_path / "none", out)
    (saved / "shares.json").write_text("[]")
    with pytest.raises(InvalidInputError, match="must be JSON"):
        import_ledger(saved, out)
    (saved / "shares.json").write_text('{"0": {"a/b": -1}}')
    with pytest.raises(InvalidInputError, match="above 0"):
        import_ledger(saved, out)
    (saved / "shares.json").unlink()
    (saved / "global" / "1.safetensors").write_bytes(b"\xff" * 40)
    with pytest.raises(InvalidInputError, match="cannot read arrays"):
        import_ledger(saved, out)
    (saved / "global" / "1.safetensors").unlink()
    with pytest.raises(InvalidInputError, match="no model 1"):
        import_ledger(saved, out)
    assert not out.exists()


def test_pickled_arrays_are_refused(saved: Path, tmp_path: Path) -> None:
    evil = np.array([{"a": 1}], dtype=object)
    np.savez(saved / "global" / "0.npz", w=evil)
    with pytest.raises(InvalidInputError, match="cannot read arrays"):
        import_ledger(saved, tmp_path / "ledger")
