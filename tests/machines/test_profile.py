"""Profiles: what is written can be read again, and impossible numbers are refused."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from estimator.errors import ProfileError, StoreError, UnknownMachineError
from estimator.machines.catalogue import known_machines, load_profile
from estimator.machines.profile import Link, MachineProfile, Provenance, UpdateCost, json_schema

DATASHEET = Provenance(source="datasheet")


def test_a_saved_profile_reads_back_equal(small_profile: MachineProfile, tmp_path: Path) -> None:
    small_profile.save(tmp_path / "machine.json")
    assert load_profile(tmp_path / "machine.json") == small_profile


def test_a_machine_is_found_by_name_in_the_users_store(store: Path) -> None:
    assert known_machines()["local"] == store / "machines" / "local.json"
    assert load_profile("local").name == "local"


@pytest.mark.parametrize(
    ("asked", "close"),
    [
        ("v100-smx", "v100-sxm"),  # two letters swapped
        ("T4-G4DN", "t4-g4dn"),
        ("a100-sxm", "a100-sxm-40gb, a100-sxm-80gb"),
    ],
)
def test_an_unknown_machine_is_answered_with_close_names(
    store: Path, asked: str, close: str
) -> None:
    with pytest.raises(UnknownMachineError, match=f"close to it are {close}") as found:
        load_profile(asked)
    named = str(found.value).split("close to it are ")[1].split(";")[0].split(", ")
    assert len(named) <= 5
    assert "run 'estimator machines list'" in str(found.value)


def test_a_transfer_takes_latency_plus_size_over_bandwidth() -> None:
    link = Link(kind="pcie", latency_s=1e-5, bandwidth_bytes_per_s=1e9, provenance=DATASHEET)
    # 10 µs + 1 MB at 1 GB/s = 1 ms
    assert link.transfer_time_s(10**6) == pytest.approx(1.01e-3)


def test_an_update_costs_a_launch_and_its_tensors_and_parameters() -> None:
    update = UpdateCost(
        optimizer="adam",
        form="loop",
        device="cpu",
        launch_s=1.0,
        per_tensor_s=0.1,
        per_parameter_s=0.001,
        provenance=DATASHEET,
    )
    assert update.update_time_s(tensors=5, parameters=100) == pytest.approx(1 + 0.5 + 0.1)


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan"), float("inf")])
def test_a_rate_is_positive_and_finite(rate: float) -> None:
    with pytest.raises(ValueError, match="bandwidth_bytes_per_s must be positive"):
        Link(kind="pcie", latency_s=0.0, bandwidth_bytes_per_s=rate, provenance=DATASHEET)


def test_a_profile_of_another_schema_version_is_refused(small_profile: MachineProfile) -> None:
    for version in (1, 99):
        with pytest.raises(
            ProfileError, match=f"schema version {version}.*probe the machine again"
        ):
            MachineProfile.from_dict(small_profile.to_dict() | {"schema_version": version})


def test_what_is_not_known_of_a_profile_is_passed_over(small_profile: MachineProfile) -> None:
    other = json.loads(json.dumps(small_profile.to_dict()))
    other["collectives"][0] |= {"cpu_s": 1e-5, "cpu_s_per_byte": 5e-10}
    assert MachineProfile.from_dict(other) == small_profile


def test_a_contention_of_an_unknown_kind_is_refused(small_profile: MachineProfile) -> None:
    odd = json.loads(json.dumps(small_profile.to_dict()))
    odd["contentions"][0]["bound"] = "third_touch"
    with pytest.raises(ProfileError, match="contentions"):
        MachineProfile.from_dict(odd)


def test_a_profile_without_devices_is_refused(small_profile: MachineProfile) -> None:
    with pytest.raises(ValueError, match="at least one device"):
        replace(small_profile, devices=())


def test_the_schema_names_every_group_of_a_profile(small_profile: MachineProfile) -> None:
    assert set(json_schema()["properties"]) == set(small_profile.to_dict())


def test_an_interrupted_write_leaves_the_old_profile(
    small_profile: MachineProfile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "machine.json"
    small_profile.save(path)
    before = path.read_bytes()

    def full_disk(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full_disk)
    with pytest.raises(StoreError, match="No space left"):
        replace(small_profile, name="other").save(path)
    assert path.read_bytes() == before
    assert [item.name for item in tmp_path.iterdir()] == ["machine.json"]


def test_a_profile_file_holds_base_units_as_plain_json(store: Path) -> None:
    content = json.loads((store / "machines" / "local.json").read_text())
    assert content["devices"][0]["memory_bytes"] == 8 * 2**30
    assert content["links"][0]["provenance"]["source"] == "measured"


def test_a_file_that_another_process_changes_is_read_again(
    small_profile: MachineProfile, tmp_path: Path
) -> None:
    path = tmp_path / "m.json"
    small_profile.save(path)
    assert load_profile(path).name == small_profile.name
    changed = path.read_text().replace(f'"{small_profile.name}"', '"renamed"', 1)
    path.write_text(changed)
    time.sleep(0.03)
    assert load_profile(path).name == "renamed"
