"""The token endpoints as clients of OAuth 2.0 use them: authlib and requests-oauthlib against a running server."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import requests
from authlib.integrations.base_client.errors import OAuthError
from authlib.integrations.requests_client import OAuth2Session as AuthlibSession
from authlib.oauth2.rfc8414 import AuthorizationServerMetadata
from oauthlib.oauth2 import BackendApplicationClient
from oauthlib.oauth2.rfc6749.errors import InvalidClientError, InvalidGrantError
from price_keeper.auth.throttles import FAILURE_BURST
from price_keeper.control.oauth import build_metadata
from requests.auth import HTTPBasicAuth
from requests_oauthlib import OAuth2Session

from tests.support.control_harness import ORG
from tests.support.control_thread import ControlThread, control_in_thread

SHOP = f"/api/v1/orgs/{ORG}/apps/shop"
SECONDS = 30
GRANT = {"grant_type": "client_credentials"}


class Stage:
    """A control port with two clients, `shop` and `other`."""

    def __init__(self, running: ControlThread) -> None:
        self.running = running
        self.url = running.harness.url
        running.do(running.harness.put_org())
        self.shop, self.other = self._register("shop"), self._register("other")

    def _register(self, app: str) -> tuple[str, str]:
        harness, path = self.running.harness, f"/api/v1/orgs/{ORG}/apps/{app}"
        issued = self.running.do(harness.ask("PUT", path, {"app_name": app})).body
        token = {"X-Retrieval-Token": issued["secret_retrieval_token"]}
        pair = self.running.do(harness.ask("GET", f"{path}/credentials/secret", who=None, headers=token)).body
        return pair["client_id"], pair["client_secret"]

    def post(self, path: str, **arguments: Any) -> requests.Response:
        return requests.post(self.url + path, timeout=SECONDS, **arguments)

    def log_in(self, pair: tuple[str, str] | None = None) -> dict[str, Any]:
        answer = self.post("/auth/token", data=GRANT, auth=pair or self.shop)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def opens(self, token: str) -> int:
        headers = {"Authorization": f"Bearer {token}"}
        return requests.get(self.url + SHOP, headers=headers, timeout=SECONDS).status_code


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    for name in ("AUTHLIB_INSECURE_TRANSPORT", "OAUTHLIB_INSECURE_TRANSPORT"):
        monkeypatch.setenv(name, "1")
    with control_in_thread(tmp_path) as running:
        yield Stage(running)


@pytest.mark.parametrize("method", ["client_secret_basic", "client_secret_post"])
def test_authlib_logs_in_refreshes_and_revokes(stage: Stage, method: str) -> None:
    session = AuthlibSession(*stage.shop, token_endpoint_auth_method=method, revocation_endpoint_auth_method=method)
    first = session.fetch_token(f"{stage.url}/auth/token", grant_type="client_credentials")
    assert (first["token_type"], stage.opens(first["access_token"])) == ("Bearer", 200)
    second = session.refresh_token(f"{stage.url}/auth/token", refresh_token=first["refresh_token"])
    assert second["refresh_token"] != first["refresh_token"]
    assert session.get(stage.url + SHOP, timeout=SECONDS).status_code == 200
    answer = session.revoke_token(
        f"{stage.url}/auth/revoke", token=second["refresh_token"], token_type_hint="refresh_token"
    )
    assert answer.status_code == 200
    assert stage.opens(second["access_token"]) == 401
    with pytest.raises(OAuthError) as refused:
        session.refresh_token(f"{stage.url}/auth/token", refresh_token=second["refresh_token"])
    assert refused.value.error == "invalid_grant"


def test_authlib_with_wrong_secret_reports_invalid_client(stage: Stage) -> None:
    session = AuthlibSession(stage.shop[0], stage.other[1])
    with pytest.raises(OAuthError) as refused:
        session.fetch_token(f"{stage.url}/auth/token", grant_type="client_credentials")
    assert refused.value.error == "invalid_client"


def test_authlib_accepts_the_metadata_and_finds_the_endpoints_by_it(stage: Stage) -> None:
    answer = requests.get(f"{stage.url}/.well-known/oauth-authorization-server", timeout=SECONDS)
    assert answer.headers["Content-Type"] == "application/json"
    metadata = AuthorizationServerMetadata(answer.json())
    for name in ("token_endpoint", "grant_types_supported", "token_endpoint_auth_methods_supported", "jwks_uri"):
        assert metadata[name]
    for claim in ("response_types_supported", "grant_types_supported", "revocation_endpoint_auth_methods_supported"):
        getattr(metadata, f"validate_{claim}")()
    assert metadata["issuer"] == stage.url
    session = AuthlibSession(*stage.shop)
    token = session.fetch_token(metadata["token_endpoint"], grant_type="client_credentials")
    assert session.revoke_token(metadata["revocation_endpoint"], token=token["access_token"]).status_code == 200
    assert stage.opens(token["access_token"]) == 401
    assert requests.get(metadata["jwks_uri"], timeout=SECONDS).status_code == 200


@pytest.mark.parametrize("include_client_id", [None, True], ids=["basic", "body"])
def test_requests_oauthlib_logs_in_and_refreshes(stage: Stage, include_client_id: bool | None) -> None:
    client_id, secret = stage.shop
    session = OAuth2Session(client=BackendApplicationClient(client_id))
    more: dict[str, Any] = (
        {"client_secret": secret} if include_client_id else {"auth": HTTPBasicAuth(client_id, secret)}
    )
    first = session.fetch_token(f"{stage.url}/auth/token", include_client_id=include_client_id, **more)
    assert session.get(stage.url + SHOP, timeout=SECONDS).status_code == 200
    second = session.refresh_token(f"{stage.url}/auth/token", auth=HTTPBasicAuth(client_id, secret))
    assert second["access_token"] != first["access_token"]
    with pytest.raises(InvalidGrantError):
        session.refresh_token(
            f"{stage.url}/auth/token", refresh_token=first["refresh_token"], auth=HTTPBasicAuth(client_id, secret)
        )


def test_requests_oauthlib_with_wrong_secret_reports_invalid_client(stage: Stage) -> None:
    session = OAuth2Session(client=BackendApplicationClient(stage.shop[0]))
    with pytest.raises(InvalidClientError):
        session.fetch_token(f"{stage.url}/auth/token", auth=HTTPBasicAuth(stage.shop[0], stage.other[1]))


# What the standards say, request by request.


def test_token_answer_may_not_be_kept(stage: Stage) -> None:
    answer = stage.post("/auth/token", data=GRANT, auth=stage.shop)
    assert (answer.headers["Cache-Control"], answer.headers["Pragma"]) == ("no-store", "no-cache")
    assert {"access_token", "token_type", "expires_in"} <= answer.json().keys()


def test_basic_credentials_may_be_encoded_as_the_standard_says_or_not(stage: Stage) -> None:
    client_id, secret = stage.shop
    for pair in ((client_id, secret), (quote(client_id, safe=""), quote(secret, safe=""))):
        assert stage.post("/auth/token", data=GRANT, auth=pair).status_code == 200


def test_json_with_basic_credentials_and_unknown_parameters_are_accepted(stage: Stage) -> None:
    assert stage.post("/auth/token", json=GRANT, auth=stage.shop).status_code == 200
    more = {"scope": "anything", "audience": "x", "empty": ""}
    assert stage.post("/auth/token", data=GRANT | more, auth=stage.shop).status_code == 200


def test_old_json_with_a_refresh_token_as_grant_is_accepted_with_the_clients_secret(stage: Stage) -> None:
    client_id, secret = stage.shop
    body = {"grant_type": "refresh_token", "refresh_token": stage.log_in()["refresh_token"]}
    assert stage.post("/auth/token", json=body).status_code == 400
    whole = {**body, "client_id": client_id, "client_secret": secret}
    assert stage.post("/auth/token", json=whole).status_code == 200
    for path_body in (body, {"refresh_token": body["refresh_token"]}):
        assert stage.post("/auth/refresh", json=path_body).status_code == 401  # used


def test_refresh_takes_a_grant_type_as_json_and_as_a_form(stage: Stage) -> None:
    grant = {"grant_type": "refresh_token"}
    token = stage.log_in()["refresh_token"]
    token = stage.post("/auth/refresh", json={**grant, "refresh_token": token}).json()["refresh_token"]
    token = stage.post("/auth/refresh", data={**grant, "refresh_token": token}).json()["refresh_token"]
    token = stage.post("/auth/refresh", data={"refresh_token": token}, auth=stage.shop).json()["refresh_token"]
    wrong = stage.post("/auth/refresh", data={"refresh_token": token}, auth=stage.other)
    assert (wrong.status_code, wrong.json()["error"]) == (400, "invalid_grant")
    other = stage.post("/auth/refresh", data={"grant_type": "password", "refresh_token": token})
    assert (other.status_code, other.json()["error"]) == (400, "unsupported_grant_type")
    assert stage.post("/auth/refresh", data={"refresh_token": token}).status_code == 200


REFUSED: list[tuple[dict[str, Any], str, int, str]] = [
    ({"data": {}}, "shop", 400, "invalid_request"),
    ({"data": {"grant_type": ""}}, "shop", 400, "invalid_request"),
    ({"data": {"grant_type": "password"}}, "shop", 400, "unsupported_grant_type"),
    ({"data": {"grant_type": "refresh_token"}}, "shop", 400, "invalid_request"),
    ({"data": {"grant_type": "refresh_token", "refresh_token": "a.b.c"}}, "shop", 400, "invalid_grant"),
    ({"data": GRANT}, "", 401, "invalid_client"),
    ({"data": GRANT | {"client_id": "org-x"}}, "", 401, "invalid_client"),
    ({"data": GRANT | {"client_secret": "x"}}, "shop", 400, "invalid_request"),
    ({"data": GRANT | {"client_id": "org-x"}}, "shop", 400, "invalid_request"),
    ({"data": GRANT, "headers": {"Authorization": "Basic ###"}}, "", 401, "invalid_client"),
    ({"data": GRANT, "headers": {"Authorization": b"Basic \xe9\xc3\xa9"}}, "", 401, "invalid_client"),
    ({"data": GRANT, "headers": {"Authorization": b"Basic /w=="}}, "", 401, "invalid_client"),
    ({"data": "grant_type=client_credentials&grant_type=client_credentials"}, "shop", 400, "invalid_request"),
    ({"data": b"grant_type=\xff"}, "shop", 400, "invalid_request"),
    ({"data": "&".join(f"a{number}=1" for number in range(100))}, "shop", 400, "invalid_request"),
]


@pytest.mark.parametrize(("arguments", "who", "status", "code"), REFUSED)
def test_refused_token_request_has_the_code_of_the_standard(
    stage: Stage, arguments: dict[str, Any], who: str, status: int, code: str
) -> None:
    headers = {"Content-Type": "application/x-www-form-urlencoded", **arguments.pop("headers", {})}
    answer = stage.post("/auth/token", headers=headers, auth=stage.shop if who else None, **arguments)
    assert (answer.status_code, answer.json()["error"]) == (status, code)
    assert answer.headers["Cache-Control"] == "no-store"
    if status == 401:
        assert answer.headers["WWW-Authenticate"].startswith("Basic ")
        assert answer.json()["error_description"] == answer.json()["message"]


def test_refresh_token_of_another_client_is_no_grant_and_stays_good(stage: Stage) -> None:
    token = stage.log_in()["refresh_token"]
    body = {"grant_type": "refresh_token", "refresh_token": token}
    refused = stage.post("/auth/token", data=body, auth=stage.other)
    assert (refused.status_code, refused.json()["error"]) == (400, "invalid_grant")
    assert stage.post("/auth/token", data=body, auth=stage.shop).status_code == 200


def test_revocation_needs_the_client_whose_token_it_is(stage: Stage) -> None:
    token = stage.log_in()["access_token"]
    anonymous = stage.post("/auth/revoke", data={"token": token})
    assert (anonymous.status_code, anonymous.json()["error"]) == (401, "invalid_client")
    other = stage.post("/auth/revoke", data={"token": token}, auth=stage.other)
    assert (other.status_code, other.json()["error"]) == (400, "invalid_grant")
    assert stage.opens(token) == 200
    assert stage.post("/auth/revoke", data={"token": token, "token_type_hint": "nonsense"}, auth=stage.shop).ok
    assert stage.opens(token) == 401


def test_revocation_of_a_token_that_is_none_succeeds_by_the_standard_alone(stage: Stage) -> None:
    token = stage.log_in()["refresh_token"]
    for given in ("a.b.c", token, token):
        assert stage.post("/auth/revoke", data={"token": given}, auth=stage.shop).status_code == 200
    assert stage.post("/auth/revoke", json={"token": "a.b.c"}).status_code == 401  # as ever


def test_old_json_has_the_errors_it_had(stage: Stage) -> None:
    client_id, secret = stage.shop
    pair = {"client_id": client_id, "client_secret": secret}
    for body in (pair, pair | {"grant_type": "client_credentials"}):
        assert stage.post("/auth/token", json=body).status_code == 200
    wrong = stage.post("/auth/token", json=pair | {"client_secret": stage.other[1]})
    assert (wrong.status_code, wrong.json()["error"]) == (401, "unauthorized")
    assert wrong.headers["WWW-Authenticate"] == 'Bearer realm="price-keeper"'
    unsupported = stage.post("/auth/token", json=pair | {"grant_type": "password"})
    assert (unsupported.status_code, unsupported.json()["details"][0]["path"]) == (400, "grant_type")
    assert "error_description" not in wrong.json()


def test_form_is_refused_on_routes_without_one(stage: Stage) -> None:
    headers = {"X-API-Key": "the admin key of these tests, long enough"}
    answer = requests.put(stage.url + SHOP, data={"app_name": "x"}, headers=headers, timeout=SECONDS)
    assert answer.status_code == 415


def test_flood_of_wrong_secrets_by_form_is_slowed_down_and_the_right_one_always_served(stage: Stage) -> None:
    wrong = (stage.shop[0], stage.other[1])
    statuses = [stage.post("/auth/token", data=GRANT, auth=wrong).status_code for _ in range(FAILURE_BURST + 3)]
    assert statuses[:FAILURE_BURST] == [401] * FAILURE_BURST
    assert 429 in statuses[FAILURE_BURST:]
    assert stage.post("/auth/token", data=GRANT, auth=stage.shop).status_code == 200


def test_used_refresh_tokens_by_form_do_not_count_as_guesses(stage: Stage) -> None:
    token = stage.log_in()["refresh_token"]
    body = {"grant_type": "refresh_token", "refresh_token": token}
    assert stage.post("/auth/token", data=body, auth=stage.shop).status_code == 200
    answers = [stage.post("/auth/token", data=body, auth=stage.shop) for _ in range(FAILURE_BURST + 5)]
    assert {(each.status_code, each.json()["error"]) for each in answers} == {(400, "invalid_grant")}


def test_metadata_beyond_loopback_names_https() -> None:
    metadata = build_metadata("control.example.com")
    assert metadata["token_endpoint"] == "https://control.example.com/auth/token"
    AuthorizationServerMetadata(metadata).validate()
    for host in ("localhost:8081", "127.0.0.1:8081", "[::1]:8081"):
        assert build_metadata(host)["issuer"] == f"http://{host}"


def test_secret_in_a_form_is_in_no_answer(stage: Stage) -> None:
    client_id, secret = stage.shop
    encoded = base64.b64encode(f"{client_id}:{secret}x".encode()).decode()
    for arguments in (
        {"data": GRANT, "headers": {"Authorization": f"Basic {encoded}"}},
        {"data": GRANT | {"client_id": client_id, "client_secret": f"{secret}x"}},
        {"data": {"grant_type": secret}, "auth": stage.shop},
        {"data": {"grant_type": "refresh_token", "refresh_token": secret}, "auth": stage.shop},
    ):
        assert secret not in stage.post("/auth/token", **arguments).text
