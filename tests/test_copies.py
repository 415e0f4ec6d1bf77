"""Copies to an accelerator run beside the training; a fake one notes what happens in which order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from scaling.workload.copies import on_device


class Moved:
    """A tensor that knows where it is and what was done to it."""

    def __init__(self, log: list[str], number: int, stream: str) -> None:
        self.log, self.number, self.stream = log, number, stream

    def to(self, device: torch.device, *, non_blocking: bool) -> Moved:
        assert non_blocking
        current = FakeStream.current
        self.log.append(f"copy {self.number} in {current}")
        return Moved(self.log, self.number, current)

    def record_stream(self, stream: FakeStream) -> None:
        self.log.append(f"keep {self.number} for {stream.name}")


class FakeStream:
    current = "compute"

    def __init__(self, log: list[str], name: str) -> None:
        self.log, self.name, self.events = log, name, 0

    def __enter__(self) -> None:
        FakeStream.current = self.name

    def __exit__(self, *_: object) -> None:
        FakeStream.current = "compute"

    def record_event(self) -> str:
        self.events += 1
        return f"event {self.events}"

    def wait_event(self, event: str) -> None:
        self.log.append(f"{self.name} waits for {event}")


def test_a_host_gets_its_batches_as_they_are() -> None:
    batches: Iterator[Any] = iter([{"x": torch.ones(1)}])
    given = next(on_device(batches, torch.device("cpu")))
    assert torch.equal(given["x"], torch.ones(1))


def test_the_next_copy_is_on_its_way_before_a_batch_is_handed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    compute = FakeStream(log, "compute")
    monkeypatch.setattr(torch, "Stream", lambda device: FakeStream(log, "copies"))
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: compute)

    def host() -> Iterator[Any]:
        for number in range(1, 100):
            log.append(f"load {number}")
            yield {"x": Moved(log, number, "host")}

    batches = on_device(host(), torch.device("cuda", 0))
    assert log == []  # nothing happens before the first is asked for
    first: Any = next(batches)
    assert first["x"].number == 1
    assert log == [
        "load 1",
        "copy 1 in copies",
        "load 2",
        "copy 2 in copies",
        "compute waits for event 1",  # and the host for nothing
        "keep 1 for compute",
    ]
    log.clear()
    second: Any = next(batches)
    assert second["x"].number == 2
    assert log == ["load 3", "copy 3 in copies", "compute waits for event 2", "keep 2 for compute"]
