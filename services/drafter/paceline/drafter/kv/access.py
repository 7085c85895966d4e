"""A drafter's credentials for verifiers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import grpc

from paceline.service.credentials import check_authorities


@dataclass(frozen=True)
class VerifierAccess:
    """Token and TLS for calls to verifiers, and the verifiers that may be called.

    Clients name the verifier: without a list, a client could have the token sent to any address.
    """

    remote: tuple[str, ...] = ()
    """Addresses of verifiers on other machines that may be called, as clients name them."""

    beside: str | None = None
    """Address of the one verifier to read KV from, whatever clients name: for a drafter in the
    verifier's pod, whose clients use a load balancer or a published port."""

    token: str | None = None
    """Bearer token, that of the deployment."""

    tls_ca: Path | None = None
    """PEM authorities of the verifiers' TLS; None: no TLS."""

    tls_cert: Path | None = None
    """PEM client certificate, for verifiers that require one."""

    tls_key: Path | None = None
    """PEM key of the certificate."""

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Returns the metadata of every call."""
        return (("authorization", f"Bearer {self.token}"),) if self.token else ()

    def credentials(self) -> grpc.ChannelCredentials | None:
        """Returns TLS credentials, or None for plain connections.

        Raises:
            OptionsError: ``tls_ca`` cannot be read, or holds no certificate.
            OSError: Another file cannot be read.
        """
        if self.tls_ca is None:
            return None
        check_authorities(self.tls_ca)
        return grpc.ssl_channel_credentials(
            root_certificates=self.tls_ca.read_bytes(),
            private_key=self.tls_key.read_bytes() if self.tls_key else None,
            certificate_chain=self.tls_cert.read_bytes() if self.tls_cert else None,
        )
