// Charts over time, as SVG drawn by hand: lines and an area, an optional ceiling, and a cursor for mouse and arrow keys
// whose figures are shown in the legend.

import { h, s } from "./dom.js";
import { axis, clock } from "./format.js";

const LEFT = 62;
const RIGHT = 6;
const TOP = 8;
const BOTTOM = 22;
const MINUTES = [1, 2, 5, 10, 15, 30, 60, 120, 180, 360, 720, 1440];

/** The least 1, 2, 2.5 or 5 times a power of ten that is at least `value`. */
export function roundedUp(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  const step = [1, 2, 2.5, 5, 10].find((factor) => factor * power >= value * (1 - 1e-9));
  return step * power;
}

/** From 0 in three to five even steps to `max` or just beyond. */
export function ticks(max) {
  const step = roundedUp(max / 4);
  return Array.from({ length: Math.ceil(max / step - 1e-9) + 1 }, (_, n) => n * step);
}

/** [[x, y], ...] without a break each: a point without a value breaks a line, and so does a hole in time. */
export function runs(points, key, gapS) {
  const found = [];
  let last = null;
  for (const point of points) {
    const value = point[key];
    if (value === null || value === undefined) {
      last = null;
      continue;
    }
    if (last === null || point.at_s - last > gapS) found.push([]);
    found.at(-1).push([point.at_s, value]);
    last = point.at_s;
  }
  return found;
}

const path = (run, x, y) => run.map(([at, value], n) => `${n ? "L" : "M"}${x(at).toFixed(1)} ${y(value).toFixed(1)}`).join("");

function area(run, x, y) {
  return `${path(run, x, y)}L${x(run.at(-1)[0]).toFixed(1)} ${y(0).toFixed(1)}L${x(run[0][0]).toFixed(1)} ${y(0).toFixed(1)}Z`;
}

export class Chart {
  /**
   * series: [{key, name, kind}], kind "first" (a solid line above an area), "second" (dashed) or "third".
   * max: of the axis where it is fixed; least: where all values are 0; parts: {value, unit} of a value, in numbers for the axis; format: of a value.
   */
  constructor(place, { name, series, format, parts, max = null, least = 1, height = 190, empty = "Nothing has been seen yet." }) {
    Object.assign(this, { name, series, format, parts, max, least, height, empty });
    this.points = [];
    this.gapS = Infinity;
    this.ceiling = null;
    this.cursor = null;
    this.legend = h("div", { class: "legend" });
    this.svg = s("svg", { class: "chart", height, role: "slider", tabindex: 0, "aria-label": name, "aria-orientation": "horizontal" });
    this.nothing = h("p", { class: "empty" }, empty);
    place.replaceChildren(this.legend, this.svg, this.nothing);
    this.svg.addEventListener("pointermove", (event) => this.#point(event));
    this.svg.addEventListener("pointerdown", (event) => this.#point(event));
    this.svg.addEventListener("pointerleave", () => this.#moveTo(null));
    this.svg.addEventListener("blur", () => this.#moveTo(null));
    this.svg.addEventListener("keydown", (event) => this.#key(event));
    new ResizeObserver(() => this.#draw()).observe(this.svg);
  }

  /** points: [{at_s, ...}], oldest first. gapS: a longer hole in them breaks the lines. */
  update(points, gapS, ceiling = null) {
    const at = this.cursor === null ? null : this.points[this.cursor]?.at_s;
    Object.assign(this, { points, gapS, ceiling });
    const found = at === null ? -1 : points.findIndex((point) => point.at_s === at);
    this.cursor = found < 0 ? null : found;
    this.#draw();
  }

  #span() {
    return [this.points[0].at_s, this.points.at(-1).at_s];
  }

  #scales(width) {
    const [from, to] = this.#span();
    const values = this.points.flatMap((point) => this.series.map(({ key }) => point[key] ?? 0));
    const top = this.max ?? Math.max(...values, this.ceiling?.value ?? 0);
    this.levels = ticks(top > 0 ? top : this.least);
    const highest = this.max ?? this.levels.at(-1);
    const [inner, tall] = [width - LEFT - RIGHT, this.height - TOP - BOTTOM];
    return [(at) => LEFT + ((at - from) / Math.max(to - from, 1)) * inner, (value) => TOP + (1 - value / highest) * tall];
  }

  #draw() {
    const width = this.svg.clientWidth;
    const isEmpty = this.points.length < 2;
    this.nothing.hidden = !isEmpty;
    this.svg.classList.toggle("gone", isEmpty);
    this.#legend();
    if (isEmpty || width === 0) return;
    const [x, y] = this.#scales(width);
    this.x = x;
    this.svg.setAttribute("viewBox", `0 0 ${width} ${this.height}`);
    this.svg.replaceChildren(...this.#axes(width, x, y), ...this.#lines(x, y), ...this.#ceilingLine(width, y), ...this.#cursorLine(x, y));
  }

  #axes(width, x, y) {
    const names = axis(this.levels, this.parts);
    const levels = this.levels.flatMap((level, n) => [
      s("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(level), y2: y(level) }),
      s("text", { x: LEFT - 8, y: y(level) + 4, "text-anchor": "end" }, names[n]),
    ]);
    const [from, to] = this.#span();
    const most = Math.max(2, Math.floor((width - LEFT) / 90));
    const step = 60 * (MINUTES.find((minutes) => (to - from) / (minutes * 60) <= most) ?? 1440);
    const zone = new Date(to * 1000).getTimezoneOffset() * 60;
    const times = [];
    for (let at = Math.ceil((from - zone) / step) * step + zone; at <= to; at += step) {
      const anchor = x(at) > width - 24 ? "end" : "middle";
      times.push(s("text", { x: x(at), y: this.height - 5, "text-anchor": anchor }, clock(at, false)));
    }
    return [...levels, ...times];
  }

  #lines(x, y) {
    return this.series.flatMap(({ key, kind }) =>
      runs(this.points, key, this.gapS).flatMap((run) => {
        const line = s("path", { class: `line ${kind}`, d: path(run.length > 1 ? run : [run[0], run[0]], x, y) });
        return kind === "first" && run.length > 1 ? [s("path", { class: "area", d: area(run, x, y) }), line] : [line];
      }),
    );
  }

  #ceilingLine(width, y) {
    if (this.ceiling === null) return [];
    const at = y(this.ceiling.value);
    return [
      s("line", { class: "ceiling", x1: LEFT, x2: width - RIGHT, y1: at, y2: at }),
      s("text", { class: "ceiling-name", x: width - RIGHT, y: at + (at < TOP + 16 ? 15 : -6), "text-anchor": "end" }, this.ceiling.name),
    ];
  }

  #cursorLine(x, y) {
    if (this.cursor === null) return [];
    const point = this.points[this.cursor];
    const at = x(point.at_s);
    const dots = this.series.filter(({ key }) => point[key] !== null && point[key] !== undefined);
    return [
      s("line", { class: "cursor", x1: at, x2: at, y1: TOP, y2: this.height - BOTTOM }),
      ...dots.map(({ key, kind }) => s("circle", { class: `point ${kind}`, cx: at, cy: y(point[key]), r: 3.5 })),
    ];
  }

  #legend() {
    const point = this.cursor === null ? this.points.at(-1) : this.points[this.cursor];
    const entries = this.series.map(({ key, name, kind }) =>
      h("span", null, s("svg", { viewBox: "0 0 16 8", "aria-hidden": "true" }, s("line", { class: `line ${kind}`, x1: 0, x2: 16, y1: 4, y2: 4 })),
        name, h("b", null, point ? this.format(point[key]) : "–")),
    );
    const when = this.cursor === null ? null : h("span", { class: "when" }, clock(point.at_s, true));
    this.legend.replaceChildren(...entries, when ?? "");
    if (this.points.length > 1) this.#describe(point);
  }

