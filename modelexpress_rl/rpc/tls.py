"""TLS for clients and for the endpoint inside workers, from files that rotate; and its errors in words.

Each new connection uses the files as they are then; one that stands is not touched. A context is made
anew and never changed in place, so that a CA that was taken out of a file is no longer trusted.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass

from modelexpress_rl import envs
from modelexpress_rl.errors import UsageError
from modelexpress_rl.rpc.files import NamedFile, Rotating

CA_VARIABLE = "MX_TLS_CA"
CERT_VARIABLE = "MX_TLS_CERT"
KEY_VARIABLE = "MX_TLS_KEY"
NAME_VARIABLE = "MX_TLS_SERVER_NAME"
_ALPN = ["h2"]


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """One side's certificate chain and key, and the CAs that it trusts; PEM, each may be absent.

    A client without `ca` trusts the system's CAs. A server with `ca` demands a certificate of every
    client, and one without takes any.
    """

    cert: NamedFile | None = None
    key: NamedFile | None = None
    ca: NamedFile | None = None

    @property
    def present(self) -> tuple[NamedFile, ...]:
        """Those that are given."""
        return tuple(each for each in (self.cert, self.key, self.ca) if each is not None)


def client_files() -> TlsFiles:
    """The MX_TLS_* variables.

    Raises:
        UsageError: a certificate without a key, or the reverse.
    """
    return _paired(
        TlsFiles(
            NamedFile.of(CERT_VARIABLE, envs.tls_cert()),
            NamedFile.of(KEY_VARIABLE, envs.tls_key()),
            NamedFile.of(CA_VARIABLE, envs.tls_ca()),
        ),
        CERT_VARIABLE,
        KEY_VARIABLE,
    )


def require_none(address: str) -> None:
    """Nothing asks for TLS, so that an address without a scheme can't be meant for it.

    Raises:
        UsageError: a variable does.
    """
    asked = {
        CA_VARIABLE: envs.tls_ca(),
        CERT_VARIABLE: envs.tls_cert(),
        NAME_VARIABLE: envs.tls_server_name(),
    }
    for name, value in asked.items():
        if value is not None:
            raise UsageError(
                f"{name} is set, and the control plane's address {address} does not say https://; write "
                f"https://{address}, or http://{address} where it is to be dialled without TLS"
            )


def worker_files() -> TlsFiles | None:
    """The MX_WORKER_TLS_* variables; None where the endpoint of this worker is to speak without TLS.

    Raises:
        UsageError: a certificate without a key, or the reverse, or CAs without a certificate.
    """
    cert, key, ca = "MX_WORKER_TLS_CERT", "MX_WORKER_TLS_KEY", "MX_WORKER_TLS_CLIENT_CA"
    files = TlsFiles(
        NamedFile.of(cert, envs.worker_tls_cert()),
        NamedFile.of(key, envs.worker_tls_key()),
        NamedFile.of(ca, envs.worker_tls_client_ca()),
    )
    if not files.present:
        return None
    return server_files(files, cert, key)


def server_files(files: TlsFiles, cert: str, key: str) -> TlsFiles:
    """The same, where a server can work with them; `cert` and `key` name what may be missing.

    Raises:
        UsageError: the certificate or its key is not given.
    """
    _paired(files, cert, key)
    if files.cert is None:
        raise UsageError(f"{files.ca}: needs {cert} and {key}, which are not set")
    return files


def client_context(files: TlsFiles | None = None) -> ssl.SSLContext:
    """How a client dials; by default with the files of the MX_TLS_* variables.

    Raises:
        UsageError: a file can't be read, or does not hold what it should; the message names it.
    """
    files = client_files() if files is None else files

    def build() -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.SERVER_AUTH)
        if files.ca is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            _trust(context, files.ca)
        _load_chain(context, files)
        return _hardened(context)

    return _RotatingContext(Rotating(files.present, build), ssl.PROTOCOL_TLS_CLIENT)


def server_context(files: TlsFiles) -> ssl.SSLContext:
    """How a worker's endpoint answers; with `files.ca` only clients whose certificate it signed.

    Raises:
        UsageError: a file can't be read, or does not hold what it should; the message names it.
    """

    def build() -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        if files.ca is not None:
            _trust(context, files.ca)
            context.verify_mode = ssl.CERT_REQUIRED
        _load_chain(context, files)
        return _hardened(context)

    return _RotatingContext(Rotating(files.present, build), ssl.PROTOCOL_TLS_SERVER)


class _RotatingContext(ssl.SSLContext):
    """A context that hands each new connection to the one that the files make now."""

    _rotating: Rotating[ssl.SSLContext]

    def __new__(cls, rotating: Rotating[ssl.SSLContext], protocol: int) -> _RotatingContext:
        made = super().__new__(cls, protocol)
        made._rotating = rotating
        return made

    def wrap_bio(  # what asyncio calls for each connection
        self,
        incoming: ssl.MemoryBIO,
        outgoing: ssl.MemoryBIO,
        server_side: bool = False,
        server_hostname: str | bytes | None = None,
        session: ssl.SSLSession | None = None,
    ) -> ssl.SSLObject:
        current = self._rotating.current()
        return current.wrap_bio(incoming, outgoing, server_side, server_hostname, session)


def _paired(files: TlsFiles, cert: str, key: str) -> TlsFiles:
    if (files.cert is None) != (files.key is None):
        given, missing = (files.cert, key) if files.cert is not None else (files.key, cert)
        raise UsageError(f"{given}: needs {missing}, which is not set")
    return files


def _trust(context: ssl.SSLContext, ca: NamedFile) -> None:
    data = ca.read()
    try:
        context.load_verify_locations(cadata=data.decode("ascii"))
    except (ssl.SSLError, ValueError) as error:
        raise UsageError(f"{ca}: holds no CA certificates in PEM") from error


def _load_chain(context: ssl.SSLContext, files: TlsFiles) -> None:
    if files.cert is None or files.key is None:
        return
    files.cert.read(), files.key.read()  # so that an unreadable one is named
    try:
        # An encrypted key would ask on the terminal.
        context.load_cert_chain(files.cert.path, files.key.path, password=_no_password)
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or type(error).__name__
        raise UsageError(
            f"{files.cert} and {files.key}: no certificate in PEM with its unencrypted key ({reason})"
        ) from error


def _no_password() -> str:
    raise ValueError("the key is encrypted")


def _hardened(context: ssl.SSLContext) -> ssl.SSLContext:
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(_ALPN)
    return context


# What goes wrong, in words. OpenSSL's numbers: X509_V_ERR_*.

_NOT_YET, _EXPIRED, _WRONG_NAMES = 9, 10, (62, 64)
_NO_TLS = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "UNEXPECTED_MESSAGE", "RECORD_LAYER_FAILURE")
_WANTS_OURS = ("CERTIFICATE_REQUIRED", "HANDSHAKE_FAILURE")
_REFUSES_OURS = (
    "UNKNOWN_CA",
    "CERTIFICATE_EXPIRED",
    "BAD_CERTIFICATE",
    "CERTIFICATE_UNKNOWN",
    "DECRYPT_ERROR",
)


def explained(error: BaseException | None, expected_name: str) -> str | None:
    """What is wrong with the certificates of a connection and what to set; None where it is not that."""
    if isinstance(error, ssl.SSLCertVerificationError):
        if error.verify_code == _EXPIRED:
            return "TLS: its certificate has expired"
        if error.verify_code == _NOT_YET:
            return "TLS: its certificate is not valid yet (is this host's clock right?)"
        if error.verify_code in _WRONG_NAMES:
            return (
                f"TLS: its certificate is not for {expected_name!r}; dial a name that it holds, or set "
                "MX_TLS_SERVER_NAME (control plane) or MX_TLS_WORKER_NAME (workers) to one"
            )
        return (
            f"TLS: its certificate is not trusted ({error.verify_message}); "
            f"{CA_VARIABLE} names the file of the CAs to trust"
        )
    if not isinstance(error, ssl.SSLError) or error.reason is None:
        return None
    if any(word in error.reason for word in _NO_TLS):
        return "TLS: it does not speak TLS there"
    if any(word in error.reason for word in _WANTS_OURS):
        return f"TLS: it demands a client certificate: set {CERT_VARIABLE} and {KEY_VARIABLE}"
    if any(word in error.reason for word in _REFUSES_OURS):
        return f"TLS: it does not accept our certificate, {CERT_VARIABLE} ({error.reason})"
    return None
