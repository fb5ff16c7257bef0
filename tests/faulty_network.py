"""A TCP proxy on loopback that misbehaves as networks do."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import threading
import time

# SO_LINGER with no time: close sends RST
_RST = struct.pack("ii", 1, 0)
_CHUNK = 16384


class Proxy:
    """Forwards connections to one address, until it is told to do worse.

    Attributes:
        address: Where to dial it.
        delay_s: Added to every chunk, either way.
        rate: Bytes a second, of each connection and way; None is as fast as it goes.
    """

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.delay_s = 0.0
        self.rate: float | None = None
        self.connection_count = 0
        self._flows = threading.Event()  # cleared: half-open, nothing comes through
        self._flows.set()
        self._lock = threading.Lock()
        self._pairs: set[tuple[socket.socket, socket.socket]] = set()
        self._closed = False
        threading.Thread(target=self._accept, daemon=True).start()

    def freeze(self) -> None:
        """Half-open: connections stay, new ones are taken, and nothing comes through."""
        self._flows.clear()

    def thaw(self) -> None:
        """Lets everything through again, what was held up first."""
        self._flows.set()

    def heal(self) -> None:
        """No fault any more."""
        self.delay_s, self.rate = 0.0, None
        self.thaw()

    def cut(self) -> None:
        """Ends every connection, both ways, as a proxy that restarts would."""
        self._end_all(reset=False)

    def reset(self) -> None:
        """Ends every connection with RST, as a host that crashed and came back would."""
        self._end_all(reset=True)

    def close(self) -> None:
        """Ends connections and listening."""
        self._closed = True
        self.thaw()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._end_all(reset=True)

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(self._target, timeout=5)
            except OSError:
                near.close()
                continue
            for each in (near, far):
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                each.settimeout(None)
            pair = (near, far)
            with self._lock:
                self._pairs.add(pair)
                self.connection_count += 1
            for source, sink in (pair, pair[::-1]):
                threading.Thread(target=self._pump, args=(source, sink, pair), daemon=True).start()

    def _pump(
        self, source: socket.socket, sink: socket.socket, pair: tuple[socket.socket, socket.socket]
    ) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(_CHUNK):
                self._flows.wait()
                if self.delay_s:
                    time.sleep(self.delay_s)
                if self.rate is not None:
                    time.sleep(len(data) / self.rate)
                sink.sendall(data)
        self._end(pair, reset=False)

    def _end_all(self, *, reset: bool) -> None:
        with self._lock:
            pairs = list(self._pairs)
        for pair in pairs:
            self._end(pair, reset=reset)

    def _end(self, pair: tuple[socket.socket, socket.socket], *, reset: bool) -> None:
        with self._lock:
            if pair not in self._pairs:
                return
            self._pairs.remove(pair)
        for each in pair:
            with contextlib.suppress(OSError):
                if reset:
                    each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RST)
                each.shutdown(socket.SHUT_RDWR) if not reset else None
            each.close()

    def inject(self, fault: str, chance: random.Random) -> None:
        """One of `FAULTS`, as bad as chance will have it."""
        match fault:
            case "delay":
                self.delay_s = chance.uniform(0.001, 0.03)
            case "throttle":
                self.rate = chance.uniform(50_000, 1_000_000)
            case "cut":
                self.cut()
            case "reset":
                self.reset()
            case "freeze":
                self.freeze()


FAULTS = ("delay", "throttle", "cut", "reset", "freeze")
