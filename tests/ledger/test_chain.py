"""The chain tells histories apart, and only histories."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fastfedul import (
    DiskLedger,
    FastFedUL,
    LedgerReader,
    MemoryLedger,
    Params,
    Round,
    Scalar,
    erase,
    forget,
)
from fastfedul.ledger.protocol import models
from fastfedul.ledger.store import codec
from fastfedul.records import StorageDtype
from tests.support.histories import (
    CLIENTS,
    LAYOUT,
    LOCAL,
    TARGET,
    Maker,
    close_to,
    history,
    initial,
    normal,
    recorded,
    without,
)


def test_the_order_in_which_updates_are_handed_in_is_irrelevant(make: Maker) -> None:
    rounds = history(5, drop=True)
    one, other = make(), make()
    recorded(one, rounds)
    recorded(other, [replace(r, updates=r.updates[::-1]) for r in rounds])
    assert one.final.params.flat.tobytes() == other.final.params.flat.tobytes()
    assert one.rounds() == other.rounds()
    assert one.clients() == other.clients()
    if isinstance(one, DiskLedger) and isinstance(other, DiskLedger):
        assert one.chain == other.chain


@pytest.mark.parametrize("dtype", codec.STORAGE_DTYPES)
def test_an_interrupted_ledger_is_the_same_as_an_uninterrupted_one(
    dtype: StorageDtype, tmp_path: Path
) -> None:
    rounds = history(6, drop=True)
    options: dict[str, Any] = {"update_dtype": dtype, "step_dtype": dtype}
    with DiskLedger.create(tmp_path / "one", initial(), **options) as ledger:
        recorded(ledger, rounds[:4])
        forget(ledger, [TARGET], FastFedUL(minimum_coverage=0), erase=True)
        recorded(ledger, [without(r, {TARGET}) for r in rounds[4:]])
        chain = ledger.chain
        final = ledger.final.params.flat.tobytes()
    DiskLedger.create(tmp_path / "other", initial(), **options).close()
    for round_ in rounds[:4]:
        with DiskLedger(tmp_path / "other") as ledger:
            ledger.append(round_)
    with DiskLedger(tmp_path / "other") as ledger:
        forget(ledger, [TARGET], FastFedUL(minimum_coverage=0), erase=True)
    for round_ in rounds[4:]:
        with DiskLedger(tmp_path / "other") as ledger:
            ledger.append(without(round_, {TARGET}))
    with LedgerReader(tmp_path / "other") as reader:
        assert reader.chain == chain
        assert reader.final.params.flat.tobytes() == final


@pytest.mark.parametrize("dtype", codec.STORAGE_DTYPES)
def test_numbers_about_a_round_do_not_depend_on_interruptions(
    dtype: StorageDtype, tmp_path: Path
) -> None:
    rounds = history(4)
    with DiskLedger.create(tmp_path / "one", initial(), step_dtype=dtype) as ledger:
        recorded(ledger, rounds)
        expected = ledger.rounds()
    DiskLedger.create(tmp_path / "other", initial(), step_dtype=dtype).close()
    for round_ in rounds:
        with DiskLedger(tmp_path / "other") as ledger:
            ledger.append(round_)
    with LedgerReader(tmp_path / "other") as reader:
        assert reader.rounds() == expected


def different_histories() -> dict[str, Callable[[Round], Round]]:
    def change(round_: Round, **changes: Any) -> Round:
        first, *rest = round_.updates
        return replace(round_, updates=(replace(first, **changes), *rest))

    return {
        "the same": lambda round_: round_,
        "another name": lambda round_: change(round_, client="somebody else"),
        "another probability": lambda round_: change(round_, keep_probability=0.9),
        "one dropped": lambda round_: change(round_, kept=False),
        "another use": lambda round_: replace(round_, use="aggregate"),
        "known training": lambda round_: replace(round_, local=LOCAL),
        "another training": lambda round_: replace(
            round_, local=replace(LOCAL, lr=0.2)
        ),
        "another update": lambda round_: change(
            round_, delta=Params(LAYOUT, normal(70))
        ),
    }


def test_the_chain_tells_every_two_histories_apart(tmp_path: Path) -> None:
    chains = {}
    for number, (name, change) in enumerate(different_histories().items()):
        path = tmp_path / str(number)
        with DiskLedger.create(path, initial()) as ledger:
            rounds = history(3)
            ledger.append(change(rounds[0]))
            recorded(ledger, rounds[1:])
            chains[name] = ledger.chain
    dtypes: tuple[StorageDtype, ...] = ("float16", "int8")
    for dtype in dtypes:
        with DiskLedger.create(
            tmp_path / dtype, initial(), update_dtype=dtype
        ) as ledger:
            recorded(ledger, history(3))
            chains[dtype] = ledger.chain
    assert len(set(chains.values())) == len(chains)


def test_memory_and_disk_agree_after_everything(tmp_path: Path) -> None:
    memory = MemoryLedger.create(initial())
    rounds = history(8, drop=True)
    method = FastFedUL(minimum_coverage=0, skew=Scalar(0.2))
    with DiskLedger.create(tmp_path / "ledger", initial()) as disk:
        for ledger in (memory, disk):
            recorded(ledger, rounds[:4])
            forget(ledger, [TARGET], method, erase=False)
            recorded(ledger, [without(r, {TARGET}) for r in rounds[4:]])
            forget(ledger, ["emil"], method, erase=True)
            erase(ledger, [TARGET])
        assert memory.clients().keys() == disk.clients().keys()
        for name, one in memory.clients().items():
            other = disk.clients()[name]
            # On disk means come from totals, which add up in another order.
            for mean in ("mean_share", "mean_norm"):
                own, same = getattr(one, mean), getattr(other, mean)
                assert (own is None) == (same is None)
                assert own is None or own == pytest.approx(same, rel=1e-12)
            assert one == replace(
                other, mean_share=one.mean_share, mean_norm=one.mean_norm
            )
        close_to(memory.final.params.flat, disk.final.params.flat)
        for one_model, other_model in zip(models(memory), models(disk), strict=True):
            close_to(one_model.flat, other_model.flat)
        for one_entry, other_entry in zip(memory.rounds(), disk.rounds(), strict=True):
            assert one_entry.num_updates == other_entry.num_updates
            assert one_entry.step_norm == pytest.approx(other_entry.step_norm, rel=1e-5)
            assert one_entry.previous_product == pytest.approx(
                other_entry.previous_product, rel=1e-4, abs=1e-4
            )
        for index in range(8):
            for one_update, other_update in zip(
                memory.updates_in(index), disk.updates_in(index), strict=True
            ):
                assert (one_update.client, one_update.kept) == (
                    other_update.client,
                    other_update.kept,
                )
                assert one_update.share == pytest.approx(other_update.share, rel=1e-12)
                assert (one_update.step_product is None) == (
                    other_update.step_product is None
                )
        for name in CLIENTS:
            close_to(memory.own_difference(name), disk.own_difference(name))
