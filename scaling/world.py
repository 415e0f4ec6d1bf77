"""The open world of a measurement: device, process groups, and what ranks tell each other outside the training."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from scaling.hardware.device import local_device
from scaling.ranks import Launch, Member, Refused, check_one_world, introduce, rendezvous

T = TypeVar("T")


class World:
    """The ranks of one measurement. Control traffic goes over the store and a gloo group, never the training group."""

    def __init__(self, launch: Launch, device: torch.device, members: list[Member], store: dist.Store) -> None:
        self.launch = launch
        self.device = device
        self.members = members
        self._store = dist.PrefixStore("scaling/decisions", store)
        self._control: dist.ProcessGroup | None = None

    @property
    def rank(self) -> int:
        return self.launch.rank

    @property
    def size(self) -> int:
        return self.launch.world_size

    @classmethod
    def open(
        cls,
        launch: Launch,
        config: dict[str, Any],
        *,
        request: str = "auto",
        local_check: Callable[[torch.device], None] = lambda device: None,
        process_group: bool = True,
        timeout_s: float = 300.0,
        store: dist.Store | None = None,
    ) -> World:
        """Meet the other ranks, agree that this is one world of one config, and open the process groups.

        `local_check` raises ValueError for what this host or device cannot do. Raises Refused on every rank.
        """
        timeout = timedelta(seconds=timeout_s)
        device, problem = None, None
        try:
            device = local_device(request, launch.rank, launch.local_rank)
            local_check(device)
        except ValueError as error:
            problem = str(error)
        store = store or rendezvous(launch, timeout_s)
        members = introduce(store, launch, Member.here(launch, device, config, problem), timeout_s)
        check_one_world(members)
        assert device is not None
        world = cls(launch, device, members, store)
        world._open_groups(store, process_group, timeout)
        return world

    def _open_groups(self, store: dist.Store, process_group: bool, timeout: timedelta) -> None:
        if self.device.type != "cpu":
            torch.accelerator.set_device_index(self.device)
        if not process_group:
            return
        backend = dist.get_default_backend_for_device(self.device)
        dist.init_process_group(
            backend,
            store=dist.PrefixStore("scaling/group", store),
            rank=self.rank,
            world_size=self.size,
            timeout=timeout,
        )
        if self.size > 1:
            self._control = dist.new_group(backend="gloo", timeout=timeout)

    def gather(self, value: T) -> list[T]:
        """The value of every rank, in rank order, on every rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._control)
        return values

    def together(self, build: Callable[[], T]) -> T:
        """Run `build` on every rank; a ValueError on any of them becomes one Refused on all."""
        result: list[T] = []
        problem = None
        try:
            result.append(build())
        except ValueError as error:
            problem = str(error)
        for rank, message in enumerate(self.gather(problem)):
            if message is not None:
                raise Refused(message, rank)
        return result[0]

    def barrier(self) -> None:
        """Wait until every rank is here; over the control group."""
        if self.size > 1:
            dist.barrier(group=self._control)

    def publish(self, key: str, value: str) -> None:
        """Tell a decision to the ranks that will ask for it."""
        if self.size > 1:
            self._store.set(key, value)

    def read(self, key: str) -> str:
        """A decision of rank 0; waits for it."""
        return str(self._store.get(key).decode())

    def close(self) -> None:
        """Leave together: nobody closes a connection that another rank still reads from."""
        if dist.is_initialized():
            self.barrier()
            dist.destroy_process_group()
