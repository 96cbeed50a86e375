"""Takes versions from a neighbour into a folder, and passes each on while it arrives.

Nothing here touches an engine: it goes on generating. A copy is whole once every file has its
announced checksum. If a sender breaks off, another process of the route may send the same version
again, from its first byte; the newest attempt replaces the older one.
"""

import hashlib
import shutil
import socket
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path

from forgemq_weight_relay.records import (
    Greeting,
    RelayAnswer,
    RelayError,
    WeightsKey,
    read_message,
    write_message,
)
from forgemq_weight_relay.sending import STALL_S, Relayed, send_along
from forgemq_weight_relay.staged_copy import StagedCopy

RECEIVED_AT_ONCE = 1 << 20
"""Written and hashed between two receives: fits a core's cache."""

REJOIN_S = 2 * STALL_S
"""How long a copy that broke off is waited for: another sender first has to notice, and to
connect."""

REMOVAL_S = STALL_S / 2
"""How long older versions are removed before the bytes of a newer one come, so that no more than
two take room. 3 GB took 0.6 s on a tmpfs and 0.8 s on a disk, so that a model of 60 GB takes longer
than the sender waits."""

_CONNECTIONS_MAX = 8
"""At once; a route has one sender for each process, and a failure adds one."""


class Receiver:
    """Listens from its making until `close`; holds the newest whole copy and the one that arrives.

    Example: `wait(WeightsKey(1, 7), timeout_s=30)` gives the copy of version 7 once it is whole, or
    None if no sender brought it in time.
    """

    def __init__(
        self,
        folder: Path,
        *,
        run: str,
        host: str,
        on_relayed: Callable[[Greeting, Relayed], None],
        on_broken: Callable[[Greeting, str], None],
    ) -> None:
        """Listen at a free port of the host.

        Args:
            folder: For copies; what an earlier process left there is removed.
            run: Other runs' weights are refused.
            host: Address of this machine that the neighbours reach.
            on_relayed: Called in a thread once a copy was passed on, or could not be.
            on_broken: Called in a thread when a copy broke off, with the reason.

        Raises:
            OSError: the host is no address of this machine.
        """
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self._folder = folder
        self._run = run
        self._on_relayed = on_relayed
        self._on_broken = on_broken
        self._whole: tuple[WeightsKey, StagedCopy] | None = None
        self._arriving: tuple[WeightsKey, StagedCopy, socket.socket] | None = None
        self._newest = WeightsKey(0, 0)
        self._attempts = 0
        self._changed = threading.Condition()
        self._connections = threading.BoundedSemaphore(_CONNECTIONS_MAX)
        self._stop = threading.Event()
        self._listener = socket.create_server((host, 0))
        self.address = f"{host}:{self._listener.getsockname()[1]}"
        """Where neighbours send to, `host:port`."""
        threading.Thread(target=self._listen, name="weight-relay", daemon=True).start()

    def wait(self, key: WeightsKey, *, timeout_s: float) -> StagedCopy | None:
        """Wait for a version's whole copy; None if it does not come in time. Blocks.

        The time is shorter once an attempt broke off and no other follows, and after `pass_over`.
        """
        end_s = time.monotonic() + timeout_s
        broken_s: float | None = None
        with self._changed:
            while not self._stop.is_set():
                if self._whole is not None and self._whole[0] == key:
                    return self._whole[1]
                if key < self._newest:
                    return None
                arriving = self._arriving
                is_broken = arriving and arriving[0] == key and arriving[1].broken
                broken_s = (broken_s or time.monotonic()) if is_broken else None
                until_s = end_s if broken_s is None else min(end_s, broken_s + REJOIN_S)
                if time.monotonic() >= until_s:
                    return None
                self._changed.wait(until_s - time.monotonic())
        return None

    def pass_over(self, newest: WeightsKey) -> None:
        """Wait no longer for weights that are older than these."""
        with self._changed:
            self._newest = max(self._newest, newest)
            self._changed.notify_all()

    def close(self) -> None:
        """Stop listening, and break off what arrives or is passed on."""
        self._stop.set()
        # `accept` in another thread does not notice that the listener closes, but this.
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._changed:
            if self._arriving is not None:
                _hang_up(self._arriving[2])
            self._changed.notify_all()

    def _listen(self) -> None:
        while not self._stop.is_set():
            try:
                link, _ = self._listener.accept()
            except OSError:
                continue  # The neighbour left at once, or this receiver closes.
            if not self._connections.acquire(blocking=False):
                link.close()
                continue
            threading.Thread(
                target=self._serve, args=(link,), name="weight-relay-take", daemon=True
            ).start()

    def _serve(self, link: socket.socket) -> None:
        try:
            # A neighbour that is gone reads no answer.
            with link, suppress(OSError, RelayError):
                link.settimeout(STALL_S)
                self._take(link, read_message(link, Greeting))
        finally:
            self._connections.release()

    def _take(self, link: socket.socket, greeting: Greeting) -> None:
        with self._changed:
            answer = self._answer(greeting)
            copy = self._begin(link, greeting) if answer.verdict == "send" else None
            others = [] if copy is None else self._others(copy)
        # The sender waits for the answer; what takes longer goes on while bytes come.
        _removing(others).join(REMOVAL_S)
        write_message(link, answer)
        if copy is None:
            return
        passing = threading.Thread(
            target=self._pass_on, args=(copy, greeting), name="weight-relay-pass", daemon=True
        )
        passing.start()
        try:
            _fill(copy, link)
        except (OSError, RelayError) as error:
            copy.break_off(str(error) or type(error).__name__)
            self._on_broken(greeting, copy.broken)
            self._note()
            # Its bytes may be why there is no room for the durable copy, which is loaded next.
            _removing(_folders(copy))
            write_message(link, RelayAnswer("refuse", copy.broken))
            return
        self._keep(copy, greeting)
        write_message(link, RelayAnswer("have"))
        # The thread is this connection's: a receiver is busy until its copy is passed on.
        passing.join()

    def _answer(self, greeting: Greeting) -> RelayAnswer:
        key = WeightsKey(greeting.lineage, greeting.version)
        if greeting.run != self._run:
            return RelayAnswer("refuse", f"this is run {self._run}")
        if name := greeting.wrong_name():
            return RelayAnswer("refuse", f"{name!r} is not <folder>/<file>, or comes twice")
        if self._whole is not None and self._whole[0] == key:
            return RelayAnswer("have")
        newest = max(each[0] for each in (self._whole, self._arriving, (key,)) if each)
        return (
            RelayAnswer("send")
            if newest == key
            else RelayAnswer("refuse", f"{newest} came already")
        )

    def _begin(self, link: socket.socket, greeting: Greeting) -> StagedCopy:
        if self._arriving is not None:
            _hang_up(self._arriving[2])
        self._attempts += 1
        folder = self._folder / f"{greeting.lineage}.{greeting.version}-{self._attempts}"
        copy = StagedCopy(
            {file.name: folder / file.name for file in greeting.files}, greeting.files
        )
        self._arriving = (WeightsKey(greeting.lineage, greeting.version), copy, link)
        return copy

    def _keep(self, copy: StagedCopy, greeting: Greeting) -> None:
        with self._changed:
            if self._arriving is None or self._arriving[1] is not copy:
                raise RelayError("another sender brings it")
            copy.complete()
            self._whole = (WeightsKey(greeting.lineage, greeting.version), copy)
            self._arriving = None
            self._changed.notify_all()

    def _others(self, arriving: StagedCopy) -> list[Path]:
        """Folders of neither this copy nor the whole one; of no copy that begins later either."""
        copies = [arriving] if self._whole is None else [arriving, self._whole[1]]
        held = set[Path]().union(*map(_folders, copies))
        return [folder for folder in self._folder.iterdir() if folder not in held]

    def _pass_on(self, copy: StagedCopy, greeting: Greeting) -> None:
        if greeting.route:
            relayed = send_along(copy, greeting, stop=self._stop)
            self._on_relayed(greeting, relayed)

    def _note(self) -> None:
        with self._changed:
            self._changed.notify_all()


