"""`finola doctor`: passes on a sound installation, and names what is wrong on another."""

import json

import pytest
from packaging.requirements import Requirement

from finola import registry
from finola.cli import checks as doctor
from finola.cli.main import main
from finola.weights import weights_hash


def test_this_installation_is_sound(capsys):
    assert main(["doctor", "--json"]) == 0
    found = {(check["group"], check["name"]): check for check in json.loads(capsys.readouterr().out)}
    assert {("package", "torch"), ("device", "cpu"), ("codec", "JPEG"), ("self-test", "operator")} <= found.keys()
    assert all(check["ok"] for check in found.values())


def test_a_fault_is_named_and_gives_exit_code_2(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "operator_error", lambda: 0.5)
    assert main(["doctor"]) == 2
    printed = capsys.readouterr()
    assert "BAD  self-test  operator" in printed.out
    assert "1 of" in printed.err and "differs from the literal recursion by 5.0e-01" in printed.err


@pytest.mark.parametrize("release", ["2.6.2", "2.6.3"])
def test_malicious_releases_are_refused(monkeypatch, release):
    monkeypatch.setattr(doctor, "version", lambda name: release)
    check = doctor.check_package(Requirement("lightning>=2.6"), "train")
    assert not check.ok and "malware" in check.detail and release in check.detail


def test_missing_packages_name_what_installs_them():
    optional = doctor.check_package(Requirement("no-such-package>=1"), "train")
    assert optional.ok and "pip install 'finola[train]'" in optional.detail
    needed = doctor.check_package(Requirement("no-such-package>=1"), None)
    assert not needed.ok and "pip install 'no-such-package>=1'" in needed.detail


def test_an_old_version_is_a_fault_even_of_an_optional_package(monkeypatch):
    monkeypatch.setattr(doctor, "version", lambda name: "1.0")
    check = doctor.check_package(Requirement("rich>=14"), "train")
    assert not check.ok and "got 1.0, expected >=14" in check.detail


def test_shipped_weights_are_checked_against_their_card(monkeypatch, tmp_path):
    monkeypatch.setattr(registry, "PRETRAINED_FOLDER", tmp_path)
    weights = tmp_path / "finola_mfw720_c768_r8.safetensors"
    weights.write_bytes(b"weights")
    card = weights.with_suffix(".json")

    def only() -> doctor.Check:
        (check,) = doctor.check_weights()
        return check

    assert only().ok and "no model card" in only().detail
    card.write_text(json.dumps({"sha256": weights_hash(weights)}))
    assert only().ok and "as in its card" in only().detail
    weights.write_bytes(b"weightz")
    assert not only().ok and weights_hash(weights) in only().detail
    card.write_text("{")
    assert not only().ok and "sha256" in only().detail


def test_a_codec_that_pictures_need_is_a_fault_when_absent(monkeypatch):
    monkeypatch.setattr("PIL.features.check", lambda feature: False)
    assert [check.name for check in doctor.check_codecs() if not check.ok] == ["JPEG", "PNG"]
