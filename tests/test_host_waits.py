"""Counting the calls by which the host waits for a device."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from scaling.measure.host_waits import HostWaits


class Base:
    def synchronize(self) -> str:
        return "waited"


class Stream(Base):
    """Inherits it, as a class of a backend may."""


class Event:
    def synchronize(self) -> None:
        Stream().synchronize()


def test_every_wait_is_counted_once_and_everything_is_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[str] = []
    module = SimpleNamespace(Stream=Stream, Event=Event, synchronize=lambda device=None: waited.append("device"))
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device=None: module.synchronize(device))
    before = vars(Stream).get("synchronize"), vars(Event)["synchronize"], module.synchronize
    with HostWaits(torch.device("cuda", 0)) as waits:
        assert Stream().synchronize() == "waited"
        Event().synchronize()  # asks a stream: one wait
        module.synchronize(0)
        torch.accelerator.synchronize()  # asks the module: one wait
    assert waits.count == 4
    assert waited == ["device", "device"]
    assert before == (vars(Stream).get("synchronize"), vars(Event)["synchronize"], module.synchronize)
    Stream().synchronize()
    assert waits.count == 4


def test_an_error_gives_everything_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RuntimeError("device lost")

    module = SimpleNamespace(synchronize=broken)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    with pytest.raises(RuntimeError, match="device lost"), HostWaits(torch.device("cuda", 0)) as waits:
        module.synchronize()
    assert waits.count == 1 and module.synchronize is broken


def test_a_host_waits_for_nothing() -> None:
    with HostWaits(torch.device("cpu")) as waits:
        torch.cpu.synchronize()
    assert waits.count == 0
