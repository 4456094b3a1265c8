"""Buffers of a cleaned model: the mean over the last round's other clients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import fastfedul as ff
from fastfedul.ledger.memory import MemoryLedger
from fastfedul.ledger.protocol import WritableLedger
from fastfedul.methods.buffers import OLD_BUFFERS
from fastfedul.methods.protocol import measured
from fastfedul.runs.config import RunConfig
from paper.recoding import recoded
from tests.support.disk_ledgers import buffers_of, round_with_buffers, with_buffers
from tests.support.small_run import trained_in_memory

Make = Callable[[], WritableLedger]


@pytest.fixture(params=["memory", "rounds", "sums"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    def create() -> WritableLedger:
        if request.param == "memory":
            return MemoryLedger.create(with_buffers())
        path = tmp_path / f"ledger-{len(list(tmp_path.iterdir()))}"
        return ff.create_ledger(path, with_buffers(), history=request.param)

    return create


def means(model: ff.Model) -> tuple[float, int]:
    """The statistic, which is the same number everywhere, and the counter."""
    [mean] = set(model.buffers["norm.mean"].ravel().tolist())
    return mean, int(model.buffers["norm.count"])


@pytest.mark.parametrize("erase", [True, False])
def test_the_others_of_the_last_round_are_averaged_anew(
    make: Make, erase: bool
) -> None:
    ledger = make()
    for index in range(3):
        model = ledger.append(round_with_buffers(index))
    assert means(model) == (21.5, 23)
    done = ff.forget(ledger, ["d"], erase=erase)
    assert means(done.model) == means(ledger.final) == (21.0, 22)
    assert OLD_BUFFERS not in done.warnings
    assert ("d" in ledger.last_buffers()) == (not erase)
    ff.forget(ledger, ["b"], erase=erase)
    assert means(ledger.final) == (21.0, 22)
    together = make()
    for index in range(3):
        together.append(round_with_buffers(index))
    ff.forget(together, ["b", "d"], erase=erase)
    assert means(together.final) == means(ledger.final)
    # Training goes on: the next round's buffers replace the last ones.
    ledger.append(round_with_buffers(3, ("a", "c")))
    assert sorted(ledger.last_buffers()) == ["a", "c"]
    assert means(ledger.final) == (31.0, 32)


def test_who_was_not_in_the_last_round_leaves_the_buffers_as_they_are(
    make: Make,
) -> None:
    ledger = make()
    ledger.append(round_with_buffers(0))
    ledger.append(round_with_buffers(1, ("a", "b", "c")))
    done = ff.forget(ledger, ["d"])
    assert means(done.model) == (11.0, 12)
    assert OLD_BUFFERS not in done.warnings


def test_without_another_client_in_the_last_round_the_result_says_so(
    make: Make,
) -> None:
    ledger = make()
    ledger.append(round_with_buffers(0))
    ledger.append(round_with_buffers(1, ("d",)))
    done = ff.forget(ledger, ["d"])
    assert means(done.model) == (13.0, 13)
    assert OLD_BUFFERS in done.warnings
    assert not ledger.last_buffers()


def test_clients_count_with_the_weight_that_entered_the_model() -> None:
    ledger = MemoryLedger.create(with_buffers())
    plain = round_with_buffers(0)
    a, b, c, d = plain.updates
    updates = (
        replace(a, share=0.1, keep_probability=0.5),
        replace(b, share=0.2, keep_probability=0.5, kept=False),
        replace(c, share=0.3, keep_probability=0.5),
        replace(d, share=0.4),
    )
    ledger.append(replace(plain, updates=updates, use="aggregate"))
    done = ff.forget(ledger, ["d"])
    # a and c entered with 0.1 / 0.5 and 0.3 / 0.5, and b not at all.
    mean, count = means(done.model)
    assert mean == pytest.approx((0.2 * 0 + 0.6 * 2) / 0.8)
    assert count == 2


def test_krum_chooses_again_among_the_others() -> None:
    ledger = MemoryLedger.create(with_buffers(), aggregation="krum:0")
    layout = ledger.settings.layout
    plain = round_with_buffers(0)
    ends = {"a": 0.0, "b": 0.1, "c": 0.16, "d": 0.05}
    updates = tuple(
        replace(u, delta=ff.Params(layout, np.full(layout.size, ends[u.client], "f4")))
        for u in plain.updates
    )
    model = ledger.append(replace(plain, updates=updates, buffers=buffers_of(0, "d")))
    assert means(model) == (3.0, 3)
    cleaned = ff.forget(ledger, ["d"]).model
    moved = ledger.final.params.flat[0] - ledger.initial.params.flat[0]
    assert moved == pytest.approx(0.1)
    assert means(cleaned) == (1.0, 1)


def test_an_erased_clients_buffers_are_gone_from_the_disk(tmp_path: Path) -> None:
    secret = np.float32(-12345.678)
    sent = round_with_buffers(0)
    *others, last = sent.updates
    own = {**buffers_of(0, "d"), "norm.mean": np.full((2, 3), secret)}
    path = tmp_path / "ledger"
    with ff.create_ledger(path, with_buffers()) as ledger:
        ledger.append(replace(sent, updates=(*others, replace(last, buffers=own))))

        def holders() -> list[str]:
            arrays = (path / "arrays").iterdir()
            return [f.name for f in arrays if secret.tobytes() in f.read_bytes()]

        assert holders()
        ff.forget(ledger, ["d"])
        assert not holders()
    with ff.open_ledger(path, read_only=True) as reader:
        assert sorted(reader.last_buffers()) == ["a", "b", "c"]
        assert ff.verify(reader).problems == ()


def test_a_changed_byte_is_found(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    with ff.create_ledger(path, with_buffers()) as ledger:
        ledger.append(round_with_buffers(0))
        number = ledger.head.buffers_file
    file = path / "arrays" / f"{number:08d}.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with ff.open_ledger(path, read_only=True) as reader:
        assert "the buffers of the last round's clients" in str(
            ff.verify(reader).problems
        )
        with pytest.raises(ff.LedgerError, match="last round's clients"):
            reader.last_buffers()


def test_a_compacted_ledger_has_them_too(tmp_path: Path) -> None:
    with ff.create_ledger(tmp_path / "ledger", with_buffers()) as ledger:
        for index in range(2):
            ledger.append(round_with_buffers(index))
        ledger.compact()
        assert means(ff.forget(ledger, ["d"]).model) == (11.0, 12)
        assert ff.verify(ledger).problems == ()


def test_a_ledger_in_other_dtypes_has_them_too(tmp_path: Path) -> None:
    ledger = MemoryLedger.create(with_buffers())
    for index in range(2):
        ledger.append(round_with_buffers(index))
    with recoded(ledger, tmp_path / "new", update_dtype="int8") as new:
        assert means(ff.preview(new, ["d"]).model) == (11.0, 12)


def test_a_run_with_batch_norm_forgets_the_leavers_statistics(normalised: str) -> None:
    config = RunConfig.from_options(
        clients=4, rounds=3, epochs=1, train_size=240, model=normalised, workers=1
    )
    run = trained_in_memory(config)
    [leaver] = run.request().forget
    sent = dict(run.ledger.last_buffers())
    assert len(sent) == 4
    shares = {u.client: u.share for u in run.ledger.updates_in(2)}
    result = measured(ff.FastFedUL(), run.request())
    assert result.buffers is not None
    assert result.warnings == ()
    name = "1.running_var"
    total = 1 - shares[leaver]
    wanted = sum(
        shares[client] / total * own[name].astype(float)
        for client, own in sent.items()
        if client != leaver
    )
    np.testing.assert_allclose(result.buffers[name], wanted, rtol=1e-6)
    assert not np.array_equal(result.buffers[name], run.ledger.final.buffers[name])
