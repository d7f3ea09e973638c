"""Checks of Python and packages, on versions that are made up."""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError

import pytest

from guava_nb.doctor import check, software


def versions(monkeypatch: pytest.MonkeyPatch, **known: str) -> None:
    def version(name: str) -> str:
        if name not in known:
            raise PackageNotFoundError(name)
        return known[name]

    monkeypatch.setattr(check, "version", version)


@pytest.mark.parametrize(
    ("found", "status", "says"),
    [
        ("2.13.0+cpu", "ok", ""),
        ("2.11.0+cu128", "ok", ""),
        ("2.12.1", "warning", ""),
        ("2.14.0", "warning", ""),
        ("2.8.0", "warning", "torch>=2.11"),
        (None, "fail", "install torch"),
    ],
)
def test_torch(found: str | None, status: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    versions(monkeypatch, **({"torch": found} if found else {}))
    check = software.check_torch()
    assert check.status == status
    assert says in check.fix
    if found:
        assert f"(tested: 2.11, 2.13{'; it is older than those' if '2.8' in found else ''})" in check.detail
        assert ("is untested" in check.detail) == (status == "warning")


@pytest.mark.parametrize(
    ("found", "status"),
    [
        ("6.29.5", "ok"),
        ("7.0.0", "warning"),
        ("7.0.1", "warning"),
        ("7.4.0", "ok"),
        ("6.9.0", "warning"),
        (None, "warning"),
    ],
)
def test_ipykernel(found: str | None, status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    versions(monkeypatch, **({"ipykernel": found} if found else {}))
    check = software.check_ipykernel()
    assert check.status == status
    assert bool(check.fix) == (status != "ok")


@pytest.mark.parametrize(("found", "status"), [("8.1.9", "ok"), ("7.6.5", "warning"), (None, "warning")])
def test_ipywidgets(found: str | None, status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    versions(monkeypatch, **({"ipywidgets": found} if found else {}))
    assert software.check_ipywidgets().status == status


def test_python(monkeypatch: pytest.MonkeyPatch) -> None:
    assert software.check_python().status == "ok"
    monkeypatch.setattr(sys, "version_info", (3, 9, 0))
    assert software.check_python().status == "fail"


def test_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    assert software.check_packages().status == "ok"
    monkeypatch.setitem(software.PACKAGES, "no_such_module_at_all", "no-such-package")
    check = software.check_packages()
    assert check.status == "fail"
    assert check.fix == "python -m pip install no-such-package"
    assert "ModuleNotFoundError" in check.detail
