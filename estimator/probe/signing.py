"""Sign what the ranks of a probe tell each other: without the secret nobody speaks or is heard."""

from __future__ import annotations

import hmac
import json
from dataclasses import dataclass, field
from typing import Any

from estimator.errors import ProbeError
from estimator.units import MIB

# The longest message is the profile of a machine, about a megabyte.
MAX_MESSAGE_BYTES = 16 * MIB
MAX_DEPTH = 32
_DIGEST = "sha256"
_MAC_CHARACTERS = 64


@dataclass(frozen=True, slots=True)
class Signer:
    """HMAC-SHA256 (RFC 2104) over a message and the key of the store under which it stands.

    A key names the speaker and the number of the message, and the secret is of one session: bytes
    copied to another key or kept from another session do not verify, so that replays are refused.
    """

    secret: bytes = field(repr=False)

    def derived(self, *names: str) -> Signer:
        """A signer for one purpose, unlike that for any other."""
        # Signed texts begin with a length, whose first byte is 0.
        text = b"\xff" + json.dumps(names).encode()
        return Signer(hmac.digest(self.secret, text, _DIGEST))

    def sign(self, key: str, body: bytes) -> bytes:
        """The signature in hexadecimal digits, then the body."""
        return self._mac(key, body) + body

    def verified(self, key: str, signed: bytes) -> bytes | None:
        """The body; None where it was not signed by this secret for this key."""
        mac, body = signed[:_MAC_CHARACTERS], signed[_MAC_CHARACTERS:]
        return body if hmac.compare_digest(mac, self._mac(key, body)) else None

    def _mac(self, key: str, body: bytes) -> bytes:
        name = key.encode()
        text = len(name).to_bytes(8, "big") + name + body
        return hmac.digest(self.secret, text, _DIGEST).hex().encode()


def to_json(value: Any) -> bytes:
    """A message as JSON; raises ProbeError where it is too long to be read."""
    body = json.dumps(value, allow_nan=False).encode()
    if len(body) > MAX_MESSAGE_BYTES:
        raise ProbeError(
            f"a message of {len(body)} bytes is longer than the {MAX_MESSAGE_BYTES} that ranks "
            "read; probe with a smaller --budget"
        )
    return body


def from_json(body: bytes) -> Any:
    """The value of a message; raises ProbeError where it is too long, too deep or no JSON."""
    if len(body) > MAX_MESSAGE_BYTES:
        raise ProbeError(f"a message has {len(body)} bytes; at most {MAX_MESSAGE_BYTES} are read")
    try:
        value = json.loads(body, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ProbeError(f"a message is no JSON ({str(error)[:100]})") from None
    if _depth(value, MAX_DEPTH + 1) > MAX_DEPTH:
        raise ProbeError(f"a message is nested more than {MAX_DEPTH} levels deep")
    return value


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number")


def _depth(value: Any, most: int) -> int:
    """Levels of lists and objects; counted as far as `most`."""
    if most == 0 or not isinstance(value, (list, dict)):
        return 0
    items = value.values() if isinstance(value, dict) else value
    return 1 + max((_depth(item, most - 1) for item in items), default=0)
