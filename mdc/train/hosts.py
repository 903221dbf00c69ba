"""Where the hosts of one training meet: a store at HOST:PORT, which the host of that name keeps.

It outlives the tries of a training. torchrun's rendezvous of each try lives in it, and it holds what all hosts must
have in common and which tries have failed. If its host is lost, the others wait for it to come back with a new one.
"""

import ipaddress
import json
import logging
import socket
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.distributed import DistError, DistNetworkError, TCPStore

from mdc import files
from mdc.config import Params
from mdc.errors import TrainingFailed, UserError

log = logging.getLogger(__name__)

RETRY_S = 1.0
ANSWER_S = 20  # for the store to answer
HINTS = {
    "training": "the parameters or the data are others; all hosts must see the same params.yaml and shards",
    "code": "the source of mdc is another; install the same version on all hosts",
    "torch": "install the same version on all hosts",
}


class MeetingPlace:
    """The store at `endpoint`, as this host sees it."""

    def __init__(self, endpoint: str, patience_s: float) -> None:
        """patience_s: seconds to wait for the host that keeps the store, each time that it is looked for."""
        self.endpoint, self.patience_s = endpoint, patience_s
        self.host, port = endpoint.rsplit(":", 1)
        self.port = int(port)
        self.own: TCPStore | None = None  # where this host keeps the store; it ends with this object
        self.store: TCPStore
        self.address = ""  # of this host, as the others reach it

    def enter(self, common: dict[str, Any]) -> int:
        """Connect, on the endpoint's own host open the store first, and return the number of the try to join.

        common: what all hosts of a try must have in common.
        Raises UserError where they differ and where the port is taken, TrainingFailed where nobody answers in time.
        """
        deadline, told = time.monotonic() + self.patience_s, ""
        while True:
            try:
                self._connect()
                break
            except (OSError, DistError) as problem:
                if time.monotonic() > deadline:
                    raise TrainingFailed(
                        f"no host keeps a meeting at {self.endpoint}: {problem}; is the name right, the training "
                        f"started there and the port open? Waited compute.rendezvous_timeout = {self.patience_s:g} s"
                    ) from None
                if str(problem) != told:
                    told = str(problem)
                    log.warning("waiting for the host at %s (%s)", self.endpoint, told)
                time.sleep(RETRY_S)
        number = self._current_try()
        theirs = json.loads(self.store.compare_set(f"common-{number}", "", json.dumps(common)))
        for name, value in theirs.items():
            if common[name] != value:
                raise UserError(
                    f"{socket.gethostname()} cannot join the hosts at {self.endpoint}: {name} is {common[name]} here "
                    f"and {value} there; {HINTS.get(name, f'set compute.{name} alike on all hosts')}"
                )
        came = f"{socket.gethostname()} ({self.address})\n"
        self.store.append(f"came-{number}", came)  # type: ignore[attr-defined]  # which its stub leaves out
        return number

    def came(self, number: int) -> list[str]:
        """The hosts that have come for a try which this one has entered; none where the store is lost."""
        try:
            return sorted(set(self.store.get(f"came-{number}").decode().splitlines()))
        except DistError:
            return []

    def _connect(self) -> None:
        address = str(socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)[0][4][0])
        if self.own is None and address in interfaces():
            self.own = self._open()
        with socket.create_connection((address, self.port), timeout=ANSWER_S) as probe:
            self.address = str(probe.getsockname()[0])
        if self.own is not None and not _is_seen(self.address):  # a host's name for itself alone
            self.address = next(filter(_is_seen, interfaces()), self.address)
        self.store = _client(address, self.port)

    def _open(self) -> TCPStore:
        try:
            return TCPStore(self.host, self.port, is_master=True, wait_for_workers=False)
        except DistNetworkError as error:
            if "EADDRINUSE" not in str(error):
                raise
            raise UserError(
                f"port {self.port} of {self.host} is in use, by another program or another training; choose another "
                "port in compute.endpoint"
            ) from None

    @property
    def interface(self) -> str:
        """The network interface over which the other hosts reach this one."""
        return interfaces().get(self.address, "")

    def _current_try(self) -> int:
        """The number of the try that no host has seen fail."""
        number = 0
        while self.store.check([f"failed-{number}"]):
            number += 1
        return number

    def note_failed(self, number: int) -> None:
        """Tell the other hosts that this try is over. Nothing to tell where the store is lost: so are its tries."""
        try:
            self.store.set(f"failed-{number}", "")
        except DistError:
            log.warning("the host at %s is lost", self.endpoint)


def _client(address: str, port: int) -> TCPStore:
    """A connection to the store. In a thread, since the constructor waits for ever for a server of another kind."""
    made: list[TCPStore | DistError] = []

    def connect() -> None:
        try:
            made.append(TCPStore(address, port, is_master=False, timeout=timedelta(seconds=ANSWER_S)))
        except DistError as error:
            made.append(error)

    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(ANSWER_S)
    if not made:
        raise TimeoutError("what answers there is no store of torch.distributed")
    if isinstance(made[0], DistError):
        raise made[0]
    return made[0]


def _is_seen(address: str) -> bool:
    """Whether other hosts may reach an address: it is not the loopback, or one that holds on one cable alone."""
    parsed = ipaddress.ip_address(address)
    return not (parsed.is_loopback or parsed.is_link_local)


def interfaces() -> dict[str, str]:
    """This host's addresses, each with its network interface."""
    return {
        entry.address.partition("%")[0]: name
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6)
    }


def in_common(params: Params, work: Path) -> dict[str, Any]:
    """What must be alike on all hosts. work: the training's folder, named by data and parameters."""
    return {
        "training": work.name,
        "code": files.code_version(),
        "torch": torch.__version__,
        "hosts": params.compute.hosts,
        "processes": params.compute.processes,
    }
