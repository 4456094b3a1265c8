"""The configuration of a run: nested in Python and TOML, flat on the command line."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastfedul.data.sources import SOURCES
from fastfedul.errors import InvalidInputError
from fastfedul.methods.fast_fedul.method import FastFedUL
from fastfedul.methods.fast_fedul.skews import Kronecker, Scalar
from fastfedul.runs.config import (
    AttackOptions,
    DataOptions,
    LocalOptions,
    RunConfig,
    read_options,
)
from fastfedul.runs.options import option_fields

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


def test_a_part_may_be_a_text_a_mapping_or_options() -> None:
    by_text = RunConfig(data="mnist", attack="pixel")
    by_parts = RunConfig(
        data=DataOptions(source="mnist"), attack=AttackOptions(kind="pixel")
    )
    by_mappings = RunConfig(data={"source": "mnist"}, attack={"kind": "pixel"})
    by_options = RunConfig.from_options({"data": "mnist"}, attack="pixel")
    assert by_text == by_parts == by_mappings == by_options
    assert by_text.data.source == "mnist"
    assert RunConfig(local=LocalOptions(lr=0.1)).local.lr == 0.1


def test_a_configuration_does_not_change() -> None:
    config = RunConfig()
    with pytest.raises(Exception, match="frozen"):
        config.rounds = 3
    with pytest.raises(Exception, match="frozen"):
        config.data.clients = 3


def test_every_option_has_a_default_and_goes_there_and_back() -> None:
    options = RunConfig().to_options()
    assert set(options) == set(option_fields(RunConfig))
    assert RunConfig.from_options(options) == RunConfig()
    assert options["attack"] == "none"
    assert options["attack_scale"] == 1.0
    assert RunConfig().data.names == tuple(f"client-{number}" for number in range(10))


def test_the_package_offers_runs_without_importing_them() -> None:
    code = (
        "import sys, fastfedul as ff; "
        "assert not {'torch', 'pydantic', 'fastfedul.runs'} & set(sys.modules); "
        "assert 'train' in ff.__all__ and 'RunConfig' in ff.__all__; "
        "ff.RunConfig(data='digits'), ff.train; "
        "assert 'torch' not in sys.modules; "
        "ff.nothing"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.stderr.splitlines()[-1].endswith("has no attribute 'nothing'")


def test_every_option_says_what_it_does() -> None:
    for name, place in option_fields(RunConfig).items():
        assert place.field.description, name
        assert place.field.default is not None or place.shown.unset, name


@given(
    data=st.sampled_from(sorted(SOURCES)) | TEXT.map("{}.npz".format),
    model=TEXT,
    lr=st.floats(1e-30, 1e30),
    momentum=st.floats(0, 0.99),
    train_size=st.none() | st.integers(1, 10**9),
    seed=st.integers(0, 2**62),
    erase=st.booleans(),
    set=st.just({}) | st.just({"updates": 3, "minimum_coverage": 0.5}),
)
def test_options_survive_toml(
    tmp_path_factory: pytest.TempPathFactory, **options: Any
) -> None:
    config = RunConfig.from_options(
        options, clients=10, forget=("client-3@7", "client-1@20")
    )
    found = tomllib.loads(config.to_toml())
    assert found["data"]["source"] == options["data"]
    path = tmp_path_factory.mktemp("options") / "config.toml"
    config.save(path)
    assert RunConfig.load(path) == config


def test_a_config_file_says_only_what_it_changes(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        'rounds = 3\nattack = {kind = "pixel", attackers = 2}\n'
        "[local]\nlr = 1\nbatch_size = 8\nweight-decay = 0.5\n"
    )
    config = RunConfig.from_options(read_options(path))
    assert config == RunConfig.from_options(
        rounds=3,
        lr=1.0,
        batch_size=8,
        weight_decay=0.5,
        attackers="2",
        attack="pixel",
    )
    assert isinstance(config.local.lr, float)
    path.write_text('data = "mnist"\n')
    assert read_options(path) == {"data": "mnist"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rounds = ", "not valid TOML"),
        ("roundz = 3", "did you mean rounds"),
        ("[lokal]\nlr = 1", "did you mean local"),
        ("[local]\nmomentun = 1", r"in \[local\]; did you mean momentum"),
        ("lr = 1", r"lr belongs to \[local\]"),
        ("[local]\nattack_scale = 2", r"scale belongs to \[attack\]"),
        ("[local]\nrounds = 2", "rounds belongs to no part"),
        ("local = 3", "local is 3, not a table"),
    ],
)
def test_a_bad_config_file_is_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(text)
    with pytest.raises(InvalidInputError, match=message) as caught:
        read_options(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)
    with pytest.raises(InvalidInputError, match="cannot read"):
        read_options(tmp_path / "missing.toml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rounds = 2.5", "--rounds is 2.5, not a whole number"),
        ("rounds = true", "not a whole number"),
        ("model = 3", "--model is 3, not text"),
        ("[local]\nlr = 'high'", "--lr is 'high', not a number"),
        ("[local]\nlr = nan", "--lr is nan; choose a number above 0"),
        ("[forgetting]\nforget = 'client-0@3'", "list of text"),
        ("[forgetting]\nforget = [3]", "text"),
        ("[forgetting]\nerase = 1", "true or false"),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused(
    text: str, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "run.toml"
    path.write_text(f"{text}\n# end of the configuration\n")
    with pytest.raises(InvalidInputError, match=message) as caught:
        RunConfig.load(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    settings = {"keep": "all"}
    whole = RunConfig.from_options(forget=("client-0@2",), set=settings).to_toml()
    for length in range(len(whole)):
        path.write_text(whole[:length])
        with pytest.raises(InvalidInputError, match=r"end is missing|not valid TOML"):
            RunConfig.load(path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clients": 0}, "--clients is 0; choose 1 or more"),
        ({"rounds": 0}, "--rounds is 0; choose 1 or more"),
        ({"train_size": 0}, "--train-size is 0"),
        ({"server_images": -1}, "--server-images is -1; choose 0 or more"),
        ({"seed": -1}, "--seed"),
        ({"workers": 0}, "--workers is 0"),
        (
            {"per_round": 12},
            "--per-round is 12 but there are 10 clients; choose 1 to 10",
        ),
        ({"dtype": "float8"}, "--dtype is 'float8'; choose float32, bfloat16, float16"),
        ({"keep": "some"}, "cannot read the policy"),
        ({"keep": "optimal"}, "a number of 1 or more"),
        ({"keep_use": "both"}, "store or aggregate"),
        ({"partition": "dirichlet"}, "cannot read the split"),
        ({"attack": "magic"}, "--attack is 'magic'; choose none, pixel, edge-case or"),
        ({"attackers": "2"}, "needs an attack"),
        ({"poison_ratio": 0.5}, "--poison-ratio needs an attack"),
        ({"attack_scale": 2.0}, "--attack-scale needs an attack"),
        ({"attack": "pixel", "attackers": ""}, "attackers"),
        ({"attack": "pixel", "attackers": "bob"}, "no client 'bob'"),
        ({"attack": "pixel", "poison_ratio": 2.0}, "--poison-ratio is 2; choose a num"),
        ({"budget": "0"}, "choose more"),
        ({"budget": "99999999TB"}, "choose less"),
        ({"budget": "much"}, "cannot read the budget"),
        ({"weighting": "loud"}, "size or equal"),
        ({"dropout": 1.5}, "--dropout is 1.5; choose 0 or more and below 1"),
        ({"lr": -1.0}, "--lr is -1; choose a number above 0"),
        ({"lr": float("inf")}, "--lr is inf"),
        ({"momentum": 1.0}, "--momentum is 1; choose 0 or more and below 1"),
        ({"weight_decay": -1.0}, "--weight-decay is -1"),
        ({"epochs": 0}, "--epochs is 0"),
        ({"batch_size": 0}, "--batch-size is 0"),
        ({"forget": ("nobody@2",)}, "there is no client 'nobody'"),
        ({"clients": 2, "forget": ("client-0@1", "client-1@2")}, "nobody would be"),
        ({"forget": ("client-0",)}, "CLIENT@ROUND"),
        ({"forget": ("client-0@0",)}, "after 1 to 20 rounds"),
        ({"forget": ("client-0@21",)}, "after 1 to 20 rounds"),
        ({"forget": ("client-0@2", "client-0@3")}, "twice"),
        ({"method": "magic"}, "unknown method 'magic'"),
        ({"skew": "magic"}, "no skew 'magic'"),
        ({"damping": 7.0}, "damping is from 0 to 1"),
        ({"skew": "kronecker", "damping": 0.1}, "damping belongs to skew scalar"),
        ({"keep": "sums", "skew": "scalar"}, "--keep sums keeps none"),
        ({"keep": "sums", "damping": 0.1}, "--keep sums keeps none"),
        ({"keep": "sums", "method": "fast-fedul-paper"}, "skew scalar needs rounds"),
        ({"set": {"magic": 1}}, "has no such setting: magic"),
        ({"data": "nosuch"}, "there is no data set 'nosuch'; choose digits, mnist"),
        ({"roundz": 3}, "no option 'roundz'; did you mean rounds"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message) as caught:
        RunConfig.from_options(options)
    assert "\n" not in str(caught.value)


def test_a_flat_name_is_told_both_ways_to_write_it() -> None:
    with pytest.raises(InvalidInputError) as caught:
        RunConfig(data="digits", clients=5)
    assert "RunConfig(data={'clients': ...})" in str(caught.value)
    assert "RunConfig.from_options(clients=...)" in str(caught.value)
    assert RunConfig.from_options(data="digits", clients=5).data.clients == 5


def test_an_option_in_the_wrong_place_is_told_its_part() -> None:
    with pytest.raises(InvalidInputError, match=r"RunConfig\(local="):
        RunConfig(lr=0.1)
    with pytest.raises(InvalidInputError, match="did you mean clients"):
        RunConfig(data={"client": 3})


@pytest.mark.parametrize(
    ("options", "skew"),
    [
        ({}, None),
        ({"damping": 0.2}, Scalar(0.2)),
        ({"skew": "scalar", "damping": 0.07}, Scalar(0.07)),
        ({"method": "fast-fedul-paper", "damping": 0.3}, Scalar(0.3)),
        ({"skew": "kronecker", "set": {"updates": 8}}, Kronecker(8)),
    ],
)
def test_the_options_make_the_method(options: dict[str, Any], skew: object) -> None:
    method = RunConfig.from_options(options).forgetting.make_method()
    assert isinstance(method, FastFedUL)
    assert method.skew == skew


def test_clients_that_only_the_file_knows_are_checked_later() -> None:
    config = RunConfig.from_options(
        data="own.npz", per_round=3, attack="label-flip", attackers="bob"
    )
    assert config.data.names is None
    config.check_clients(("alice", "bob", "carol"))
    with pytest.raises(InvalidInputError, match="--per-round is 3 but there are 2"):
        config.check_clients(("alice", "bob"))
    with pytest.raises(InvalidInputError, match="no client 'bob'"):
        config.check_clients(("alice", "carol", "dave"))
