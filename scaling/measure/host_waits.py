"""How often the host waits for a device by asking it to finish."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch


class HostWaits:
    """While entered, counts calls of `synchronize`: of the device, of streams and of events. Nothing on a host.

    Operators whose result the host has to see are not among them.
    """

    def __init__(self, device: torch.device) -> None:
        self.count = 0
        self._inside = False
        self._kept: list[tuple[Any, Any]] = []
        self._owners: list[Any] = []
        if device.type != "cpu":
            module = torch.get_device_module(device)
            own = [module, getattr(module, "Stream", None), getattr(module, "Event", None), torch.accelerator]
            self._owners = [owner for owner in own if hasattr(owner, "synchronize")]

    def __enter__(self) -> HostWaits:
        for owner in self._owners:
            # As the owner itself has it: a class may inherit what it calls, and is then given back nothing.
            self._kept.append((owner, vars(owner).get("synchronize")))
            owner.synchronize = self._counted(owner.synchronize)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for owner, original in reversed(self._kept):
            if original is None:
                del owner.synchronize
            else:
                owner.synchronize = original
        self._kept.clear()

    def _counted(self, wait: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(wait)
        def counted(*args: Any, **kwargs: Any) -> Any:
            if self._inside:  # one wait that asks for another
                return wait(*args, **kwargs)
            self.count, self._inside = self.count + 1, True
            try:
                return wait(*args, **kwargs)
            finally:
                self._inside = False

        return counted
