// Draws how spend grew, each label as a share of its quota, and how it goes on at the present pace.

import { drawn, make, say } from "./elements.js";
import { clock, epoch, percent, usd } from "./format.js";

const MARGIN = { top: 14, right: 14, bottom: 26, left: 46 };
const HEIGHT = 240;
const LEAST_SPAN = 300; // seconds; less would be all steps
const AHEAD = 0.25; // of what is known, for how it goes on
const STEPS = [30, 60, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800];
const ROWS = 12;

// Pure: from what is known to what is drawn.

export function valueAt(points, at) {
  if (at <= points[0][0]) return points[0][1];
  for (let i = 1; i < points.length; i++) {
    const [[t0, v0], [t1, v1]] = [points[i - 1], points[i]];
    if (at < t1) return v0 + ((v1 - v0) * (at - t0)) / (t1 - t0);
  }
  return points.at(-1)[1];
}

export function ticks(start, end, most) {
  const step = STEPS.find((each) => (end - start) / each <= most) ?? STEPS.at(-1);
  const found = [];
  for (let at = Math.ceil(start / step) * step; at <= end; at += step) found.push(at);
  return found;
}

export function frame(course, now, ends) {
  const since = Math.min(...Object.values(course).map((points) => points[0][0]));
  const start = Math.min(since, now - LEAST_SPAN);
  return { start, now, end: Math.min(ends, now + Math.max(LEAST_SPAN / 5, (now - start) * AHEAD)) };
}

export function shares(points, quota, now, spent) {
  const known = points.filter(([at]) => at < now);
  return [...known, [now, Math.max(spent, known.at(-1)?.[1] ?? 0)]].map(([at, micros]) => [at, (micros * 100) / quota]);
}

export function top(series) {
  const most = Math.max(100, ...series.flatMap(({ points }) => points.map(([, share]) => share)));
  return most <= 108 ? 108 : Math.ceil(most / 50) * 50;
}

