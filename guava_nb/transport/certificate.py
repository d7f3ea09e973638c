"""The listener's own certificate: made at start, kept in memory, pinned by its fingerprint.

No authority vouches for it and none is needed: the join code carries the fingerprint, so that the dialler knows the one
certificate it may meet. `cryptography` is imported when a certificate is made; a dialler never needs it.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import os
import ssl
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from guava_nb.errors import ConfigError

__all__ = ["FINGERPRINT_BYTES", "Certificate", "fingerprint_of", "self_signed_certificate"]

FINGERPRINT_BYTES = 16
_VALID_DAYS = 3650  # the fingerprint is what counts, and clocks of rented machines are wrong by years


@dataclass(frozen=True)
class Certificate:
    """A certificate with its private key.

    Attributes:
        pem: the certificate, PEM.
        key: the private key, PEM; hidden in repr.
        fingerprint16: first half of the SHA-256 of the DER form.
    """

    pem: bytes
    key: bytes = field(repr=False)
    fingerprint16: bytes

    @classmethod
    def from_pem(cls, pem: bytes, key: bytes) -> Certificate:
        """Return a certificate that was made earlier.

        Raises:
            ValueError: `pem` is none.
        """
        return cls(pem, key, fingerprint_of(ssl.PEM_cert_to_DER_cert(pem.decode("ascii"))))

    def server_context(self) -> ssl.SSLContext:
        """Build the listener's TLS context. `ssl` reads keys from files only: one in memory, else a private one, gone at once."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.num_tickets = 0  # sessions are resumed by our own records
        if self._load_from_memory(context):
            return context
        try:
            handle, path = tempfile.mkstemp(prefix="guava-", suffix=".pem")  # readable by this user only
        except OSError as problem:
            raise ConfigError(
                f"no file can be made in {tempfile.gettempdir()} ({problem.strerror or problem}), and TLS needs one for a "
                "moment: make room there, or set TMPDIR to a folder of yours"
            ) from problem
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(self.key + self.pem)
            context.load_cert_chain(path)
        finally:
            with contextlib.suppress(FileNotFoundError):
                Path(path).unlink()
        return context

    def _load_from_memory(self, context: ssl.SSLContext) -> bool:
        """Whether the system has files without a name on any disk (Linux with /proc), so that the key was loaded from one."""
        try:
            handle = os.memfd_create("guava")
        except (AttributeError, OSError):
            return False
        with os.fdopen(handle, "wb") as file:
            path = f"/proc/self/fd/{handle}"
            if not os.access(path, os.R_OK):
                return False
            file.write(self.key + self.pem)
            file.flush()
            context.load_cert_chain(path)
        return True


def fingerprint_of(der: bytes) -> bytes:
    """Give the first half of the SHA-256 of a certificate in DER form."""
    return hashlib.sha256(der).digest()[:FINGERPRINT_BYTES]


def self_signed_certificate() -> Certificate:
    """Make a new key (EC P-256) and a certificate for it."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "guava_nb session")])
    now = datetime.datetime.now(datetime.timezone.utc)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=_VALID_DAYS))
        .not_valid_after(now + datetime.timedelta(days=_VALID_DAYS))
        .sign(key, hashes.SHA256())
    )
    encoded_key = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    der = certificate.public_bytes(serialization.Encoding.DER)
    return Certificate(certificate.public_bytes(serialization.Encoding.PEM), encoded_key, fingerprint_of(der))
