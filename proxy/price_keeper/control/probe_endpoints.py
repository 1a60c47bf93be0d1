"""Public endpoints: `/health`, `/ready`, `/metrics` and the front page at `/`.

They need no services, so they respond during the startup and the drain of the process too. The front page shows what
`/ready` reports, and nothing of orgs, apps or the configuration.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping
from hashlib import sha256
from html import escape
from typing import Any

from price_keeper.control.api_types import HTML, JSON, AccessLevel, ApiHandler, ApiRequest, ApiResponse, ApiRoute
from price_keeper.control.readiness_checks import Readiness
from price_keeper.telemetry.build_info import get_version
from price_keeper.telemetry.metrics import CONTENT_TYPE, MetricsRegistry


def build_probe_routes(readiness: Readiness, telemetry: MetricsRegistry) -> tuple[ApiRoute, ...]:
    """The routes of `/health`, `/ready` and `/metrics`."""

    async def get_health(_: object, __: ApiRequest) -> ApiResponse:
        return ApiResponse({"status": "ok"})

    async def get_readiness(_: object, __: ApiRequest) -> ApiResponse:
        report = await readiness.report()
        return ApiResponse(report, 200 if report["status"] == "ready" else 503)

    async def get_metrics(_: object, __: ApiRequest) -> ApiResponse:
        return ApiResponse((await telemetry.scrape()).encode(), content_type=CONTENT_TYPE)

    return (
        _build_probe_route("/health", "health", "Whether the process lives", get_health, {200: "Health"}),
        _build_probe_route(
            "/ready", "ready", "Whether it can do its work", get_readiness, {200: "Ready", 503: "Ready"}
        ),
        _build_probe_route("/metrics", "metrics", "What it has counted, for Prometheus", get_metrics, {200: ""}),
    )


def _build_probe_route(
    path: str, operation_id: str, summary: str, handler: ApiHandler, responses: dict[int, str]
) -> ApiRoute:
    return ApiRoute("GET", path, AccessLevel.PUBLIC, operation_id, summary, handler, responses, group="probes")


PRODUCT = "Bedrock Price Keeper"
_ROLES: Mapping[str, str] = {
    "both": "serves calls, and the control API",
    "sidecar": "serves calls; the control API is elsewhere",
    "control": "serves the control API; calls go to sidecars",
}
_PROBE_LINKS: Mapping[str, str] = {
    "/health": "whether the process lives",
    "/ready": "whether it can do its work",
    "/metrics": "what it has counted, for Prometheus",
}
_API_LINKS: Mapping[str, str] = {
    "/status": "the status page: what is spent, which label serves, when a quota will be reached",
    "/openapi.json": "the documentation of the control API, as OpenAPI 3.1",
    "/.well-known/jwks.json": "the public halves of the keys that sign tokens",
}

_FRONT_PAGE_STYLE = """
:root { color-scheme: light dark; --ink: #1c1e21; --paper: #fff; --dim: #5b6067; --line: #d8dbdf; --link: #0b57d0;
  --good: #17693a; --bad: #b3261e }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e7e9; --paper: #17191c; --dim: #a2a8af; --line: #3a3f45; --link: #8ab4f8;
    --good: #7fd39b; --bad: #ff9a92 }
}
body { margin: 3rem auto; max-width: 40rem; padding: 0 1rem; color: var(--ink); background: var(--paper);
  font: 1rem/1.5 system-ui, sans-serif }
h1 { font-size: 1.5rem; margin: 0 }
h2 { font-size: 1rem; margin: 2rem 0 .5rem }
p { margin: .25rem 0; color: var(--dim) }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .4rem 1.5rem; margin: 0;
  border-top: 1px solid var(--line); padding-top: .6rem }
dd { margin: 0; overflow-wrap: anywhere }
a { color: var(--link) }
.good { color: var(--good) }
.bad { color: var(--bad) }
"""
# No scripts, nothing from other origins, and no style but the one above, in case the text of a check contains markup.
FRONT_PAGE_CSP = (
    "default-src 'none'; style-src 'sha256-" + b64encode(sha256(_FRONT_PAGE_STYLE.encode()).digest()).decode() + "'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_FRONT_PAGE_HEADERS = {"Content-Security-Policy": FRONT_PAGE_CSP, "Referrer-Policy": "no-referrer", "Vary": "Accept"}


def build_front_route(readiness: Readiness, role: str) -> ApiRoute:
    links = _PROBE_LINKS if role == "sidecar" else {**_PROBE_LINKS, **_API_LINKS}

    async def handle(_: object, request: ApiRequest) -> ApiResponse:
        report = {
            "product": PRODUCT,
            "version": get_version(),
            "role": role,
            **await readiness.report(),
            "links": dict(links),
        }
        if prefers_json(request.headers.get("Accept", "")):
            return ApiResponse(report, headers={"Vary": "Accept"})
        return ApiResponse(render_front_page(report).encode(), content_type=HTML, headers=_FRONT_PAGE_HEADERS)

    summary = "What this is and how it does, as a page or as JSON"
    return ApiRoute(
        "GET", "/", AccessLevel.PUBLIC, "front", summary, handle, {200: "Front"}, group="probes", has_html_variant=True
    )


def prefers_json(accept: str) -> bool:
    """Whether the Accept header ranks JSON above HTML."""
    weights: dict[str, float] = {}
    for part in accept.split(","):
        media_type, _, parameters = part.partition(";")
        weights[media_type.strip().lower()] = _parse_quality(parameters)
    return weights.get(JSON, 0.0) > weights.get("text/html", 0.0)


def _parse_quality(parameters: str) -> float:
    for parameter in parameters.split(";"):
        name, _, value = parameter.partition("=")
        if name.strip().lower() == "q":
            try:
                return float(value)
            except ValueError:
                return 0.0
    return 1.0


def render_front_page(report: Mapping[str, Any]) -> str:
    kind = "good" if report["status"] == "ready" else "bad"
    rows = [_render_row(escape(name), escape(text)) for name, text in report["checks"].items()]
    links = [
        _render_row(f'<a href="{escape(path)}">{escape(path)}</a>', escape(text))
        for path, text in report["links"].items()
    ]
    return "".join(
        (
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{PRODUCT}: {escape(report['status'])}</title><style>{_FRONT_PAGE_STYLE}</style></head><body>",
            f'<h1>{PRODUCT} is <span class="{kind}">{escape(report["status"])}</span></h1>',
            "<p>It stands between apps and Amazon Bedrock, and keeps what they spend within their budgets.</p>",
            f"<p>Version {escape(report['version'])}, role {escape(report['role'])}: {_ROLES[report['role']]}.</p>",
            f"<h2>What it needs</h2><dl>{''.join(rows)}</dl>" if rows else "",
            f"<h2>What can be asked for here</h2><dl>{''.join(links)}</dl>",
            "</body></html>\n",
        )
    )


def _render_row(name: str, text: str) -> str:
    return f"<dt>{name}</dt><dd>{text}</dd>"