  /** For those who hear the chart: how far it reaches, and what the cursor is on. */
  #describe(point) {
    const [from, to] = this.#span();
    const figures = this.series.map(({ key, name }) => `${name} ${this.format(point[key])}`).join(", ");
    const place = this.cursor ?? this.points.length - 1;
    const set = (attribute, value) => this.svg.setAttribute(`aria-${attribute}`, value);
    set("label", `${this.name} from ${clock(from, false)} to ${clock(to, false)}`);
    set("valuemin", 0);
    set("valuemax", this.points.length - 1);
    set("valuenow", place);
    set("valuetext", `${clock(point.at_s, true)}: ${figures}`);
  }

  #point(event) {
    if (this.points.length < 2 || !this.x) return;
    const at = event.clientX - this.svg.getBoundingClientRect().left;
    let best = 0;
    this.points.forEach((point, n) => {
      if (Math.abs(this.x(point.at_s) - at) < Math.abs(this.x(this.points[best].at_s) - at)) best = n;
    });
    this.#moveTo(best);
  }

  #key(event) {
    const last = this.points.length - 1;
    const from = this.cursor ?? last;
    const steps = { ArrowLeft: from - 1, ArrowDown: from - 1, ArrowRight: from + 1, ArrowUp: from + 1, PageDown: from - 10, PageUp: from + 10, Home: 0, End: last };
    if (event.key === "Escape") this.#moveTo(null);
    if (!(event.key in steps) || last < 1) return;
    event.preventDefault();
    this.#moveTo(Math.min(last, Math.max(0, steps[event.key])));
  }

  #moveTo(place) {
    if (place === this.cursor) return;
    this.cursor = place;
    this.#draw();
  }
}

/** A line without axes, of the width of its place, for beside a figure that says it in words. */
export function sparkline(points, key, gapS, max = null) {
  const svg = s("svg", { viewBox: "0 0 100 26", preserveAspectRatio: "none", "aria-hidden": "true" });
  if (points.length < 2) return svg;
  const [from, to] = [points[0].at_s, points.at(-1).at_s];
  const top = max ?? Math.max(...points.map((point) => point[key] ?? 0), Number.MIN_VALUE);
  const x = (at) => ((at - from) / Math.max(to - from, 1)) * 100;
  const y = (value) => 25 - (value / top) * 24;
  for (const run of runs(points, key, gapS).filter((found) => found.length > 1)) {
    svg.append(
      s("path", { class: "area", d: area(run, x, y) }),
      s("path", { class: "line first", "vector-effect": "non-scaling-stroke", d: path(run, x, y) }),
    );
  }
  return svg;
}
