"""What the page shows, as data: the budgets that somebody may see, and one of them in full."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, NamedTuple

from price_keeper.control.page import places
from price_keeper.control.page.happened import happened
from price_keeper.control.page.history import Course
from price_keeper.control.page.outlook import View, figures, pace, reached
from price_keeper.control.page.places import BudgetEntry
from price_keeper.control.parts import ControlServices
from price_keeper.control.selecting import format_selection
from price_keeper.errors import StoreError
from price_keeper.model import PICO_PER_MICRO, Caller, build_client_id
from price_keeper.recording.entries import Counter
from price_keeper.reporting.settings_shown import utc
from price_keeper.selection.overrides import Override
from price_keeper.selection.standing import BudgetState

MOST_DRAWN = 120  # points of a course that a page is sent
AWAY = "the store is away; what is shown is what this process knows"


class Topic(NamedTuple):
    """What a page shows, and of whose: those who show the same share what is found out for it."""

    org: str | None  # whose budgets are listed; all orgs' for the administrator
    app: str | None
    search: str
    after: str
    chosen: tuple[str, str | None] | None  # the one that is shown in full


async def board(services: ControlServices, topic: Topic) -> dict[str, Any]:
    """The parts of a page; of one that the store cannot tell now there is none."""

    async def make() -> dict[str, Any]:
        return await _made(services, topic)

    return await services.page.boards.of(topic, make, services.clock.monotonic())


async def _made(services: ControlServices, topic: Topic) -> dict[str, Any]:
    told: dict[str, Any] = {"trouble": None}
    try:
        told["list"] = await _list(services, topic)
        if topic.chosen is not None:
            told |= await _chosen(services, *topic.chosen)
    except StoreError:
        told["trouble"] = AWAY
    return told


async def _list(services: ControlServices, topic: Topic) -> dict[str, Any]:
    async def find() -> places.BudgetPage:
        if topic.org is not None and topic.app is not None:
            return places.BudgetPage([await places.load_entry(services, topic.org, topic.app)], None)
        return await places.list_budgets(services, topic.org, topic.search, topic.after)

    now = services.clock.monotonic()
    page = await services.page.places.of(topic._replace(chosen=None), find, now)
    rows = await asyncio.gather(*(_row(services, place) for place in page.places))
    return {"rows": rows, "cursor": page.cursor}


async def _row(services: ControlServices, entry: BudgetEntry) -> dict[str, Any]:
    standing, override = await seen(services, entry.org, entry.app)
    plan, view = standing.settings, view_of(services, standing)
    return {
        **entry._asdict(),
        "active_label": plan.ordering[standing.active_index] if plan.ordering else None,
        "serves": standing.find_enforced_label(plan.ordering[0]) if plan.ordering else None,
        "is_overridden": override is not None,
        "is_stale": standing.is_stale,
        "labels": [figures(view, label, quota) for label, quota in view.quotas.items()],
    }


async def _chosen(services: ControlServices, org: str, app: str | None) -> dict[str, Any]:
    async def name() -> BudgetEntry:
        return await places.load_entry(services, org, app)

    now = services.clock.monotonic()
    entry = await services.page.places.of((org, app), name, now)
    standing, override = await seen(services, org, app)
    view = view_of(services, standing)

    async def look() -> list[dict[str, Any]]:
        return await happened(services.store, standing)

    told = await _scope(services, entry, standing, override, view)
    course = {label: _drawn(each) for label, each in view.courses.items()}
    return {
        "scope": told,
        "course": course,
        "happened": await services.page.happened.of((standing.scope, standing.span.key), look, now),
    }


async def _scope(
    services: ControlServices, entry: BudgetEntry, standing: BudgetState, override: Override | None, view: View
) -> dict[str, Any]:
    own = await services.budgets.app_labels.get(_caller(entry.org, entry.app))
    plan = standing.settings
    return {
        **entry._asdict(),
        **format_selection(standing, override, services.labels, own),
        "starts_at": utc(standing.span.start),
        "timezone": plan.zone.key,
        "ordering": list(plan.ordering),
        "is_sticky": plan.is_sticky,
        "serves": standing.find_enforced_label(plan.ordering[0]) if plan.ordering else None,
        "known_since": _since(view),
        "reached": {label: reached(view, label, quota) for label, quota in view.quotas.items()},
        "pace": {label: _pace(view, label) for label in view.quotas},
    }


def _since(view: View) -> str | None:
    return utc(min(course.points[0].at for course in view.courses.values())) if view.courses else None


def _pace(view: View, label: str) -> dict[str, int] | None:
    found = pace(view.courses.get(label), view.now)
    if found is None:
        return None
    return {
        "usd_micros_per_hour": round(found.pico_per_hour / PICO_PER_MICRO),
        "over_seconds": round(found.seconds),
    }


def _drawn(course: Course) -> list[tuple[int, int]]:
    """The last point stands for all the time until it was last seen so."""
    step = -(-len(course.points) // MOST_DRAWN)
    points = [*course.points[::step], course.points[-1]._replace(at=course.seen)]
    return [(round(each.at), each.pico // PICO_PER_MICRO) for each in points]


# How a scope stands.


def _caller(org: str, app: str | None) -> Caller:
    return Caller(org, app, build_client_id(org, app))


async def seen(services: ControlServices, org: str, app: str | None) -> tuple[BudgetState, Override | None]:
    """As its calls would be served by this process. What the totals know of and it does not is looked up soon."""
    standing, override = await services.budgets.read_status(_caller(org, app), forces_read=False)
    now, history = services.clock.now(), services.page.history
    for label in standing.settings.quotas:
        counter, known = _counter(standing, label), standing.get_tracker(label).spent
        course = history.of(*counter[:3])
        if course is not None and course.is_news(known):
            services.budgets.note_spend_elsewhere(counter)
        history.learn(counter, known, now)
    return standing, override


def _counter(standing: BudgetState, label: str) -> Counter:
    return Counter(standing.scope.key, label, standing.span.key, standing.settings.shards)


def view_of(services: ControlServices, standing: BudgetState) -> View:
    plan = standing.settings
    quotas: Mapping[str, int] = plan.quotas
    return View(
        ordering=plan.ordering,
        quotas=quotas,
        spent={label: max(0, standing.get_tracker(label).spent) for label in quotas},
        active=standing.active_index,
        is_sticky=plan.is_sticky,
        tight_pct=plan.tight_pct,
        courses=services.page.history.courses(standing.scope.key, standing.span.key, quotas),
        now=services.clock.now(),
        ends=standing.span.end,
    )
