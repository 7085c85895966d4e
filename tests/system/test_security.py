"""Access to a real verifier: certificates and tokens."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from certificates import Authority
from system_support import make_prompts

from paceline.client import AuthError, Client, RetryOptions, TlsOptions, UnavailableError
from paceline.harness import ServiceProcess

TOKEN = "a-token-only-tests-know"


@pytest.fixture(scope="module")
def secured(
    models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, dict[str, TlsOptions]]]:
    """A verifier that asks for certificates and a token, and what callers of its have."""
    folder = tmp_path_factory.mktemp("certificates")
    authority, other = Authority(folder / "own"), Authority(folder / "other")
    (folder / "token").write_text(TOKEN)
    server, client = authority.sign("server"), authority.sign("client")
    expired, stranger = authority.sign("expired", expired=True), other.sign("stranger")
    arguments = ["--target", models["llama"], "--weights", "float32", "--tls-cert", server.cert]
    arguments += ["--tls-key", server.key, "--tls-client-ca", authority.cert]
    arguments += ["--token-file", folder / "token"]
    with ServiceProcess("verifier", list(map(str, arguments))) as verifier:
        yield (
            verifier.address,
            {
                "valid": TlsOptions(authority.cert, client.cert, client.key),
                "anonymous": TlsOptions(authority.cert),
                "stranger": TlsOptions(authority.cert, stranger.cert, stranger.key),
                "expired": TlsOptions(authority.cert, expired.cert, expired.key),
                "trusts another": TlsOptions(other.cert, client.cert, client.key),
            },
        )
        assert verifier.terminate() == 0


@pytest.mark.parametrize(
    ("who", "token", "error"),
    [
        ("valid", None, AuthError),
        ("valid", "wrong", AuthError),
        *((who, TOKEN, UnavailableError) for who in ("anonymous", "stranger", "expired")),
        ("trusts another", TOKEN, UnavailableError),
    ],
)
async def test_missing_credentials_are_refused(
    secured: tuple[str, dict[str, TlsOptions]], who: str, token: str, error: type[Exception]
) -> None:
    address, options = secured

    async def attempt(who: str, token: str) -> int:
        retry = RetryOptions(budget=0.5)
        async with Client(address, tls=options[who], token=token, retry=retry) as client:
            result = await client.generate(make_prompts(1)[0], max_new_tokens=4, deadline=120)
        return len(result.token_ids)

    with pytest.raises(error):
        await attempt(who, token)
    assert await attempt("valid", TOKEN) == 4
