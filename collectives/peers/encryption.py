"""Encrypt the connections of a job with TLS 1.3 (``TOPOPLAN_TLS=1`` on all ranks; the extra ``tls``).

Each process makes a certificate that it signs itself. Nobody vouches for it: its fingerprint goes into the handshake of
the job's key (`collectives.peers.connections`), so an end without the key, or one in between with another certificate,
is refused. Control messages are encrypted in the loop of connections. The bytes of a link go through a pair of local
sockets and a thread that encrypts (`Tunnel`), since compiled loops read and write sockets directly.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import ssl
import tempfile
import threading
import time
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from hashlib import sha256

from topoplan.errors import UsageError

TAIL_SECONDS = 5.0  # time to send what a link still has when its rank has closed it
PIECE = 1 << 18  # bytes that are encrypted at once


@lru_cache(maxsize=1)
def _contexts(process: int) -> tuple[ssl.SSLContext, ssl.SSLContext, bytes]:
    """Return the contexts of this process for accepted and dialled connections, and its certificate's fingerprint."""
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError as error:
        raise UsageError("TOPOPLAN_TLS=1 needs a package; pip install 'topoplan[tls]'") from error
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "topoplan")])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=365))
        .sign(key, hashes.SHA256())
    )
    accepts = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with tempfile.NamedTemporaryFile(mode="wb") as file:  # of mode 600, and gone at once
        private = serialization.PrivateFormat.PKCS8
        file.write(key.private_bytes(serialization.Encoding.PEM, private, serialization.NoEncryption()))
        file.write(made.public_bytes(serialization.Encoding.PEM))
        file.flush()
        accepts.load_cert_chain(file.name)
    dials = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    dials.check_hostname, dials.verify_mode = (
        False,
        ssl.CERT_NONE,
    )  # the handshake of the key checks the fingerprint
    for context in (accepts, dials):
        context.minimum_version = ssl.TLSVersion.TLSv1_3
    return accepts, dials, sha256(made.public_bytes(serialization.Encoding.DER)).digest()


class Encryption:
    """TLS between the bytes of a connection and those of its socket."""

    def __init__(self, *, dialled: bool) -> None:
        accepts, dials, self._own = _contexts(os.getpid())
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        context = dials if dialled else accepts
        self._ssl = context.wrap_bio(self._incoming, self._outgoing, server_side=not dialled)
        self._dialled = dialled
        self._shaken = False
        self._plain = bytearray()  # waits for the end of the handshake
        self._step()

    @property
    def fingerprint(self) -> bytes:
        """The fingerprint of the accepting end's certificate."""
        if not self._dialled:
            return self._own
        return sha256(self._ssl.getpeercert(True) or b"").digest()

    def feed(self, data: bytes) -> None:
        """Take bytes from the socket; ValueError for bytes that are not of TLS."""
        self._incoming.write(data)
        self._step()

    def read(self, nbytes: int) -> bytes:
        """Return at most so many decrypted bytes; empty if more must come first."""
        if not self._shaken:
            return b""
        try:
            return self._ssl.read(nbytes)
        except (ssl.SSLWantReadError, ssl.SSLZeroReturnError):
            return b""
        except ssl.SSLError as error:
            raise ValueError(f"the bytes are not of TLS: {error.reason}") from None

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Encrypt bytes."""
        self._plain += data
        self._step()

    def pending(self) -> bytes:
        """Return the bytes for the socket, and forget them."""
        return self._outgoing.read()

    def _step(self) -> None:
        try:
            if not self._shaken:
                self._ssl.do_handshake()
                self._shaken = True
            while self._plain:
                del self._plain[: self._ssl.write(self._plain)]
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError as error:
            raise ValueError(
                f"the other end does not speak TLS ({error.reason}); set TOPOPLAN_TLS on all ranks"
            ) from None


class Tunnel:
    """A thread that encrypts the bytes of a link; `end` is the local socket of the rank."""

    def __init__(self, made: socket.socket, encryption: Encryption) -> None:
        self.end, self._inside = socket.socketpair()
        self._outside, self._encryption = made, encryption
        for one in (self._inside, self._outside):
            one.setblocking(False)
        with contextlib.suppress(OSError):
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=self._work, name="topoplan tunnel").start()

    def _work(self) -> None:
        with contextlib.suppress(OSError, ValueError), self._inside, self._outside:
            self._pump()

    def _pump(self) -> None:
        """Move bytes both ways until both ends have closed, or one has broken."""
        out, back = bytearray(self._encryption.pending()), bytearray()  # for the network, and for the rank
        while plain := self._encryption.read(PIECE):  # came with the handshake
            back += plain
        until: float | None = None  # set once the rank has closed its end
        over = False  # whether the network has ended
        poll = select.poll()
        while not (over and not back) and (until is None or (out and time.monotonic() < until)):
            wants = {
                self._inside: (select.POLLIN if until is None and len(out) < PIECE else 0)
                | (select.POLLOUT if back else 0),
                self._outside: (select.POLLIN if not over and len(back) < PIECE else 0)
                | (select.POLLOUT if out else 0),
            }
            for one, events in wants.items():
                poll.register(one, events)
            ready = dict(poll.poll(100 if until else None))
            if ready.get(self._inside.fileno(), 0) & (select.POLLIN | select.POLLHUP) and until is None:
                data = self._inside.recv(PIECE)
                if data:
                    self._encryption.write(data)
                    out += self._encryption.pending()
                else:
                    until = time.monotonic() + TAIL_SECONDS
            if ready.get(self._outside.fileno(), 0) & (select.POLLIN | select.POLLHUP) and not over:
                data = self._outside.recv(PIECE)
                over = not data
                self._encryption.feed(data)
                while plain := self._encryption.read(PIECE):
                    back += plain
            for one, waiting in ((self._outside, out), (self._inside, back)):
                with contextlib.suppress(BlockingIOError):
                    while waiting:
                        del waiting[: one.send(waiting[:PIECE])]