def _folders(copy: StagedCopy) -> set[Path]:
    """Of a copy that has files; one folder, which no other copy has."""
    return {path.parents[1] for path in copy.paths.values()}


def _removing(folders: Collection[Path]) -> threading.Thread:
    """Remove folders, in a thread: the files of a large model take the kernel many seconds."""

    def remove() -> None:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)

    thread = threading.Thread(target=remove, name="weight-relay-remove", daemon=True)
    thread.start()
    return thread


def _fill(copy: StagedCopy, link: socket.socket) -> None:
    """Write the files as their bytes arrive, and check each.

    Raises:
        OSError: the sender is gone or silent, or the folder has no room.
        RelayError: a file has another checksum than announced.
    """
    buffer = memoryview(bytearray(RECEIVED_AT_ONCE))
    for each in copy.files:
        path = copy.paths[each.name]
        path.parent.mkdir(parents=True, exist_ok=True)
        digest = hashlib.sha256()
        # Unbuffered: the thread that passes the copy on reads what `grow` says is there.
        with path.open("wb", buffering=0) as file:
            left = each.size_bytes
            while left:
                count = link.recv_into(buffer, min(left, len(buffer)))
                if not count:
                    raise RelayError(f"the sender left {left} bytes before the end of {each.name}")
                digest.update(buffer[:count])
                if file.write(buffer[:count]) != count:
                    raise RelayError(f"no room for {each.name}")
                copy.grow(count)
                left -= count
        if digest.hexdigest() != each.sha256:
            raise RelayError(f"{each.name} has sha256 {digest.hexdigest()}, not {each.sha256}")


def _hang_up(link: socket.socket) -> None:
    with suppress(OSError):
        link.shutdown(socket.SHUT_RDWR)
