"""Results say which commit made them, also where git cannot."""

import subprocess

import pytest

from finola import provenance


@pytest.fixture
def no_repository(monkeypatch):
    def fails(*args, **kwargs):
        raise subprocess.CalledProcessError(128, "git")

    monkeypatch.setattr(provenance.subprocess, "run", fails)


def test_a_copy_of_the_work_tree_is_told_its_commit(no_repository, monkeypatch):
    monkeypatch.setenv("FINOLA_COMMIT", "0123abc")
    assert provenance.commit() == "0123abc"


@pytest.mark.parametrize("value", [None, ""])
def test_without_a_repository_or_a_word_there_is_no_commit(no_repository, monkeypatch, value):
    monkeypatch.delenv("FINOLA_COMMIT", raising=False)
    if value is not None:
        monkeypatch.setenv("FINOLA_COMMIT", value)
    assert provenance.commit() is None


def test_a_repository_is_believed_before_the_variable(monkeypatch):
    monkeypatch.setenv("FINOLA_COMMIT", "0123abc")
    answers = {"ls-files": "provenance.py", "status": " M a.py", "rev-parse": "fedcba9"}
    monkeypatch.setattr(provenance.subprocess, "run", lambda command, **options: subprocess.CompletedProcess(
        command, 0, answers[command[3]] + "\n"))
    assert provenance.commit() == "fedcba9-dirty"
