"""Starting a ledger from models that were saved while training."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pytest
from safetensors.numpy import save_file

from fastfedul import (
    FastFedULError,
    InvalidInputError,
    LedgerReader,
    LocalSGD,
    read_round,
    verify,
)
from fastfedul.ledger.importing import import_ledger

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


def test_local_training_is_recorded_for_every_round(
    saved: Path, tmp_path: Path
) -> None:
    local = LocalSGD(lr=0.05, momentum=0.9, batch_size=32, epochs=2)
    import_ledger(saved, tmp_path / "known", local=local)
    import_ledger(saved, tmp_path / "unknown")
    with LedgerReader(tmp_path / "known") as ledger:
        assert [round_.local for round_ in ledger.rounds()] == [local, local]
        assert not verify(ledger).problems
    with LedgerReader(tmp_path / "unknown") as ledger:
        assert [round_.local for round_ in ledger.rounds()] == [None, None]


def test_a_missing_client_model_is_a_participant_without_update(
    saved: Path, tmp_path: Path
) -> None:
    (saved / "clients" / "1" / "client-2.safetensors").unlink()
    import_ledger(saved, tmp_path / "ledger")
    with LedgerReader(tmp_path / "ledger") as ledger:
        kept = [update.kept for update in ledger.updates_of("client-2")]
        assert kept == [True, False]
        [_, missing] = ledger.updates_of("client-2")
        assert np.isnan(missing.norm)


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


def assert_refused(saved: Path, out: Path, *said: str) -> None:
    """The import is refused in one line, without a warning, and leaves nothing."""
    with pytest.raises(FastFedULError) as caught:
        import_ledger(saved, out)
    message = str(caught.value)
    assert "\n" not in message
    for words in said:
        assert words in message, message
    assert not list(saved.parent.glob(".*"))


def flip_a_byte(path: Path) -> None:
    np.savez_compressed(path, w=np.arange(6000, dtype=np.float32))
    data = bytearray(path.read_bytes())
    # Behind the local header: the kind of the first block, which zlib does not know.
    data[30 + data[26] + data[28]] = 255
    path.write_bytes(data)


def change_header(path: Path, *, at: int, value: int) -> None:
    """Change a field of the central directory, and of the local header likewise."""
    np.savez(path, w=np.zeros((3, 2), np.float32))
    data = bytearray(path.read_bytes())
    data[data.index(b"PK\x01\x02") + at] = value
    data[data.index(b"PK\x03\x04") + at - 2] = value
    path.write_bytes(data)


def add_a_text(path: Path) -> None:
    np.savez(path, w=np.zeros((3, 2), np.float32))
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("readme.txt", "no array")


@pytest.mark.parametrize(
    "damage",
    [
        flip_a_byte,
        lambda path: change_header(path, at=10, value=99),  # method of compression
        lambda path: change_header(path, at=6, value=99),  # version of zip needed
        lambda path: change_header(path, at=8, value=1),  # flags: encrypted
        add_a_text,
    ],
    ids=["flipped", "method", "version", "encrypted", "text"],
)
@pytest.mark.filterwarnings("error")
def test_a_damaged_or_odd_npz_file_is_named(
    damage: Callable[[Path], None], saved: Path, tmp_path: Path
) -> None:
    damage(saved / "global" / "0.npz")
    assert_refused(saved, tmp_path / "ledger", str(saved / "global" / "0.npz"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"0": {"a": %s}}' % ("1" * 400), "no number"),
        ("[" * 100_000, "nested too deeply"),
        ('{"0": {"a": 1e308, "b": 1e308}}', "too large"),
        ('{"0": {"a": 1e-300, "b": 1e300}}', "too far apart"),
        ('{"0": {"a": 1, "a": 2}}', "comes twice"),
        ('{"0": {"a": NaN}}', "NaN"),
    ],
    ids=["digits", "nested", "sum", "apart", "twice", "nan"],
)
@pytest.mark.filterwarnings("error")
def test_numbers_of_examples_without_sense_are_refused_by_file(
    text: str, said: str, saved: Path, tmp_path: Path
) -> None:
    (saved / "shares.json").write_text(text)
    assert_refused(saved, tmp_path / "ledger", str(saved / "shares.json"), said)


@pytest.mark.parametrize(
    ("rounds", "said"),
    [
        (["0"], "lacks round 1"),
        ([], "lacks round 0"),
        (["0", "1", "7"], "names round 7"),
        (["0", "1", "2"], "names round 2"),
        (["0", "1", "01"], "names round 01"),
        (["0", "1", "-1"], "names round -1"),
        (["0", "1", "first"], "names round first"),
    ],
)
def test_shares_name_the_rounds_there_are_and_no_others(
    rounds: list[str], said: str, saved: Path, tmp_path: Path
) -> None:
    (saved / "shares.json").write_text(json.dumps(dict.fromkeys(rounds, SIZES)))
    assert_refused(saved, tmp_path / "ledger", "shares.json", said, "rounds 0 to 1")


def test_a_place_that_cannot_hold_the_ledger_is_named(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for out, said in (
        (tmp_path / "dangling", "exists already"),
        (Path("/"), "exists already"),
        (tmp_path / ("x" * 250), "x" * 250),
        (tmp_path / ("x" * 300), "x" * 300),
    ):
        assert_refused(saved, out, said)
    monkeypatch.chdir(tmp_path)
    assert_refused(saved, Path(), "exists already")
    assert (tmp_path / "dangling").is_symlink()


def test_a_folder_of_models_with_an_impossible_name_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="File name too long"):
        import_ledger(tmp_path / ("x" * 300), tmp_path / "ledger")
