"""What an engine's event publisher has sent, from its own replay socket: nothing is missed by who asks late."""

from typing import Any

import msgspec
import zmq

REPLY_TIMEOUT_MS = 20_000
END = (-1).to_bytes(8, "big", signed=True)


class EventsLog:
    """Asks for what came since it was asked last."""

    def __init__(self, replay_endpoint: str) -> None:
        self._socket = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RCVTIMEO, REPLY_TIMEOUT_MS)
        self._socket.connect(replay_endpoint)
        self._next = 0

    def take(self) -> list[dict[str, Any]]:
        """Events in order, as they were sent; bytes in hex. The publisher may still hold the last ones back."""
        self._socket.send_multipart((b"", self._next.to_bytes(8, "big")))
        events: list[dict[str, Any]] = []
        while True:
            _, _, sequence, payload = self._socket.recv_multipart()
            if sequence == END:
                return events
            self._next = int.from_bytes(sequence, "big") + 1
            batch = msgspec.msgpack.decode(payload)
            events += [_in_hex(event) for event in batch[1]]


def _in_hex(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, list):
        return [_in_hex(item) for item in value]
    return {name: _in_hex(item) for name, item in value.items()} if isinstance(value, dict) else value
