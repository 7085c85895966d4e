"""Access to a real verifier: certificates and tokens."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from certificates import Authority, Pair
from system_support import make_prompts

from paceline.client import (
    AuthError,
    Client,
    PacelineError,
    RetryOptions,
    TlsOptions,
    UnavailableError,
)
from paceline.harness import ServiceProcess

TOKEN = "a-token-only-tests-know"
IMPATIENT = RetryOptions(budget=0.5)


@dataclass
class Secured:
    """A verifier that asks for certificates and a token, and those who have some."""

    authority: Authority
    client: Pair
    expired: Pair
    stranger: Pair
    address: str
    late: str  # address of a verifier whose own certificate has expired

    def tls(self, who: Pair | None, authority: Authority | None = None) -> TlsOptions:
        return TlsOptions(
            ca=(authority or self.authority).cert, cert=who and who.cert, key=who and who.key
        )


@pytest.fixture(scope="module")
def secured(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    folder = tmp_path_factory.mktemp("certificates")
    authority, other = Authority(folder / "own"), Authority(folder / "other")
    (folder / "token").write_text(TOKEN)

    def verifier(pair: Pair) -> ServiceProcess:
        security = ["--tls-cert", pair.cert, "--tls-key", pair.key]
        security += ["--tls-client-ca", authority.cert, "--token-file", folder / "token"]
        arguments = ["--target", models["llama"], "--weights", "float32", *security]
        return ServiceProcess("verifier", list(map(str, arguments)))

    served, late = (
        verifier(authority.sign("server")),
        verifier(authority.sign("late", expired=True)),
    )
    with served, late:
        yield Secured(
            authority, authority.sign("client"), authority.sign("expired", expired=True),
            other.sign("stranger"), served.address, late.address,
        )  # fmt: skip
        assert served.terminate() == 0


async def attempt(address: str, tls: TlsOptions, token: str | None) -> list[int]:
    prompt = make_prompts(1)[0]
    async with Client(address, tls=tls, token=token, retry=IMPATIENT) as client:
        return (await client.generate(prompt, max_new_tokens=4, deadline=120)).token_ids


async def test_valid_credentials_are_accepted(secured: Secured) -> None:
    assert len(await attempt(secured.address, secured.tls(secured.client), TOKEN)) == 4


@pytest.mark.parametrize(
    ("who", "token", "expected"),
    [
        (lambda s: s.tls(s.client), None, AuthError),
        (lambda s: s.tls(s.client), "wrong", AuthError),
        (lambda s: s.tls(None), TOKEN, UnavailableError),
        (lambda s: s.tls(s.stranger), TOKEN, UnavailableError),
        (lambda s: s.tls(s.expired), TOKEN, UnavailableError),
    ],
    ids=["no token", "wrong token", "no certificate", "other authority", "expired"],
)
async def test_missing_credentials_are_refused(
    secured: Secured,
    who: Callable[[Secured], TlsOptions],
    token: str | None,
    expected: type[PacelineError],
) -> None:
    with pytest.raises(expected):
        await attempt(secured.address, who(secured), token)
    assert len(await attempt(secured.address, secured.tls(secured.client), TOKEN)) == 4


async def test_a_client_trusts_no_other_authority_and_no_expired_server(
    secured: Secured, tmp_path: Path
) -> None:
    foreign = secured.tls(secured.client, Authority(tmp_path / "foreign"))
    for address, tls in ((secured.address, foreign), (secured.late, secured.tls(secured.client))):
        with pytest.raises(UnavailableError):
            await attempt(address, tls, TOKEN)
