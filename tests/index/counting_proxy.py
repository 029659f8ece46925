"""A TCP proxy that counts round trips: how often a client speaks after it was answered."""

import socket
import threading
from contextlib import suppress


class CountingProxy:
    def __init__(self, port: int = 0, target: int = 0) -> None:
        self._listener = socket.create_server(("127.0.0.1", port))
        self.port: int = self._listener.getsockname()[1]
        self.target = target
        self.round_trips = 0
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(("127.0.0.1", self.target))
            state = {"answered": True}
            threading.Thread(target=self._pass, args=(client, server, state, True), daemon=True).start()
            threading.Thread(target=self._pass, args=(server, client, state, False), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket, state: dict[str, bool], is_client: bool) -> None:
        while True:
            try:
                data = source.recv(1 << 20)
            except OSError:
                data = b""
            if not data:
                for end in (source, target):
                    with suppress(OSError):
                        end.shutdown(socket.SHUT_RDWR)
                return
            with self._lock:
                if is_client and state["answered"]:
                    self.round_trips += 1
                state["answered"] = not is_client
            target.sendall(data)

    def close(self) -> None:
        self._listener.close()
