"""Certificate authorities for tests, made with openssl."""

import subprocess
from dataclasses import dataclass
from pathlib import Path

_CA_CONFIG = """
[ca]
default_ca = own
[own]
database = index.txt
new_certs_dir = .
serial = serial
default_md = sha256
policy = any
copy_extensions = copy
[any]
commonName = supplied
"""
_CURVE = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
_LONG_AGO = ("-startdate", "20200101000000Z", "-enddate", "20200102000000Z")


@dataclass(frozen=True)
class Pair:
    """A certificate and its key."""

    cert: Path
    key: Path


class Authority:
    """Signs certificates; all files are in one folder."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        (folder / "ca.cnf").write_text(_CA_CONFIG)
        (folder / "index.txt").touch()
        (folder / "serial").write_text("01\n")
        self.openssl("req", "-x509", *_CURVE, "-days", "2", "-subj", "/CN=authority",
                      "-keyout", "authority.key", "-out", "authority.pem")  # fmt: skip
        self.cert = folder / "authority.pem"

    def sign(self, name: str, host: str = "IP:127.0.0.1", *, expired: bool = False) -> Pair:
        """A certificate for a name and a host."""
        self.openssl("req", *_CURVE, "-subj", f"/CN={name}",
                      "-addext", f"subjectAltName={host}",
                      "-keyout", f"{name}.key", "-out", f"{name}.csr")  # fmt: skip
        dates = _LONG_AGO if expired else ("-days", "2")
        self.openssl("ca", "-batch", "-notext", "-config", "ca.cnf", "-cert", "authority.pem",
                      "-keyfile", "authority.key", *dates,
                      "-in", f"{name}.csr", "-out", f"{name}.pem")  # fmt: skip
        return Pair(self.folder / f"{name}.pem", self.folder / f"{name}.key")

    def openssl(self, *words: str) -> None:
        subprocess.run(["openssl", *words], cwd=self.folder, check=True, capture_output=True)