export const path = (points) => points.map(([x, y], i) => `${i ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");

// What is drawn: the labels with a quota and a course, in the order of the chain.
export function seriesOf(scope, course, now) {
  return scope.labels
    .filter(({ label, quota_usd_micros }) => course[label] && quota_usd_micros > 0)
    .map(({ label, quota_usd_micros: quota, spent_usd_micros: spent }) => ({
      label,
      quota,
      number: numberOf(scope, label),
      points: shares(course[label], quota, now, Number(spent)),
      perHour: scope.pace[label]?.usd_micros_per_hour ?? 0,
    }));
}

export const numberOf = (scope, label) => Math.max(0, [...scope.ordering, ...scope.labels.map((each) => each.label)].indexOf(label)) % 6;

export function chartTold(scope, series, now) {
  const zone = scope.timezone;
  const parts = series.map(({ label, points }) => {
    const [begin, end] = [points[0], points.at(-1)];
    return `${label} from ${percent(Math.floor(begin[1]))} at ${clock(begin[0], now, zone)} to ${percent(Math.floor(end[1]))}`;
  });
  return `Share of each quota that is spent: ${parts.join("; ")}.`;
}

// Drawing.

export function draw(place, scope, course, now) {
  const series = seriesOf(scope, course, now);
  const width = Math.floor(place.clientWidth);
  if (!series.length || width < 100) {
    place.replaceChildren(make("p", { class: "dim" }, "Nothing of it is known yet."));
    return null;
  }
  const { start, end } = frame(course, now, epoch(scope.resets_at));
  const high = top(series);
  const x = (at) => MARGIN.left + ((at - start) / (end - start)) * (width - MARGIN.left - MARGIN.right);
  const y = (share) => HEIGHT - MARGIN.bottom - (share / high) * (HEIGHT - MARGIN.top - MARGIN.bottom);
  const svg = drawn("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, width, height: HEIGHT, role: "img", "aria-label": chartTold(scope, series, now) });
  svg.append(...grid(width, high, x, y, start, end, now, scope.timezone), ...series.flatMap((each) => line(each, x, y, now, end, scope)));
  const rule = drawn("line", { class: "rule", y1: MARGIN.top, y2: HEIGHT - MARGIN.bottom, visibility: "hidden" });
  svg.append(rule);
  place.replaceChildren(svg);
  return { svg, rule, series, start, end, x, width };
}

function grid(width, high, x, y, start, end, now, zone) {
  const found = [];
  for (const share of high <= 110 ? [0, 25, 50, 75, 100] : [0, 50, 100, high]) {
    const at = y(share);
    found.push(drawn("line", { class: share === 100 ? "quota" : "grid", x1: MARGIN.left, x2: width - MARGIN.right, y1: at, y2: at }));
    found.push(drawn("text", { class: "tick", x: MARGIN.left - 8, y: at + 4, "text-anchor": "end" }, percent(share)));
  }
  for (const at of ticks(start, end, Math.max(2, Math.floor(width / 110)))) {
    const place = x(at);
    if (place < MARGIN.left + 14 || place > width - MARGIN.right - 14) continue;
    found.push(drawn("line", { class: "grid", x1: place, x2: place, y1: HEIGHT - MARGIN.bottom, y2: HEIGHT - MARGIN.bottom + 4 }));
    found.push(drawn("text", { class: "tick", x: place, y: HEIGHT - 8, "text-anchor": "middle" }, clock(at, now, zone)));
  }
  found.push(drawn("line", { class: "now", x1: x(now), x2: x(now), y1: MARGIN.top, y2: HEIGHT - MARGIN.bottom }));
  return found;
}

function line({ label, number, points, perHour, quota }, x, y, now, end, scope) {
  const [, last] = points.at(-1);
  const found = [
    drawn("path", { class: `area s${number}`, d: `${path(points.map(([at, share]) => [x(at), y(share)]))}L${x(now).toFixed(1)} ${y(0)}L${x(points[0][0]).toFixed(1)} ${y(0)}Z` }),
    drawn("path", { class: `line s${number}`, d: path(points.map(([at, share]) => [x(at), y(share)])) }),
    drawn("circle", { class: `end s${number}`, cx: x(now), cy: y(last), r: 4 }),
  ];
  const slope = (perHour * 100) / quota / 3600;
  if (label === scope.serves && slope > 0 && last < 100) {
    const full = Math.min(end, now + (100 - last) / slope);
    found.push(drawn("path", { class: `ahead s${number}`, d: path([[x(now), y(last)], [x(full), y(last + slope * (full - now))]]) }));
    if (full < end) found.push(drawn("circle", { class: `full s${number}`, cx: x(full), cy: y(100), r: 4.5 }));
  }
  return found;
}

export function readAt(chart, clientX, scope, now, readout) {
  const box = chart.svg.getBoundingClientRect();
  const share = ((clientX - box.left) * (chart.width / box.width) - MARGIN.left) / (chart.width - MARGIN.left - MARGIN.right);
  const at = Math.min(now, chart.start + share * (chart.end - chart.start));
  if (share < 0 || share > 1 || at < chart.start) return unread(chart, readout);
  chart.rule.setAttribute("x1", chart.x(at));
  chart.rule.setAttribute("x2", chart.x(at));
  chart.rule.setAttribute("visibility", "visible");
  const parts = chart.series.map(({ label, points, quota }) => {
    const found = valueAt(points, at);
    return `${label} ${usd((found * quota) / 100)} (${percent(Math.floor(found))})`;
  });
  return say(readout, `${clock(at, now, scope.timezone)}: ${parts.join(", ")}`);
}

export function unread(chart, readout) {
  chart.rule.setAttribute("visibility", "hidden");
  say(readout, "");
}

export function table(place, scope, course, now) {
  const series = seriesOf(scope, course, now);
  if (!series.length) return place.replaceChildren();
  const start = Math.min(...series.map(({ points }) => points[0][0]));
  const step = (now - start) / (ROWS - 1);
  const times = step > 0 ? Array.from({ length: ROWS }, (_, i) => start + i * step) : [now];
  const head = make("tr", {}, make("th", { scope: "col" }, "By"), ...series.map(({ label }) => make("th", { scope: "col" }, label)));
  const rows = times.map((at) =>
    make("tr", {}, make("th", { scope: "row" }, clock(at, now, scope.timezone)), ...series.map(({ points, quota }) => make("td", {}, usd((valueAt(points, at) * quota) / 100)))),
  );
  return place.replaceChildren(make("thead", {}, head), make("tbody", {}, ...rows));
}
