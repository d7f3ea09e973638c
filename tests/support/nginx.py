"""A real nginx before a listener, as the operator of a tunnel has one: it ends TLS, passes WebSockets on, and cuts them.

Its certificate is vouched for by an authority made for the test; who has `SSL_CERT_FILE` set to `authority` trusts it.
"""

from __future__ import annotations

import datetime
import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from tests.support.links import own_port

CONFIG = """
daemon off;
{user}
worker_processes 1;
worker_shutdown_timeout 100ms;
pid {folder}/nginx.pid;
error_log {folder}/error.log;
events {{ worker_connections 256; }}
http {{
  log_format opened '$status $request_uri';
  access_log {folder}/access.log opened;
  client_body_temp_path {folder}/body;
  proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi;
  scgi_temp_path {folder}/scgi;
  server {{
    listen 127.0.0.1:{port} ssl;
    listen 127.0.0.1:{plain_port};
    ssl_certificate {folder}/server.pem;
    ssl_certificate_key {folder}/server.key;
    location / {{
      proxy_pass http://127.0.0.1:{upstream};
      proxy_http_version 1.1;
      proxy_set_header Upgrade $http_upgrade;
      proxy_set_header Connection "upgrade";
      proxy_read_timeout {idle_s}s;
      proxy_send_timeout {idle_s}s;
    }}
  }}
}}
"""


def why_not() -> str:
    """Why nginx cannot be run here, or ""."""
    return (
        "" if shutil.which("nginx") or Path("/usr/sbin/nginx").exists() else "nginx is not here (package nginx-light)"
    )


class Nginx:
    """nginx on two free ports of the loopback: `port` speaks TLS, `plain_port` does not.

    Args:
        upstream: port of the listener.
        idle_s: whole seconds after which it cuts a connection on which the listener says nothing.
    """

    def __init__(self, folder: Path, upstream: int, idle_s: int = 60) -> None:
        self.folder, self.upstream, self.idle_s = folder, upstream, idle_s
        folder.mkdir(parents=True, exist_ok=True)
        self.port, self.plain_port = own_port(), own_port()
        self.authority = folder / "authority.pem"
        certify(folder)
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Nginx:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def start(self) -> None:
        config = self.folder / "nginx.conf"
        user = "user root;" if os.geteuid() == 0 else ""
        config.write_text(CONFIG.format(user=user, **vars(self)))
        program = shutil.which("nginx") or "/usr/sbin/nginx"
        self._process = subprocess.Popen(
            [program, "-p", str(self.folder), "-e", str(self.folder / "error.log"), "-c", str(config)],
            stdin=subprocess.DEVNULL,
        )
        until = time.monotonic() + 20
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.plain_port), timeout=1).close()
                return
            except OSError:
                assert self._process.poll() is None, (self.folder / "error.log").read_text()
                assert time.monotonic() < until
                time.sleep(0.01)

    def reload(self) -> None:
        """Have new processes serve: the old one cuts what it still carries after 100 ms."""
        assert self._process is not None
        self._process.send_signal(signal.SIGHUP)

    def stop(self) -> None:
        """End it at once: all connections are cut, and new ones refused."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait(20)
            self._process = None

    def opened(self) -> list[str]:
        """Status and path of each request that is over."""
        log = self.folder / "access.log"
        return log.read_text().splitlines() if log.exists() else []


def certify(folder: Path) -> None:
    """Write authority.pem, server.pem and server.key for localhost."""
    root_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    root_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "guava test authority")])
    root = _sign(root_name, root_name, root_key, root_key, None)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    server = _sign(name, root_name, key, root_key, "localhost")
    pem = serialization.Encoding.PEM
    (folder / "authority.pem").write_bytes(root.public_bytes(pem))
    (folder / "server.pem").write_bytes(server.public_bytes(pem))
    form, bare = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    (folder / "server.key").write_bytes(key.private_bytes(pem, form, bare))


def _sign(
    name: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    issuer_key: ec.EllipticCurvePrivateKey,
    host: str | None,
) -> x509.Certificate:
    now = datetime.datetime.now(datetime.timezone.utc)
    signs = host is None
    usage = x509.KeyUsage(not signs, False, False, False, False, signs, signs, False, False)
    issued_by = x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key())
    made = (
        x509.CertificateBuilder().subject_name(name).issuer_name(issuer).public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1)).not_valid_after(now + datetime.timedelta(days=30))
        .add_extension(x509.BasicConstraints(ca=signs, path_length=None), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(issued_by, critical=False)
    )  # fmt: skip
    if host is not None:
        made = made.add_extension(x509.SubjectAlternativeName([x509.DNSName(host)]), critical=False)
    return made.sign(issuer_key, hashes.SHA256())
