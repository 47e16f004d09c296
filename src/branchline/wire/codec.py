"""Messages to bytes and back: msgpack with closed types, and a hard limit on size.

Knows: how to read one closed union (``ToEngine``, ...) and survive bytes that are none of it. Refuses to know: sockets.
Anything that cannot be decoded is a counted drop, never an exception: a receiver's loop must outlive its senders.
"""

from typing import Any, Generic, TypeVar

import msgspec

from branchline.base.errors import InvalidRequest

MAX_MESSAGE_BYTES = 64 << 20

Message = TypeVar("Message")

_UNENCODABLE = (TypeError, ValueError, OverflowError, RecursionError)
_UNDECODABLE = (msgspec.DecodeError, ValueError, OverflowError, RecursionError, MemoryError)


class Codec(Generic[Message]):
    """Encoder and decoder of one union. Owned by one thread, because both reuse their buffers."""

    def __init__(self, kind: Any) -> None:
        """``kind``: the union itself, for example ``Codec[ToEngine](ToEngine)``."""
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(kind)
        self.dropped = 0
        """Messages that could not be decoded."""

    def encode(self, message: Message) -> bytes:
        """Raises InvalidRequest if a value has no msgpack form (an integer of more than 64 bits, half a surrogate pair)
        or the message is longer than ``MAX_MESSAGE_BYTES``: only what a client sent can be so."""
        try:
            data = self._encoder.encode(message)
        except _UNENCODABLE as error:
            raise InvalidRequest("The request holds a value that cannot be passed on.") from error
        if len(data) > MAX_MESSAGE_BYTES:
            raise InvalidRequest(f"The request takes {len(data)} bytes; at most {MAX_MESSAGE_BYTES} can be passed on.")
        return data

    def decode(self, data: bytes) -> Message | None:
        """The message, or ``None`` after counting a drop."""
        if len(data) <= MAX_MESSAGE_BYTES:
            try:
                return self._decoder.decode(data)
            except _UNDECODABLE:
                pass
        self.dropped += 1
        return None
