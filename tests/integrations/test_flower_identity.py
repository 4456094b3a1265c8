"""Who a node is: names and keys that no simulation has, on a grid in memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fastfedul.integrations.flower import IdentityError
from fastfedul.integrations.flower.identity import Identify, Identities
from tests.support.flower import Nodes, node


def identities(folder: Path, identify: Identify = "auto") -> Identities:
    return Identities(folder / "ledger.nodes.json", identify, timeout=1.0)


HOSPITAL = node(11, "hospital-1", b"key one")
OTHER = node(12, "hospital-2", b"key two")


def test_the_operators_name_is_the_identity(tmp_path: Path) -> None:
    grid = Nodes(HOSPITAL, OTHER)
    found = identities(tmp_path).identified(grid, strict=True)
    assert found == {11: "hospital-1", 12: "hospital-2"}
    assert grid.num_asked == 0
    kept = json.loads((tmp_path / "ledger.nodes.json").read_text())["clients"]
    assert set(kept) == {"hospital-1", "hospital-2"}
    assert kept["hospital-1"].startswith("SHA256:")
    assert "key one" not in json.dumps(kept)


def test_a_node_without_a_name_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(IdentityError, match="flwr supernode register"):
        identities(tmp_path).identified(Nodes(node(11)), strict=True)


def test_of_two_nodes_with_one_name_one_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    grid = Nodes(HOSPITAL, node(12, "hospital-1", b"key two"))
    with caplog.at_level("ERROR", logger="flwr"):
        found = identities(tmp_path).identified(grid, strict=True)
    assert found == {11: "hospital-1"}
    assert "node 12 is not admitted: node 11 is called 'hospital-1' too" in caplog.text


@pytest.mark.parametrize(
    "claim", ["hospital-7\u202e", "\x1b[2J", "h" * 201, "", "hospital-1\n", "\u200b"]
)
def test_a_claimed_name_that_nobody_can_read_keeps_out_its_node_alone(
    claim: str, tmp_path: Path
) -> None:
    grid = Nodes(
        node(11), node(12), n11={"client-name": claim}, n12={"client-name": "b"}
    )
    found = identities(tmp_path, "claimed").identified(grid, strict=True)
    assert found == {12: "b"}


@pytest.mark.parametrize("number", ["0", -1, True, 0.0, b"0"])
def test_a_partition_that_is_no_number_keeps_out_its_node_alone(
    number: Any, tmp_path: Path
) -> None:
    grid = Nodes(
        node(11), node(12), n11={"partition-id": number}, n12={"partition-id": 4}
    )
    found = identities(tmp_path, "partition").identified(grid, strict=True)
    assert found == {12: "client-4"}


def test_a_name_with_another_key_is_refused_also_in_a_later_run(
    tmp_path: Path,
) -> None:
    identities(tmp_path).identified(Nodes(HOSPITAL), strict=True)
    thief = Nodes(node(99, "hospital-1", b"another key"))
    with pytest.raises(IdentityError, match="known by another key"):
        identities(tmp_path).identified(thief, strict=True)
    same = Nodes(node(99, "hospital-1", b"key one"))
    assert identities(tmp_path).identified(same, strict=True) == {99: "hospital-1"}


def test_a_thief_in_mid_run_is_left_out_and_the_others_go_on(tmp_path: Path) -> None:
    grid, known = Nodes(HOSPITAL, OTHER), identities(tmp_path)
    known.identified(grid, strict=True)
    grid.nodes.append(node(99, "hospital-1", b"another key"))
    assert known.identified(grid, strict=False) == {11: "hospital-1", 12: "hospital-2"}
    grid.nodes.remove(HOSPITAL)
    assert known.identified(grid, strict=False) == {12: "hospital-2"}


def test_a_client_that_comes_back_under_another_id_is_the_same(
    tmp_path: Path,
) -> None:
    grid, known = Nodes(HOSPITAL), identities(tmp_path)
    known.identified(grid, strict=True)
    grid.nodes = [node(55, "hospital-1", b"key one")]
    assert known.identified(grid, strict=False) == {55: "hospital-1"}


def test_what_a_client_claims_counts_only_if_asked_for(tmp_path: Path) -> None:
    grid = Nodes(node(11), node(12), n11={"partition-id": 0}, n12={"partition-id": 1})
    with pytest.raises(IdentityError, match="no client-name"):
        identities(tmp_path, "claimed").identified(grid, strict=True)
    grid.configs[11]["client-name"] = "a"
    found = identities(tmp_path, "claimed").identified(grid, strict=True)
    assert found == {11: "a"}
    with pytest.raises(IdentityError, match="it has no name"):
        identities(tmp_path).identified(grid, strict=True)


def test_a_claimed_name_that_has_a_key_is_refused(tmp_path: Path) -> None:
    identities(tmp_path).identified(Nodes(HOSPITAL), strict=True)
    thief = Nodes(node(99), n99={"client-name": "hospital-1"})
    with pytest.raises(IdentityError, match="known by another key"):
        identities(tmp_path, "claimed").identified(thief, strict=True)


def test_a_silent_node_is_left_out_and_not_asked_again_at_once(
    tmp_path: Path,
) -> None:
    grid = Nodes(node(11), node(12), n11={"partition-id": 3})
    known = identities(tmp_path, "partition")
    assert known.identified(grid, strict=True) == {11: "client-3"}
    assert known.identified(grid, strict=True) == {11: "client-3"}
    assert grid.num_asked == 2


def test_a_function_of_the_node_may_decide(tmp_path: Path) -> None:
    known = identities(tmp_path, lambda info: f"site {info.node_id}")
    assert known.identified(Nodes(HOSPITAL), strict=True) == {11: "site 11"}


def test_a_damaged_file_of_names_is_an_error_and_stays(tmp_path: Path) -> None:
    path = tmp_path / "ledger.nodes.json"
    path.write_text("{")
    with pytest.raises(IdentityError, match="restore it from a backup"):
        identities(tmp_path).identified(Nodes(HOSPITAL), strict=True)
    assert path.read_text() == "{"
