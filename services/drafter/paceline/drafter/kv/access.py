"""How a drafter shows itself to verifiers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import grpc

from paceline.service.credentials import check_authorities


@dataclass(frozen=True)
class VerifierAccess:
    """Token and TLS for calls to verifiers, and which of them may be called.

    Clients name the verifier; without a list any client could have the token sent anywhere.
    """

    remote: tuple[str, ...] = ()
    """Addresses of verifiers on other machines, as clients name them, that may be called too."""

    beside: str | None = None
    """Address of the one verifier to read KV from, whatever clients call it: of a drafter in the
    verifier's pod, whose clients come through a balancer or a published port."""

    token: str | None = None
    """Bearer token; the deployment's own, which clients know too."""

    tls_ca: Path | None = None
    """PEM authorities of verifiers that serve TLS; None: they serve none."""

    tls_cert: Path | None = None
    """PEM certificate to show to verifiers that ask for one."""

    tls_key: Path | None = None
    """PEM key of it."""

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What every call carries."""
        return (("authorization", f"Bearer {self.token}"),) if self.token else ()

    def credentials(self) -> grpc.ChannelCredentials | None:
        """TLS credentials, or None for plain connections.

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
